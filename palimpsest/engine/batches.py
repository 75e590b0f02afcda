"""Answers that are drawn together, and what their memory costs.

A batch is one state of several sequences, whose growing rows are as long as the longest. Sequences of very unequal lengths
therefore go into batches of their own: a batch's shortest is at least half its longest, or all are short.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from palimpsest.engine.prefixes import Node
from palimpsest.engine.request import Answer, Ticket
from palimpsest.model import Model
from palimpsest.state import State

SHORT = 512  # tokens; below this length nothing is gained by a batch of one's own


class Reading:
    """Tokens that are read before answers can be drawn: a prompt, or an answer that gave way and is read again."""

    def __init__(self, ticket: Ticket, answers: list[Answer], ids: list[int]) -> None:
        self.ticket, self.answers, self.ids = ticket, answers, ids
        self.done = 0  # tokens that `state` holds
        self.state: State | None = None
        self.node: Node | None = None
        self.hidden: Tensor | None = None  # [D], of the last token read


class Batch:
    """Answers and the state they are drawn from, row by row; beside it the state of a draft model, if one guesses."""

    def __init__(self, answers: list[Answer], state: State, draft: State | None = None) -> None:
        self.answers, self.state, self.draft = answers, state, draft

    def leave(self) -> None:
        """Lets those go that have ended."""
        kept = [row for row, answer in enumerate(self.answers) if answer.reason is None]
        self.keep(kept)

    def keep(self, rows: list[int]) -> None:
        if len(rows) < len(self.answers):
            kept = self.part(rows)
            self.answers, self.state, self.draft = kept.answers, kept.state, kept.draft

    def part(self, rows: list[int]) -> Batch:
        """Some of its answers as a batch of their own."""
        if rows == list(range(len(self.answers))):
            return self
        draft = None if self.draft is None else self.draft.select(rows)
        return Batch([self.answers[row] for row in rows], self.state.select(rows), draft)

    @staticmethod
    def join(parts: Sequence[Batch]) -> Batch:
        drafts = [part.draft for part in parts if part.draft is not None]
        answers = [answer for part in parts for answer in part.answers]
        return Batch(answers, State.join([part.state for part in parts]), State.join(drafts) if drafts else None)


def grouped(lengths: Sequence[int], grows: bool) -> list[list[int]]:
    """Which sequences share a batch, as indices into `lengths`; longest first."""
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    groups: list[list[int]] = []
    for index in order:
        if groups:
            longest = lengths[groups[-1][0]]
            if not grows or longest <= SHORT or 2 * lengths[index] >= longest:
                groups[-1].append(index)
                continue
        groups.append([index])
    return groups


def regroup(batches: list[Batch], grows: bool) -> list[Batch]:
    """The same answers in batches of like lengths."""
    places = [(batch, row) for batch in batches for row in range(len(batch.answers))]
    regrouped = []
    for group in grouped([batch.state.lengths[row] for batch, row in places], grows):
        members = [places[index] for index in group]
        chosen = [(batch, [row for owner, row in members if owner is batch]) for batch in batches]
        regrouped.append(Batch.join([batch.part(rows) for batch, rows in chosen if rows]))
    return regrouped


class Cost:
    """Bytes of memory from the models' own states: a fixed part per sequence and a part per token of the longest.

    A draft model's fixed part is held once for every token that it guesses at a time, and once before them.
    """

    def __init__(self, model: Model, draft: Model | None = None, guesses: int = 0) -> None:
        empty = model.new_state(1)
        self.fixed_bytes, self.bytes_per_token = empty.num_bytes(), empty.bytes_per_token()
        if draft is not None:
            empty = draft.new_state(1)
            self.fixed_bytes += (guesses + 1) * empty.num_bytes()
            self.bytes_per_token += empty.bytes_per_token()

    def of(self, lengths: Sequence[int]) -> int:
        """Sequences of these lengths, grouped, with the spare room that growing rows keep (state.py)."""
        total = 0
        for group in grouped(lengths, self.bytes_per_token > 0):
            longest = lengths[group[0]]
            total += len(group) * (self.fixed_bytes + self.bytes_per_token * (longest + max(longest // 4, 32)))
        return total

    def longest(self, budget_bytes: int) -> int | None:
        """The longest single sequence within a budget, None where length costs nothing."""
        if not self.bytes_per_token:
            return None
        return max(0, (budget_bytes - self.fixed_bytes) // self.bytes_per_token * 4 // 5 - 32)


def free_bytes(device: torch.device) -> int:
    """Memory that is free on a device now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") if hasattr(os, "sysconf") else 4 << 30
