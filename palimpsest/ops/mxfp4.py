"""MXFP4: weights in four bits, 32 of a row sharing a power of two (OCP microscaling; E2M1 elements, E8M0 scales).

    w[o, i] = value[code[o, i]] * 2^(scale[o, i // 32] - 127)      value[0..7] = 0, 0.5, 1, 1.5, 2, 3, 4, 6; 8..15 negated

Byte j of a row holds column 2j in its low half and column 2j + 1 in its high half (compressed-tensors; ggml's blocks of the
same name order them otherwise).
"""

from __future__ import annotations

import math
import sys
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from palimpsest.ops import cpu

GROUP = 32  # columns under one scale
FEW = 16  # rows of x up to which unpacking anew for every four of them costs little
TILE_BYTES = 1 << 18  # packed bytes that are unpacked at a time: 2 MB in float32
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@cache
def _tables(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The four values of two bytes [65536,4], as an int16 numbers them, and the factor of each scale [256]; 255 is NaN."""
    signed = torch.tensor([*VALUES, *(-value for value in VALUES)], dtype=dtype)
    two = torch.arange(65536)
    halves = torch.stack([two >> shift & 15 for shift in ((0, 4, 8, 12) if sys.byteorder == "little" else (8, 12, 0, 4))], 1)
    factors = [*(math.ldexp(1.0, scale - 127) for scale in range(255)), math.nan]
    return signed[halves].to(device), torch.tensor(factors, dtype=dtype, device=device)


def mxfp4_decode(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """packed uint8 [...,in/2], scale uint8 [...,in/32] -> weights [...,in].

    Exact in float32 and bfloat16, but for scales 253 and 254, whose largest values only float64 holds (others: infinity).
    Raises ValueError for shapes that do not fit.
    """
    _check(packed, scale)
    # float16 lacks most of the factors; the other types hold every value and every factor, so their products are exact.
    values, factors = _tables(packed.device, torch.float32 if dtype == torch.float16 else dtype)
    number = packed.contiguous().view(torch.int16).int() & 0xFFFF
    groups = torch.index_select(values, 0, number.flatten()).view(*scale.shape, GROUP)
    return groups.mul_(factors[scale.int()].unsqueeze(-1)).flatten(-2).to(dtype)


def mxfp4_encode(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [...,in], in a multiple of 32 -> (packed uint8 [...,in/2], scale uint8 [...,in/32]).

    The scale is the power of two that brings a group's largest value nearest to [4, 6]: up to 7, which is as near to 6 as
    to the next value 8, it is rounded down to 6. Elements go to the nearest value, ties to the even code. What `mxfp4_decode`
    gives is encoded without loss. Raises ValueError for other widths and for NaN or infinity.
    """
    if not weight.is_floating_point() or weight.shape[-1] % GROUP:
        raise ValueError(f"weight is {weight.dtype} {list(weight.shape)}; expected floats, the last axis a multiple of {GROUP}")
    if not weight.is_meta and not bool(weight.isfinite().all()):
        raise ValueError("weight holds NaN or infinity; four bits cannot")
    groups = (weight if weight.dtype == torch.float64 else weight.float()).unflatten(-1, (-1, GROUP))
    mantissa, exponent = torch.frexp(groups.abs().amax(-1))  # largest = mantissa * 2^exponent, mantissa in [0.5, 1)
    scale = (exponent - 3 + (mantissa >= 0.875).int() + 127).clamp(0, 254)
    scale = torch.where(mantissa == 0, 0, scale)
    factors = _tables(weight.device, groups.dtype)[1]
    size = groups.abs() * factors[254 - scale].unsqueeze(-1)  # 2^-(scale - 127)
    code = (size > 0.25).to(torch.uint8) + (size >= 0.75) + (size > 1.25) + (size >= 1.75)
    code = code + (size > 2.5) + (size >= 3.5) + (size > 5) + 8 * torch.signbit(groups)
    low, high = code.to(torch.uint8).flatten(-2).unflatten(-1, (-1, 2)).unbind(-1)
    return low | (high << 4), scale.to(torch.uint8)


def mxfp4_matmul(x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    """y = x W^T from packed weights: x [...,in], packed uint8 [out,in/2], scale uint8 [out,in/32] -> y [...,out], x's dtype.

    A few rows of x meet the compiled product where there is one; else some rows of W at a time are unpacked, in x's dtype.
    Gradients reach x. Raises ValueError for shapes that do not fit.
    """
    _check(packed, scale)
    if packed.dim() != 2 or x.shape[-1] != 2 * packed.shape[1]:
        raise ValueError(f"x has shape {list(x.shape)} and packed {list(packed.shape)}; expected [...,in] and [out,in/2]")
    n = x.shape[:-1].numel()
    needs_grad = torch.is_grad_enabled() and x.requires_grad
    if 0 < n <= FEW and not needs_grad and cpu.refusal(x.dtype, x.device, 1) is None:
        return cpu.mxfp4_matmul(x.reshape(n, -1), packed, scale).view(*x.shape[:-1], -1).to(x.dtype)
    rows = max(TILE_BYTES // max(packed.shape[1], 1), 1)
    tiles = zip(packed.split(rows), scale.split(rows), strict=True)
    return torch.cat([F.linear(x, mxfp4_decode(part, factor, x.dtype)) for part, factor in tiles], -1)


def _check(packed: Tensor, scale: Tensor) -> None:
    if packed.dtype != torch.uint8 or scale.dtype != torch.uint8:
        raise ValueError(f"packed is {packed.dtype} and scale {scale.dtype}; both must be uint8")
    if packed.dim() < 1 or (*packed.shape[:-1], packed.shape[-1] * 2) != (*scale.shape[:-1], scale.shape[-1] * GROUP):
        shapes = f"packed has shape {list(packed.shape)} and scale {list(scale.shape)}"
        raise ValueError(f"{shapes}; expected [...,in/2] and [...,in/{GROUP}]")
