"""A training run's records for TensorBoard as well; metrics.jsonl stays what is read back. Needs the extra `tensorboard`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from palimpsest.config import InputError

LEFT_OUT = ("step", "gates")  # the horizontal axis; tables of shares, which `palimpsest report` draws


def writer(folder: Path) -> Callable[[dict[str, Any], int], None]:
    """What takes each record, and the step that the run began or went on at. The folder is made at the first one; what it
    holds of later steps than a resumed run has done is not shown. Raises InputError when the package is not installed."""
    try:
        from torch.utils.tensorboard.writer import SummaryWriter
    except ImportError:
        raise InputError("--tensorboard: the package is not installed; pip install palimpsest-lm[tensorboard]") from None
    opened: list[Any] = []

    def write(record: dict[str, Any], from_step: int) -> None:
        if not opened:
            opened.append(SummaryWriter(str(folder), purge_step=from_step + 1))
        for name, value in scalars(record):
            opened[0].add_scalar(name, value, record["step"])
        opened[0].flush()

    return write


def scalars(record: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Every number of a record under the path that leads to it."""

    def inside(name: str, value: Any) -> Iterator[tuple[str, float]]:
        if isinstance(value, dict):
            for key, item in value.items():
                yield from inside(f"{name}/{key}", item)
        elif isinstance(value, list | tuple):
            for place, item in enumerate(value):
                yield from inside(f"{name}/{place:02}", item)
        elif value is not None:
            yield name, float(value)

    for key, value in record.items():
        if key not in LEFT_OUT:
            yield from inside(key, value)
