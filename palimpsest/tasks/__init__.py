"""Synthetic tasks that separate one memory policy from another, drawn from a seed, scored exactly.

| task | what it asks of a memory |
|---|---|
| `Recall`, `MQAR` | many pairs at once, each retrieved by its key |
| `Palindrome`, `SelectiveCopy` | order, forwards and backwards; noise left out |
| `Stack` | overwriting and restoring, in 64 places |
| `Induction` | one pair, at any distance |
| `Needle` | one fact (or several) kept while a long text goes by |
| `Tracking` | pairs that refer to pairs |

Each is a frozen dataclass whose fields are its dials; `at_length` stretches a row, for length extrapolation. `task.batch` draws
ids and unshifted labels, `task.solve` answers from what precedes each scored position alone, `task.chance` is the accuracy of
guessing. `score` is exact: the likeliest id of the whole vocabulary.
"""

from __future__ import annotations

from palimpsest.tasks.mqar import MQAR
from palimpsest.tasks.needle import Needle
from palimpsest.tasks.recall import Recall, recall_accuracy, recall_batch, recall_chance, recall_solver
from palimpsest.tasks.scoring import Score, score, score_by_length, score_by_position, scored_positions
from palimpsest.tasks.sequences import Induction, Palindrome, SelectiveCopy
from palimpsest.tasks.stack import Stack
from palimpsest.tasks.task import IGNORED, Task
from palimpsest.tasks.tracking import Tracking

__all__ = [
    "IGNORED",
    "MQAR",
    "Induction",
    "Needle",
    "Palindrome",
    "Recall",
    "Score",
    "SelectiveCopy",
    "Stack",
    "Task",
    "Tracking",
    "recall_accuracy",
    "recall_batch",
    "recall_chance",
    "recall_solver",
    "score",
    "score_by_length",
    "score_by_position",
    "scored_positions",
]
