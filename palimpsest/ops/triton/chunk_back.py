"""Gradients of the whole family, second half: q, k and the gate, all chunks at once, from what `backward` left of each.

With S the state that enters a chunk, D the gradient of the one that leaves it, and a prime for a gradient,

    q_down' = o' S^T    k_down' = -beta Y S^T    k_up' = X D^T    exp(G_last)' = sum over value channels of S D

and these with P' and A' go back through decays, gate and norms. A vector gate has its products with states in a kernel of their
own, which works at the speed of memory; what they are multiplied by afterwards would leave it no registers for that. The
gradient of an exponential's exponent is the term itself, so the gate's gradient is sums of x x' over rows. q is meant before
its scale, which is in P' and q_down'.
"""

from __future__ import annotations

import triton
import triton.language as tl

from palimpsest.ops.triton.gates import (
    BEFORE,
    CHUNK,
    FROM_HERE,
    LN2,
    MIDDLE,
    SAFE,
    belongs,
    chunk_of,
    dot,
    dot_add,
    from_pivot,
    log_decay,
    table_sums,
)


@triton.jit
def through_states(
    d_o, x, adjoint, entering, leaving, live, c, stride_x,
    VALUE_HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    GATED: tl.constexpr, ERASE: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """o' S^T, Y S^T and x D^T of channels c of one chunk, [64,BK] each, and the sums of S D over value channels [BK]."""
    i = tl.arange(0, CHUNK)[:, None]
    read, erased, written = (
        tl.zeros([CHUNK, BK], tl.float32),
        tl.zeros([CHUNK, BK], tl.float32),
        tl.zeros([CHUNK, BK], tl.float32),
    )
    kept = tl.zeros([BK], tl.float32)
    for at in range(0, V, BV):
        n = (at + tl.arange(0, BV))[None, :]
        wide = live[:, None] & (n < V)
        cell, inside = c[:, None] * V + n, (c < K)[:, None] & (n < V)
        before, after = tl.load(entering + cell, mask=inside, other=0.0), tl.load(leaving + cell, mask=inside, other=0.0)
        d_out = tl.load(d_o + (i * (VALUE_HEADS * V) + n), mask=wide, other=0.0)
        new = tl.load(x + (i * stride_x + n), mask=wide, other=0.0)
        read = dot_add(d_out, tl.trans(before), read, DT)
        if ERASE:
            erased = dot_add(tl.load(adjoint + (i * V + n), mask=wide, other=0.0), tl.trans(before), erased, DT)
        written = dot_add(new, tl.trans(after), written, DT)
        if GATED:
            kept += tl.sum(before.to(tl.float32) * after.to(tl.float32), 1)
    return read, erased, written, kept


@triton.jit(do_not_specialize=["tokens", "chunks"])
def states_back(
    d_o, updates, adjoint, entering, leaving, rows, q_down, k_down, k_up, keep, bounds,
    tokens, chunks, scale,
    VALUE_HEADS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    PACKED: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """BK key channels of one chunk of one value head with a vector gate: gradients of q_down, k_down and k_up in their place, and
    in that of keep = exp(G_last) the part of G_last's gradient that comes through it."""
    block, head, slot = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, count = chunk_of(slot, bounds, tokens, chunks, PACKED)
    place = slot.to(tl.int64) * VALUE_HEADS + head
    i, c = tl.arange(0, CHUNK), block * BK + tl.arange(0, BK)
    beta = tl.load(rows + place * 3 * CHUNK + i)[:, None]
    held = place * CHUNK * V
    state = place * K * V
    read, erased, written, kept = through_states(
        d_o + (start * VALUE_HEADS + head) * V, updates + held, adjoint + held, entering + state, leaving + state,
        i < count, c, V, VALUE_HEADS, K, V, BK, BV, True, True, DT,
    )  # fmt: skip
    out = place * CHUNK * KP + (i[:, None] * KP + c[None, :])
    tl.store(q_down + out, (scale * read).to(DT))
    tl.store(k_down + out, (-beta * erased).to(DT))
    tl.store(k_up + out, (beta * written).to(DT))
    keep += place * KP + c
    tl.store(keep, kept * tl.load(keep))


@triton.jit
def pull(d_p, d_a, d_q, d_row, d_column, q, k, up, down, DT: tl.constexpr):
    """Adds what masked P' and A' give to q, to k as a row and to k as a column, where row factors are `up`, column factors
    `down`. q, k [64,BK]."""
    columns, queries = (k * down).to(DT), (q * up).to(DT)
    back = dot(tl.trans(d_p), queries, DT)
    d_q += up * dot(d_p, columns, DT)
    back = dot_add(tl.trans(d_a), k * up, back, DT)
    d_row += up * dot(d_a, columns, DT)
    return d_q, d_row, d_column + down * back


@triton.jit(do_not_specialize=["tokens", "chunks"])
def chunk_back_vector(
    q, k, g, a_log, bias, total, q_down, k_down, k_up, keep, rows, d_reads, d_overlaps, along,
    d_q, d_k, d_g, d_bias, d_rate, table, bounds,
    tokens, chunks, stride_q, stride_k, stride_g, lower_bound,
    HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BK: tl.constexpr,
    GATE: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, PACKED: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """BK key channels of one chunk of one value head: gradients of q, k and g, and this chunk's part of those of the gate's bias
    and rate. `total` as `gates.running_sums` leaves it, q_down and its like as `states_back` does."""
    block, head, slot = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, count = chunk_of(slot, bounds, tokens, chunks, PACKED)
    place = slot.to(tl.int64) * VALUE_HEADS + head
    i, c = tl.arange(0, CHUNK), block * BK + tl.arange(0, BK)
    row, column = i[:, None], i[None, :]
    mask = (i < count)[:, None] & (c < K)[None, :]
    key_head = head // (VALUE_HEADS // HEADS)
    rows += place * 3 * CHUNK + i
    r_q, r_k = tl.load(rows + CHUNK)[:, None], tl.load(rows + 2 * CHUNK)[:, None]
    x_q = tl.load(q + (start * stride_q + key_head * K) + (row * stride_q + c[None, :]), mask=mask, other=0.0)
    x_k = tl.load(k + (start * stride_k + key_head * K) + (row * stride_k + c[None, :]), mask=mask, other=0.0)
    square = place * CHUNK * CHUNK + (row * CHUNK + column)
    d_p, d_a = tl.load(d_reads + square), tl.load(d_overlaps + square)
    held = place * CHUNK * KP + (row * KP + c[None, :])
    d_row_q, d_row_k = tl.load(q_down + held), tl.load(k_down + held)
    total += place * CHUNK * KP
    x_q, x_k = x_q.to(tl.float32) * r_q, x_k.to(tl.float32) * r_k
    weight = tl.exp2(tl.load(total + (row * KP + c[None, :])).to(tl.float32))
    total_q, total_k = weight * d_row_q, weight * d_row_k
    d_column = tl.zeros([CHUNK, BK], tl.float32)
    offset = from_pivot(total, MIDDLE, c, KP)
    safe = tl.max(tl.abs(offset)) <= SAFE
    if safe:
        inside = belongs(i, MIDDLE)
        p, a = tl.where(inside, d_p, 0.0).to(DT), tl.where(inside, d_a, 0.0).to(DT)
        total_q, total_k, d_column = pull(p, a, total_q, total_k, d_column, x_q, x_k, tl.exp2(offset), tl.exp2(-offset), DT)
    for level in range(tl.where(safe, 5, 0), 6):
        inside = belongs(i, level)
        p, a = tl.where(inside, d_p, 0.0).to(DT), tl.where(inside, d_a, 0.0).to(DT)
        up = tl.exp2(-tl.abs(from_pivot(total, level, c, KP)))
        total_q, total_k, d_column = pull(p, a, total_q, total_k, d_column, x_q, x_k, up, up, DT)
    # Terms up to the end of the chunk count for every row before theirs, those of k_up for every row after: as one difference
    # the two sums would lose their digits.
    d_log = table_sums(table, FROM_HERE, x_q * total_q + x_k * (total_k - d_column), DT)
    last = tl.load(total + (CHUNK - 1) * KP + c)
    rise = tl.load(k_up + held) * tl.exp2((last[None, :] - tl.load(total + (row * KP + c[None, :]))).to(tl.float32))
    d_log += table_sums(table, BEFORE, x_k * rise, DT) + tl.load(keep + place * KP + c)[None, :]
    d_log = tl.where(mask, d_log, 0.0)
    # A row's own key does not decay: it must leave no rounding noise in the gradient of the decay.
    diagonal = tl.sum(tl.where(row == column, d_p, 0.0).to(tl.float32), 1)[:, None]
    total_q += diagonal * x_k
    total_k += d_column + rise + diagonal * x_q
    if NORM:
        along += place * 2 * CHUNK + i
        total_q -= x_q * tl.load(along)[:, None]
        total_k -= x_k * tl.load(along + CHUNK)[:, None]
    out = (start * VALUE_HEADS + head) * K + (row * (VALUE_HEADS * K) + c[None, :])
    tl.store(d_q + out, (total_q * r_q).to(d_q.dtype.element_ty), mask=mask)
    tl.store(d_k + out, (total_k * r_k).to(d_k.dtype.element_ty), mask=mask)
    rate = 1.0
    if GATE > 1:
        rate = tl.exp(tl.load(a_log + head).to(tl.float32))
    raw = tl.load(g + (start * stride_g + head * K) + (row * stride_g + c[None, :]), mask=mask, other=0.0).to(tl.float32)
    if BIAS:
        raw += tl.load(bias + head * K + c, mask=c < K, other=0.0).to(tl.float32)[None, :]
    d_raw, part = gate_back(raw, d_log, rate, lower_bound, GATE)
    tl.store(d_g + out, d_raw.to(d_g.dtype.element_ty), mask=mask)
    if BIAS:
        tl.store(d_bias + place * K + c, tl.sum(d_raw, 0), mask=c < K)
    if GATE > 1:
        tl.store(d_rate + place * (KP // BK) + block, tl.sum(tl.sum(part, 1), 0))


@triton.jit(do_not_specialize=["tokens", "chunks"])
def chunk_back_scalar(
    q, k, v, total, d_o, updates, adjoint, entering, leaving, rows, d_reads, d_overlaps, along, d_q, d_k, d_g, bounds,
    tokens, chunks, all_tokens, stride_q, stride_k, stride_v, scale,
    HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BK: tl.constexpr,
    V: tl.constexpr, BV: tl.constexpr, GATED: tl.constexpr, NORM: tl.constexpr, ERASE: tl.constexpr, PACKED: tl.constexpr,
    DT: tl.constexpr,
):  # fmt: skip
    """BK key channels of one chunk of one value head with one gate per head, or none: gradients of q and k, and of the log decay
    one part [all_tokens,HV] for every block of channels. Decays and norms are factors of rows and of pairs."""
    block, head, slot = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, count = chunk_of(slot, bounds, tokens, chunks, PACKED)
    place = slot.to(tl.int64) * VALUE_HEADS + head
    i, c = tl.arange(0, CHUNK), block * BK + tl.arange(0, BK)
    row, column = i[:, None], i[None, :]
    live = i < count
    mask = live[:, None] & (c < K)[None, :]
    key_head = head // (VALUE_HEADS // HEADS)
    rows += place * 6 * CHUNK + i
    x, stride_x = v + start * stride_v + head * V, stride_v
    if ERASE:
        x, stride_x = updates + place * CHUNK * V, V
        adjoint += place * CHUNK * V
    state = place * K * V
    total_q, total_k, rise, kept = through_states(
        d_o + (start * VALUE_HEADS + head) * V, x, adjoint, entering + state, leaving + state,
        live, c, stride_x, VALUE_HEADS, K, V, BK, BV, GATED, ERASE, DT,
    )  # fmt: skip
    r_q, r_k = tl.load(rows + 4 * CHUNK), tl.load(rows + 5 * CHUNK)
    x_q = tl.load(q + (start * stride_q + key_head * K) + (row * stride_q + c[None, :]), mask=mask, other=0.0)
    x_k = tl.load(k + (start * stride_k + key_head * K) + (row * stride_k + c[None, :]), mask=mask, other=0.0)
    square = place * CHUNK * CHUNK + (row * CHUNK + column)
    p = tl.load(d_reads + square).to(tl.float32)
    a = p
    if ERASE:
        a = tl.load(d_overlaps + square).to(tl.float32)
        beta = tl.load(rows)[:, None]
        total_k *= -beta
        rise *= beta
    total_q *= scale
    if GATED:
        total += place * CHUNK
        here, last = tl.load(total + i), tl.load(total + CHUNK - 1)
        weight = tl.exp2(tl.minimum((here[:, None] - here[None, :]).to(tl.float32), 0.0))
        down = tl.exp2(here.to(tl.float32))
        total_q *= down[:, None]
        total_k *= down[:, None]
        rise *= tl.exp2((last - here).to(tl.float32))[:, None]
        p *= weight
        a *= weight
        # The gradient of an exponent is the term itself. A pair counts for the rows after its column, up to its row; a row's own
        # key does not decay.
        columns = tl.trans(x_k)
        pairs = dot(x_q, columns, DT) * p * r_q[:, None]
        if ERASE:
            pairs += dot(x_k, columns, DT) * a * r_k[:, None]
        pairs = tl.where(row > column, pairs * r_k[None, :], 0.0)
        d_from = tl.sum(x_q.to(tl.float32) * total_q, 1) * r_q + tl.sum(pairs, 1)
        if ERASE:
            d_from += tl.sum(x_k.to(tl.float32) * total_k, 1) * r_k
        d_before = tl.sum(x_k.to(tl.float32) * rise, 1) * r_k
        d_log = tl.sum(tl.where(row >= column, d_from[:, None], d_before[:, None]), 0)
        d_log -= tl.sum(tl.where(column >= row, tl.sum(pairs, 0)[None, :], 0.0), 1)
        d_log += tl.sum(kept, 0) * tl.exp2(last.to(tl.float32))
        out = (block.to(tl.int64) * all_tokens + start) * VALUE_HEADS + head + i * VALUE_HEADS
        tl.store(d_g + out, d_log, mask=live)
    total_q = dot_add(p * r_k[None, :], x_k, total_q, DT)
    rise = dot_add(tl.trans((p * r_q[:, None]).to(DT)), x_q, rise, DT)
    if ERASE:
        total_k = dot_add(a * r_k[None, :], x_k, total_k, DT)
        rise = dot_add(tl.trans((a * r_k[:, None]).to(DT)), x_k, rise, DT)
    total_k += rise
    if NORM:
        along += place * 2 * CHUNK + i
        total_q -= x_q.to(tl.float32) * (r_q * tl.load(along))[:, None]
        total_k -= x_k.to(tl.float32) * (r_k * tl.load(along + CHUNK))[:, None]
    out = (start * VALUE_HEADS + head) * K + (row * (VALUE_HEADS * K) + c[None, :])
    tl.store(d_q + out, (total_q * r_q[:, None]).to(d_q.dtype.element_ty), mask=mask)
    tl.store(d_k + out, (total_k * r_k[:, None]).to(d_k.dtype.element_ty), mask=mask)


@triton.jit
def gate_back(raw, d_log, rate, bound, GATE: tl.constexpr):
    """From the gradient of the log decay to that of the gate's input, and to this element's part of that of A_log."""
    d_raw, part = d_log, d_log
    if GATE == 2:
        d_raw = -rate * tl.sigmoid(raw) * d_log
        part = log_decay(raw, rate, bound, GATE) * LN2 * d_log
    if GATE == 3:
        open = tl.sigmoid(rate * raw)
        d_raw = bound * open * (1 - open) * rate * d_log
        part = raw * d_raw
    return d_raw, part
