"""The short convolution in one pass over its input, and its gradients in another.

    y[t] = SiLU(z[t])    z[t] = sum_d w[W-1-d] x[t-d]
    z' = y' SiLU'(z)     x'[t] = sum_d w[W-1-d] z'[t+d]     w'[W-1-d] = sum_t x[t] z'[t+d]

A prime is a gradient. Only the inputs are kept: the backward pass forms z again.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from palimpsest.ops.triton.gates import sigmoid

TOKENS, CHANNELS = 32, 128  # of one program
BACK = {"BT": 32, "BC": 128, "num_warps": 4}  # the same in the backward pass


@triton.jit
def place(t, places, total, tokens, PACKED: tl.constexpr):
    """Sequence and position in it of rows t [BT]. Packed documents: `places` [total,2] holds both."""
    if PACKED:
        sequence = tl.load(places + 2 * t, mask=t < total, other=0).to(tl.int64)
        position = tl.load(places + 2 * t + 1, mask=t < total, other=0)
    else:
        sequence = (t // tokens).to(tl.int64)
        position = t % tokens
    return sequence, position


@triton.jit
def inputs(x, state, c, row, sequence, position, live, stride, C: tl.constexpr, W: tl.constexpr, LEFT: tl.constexpr):
    """Inputs at `position` [BT] of their sequences, which are at `row` of x: [BT,BC] in float32. Left of a sequence (LEFT: if
    positions may be below 0) stands its state, and left of that nothing."""
    value = tl.load(x + row[:, None] * stride + c[None, :], mask=live & (position >= 0)[:, None], other=0.0).to(tl.float32)
    if LEFT:
        at = (sequence * (W - 1) + position + (W - 1))[:, None] * C + c[None, :]
        old = live & ((position < 0) & (position > -W))[:, None]
        value += tl.load(state + at, mask=old, other=0.0).to(tl.float32)
    return value


@triton.jit(do_not_specialize=["total", "tokens"])
def conv(
    x, weight, state, y, places, total, tokens, stride,
    C: tl.constexpr, W: tl.constexpr, PACKED: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """BT of all B T tokens, BC channels."""
    t, c = tl.program_id(1) * BT + tl.arange(0, BT), tl.program_id(0) * BC + tl.arange(0, BC)
    sequence, position = place(t, places, total, tokens, PACKED)
    live = (t < total)[:, None] & (c < C)[None, :]
    row = t.to(tl.int64)
    sums = tl.zeros([BT, BC], tl.float32)
    for d in tl.static_range(W):
        tap = tl.load(weight + c * W + (W - 1 - d), mask=c < C, other=0.0).to(tl.float32)
        sums += tap[None, :] * inputs(x, state, c, row - d, sequence, position - d, live, stride, C, W, d > 0)
    tl.store(y + row[:, None] * C + c[None, :], (sums * sigmoid(sums)).to(y.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["total", "rows"])
def conv_back(
    x, weight, state, d_y, d_x, d_weight, d_state, places, total, rows, stride, stride_y,
    C: tl.constexpr, W: tl.constexpr, PACKED: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """BT rows, BC channels: gradients of x and of the state, and in `d_weight` [programs,W,C] these rows' part of the taps'.

    A sequence has W - 1 rows of its state in front of those of its tokens (`rows` in all when it is not packed), so the row of
    position p gives and gets gradients alike for all p >= 1 - W. The two tensors have the rows apart.
    """
    t, c = tl.program_id(1) * BT + tl.arange(0, BT), tl.program_id(0) * BC + tl.arange(0, BC)
    sequence, place_here = place(t, places, total, rows, PACKED)
    position = place_here - (W - 1)
    row = t.to(tl.int64) - (sequence + 1) * (W - 1)
    inside = (c < C)[None, :]
    live = (t < total)[:, None] & inside
    own = inputs(x, state, c, row, sequence, position, live, stride, C, W, W > 1)
    result = tl.zeros([BT, BC], tl.float32)
    for d in tl.static_range(W):  # the output d tokens on reads this row by tap W - 1 - d
        _, place_there = place(t + d, places, total, rows, PACKED)
        # So far into a sequence that began at this row or before, or else another one began in between.
        same = (t + d < total) & (place_there >= d) & (position + d >= 0)
        there = same[:, None] & inside
        sums = tl.zeros([BT, BC], tl.float32)
        for j in tl.static_range(W):
            tap = tl.load(weight + c * W + (W - 1 - j), mask=c < C, other=0.0).to(tl.float32)
            ahead = d - j
            sums += tap[None, :] * inputs(x, state, c, row + ahead, sequence, position + ahead, there, stride, C, W, j > 0)
        flow = tl.load(d_y + (row + d)[:, None] * stride_y + c[None, :], mask=there, other=0.0).to(tl.float32)
        gate = sigmoid(sums)
        flow = tl.where(there, flow * gate * (1 + sums * (1 - gate)), 0.0)
        tap = tl.load(weight + c * W + (W - 1 - d), mask=c < C, other=0.0).to(tl.float32)
        result += tap[None, :] * flow
        part = (tl.program_id(1).to(tl.int64) * W + (W - 1 - d)) * C + c
        tl.store(d_weight + part, tl.sum(own * flow, 0), mask=c < C)
    new = live & (position >= 0)[:, None]
    tl.store(d_x + row[:, None] * C + c[None, :], result.to(d_x.dtype.element_ty), mask=new)
    if W > 1:
        at = (sequence * (W - 1) + place_here)[:, None] * C + c[None, :]
        tl.store(d_state + at, result.to(d_state.dtype.element_ty), mask=live & (position < 0)[:, None])


@functools.lru_cache(maxsize=16)
def _places(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Sequence and position in it of every row, [rows,2]."""
    count = torch.tensor(lengths, dtype=torch.int32)
    sequence = torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(count)
    position = torch.arange(len(sequence), dtype=torch.int32) - (count.cumsum(0, dtype=torch.int32) - count)[sequence]
    return torch.stack([sequence, position], 1).to(device, non_blocking=True)


