"""Tensor parallel: every process of a group has some heads of each layer, and all tokens.

Maps to the heads are cut by rows and maps from them by columns (DTensor's colwise and rowwise). What the heads share, and
weights too small to be cut, every process has whole; the gradient is the sum of what each finds with its own heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Heads:
    """The processes that share the heads of each layer, and this one's place among them."""

    group: Any  # a process group
    rank: int
    size: int

    def share(self, x: Tensor) -> Tensor:
        """x, equal on all and used by each with its own heads; its gradient is the sum over the processes."""
        return _Shared.apply(x, self.group)

    def part(self, x: Tensor) -> Tensor:
        """This process' rows of x [heads * n, ...], equal on all."""
        return self.share(x).chunk(self.size)[self.rank]


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        total = grads[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def share(heads: Heads | None, x: Tensor) -> Tensor:
    """`heads.share(x)`; x itself when one process has all heads."""
    return x if heads is None else heads.share(x)


def part(heads: Heads | None, x: Tensor) -> Tensor:
    return x if heads is None else heads.part(x)
