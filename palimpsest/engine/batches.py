"""Answers that are drawn together, and what their memory costs.

A batch is one state of several sequences, whose growing rows are as long as the longest. Sequences of very unequal lengths
therefore go into batches of their own: a batch's shortest is at least half its longest, or all are short.
"""

from __future__ import annotations

from collections.abc import Sequence

from palimpsest.engine.request import Answer
from palimpsest.model import Model
from palimpsest.state import State

SHORT = 512  # tokens; below this length nothing is gained by a batch of one's own


class Batch:
    """Answers and the state they are drawn from, row by row."""

    def __init__(self, answers: list[Answer], state: State) -> None:
        self.answers, self.state = answers, state

    def leave(self) -> None:
        """Lets those go that have ended."""
        kept = [row for row, answer in enumerate(self.answers) if answer.reason is None]
        self.keep(kept)

    def keep(self, rows: list[int]) -> None:
        if len(rows) < len(self.answers):
            self.state = self.state.select(rows)
            self.answers = [self.answers[row] for row in rows]


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
        answers, states = [], []
        for batch in batches:
            rows = [row for owner, row in members if owner is batch]
            if rows:
                answers += [batch.answers[row] for row in rows]
                states.append(batch.state if rows == list(range(len(batch.answers))) else batch.state.select(rows))
        regrouped.append(Batch(answers, State.join(states)))
    return regrouped


class Cost:
    """Bytes of memory from the model's own states: a fixed part per sequence and a part per token of the longest."""

    def __init__(self, model: Model) -> None:
        empty = model.new_state(1)
        self.fixed_bytes, self.bytes_per_token = empty.num_bytes(), empty.bytes_per_token()

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
