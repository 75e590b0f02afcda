"""The family by matrix products: a sequence is cut into chunks of C tokens, and inside a chunk nothing runs token by token.

With G the inclusive running sum of g inside a chunk, k_i the keys, S the state that enters the chunk, and

    A[i,j] = <k_i, exp(G_i - G_j) k_j>  (j < i)        P[i,j] = <q_i, exp(G_i - G_j) k_j>  (j <= i)
    k_down = exp(G) k     q_down = exp(G) q     k_up = exp(G_last - G) k

the corrections X of all C tokens solve one unit lower-triangular system, and the rest is products:

    (I + diag(beta) A) X = diag(beta) (v - k_down S)
    o = q_down S + P X          S <- exp(G_last) S + k_up^T X

Every exponential has an exponent <= 0 or inside +-SAFE_SPAN/2, so nothing overflows however strong the decay. The inverse
of I + diag(beta) A comes from forward substitution: its entries are bounded by the write strength, while the powers that
a Neumann series would sum are not (they explode for repeated keys).

Memory is O(T): inputs, three [C,C] matrices a chunk and one state a chunk are kept for the backward pass, which is written
out below; everything else lives for one group of chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

# Nats of decay that a tile may span and still be split as (rows e^{G-mid}) (columns e^{mid-G}): e^{+-30} is far from both
# ends of float32, and the products that matter keep their full precision.
SAFE_SPAN = 60.0
# Chunk matrices (chunks times heads) worked on together: enough to fill a batched product, few enough to stay in cache.
GROUP = 128


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    lengths: list[int] | None,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """The same function as `reference.recurrence`, with the same arguments, in chunks of `chunk_size` tokens.

    `chunk_size` is rounded up to a power of two, and shrinks to the longest document.
    """
    layout = _Layout.of(q, lengths, chunk_size)
    if not layout.counts:
        return torch.zeros_like(v), state.clone()
    parts = [layout.to_chunks(x) for x in (q, k, v)]
    gate = None if g is None else layout.to_chunks(g)
    strength = None if beta is None else layout.to_chunks(beta.unsqueeze(-1))
    entering = state if layout.order is None else state[layout.order]
    o, final = _Chunks.apply(*parts, gate, strength, entering, layout.counts)  # type: ignore[misc]
    if layout.order is not None:
        final = final[layout.order.argsort()]
    return layout.from_chunks(o), final


@dataclass(frozen=True)
class _Layout:
    """How tokens map to chunks. Chunks are ordered by step (their index inside the document), then by document, longest
    document first, so that step j works on the first counts[j] documents and its chunks lie side by side."""

    chunk: int
    counts: list[int]  # documents that reach step j
    shape: tuple[int, int]  # B, T of the token tensors
    order: Tensor | None = None  # packed: documents from longest to shortest
    source: Tensor | None = None  # packed: token of each chunk row, T where the row is padding
    target: Tensor | None = None  # packed: chunk row of each token

    @classmethod
    def of(cls, q: Tensor, lengths: list[int] | None, chunk_size: int) -> _Layout:
        batch, tokens = q.shape[:2]
        longest = tokens if lengths is None else max(lengths, default=0)
        chunk = 1 << (min(chunk_size, max(longest, 1)) - 1).bit_length()
        if lengths is None:
            return cls(chunk, [batch] * (-(-tokens // chunk) if batch else 0), (batch, tokens))
        order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        counts, source = [], []
        for step in range(-(-longest // chunk)):
            active = [row for row in order if lengths[row] > step * chunk]
            counts.append(len(active))
            for row in active:
                first = starts[row] + step * chunk
                source.append(
                    torch.arange(first, first + chunk).masked_fill_(
                        torch.arange(first, first + chunk) >= starts[row + 1], tokens
                    )
                )
        if not counts:
            return cls(chunk, [], (batch, tokens))
        rows = torch.cat(source).to(q.device)
        target = torch.empty(tokens + 1, dtype=torch.long, device=q.device)
        target[rows] = torch.arange(rows.numel(), device=q.device)
        return cls(chunk, counts, (batch, tokens), torch.tensor(order, device=q.device), rows, target[:tokens])

    def to_chunks(self, x: Tensor) -> Tensor:
        """[B,T,H,D] -> [chunks,H,C,D], zeros in the padding."""
        batch, tokens, heads, channels = x.shape
        if self.source is None:
            steps = len(self.counts)
            x = F.pad(x, (0, 0, 0, 0, 0, steps * self.chunk - tokens)) if steps * self.chunk != tokens else x
            x = x.view(batch, steps, self.chunk, heads, channels).permute(1, 0, 3, 2, 4)
            return x.reshape(steps * batch, heads, self.chunk, channels)
        x = torch.cat([x[0], x.new_zeros(1, heads, channels)])[self.source]
        return x.view(-1, self.chunk, heads, channels).transpose(1, 2).contiguous()

    def from_chunks(self, x: Tensor) -> Tensor:
        """[chunks,H,C,D] -> [B,T,H,D]."""
        chunks, heads, _, channels = x.shape
        batch, tokens = self.shape
        if self.target is None:
            x = x.view(chunks // batch, batch, heads, self.chunk, channels).permute(1, 0, 3, 2, 4)
            return x.reshape(batch, -1, heads, channels)[:, :tokens]
        return x.transpose(1, 2).reshape(-1, heads, channels)[self.target].unsqueeze(0)


# --------------------------------------------------------------------------------------- scores with decay, and their backward


def _tile(decay: Tensor) -> int:
    """The largest power-of-two tile along the chunk whose decay spans at most SAFE_SPAN nats in every channel."""
    size = decay.shape[-2]
    while size > 1:
        tiles = decay.unflatten(-2, (-1, size))
        if bool((tiles[..., 0, :] - tiles[..., -1, :]).amax() <= SAFE_SPAN):
            return size
        size //= 2
    return 1


def _after(g: Tensor) -> Tensor:
    """The sum of g over the later rows: [...,C,K] -> [...,C,K]. Summed from the end: G_last - G would lose its digits."""
    return F.pad(g[..., 1:, :].flip(-2).cumsum(-2).flip(-2), (0, 0, 0, 1))


def _levels(g: Tensor, tile: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """The blocks that cover the strictly lower triangle: (rows, row factor, column factor).

    First tile-sized diagonal blocks, split around their middle row; then, for each h = tile, 2 tile, ..., C/2, the block of
    the second h rows against the first h columns, split around the last of those columns: both exponents are <= 0.
    Factors are [X, blocks, rows, K]. Sums start anew in every block, so that a strong decay elsewhere costs no digits.
    """
    if tile > 1:
        local = g.unflatten(-2, (-1, tile)).cumsum(-2)
        middle = local[..., tile // 2, None, :]
        yield 0, (local - middle).exp(), (middle - local).exp()
    half = tile
    while half < g.shape[-2]:
        blocks = g.unflatten(-2, (-1, 2 * half))
        yield half, blocks[..., half:, :].cumsum(-2).exp(), _after(blocks[..., :half, :]).exp()
        half *= 2


def _blocks(x: Tensor, half: int, tile: int, part: int) -> Tensor:
    """Rows (part 1) or columns (part 0) of every block of a level: [X,C,D] -> [X,blocks,h,D]; a view."""
    if half == 0:
        return x.unflatten(-2, (-1, tile))
    halves = x.unflatten(-2, (-1, 2 * half))
    return halves[..., half:, :] if part else halves[..., :half, :]


def _square(scores: Tensor, half: int, tile: int) -> Tensor:
    """The [X,blocks,h,h] corner of the [X,C,C] matrix that a level fills; a view."""
    width = 2 * half if half else tile
    blocks = scores.unflatten(-1, (-1, width)).unflatten(-3, (-1, width)).diagonal(dim1=-4, dim2=-2)
    corner = blocks[..., half:, :half, :] if half else blocks
    return corner.movedim(-1, -3)


def _scores(rows: Tensor, k: Tensor, g: Tensor | None, tile: int) -> Tensor:
    """<rows_i, exp(G_i - G_j) k_j> for j < i, zero elsewhere. rows and k [X,C,K], g [X,C,K or 1] -> [X,C,C]."""
    if g is None:
        return (rows @ k.mT).tril_(-1)
    if g.shape[-1] == 1:
        return (rows @ k.mT).mul_(_scalar_factor(g)).tril_(-1)
    out = rows.new_zeros(*rows.shape[:-1], rows.shape[-2])
    for half, row_factor, column_factor in _levels(g, tile):
        block = (_blocks(rows, half, tile, 1) * row_factor) @ (_blocks(k, half, tile, 0) * column_factor).mT
        _square(out, half, tile).copy_(block.tril_(-1) if half == 0 else block)
    return out


def _scalar_factor(g: Tensor) -> Tensor:
    """exp(G_i - G_j) for j < i, one elsewhere: g [X,C,1] -> [X,C,C]. Every column sums from its own row on."""
    return g.expand(-1, -1, g.shape[-2]).tril(-1).cumsum(-2).exp_()


class _ScoreGrad(NamedTuple):
    rows: list[Tensor]  # one for each set of rows, [X,C,K]
    k: Tensor
    decay: Tensor | None  # [X,C,K or 1]


def _scores_backward(grads: list[Tensor], rows: list[Tensor], k: Tensor, g: Tensor | None, tile: int) -> _ScoreGrad:
    """Backward of `_scores` for several sets of rows against the same keys; grads are strictly lower triangular."""
    if g is None or g.shape[-1] == 1:
        factor = None if g is None else _scalar_factor(g)
        plain = grads if factor is None else [grad * factor for grad in grads]
        d_rows = [grad @ k for grad in plain]
        d_k = sum((grad.mT @ row for grad, row in zip(plain, rows, strict=True)), torch.zeros_like(k))
        d_decay = None
        if g is not None:
            flow = sum((grad * (row @ k.mT) for grad, row in zip(plain, rows, strict=True)), torch.zeros_like(plain[0]))
            d_decay = flow.sum(-1, keepdim=True) - flow.sum(-2).unsqueeze(-1)
        return _ScoreGrad(d_rows, d_k, d_decay)
    d_rows = [torch.zeros_like(row) for row in rows]
    d_k = torch.zeros_like(k)
    for half, row_factor, column_factor in _levels(g, tile):
        columns = _blocks(k, half, tile, 0) * column_factor
        d_columns = torch.zeros_like(columns)
        for grad, row, d_row in zip(grads, rows, d_rows, strict=True):
            corner = _square(grad, half, tile)
            _blocks(d_row, half, tile, 1).add_((corner @ columns).mul_(row_factor))
            d_columns += corner.mT @ (_blocks(row, half, tile, 1) * row_factor)
        _blocks(d_k, half, tile, 0).add_(d_columns.mul_(column_factor))
    # The exponent of every term is G_i - G_j, so its gradient is the term itself, once with each sign.
    d_decay = sum((row * d_row for row, d_row in zip(rows, d_rows, strict=True)), -(k * d_k))
    return _ScoreGrad(d_rows, d_k, d_decay)


# -------------------------------------------------------------------------------------------------------- one group of chunks


class _Decayed(NamedTuple):
    """Keys and queries as seen from the two ends of their chunk, and what the whole chunk leaves of the state."""

    tile: int
    down: Tensor | None  # exp(G) [X,C,K or 1]
    up: Tensor | None  # exp(G_last - G) [X,C,K or 1]
    k_down: Tensor
    q_down: Tensor
    k_up: Tensor
    keep: Tensor | None  # exp(G_last) [X,K or 1,1]


def _decayed(q: Tensor, k: Tensor, g: Tensor | None) -> _Decayed:
    if g is None:
        return _Decayed(1, None, None, k, q, k, None)
    decay = g.cumsum(-2)
    tile = _tile(decay) if decay.shape[-1] > 1 else 1
    down, up = decay.exp_(), _after(g).exp_()
    return _Decayed(tile, down, up, k * down, q * down, k * up, down[..., -1, :].unsqueeze(-1))


def _groups(counts: list[int], heads: int) -> list[tuple[int, int, list[slice]]]:
    """Runs of steps that are worked on together: (first row, last row + 1, rows of each step inside the run)."""
    groups: list[tuple[int, int, list[slice]]] = []
    start, steps, at = 0, [], 0
    for count in counts:
        rows = count * heads
        if steps and at + rows > GROUP:
            groups.append((start, start + at, steps))
            start, steps, at = start + at, [], 0
        steps.append(slice(at, at + rows))
        at += rows
    groups.append((start, start + at, steps))
    return groups


class _Chunks(torch.autograd.Function):
    """q, k [M,HV,C,K], v [M,HV,C,V], g [M,HV,C,K or 1] or None, beta [M,HV,C,1] or None, state [N,HV,K,V] -> o, state."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Any, beta: Any, state: Tensor, counts: Any) -> Any:
        heads, chunk = q.shape[1], q.shape[2]
        flat = [None if x is None else x.flatten(0, 1) for x in (q, k, v, g, beta)]
        rows, needs_grad = flat[0].shape[0], any(ctx.needs_input_grad)  # type: ignore[union-attr]
        out = torch.empty_like(flat[2])  # type: ignore[arg-type]
        running = state.flatten(0, 1).clone()
        kept = [v.new_empty(rows, chunk, chunk) for _ in range(1 if beta is None else 3)] if needs_grad else []
        states = v.new_empty(rows, *running.shape[1:]) if needs_grad else None
        updates = torch.empty_like(out) if needs_grad and beta is not None else None
        for first, last, steps in _groups(counts, heads):
            part = [None if x is None else x[first:last] for x in flat]
            entering = None if states is None else states[first:last]
            matrices, x = _forward_group(*part, running, steps, out[first:last], entering)  # type: ignore[arg-type]
            for store, matrix in zip(kept, matrices, strict=False):
                store[first:last] = matrix
            if updates is not None:
                updates[first:last] = x
        if needs_grad:
            ctx.save_for_backward(q, k, v, g, beta, states, updates, *kept)
            ctx.counts = counts
        return out.view_as(v), running.view_as(state)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        # Called inside the caller's autocast region, where products would be taken in 16 bits.
        with torch.autocast(grads[0].device.type, enabled=False):
            return _Chunks.gradients(ctx, *grads)

    @staticmethod
    def gradients(ctx: Any, *grads: Tensor) -> Any:
        d_out, d_final = grads
        q, k, v, g, beta, states, updates, *kept = ctx.saved_tensors
        heads = q.shape[1]
        flat = [None if x is None else x.flatten(0, 1) for x in (q, k, v, g, beta)]
        results = [None if x is None else torch.empty_like(x) for x in flat]
        d_out = d_out.reshape_as(flat[2])  # type: ignore[arg-type]
        running = d_final.flatten(0, 1).clone()
        for first, last, steps in reversed(_groups(ctx.counts, heads)):
            window = slice(first, last)
            part = [None if x is None else x[window] for x in flat]
            x = part[2] if updates is None else updates[window]
            matrices = [matrix[window] for matrix in kept]
            pieces = _backward_group(*part, matrices, x, states[window], d_out[window], running, steps)  # type: ignore
            for result, piece in zip(results, pieces, strict=True):
                if result is not None:
                    result[window] = piece
        shaped = [None if r is None else r.view_as(x) for r, x in zip(results, (q, k, v, g, beta), strict=True)]
        return (*shaped, running.view(-1, heads, *running.shape[1:]), None)


