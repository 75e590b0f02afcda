"""The loss of a head without its logits: a block of rows at a time, each gone before the next.

    loss = sum_i log sum_v exp(W_v . h_i) - W_{y_i} . h_i

A vocabulary of 50,000 makes logits the largest tensor of a small model by far. The gradients need the same products, so they
are taken in the same visit and kept instead: [N,D] and [V,D].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

IGNORED = -100
BLOCK = 1 << 24  # logits that live at a time


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The summed cross-entropy in nats of targets [N] (int64, IGNORED counts nothing) under logits hidden [N,D] weight^T [D,V].

    float32 (float64 when hidden is); products in autocast's dtype where it is on. Equals
    `F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="sum")` with its gradients.
    """
    return _LinearCrossEntropy.apply(hidden, weight, targets)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        precise = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        d_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        d_weight = torch.zeros_like(weight, dtype=precise) if ctx.needs_input_grad[1] else None
        total = torch.zeros((), dtype=precise, device=hidden.device)
        with torch.autocast(device, enabled=False):
            columns = weight.to(dtype)
            step = max(BLOCK // len(weight), 1)
            for start in range(0, len(hidden), step):
                window = slice(start, start + step)
                h, y = hidden[window].to(dtype), targets[window]
                counted = y != IGNORED
                logits = (h @ columns.mT).to(precise)
                # log_softmax in place of logits: one tensor of the block's size, not three.
                logs = torch.log_softmax(logits, -1)
                place = y.masked_fill(~counted, 0).unsqueeze(-1)
                total -= (logs.gather(-1, place).squeeze(-1) * counted).sum()
                if d_hidden is None and d_weight is None:
                    continue
                flow = logs.exp_()
                flow.scatter_add_(-1, place, flow.new_full(place.shape, -1.0))
                flow = flow.mul_(counted.unsqueeze(-1)).to(dtype)
                if d_hidden is not None:
                    d_hidden[window] = (flow @ columns).to(hidden.dtype)
                if d_weight is not None:
                    d_weight += (flow.mT @ h).to(precise)
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        d_hidden, d_weight = ctx.saved_tensors
        scale = grads[0]
        return (
            None if d_hidden is None else d_hidden * scale.to(d_hidden.dtype),
            None if d_weight is None else (d_weight * scale).to(ctx.weight_dtype),
            None,
        )
