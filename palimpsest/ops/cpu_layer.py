"""Decoding steps of whole sublayers in the compiled CPU backend: what cpu_layer.h wants to know, and the calls.

A step is one new token x [B,1,D] for each of a few sequences, float32 or bfloat16; norm and sublayer in one call. The
structures below hold addresses: whoever fills them keeps the tensors. No gradient.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, ClassVar

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

    kind: ClassVar[int]

    @functools.cached_property
    def is_large(self) -> bool:
        maps = (getattr(self, name) for name, kind in self._fields_ if kind is Map)  # type: ignore[misc]
        return sum(each.rows * each.columns for each in maps) > LARGE


class Recurrence(Weights):
    """KDA, Gated DeltaNet and DeltaNet."""

    kind = 0
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
    kind = 1
    _fields_ = [
        *((name, Norm) for name in ("norm", "q_norm", "k_norm")),
        *((name, Map) for name in ("q", "k", "v", "gate", "out")),
        *((name, ctypes.c_int64) for name in ("heads", "key_heads", "dim", "rotated")),
        ("theta", ctypes.c_double),
    ]


class Latents(Weights):
    """MLA."""

    kind = 2
    _fields_ = [
        *((name, Norm) for name in ("norm", "q_norm", "latent_norm")),
        *((name, Map) for name in ("q_low", "q", "kv_a", "kv_b", "gate", "out")),
        *((name, ctypes.c_int64) for name in ("heads", "rank", "nope", "rope", "value_dim")),
        ("theta", ctypes.c_double),
    ]


class Mlp(Weights):
    kind = 3
    _fields_ = [("norm", Norm), *((name, Map) for name in ("gate", "up", "down")), ("activation", Activation)]


class Experts(Weights):
    kind = 4
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


class Sublayer(ctypes.Structure):
    """A sublayer by the kind of its weights, and its memory: matrix and convolution before and after a token, or rows."""

    _fields_ = [
        ("weights", ctypes.c_void_p),
        *((name, ctypes.c_void_p * 2) for name in ("before", "after")),
        ("cache", cpu.Cache),
        *((name, ctypes.c_int32) for name in ("kind", "is_large", "stream")),
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


def sublayer_of(weights: Weights) -> Sublayer:
    """Its memory is still to be given. `weights` is to be kept as long."""
    return Sublayer(weights=ctypes.addressof(weights), kind=weights.kind, is_large=weights.is_large)


def give_matrix(sublayer: Sublayer, matrix: Tensor, conv: Tensor) -> tuple[Tensor, Tensor]:
    """matrix float32 [B,HV,K,V] and conv [B,W-1,C] as x, to be kept until the step is over -> room for both after it."""
    final, after = torch.empty_like(matrix), torch.empty_like(conv)
    sublayer.before[:] = matrix.data_ptr(), conv.data_ptr()
    sublayer.after[:] = final.data_ptr(), after.data_ptr()
    sublayer.stream = final.nbytes > cpu.STREAM_BYTES and final.data_ptr() % 64 == 0
    return final, after


def give_rows(sublayer: Sublayer, k: Tensor, v: Tensor | None = None) -> None:
    """k and v [B,S,Hkv,D] as x, or latents [c | p] [B,S,R+r], to be kept; each sequence gets the row behind its past here."""
    if v is None:
        strides = (*k.stride()[:2], 0)
        sublayer.cache = cpu.Cache(k.data_ptr(), k.data_ptr(), *strides, *strides)
    else:
        sublayer.cache = cpu.Cache(k.data_ptr(), v.data_ptr(), *k.stride()[:3], *v.stride()[:3])


def run(sublayers: Any, x: Tensor, past: tuple[int, ...], is_residual: bool = False) -> Tensor:
    """An array of sublayers for x [B,1,D], whose sequences hold past[b] tokens -> y [B,1,D].

    y is what the one sublayer gives; with `is_residual`, x and what each gives for the sum of those before it.
    """
    total, y = x.clone() if is_residual else x, torch.empty_like(x)
    tokens = _Tokens(total.data_ptr(), y.data_ptr(), len(past), _is_half(x), torch.get_num_threads())
    width = x.shape[2] if is_residual else 0
    lengths = (ctypes.c_int64 * len(past))(*past)
    cpu.library()[0].palimpsest_step(sublayers, len(sublayers), ctypes.byref(tokens), lengths, width)
    return total if is_residual else y


def _is_half(x: Tensor) -> bool:
    return x.dtype is torch.bfloat16


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
