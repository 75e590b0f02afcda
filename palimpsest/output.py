"""The file that `--json` names, the same for every command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from palimpsest.checkpoint import write_text
from palimpsest.config import InputError

Json = Annotated[Path | None, Parameter(name="--json", help="Also write the numbers to this JSON file.")]


def write_json(path: Path | None, values: Any) -> None:
    """Writes numbers where `--json` asked for them."""
    if path is not None:
        write_text(path, json.dumps(values, indent=1, ensure_ascii=False) + "\n")


def check_json(path: Path | None) -> None:
    """Refuses an unwritable `--json` before any work is done."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise InputError(f"--json {path}: not a file name in an existing folder")
