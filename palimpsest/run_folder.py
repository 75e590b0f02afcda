"""A training run's folder beside its checkpoints: whose it is, and from where it may go on.

run.json  metrics.jsonl  pieces.json (where and when each start of it went on)  checkpoints/step-00000200/ ...
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from palimpsest import checkpoint
from palimpsest.config import InputError, TrainConfig
from palimpsest.optim import shared_steps

RUN, METRICS, PIECES = "run.json", "metrics.jsonl", "pieces.json"


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """While it lasts, no other process of this machine works in the folder, which is made if it is not there.

    Raises InputError where one does, and for a file. The system frees the folder of a process that dies. On Windows nothing
    is checked.
    """
    _make(folder)
    if os.name == "nt":
        yield
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise InputError(f"{folder}: cannot be written ({error.strerror}); give another folder") from None
    try:
        import fcntl

        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"{folder}: another process is at work in it; wait for its end, or give another folder") from None
        except OSError:  # a file system without locks
            pass
        yield
    finally:
        os.close(descriptor)


def claim(folder: Path, identity: dict[str, Any]) -> None:
    """Makes the folder that of a new run with these settings. Raises InputError for one that holds a run."""
    if any((folder / name).exists() for name in (RUN, METRICS, "checkpoints")):
        raise InputError(f"{folder}: holds a run already; resume it, or give another folder")
    _make(folder)
    checkpoint.write_json(folder / RUN, identity)


def _make(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: it is a file; give a folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: cannot be written ({error.strerror}); give another folder") from None


def leave(folder: Path, existed: bool) -> None:
    """Removes a folder that was made for work that did not begin: one that was not there before, and is empty."""
    if not existed and folder.exists() and not any(folder.iterdir()):
        folder.rmdir()


def usable(folder: Path, identity: dict[str, Any], config: TrainConfig) -> list[Path]:
    """The complete checkpoints of the run in `folder` that a run with these settings would have come by, oldest first.

    The settings must be those of the run, but for the number of steps: with another number, checkpoints count up to the step
    from which the rates differ. Raises InputError for other settings, and when there are checkpoints but none counts.
    """
    if not (folder / RUN).is_file():
        raise InputError(f"{folder}: there is no run to resume here; begin one without resuming")
    held = checkpoint.read_json(folder / RUN)
    settings = held.get("train")
    before = settings.get("steps") if isinstance(settings, dict) else None
    but_steps = {**identity, "train": {**identity["train"], "steps": before}}
    if not isinstance(settings, dict) or differences(held, but_steps):
        differing = "; ".join(differences(held, identity))
        raise InputError(f"{folder}: the run there differs: {differing}; use equal settings, or another folder")
    complete = checkpoint.checkpoints(folder)
    if before == config.steps or not complete:
        return complete
    alike = shared_steps(TrainConfig.from_dict(settings, str(folder / RUN)), config)
    found = [path for path in complete if checkpoint.step_of(path) <= alike]
    if not found:
        raise InputError(
            f"{folder}: steps was {before}, is {config.steps}; with schedule {config.schedule!r} the rates of the two differ "
            f"after step {alike}, and no checkpoint is left from up to there; give another folder"
        )
    return found


def take_up(folder: Path, identity: dict[str, Any], step: int) -> None:
    """Makes the folder that of a run with these settings that has done `step` steps: what came later is dropped."""
    checkpoint.clean(folder)
    checkpoint.drop(folder, step)
    checkpoint.write_json(folder / RUN, identity)
    trim_metrics(folder / METRICS, step)


def pieces(folder: Path) -> list[dict[str, Any]]:
    """What `add_piece` noted, oldest first."""
    return checkpoint.read_json(folder / PIECES)["pieces"] if (folder / PIECES).is_file() else []


def add_piece(folder: Path, piece: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint.write_json(folder / PIECES, {"pieces": [*pieces(folder), piece]})


def differences(held: dict[str, Any], own: dict[str, Any]) -> list[str]:
    """One sentence for every field, at any depth, that is not equal."""

    def flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
        for name, value in values.items():
            if isinstance(value, dict):
                yield from flat(value, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}", value

    before, now = dict(flat(held)), dict(flat(own))
    return [
        f"{name} was {before.get(name)!r}, is {now.get(name)!r}"
        for name in dict.fromkeys([*before, *now])
        if before.get(name) != now.get(name)
    ]


def trim_metrics(path: Path, steps: int) -> None:
    """Drops what was recorded after the step that a run is resumed at, and a line that a killed process left unfinished."""
    if not path.exists():
        return
    kept = []
    for line in path.read_bytes().splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            if json.loads(line)["step"] <= steps:
                kept.append(line.decode() + "\n")
    checkpoint.write_text(path, "".join(kept))
