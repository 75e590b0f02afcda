"""From tensors to kernels: sizes, strides, chunk tables, scratch memory and grids."""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from palimpsest.ops.triton.gates import LOG2E, SAFE, running_sums
from palimpsest.ops.triton.prepare import prepare_scalar, prepare_vector, solve
from palimpsest.ops.triton.scan import fold, scan
from palimpsest.ops.triton.step import step

CHUNK = 64
SEGMENT = 128  # chunks of a segment
IDLE = 2112  # value channels of all sequences and heads that 132 multiprocessors hold, 16 on each
CROWD = 4096  # value channels of all heads that keep a GPU busy
# Compiled `step` kernels with their grid's width and compile-time arguments: triton's own way to them takes most of a step.
_built: dict[tuple[Any, ...], tuple[Any, int, tuple[int, ...]]] = {}


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
    def mild(self) -> bool:
        """Whether decays from the middle of 32 rows surely stay inside SAFE."""
        return self.bound is not None and -16 * LOG2E.value * self.bound <= SAFE.value

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
        return max(16, _power(self.q.shape[3]))

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

    def cut(self) -> tuple[Tensor, Tensor, Tensor, list[int]] | None:
        """Tables of a walk by segments, if there are documents long enough for the heads to leave the device idle: chunks,
        first chunk of every segment, first segment of every document, and each document's last segment."""
        lengths = (self.q.shape[1],) * self.q.shape[0] if self.lengths is None else self.lengths
        if self.v.shape[2] * self.v.shape[3] > CROWD or max(lengths) <= 3 * SEGMENT * CHUNK:
            return None
        return _cut(lengths, self.few, self.q.device)

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
    total: Tensor | None  # G of a vector gate, as `running` gives it


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


