"""The compiled CPU backend: loads what hatch_build.py made of cpu.cpp, and gives it tensors.

Every head of every document is worked on by one thread from its first token to its last, so a result does not depend on the
batch, on other documents or on the number of threads.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

STREAM_BYTES = 12 << 20  # a state of this size leaves the caches before it is read again
WIDEST = 256  # key channels that a token's place on the stack holds
LIBRARIES = {"AVX512": "cpu_avx512.so", "AVX2": "cpu_avx2.so", "DEFAULT": "cpu_base.so"}


class _Shape(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("batch", "tokens", "heads", "value_heads", "key_dim", "value_dim")]


class Form(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("gate", "additive", "norm", "beta_is_logit", "stream")),
        *((name, ctypes.c_float) for name in ("scale", "lower_bound")),
        *((name, ctypes.c_void_p) for name in ("rate", "bias")),
    ]


class _Query(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("batch", "heads", "key_heads", "key_dim", "value_dim")),
        ("scale", ctypes.c_float),
        ("is_half", ctypes.c_int32),
    ]


class Cache(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        *((f"{name}_{axis}", ctypes.c_int64) for name in ("key", "value") for axis in ("batch", "row", "head")),
    ]


class _Grads(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("q", "k", "v", "g", "beta", "state")]


@functools.cache
def library() -> tuple[Any, str]:
    """The library for this processor, or None, and the reason."""
    capability = torch.backends.cpu.get_cpu_capability()
    path = Path(__file__).with_name(LIBRARIES.get(capability, LIBRARIES["DEFAULT"]))
    if not path.exists():
        return None, "not built: no C++ compiler was found at installation"
    try:
        # One pool of threads for torch and for this library: both must meet in the same OpenMP runtime.
        runtime = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*"))
        ctypes.CDLL(str(runtime[0]) if runtime else "libgomp.so.1", ctypes.RTLD_GLOBAL)
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        return None, f"cannot be loaded: {error}"
    pointer = ctypes.c_void_p
    loaded.palimpsest_forward.argtypes = [pointer] * 13 + [ctypes.c_int64, ctypes.c_int32]
    loaded.palimpsest_backward.argtypes = [pointer] * 12 + [ctypes.c_int64, ctypes.c_int32]
    loaded.palimpsest_mxfp4.argtypes = [pointer] * 4 + [ctypes.c_int64] * 3 + [ctypes.c_int32]
    loaded.palimpsest_few.argtypes = [pointer] * 4 + [ctypes.c_int32] * 2 + [ctypes.c_int64] * 3
    loaded.palimpsest_few.argtypes += [pointer, ctypes.c_int64, ctypes.c_int32]
    loaded.palimpsest_attend.argtypes = [pointer] * 5 + [ctypes.c_int32]
    loaded.palimpsest_rms_norm.argtypes = [pointer] * 3 + [ctypes.c_int64] * 2 + [ctypes.c_float]
    loaded.palimpsest_conv.argtypes = loaded.palimpsest_conv_backward.argtypes = [pointer] * 2 + [ctypes.c_int32]
    loaded.palimpsest_step.argtypes = [pointer, ctypes.c_int64, pointer, pointer, ctypes.c_int64]
    for function in ("forward", "backward", "mxfp4", "few", "attend", "rms_norm", "conv", "conv_backward", "step"):
        getattr(loaded, f"palimpsest_{function}").restype = None
    loaded.palimpsest_tile.restype = ctypes.c_int64
    return loaded, f"compiled for {path.stem.removeprefix('cpu_')}; the memory stays in the first-level cache"


def serves(*tensors: Tensor) -> bool:
    """Whether the library is here and nothing but a result is asked of it: no gradient, and as `trains`."""
    return not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)) and trains(*tensors)


def trains(*tensors: Tensor) -> bool:
    """Whether the library is here and takes these, gradients or not: no graph, no autocast, and no tensor that is cut over
    processes, which DTensor knows what to do with."""
    if any(hasattr(x, "device_mesh") for x in tensors) or torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return False
    return library()[0] is not None


def refusal(dtype: torch.dtype, device: torch.device, key_dim: int) -> str | None:
    """Why these inputs are not for this backend, or None."""
    if device.type != "cpu":
        return f"the tensors are on {device.type}"
    if dtype == torch.float64:
        return "the inputs are float64"
    if key_dim > WIDEST:
        return f"there are {key_dim} key channels, more than {WIDEST}"
    loaded, reason = library()
    return reason if loaded is None else None


def fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor | None,
    lengths: list[int] | None,
    scale: float,
    normalise: bool = False,
    beta_is_logit: bool = False,
    gate: tuple[Tensor, Tensor | None, float | None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Forward pass with gate, norms and sigmoid inside: arguments as of `ops.kda`; g [B,T,HV,K] or [B,T,HV], raw with `gate`.

    Returns float32 o [B,T,HV,V] and state. No gradient.
    """
    q, k, v = _ready(q), _ready(k), _ready(v)
    g, beta = None if g is None else _ready(g), None if beta is None else _ready(beta)
    rate, bias, bound = gate or (None, None, None)
    rate, bias = None if rate is None else _ready(rate), None if bias is None else _ready(bias)
    form = Form(
        0 if g is None else 1 if g.dim() == 4 else 2,
        beta is None,
        normalise,
        beta_is_logit,
        0,
        scale,
        bound or 0.0,
        _pointer(rate),
        _pointer(bias),
    )
    return _forward(q, k, v, g, beta, state, lengths, form, None)[:2]


