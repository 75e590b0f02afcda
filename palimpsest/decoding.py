"""Ids to text while they are drawn, one at a time."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from palimpsest.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}".encode()


class DecodeStream:
    """Ids in one at a time, whole characters out.

    For byte-level tokenizers everything that `push` and the final `flush` return, joined, is `decode` of the ids, also
    when a character is spread over several tokens and when the bytes are not valid UTF-8.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        # Without bytes per token: `_ids[:_shown]` were given out and stay as context (a leading space may be dropped).
        self._ids: list[int] = []
        self._shown = 0

    def push(self, token_id: int) -> str:
        """The characters that this id completes; often empty."""
        table = self._tokenizer._bytes_of_ids
        if table is not None:
            return self._utf8.decode(table.get(int(token_id), REPLACEMENT))
        self._ids.append(int(token_id))
        text = self._new_text()
        if not text or text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._ids = self._ids[self._shown :]
        self._shown = len(self._ids)
        return text

    def flush(self) -> str:
        """What is still held back, at the end of the ids: U+FFFD for a character that never became whole."""
        if self._tokenizer._bytes_of_ids is not None:
            return self._utf8.decode(b"", final=True)
        text = self._new_text()
        self._ids, self._shown = [], 0
        return text

    def _new_text(self) -> str:
        context = self._tokenizer.decode(self._ids[: self._shown])
        return self._tokenizer.decode(self._ids)[len(context) :]
