"""Guesses at what comes next. A pass over several tokens costs little more than one over one token, so a guess that is
right saves a pass; one that is wrong is taken back, and the answer is the same either way: the model draws at every place
from its own distribution, and a guess is kept only where the draw equals it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from palimpsest.config import InputError
from palimpsest.engine.passes import forward
from palimpsest.generate import draw
from palimpsest.model import Model
from palimpsest.state import State
from palimpsest.tokenizer import Tokenizer

if TYPE_CHECKING:
    from palimpsest.engine.request import Answer

NGRAM = 3  # tokens that must repeat before a continuation is guessed
PAUSE = 16  # tokens without a guess after one that was wrong from its first token


class Pace:
    """How many tokens are guessed at a time: twice as many when all were right, half as many when one was wrong."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._length = min(4, most)
        self._quiet_until = 0

    def length(self, tokens: int, room: int) -> int:
        """Tokens to guess behind a text of `tokens`, at most `room`."""
        return 0 if tokens < self._quiet_until else max(min(self._length, room), 0)

    def learn(self, guessed: int, right: int, tokens: int) -> None:
        """`right` of `guessed` tokens came true; the text now has `tokens` tokens."""
        if right == guessed:
            self._length = min(2 * self._length, self.most)
        else:
            self._length = max(self._length // 2, 1)
            if right == 0:
                self._quiet_until = tokens + PAUSE


class PromptLookup(Pace):
    """Guesses that the text goes on as it did where its last three tokens stood before."""

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self._seen: dict[tuple[int, ...], int] = {}  # n-gram -> where its continuation begins
        self._read = 0

    def guess(self, ids: Sequence[int], room: int) -> list[int]:
        """At most `room` tokens that may follow `ids`."""
        for end in range(max(self._read, NGRAM), len(ids)):  # all but the last n-gram, whose continuation is unknown
            self._seen[tuple(ids[end - NGRAM : end])] = end
        self._read = max(self._read, len(ids))
        length = self.length(len(ids), room)
        start = self._seen.get(tuple(ids[-NGRAM:])) if length else None
        return [] if start is None else list(ids[start : start + length])


class DraftModel:
    """A smaller model of the same vocabulary guesses. It reads an answer's text into a state of its own.

    It draws as the answer does, with the random numbers that the answer is going to draw with: where both models agree, so
    do their draws, and a sampled guess comes true as often as a greedy one. Biases, penalties and grammars are the answer's
    alone; under them guesses are wrong more often. Where its own context ends it guesses no more.
    """

    def __init__(self, model: Model, tokenizer: Tokenizer) -> None:
        self.model, self.tokenizer = model.eval(), tokenizer
        self._limit = model.config.max_position_embeddings if model.config.position != "none" else None

    def check(self, tokenizer: Tokenizer) -> None:
        """InputError unless every id means to this model what it means to the other."""
        if self.tokenizer.fingerprint != tokenizer.fingerprint:
            sizes = f"{self.tokenizer.vocab_size} tokens, the model's {tokenizer.vocab_size}"
            raise InputError(f"draft: its tokenizer is another one ({sizes}); give a draft with the tokenizer of the model")

    def new_state(self, rows: int) -> State:
        return self.model.new_state(rows)

    def guess(self, answers: Sequence[Answer], state: State, most_read: int) -> tuple[list[list[int]], list[State]]:
        """Guesses for every answer, and the states on the way: the first holds none of them, the n-th n - 1.

        Of a text that is new to it `most_read` tokens are read; a row whose text is not read to its end guesses nothing.
        """
        lengths = [self._length(answer) for answer in answers]
        unread = [
            answer.ids[held : held + most_read] if length else []
            for answer, held, length in zip(answers, state.lengths, lengths, strict=True)
        ]
        guesses: list[list[int]] = [[] for _ in answers]
        if not any(unread):
            return guesses, [state]
        hidden, state = forward(self.model, unread, state)
        trail = [state]
        ends = list(accumulate(map(len, unread)))
        rows = [row for row, piece in enumerate(unread) if piece and state.lengths[row] == len(answers[row].ids)]
        hidden = hidden[[ends[row] - 1 for row in rows]]
        chances = {row: _copied(answers[row].row.generator) for row in rows}
        while rows:
            rows = self._draw(answers, rows, hidden, chances, guesses)
            rows = [row for row in rows if len(guesses[row]) < lengths[row]]
            if rows:
                pieces = [guesses[row][-1:] if row in rows else [] for row in range(len(answers))]
                hidden, state = forward(self.model, pieces, trail[-1])
                trail.append(state)
        return guesses, trail

    def _length(self, answer: Answer) -> int:
        room = answer.room - 1 if self._limit is None else min(answer.room - 1, self._limit - len(answer.ids))
        return answer.lookup.length(len(answer.ids), room)

    def _draw(
        self,
        answers: Sequence[Answer],
        rows: list[int],
        hidden: Tensor,
        chances: dict[int, torch.Generator],
        guesses: list[list[int]],
    ) -> list[int]:
        """One more guess for `rows`, from hidden [rows,D]; returns those that can go on. An end is left to the answer."""
        going = []
        for row, logits in zip(rows, self.model.logits(hidden).cpu(), strict=True):
            answer = answers[row]
            try:
                token = draw(logits[: answer.row.vocab_size], answer.request.sampling, chances[row])
            except InputError:  # a damaged draft is no reason for an answer to fail
                continue
            if token not in answer.row.end_ids:
                guesses[row].append(token)
                going.append(row)
        return going


def settled(trail: Sequence[State], lengths: Sequence[int]) -> State:
    """Of the states on the way, for each row the one that holds `lengths[row]` tokens, or the last if none holds so many."""
    state = trail[-1]
    for earlier in reversed(trail[:-1]):
        rows = zip(earlier.lengths, state.lengths, lengths, strict=True)
        state = state.rewind(earlier, [max(then, min(now, wanted)) for then, now, wanted in rows])
    return state


def _copied(generator: torch.Generator) -> torch.Generator:
    copy = torch.Generator()
    copy.set_state(generator.get_state())
    return copy
