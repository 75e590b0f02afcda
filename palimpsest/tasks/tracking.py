"""Variable tracking, after RULER (arXiv 2404.06654): which names came to hold a value.

    SET x 5   ...   SET y x   SET p 8   ...   SET z y   SET q p   QUERY 5 x y z

SET is id 0, QUERY id 1; then come values, names and fillers. A statement sets a name to a value or to what another name holds;
fillers stand between statements. All names that hold the value are scored, in the order in which they got it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from palimpsest.tasks.task import IGNORED, Task, distinct, uniform

SET, QUERY = 0, 1


@dataclass(frozen=True)
class Tracking(Task):
    """`num_chains` chains of `num_hops` hops, mixed, in rows of `num_slots` slots of three ids; one chain is asked for."""

    name: ClassVar[str] = "variable tracking"
    num_slots: int = 32
    num_chains: int = 2
    num_hops: int = 3
    num_values: int = 16
    num_names: int = 64
    num_fillers: int = 64

    def __post_init__(self) -> None:
        self.require(self.num_hops >= 0, "num_hops", self.num_hops, "it must not be negative")
        remedy = f"use 1 to num_values ({self.num_values})"
        self.require(1 <= self.num_chains <= self.num_values, "num_chains", self.num_chains, remedy)
        needed = self.num_chains * self._links
        self.require(self.num_names >= max(needed, 2), "num_names", self.num_names, f"the chains need {max(needed, 2)}")
        self.require(self.num_slots >= needed, "num_slots", self.num_slots, f"the chains need {needed}")
        self.require(self.num_fillers >= 1, "num_fillers", self.num_fillers, "it must be at least 1")

    @property
    def _links(self) -> int:
        return self.num_hops + 1

    @property
    def vocab_size(self) -> int:
        return 2 + self.num_values + self.num_names + self.num_fillers

    @property
    def length(self) -> int:
        return 3 * self.num_slots + 2 + self._links

    @property
    def most_scored(self) -> int:
        return self._links

    @property
    def chance(self) -> float:
        return 1 / self.num_names

    def draw(self, batch_size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        chains, links = self.num_chains, self._links
        first_name = 2 + self.num_values
        values = 2 + distinct(batch_size, self.num_values, chains, generator)
        names = first_name + distinct(batch_size, self.num_names, chains * links, generator).view(batch_size, chains, links)
        sources = torch.cat([values.unsqueeze(-1), names[:, :, :-1]], -1)
        statements = torch.stack([torch.full_like(names, SET), names, sources], -1)  # [B,chains,links,3]
        # Every chain gets a random set of slots and keeps its order in them.
        slots = distinct(batch_size, self.num_slots, chains * links, generator).view(batch_size, chains, links).sort(-1).values
        first_filler = first_name + self.num_names
        body = uniform(first_filler, self.vocab_size, (batch_size, self.num_slots, 3), generator)
        body.scatter_(1, slots.flatten(1).unsqueeze(-1).expand(-1, -1, 3), statements.flatten(1, 2))
        asked = uniform(0, chains, (batch_size, 1), generator)
        answers = names.gather(1, asked.unsqueeze(-1).expand(-1, -1, links)).flatten(1)
        query = torch.full_like(asked, QUERY)
        ids = torch.cat([body.flatten(1), query, values.gather(1, asked), answers], 1)
        labels = torch.full_like(ids, IGNORED)
        labels[:, -links:] = answers
        return ids, labels

    def answer(self, row: list[int], position: int) -> int:
        end = 3 * self.num_slots
        held: dict[int, int] = {}
        for at in range(0, end, 3):
            if row[at] == SET:
                source = row[at + 2]
                held[row[at + 1]] = held.get(source, source)
        return [name for name, value in held.items() if value == row[end + 1]][position - end - 2]

    def at_length(self, length: int) -> Self:
        """The same chains among more or fewer fillers."""
        return replace(self, num_slots=(length - 2 - self._links) // 3)
