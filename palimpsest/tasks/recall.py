"""Associative recall: rows of key-value pairs and what a memory that kept them answers.

A row of the recall task lists key-value pairs, then a separator, then the keys again in another order, each followed by
its value: `k1 v1 k2 v2 k3 v3 0 k2 v2 k3 v3 k1 v1`. Only the values after the separator are scored. What precedes
them says nothing about them except through the pairs, so a model scores above chance only by having kept the pairs
(multi-query associative recall in the form of Kimi Linear).

Id 0 is the separator, keys are ids 1 to vocab_size // 2 - 1, values are ids vocab_size // 2 to vocab_size - 1.

Dials: `num_pairs` is the load on the memory: beyond the number of key channels an additive or delta memory cannot hold
all pairs exactly. `vocab_size` sets how many keys must be told apart and the chance level. `num_queries` shortens a row
without lightening the load.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from torch import Tensor

from palimpsest.config import InputError
from palimpsest.tasks.scoring import score
from palimpsest.tasks.task import IGNORED, Task

if TYPE_CHECKING:
    from palimpsest.model import Model

SEPARATOR = 0


def recall_batch(
    num_pairs: int,
    vocab_size: int,
    batch_size: int,
    generator: torch.Generator,
    num_queries: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw rows of associative recall: ids and labels, both int64 [B,T], T = 2 num_pairs + 1 + 2 num_queries.

    The keys of a row are distinct, its values are uniform and independent, and its queries are `num_queries` of its
    pairs (None: all) in random order. Labels are unshifted: `labels[b,t] == ids[b,t]` where position t is scored, to be
    predicted from the ids before t, and -100 everywhere else. The tensors live on the generator's device. Raises
    `InputError` when the vocabulary has too few keys or a number is out of range.
    """
    return Recall(num_pairs, vocab_size, num_queries).batch(batch_size, generator)


def recall_solver(ids: Tensor, labels: Tensor) -> Tensor:
    """The answers of a perfect memory: int64 [B,T], -100 where nothing is scored.

    A scored position is answered from the ids before it alone: look up the key just read among the pairs. `labels` only
    says which positions are scored.
    """
    return Recall().solve(ids, labels)


def recall_chance(vocab_size: int) -> float:
    """The accuracy of guessing among the values, in (0, 1]. An untrained model, which guesses any id, is below it."""
    return 1 / vocabulary(vocab_size)[1]


def recall_accuracy(
    model: Model,
    num_pairs: int,
    vocab_size: int,
    examples: int,
    generator: torch.Generator,
    batch_size: int = 32,
) -> float:
    """The share in [0, 1] of scored positions where the model's most likely id, of its whole vocabulary, is right.

    `examples` rows are drawn, `batch_size` at a time, every pair queried once. The model is left in the mode it was in.
    Raises `InputError` when the model's vocabulary is smaller than the task's.
    """
    return score(model, Recall(num_pairs, vocab_size), examples, generator, batch_size).accuracy


@dataclass(frozen=True)
class Recall(Task):
    """`num_queries` (None: all) of `num_pairs` are asked for; dials as of `recall_batch`."""

    name: ClassVar[str] = "recall"
    num_pairs: int = 8
    vocab_size: int = 64
    num_queries: int | None = None

    def __post_init__(self) -> None:
        num_keys, _ = vocabulary(self.vocab_size)
        remedy = f"vocab_size {self.vocab_size} has {num_keys} distinct keys, so use 1 to {num_keys} or a larger vocab_size"
        self.require(1 <= self.num_pairs <= num_keys, "num_pairs", self.num_pairs, remedy)
        remedy = f"use 1 to num_pairs ({self.num_pairs})"
        self.require(1 <= self.most_scored <= self.num_pairs, "num_queries", self.num_queries, remedy)

    @property
    def length(self) -> int:
        return 2 * self.num_pairs + 1 + 2 * self.most_scored

    @property
    def most_scored(self) -> int:
        return self.num_pairs if self.num_queries is None else self.num_queries

    @property
    def chance(self) -> float:
        return recall_chance(self.vocab_size)

    def draw(self, batch_size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        num_keys, num_values = vocabulary(self.vocab_size)
        device = generator.device
        order = torch.rand(batch_size, num_keys, generator=generator, device=device).argsort(-1)
        keys = 1 + order[:, : self.num_pairs]
        values = torch.randint(num_values, (batch_size, self.num_pairs), generator=generator, device=device) + num_keys + 1
        asked = torch.rand(batch_size, self.num_pairs, generator=generator, device=device).argsort(-1)[:, : self.most_scored]
        pairs = torch.stack([keys, values], -1)  # [B,P,2]
        answers = pairs.gather(1, asked.unsqueeze(-1).expand(-1, -1, 2))  # [B,Q,2]
        separator = torch.full((batch_size, 1), SEPARATOR, device=device)
        ids = torch.cat([pairs.flatten(1), separator, answers.flatten(1)], 1)
        labels = torch.full_like(ids, IGNORED)
        first = 2 * self.num_pairs + 2  # the first value after the separator
        labels[:, first::2] = ids[:, first::2]
        return ids, labels

    def answer(self, row: list[int], position: int) -> int:
        return row[row.index(row[-1]) + 1]

    def at_length(self, length: int) -> Self:
        """With as many pairs as fit, all of them asked for."""
        self.require(length >= 5, "length", length, "a pair, a separator and a query need 5 tokens")
        return replace(self, num_pairs=(length - 1) // 4, num_queries=None)


def vocabulary(vocab_size: int) -> tuple[int, int]:
    """The number of keys and of values."""
    if vocab_size < 4:
        raise InputError(f"recall: vocab_size is {vocab_size}; a separator, a key and two values need at least 4")
    return vocab_size // 2 - 1, vocab_size - vocab_size // 2
