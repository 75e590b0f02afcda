"""The gradients of one step: of the mean over all tokens that its micro-batches predict."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from palimpsest.conversations import ANSWER, BEGIN
from palimpsest.distributed import World, alone
from palimpsest.model import Model
from palimpsest.ops.cross_entropy import IGNORED

MicroBatch = tuple[Tensor, Tensor, Tensor | None]  # ids, labels as for the model, cu_seqlens when documents are apart


def backward(model: Model, micro_batches: Sequence[MicroBatch], precision: str = "fp32", world: World | None = None) -> float:
    """Adds the gradients of the mean loss over all predicted tokens of `micro_batches`; returns that loss in nats.

    ids and labels are int64 [B,T], or [1,total] with cu_seqlens. Every predicted token counts the same wherever it is, so
    the result is that of one large batch, also of the micro-batches of all processes of a `world`, of which each brings the
    rows that are its own. Without any predicted token it is 0.
    """
    world = world or alone()
    counts = [predicted(labels, bounds) for _, labels, bounds in micro_batches]
    total = 0.0
    # Processes that share the tokens of a row, or its heads, have all counted all of it.
    of_all = world.summed(sum(counts))[0] / (world.sizes.context * world.sizes.tensor)
    for (ids, labels, bounds), count in zip(micro_batches, counts, strict=True):
        if count == 0 and world.size == 1:
            continue
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=precision == "bf16"):
            loss = model.loss(ids, labels, bounds)
        share = loss * (count / max(of_all, 1))
        share.backward()
        total = total + share.detach()
    return world.summed(float(total))[0] / world.sizes.tensor


def predicted(labels: Tensor, bounds: Tensor | None) -> int:
    """How many tokens are predicted: labelled ones, but for the first of every sequence."""
    if bounds is None:
        return int((labels[:, 1:] != -100).sum())
    firsts = bounds[:-1][bounds.diff() > 0]
    return int((labels != -100).sum()) - int((labels[0, firsts] != -100).sum())


def split_documents(ids: Tensor, eos_id: int) -> tuple[Tensor, Tensor]:
    """Rows [B,T] as one packed row [1,B*T] and its boundaries: every row, and every token behind an end of text, begins one."""
    flat = ids.reshape(1, -1)
    begins = torch.zeros(flat.shape[1] + 1, dtype=torch.bool, device=ids.device)
    begins[:: ids.shape[1]] = True
    begins[1:] |= flat[0] == eos_id
    return flat, begins.nonzero().squeeze(1)


def arranged(ids: Tensor, eos_id: int | None = None, marks: Tensor | None = None) -> MicroBatch:
    """Rows [B,T] as they are read: as they lie; or packed and cut into documents, behind each `eos_id` or where `marks`
    [B,T] (conversations.py) say that a conversation begins, with labels for its answers only."""
    if marks is None:
        if eos_id is None:
            return ids, ids, None
        packed, bounds = split_documents(ids, eos_id)
        return packed, packed, bounds
    flat = marks.reshape(-1)
    begins = (flat & BEGIN).bool()
    begins[:: ids.shape[1]] = True
    bounds = F.pad(begins.nonzero().squeeze(1), (0, 1), value=len(flat))
    packed = ids.reshape(1, -1)
    return packed, packed.masked_fill((flat & ANSWER) == 0, IGNORED), bounds