def differentiable(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, state: Tensor, lengths: list[int] | None
) -> tuple[Tensor, Tensor]:
    """As `reference.recurrence`, float32, with gradients: q scaled, q and k [B,T,HV,K], g [B,T,HV,K or 1]."""
    return _Recurrence.apply(q, k, v, g, beta, state, lengths)  # type: ignore[return-value]


class _Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Any, beta: Any, state: Tensor, lengths: Any) -> Any:
        q, k, v = _ready(q), _ready(k), _ready(v)
        g, beta = None if g is None else _ready(g), None if beta is None else _ready(beta)
        gate = 0 if g is None else 1 if g.shape[-1] == q.shape[-1] and q.shape[-1] > 1 else 2
        form = Form(gate, beta is None, 0, 0, 0, 1.0, 0.0, None, None)
        tiles = _tiles(lengths, q.shape[0], q.shape[1])
        kept = v.new_empty(tiles[-1], v.shape[2], q.shape[3], v.shape[3])
        o, final, bounds = _forward(q, k, v, g, beta, state, lengths, form, (kept, tiles))
        ctx.save_for_backward(q, k, v, g, beta, kept)
        ctx.form, ctx.tiles, ctx.bounds = form, tiles, bounds
        return o, final

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, g, beta, kept = ctx.saved_tensors
        d_o, d_state = _ready(grads[0]), _ready(grads[1]).clone()
        found = [None if x is None else torch.empty_like(x) for x in (q, k, v, g, beta)]
        tiles, bounds = (torch.tensor(x, dtype=torch.int64) for x in (ctx.tiles, ctx.bounds))
        loaded, _ = library()
        loaded.palimpsest_backward(
            ctypes.byref(_shape(q, v)),
            ctypes.byref(ctx.form),
            *(_pointer(x) for x in (q, k, v, g, beta, kept, tiles, d_o)),
            ctypes.byref(_Grads(*(_pointer(x) for x in (*found, d_state)))),
            _pointer(bounds),
            len(bounds) - 1,
            torch.get_num_threads(),
        )
        return (*found, d_state, None)


def mxfp4_matmul(x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    """x float32 [n,in] against packed uint8 [out,in/2], scale uint8 [out,in/32] -> y float32 [n,out]; for a few rows of x."""
    x, packed, scale = _ready(x), packed.contiguous(), scale.contiguous()
    y = x.new_empty(len(x), len(packed))
    sizes = len(x), len(packed), x.shape[1]
    loaded, _ = library()
    loaded.palimpsest_mxfp4(*(_pointer(each) for each in (packed, scale, x, y)), *sizes, torch.get_num_threads())
    return y


ONE = ctypes.c_int64 * 1
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}


def few_matmul(x: Tensor, weight: Tensor, scale: Tensor | None = None, counts: list[int] | None = None) -> Tensor:
    """x float32 or bfloat16 [n,in], a few rows, against weight [out,in] -> y [n,out], as x.

    The weight is float32 or bfloat16, or int8 with scale float16 [out,in/32]. With `counts` it is a stack [E,out,in], whose
    matrix e meets the next counts[e] rows.
    """
    (n, columns), rows = x.shape, weight.shape[-2]  # plain numbers: a step makes hundreds of these calls
    x, weight, y = x.contiguous(), weight.contiguous(), x.new_empty(n, rows)
    library()[0].palimpsest_few(
        weight.data_ptr(),
        None if scale is None else scale.data_ptr(),
        x.data_ptr(),
        y.data_ptr(),
        KINDS[weight.dtype],
        x.dtype is torch.bfloat16,
        n,
        rows,
        columns,
        ONE(n) if counts is None else (ctypes.c_int64 * len(counts))(*counts),
        1 if counts is None else len(counts),
        torch.get_num_threads() if rows * columns > 1 << 16 else 1,
    )
    return y


