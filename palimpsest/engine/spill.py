"""Memories that had to leave, in files: safetensors in a temporary folder of this process, gone with it."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from palimpsest.state import State
from palimpsest.state_file import filled, named

HIDDEN = "hidden"


class Spill:
    """At most `budget_bytes` of files. The folder is made when the first is written, readable by its owner only."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.num_bytes = 0
        self._folder: Path | None = None
        self._written = 0

    def write(self, memory: State, hidden: Tensor) -> Path | None:
        """The file of a memory, None where the disk does not take it. The caller makes room in the budget."""
        path = None
        try:
            if self._folder is None:
                self._folder = Path(tempfile.mkdtemp(prefix="palimpsest-"))
                weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
            self._written += 1
            path = self._folder / f"{self._written}.safetensors"
            save_file({**named(memory), HIDDEN: hidden.cpu()}, path)
            self.num_bytes += path.stat().st_size
        except (OSError, SafetensorError):
            if path is not None:
                path.unlink(missing_ok=True)
            return None
        return path

    def read(self, path: Path, empty: State, tokens: int, rows: int) -> tuple[State, Tensor] | None:
        """What `write` was given, None for a file that is gone or damaged; `empty` is a new state of the same model."""
        try:
            tensors = load_file(path)
            return filled(empty, tensors, tokens, rows), tensors[HIDDEN]
        except (OSError, SafetensorError, KeyError, ValueError):
            return None

    def drop(self, path: Path, size: int) -> None:
        self.num_bytes -= size
        path.unlink(missing_ok=True)