def _by_row(x: Tensor) -> Tensor:
    """x [B,T,C] itself if its B T rows are in one piece each and evenly apart; else a copy."""
    return x if x.stride(2) == 1 and (x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)) else x.contiguous()


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, state: Tensor, lengths: list[int] | None) -> Tensor:
        ctx.save_for_backward(x, weight, state)
        ctx.lengths = lengths
        batch, tokens, channels = x.shape
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        places = None if lengths is None else _places(tuple(lengths), x.device)
        grid = (-(-channels // CHANNELS), -(-batch * tokens // TOKENS))
        conv[grid](
            x, weight, state, y, places, batch * tokens, tokens, x.stride(1),
            C=channels, W=weight.shape[1], PACKED=lengths is not None, BT=TOKENS, BC=CHANNELS,
        )  # fmt: skip
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> Any:
        x, weight, state = ctx.saved_tensors
        d_y = _by_row(d_y)
        (batch, tokens, channels), taps = x.shape, weight.shape[1]
        total = batch * tokens + len(state) * (taps - 1)
        lengths = None if ctx.lengths is None else tuple(length + taps - 1 for length in ctx.lengths)
        places = None if lengths is None else _places(lengths, x.device)
        grid = (-(-channels // BACK["BC"]), -(-total // BACK["BT"]))
        d_x, d_state = (torch.empty_like(each, memory_format=torch.contiguous_format) for each in (x, state))
        parts = x.new_empty(grid[1], taps, channels, dtype=torch.float32)
        conv_back[grid](
            x, weight, state, d_y, d_x, parts, d_state, places, total, tokens + taps - 1, x.stride(1), d_y.stride(1),
            C=channels, W=taps, PACKED=lengths is not None, **BACK,
        )  # fmt: skip
        d_weight = parts.sum(0).mT.to(weight.dtype) if ctx.needs_input_grad[1] else None
        return d_x, d_weight, d_state, None


def short_conv(x: Tensor, weight: Tensor, state: Tensor, lengths: list[int] | None) -> Tensor:
    """x [B,T,C], weight [C,W], state [B or N,W-1,C] -> y [B,T,C] in x's dtype; sums in float32. Gradients reach all three."""
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        with torch.cuda.device(x.device):
            return short_conv(x, weight, state, lengths)
    return _ShortConv.apply(_by_row(x), weight.contiguous(), state.contiguous(), lengths)  # type: ignore[return-value]
