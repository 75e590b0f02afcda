"""Zoology's multi-query associative recall (arXiv 2312.04927).

The pairs come first; then every key once more, at a place drawn from a power law, among random ids. The id after a repeated key
is random too; the label there is the key's value.

    k1 v1 k2 v2  k2 r r r k1 r r r        (r random; labels: v2 after k2, v1 after k1)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from palimpsest.tasks.recall import recall_chance, vocabulary
from palimpsest.tasks.task import IGNORED, Task, distinct, uniform


@dataclass(frozen=True)
class MQAR(Task):
    """`num_pairs` pairs, then queries at gaps with p(gap) ~ gap^(power - 1): a small power asks soon.

    Keys are ids 1 to vocab_size // 2 - 1, values the upper half; both differ within a row. With `random_fillers` off every
    other place holds id 0. The defaults are Zoology's hardest training rows.
    """

    name: ClassVar[str] = "mqar"
    length: int = 256
    num_pairs: int = 64
    vocab_size: int = 8192
    power: float = 0.01
    random_fillers: bool = True

    def __post_init__(self) -> None:
        num_keys, _ = vocabulary(self.vocab_size)
        self.require(1 <= self.num_pairs <= num_keys, "num_pairs", self.num_pairs, f"the vocabulary has {num_keys} keys")
        least = 4 * self.num_pairs
        remedy = f"{self.num_pairs} pairs and their queries need at least {least} tokens"
        self.require(self.length >= least, "length", self.length, remedy)
        self.require(self.power > 0, "power", self.power, "it must be above 0")

    @property
    def most_scored(self) -> int:
        return self.num_pairs

    @property
    def chance(self) -> float:
        return recall_chance(self.vocab_size)

    def draw(self, batch_size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        num_keys, num_values = vocabulary(self.vocab_size)
        keys = 1 + distinct(batch_size, num_keys, self.num_pairs, generator)
        values = 1 + num_keys + distinct(batch_size, num_values, self.num_pairs, generator)
        shape = (batch_size, self.length - 2 * self.num_pairs)
        rest = uniform(0, self.vocab_size, shape, generator) if self.random_fillers else keys.new_zeros(shape)
        # The largest of log p + Gumbel noise, in falling order, are draws from p without replacement.
        places = torch.arange(1, shape[1] // 2 + 1, device=keys.device, dtype=torch.float32)
        noise = torch.rand(batch_size, len(places), generator=generator, device=keys.device)
        gumbel = -(-noise.clamp(min=1e-20).log()).clamp(min=1e-20).log()
        gaps = ((self.power - 1) * places.log() + gumbel).topk(self.num_pairs, -1).indices
        rest.scatter_(1, 2 * gaps, keys)
        ids = torch.cat([torch.stack([keys, values], -1).flatten(1), rest], 1)
        labels = torch.full_like(ids, IGNORED)
        return ids, labels.scatter_(1, 2 * self.num_pairs + 2 * gaps + 1, values)

    def answer(self, row: list[int], position: int) -> int:
        return row[2 * row[0 : 2 * self.num_pairs : 2].index(row[-1]) + 1]

    def at_length(self, length: int) -> Self:
        """The same pairs, with more or fewer fillers."""
        return replace(self, length=length)
