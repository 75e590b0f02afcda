"""Runs cells and keeps what they showed: one line of JSON for each that ended, one file for each experiment.

A run that stops, for any reason, is taken up by running it again: cells that have a line are not run again, and those that were
at work begin anew.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from palimpsest import run_folder
from palimpsest.checkpoint import write_text
from palimpsest.config import InputError
from palimpsest.progress import interrupts
from palimpsest.recall.cells import EXPERIMENTS, Cell
from palimpsest.recall.training import Curve, Training

Row = dict[str, Any]
Say = Callable[[str], None]


def read(folder: Path) -> list[Row]:
    """All lines of the experiments in a folder, in the order in which they were written. Raises `InputError` for a torn one."""
    rows = []
    for experiment in EXPERIMENTS:
        path = folder / f"{experiment}.jsonl"
        lines = path.read_bytes().splitlines() if path.exists() else []
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if not isinstance(row, dict) or not {"cell", "settings", "status"} <= row.keys():
                what = "not JSON" if row is None else "no cell's row"
                raise InputError(f"{path}: line {number} is {what}; remove it, and the cell is run again")
            rows.append(row)
    return rows


def missing(cells: Sequence[Cell], rows: Sequence[Row]) -> list[Cell]:
    """The cells that have no line. A line of the same name and other settings is refused: the two would be taken for one."""
    held = {row["cell"]: row["settings"] for row in rows}
    for cell in cells:
        if cell.name in held and held[cell.name] != cell.settings():
            differing = [k for k, v in cell.settings().items() if held[cell.name].get(k) != v]
            raise InputError(f"{cell.name}: was run with other {', '.join(differing)}; give another --out, or remove its line")
    return [cell for cell in cells if cell.name not in held]


def not_run(cells: Sequence[Cell], rows: Sequence[Row]) -> list[Row]:
    """A row for every cell without a line, for tables."""
    return [
        {"cell": cell.name, "status": "not run", "settings": cell.settings(), **_place(cell)} for cell in missing(cells, rows)
    ]


def fitting(cells: Sequence[Cell], minutes: float, device: torch.device) -> float:
    """The share of their steps, at most 1, with which all cells end within the minutes on this machine.

    A few steps of each kind are timed; seeds and rates cost the same.
    """
    times: dict[tuple[str, str, int], float] = {}
    for cell in cells:
        kind = (cell.mixer, cell.task, cell.width)
        if kind not in times:
            training = Training(cell, device)
            training.advance(3)
            training.last_loss()
            began = time.perf_counter()
            training.advance(6)
            training.last_loss()
            step = (time.perf_counter() - began) / 6
            began = time.perf_counter()
            training.accuracy(cell.examples // 4, cell.probe)
            times[kind] = cell.steps * step + (cell.steps // cell.every + 4) * (time.perf_counter() - began)
    needed = sum(times[cell.mixer, cell.task, cell.width] for cell in cells)
    return min(1.0, 60 * minutes / needed)


def run(
    cells: Sequence[Cell],
    folder: Path,
    device: torch.device,
    about: dict[str, Any],
    minutes: float | None = None,
    together: int = 1,
    say: Say = print,
) -> list[Row]:
    """Runs the cells that have no line yet, `together` at a time, and returns their new lines.

    After `minutes`, or Ctrl-C, no cell goes on; those at work are given up. `about` is joined to every line.
    """
    waiting = missing(cells, read(folder))
    total, ended, live = len(cells), len(cells) - len(waiting), []
    began, rows = time.perf_counter(), []
    with run_folder.alone(folder), interrupts() as stop:
        while waiting or live:
            if stop.is_set() or (minutes is not None and time.perf_counter() - began > 60 * minutes):
                break
            while waiting and len(live) < together:
                live.append(_Live(waiting.pop(0), device))
            # First all are given work, then each is waited for: on a GPU the others' work goes on meanwhile.
            for work in (_Live.advance, _Live.look):
                for each in list(live):
                    try:
                        work(each)
                    except RuntimeError as error:  # such as memory that is used up: the others go on
                        live.remove(each)
                        say(f"{each.cell.name}: failed: {str(error).splitlines()[0]}")
            for each in [each for each in live if each.is_over]:
                live.remove(each)
                ended += 1
                rows.append(each.row() | {"together": together, **about})
                _append(folder / f"{each.cell.experiment}.jsonl", rows[-1])
                say(f"[{ended}/{total}] {_line(rows[-1])}")
    left = total - ended
    if left:
        say(f"{left} of {total} cells not run; the same command goes on with them")
    return rows


class _Live:
    """A cell at work."""

    def __init__(self, cell: Cell, device: torch.device) -> None:
        self.cell, self.began = cell, time.perf_counter()
        self.training, self.curve = Training(cell, device), Curve(cell)

    @property
    def is_over(self) -> bool:
        return self.curve.is_over(self.training.done)

    def advance(self) -> None:
        self.training.advance(self.curve.stretch(self.training.done))

    def look(self) -> None:
        self.curve.add(self.training)

    def row(self) -> Row:
        trained = time.perf_counter() - self.began
        result = self.curve.result(self.training)
        return {
            "cell": self.cell.name,
            **_place(self.cell),
            **result,
            "seconds": trained,
            "tokens_per_s": result["tokens"] / trained,
            "settings": self.cell.settings(),
        }


def _place(cell: Cell) -> Row:
    keys = ("experiment", "mixer", "task", "width", "learning_rate", "seed")
    return {key: getattr(cell, key) for key in keys}


def _append(path: Path, row: Row) -> None:
    """Whole or not at all: the file is written anew beside the old one."""
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    write_text(path, before + json.dumps(row, ensure_ascii=False) + "\n")


def _line(row: Row) -> str:
    reached = f", 90 % at step {row['steps_to_90']}" if row["steps_to_90"] else ""
    return (
        f"{row['cell']}: {row['status']} after {row['steps']} steps, accuracy {row['accuracy']:.3f}{reached}, "
        f"{row['seconds']:.0f} s, {row['tokens_per_s']:,.0f} tokens/s"
    )
