"""Decoding steps of whole sublayers in the compiled CPU backend: what cpu_layer.h wants to know, and the calls.

A step is one new token x [B,1,D] for each of a few sequences, float32 or bfloat16; norm and sublayer in one call. The
structures below hold addresses: whoever fills them keeps the tensors. No gradient.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from palimpsest.ops import cpu

LARGE = 1 << 16  # weights from which on more than one thread is worth waking


class Map(ctypes.Structure):
    """A linear map: its weight [rows, columns], or that of the first of many, scales in float16 and bias, or nulls."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weight", "scale", "bias")),
        *((name, ctypes.c_int64) for name in ("rows", "columns")),
        *((name, ctypes.c_int32) for name in ("kind", "bias_is_half")),
    ]


class Numbers(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("is_half", ctypes.c_int64)]


class Norm(ctypes.Structure):
    _fields_ = [("weight", Numbers), ("bias", Numbers), ("eps", ctypes.c_float), ("centred", ctypes.c_int32)]


class Activation(ctypes.Structure):
    """form 0: gelu(up), 1: silu(gate) up, 2: SiTU with the two numbers."""

    _fields_ = [("form", ctypes.c_int32), ("beta", ctypes.c_float), ("linear_beta", ctypes.c_float)]


class Weights(ctypes.Structure):
    """What a sublayer's call reads."""

    @functools.cached_property
    def is_large(self) -> bool:
        maps = (getattr(self, name) for name, kind in self._fields_ if kind is Map)  # type: ignore[misc]
        return sum(each.rows * each.columns for each in maps) > LARGE


class Recurrence(Weights):
    """KDA, Gated DeltaNet and DeltaNet."""

    _fields_ = [
        *((name, Norm) for name in ("norm", "o_norm")),
        *((name, Map) for name in ("q", "k", "v", "decay_low", "decay", "gate_low", "gate", "beta", "out")),
        ("taps", ctypes.c_void_p * 3),
        ("form", cpu.Form),
        *((name, ctypes.c_int64) for name in ("heads", "value_heads", "key_dim", "value_dim", "window")),
        ("is_silu", ctypes.c_int32),
        ("strongest", ctypes.c_float),
    ]


class Attention(Weights):
    _fields_ = [
        *((name, Norm) for name in ("norm", "q_norm", "k_norm")),
        *((name, Map) for name in ("q", "k", "v", "gate", "out")),
        *((name, ctypes.c_int64) for name in ("heads", "key_heads", "dim", "rotated")),
        ("theta", ctypes.c_double),
    ]


class Latents(Weights):
    """MLA."""

    _fields_ = [
        *((name, Norm) for name in ("norm", "q_norm", "latent_norm")),
        *((name, Map) for name in ("q_low", "q", "kv_a", "kv_b", "gate", "out")),
        *((name, ctypes.c_int64) for name in ("heads", "rank", "nope", "rope", "value_dim")),
        ("theta", ctypes.c_double),
    ]


class Mlp(Weights):
    _fields_ = [("norm", Norm), *((name, Map) for name in ("gate", "up", "down")), ("activation", Activation)]


class Experts(Weights):
    _fields_ = [
        *((name, Norm) for name in ("norm", "latent_norm")),
        *((name, Map) for name in ("router", "latent_down", "gate", "up", "down", "latent_up")),
        *((name, Map) for name in ("shared_gate", "shared_up", "shared_down", "shared_open")),
        ("selection", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("count", "top_k")),
        ("activation", Activation),
        ("factor", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("is_softmax", "renormalise")),
    ]


class _Tokens(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "y")),
        ("n", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("is_half", "threads", "stream")),
    ]


def map_of(weight: Tensor, scale: Tensor | None = None, bias: Tensor | None = None) -> Map:
    """weight [...,out,in] in float32, bfloat16 or, with scale [out,in/32] of 16 bits, int8; bias [out]."""
    sizes = weight.shape[-2:]
    return Map(
        weight.data_ptr(), _address(scale), _address(bias), *sizes, cpu.KINDS[weight.dtype], bias is not None and _is_half(bias)
    )


def numbers(x: Tensor | None) -> Numbers:
    """x float32 or bfloat16, or none."""
    return Numbers(_address(x), x is not None and _is_half(x))


def recurrent(weights: Recurrence, x: Tensor, matrix: Tensor, conv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x [B,1,D], matrix float32 [B,HV,K,V], conv [B,W-1,C] as x -> y [B,1,D] and both memories after the token."""
    y, final, after = torch.empty_like(x), torch.empty_like(matrix), torch.empty_like(conv)
    tokens = _tokens(weights, x, y)
    tokens.stream = final.nbytes > cpu.STREAM_BYTES and final.data_ptr() % 64 == 0
    pointers = matrix.data_ptr(), final.data_ptr(), conv.data_ptr(), after.data_ptr()
    cpu.library()[0].palimpsest_recurrent_step(ctypes.byref(weights), ctypes.byref(tokens), *pointers)
    return y, final, after


def attention(weights: Attention, x: Tensor, k: Tensor, v: Tensor, past: tuple[int, ...]) -> Tensor:
    """x [B,1,D], k and v [B,S,Hkv,D] as x, of which sequence b holds past[b] rows and gets one more here -> y [B,1,D]."""
    strides = (*k.stride()[:3], *v.stride()[:3])
    return _over_rows("attention", weights, x, cpu.Cache(k.data_ptr(), v.data_ptr(), *strides), past)


def latent(weights: Latents, x: Tensor, rows: Tensor, past: tuple[int, ...]) -> Tensor:
    """x [B,1,D], rows [c | p] [B,S,R+r] as x, of which sequence b holds past[b] and gets one more here -> y [B,1,D]."""
    strides = (*rows.stride()[:2], 0)
    return _over_rows("latent", weights, x, cpu.Cache(rows.data_ptr(), rows.data_ptr(), *strides, *strides), past)


def mlp(weights: Mlp, x: Tensor) -> Tensor:
    """x [B,1,D] -> y [B,1,D]."""
    y = torch.empty_like(x)
    cpu.library()[0].palimpsest_mlp_step(ctypes.byref(weights), ctypes.byref(_tokens(weights, x, y)))
    return y


def experts(weights: Experts, x: Tensor) -> Tensor:
    """x [B,1,D] -> y [B,1,D]."""
    y = torch.empty_like(x)
    cpu.library()[0].palimpsest_experts_step(ctypes.byref(weights), ctypes.byref(_tokens(weights, x, y)))
    return y


def _over_rows(name: str, weights: Any, x: Tensor, cache: cpu.Cache, past: tuple[int, ...]) -> Tensor:
    y, count = torch.empty_like(x), len(past)
    call = getattr(cpu.library()[0], f"palimpsest_{name}_step")
    pointers = ctypes.byref(weights), ctypes.byref(_tokens(weights, x, y)), ctypes.byref(cache)
    call(*pointers, (ctypes.c_int64 * count)(*past))
    return y


def _tokens(weights: Weights, x: Tensor, y: Tensor) -> _Tokens:
    threads = torch.get_num_threads() if weights.is_large else 1
    return _Tokens(x.data_ptr(), y.data_ptr(), x.shape[0], _is_half(x), threads)


def _is_half(x: Tensor) -> bool:
    return x.dtype is torch.bfloat16


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