def _forward_group(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    running: Tensor,
    steps: list[slice],
    out: Tensor,
    entering: Tensor | None,
) -> tuple[list[Tensor], Tensor]:
    """Fills `out` and (if kept) the states that enter each chunk; moves `running` to the end of the group.

    Returns the matrices that the backward pass needs, [P] or [P, A, (I + diag(beta) A)^-1], and X.
    """
    seen = _decayed(q, k, g)
    reads = _scores(q, k, g, seen.tile)
    reads.diagonal(dim1=-2, dim2=-1).copy_((q * k).sum(-1))
    matrices, x = [reads], v
    if beta is None:
        probes = seen.q_down
    else:
        overlaps = _scores(k, k, g, seen.tile)
        inverse = _unit_lower_inverse(overlaps * beta)
        matrices += [overlaps, inverse]
        solve = inverse * beta.mT
        x = solve @ v
        probes = torch.cat([solve @ seen.k_down, seen.q_down], -2)
    size = q.shape[-2]
    for step in steps:
        memory = running[: step.stop - step.start]
        if entering is not None:
            entering[step] = memory
        read = probes[step] @ memory
        if beta is not None:
            x[step] -= read[:, :size]
        out[step] = read[:, -size:]
        if seen.keep is not None:
            memory *= seen.keep[step]
        memory.baddbmm_(seen.k_up[step].mT, x[step])
    out.baddbmm_(reads, x)
    return matrices, x