def attend(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float) -> Tensor:
    """Softmax attention of one query a sequence: q [B,1,H,K] over the first lengths[b] > 0 rows of k [B,S,Hkv,K] and
    v [B,S,Hkv,V] -> o [B,1,H,V]. All float32 or all bfloat16, channels next to one another; sums in float32. No gradient."""
    (batch, _, heads, key_dim), value_dim = q.shape, v.shape[3]
    q, o = q.contiguous(), q.new_empty(batch, 1, heads, value_dim)
    (k_batch, k_row, k_head, _), (v_batch, v_row, v_head, _) = k.stride(), v.stride()
    work = batch * heads * max(lengths) * (key_dim + value_dim)
    library()[0].palimpsest_attend(
        ctypes.byref(_Query(batch, heads, k.shape[2], key_dim, value_dim, scale, q.dtype is torch.bfloat16)),
        ctypes.byref(Cache(k.data_ptr(), v.data_ptr(), k_batch, k_row, k_head, v_batch, v_row, v_head)),
        q.data_ptr(),
        (ctypes.c_int64 * batch)(*lengths),
        o.data_ptr(),
        torch.get_num_threads() if work > 1 << 16 else 1,
    )
    return o


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, float32; for a few rows. No gradient."""
    x, weight, columns = x.contiguous(), weight.contiguous(), x.shape[-1]
    y = torch.empty_like(x)
    library()[0].palimpsest_rms_norm(x.data_ptr(), weight.data_ptr(), y.data_ptr(), x.numel() // columns, columns, eps)
    return y


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor | None,
    lengths: list[int] | None,
    form: Form,
    keep: tuple[Tensor, list[int]] | None,
) -> tuple[Tensor, Tensor, list[int]]:
    # A step of one token takes a few microseconds, of which every look at a tensor is a large part.
    (batch, tokens, heads, key_dim), (value_heads, value_dim) = q.shape, v.shape[2:]
    bounds = [tokens * row for row in range(batch + 1)] if lengths is None else [0, *itertools.accumulate(lengths)]
    count = len(bounds) - 1
    state = v.new_zeros(count, value_heads, key_dim, value_dim) if state is None else _ready(state)
    o, final = torch.empty_like(v), torch.empty_like(state)
    form.stream = 4 * count * value_heads * key_dim * value_dim > STREAM_BYTES and final.data_ptr() % 64 == 0
    held, tiles = (None, None) if keep is None else (keep[0], (ctypes.c_int64 * (count + 1))(*keep[1]))
    work = tokens * batch * value_heads * key_dim * value_dim
    library()[0].palimpsest_forward(
        ctypes.byref(_Shape(batch, tokens, heads, value_heads, key_dim, value_dim)),
        ctypes.byref(form),
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        _pointer(g),
        _pointer(beta),
        state.data_ptr(),
        o.data_ptr(),
        final.data_ptr(),
        _pointer(held),
        tiles,
        (ctypes.c_int64 * (count + 1))(*bounds),
        count,
        # Waking other threads takes longer than a small step does.
        torch.get_num_threads() if work > 1 << 17 else 1,
    )
    return o, final, bounds


def _tiles(lengths: list[int] | None, batch: int, tokens: int) -> list[int]:
    """Where the kept states of each document begin."""
    tile = library()[0].palimpsest_tile()
    counts = (-(-length // tile) for length in ([tokens] * batch if lengths is None else lengths))
    return [0, *itertools.accumulate(counts)]


def _shape(q: Tensor, v: Tensor) -> _Shape:
    return _Shape(*q.shape[:3], v.shape[2], q.shape[3], v.shape[3])


def _ready(x: Tensor) -> Tensor:
    if x.dtype is torch.float32 and x.is_contiguous():  # asked first: each call below costs a microsecond of a short step
        return x
    return x.detach().to(torch.float32).contiguous()


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
