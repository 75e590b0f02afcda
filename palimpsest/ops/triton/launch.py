"""From tensors to kernels: sizes, strides, chunk tables, scratch memory and grids."""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from palimpsest.ops.triton.prepare import prepare_scalar, prepare_vector, solve
from palimpsest.ops.triton.scan import scan
from palimpsest.ops.triton.step import step

CHUNK = 64
Gate = tuple[Tensor, Tensor | None, float | None]


class Inputs(NamedTuple):
    """The tensors of one call, readable by kernels, and what they mean. Gradients are asked of the first eight."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor | None
    state: Tensor | None
    a_log: Tensor | None
    bias: Tensor | None
    lengths: tuple[int, ...] | None
    scale: float
    bound: float | None
    norm: bool
    logit: bool
    few: int  # documents of at most so many tokens go token by token

    @property
    def vector(self) -> bool:
        return self.g is not None and self.g.dim() == 4

    @property
    def gate(self) -> int:
        """0 none, 1 ready, 2 unbounded, 3 bounded: GATE of the kernels."""
        return 0 if self.g is None else 1 if self.a_log is None else 2 if self.bound is None else 3

    @property
    def erase(self) -> bool:
        return self.beta is not None

    @property
    def half(self) -> bool:
        """Whether products are of bfloat16. Everything else is multiplied to float32 accuracy."""
        return self.q.dtype == self.k.dtype == self.v.dtype == torch.bfloat16

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.half else torch.float32

    @property
    def padded(self) -> int:
        """Key channels as the scratch tensors hold them."""
        return max(16, triton.next_power_of_2(self.q.shape[3]))

    @property
    def sequences(self) -> int:
        return self.q.shape[0] if self.lengths is None else len(self.lengths)

    @property
    def chunks(self) -> int:
        """Chunks of one sequence of an unpacked batch."""
        return -(-self.q.shape[1] // CHUNK)

    @property
    def slots(self) -> int:
        """Chunks of all sequences."""
        if self.lengths is None:
            return self.q.shape[0] * self.chunks
        return sum(-(-length // CHUNK) for length in self.lengths if length > self.few)

    def table(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return (None, None, None) if self.lengths is None else _table(self.lengths, self.few, self.q.device)

    def sums(self) -> Tensor:
        """The matrices that `gates.table_sums` reads."""
        return _sums(self.dtype, self.q.device)

    def sizes(self) -> dict[str, Any]:
        """Compile-time arguments that all kernels over chunks share."""
        return {
            "HEADS": self.q.shape[2],
            "VALUE_HEADS": self.v.shape[2],
            "K": self.q.shape[3],
            "KP": self.padded,
            "PACKED": self.lengths is not None,
            "DT": tl.bfloat16 if self.half else tl.float32,
        }

    def form(self) -> dict[str, Any]:
        """Compile-time arguments of kernels that read raw gates, norms and strengths."""
        return {"GATE": self.gate, "BIAS": self.bias is not None, "NORM": self.norm, "LOGIT": self.logit}


class Prepared(NamedTuple):
    """What `prepare` leaves of every chunk. Without a vector gate the three decayed tensors are absent."""

    q_down: Tensor | None
    k_down: Tensor | None
    k_up: Tensor | None
    keep: Tensor  # exp(G_last): [slots,HV,KP] or [slots,HV]
    reads: Tensor  # P [slots,HV,64,64]
    solve: Tensor | None  # Z [slots,HV,64,64]
    rows: Tensor  # beta and factors of rows, [slots,HV,3,64] or [slots,HV,6,64]


@functools.lru_cache(maxsize=64)
def _table(lengths: tuple[int, ...], few: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Packed documents: first token and number of tokens of every chunk [slots,2], those of documents of a few tokens left
    out; first chunk and first token of every document [N+1]."""
    bounds, firsts, starts = [], [0], [0]
    for end, length in zip(itertools.accumulate(lengths), lengths, strict=True):
        start = end - length
        if length > few:
            bounds += [(at, min(CHUNK, end - at)) for at in range(start, end, CHUNK)]
        firsts.append(len(bounds))
        starts.append(end)
    tables = [torch.tensor(x, dtype=torch.int32, device=device) for x in (bounds, firsts, starts)]
    return tables[0], tables[1], tables[2]


@functools.lru_cache(maxsize=16)
def _sums(dtype: torch.dtype, device: torch.device) -> Tensor:
    """[4,64,64]: kinds of sums in the order that `gates` gives them; row i takes the rows t of g that have a 1 or -1."""
    i, t = torch.arange(CHUNK).unsqueeze(1), torch.arange(CHUNK)
    half = CHUNK // 2
    middle, second = i // half * half + half // 2, i >= half
    to_half = (second & (t >= half) & (t <= i)) | (~second & (t < half) & (t > i))
    from_middle = ((t > middle) & (t <= i)).int() - ((t > i) & (t <= middle)).int()
    return torch.stack([(t <= i).int(), (t > i).int(), from_middle, to_half.int()]).to(device, dtype)


def by_token(x: Tensor) -> Tensor:
    """x [B,T,...] itself if its tokens lie at one distance from each other and each is in one piece; a copy otherwise."""
    size = 1
    for dim in range(x.dim() - 1, 1, -1):
        if x.stride(dim) != size:
            return x.contiguous()
        size *= x.shape[dim]
    return x if x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1) else x.contiguous()


def _stride(x: Tensor | None) -> int:
    return 0 if x is None else x.stride(1)


