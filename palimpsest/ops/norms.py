"""RMSNorm, alone and with the gate that recurrent memories read through.

y = w x / sqrt(mean(x^2) + eps)  [ * sigmoid(g)  or  * silu(g) ]
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from palimpsest.ops import cpu

FEW = 1 << 16  # numbers up to which calling torch takes longer than its work


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis: arithmetic in float32 (float64 when x is), result in `dtype`, by
    default x's."""
    from palimpsest.ops import trains_on_triton

    dtype = dtype or x.dtype
    if x.is_cpu and x.dtype in (torch.float32, torch.bfloat16) and 0 < x.numel() <= FEW and cpu.serves(x, weight):
        return cpu.rms_norm(x.float(), weight.float(), eps).to(dtype)
    if trains_on_triton(x, weight):
        from palimpsest.ops.triton import norms

        if len(weight) <= norms.WIDEST:
            return norms.rms_norm(x, weight, eps, dtype)
    precise = torch.float64 if x.dtype == torch.float64 else torch.float32
    return F.rms_norm(x.to(precise), weight.shape, weight.to(precise), eps).to(dtype)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str) -> Tensor:
    """`rms_norm` times `activation` of the gate, 'sigmoid' or 'silu': x and gate [...,D], weight [D] -> [...,D] in x's dtype;
    nothing but the result is rounded to it."""
    from palimpsest.ops import trains_on_triton

    if trains_on_triton(x, gate, weight):
        from palimpsest.ops.triton import norms

        if len(weight) <= norms.WIDEST:
            return norms.rms_norm(x, weight, eps, x.dtype, gate, activation)
    precise = torch.float64 if x.dtype == torch.float64 else torch.float32
    gate = gate.to(precise)
    opened = torch.sigmoid(gate) if activation == "sigmoid" else F.silu(gate)
    return (rms_norm(x.to(precise), weight, eps) * opened).to(x.dtype)
