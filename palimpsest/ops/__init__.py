"""Tensor functions without parameters. Every backend of a function has the same signature and the same meaning.

Shapes: q, k [B,T,H,K]; v, o [B,T,HV,V]; state [B,HV,K,V] (packed: [N,HV,K,V]); value head j reads key head j // (HV // H).
`o` has v's dtype. The state is float32 (float64 when q is float64) and always returned. No input is modified.

With `cu_seqlens` (int32 or int64 [N+1], from 0 to T) B must be 1 and every document has its own state; a document of no
tokens returns the state it was given. T = 0 returns the state that was given, or zeros.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import weakref
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from palimpsest.ops import cpu, graph
from palimpsest.ops.chunked import chunked
from palimpsest.ops.conv import short_conv
from palimpsest.ops.cpu import attend
from palimpsest.ops.cross_entropy import linear_cross_entropy
from palimpsest.ops.graph import grouped as grouped_in_graph
from palimpsest.ops.grouped import grouped_matmul
from palimpsest.ops.linear import GROUP as Q8_0_GROUP
from palimpsest.ops.linear import linear, q8_0_decode, q8_0_encode, q8_0_matmul
from palimpsest.ops.mxfp4 import GROUP as MXFP4_GROUP
from palimpsest.ops.mxfp4 import mxfp4_decode, mxfp4_encode, mxfp4_matmul
from palimpsest.ops.norms import gated_rms_norm, rms_norm
from palimpsest.ops.reference import recurrence

__all__ = [
    "MXFP4_GROUP",
    "Q8_0_GROUP",
    "attend",
    "backends",
    "can_attend",
    "choose",
    "delta_rule",
    "gated_delta_rule",
    "gated_rms_norm",
    "grouped_in_graph",
    "grouped_matmul",
    "kda",
    "kda_gate",
    "l2norm",
    "linear",
    "linear_attention",
    "linear_cross_entropy",
    "mxfp4_decode",
    "mxfp4_encode",
    "mxfp4_matmul",
    "q8_0_decode",
    "q8_0_encode",
    "q8_0_matmul",
    "rms_norm",
    "short_conv",
    "trains_on_triton",
]

TRITON_WIDEST = 256  # key channels that a GPU program holds in registers
BACKENDS = ("reference", "chunked", "triton", "cpu")
Gate = tuple[Tensor, Tensor | None, float | None]  # A_log, dt_bias, lower_bound


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    backend: str | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    qk_l2norm: bool = False,
    beta_is_logit: bool = False,
) -> tuple[Tensor, Tensor]:
    """Kimi Delta Attention: the delta rule with one forgetting rate per key channel.

    S' = Diag(exp(g_t)) S;  S = S' + beta_t k_t (v_t - S'^T k_t)^T;  o_t = S^T (scale q_t)

    g [B,T,HV,K] log decay <= 0; beta [B,T,HV]. With `A_log` [HV] (and `dt_bias` [HV*K]) g is the gate's raw input and
    `kda_gate` is applied. `scale` defaults to K**-0.5. `qk_l2norm` normalises q and k per head first; `beta_is_logit`
    applies a sigmoid to beta. Returns (o, state).
    """
    _check_shape("g", g, (*_value_shape(v), k.shape[-1]))
    if A_log is None and (dt_bias is not None or lower_bound is not None):
        raise ValueError("dt_bias and lower_bound belong to the gate: give A_log too, or a ready g")
    gate = None if A_log is None else (A_log, dt_bias, lower_bound)
    return _run(q, k, v, g, beta, scale, state, cu_seqlens, chunk_size, backend, qk_l2norm, beta_is_logit, gate)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    backend: str | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    qk_l2norm: bool = False,
    beta_is_logit: bool = False,
) -> tuple[Tensor, Tensor]:
    """Gated DeltaNet: the delta rule with one forgetting rate per head, g [B,T,HV] <= 0. Otherwise as `kda`.

    With `A_log` [HV] (and `dt_bias` [HV]) g is the gate's raw input: g = -exp(A_log) softplus(g + dt_bias).
    """
    _check_shape("g", g, _value_shape(v))
    if A_log is None and dt_bias is not None:
        raise ValueError("dt_bias belongs to the gate: give A_log too, or a ready g")
    gate = None if A_log is None else (A_log, dt_bias, None)
    return _run(q, k, v, g, beta, scale, state, cu_seqlens, chunk_size, backend, qk_l2norm, beta_is_logit, gate)


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    backend: str | None = None,
    qk_l2norm: bool = False,
    beta_is_logit: bool = False,
) -> tuple[Tensor, Tensor]:
    """DeltaNet: S = S + beta_t k_t (v_t - S^T k_t)^T. beta [B,T,HV]. Otherwise as `kda`, without forgetting."""
    return _run(q, k, v, None, beta, scale, state, cu_seqlens, chunk_size, backend, qk_l2norm, beta_is_logit)


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    g: Tensor | None = None,
    scale: float | None = None,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Additive memory: S = S + k_t v_t^T, o_t = S^T (scale q_t). Feature map and normaliser belong to the caller.

    With g [B,T,HV] <= 0 the memory fades before each write, S = exp(g_t) S + k_t v_t^T: forgetting without the delta rule,
    as in Mamba-2 (arXiv 2405.21060).
    """
    if g is not None:
        _check_shape("g", g, _value_shape(v))
    return _run(q, k, v, g, None, scale, state, cu_seqlens, chunk_size, backend, False, False)


def kda_gate(z: Tensor, A_log: Tensor, dt_bias: Tensor | None, lower_bound: float | None = None) -> Tensor:
    """Log decay from the gate's raw input, in float32 (float64 when z is): z [...,HV,K], A_log [HV], dt_bias [HV*K].

    Without a bound g = -exp(A_log) softplus(z + dt_bias) (Kimi Linear, Gated DeltaNet with K = 1); with one
    g = lower_bound sigmoid(exp(A_log) (z + dt_bias)), which lies in (lower_bound, 0) (Kimi K3).
    """
    heads, channels = z.shape[-2:]
    _check_gate(heads, channels, A_log, dt_bias, lower_bound)
    dtype = _compute_dtype(z)
    z, rate = z.to(dtype), A_log.to(dtype).exp().unsqueeze(-1)
    if dt_bias is not None:
        z = z + dt_bias.to(dtype).view(heads, channels)
    if lower_bound is None:
        return -rate * F.softplus(z)
    return lower_bound * torch.sigmoid(rate * z)


def _check_gate(heads: int, channels: int, A_log: Tensor, dt_bias: Tensor | None, lower_bound: float | None) -> None:
    _check_shape("A_log", A_log, (heads,))
    if dt_bias is not None:
        _check_shape("dt_bias", dt_bias, (heads * channels,))
    if lower_bound is not None and not -5 <= lower_bound < 0:
        raise ValueError(f"lower_bound is {lower_bound}; it must be in [-5, 0)")


def l2norm(x: Tensor) -> Tensor:
    """x / sqrt(sum(x^2) + 1e-6) over the last axis, in float32 (float64 when x is)."""
    x = x.to(_compute_dtype(x))
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def can_attend(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether `attend` takes these: on a CPU with the compiled backend, of one dtype, and no gradient wanted."""
    same = q.is_cpu and q.dtype in (torch.float32, torch.bfloat16) and q.dtype is k.dtype is v.dtype
    return same and k.stride(3) == v.stride(3) == 1 and cpu.serves(q, k, v)


def choose(
    tokens: int,
    device: torch.device,
    backend: str | None = None,
    dtype: torch.dtype = torch.float32,
    key_dim: int = 1,
) -> tuple[str, str]:
    """The backend that will run and the reason. A name that cannot run here, or not on such inputs, raises ValueError."""
    if backend is not None:
        if backend not in BACKENDS:
            raise ValueError(f"backend is {backend!r}; it must be one of {', '.join(BACKENDS)} or None")
        for name, available, reason in backends():
            if name == backend and not available:
                raise ValueError(f"backend {backend!r} cannot run here: {reason}")
        refusals = {"cpu": cpu.refusal, "triton": _triton_refusal}
        refusal = refusals[backend](dtype, device, key_dim) if backend in refusals else None
        if refusal is not None:
            raise ValueError(f"backend {backend!r} cannot run here: {refusal}")
        return backend, "asked for"
    if cpu.refusal(dtype, device, key_dim) is None:
        return "cpu", "compiled, and its work is in cache whatever the length"
    if device.type == "cuda" and _triton_refusal(dtype, device, key_dim) is None:
        if _is_measured(device):
            return "triton", "GPU kernels: few tokens one by one, more by chunks of 64, state on chip"
        return "chunked", 'matrix products by chunks; the GPU kernels are measured on compute capability 9.0: backend="triton"'
    if tokens <= 2:
        return "reference", "one or two tokens: the recurrence itself does the least work"
    return "chunked", f"matrix products by chunks on {device.type}"


def backends() -> list[tuple[str, bool, str]]:
    """Every backend with whether it runs here and why."""
    return [
        ("reference", True, "token by token, any device and dtype"),
        ("chunked", True, "matrix products, any device"),
        ("triton", *_triton_runs()),
        ("cpu", cpu.library()[0] is not None, cpu.library()[1]),
    ]


@functools.cache
def _triton_runs() -> tuple[bool, str]:
    """Whether GPU kernels run here, and why."""
    if importlib.util.find_spec("triton") is None:
        return False, "triton is not installed"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return True, "kernels under triton's interpreter, for their arithmetic and not for speed"
    if not torch.cuda.is_available():
        return False, "there is no CUDA device"
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        return False, f"the GPU has compute capability {major}.{minor}; the kernels need 8.0"
    return True, f"kernels compiled for {torch.cuda.get_device_name()} when first used"


@functools.cache
def _is_measured(device: torch.device) -> bool:
    """Whether this GPU is of the kind that the kernels' errors and times were measured on."""
    return torch.cuda.get_device_capability(device) == (9, 0)


def _triton_refusal(dtype: torch.dtype, device: torch.device, key_dim: int) -> str | None:
    """Why these inputs are not for the GPU kernels, or None."""
    runs, reason = _triton_runs()
    if not runs:
        return reason
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"the tensors are on {device.type}"
    if dtype == torch.float64:
        return "the inputs are float64"
    if key_dim > TRITON_WIDEST:
        return f"there are {key_dim} key channels, more than {TRITON_WIDEST}"
    return None


def triton_runs(*tensors: Tensor) -> bool:
    """Whether GPU kernels work on these by choice: not in a graph, which torch fuses itself, nor on tensors that are cut over
    processes, which DTensor knows what to do with."""
    x = tensors[0]
    if x.device.type != "cuda" or torch.compiler.is_compiling() or any(hasattr(each, "device_mesh") for each in tensors):
        return False
    return _triton_refusal(x.dtype, x.device, 1) is None and _is_measured(x.device)


def trains_on_triton(*tensors: Tensor) -> bool:
    """Whether fused kernels with gradients take these. Where no gradient is wanted a step may be of a few tokens, and then
    torch's launches take less time than triton's."""
    x = tensors[0]
    wanted = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
    if not wanted or x.numel() == 0 or not triton_runs(*tensors):
        return False
    return not x.is_cuda or x.device.index == torch.cuda.current_device()  # kernels are launched on the current device


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    scale: float | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    chunk_size: int,
    backend: str | None,
    qk_l2norm: bool,
    beta_is_logit: bool,
    gate: Gate | None = None,
) -> tuple[Tensor, Tensor]:
    """Checks, casts, expands the key heads and runs the chosen backend."""
    lengths = _check(q, k, v, beta, state, cu_seqlens, chunk_size)
    longest = q.shape[1] if lengths is None else max(lengths, default=0)
    in_graph = torch.compiler.is_compiling()  # then the choice is made when the graph runs
    name = backend or "" if in_graph else choose(longest, q.device, backend, q.dtype, q.shape[-1])[0]
    dtype, out_dtype = _compute_dtype(q), v.dtype
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    if gate is not None and g is not None:
        _check_gate(g.shape[2], g.shape[3] if g.dim() == 4 else 1, *gate)
    leaves = (q, k, v, g, beta, state, *(gate or ())[:2])
    learns = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in leaves)
    if name == "cpu" and not in_graph and not learns:
        o, final = cpu.fused(q, k, v, g, beta, state, lengths, factor, qk_l2norm, beta_is_logit, gate)
        return o if o.dtype is out_dtype else o.to(out_dtype), final
    if name == "triton" and not in_graph and q.shape[1] and q.shape[0]:
        from palimpsest.ops import triton

        return triton.recurrence(q, k, v, g, beta, state, lengths, factor, qk_l2norm, beta_is_logit, gate)
    if g is not None:
        g = g if g.dim() == 4 else g.unsqueeze(-1)
        g = g if gate is None else kda_gate(g, *gate)
    if qk_l2norm:
        q, k = l2norm(q), l2norm(k)
    q = q.to(dtype) * factor
    k, v = k.to(dtype), v.to(dtype)
    if beta is not None:
        beta = beta.to(dtype).sigmoid() if beta_is_logit else beta.to(dtype)
    g = None if g is None else g.to(dtype)
    repeat = v.shape[2] // q.shape[2]
    if repeat > 1:
        q, k = q.repeat_interleave(repeat, 2), k.repeat_interleave(repeat, 2)
    if state is None:
        sequences = q.shape[0] if lengths is None else len(lengths)
        state = q.new_zeros(sequences, v.shape[2], q.shape[3], v.shape[3])
    state = state.to(dtype)
    # The dtypes are set above; autocast would take the memory's products down to 16 bits.
    with torch.autocast(q.device.type, enabled=False):
        o, final = (graph.recurrence if in_graph else _dispatch)(name, q, k, v, g, beta, state, lengths, chunk_size)
    return o.to(out_dtype), final


