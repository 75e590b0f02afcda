"""The short convolution in the compiled CPU backend, one pass over its input each way; cpu_conv.h has the equations.

Only the inputs are kept: the backward pass forms z again. The order of a sum depends on one sequence alone, of the taps'
gradient on all of them, but never on the threads.
"""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from palimpsest.ops import cpu

MOST_TAPS = 4  # a vector's last inputs and the taps stay in registers
SMALL = 1 << 15  # numbers up to which waking other threads takes longer than the work


class _Convolution(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "weight", "state", "bounds")),
        *((name, ctypes.c_int64) for name in ("row", "sequences", "channels", "taps")),
    ]


class _Grads(ctypes.Structure):
    _fields_ = [
        ("y", ctypes.c_void_p),
        ("row", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("x", "state", "weight")),
    ]


def takes(x: Tensor, weight: Tensor, state: Tensor) -> bool:
    """Whether the compiled form takes these, with gradients or without: all float32 on a CPU, and few taps."""
    same = x.is_cpu and x.dtype is weight.dtype is state.dtype is torch.float32
    return same and 0 < weight.shape[1] <= MOST_TAPS and cpu.trains(x, weight, state)


def short_conv(x: Tensor, weight: Tensor, state: Tensor, lengths: list[int] | None) -> Tensor:
    """x [B,T,C], weight [C,W], state [B or N,W-1,C], of what `takes` takes -> y [B,T,C]. Gradients reach all three."""
    return _ShortConv.apply(_by_row(x), weight.contiguous(), state.contiguous(), lengths)  # type: ignore[return-value]


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, state: Tensor, lengths: list[int] | None) -> Tensor:
        ctx.save_for_backward(x, weight, state)
        ctx.lengths = lengths
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        form = _form(x, weight, state, lengths)
        cpu.library()[0].palimpsest_conv(ctypes.byref(form), y.data_ptr(), _threads(x))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> Any:  # type: ignore[override]
        x, weight, state = ctx.saved_tensors
        d_y, form = _by_row(d_y), _form(x, weight, state, ctx.lengths)
        d_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        wanted = ctx.needs_input_grad
        d_weight, d_state = (torch.empty_like(each) if wanted[i] else None for i, each in ((1, weight), (2, state)))
        pointers = (None if each is None else each.data_ptr() for each in (d_x, d_state, d_weight))
        grads = _Grads(d_y.data_ptr(), d_y.stride(1), *pointers)
        cpu.library()[0].palimpsest_conv_backward(ctypes.byref(form), ctypes.byref(grads), _threads(x))
        return d_x, d_weight, d_state, None


def _form(x: Tensor, weight: Tensor, state: Tensor, lengths: list[int] | None) -> _Convolution:
    batch, tokens, channels = x.shape
    bounds = [tokens * row for row in range(batch + 1)] if lengths is None else [0, *itertools.accumulate(lengths)]
    places = (ctypes.c_int64 * len(bounds))(*bounds)
    pointers = x.data_ptr(), weight.data_ptr(), state.data_ptr(), ctypes.addressof(places)
    form = _Convolution(*pointers, x.stride(1), len(bounds) - 1, channels, weight.shape[1])
    form.held = places  # as long as the form itself
    return form


def _by_row(x: Tensor) -> Tensor:
    """x [B,T,C] itself if its B T rows are in one piece each and evenly apart; else a copy."""
    return x if x.stride(2) == 1 and (x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)) else x.contiguous()


def _threads(x: Tensor) -> int:
    return torch.get_num_threads() if x.numel() > SMALL else 1
