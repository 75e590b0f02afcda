"""What a run learns from: text, tokens that were prepared before, or conversations; cut into training and validation parts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

from palimpsest import conversations, data
from palimpsest.config import InputError
from palimpsest.data import Errors, TokenFile
from palimpsest.tokenizer import Tokenizer

TOKENS = "tokens.bin"


class Material(NamedTuple):
    """Tokens to train on and to validate with, and for conversations their marks."""

    train: np.ndarray
    validation: np.ndarray
    marks: tuple[np.ndarray, np.ndarray] | None
    bytes_per_token: float | None


def make_tokenizer(name: str, text: list[Path], errors: Errors) -> Tokenizer:
    """The tokenizer that a run names: bytes, bpe:SIZE (learned from `text`), or a path. Raises InputError."""
    if name == "bytes":
        return Tokenizer.bytes()
    if not name.startswith("bpe:"):
        return Tokenizer.from_file(name)
    size = name.removeprefix("bpe:")
    if not size.isdecimal() or len(size) > 7 or not 257 <= int(size) <= 1_000_000:
        raise InputError(f"tokenizer is {name!r}; write bpe:SIZE with a vocabulary of 257 to 1000000 ids")
    print("learning the byte-pair encoding", file=sys.stderr)
    return Tokenizer.train((part for _, part in data.read_text(text, errors)), int(size))


def prepare(text: list[Path], folder: Path, tokenizer: Tokenizer, errors: Errors) -> TokenFile:
    """Writes tokens.bin and the tokenizer into `folder`, as `opened` takes them up."""
    print("preparing tokens", file=sys.stderr)
    tokens = data.prepare(text, folder / TOKENS, tokenizer, errors)
    tokenizer.save(folder)
    return tokens


def opened(folder: Path, tokenizer: Tokenizer) -> TokenFile:
    """The tokens in a folder that `prepare` wrote. Raises InputError when another tokenizer made them."""
    tokens = TokenFile.open(folder / TOKENS)
    if tokens.fingerprint != tokenizer.fingerprint:
        raise InputError(f"{tokens.path}: made with another tokenizer than this run's; make it again with that one")
    return tokens


def of_tokens(tokens: TokenFile, vocab_size: int, context_length: int, validation_share: float) -> Material:
    """All but the end to train on, the end to validate with. Raises InputError when either part would be too short."""
    tokens.check_vocab(vocab_size)
    held_out = max(1, round(tokens.num_tokens * validation_share))
    if tokens.num_tokens - held_out < context_length or held_out < 2:
        raise InputError(
            f"text: {tokens.num_tokens} tokens, {held_out} of them for validation; training needs at least one "
            f"sequence of context_length {context_length}: give more text or a shorter context"
        )
    return Material(tokens.tokens[:-held_out], tokens.tokens[-held_out:], None, tokens.num_bytes / tokens.num_tokens)


def of_conversations(files: list[Path], tokenizer: Tokenizer, context_length: int, validation_share: float) -> Material:
    """The last conversations are for validation."""
    talks = conversations.read(files)
    held_out = max(1, round(len(talks) * validation_share))
    if len(talks) <= held_out:
        raise InputError(f"chat: {len(talks)} conversations, {held_out} of them for validation; give more")
    parts = talks[:-held_out], talks[-held_out:]
    train, validation = (conversations.pack(part, tokenizer, context_length) for part in parts)
    if train.cut + validation.cut:
        cut = f"{train.cut + validation.cut} of {len(talks)} conversations are longer than context_length"
        print(f"{cut} and lose their end", file=sys.stderr)
    return Material(train.tokens, validation.tokens, (train.marks, validation.marks), None)
