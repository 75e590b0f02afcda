"""What is run: cells, each one model on one task with one learning rate and one seed.

    frontier   accuracy against the bytes a model carries, on Zoology's MQAR
    learning   steps to 90 % on palindrome, recall and stacks, after Kimi Linear's figure 4
    needles    S-NIAH-1 and -2 for delta alone, decay alone and both

`full` is for a GPU, `small` for a CPU: the same questions on shorter rows.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from palimpsest.config import InputError
from palimpsest.tasks import MQAR, Needle, Palindrome, Recall, Stack, Task

EXPERIMENTS = ("frontier", "learning", "needles")
FRONTIER = ("softmax", "linear", "deltanet", "gdn", "kda", "hybrid")
LEARNING = ("kda", "gdn", "deltanet", "decay")
NEEDLES = ("deltanet", "decay", "gdn", "kda")


@dataclass(frozen=True)
class Cell:
    """`train` is gone through in turn, one task a step; `probe` are the labels of `test` whose mean ends a cell at 99 %."""

    experiment: str
    mixer: str
    task: str
    train: tuple[Task, ...]
    test: dict[str, Task] = field(hash=False)
    probe: tuple[str, ...]
    width: int
    head_dim: int
    learning_rate: float
    seed: int
    batch_size: int
    steps: int
    every: int  # steps between two looks
    examples: int  # rows of a test at the end; a look takes a quarter
    text_weight: float = 0.0  # of the loss of every next id, which a language model learns too, beside that of scored ids

    @property
    def name(self) -> str:
        return f"{self.experiment}/{self.task}-{self.mixer}-w{self.width}-lr{self.learning_rate:g}-n{self.steps}-s{self.seed}"

    @property
    def vocab_size(self) -> int:
        return max(task.vocab_size for task in (*self.train, *self.test.values()))

    def settings(self) -> dict[str, Any]:
        """What decides the result, ready for JSON."""
        return {
            "experiment": self.experiment,
            "mixer": self.mixer,
            "task": self.task,
            "train": list(dict.fromkeys(map(repr, self.train))),
            "probe": list(self.probe),
            "vocab_size": self.vocab_size,
            "width": self.width,
            "head_dim": self.head_dim,
            "learning_rate": self.learning_rate,
            "seed": self.seed,
            "batch_size": self.batch_size,
            "budget_steps": self.steps,
            "every": self.every,
            "examples": self.examples,
            "text_weight": self.text_weight,
        }


def full(text: bytes = b"") -> list[Cell]:
    """For a GPU. Within an experiment seeds change last, so that a run that is cut short has one of everything."""
    return [*_frontier_full(), *_learning_full(), *_needles_full(text)]


def small(text: bytes = b"") -> list[Cell]:
    """For a CPU: a quarter of an hour on two cores."""
    return [*_frontier_small(), *_learning_small(), *_needles_small(text)]


def select(cells: Sequence[Cell], patterns: str | None) -> list[Cell]:
    """The cells whose names match one of the shell patterns, which are separated by commas; None is all."""
    if patterns is None:
        return list(cells)
    chosen: list[Cell] = []
    for pattern in (part.strip() for part in patterns.split(",")):
        found = [cell for cell in cells if fnmatch.fnmatch(cell.name, pattern) and cell not in chosen]
        if not any(fnmatch.fnmatch(cell.name, pattern) for cell in cells):
            raise InputError(f"cells: {pattern!r} matches no cell; names look like {cells[0].name!r}, `*` stands for anything")
        chosen += found
    return [cell for cell in cells if cell in chosen]


def with_steps(cells: Sequence[Cell], steps: int | None) -> list[Cell]:
    """The cells with another budget, and looks at the same share of it."""
    if steps is None:
        return list(cells)
    return [replace(cell, steps=steps, every=max(1, round(cell.every * steps / cell.steps))) for cell in cells]


def shortened(cells: Sequence[Cell], share: float) -> list[Cell]:
    """The cells with a share of their steps, the same for all, in whole looks."""
    return [replace(cell, steps=cell.every * max(1, int(share * cell.steps / cell.every))) for cell in cells]


def _frontier_full() -> list[Cell]:
    """Zoology's rows: training lengths in its proportions, all its test slices; the probe are those of trained lengths."""
    rows = [(64, 4)] * 5 + [(128, 8), (256, 16), (256, 32), (256, 64)]
    train = tuple(MQAR(length, pairs) for length, pairs in rows)
    slices = [(64, 4), (64, 8), (64, 16), (128, 32), (256, 64), (512, 128), (1024, 256)]
    test: dict[str, Task] = {f"{length} x {pairs}": MQAR(length, pairs) for length, pairs in slices}
    probe = tuple(label for label, task in test.items() if task.length <= 256)
    return [
        Cell("frontier", mixer, "mqar", train, test, probe, width, width // 2, rate, seed, 256, 4000, 200, 1000)
        for seed in range(3)
        for width in (64, 128)
        for rate in (3e-3, 1e-3)
        for mixer in FRONTIER
    ]


def _frontier_small() -> list[Cell]:
    train = tuple(MQAR(length, pairs, 64) for length, pairs in ((16, 4), (32, 8), (64, 16)))
    test: dict[str, Task] = {f"{task.length} x {task.num_pairs}": task for task in train}
    return [
        Cell("frontier", mixer, "mqar", train, test, tuple(test), 64, 32, 5e-3, seed, 32, 1200, 100, 256)
        for seed in range(2)
        for mixer in FRONTIER
    ]


def _rows(task: str, length: int, recall_vocabulary: int) -> Task:
    if task == "palindrome":
        return Palindrome((length - 1) // 2, 64)
    return Recall((length - 1) // 4, recall_vocabulary) if task == "recall" else Stack(length // 3)


def _learning_full() -> list[Cell]:
    """Two layers, two heads of 128 and lengths of the figure. Of its learning rates, 5e-5 to 1e-3 over 20,000 steps, the
    highest, and a higher one for a fifth of the steps."""
    return [
        _learning(mixer, task, _rows(task, length, 1024), 256, 128, rate, seed, 32, 4000, 512)
        for seed in range(3)
        for length in (256, 1024)
        for rate in (1e-3, 3e-3)
        for task in ("palindrome", "recall", "stack")
        for mixer in LEARNING
    ]


def _learning_small() -> list[Cell]:
    tasks: dict[str, Task] = {"palindrome": Palindrome(16, 32), "recall": Recall(10, 64), "stack": Stack(16, 8, 16)}
    return [
        _learning(mixer, task, rows, 32, 16, 4e-3, seed, 32, 1000, 256)
        for seed in range(2)
        for task, rows in tasks.items()
        for mixer in LEARNING
    ]


def _learning(
    mixer: str, task: str, rows: Task, width: int, head_dim: int, rate: float, seed: int, batch: int, steps: int, examples: int
) -> Cell:
    label = f"{task}{rows.length}"
    tests = {str(rows.length): rows}
    return Cell(
        "learning", mixer, label, (rows,), tests, tuple(tests), width, head_dim, rate, seed, batch, steps, steps // 40, examples
    )


def _needles(
    text: bytes, short: int, length: int, longer: Sequence[int], count: int, **dials: Any
) -> tuple[tuple[Task, ...], dict[str, Task], tuple[str, ...]]:
    """One model learns both kinds, as a language model would meet both, and is tested on single needles. Rows with several,
    some of them short, teach more: with one needle in long rows alone, small models stayed at chance."""
    haystack: Any = "text" if text else "synthetic"
    kinds: dict[str, Needle] = {
        "S1": Needle(length, "sentence", **dials),
        "S2": Needle(length, haystack, text=text, **dials),
    }
    test: dict[str, Task] = {
        f"{kind} {size}": task.at_length(size) for size in (length, *longer) for kind, task in kinds.items()
    }
    train = tuple(
        replace(task, length=size, num_needles=count, num_queries=count) for size in (short, length) for task in kinds.values()
    )
    return train, test, (f"S1 {length}", f"S2 {length}")


def _needles_full(text: bytes) -> list[Cell]:
    rows = _needles(text, 128, 512, (1024, 2048, 4096), 8, value_length=4)
    return [
        Cell("needles", mixer, "niah", *rows, 128, 64, rate, seed, 32, 4000, 200, 256, text_weight=0.3)
        for seed in range(3)
        for rate in (3e-3, 1e-3)
        for mixer in NEEDLES
    ]


def _needles_small(text: bytes) -> list[Cell]:
    rows = _needles(text, 32, 64, (128, 256), 4, value_length=1, num_keys=16)
    return [
        Cell("needles", mixer, "niah", *rows, 64, 32, 5e-3, seed, 32, 1000, 100, 256, text_weight=0.3)
        for seed in range(2)
        for mixer in NEEDLES
    ]
