"""Context parallel: every process of a group holds a stretch of the tokens, and a pass gives what it gives on one.

A stretch acts on a recurrent memory as a linear map, S_out = M S_in + R, and so does every read on the way,
o_t = R_t^T q_t + S_in^T M_t^T q_t. One pass of the operation over v with K more channels of zeros, on a state that begins as
[0 | I], gives all four. The processes exchange [R | M], each folds those before it into its S_in, and adds what that reads.
A document that begins inside a stretch takes nothing from before: its columns of M are zero.

Keys, values and latents are gathered whole; a convolution takes the last inputs of the stretch before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from palimpsest.state import Segments

# torch 2.13 has new names for these.
all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor", None)


@dataclass(frozen=True)
class Context:
    """The processes that share the tokens of each sequence, and this one's place among them."""

    group: Any  # a process group
    rank: int
    size: int

    def part(self, ids: Tensor, whole: Segments, least: int) -> tuple[Tensor, Segments, slice] | None:
        """(ids, segments, their places in each row) of this process' stretch, or None when the row does not cut into `size`
        equal stretches of `least` tokens or more; ids [B,T] or packed [1,total]. Equal on all processes in that."""
        tokens = ids.shape[1]
        if tokens % self.size or tokens // self.size < max(least, 1):
            return None
        length = tokens // self.size
        start = self.rank * length
        window = slice(start, start + length)
        if whole.cu_seqlens is None:
            rows = len(whole.new)
            segments = Segments((start,) * rows, (length,) * rows, None, ids.device, Part(self, (0,) * rows))
            return ids[:, window], segments, window
        bounds = whole.cu_seqlens.tolist()
        mine = [(a, b) for a, b in zip(bounds, bounds[1:], strict=False) if max(a, start) < min(b, start + length)]
        past = tuple(max(start - a, 0) for a, _ in mine)
        new = tuple(min(b, start + length) - max(a, start) for a, b in mine)
        own = F.pad(torch.tensor(new, device=ids.device).cumsum(0), (1, 0))
        return ids[:, window], Segments(past, new, own, ids.device, Part(self, tuple(a for a, _ in mine))), window

    def gather(self, x: Tensor) -> Tensor:
        """[size, ...]: every process' x, of equal shapes. Each must use the result, for its gradient is an exchange too."""
        return _Gather.apply(x, self.group, self.size)


@dataclass(frozen=True)
class Part:
    """What a pass over one stretch needs to know beside its segments."""

    context: Context
    starts: tuple[int, ...]  # where each of its sequences begins in the whole row

    def whole(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Every stretch's rows [B,T,...], joined to those of the whole row; in one exchange."""
        flat = torch.cat([x.flatten(2) for x in tensors], -1)
        rows = self.context.gather(flat).transpose(0, 1).flatten(1, 2)
        pieces = rows.split([x.flatten(2).shape[2] for x in tensors], -1)
        return tuple(piece.unflatten(2, x.shape[2:]) for piece, x in zip(pieces, tensors, strict=True))

    def before(self, x: Tensor, count: int, segments: Segments) -> Tensor:
        """The last `count` inputs [B or N,count,C] in front of each sequence's stretch: x [B,T,C] of the process before, for
        sequences that come from there, zeros elsewhere."""
        tails = self.context.gather(x[:, x.shape[1] - count :])
        tail = torch.cat([torch.zeros_like(tails[:1]), tails])[self.context.rank]
        if segments.cu_seqlens is None:
            return tail
        known = torch.arange(count, device=x.device) >= count - segments.past[0]
        first = torch.where(known.view(1, -1, 1), tail, tail.new_zeros(()))
        return torch.cat([first, tail.new_zeros(len(segments.new) - 1, *tail.shape[1:])])


def remembered(
    op: Callable[..., tuple[Tensor, Tensor]],
    segments: Segments,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *gates: Tensor,
    state: Tensor,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """`op(q, k, v, *gates, ...)`, one of `ops`: (o [B,T,HV,V], the state), over the whole sequences.

    With tokens spread over processes `state` is not read (it is that of sequences that have not begun), and the state that
    is returned is of no use.
    """
    if segments.context is None:
        return op(q, k, v, *gates, state=state, cu_seqlens=segments.cu_seqlens, **options)
    columns, keys = v.shape[-1], k.shape[-1]
    goes_on = torch.tensor([past > 0 for past in segments.past], dtype=state.dtype, device=state.device)
    identity = torch.eye(keys, dtype=state.dtype, device=state.device).expand(len(goes_on), state.shape[1], -1, -1)
    begin = torch.cat([torch.zeros_like(state), identity * goes_on.view(-1, 1, 1, 1)], -1)
    wide = F.pad(v.to(state.dtype), (0, keys))
    o, final = op(q, k, wide, *gates, state=begin, cu_seqlens=segments.cu_seqlens, **options)
    context = segments.context.context
    # Only the last sequence of a packed stretch goes on in the next; in a dense one, all rows do.
    maps = context.gather(final if segments.cu_seqlens is None else final[-1:])
    entering = [torch.zeros_like(maps[0][..., :columns])]
    for each in maps[:-1]:
        entering.append(each[..., columns:] @ entering[-1] + each[..., :columns])
    own = torch.stack(entering)[context.rank]
    read = torch.einsum("bthk,bhkv->bthv", o[..., columns:], own.to(o.dtype))
    return (o[..., :columns] + read).to(v.dtype), final[..., :columns]


class _Gather(torch.autograd.Function):
    """all_gather, whose gradient is the sum of what all processes have for this one's part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, size: int) -> Tensor:
        ctx.group = group
        out = x.new_empty(size, *x.shape)
        all_gather(out.view(size * x.shape[0], *x.shape[1:]), x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad = grads[0].contiguous()
        own = torch.empty_like(grad[0])
        reduce_scatter(own, grad.flatten(0, 1), group=ctx.group)
        return own, None, None
