"""The short convolution without gradients, in one pass over its input: y[t] = SiLU(sum_d w[W-1-d] x[t-d])."""

from __future__ import annotations

import functools
import itertools

import torch
import triton
import triton.language as tl
from torch import Tensor

from palimpsest.ops.triton.gates import sigmoid

TOKENS, CHANNELS = 32, 128  # of one program


@triton.jit(do_not_specialize=["total", "tokens"])
def conv(
    x, weight, state, y, places, total, tokens, stride,
    C: tl.constexpr, W: tl.constexpr, PACKED: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """BT of all B T tokens, BC channels. Packed documents: `places` [total,2] holds every token's document and position."""
    t, c = tl.program_id(1) * BT + tl.arange(0, BT), tl.program_id(0) * BC + tl.arange(0, BC)
    if PACKED:
        sequence = tl.load(places + 2 * t, mask=t < total, other=0).to(tl.int64)
        position = tl.load(places + 2 * t + 1, mask=t < total, other=0)
    else:
        sequence = (t // tokens).to(tl.int64)
        position = t % tokens
    live = (t < total)[:, None] & (c < C)[None, :]
    row = t.to(tl.int64)
    sums = tl.zeros([BT, BC], tl.float32)
    for d in tl.static_range(W):
        inside = (position >= d)[:, None]
        value = tl.load(x + (row - d)[:, None] * stride + c[None, :], mask=live & inside, other=0.0).to(tl.float32)
        if d > 0:  # left of a sequence stands its state
            at = (sequence * (W - 1) + position + (W - 1 - d))[:, None] * C + c[None, :]
            value += tl.load(state + at, mask=live & (inside == 0), other=0.0).to(tl.float32)
        tap = tl.load(weight + c * W + (W - 1 - d), mask=c < C, other=0.0).to(tl.float32)
        sums += tap[None, :] * value
    tl.store(y + row[:, None] * C + c[None, :], (sums * sigmoid(sums)).to(y.dtype.element_ty), mask=live)


@functools.lru_cache(maxsize=16)
def _places(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Document and position in it of every token, [T,2]."""
    pairs = itertools.chain.from_iterable(((row, at) for at in range(length)) for row, length in enumerate(lengths))
    return torch.tensor(list(pairs), dtype=torch.int32, device=device)


def short_conv(x: Tensor, weight: Tensor, state: Tensor, lengths: list[int] | None) -> Tensor:
    """x [B,T,C], weight [C,W], state [B or N,W-1,C] -> y [B,T,C] in x's dtype; sums in float32. No gradient."""
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        with torch.cuda.device(x.device):
            return short_conv(x, weight, state, lengths)
    batch, tokens, channels = x.shape
    if x.stride(2) != 1 or (batch > 1 and x.stride(0) != tokens * x.stride(1)):
        x = x.contiguous()
    y = x.new_empty(x.shape)
    places = None if lengths is None else _places(tuple(lengths), x.device)
    grid = (-(-channels // CHANNELS), -(-batch * tokens // TOKENS))
    conv[grid](
        x, weight.contiguous(), state.contiguous(), y, places, batch * tokens, tokens, x.stride(1),
        C=channels, W=weight.shape[1], PACKED=lengths is not None, BT=TOKENS, BC=CHANNELS,
    )  # fmt: skip
    return y