def _dispatch(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    lengths: list[int] | None,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """The backend of that name on inputs that `_run` has made ready."""
    name = name or choose(q.shape[1], q.device, None, q.dtype, q.shape[-1])[0]
    if name == "cpu":
        return cpu.differentiable(q, k, v, g, beta, state, lengths)
    if name == "triton" and q.shape[1] and q.shape[0]:
        from palimpsest.ops import triton

        return triton.recurrence(q, k, v, g, beta, state, lengths, 1.0, False, False, None)
    if name == "reference":
        return recurrence(q, k, v, g, beta, state, lengths)
    return chunked(q, k, v, g, beta, state, lengths, chunk_size)


graph.register(_dispatch, grouped_matmul)


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _value_shape(v: Tensor) -> tuple[int, ...]:
    if v.dim() != 4:
        raise ValueError(f"v has shape {list(v.shape)}; it must be [B,T,HV,V]")
    return tuple(v.shape[:3])


def _check_shape(name: str, x: Tensor, expected: tuple[int, ...]) -> None:
    if tuple(x.shape) != expected:
        raise ValueError(f"{name} has shape {list(x.shape)}; expected {list(expected)}")


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    chunk_size: int,
) -> list[int] | None:
    """Raises ValueError for shapes that do not fit; returns the document lengths, or None when nothing is packed."""
    batch, tokens, value_heads = _value_shape(v)
    if q.dim() != 4 or q.shape[:2] != v.shape[:2]:
        raise ValueError(f"q has shape {list(q.shape)}; it must be [B,T,H,K] with B={batch} and T={tokens} as in v")
    _check_shape("k", k, tuple(q.shape))
    heads = q.shape[2]
    if heads == 0 or value_heads % heads:
        raise ValueError(f"v has {value_heads} heads; it must be a multiple of the {heads} heads of q and k")
    if beta is not None:
        _check_shape("beta", beta, (batch, tokens, value_heads))
    if not 1 <= chunk_size <= 256:
        raise ValueError(f"chunk_size is {chunk_size}; it must be in 1..256")
    lengths = None if cu_seqlens is None else document_lengths(cu_seqlens, batch, tokens)
    if state is not None:
        sequences = batch if lengths is None else len(lengths)
        _check_shape("state", state, (sequences, value_heads, q.shape[3], v.shape[3]))
    return lengths


