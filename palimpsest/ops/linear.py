"""Linear maps whose weights are kept in fewer bits than they are multiplied with.

    bfloat16    as it is
    Q8_0        w[o, i] = scale[o, i // 32] * code[o, i]        code int8, scale float16 (ggml's blocks of the same name)

A step of a few tokens is bound by reading the weights, so half the bytes are half the time. A short prompt is bound by widening
them, which the compiled product does once for all rows and where the caches hold them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from palimpsest.ops import cpu

GROUP = 32  # columns under one scale
FEW = 16  # rows of x up to which reading the weights again for every four of them costs little
# Rows up to which the compiled product was faster than torch or level with it, by the types of x and weight.
MOST = {
    (torch.float32, torch.float32): 32,
    (torch.bfloat16, torch.bfloat16): FEW,
    (torch.float32, torch.int8): 512,
    (torch.bfloat16, torch.int8): 32,
}
TILE = 1 << 19  # weights that are widened at a time


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = x W^T + bias: torch's, but up to MOST rows of x meet the compiled product if there is one and no gradient is wanted.

    x [...,in], weight [out,in] -> [...,out] in x's dtype; products are summed in float32.
    """
    if takes_few(x, weight):
        y = cpu.few_matmul(x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], weight.shape[0])
        return y if bias is None else y + bias
    return F.linear(x, weight, bias)


def takes_few(x: Tensor, weight: Tensor) -> bool:
    """Whether the compiled product takes a few rows of x and weights of the same dtype."""
    return weight.dtype is x.dtype and _is_small(x, weight)


def q8_0_encode(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [...,in], in a multiple of 32 -> (code int8 [...,in], scale float16 [...,in/32]): the nearest codes, ties away
    from zero, with the group's largest value at 127. Raises ValueError for other widths and for what float16 cannot scale."""
    if weight.shape[-1] % GROUP:
        raise ValueError(f"weight has shape {list(weight.shape)}; expected the last axis a multiple of {GROUP}")
    groups = weight.float().unflatten(-1, (-1, GROUP))
    step = groups.abs().amax(-1, keepdim=True) / 127
    if not weight.is_meta and not bool((step <= torch.finfo(torch.float16).max).all()):
        raise ValueError("weight holds values too large for eight bits, NaN or infinity")
    scaled = torch.where(step > 0, groups / step, 0.0)
    code = (scaled.abs() + 0.5).floor() * scaled.sign()
    return code.to(torch.int8).flatten(-2), step.squeeze(-1).to(torch.float16)


def q8_0_decode(code: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """code int8 [...,in], scale float16 [...,in/32] -> weights [...,in]; exact in float32."""
    return (code.float().unflatten(-1, (-1, GROUP)) * scale.float().unsqueeze(-1)).flatten(-2).to(dtype)


def q8_0_matmul(x: Tensor, code: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = x W^T + bias: x [...,in], code int8 [out,in], scale float16 [out,in/32] -> y [...,out] in x's dtype.

    Up to MOST rows of x meet the compiled product where there is one; else some rows of W at a time are widened, in x's dtype.
    Gradients reach x. Raises ValueError for shapes that do not fit.
    """
    if code.dim() != 2 or x.shape[-1] != code.shape[1] or scale.shape != (len(code), code.shape[1] // GROUP):
        shapes = f"x has shape {list(x.shape)}, code {list(code.shape)}, scale {list(scale.shape)}"
        raise ValueError(f"{shapes}; expected [...,in], [out,in], [out,in/{GROUP}]")
    if _is_small(x, code):
        y = cpu.few_matmul(x.reshape(-1, x.shape[-1]), code, scale).view(*x.shape[:-1], -1)
    else:
        rows = max(TILE // code.shape[1], 1)
        parts = zip(code.split(rows), scale.split(rows), strict=True)
        y = torch.cat([F.linear(x, q8_0_decode(*part, x.dtype)) for part in parts], -1)
    return y if bias is None else y + bias


def _is_small(x: Tensor, weight: Tensor) -> bool:
    most = MOST.get((x.dtype, weight.dtype), 0)
    return x.is_cpu and 0 < x.numel() <= most * x.shape[-1] and cpu.serves(x, weight)
