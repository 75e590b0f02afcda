"""One matrix product for many experts: rows sorted by expert against a stack of weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from palimpsest.ops import cpu
from palimpsest.ops.linear import linear, takes_few

FEW = 16  # rows of a decoding step, which meet few of the experts


def grouped_matmul(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """y[i] = weight[e] x[i], where the first counts[0] rows belong to expert 0, the next counts[1] to expert 1, ...

    x [N,in], weight [E,out,in] (the layout of nn.Linear, stacked), counts int64 [E] that sum to N -> y [N,out].
    An expert without rows gets a gradient of exactly zero. Raises ValueError for shapes that do not fit.
    """
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[2]:
        raise ValueError(f"x has shape {list(x.shape)} and weight {list(weight.shape)}; expected [N,in] and [E,out,in]")
    if counts.shape != weight.shape[:1]:
        raise ValueError(f"counts has shape {list(counts.shape)}; expected [{weight.shape[0]}]")
    device = x.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x, weight = x.to(dtype), weight.to(dtype)
    if device == "cpu" and x.shape[0] <= FEW and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)):
        return _few(x, weight, counts)
    return _Grouped.apply(x, weight, counts.cumsum(0).to(torch.int32))


def _few(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """The chosen experts alone: torch's grouped product would visit all of them."""
    if takes_few(x, weight):
        return cpu.few_matmul(x, weight, None, counts.tolist())
    chosen = counts.nonzero().flatten().tolist()
    rows = x.split(counts[chosen].tolist())
    if not chosen:
        return x.new_zeros(0, weight.shape[1])
    return torch.cat([linear(part, weight[expert]) for part, expert in zip(rows, chosen, strict=True)])


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        return _product(x, weight.mT, ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight, ends = ctx.saved_tensors
        grad = grads[0].contiguous()
        d_x = _product(grad, weight, ends) if ctx.needs_input_grad[0] else None
        d_weight = _outer(grad, x, ends) if ctx.needs_input_grad[1] else None
        return d_x, d_weight, None


def _product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x [N,a] against weight [E,a,b] by groups of rows -> [N,b]."""
    if _native(x, weight):
        return torch.nn.functional.grouped_mm(x, weight, offs=ends)
    slot, width = _slots(ends, x.shape[0])
    padded = x.new_zeros(ends.numel() * width, x.shape[1])
    padded[slot] = x
    return torch.bmm(padded.view(-1, width, x.shape[1]), weight).flatten(0, 1)[slot]


def _outer(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """The sum of grad[i] x[i]^T over each group of rows: [N,out], [N,in] -> [E,out,in]; zero for an empty group."""
    if _native(grad.mT, x):
        out = torch.nn.functional.grouped_mm(grad.mT, x, offs=ends)
        empty = torch.diff(ends, prepend=ends.new_zeros(1)) == 0
        return out.masked_fill_(empty.view(-1, 1, 1), 0)
    slot, width = _slots(ends, x.shape[0])
    left, right = (y.new_zeros(ends.numel() * width, y.shape[1]).index_copy_(0, slot, y) for y in (grad, x))
    return torch.bmm(left.view(-1, width, grad.shape[1]).mT, right.view(-1, width, x.shape[1]))


def _slots(ends: Tensor, rows: int) -> tuple[Tensor, int]:
    """Where each row stands when every group is padded to the longest: (index [N] into [E * width], width)."""
    counts = torch.diff(ends, prepend=ends.new_zeros(1)).long()
    width = max(int(counts.max()), 1)
    group = torch.repeat_interleave(torch.arange(ends.numel(), device=ends.device), counts, output_size=rows)
    start = ends.long() - counts
    return group * width + torch.arange(rows, device=ends.device) - start[group], width


def _native(left: Tensor, right: Tensor) -> bool:
    """Whether torch's grouped product takes these: 16-byte strides, and a dtype it has on this device."""
    dtypes = (torch.bfloat16, torch.float16, torch.float32) if left.device.type == "cpu" else (torch.bfloat16,)
    if left.dtype not in dtypes or right.dtype != left.dtype or left.shape[0] == 0 or left.shape[-1] == 0:
        return False
    step = 16 // left.element_size()
    for x in (left, right):
        strides = list(x.stride())
        if strides.pop(-1 if strides[-1] == 1 else -2) != 1 or any(stride % step for stride in strides):
            return False
    return True
