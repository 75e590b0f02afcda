"""A training run from plain text to a model folder, as a run file or a command line describes it.

[model]
preset = "kda-tiny"          # and any field of ModelConfig
[data]
text = ["plays/", "more.jsonl"]
tokenizer = "bpe:1024"       # or "bytes", or a tokenizer.json, or a folder with one
validation_share = 0.1
[train]
steps = 1000                 # and any field of TrainConfig
"""

from __future__ import annotations

import shutil
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from palimpsest import checkpoint, data
from palimpsest.config import InputError, ModelConfig, TrainConfig, suggestion
from palimpsest.model import Model
from palimpsest.progress import keep_memory
from palimpsest.tokenizer import Tokenizer
from palimpsest.train import Trainer

TABLES = {"model": None, "data": ("text", "tokenizer", "validation_share", "encoding_errors"), "train": None}


@dataclass(frozen=True)
class Recipe:
    """What to train, on what, and how."""

    preset: str
    overrides: dict[str, Any]  # ModelConfig fields; vocab_size follows the tokenizer unless given
    train: TrainConfig
    text: list[Path]
    tokenizer: str = "bytes"
    validation_share: float = 0.1
    encoding_errors: Literal["strict", "replace"] = "strict"

    @classmethod
    def from_file(cls, path: Path) -> Recipe:
        """Reads a run file; paths in it are relative to the file. Raises `InputError` naming file, table and key."""
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise InputError(f"{path}: not valid TOML ({error})") from None
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror}); check the path") from None
        for name, table in values.items():
            if name not in TABLES:
                raise InputError(f"{path}: unknown table [{name}]{suggestion(name, TABLES)}")
            if not isinstance(table, dict):
                raise InputError(f"{path}: {name} is {table!r}; it must be a table, [{name}]")
        model, source = dict(values.get("model", {})), dict(values.get("data", {}))
        preset = model.pop("preset", None)
        if not isinstance(preset, str):
            raise InputError(f"{path}: [model] preset is {preset!r}; name one of those that `palimpsest presets` lists")
        for key in source:
            if key not in (TABLES["data"] or ()):
                raise InputError(f"{path}: unknown key {key!r} in [data]{suggestion(key, TABLES['data'] or ())}")
        text = source.pop("text", None)
        text = [text] if isinstance(text, str) else text
        if not isinstance(text, list) or not text or not all(isinstance(item, str) for item in text):
            raise InputError(f"{path}: [data] text is {text!r}; it must be a file or folder, or a list of them")
        train = TrainConfig.from_dict(values.get("train", {}), source=str(path))
        return cls(preset, model, train, [path.parent / item for item in text], **source).checked(str(path))

    def checked(self, source: str = "") -> Recipe:
        """Itself, when every field is right; the model is checked with the vocabulary size it will have at least."""
        where = f"{source}: " if source else ""
        if not isinstance(self.tokenizer, str):
            raise InputError(f"{where}tokenizer is {self.tokenizer!r}; it must be 'bytes', 'bpe:SIZE' or a path")
        share = self.validation_share
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < 1:
            raise InputError(f"{where}validation_share is {share!r}; it must be in (0, 1)")
        if self.encoding_errors not in ("strict", "replace"):
            raise InputError(f"{where}encoding_errors is {self.encoding_errors!r}; it must be 'strict' or 'replace'")
        try:
            ModelConfig.preset(self.preset, **self.overrides)
        except InputError as error:
            raise InputError(f"{where}{error}") from None
        return self

    def run(self, out: Path, resume: bool = False) -> dict[str, Any]:
        """Prepares the tokens, trains, and leaves a model that `load` opens in `out`. Returns what came of it.

        Everything that can be refused is refused before anything is written. A stopped run goes on with `resume`.
        """
        if resume and not out.is_dir():
            raise InputError(f"{out}: there is no run to resume here; begin one without --resume")
        if not resume and out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise InputError(f"{out}: not an empty folder; resume the run in it with --resume, or give another --out")
        existed = out.exists()
        tokenizer = self._tokenizer(out, resume)
        config = ModelConfig.preset(self.preset, **{"vocab_size": tokenizer.vocab_size, **self.overrides})
        try:
            tokens = self._tokens(out, tokenizer, resume)
            tokens.check_vocab(config.vocab_size)
            torch.manual_seed(self.train.seed)
            model = Model(config)
            held_out = max(1, round(tokens.num_tokens * self.validation_share))
            if tokens.num_tokens - held_out < self.train.context_length or held_out < 2:
                raise InputError(
                    f"text: {tokens.num_tokens} tokens, {held_out} of them for validation; training needs at least one "
                    f"sequence of context_length {self.train.context_length}: give more text or a shorter context"
                )
            trainer = Trainer(
                model,
                self.train,
                tokens.tokens[:-held_out],
                tokens.tokens[-held_out:],
                folder=out,
                bytes_per_token=tokens.num_bytes / tokens.num_tokens,
                tokenizer=tokenizer,
            )
            if resume:
                trainer.resume()
        except InputError:
            if not resume:
                self._undo(out, existed)
            raise
        keep_memory()
        trainer.run()
        checkpoint.save(model, out, tokenizer=tokenizer)
        nats = trainer.evaluate()
        return {
            "folder": str(out),
            "steps": trainer.steps_done,
            "tokens": trainer.tokens_done,
            "seconds": trainer.seconds,
            "parameters": model.num_parameters(),
            "active_parameters": model.num_parameters(active=True),
            "val_nats_per_token": nats,
            "model": config.to_dict(),
            "train": self.train.to_dict(),
        }

    def _tokenizer(self, out: Path, resume: bool) -> Tokenizer:
        if self.tokenizer == "bytes":
            return Tokenizer.bytes()
        if not self.tokenizer.startswith("bpe:"):
            return Tokenizer.from_file(self.tokenizer)
        size = self.tokenizer.removeprefix("bpe:")
        if not size.isdecimal() or not 257 <= int(size) <= 1_000_000:
            raise InputError(f"tokenizer is {self.tokenizer!r}; write bpe:SIZE with a vocabulary of 257 to 1000000 ids")
        if resume:
            return Tokenizer.from_file(out / "data")
        print("learning the byte-pair encoding", file=sys.stderr)
        return Tokenizer.train((text for _, text in data.read_text(self.text, self.encoding_errors)), int(size))

    def _tokens(self, out: Path, tokenizer: Tokenizer, resume: bool) -> data.TokenFile:
        path = out / "data" / "tokens.bin"
        if resume and path.exists():
            return data.TokenFile.open(path)
        print("preparing tokens", file=sys.stderr)
        tokens = data.prepare(self.text, path, tokenizer, self.encoding_errors)
        tokenizer.save(out / "data")
        return tokens

    def _undo(self, out: Path, existed: bool) -> None:
        shutil.rmtree(out / "data", ignore_errors=True)
        if not existed and out.exists() and not any(out.iterdir()):
            out.rmdir()
