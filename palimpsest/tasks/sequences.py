"""Tasks on the order of ids: palindrome, selective copy, induction.

palindrome        a b c 0 c b a             everything after the separator is scored (Kimi Linear, arXiv 2510.26692)
selective copy    . a . . b . c . | a b c   the ids among noise, in order (Mamba, arXiv 2312.00752)
induction         . . 0 a . . . 0 a         what followed the trigger the first time (the same paper)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from palimpsest.tasks.task import IGNORED, Task, distinct, uniform


@dataclass(frozen=True)
class Palindrome(Task):
    """`num_tokens` ids of 1..vocab_size-1, a separator (id 0), and the same backwards."""

    name: ClassVar[str] = "palindrome"
    num_tokens: int = 32
    vocab_size: int = 64

    def __post_init__(self) -> None:
        self.require(self.num_tokens >= 1, "num_tokens", self.num_tokens, "it must be at least 1")
        self.require(self.vocab_size >= 3, "vocab_size", self.vocab_size, "a separator and two symbols need at least 3")

    @property
    def length(self) -> int:
        return 2 * self.num_tokens + 1

    @property
    def most_scored(self) -> int:
        return self.num_tokens

    @property
    def chance(self) -> float:
        return 1 / (self.vocab_size - 1)

    def draw(self, batch_size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        half = uniform(1, self.vocab_size, (batch_size, self.num_tokens), generator)
        ids = torch.cat([half, half.new_zeros(batch_size, 1), half.flip(1)], 1)
        return ids, _label_from(ids, self.num_tokens + 1)

    def answer(self, row: list[int], position: int) -> int:
        return row[2 * self.num_tokens - position]

    def at_length(self, length: int) -> Self:
        return replace(self, num_tokens=(length - 1) // 2)


@dataclass(frozen=True)
class SelectiveCopy(Task):
    """`num_tokens` ids of 2..vocab_size-1 at random places among `context` - `num_tokens` noise ids (0), then id 1, then the
    ids in their order. `context` is how far they lie apart, `num_tokens` the load."""

    name: ClassVar[str] = "selective copy"
    context: int = 64
    num_tokens: int = 16
    vocab_size: int = 16

    def __post_init__(self) -> None:
        remedy = f"use 1 to context ({self.context})"
        self.require(1 <= self.num_tokens <= self.context, "num_tokens", self.num_tokens, remedy)
        self.require(self.vocab_size >= 4, "vocab_size", self.vocab_size, "noise, a separator and two symbols need at least 4")

    @property
    def length(self) -> int:
        return self.context + 1 + self.num_tokens

    @property
    def most_scored(self) -> int:
        return self.num_tokens

    @property
    def chance(self) -> float:
        return 1 / (self.vocab_size - 2)

    def draw(self, batch_size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        data = uniform(2, self.vocab_size, (batch_size, self.num_tokens), generator)
        places = distinct(batch_size, self.context, self.num_tokens, generator).sort(-1).values
        noisy = data.new_zeros(batch_size, self.context).scatter_(1, places, data)
        ids = torch.cat([noisy, data.new_ones(batch_size, 1), data], 1)
        return ids, _label_from(ids, self.context + 1)

    def answer(self, row: list[int], position: int) -> int:
        return [id for id in row[: self.context] if id > 1][position - self.context - 1]

    def at_length(self, length: int) -> Self:
        """As many ids to copy, with more or less noise."""
        return replace(self, context=length - 1 - self.num_tokens)


@dataclass(frozen=True)
class Induction(Task):
    """Random ids of 1..vocab_size-1; the trigger, id 0, stands at a random place and once more at the end."""

    name: ClassVar[str] = "induction"
    length: int = 64
    vocab_size: int = 16

    def __post_init__(self) -> None:
        self.require(self.length >= 4, "length", self.length, "two triggers and what follows them need at least 4 tokens")
        self.require(self.vocab_size >= 3, "vocab_size", self.vocab_size, "a trigger and two symbols need at least 3")

    @property
    def most_scored(self) -> int:
        return 1

    @property
    def chance(self) -> float:
        return 1 / (self.vocab_size - 1)

    def draw(self, batch_size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        ids = uniform(1, self.vocab_size, (batch_size, self.length), generator)
        place = uniform(0, self.length - 3, (batch_size, 1), generator)
        ids.scatter_(1, place, 0)
        ids[:, -2] = 0
        ids[:, -1:] = ids.gather(1, place + 1)
        return ids, _label_from(ids, self.length - 1)

    def answer(self, row: list[int], position: int) -> int:
        return row[row.index(0) + 1]

    def at_length(self, length: int) -> Self:
        return replace(self, length=length)


def _label_from(ids: Tensor, first: int) -> Tensor:
    """Labels of rows in which every id from `first` on is scored."""
    labels = torch.full_like(ids, IGNORED)
    labels[:, first:] = ids[:, first:]
    return labels
