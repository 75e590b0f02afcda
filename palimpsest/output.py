"""What the commands share: the texts they are given, and the file that `--json` names."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from palimpsest.checkpoint import write_text
from palimpsest.config import InputError

Json = Annotated[Path | None, Parameter(name="--json", help="Also write the numbers to this JSON file.")]


def write_json(path: Path | None, values: Any) -> None:
    """Writes numbers where `--json` asked for them; those that are not finite become null, which JSON has."""
    if path is not None:
        write_text(path, json.dumps(_finite(values), indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def _finite(values: Any) -> Any:
    if isinstance(values, dict):
        return {key: _finite(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [_finite(value) for value in values]
    return None if isinstance(values, float) and not math.isfinite(values) else values


def check_file(path: Path | None, flag: str = "--json") -> None:
    """Refuses a file that cannot be written before any work is done."""
    if path is None:
        return
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir():
        raise InputError(f"{flag} {path}: not a file name in an existing folder")
    if not os.access(folder, os.W_OK):
        raise InputError(f"{flag} {path}: its folder cannot be written to; choose another")


def check_texts(_: Any, texts: Any) -> None:
    """What the command line gives as text must be one: bytes that are not UTF-8 arrive as halves of surrogate pairs."""
    for text in [texts] if isinstance(texts, str) else texts or []:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"It is not UTF-8 at character {error.start}; convert it.") from None


Text = Parameter(validator=check_texts)
