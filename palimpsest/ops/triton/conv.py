"""The short convolution in one pass over its input, and its gradients in two: z' once for every token, then all sums of it.

    y[t] = SiLU(z[t])    z[t] = sum_d w[W-1-d] x[t-d]
    z' = y' SiLU'(z)     x'[t] = sum_d w[W-1-d] z'[t+d]     w'[W-1-d] = sum_t x[t] z'[t+d]

A prime is a gradient. Only the inputs are kept: the backward pass forms z again, and z' in float32 is there while it runs.
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

TILE = {"BT": 64, "BC": 64, "num_warps": 4}  # tokens and channels of one program


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
    """Inputs at `position` [BT] of their sequences, which are at `row` of x: [BT,BC] in float32, 0 where not `live`. Left of a
    sequence stands its state: LEFT says that positions down to 1 - W may come."""
    here = x + row * stride
    if LEFT:
        here = tl.where(position < 0, state + (sequence * (W - 1) + position + (W - 1)) * C, here)
    return tl.load(here[:, None] + c[None, :], mask=live, other=0.0).to(tl.float32)


@triton.jit
def mixed(x, weight, state, c, row, sequence, position, live, stride, C: tl.constexpr, W: tl.constexpr):
    """z of tokens at `row`, [BT,BC]. `weight` [W,C]: a thread's channels lie together."""
    tap = tl.load(weight + (W - 1) * C + c, mask=c < C, other=0.0).to(tl.float32)
    sums = tap[None, :] * inputs(x, state, c, row, sequence, position, live, stride, C, W, False)
    for d in tl.static_range(1, W):
        tap = tl.load(weight + (W - 1 - d) * C + c, mask=c < C, other=0.0).to(tl.float32)
        sums += tap[None, :] * inputs(x, state, c, row - d, sequence, position - d, live, stride, C, W, True)
    return sums


@triton.jit(do_not_specialize=["total", "tokens"])
def conv(
    x, weight, state, y, places, total, tokens, stride,
    C: tl.constexpr, W: tl.constexpr, PACKED: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """BT of all B T tokens, BC channels."""
    t, c = tl.program_id(1) * BT + tl.arange(0, BT), tl.program_id(0) * BC + tl.arange(0, BC)
    sequence, position = place(t, places, total, tokens, PACKED)
    live, row = (t < total)[:, None] & (c < C)[None, :], t.to(tl.int64)
    z = mixed(x, weight, state, c, row, sequence, position, live, stride, C, W)
    tl.store(y + row[:, None] * C + c[None, :], (z * sigmoid(z)).to(y.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["total", "tokens"])
def conv_slope(
    x, weight, state, d_y, d_z, places, total, tokens, stride, stride_y,
    C: tl.constexpr, W: tl.constexpr, PACKED: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The same, and z' [B T,C]."""
    t, c = tl.program_id(1) * BT + tl.arange(0, BT), tl.program_id(0) * BC + tl.arange(0, BC)
    sequence, position = place(t, places, total, tokens, PACKED)
    live, row = (t < total)[:, None] & (c < C)[None, :], t.to(tl.int64)
    flow = tl.load(d_y + row[:, None] * stride_y + c[None, :], mask=live, other=0.0).to(tl.float32)
    z = mixed(x, weight, state, c, row, sequence, position, live, stride, C, W)
    gate = sigmoid(z)
    tl.store(d_z + row[:, None] * C + c[None, :], flow * gate * (1 + z * (1 - gate)), mask=live)


@triton.jit(do_not_specialize=["total", "rows"])
def conv_back(
    x, weight, state, d_z, d_x, d_weight, d_state, places, total, rows, stride,
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
        # So far into a sequence that began at this row or before, or else another one began in between.
        place_there = place_here + d
        same = (t + d < total) & (place_there < rows) & (position + d >= 0)
        if PACKED:
            _, place_there = place(t + d, places, total, rows, PACKED)
            same = (t + d < total) & (place_there >= d) & (position + d >= 0)
        flow = tl.load(d_z + (row + d)[:, None] * C + c[None, :], mask=same[:, None] & inside, other=0.0)
        tap = tl.load(weight + (W - 1 - d) * C + c, mask=c < C, other=0.0).to(tl.float32)
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


def _grid(channels: int, rows: int) -> tuple[int, int]:
    return -(-channels // TILE["BC"]), -(-rows // TILE["BT"])


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, state: Tensor, lengths: list[int] | None) -> Tensor:
        ctx.save_for_backward(x, weight, state)
        ctx.lengths = lengths
        batch, tokens, channels = x.shape
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        places = None if lengths is None else _places(tuple(lengths), x.device)
        conv[_grid(channels, batch * tokens)](
            x, weight.mT.contiguous(), state, y, places, batch * tokens, tokens, x.stride(1),
            C=channels, W=weight.shape[1], PACKED=lengths is not None, **TILE,
        )  # fmt: skip
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> Any:
        x, weight, state = ctx.saved_tensors
        d_y, dtype, weight = _by_row(d_y), weight.dtype, weight.mT.contiguous()
        (batch, tokens, channels), taps = x.shape, len(weight)
        form = {"C": channels, "W": taps, "PACKED": ctx.lengths is not None, **TILE}
        places = None if ctx.lengths is None else _places(tuple(ctx.lengths), x.device)
        d_z = torch.empty_like(x, dtype=torch.float32, memory_format=torch.contiguous_format)
        conv_slope[_grid(channels, batch * tokens)](
            x, weight, state, d_y, d_z, places, batch * tokens, tokens, x.stride(1), d_y.stride(1), **form
        )
        total = batch * tokens + len(state) * (taps - 1)
        lengths = None if ctx.lengths is None else tuple(length + taps - 1 for length in ctx.lengths)
        places = None if lengths is None else _places(lengths, x.device)
        grid = _grid(channels, total)
        d_x, d_state = (torch.empty_like(each, memory_format=torch.contiguous_format) for each in (x, state))
        parts = x.new_empty(grid[1], taps, channels, dtype=torch.float32)
        conv_back[grid](
            x, weight, state, d_z, d_x, parts, d_state, places, total, tokens + taps - 1, x.stride(1), **form
        )  # fmt: skip
        d_weight = parts.sum(0).mT.to(dtype) if ctx.needs_input_grad[1] else None
        return d_x, d_weight, d_state, None


def short_conv(x: Tensor, weight: Tensor, state: Tensor, lengths: list[int] | None) -> Tensor:
    """x [B,T,C], weight [C,W], state [B or N,W-1,C] -> y [B,T,C] in x's dtype; sums in float32. Gradients reach all three."""
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        with torch.cuda.device(x.device):
            return short_conv(x, weight, state, lengths)
    return _ShortConv.apply(_by_row(x), weight, state.contiguous(), lengths)  # type: ignore[return-value]