def _unit_lower_inverse(lower: Tensor) -> Tensor:
    """(I + strict lower part)^-1 by forward substitution. [X,C,C]; the diagonal and above are ignored."""
    identity = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device).expand_as(lower)
    return torch.linalg.solve_triangular(lower, identity, upper=False, unitriangular=True)


def _backward_group(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    matrices: list[Tensor],
    x: Tensor,
    entering: Tensor,
    d_out: Tensor,
    running: Tensor,
    steps: list[slice],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of one group of chunks. `running` is the gradient of the state, moved from the group's end to its start."""
    seen = _decayed(q, k, g)
    reads = matrices[0]
    d_x = reads.mT @ d_out
    d_after = torch.empty_like(entering)  # gradient of the state that leaves each chunk
    solve = None if beta is None else matrices[2] * beta.mT
    probes = None if solve is None else solve @ seen.k_down
    for step in reversed(steps):
        memory = running[: step.stop - step.start]
        d_after[step] = memory
        d_x[step].baddbmm_(seen.k_up[step], memory)
        if seen.keep is not None:
            memory *= seen.keep[step]
        memory.baddbmm_(seen.q_down[step].mT, d_out[step])
        if probes is not None:
            memory.baddbmm_(probes[step].mT, d_x[step], alpha=-1)
    d_reads = (d_out @ x.mT).tril_()
    d_diagonal = d_reads.diagonal(dim1=-2, dim2=-1).unsqueeze(-1).clone()
    d_reads.tril_(-1)
    d_q_down = d_out @ entering.mT
    d_k_up = x @ d_after.mT
    rows, row_grads, d_k_down, d_v, d_beta = [q], [d_reads], None, d_x, None
    if beta is not None:
        overlaps, inverse = matrices[1:]
        adjoint = inverse.mT @ d_x
        d_v = adjoint * beta
        d_overlaps = (adjoint @ x.mT).neg_().tril_(-1)
        missing = torch.baddbmm(v, seen.k_down, entering, alpha=-1)
        d_beta = (adjoint * missing).sum(-1, keepdim=True) + (d_overlaps * overlaps).sum(-1, keepdim=True)
        d_k_down = (d_v @ entering.mT).neg_()
        rows, row_grads = [q, k], [d_reads, d_overlaps.mul_(beta)]
    scores = _scores_backward(row_grads, rows, k, g, seen.tile)
    d_q, d_k = scores.rows[0] + d_diagonal * k, scores.k + d_diagonal * q
    if beta is not None:
        d_k += scores.rows[1]
    if seen.down is None or seen.up is None:
        d_k += d_k_up if d_k_down is None else d_k_up + d_k_down
        return d_q + d_q_down, d_k, d_v, None, d_beta
    d_g = _gate_backward(seen, scores.decay, d_q_down, d_k_down, d_k_up, entering, d_after)
    d_q += d_q_down * seen.down
    if d_k_down is not None:
        d_k += d_k_down * seen.down
    d_k += d_k_up * seen.up
    return d_q, d_k, d_v, d_g, d_beta


def _gate_backward(
    seen: _Decayed,
    d_decay: Tensor | None,
    d_q_down: Tensor,
    d_k_down: Tensor | None,
    d_k_up: Tensor,
    entering: Tensor,
    d_after: Tensor,
) -> Tensor:
    """Gradient of g from every exponent it enters: G of the row it stands in and of later rows, the whole chunk's in `keep`,
    and in `up` that of earlier rows. The gradient of an exponential's exponent is the term itself.

    The two kinds are summed in their own directions: as one difference, strong decay would leave rounding noise.
    """
    flow = seen.q_down * d_q_down
    if d_k_down is not None:
        flow += seen.k_down * d_k_down
    flow[..., -1, :] += seen.keep.squeeze(-1) * (entering * d_after).sum(-1)  # type: ignore[union-attr]
    rise = seen.k_up * d_k_up
    if seen.down is not None and seen.down.shape[-1] == 1:
        flow, rise = flow.sum(-1, keepdim=True), rise.sum(-1, keepdim=True)
    if d_decay is not None:
        flow += d_decay
    return flow.flip(-2).cumsum(-2).flip(-2) + F.pad(rise[..., :-1, :].cumsum(-2), (0, 0, 1, 0))
