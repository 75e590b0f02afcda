"""A needle in a haystack, after RULER (arXiv 2404.06654) with one id for a key: S-NIAH-1, -2, -3 and several keys.

    haystack .. NEEDLE key v v v v .. haystack .. QUERY key v v v v

NEEDLE is id 0, QUERY id 1; then come the symbols of values, the keys, and 256 ids for the bytes of the haystack, which is

    sentence    one sentence over and over (S-NIAH-1): nothing in it is worth keeping
    synthetic   five-letter words, drawn by Zipf's law from 1,000 (S-NIAH-2 and -3 without a text)
    text        a random stretch of a text (S-NIAH-2 and -3)

Every id of a value is scored. A row counts as found when all of them are right, which is what greedy decoding finds.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from palimpsest.config import InputError
from palimpsest.tasks.task import IGNORED, Task, distinct, uniform

NEEDLE, QUERY = 0, 1
BYTES = 256
SENTENCE = b"The rain came down on the hill, and the road was long. "
NUM_WORDS, WORD = 1000, 6  # a word has five letters and a space


@dataclass(frozen=True)
class Needle(Task):
    """`num_needles` of different keys lie in a row, `num_queries` of them are asked for, one after another.

    `depth` puts a single needle at that share of the haystack, 0 its beginning; None is anywhere. Needles do not overlap.
    """

    name: ClassVar[str] = "needle"
    length: int = 512
    haystack: Literal["sentence", "synthetic", "text"] = "synthetic"
    value_length: int = 7
    value_symbols: int = 10
    num_keys: int = 64
    num_needles: int = 1
    num_queries: int = 1
    depth: float | None = None
    text: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        kinds = ("sentence", "synthetic", "text")
        self.require(self.haystack in kinds, "haystack", repr(self.haystack), f"use one of {', '.join(kinds)}")
        self.require(self.value_length >= 1, "value_length", self.value_length, "it must be at least 1")
        self.require(self.value_symbols >= 2, "value_symbols", self.value_symbols, "it must be at least 2")
        remedy = f"use 1 to num_keys ({self.num_keys})"
        self.require(1 <= self.num_needles <= self.num_keys, "num_needles", self.num_needles, remedy)
        remedy = f"use 1 to num_needles ({self.num_needles})"
        self.require(1 <= self.num_queries <= self.num_needles, "num_queries", self.num_queries, remedy)
        least = (self.num_needles + self.num_queries) * self._width
        self.require(self.length >= least, "length", self.length, f"the needles and queries alone need {least} tokens")
        alone = self.depth is None or (self.num_needles == 1 and 0 <= self.depth <= 1)
        self.require(alone, "depth", self.depth, "it must be in [0, 1], for a single needle")
        remedy = f"a row needs more than {self._hay} bytes of it"
        self.require(self.haystack != "text" or len(self.text) > self._hay, "text", f"{len(self.text)} bytes", remedy)

    @classmethod
    def single(cls, kind: int, length: int, text: bytes = b"") -> Self:
        """S-NIAH-1, -2 or -3: a number in a repeated sentence, a number in text, 32 hexadecimal digits in text."""
        if kind not in (1, 2, 3):
            raise InputError(f"{cls.name}: the kind of S-NIAH is {kind}; use 1, 2 or 3")
        haystack = "sentence" if kind == 1 else "text" if text else "synthetic"
        value = {"value_length": 32, "value_symbols": 16} if kind == 3 else {}
        return cls(length=length, haystack=haystack, text=text if kind > 1 else b"", **value)

    @property
    def _width(self) -> int:
        """Tokens of a needle, or of a query with its answer."""
        return 2 + self.value_length

    @property
    def _hay(self) -> int:
        """Tokens of the haystack, needles among them."""
        return self.length - self.num_queries * self._width

    @property
    def vocab_size(self) -> int:
        return 2 + self.value_symbols + self.num_keys + BYTES

    @property
    def most_scored(self) -> int:
        return self.num_queries * self.value_length

    @property
    def chance(self) -> float:
        return 1 / self.value_symbols

    def draw(self, batch_size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        width, first_key = self._width, 2 + self.value_symbols
        keys = first_key + distinct(batch_size, self.num_keys, self.num_needles, generator)
        values = uniform(2, first_key, (batch_size, self.num_needles, self.value_length), generator)
        needles = torch.cat([torch.full_like(keys, NEEDLE).unsqueeze(-1), keys.unsqueeze(-1), values], -1)  # [B,N,width]
        hay = first_key + self.num_keys + self._hay_bytes(batch_size, generator)
        # Gaps before the needles are the steps between sorted numbers: the needles keep apart by themselves.
        room = self._hay - self.num_needles * width
        if self.depth is None:
            before = uniform(0, room + 1, (batch_size, self.num_needles), generator).sort(-1).values
        else:
            before = torch.full_like(keys, round(self.depth * room))
        starts = before + width * torch.arange(self.num_needles, device=keys.device)
        places = starts.unsqueeze(-1) + torch.arange(width, device=keys.device)
        hay.scatter_(1, places.flatten(1), needles.flatten(1))
        asked = distinct(batch_size, self.num_needles, self.num_queries, generator)
        answers = needles.gather(1, asked.unsqueeze(-1).expand(-1, -1, width))
        answers[:, :, 0] = QUERY
        ids = torch.cat([hay, answers.flatten(1)], 1)
        labels = torch.full_like(ids, IGNORED)
        tail = labels[:, self._hay :].unflatten(1, (self.num_queries, width))
        tail[:, :, 2:] = answers[:, :, 2:]
        return ids, labels

    def _hay_bytes(self, batch_size: int, generator: torch.Generator) -> Tensor:
        """int64 [B,hay] in 0..255."""
        size, device = self._hay, generator.device
        if self.haystack == "synthetic":
            words, weights = _lexicon(device)
            count = batch_size * (size // WORD + 1)
            drawn = torch.multinomial(weights, count, replacement=True, generator=generator)
            return words[drawn].view(batch_size, -1)[:, :size].contiguous()
        source = _bytes(SENTENCE if self.haystack == "sentence" else self.text, device)
        if self.haystack == "sentence":
            first = uniform(0, len(source), (batch_size, 1), generator)
            return source[(first + torch.arange(size, device=device)) % len(source)]
        first = uniform(0, len(source) - size, (batch_size, 1), generator)
        return source[first + torch.arange(size, device=device)]

    def answer(self, row: list[int], position: int) -> int:
        already = (position - self._hay) % self._width - 2  # ids of the value that were given
        key = row[position - already - 1]
        hay = row[: self._hay]
        found = next(at for at in range(len(hay) - 1) if hay[at] == NEEDLE and hay[at + 1] == key)
        return hay[found + 2 + already]

    def at_length(self, length: int) -> Self:
        return replace(self, length=length)


@lru_cache(maxsize=4)
def _bytes(text: bytes, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long().to(device)  # ready when it returns: other streams use it


@lru_cache(maxsize=4)
def _lexicon(device: torch.device) -> tuple[Tensor, Tensor]:
    """The bytes of all words [NUM_WORDS,WORD], the same on every machine, and their frequencies."""
    fixed = torch.Generator().manual_seed(0)
    letters = torch.randint(97, 123, (NUM_WORDS, WORD), generator=fixed)
    letters[:, -1] = 32
    return letters.to(device), (1 / torch.arange(1.0, NUM_WORDS + 1)).to(device)