def document_lengths(cu_seqlens: Tensor, batch: int, tokens: int) -> list[int]:
    """Lengths of the packed documents; ValueError when the boundaries are not 0 = c_0 <= c_1 <= ... <= c_N = T."""
    if batch != 1:
        raise ValueError(f"the batch is {batch}; with cu_seqlens it must be 1 (all documents in one row)")
    if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.dim() != 1:
        raise ValueError(
            f"cu_seqlens is {cu_seqlens.dtype} with shape {list(cu_seqlens.shape)}; it must be int32 or int64 [N+1]"
        )
    bounds = _boundaries(cu_seqlens)
    if not bounds or bounds[0] != 0:
        raise ValueError(f"cu_seqlens starts with {bounds[:1]}; it must start with 0")
    if bounds[-1] != tokens:
        raise ValueError(f"cu_seqlens ends with {bounds[-1]}; it must end with the number of tokens, {tokens}")
    lengths = [after - before for before, after in zip(bounds, bounds[1:], strict=False)]
    if min(lengths, default=0) < 0:
        raise ValueError(f"cu_seqlens is {bounds}; it must not decrease")
    return lengths


def _boundaries(cu_seqlens: Tensor) -> list[int]:
    """The values of a tensor, read once for as long as it stays the same: reading waits for the device, and every layer of a
    model gets the same boundaries."""
    if cu_seqlens.device.type == "cpu" or cu_seqlens.is_inference():  # nothing to wait for; or its changes are not counted
        return cu_seqlens.tolist()
    global _read
    tensor, version, values = _read
    if tensor() is not cu_seqlens or version != cu_seqlens._version:
        values = cu_seqlens.tolist()
        _read = (weakref.ref(cu_seqlens), cu_seqlens._version, values)
    return values


_read: tuple[Callable[[], Tensor | None], int, list[int]] = (lambda: None, 0, [])
