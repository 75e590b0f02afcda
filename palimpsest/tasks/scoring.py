"""Exact scoring of a model on a task: by position, by row, by length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from palimpsest.config import InputError
from palimpsest.tasks.task import IGNORED, Task

if TYPE_CHECKING:
    from palimpsest.model import Model


@dataclass(frozen=True)
class Score:
    """Shares in [0, 1]: of scored positions whose likeliest id is right, and of rows in which all are. A row all right is one
    that greedy decoding would have written."""

    accuracy: float
    rows: float
    scored: int


def scored_positions(labels: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """labels [B,T] -> (at, targets), int64 [B,most]: targets[b,i] is to be predicted at position at[b,i]. Nothing waits for the
    device. Rows with fewer scored positions are filled with -100."""
    order = (labels == IGNORED).byte().argsort(dim=-1, stable=True)[:, :most]
    return (order - 1).clamp(min=0), labels.gather(1, order)


@torch.no_grad()
def score(model: Model, task: Task, examples: int, generator: torch.Generator, batch_size: int = 32) -> Score:
    """`examples` rows, `batch_size` at a time, against the likeliest id of the model's whole vocabulary.

    Rows are drawn on the generator's device. The model is left in the mode it was in. Raises `InputError` when its vocabulary
    is smaller than the task's.
    """
    right = rows = scored = 0
    for hits, counted, _ in _answers(model, task, examples, generator, batch_size):
        right += int(hits.sum())
        scored += int(counted.sum())
        rows += int((hits | ~counted).all(-1).sum())
    return Score(right / max(scored, 1), rows / examples, scored)


@torch.no_grad()
def score_by_position(
    model: Model, task: Task, examples: int, generator: torch.Generator, buckets: int = 8, batch_size: int = 32
) -> list[dict[str, Any]]:
    """Accuracy of scored positions by where in the row they are: `buckets` stretches of equal width, {first, last, accuracy,
    scored}; those without a scored position are left out. Otherwise as `score`."""
    if not 1 <= buckets <= task.length:
        raise InputError(f"{task.name}: buckets is {buckets}; use 1 to the length ({task.length})")
    right, scored = torch.zeros(buckets, dtype=torch.int64), torch.zeros(buckets, dtype=torch.int64)
    for hits, counted, at in _answers(model, task, examples, generator, batch_size):
        bucket = ((at[counted] + 1) * buckets // task.length).cpu()
        right += bucket[hits[counted].cpu()].bincount(minlength=buckets)
        scored += bucket.bincount(minlength=buckets)
    bounds = [-(-i * task.length // buckets) for i in range(buckets + 1)]
    return [
        {"first": bounds[i], "last": bounds[i + 1] - 1, "accuracy": int(right[i]) / int(scored[i]), "scored": int(scored[i])}
        for i in range(buckets)
        if scored[i]
    ]


def score_by_length(
    model: Model, task: Task, lengths: Sequence[int], examples: int, generator: torch.Generator, batch_size: int = 32
) -> list[dict[str, Any]]:
    """How far beyond its training lengths a model goes: {length, accuracy, rows, scored} of `task.at_length` of each."""
    found = []
    for length in lengths:
        stretched = task.at_length(length)
        result = score(model, stretched, examples, generator, batch_size)
        found.append({"length": stretched.length, "accuracy": result.accuracy, "rows": result.rows, "scored": result.scored})
    return found


def _answers(
    model: Model, task: Task, examples: int, generator: torch.Generator, batch_size: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Per batch: where the likeliest id is right, where there was something to predict, and at which positions; [B,most]."""
    if examples < 1:
        raise InputError(f"{task.name}: examples is {examples}; it must be at least 1")
    fits(model, task)
    device = next(model.parameters()).device
    with evaluating(model):
        for start in range(0, examples, batch_size):
            ids, labels = (t.to(device) for t in task.batch(min(batch_size, examples - start), generator))
            at, targets = scored_positions(labels, task.most_scored)
            hidden, _ = model.hidden(ids)
            guesses = model.logits(hidden.gather(1, at.unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))).argmax(-1)
            counted = targets != IGNORED
            yield (guesses == targets) & counted, counted, at


def fits(model: Model, task: Task) -> None:
    """Raises `InputError` when the model does not know all ids of the task."""
    known = model.config.vocab_size
    if known < task.vocab_size:
        raise InputError(f"{task.name}: vocab_size is {task.vocab_size}; the model knows {known} ids, so use at most {known}")


@contextmanager
def evaluating(model: Model) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