@functools.lru_cache(maxsize=64)
def _cut(lengths: tuple[int, ...], few: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """As `Inputs.cut`. Documents that are not long are one segment; those without chunks have none, and last segment -1."""
    edges, segments, lasts = [0], [0], []
    for length in lengths:
        chunks = -(-length // CHUNK) if length > few else 0
        step = SEGMENT if chunks > 3 * SEGMENT else max(chunks, 1)
        edges += [edges[-1] + min(at + step, chunks) for at in range(0, chunks, step)]
        lasts.append(len(edges) - 2 if chunks else -1)
        segments.append(len(edges) - 1)
    tables = [torch.tensor(x, dtype=torch.int32, device=device) for x in (edges, segments)]
    return _table(lengths, few, device)[0], tables[0], tables[1], lasts


@functools.lru_cache(maxsize=16)
def _sums(dtype: torch.dtype, device: torch.device) -> Tensor:
    """[2,64,64]: the matrices of `gates.FROM_HERE` and `gates.BEFORE`; row i takes the rows t that have a 1."""
    i, t = torch.arange(CHUNK).unsqueeze(1), torch.arange(CHUNK)
    return torch.stack([(t >= i).int(), (t < i).int()]).to(device, dtype)


def by_token(x: Tensor) -> Tensor:
    """x [B,T,...] itself if its tokens lie at one distance from each other and each is in one piece; a copy otherwise."""
    size = 1
    for dim in range(x.dim() - 1, 1, -1):
        if x.stride(dim) != size:
            return x.contiguous()
        size *= x.shape[dim]
    return x if x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1) else x.contiguous()


def _power(size: int) -> int:
    """The least power of two that is not smaller."""
    return 1 << (size - 1).bit_length()


def _stride(x: Tensor | None) -> int:
    return 0 if x is None else x.stride(1)


def prepare(given: Inputs) -> Prepared:
    """Every chunk's part that needs no state."""
    q, k, g, beta = given.q, given.k, given.g, given.beta
    heads, slots, padded = given.v.shape[2], given.slots, given.padded
    total = running(given) if given.vector else None
    reads = q.new_empty(slots, heads, CHUNK, CHUNK, dtype=given.dtype)
    # Unit keys overlap by at most one: half precision is enough for them.
    small = given.half and given.norm
    overlaps = torch.empty_like(reads, dtype=torch.float16 if small else torch.float32) if given.erase else None
    solved = None if overlaps is None else overlaps.view(given.dtype) if small or not given.half else torch.empty_like(reads)
    tail = (given.table()[0],)
    sizes, strides = (q.shape[1], given.chunks), (_stride(q), _stride(k))
    grid = (heads, slots)
    if given.vector:
        decayed = [q.new_empty(slots, heads, CHUNK, padded, dtype=given.dtype) for _ in range(3)]
        keep = q.new_empty(slots, heads, padded, dtype=torch.float32)
        rows = q.new_empty(slots, heads, 3, CHUNK, dtype=torch.float32)
        prepare_vector[grid](
            q, k, beta, total, *tail, *decayed, keep, reads, overlaps, rows, *sizes, *strides, _stride(beta), given.scale,
            **given.sizes(), NORM=given.norm, LOGIT=given.logit, **config(given, "prepare"),
        )  # fmt: skip
        solve[(slots * heads,)](overlaps, solved, rows, COLUMNS=3 * CHUNK, HALF=small, **config(given, "solve"))
        return Prepared(*decayed, keep, reads, solved, rows, total)
    keep = q.new_empty(slots, heads, dtype=torch.float32)
    rows = q.new_empty(slots, heads, 6, CHUNK, dtype=torch.float32)
    prepare_scalar[grid](
        q, k, g, beta, given.a_log, given.bias, *tail, keep, reads, overlaps, rows, *sizes, *strides, _stride(g), _stride(beta),
        given.scale,
        **given.sizes(), **given.form(), ERASE=given.erase, **config(given, "prepare"),
    )  # fmt: skip
    if given.erase:
        solve[(slots * heads,)](overlaps, solved, rows, COLUMNS=6 * CHUNK, HALF=small, **config(given, "solve"))
    return Prepared(None, None, None, keep, reads, solved, rows, None)


def running(given: Inputs) -> Tensor:
    """G of every chunk, [slots,HV,64,KP], or [slots,HV,64,1] of a scalar gate."""
    g, heads = given.g, given.v.shape[2]
    assert g is not None
    key_dim, width = (given.q.shape[3], given.padded) if given.vector else (1, 1)
    total = g.new_empty(given.slots, heads, CHUNK, width, dtype=torch.float32 if given.half else torch.float64)
    running_sums[(heads, given.slots)](
        g, given.a_log, given.bias, total, given.table()[0], g.shape[1], given.chunks, _stride(g), given.bound or 0.0,
        VALUE_HEADS=heads, K=key_dim, KP=width, GATE=given.gate, BIAS=given.bias is not None,
        PACKED=given.lengths is not None, **config(given, "running_sums"),
    )  # fmt: skip
    return total


def results(given: Inputs) -> tuple[Tensor, Tensor]:
    """Memory for o and the final state."""
    (batch, tokens, heads, value_dim), key_dim = given.v.shape, given.q.shape[3]
    final = given.v.new_empty(given.sequences, heads, key_dim, value_dim, dtype=torch.float32)
    return given.v.new_empty(batch, tokens, heads, value_dim), final


def walk(
    given: Inputs, ready: Prepared, o: Tensor, final: Tensor, kept: tuple[Tensor, Tensor] | tuple[None, None] = (None, None)
) -> None:
    """All chunks in order: fills o and the final state. `kept`: also the states that enter the chunks, and U.

    With few heads a long document is cut into segments that run side by side: a first pass finds what each makes of any state
    that enters it, and the second has the states. Where it is cut depends on its own length and the heads.
    """
    bounds, firsts, _ = given.table()
    heads, key_dim, value_dim = given.v.shape[2], given.q.shape[3], given.v.shape[3]
    cut = given.cut()
    if cut is None:
        _scan(given, ready, o, given.state, final, kept, (bounds, firsts), given.sequences, False)
        return
    bounds, edges, segments, lasts = cut
    count = len(lasts)
    maps = o.new_empty(edges.numel() - 1, heads, key_dim, value_dim + key_dim, dtype=torch.float32)
    _scan(given, ready, o, None, maps, (None, None), (bounds, edges), maps.shape[0], True)
    starts = o.new_empty(maps.shape[0], heads, key_dim, value_dim, dtype=torch.float32)
    options = config(given, "fold")
    fold[(-(-value_dim // options["BV"]), heads, count)](
        maps, given.state, starts, segments, VALUE_HEADS=heads, K=key_dim, KP=given.padded, V=value_dim,
        INITIAL=given.state is not None, **options,
    )  # fmt: skip
    ends = torch.empty_like(starts)
    _scan(given, ready, o, starts, ends, kept, (bounds, edges), maps.shape[0], False)
    long = [row for row, last in enumerate(lasts) if last >= 0]
    final[long] = ends[[lasts[row] for row in long]]


def _scan(
    given: Inputs,
    ready: Prepared,
    o: Tensor,
    initial: Tensor | None,
    final: Tensor,
    kept: tuple[Tensor, Tensor] | tuple[None, None],
    tables: tuple[Tensor | None, Tensor | None],
    count: int,
    maps: bool,
) -> None:
    q, k, v, options = given.q, given.k, given.v, config(given, "scan", count)
    left, right = (ready.q_down, ready.k_down) if given.vector else (q, k)
    width = v.shape[3] + (q.shape[3] if maps else 0)
    sizes = given.sizes() | {"PACKED": tables[0] is not None}
    scan[(-(-width // options["BV"]), v.shape[2], count)](
        left, right, ready.k_up, ready.keep, ready.reads, ready.solve, ready.rows, v, o, initial, final,
        *kept, *tables, v.shape[1], given.chunks, _stride(q), _stride(k), _stride(v),
        **sizes, V=v.shape[3], VECTOR=given.vector, GATED=given.gate > 0, ERASE=given.erase, INITIAL=initial is not None,
        KEEP=kept[0] is not None, ALONE=given.few == 0, MAP=maps, **options,
    )  # fmt: skip


def few(given: Inputs, o: Tensor, final: Tensor) -> None:
    """Token by token: fills o and the final state of every sequence of at most `given.few` tokens."""
    q, k, v, g, beta = given[:5]
    starts = given.table()[2]
    tensors = (q, k, v, g, beta, given.a_log, given.bias, given.state, o, final, starts)
    strides = (_stride(q), _stride(k), _stride(v), _stride(g), _stride(beta))
    # All that triton looks at before it launches, and what `_step_form` reads: the same again is launched without another look.
    kinds = tuple(None if x is None else (x.dtype, x.data_ptr() % 16) for x in tensors)
    key = (q.device, q.shape[2:], v.shape[2:], given.vector, given.norm, given.logit, given.few, given.bound, kinds, strides)
    numbers = (q.shape[1], *strides, given.scale, given.bound or 0.0)
    ready = _built.get(key)
    if ready is not None:
        built, across, form = ready
        built[(across, v.shape[2], given.sequences)](*tensors, *numbers, *form)
        return
    options = config(given, "step")
    across, form = -(-v.shape[3] // options["BV"]), _step_form(given, options.pop("BV"))
    built = step[(across, v.shape[2], given.sequences)](*tensors, *numbers, *form, **options)
    if built is not None:  # interpreted kernels are not built
        if len(_built) >= 256:
            _built.clear()
        _built[key] = built, across, form


def _step_form(given: Inputs, width: int) -> tuple[int, ...]:
    """Compile-time arguments of `step`, in its order."""
    sizes = (given.q.shape[2], given.v.shape[2], given.q.shape[3], given.padded, given.v.shape[3], width)
    inside = (given.gate, given.vector, given.bias is not None, given.norm, given.logit, given.erase)
    return (*sizes, *inside, given.lengths is not None, given.state is not None, given.few)


def config(given: Inputs, kernel: str, sequences: int | None = None) -> dict[str, Any]:
    """Tile widths, warps and pipeline depth of a kernel; the length of a sequence has no part in it."""
    wide = given.padded > 128
    if kernel == "prepare":
        return {"BK": min(64 if given.half else 32, given.padded), "num_warps": 4, "num_stages": 1}
    if kernel == "running_sums":
        return {"num_warps": 1, "num_stages": 1}
    if kernel == "fold":
        return {"BV": 16, "num_warps": 4, "num_stages": 1}
    if kernel == "solve":
        return {"num_warps": 4, "num_stages": 1, "maxnreg": 168}
    value_dim = _power(given.v.shape[3])
    timed = given.half and given.vector and given.padded == value_dim == 128  # what tiles were compared for on a GPU
    if kernel == "step":
        return {"BV": min(32, value_dim), "num_warps": 4, "num_stages": 1}
    if kernel == "pairs_back":
        width = 64 if given.half else 32
        tile = {"BK": min(width, given.padded), "BV": max(16, min(width, value_dim))}
        return {**tile, "num_warps": 4, "num_stages": 2 if timed else 1}
    if kernel == "chunk_back" and given.vector:
        if timed:  # at 32 channels decays that are not mild spill two to three times as much
            return {"BK": 32 if given.mild else 16, "SPAN": 128, "num_warps": 4, "num_stages": 1, "maxnreg": 255}
        # Float32 products take three times the shared memory: a program of their own for every block of channels.
        few = {"BK": 16, "SPAN": 16, "num_warps": 4, "num_stages": 1}
        if given.half and given.padded == 16:  # one block of 16 channels: with four warps the fault of ptxas told of below
            return few | {"num_warps": 2}
        return few | {"SPAN": given.padded, "maxnreg": 168} if given.half else few
    if kernel == "states_back" and timed:
        return {"BK": 64, "BV": 32, "num_warps": 4, "num_stages": 3}
    if kernel in ("states_back", "chunk_back"):
        tile = {"BK": min(64, given.padded), "BV": max(16, min(64 if given.half else 32, value_dim))}
        return {**tile, "num_warps": 4, "num_stages": 2 if given.half else 1}
    if not given.half:
        return {"BV": max(16, min(32, value_dim)), "num_warps": 8, "num_stages": 1}
    # Tiles of 32 channels without prefetching meet a fault of ptxas 12.8: it uses an address before it is there.
    if wide:
        return {"BV": 64 if value_dim >= 64 else 16, "num_warps": 8, "num_stages": 1}
    # The fewer programs there are, the narrower and the deeper their pipelines; without one two share a multiprocessor. Every
    # column is computed the same in all.
    columns = (sequences or given.sequences) * given.v.shape[2] * value_dim
    width = 16 if columns <= IDLE else 32 if columns <= 2 * IDLE else 64
    width = max(16, min(width, value_dim))
    # `scan_back` of 64 channels in two stages is faster too, but gives dk with an error of 0.0056 where it is 0.0033 in one.
    deep = 2 if timed and kernel == "scan" else 1
    return {"BV": width, "num_warps": 4, "num_stages": {16: 3, 32: 2}.get(width, deep)}
