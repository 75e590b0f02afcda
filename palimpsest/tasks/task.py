"""What every task is: rows drawn from a generator, labels on what is scored, a solver, a chance level, dials."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from palimpsest.config import InputError

IGNORED = -100  # the label of a position that is not scored


class Task(ABC):
    """A synthetic task. Its dials are the fields of a frozen dataclass, checked once; a bad one raises `InputError`."""

    name: ClassVar[str]
    vocab_size: Any  # int, a field or a property
    length: Any  # int, likewise: tokens of a row

    @property
    @abstractmethod
    def most_scored(self) -> int:
        """The most scored positions a row can have."""

    @property
    @abstractmethod
    def chance(self) -> float:
        """The accuracy in (0, 1] of a guess among all possible answers. A model that guesses any id is below it."""

    @abstractmethod
    def draw(self, batch_size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """As `batch`, on dials that fit."""

    @abstractmethod
    def answer(self, row: list[int], position: int) -> int:
        """The id that is right at a scored position, from `row`, the ids in front of it, alone."""

    @abstractmethod
    def at_length(self, length: int) -> Self:
        """The same task, with the same vocabulary, in rows of at most `length` tokens."""

    def batch(self, batch_size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw rows: ids and labels, both int64 [B,T] on the generator's device, T = `length`.

        `labels[b,t]` is what is to be predicted from the ids before t where position t is scored, and -100 elsewhere; position
        0 never is. In most tasks it is `ids[b,t]`. The generator's state decides the rows.
        """
        self.require(batch_size >= 1, "batch_size", batch_size, "it must be at least 1")
        return self.draw(batch_size, generator)

    def solve(self, ids: Tensor, labels: Tensor) -> Tensor:
        """The answers of a perfect memory: int64 [B,T], -100 where nothing is scored.

        A scored position is answered from the ids before it and the task's dials; `labels` only says which are scored.
        """
        answers = torch.full_like(ids, IGNORED)
        rows = ids.tolist()
        for row, position in (labels != IGNORED).nonzero().tolist():
            answers[row, position] = self.answer(rows[row][:position], position)
        return answers

    def require(self, holds: bool, dial: str, value: object, remedy: str) -> None:
        if not holds:
            raise InputError(f"{self.name}: {dial} is {value}; {remedy}")


def distinct(batch_size: int, choices: int, count: int, generator: torch.Generator) -> Tensor:
    """int64 [B,count]: in every row `count` different numbers of 0..choices-1 in random order."""
    return torch.rand(batch_size, choices, generator=generator, device=generator.device).topk(count, -1).indices


def uniform(low: int, high: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """int64: independent numbers of low..high-1."""
    return torch.randint(low, high, shape, generator=generator, device=generator.device)