def prepare(given: Inputs) -> Prepared:
    """Every chunk's part that needs no state."""
    q, k, g, beta = given.q, given.k, given.g, given.beta
    heads, slots, padded = given.v.shape[2], given.slots, given.padded
    reads = q.new_empty(slots, heads, CHUNK, CHUNK, dtype=given.dtype)
    # Unit keys overlap by at most one: half precision is enough for them.
    small = given.half and given.norm
    overlaps = torch.empty_like(reads, dtype=torch.float16 if small else torch.float32) if given.erase else None
    solved = None if overlaps is None else overlaps.view(given.dtype) if small or not given.half else torch.empty_like(reads)
    tail = (given.table()[0],)
    numbers = (q.shape[1], given.chunks, _stride(q), _stride(k), _stride(g), _stride(beta), given.scale)
    grid = (heads, slots)
    if given.vector:
        decayed = [q.new_empty(slots, heads, CHUNK, padded, dtype=given.dtype) for _ in range(3)]
        keep = q.new_empty(slots, heads, padded, dtype=torch.float32)
        rows = q.new_empty(slots, heads, 3, CHUNK, dtype=torch.float32)
        prepare_vector[grid](
            q, k, g, beta, given.a_log, given.bias, given.sums(), *tail, *decayed, keep, reads, overlaps, rows, *numbers,
            given.bound or 0.0,
            **given.sizes(), **given.form(), **config(given, "prepare"),
        )  # fmt: skip
        solve[(slots * heads,)](overlaps, solved, rows, COLUMNS=3 * CHUNK, HALF=small, **config(given, "solve"))
        return Prepared(*decayed, keep, reads, solved, rows)
    keep = q.new_empty(slots, heads, dtype=torch.float32)
    rows = q.new_empty(slots, heads, 6, CHUNK, dtype=torch.float32)
    prepare_scalar[grid](
        q, k, g, beta, given.a_log, given.bias, *tail, keep, reads, overlaps, rows, *numbers,
        **given.sizes(), **given.form(), ERASE=given.erase, **config(given, "prepare"),
    )  # fmt: skip
    if given.erase:
        solve[(slots * heads,)](overlaps, solved, rows, COLUMNS=6 * CHUNK, HALF=small, **config(given, "solve"))
    return Prepared(None, None, None, keep, reads, solved, rows)


def results(given: Inputs) -> tuple[Tensor, Tensor]:
    """Memory for o and the final state."""
    (batch, tokens, heads, value_dim), key_dim = given.v.shape, given.q.shape[3]
    final = given.v.new_empty(given.sequences, heads, key_dim, value_dim, dtype=torch.float32)
    return given.v.new_empty(batch, tokens, heads, value_dim), final


def walk(
    given: Inputs, ready: Prepared, o: Tensor, final: Tensor, kept: tuple[Tensor, Tensor] | tuple[None, None] = (None, None)
) -> None:
    """All chunks in order: fills o and the final state. `kept`: also the states that enter the chunks, and U."""
    q, k, v = given.q, given.k, given.v
    heads, value_dim = v.shape[2], v.shape[3]
    bounds, firsts, _ = given.table()
    options = config(given, "scan")
    left, right = (ready.q_down, ready.k_down) if given.vector else (q, k)
    scan[(-(-value_dim // options["BV"]), heads, given.sequences)](
        left, right, ready.k_up, ready.keep, ready.reads, ready.solve, ready.rows, v, o, given.state, final,
        *kept, bounds, firsts, v.shape[1], given.chunks, _stride(q), _stride(k), _stride(v),
        **given.sizes(), V=value_dim, VECTOR=given.vector, GATED=given.gate > 0, ERASE=given.erase,
        INITIAL=given.state is not None, KEEP=kept[0] is not None, ALONE=given.few == 0, **options,
    )  # fmt: skip


def few(given: Inputs, o: Tensor, final: Tensor) -> None:
    """Token by token: fills o and the final state of every sequence of at most `given.few` tokens."""
    q, k, v, g, beta = given[:5]
    heads, value_dim = v.shape[2], v.shape[3]
    options = config(given, "step")
    sizes = given.sizes()
    del sizes["DT"]
    step[(-(-value_dim // options["BV"]), heads, given.sequences)](
        q, k, v, g, beta, given.a_log, given.bias, given.state, o, final, given.table()[2],
        q.shape[1], _stride(q), _stride(k), _stride(v), _stride(g), _stride(beta), given.scale, given.bound or 0.0,
        **sizes, **given.form(), V=value_dim, VECTOR=given.vector, ERASE=given.erase, INITIAL=given.state is not None,
        FEW=given.few, **options,
    )  # fmt: skip


def config(given: Inputs, kernel: str) -> dict[str, Any]:
    """Tile widths, warps and pipeline depth of a kernel; the length of a sequence has no part in it."""
    wide = given.padded > 128
    if kernel == "prepare":
        return {"BK": min(64 if given.half else 32, given.padded), "num_warps": 4, "num_stages": 1}
    if kernel == "solve":
        return {"num_warps": 4, "num_stages": 1}
    value_dim = triton.next_power_of_2(given.v.shape[3])
    if kernel == "step":
        return {"BV": min(32, value_dim), "num_warps": 4, "num_stages": 1}
    if kernel == "pairs_back":
        return {"BV": max(16, min(64 if given.half else 32, value_dim)), "num_warps": 4, "num_stages": 1}
    if kernel == "chunk_back":
        return {"BK": min(32, given.padded), "BV": max(16, min(64, value_dim)), "num_warps": 4, "num_stages": 1}
    if not given.half:
        return {"BV": max(16, min(32, value_dim)), "num_warps": 8, "num_stages": 1}
    # Narrow tiles without prefetching read past their shared memory: a fault of the compiler (triton 3.6, sm_90).
    if wide:
        return {"BV": max(16, min(64, value_dim)), "num_warps": 8, "num_stages": 1}
    return {"BV": max(16, min(64, value_dim)), "num_warps": 4, "num_stages": 2}
