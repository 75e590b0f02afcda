"""Guesses at what comes next. A pass over several tokens costs little more than one over one token, so a guess that is
right saves a pass; one that is wrong is taken back, and the answer is the same either way: the model draws at every place
from its own distribution, and a guess is kept only where the draw equals it.
"""

from __future__ import annotations

from collections.abc import Sequence

NGRAM = 3  # tokens that must repeat before a continuation is guessed
PAUSE = 16  # tokens without a guess after one that was wrong from its first token


class PromptLookup:
    """Guesses that the text goes on as it did where its last three tokens stood before.

    The number of guessed tokens doubles when all were right, and halves when one was wrong.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._length = min(4, most)
        self._quiet_until = 0
        self._seen: dict[tuple[int, ...], int] = {}  # n-gram -> where its continuation begins
        self._read = 0

    def guess(self, ids: Sequence[int], room: int) -> list[int]:
        """At most `room` tokens that may follow `ids`."""
        for end in range(max(self._read, NGRAM), len(ids)):  # all but the last n-gram, whose continuation is unknown
            self._seen[tuple(ids[end - NGRAM : end])] = end
        self._read = max(self._read, len(ids))
        length = min(self._length, room)
        if length <= 0 or len(ids) < self._quiet_until:
            return []
        start = self._seen.get(tuple(ids[-NGRAM:]))
        return [] if start is None else list(ids[start : start + length])

    def learn(self, guessed: int, right: int, tokens: int) -> None:
        """`right` of `guessed` tokens came true; the text now has `tokens` tokens."""
        if right == guessed:
            self._length = min(2 * self._length, self.most)
        else:
            self._length = max(self._length // 2, 1)
            if right == 0:
                self._quiet_until = tokens + PAUSE
