"""Published results beside ours, each with a verdict that is computed.

A claim says that one group of runs does better than another. With two seeds or more of each it is

    reproduced        better by more than the noise
    not reproduced    worse by more than the noise
    not resolvable    anything else

Noise is twice the standard error of the difference of the means, and never less than `LEAST`; steps to 90 % are told apart only
when all seeds of one group come before all of the other. Runs are those of the best learning rate, as published figures are.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
LEAST = 0.02  # of accuracy
ZOOLOGY, KIMI, GDN = "arXiv 2312.04927 and its repository", "arXiv 2510.26692, figure 4", "arXiv 2412.06464, S-NIAH"


@dataclass(frozen=True)
class Group:
    """Values of one group, one a seed, and what they are called. Steps that were not enough are infinite."""

    name: str
    values: list[float]


@dataclass(frozen=True)
class Claim:
    """`better` is said to beat `worse`, which are found in all rows; None where nothing like it was run."""

    statement: str
    source: str
    published: str
    better: Callable[[Sequence[Row]], Group | None]
    worse: Callable[[Sequence[Row]], Group | None]
    in_steps: bool = False


def verdict(better: list[float], worse: list[float], in_steps: bool = False) -> tuple[str, str]:
    """The verdict and why. Accuracies: more is better; steps: fewer."""
    if not better or not worse:
        return "not run", "a group has no result"
    if min(len(better), len(worse)) < 2:
        return "not resolvable at this size", "one seed tells nothing of the noise"
    if in_steps:
        if max(better) < min(worse):
            return "reproduced", "every seed is sooner than every other"
        if min(better) > max(worse):
            return "not reproduced", "every seed is later than every other"
        return "not resolvable at this size", "the seeds overlap, or neither gets there"
    gap = statistics.mean(better) - statistics.mean(worse)
    noise = 2 * math.sqrt(sum(statistics.variance(each) / len(each) for each in (better, worse)))
    bound = max(noise, LEAST)
    why = f"the difference is {100 * gap:+.1f} points, the noise {100 * bound:.1f}"
    if abs(gap) <= bound:
        return "not resolvable at this size", why
    return ("reproduced" if gap > 0 else "not reproduced"), why


def best(rows: Sequence[Row], experiment: str, mixer: str, task: str | None = None, width: int | None = None) -> list[Row]:
    """The runs of one model at its best learning rate; those with the largest budget, where there are several."""
    found = [
        row
        for row in rows
        if row["status"] != "not run"
        and (row["experiment"], row["mixer"]) == (experiment, mixer)
        and task in (None, row["task"])
        and width in (None, row["width"])
    ]
    budget = max((row["settings"]["budget_steps"] for row in found), default=0)
    found = [row for row in found if row["settings"]["budget_steps"] == budget]
    rates: dict[float, list[Row]] = {}
    for row in found:
        rates.setdefault(row["learning_rate"], []).append(row)
    # Sooner to 90 % first, then more accurate; a rate that only some seeds were run with counts by its mean.
    return min(rates.values(), key=lambda group: (_mean_steps(group), -_mean(group, "probe_accuracy")), default=[])


def _mean_steps(group: Sequence[Row]) -> float:
    return statistics.mean(row["steps_to_90"] or 2 * row["settings"]["budget_steps"] for row in group)


def _mean(group: Sequence[Row], key: str) -> float:
    return statistics.mean(row[key] for row in group)


def _frontier(mixer: str, place: int) -> Callable[[Sequence[Row]], Group | None]:
    """Mean accuracy over all tests, of the narrowest (0) or widest (-1) models; the widest only where there are two widths."""

    def find(rows: Sequence[Row]) -> Group | None:
        widths = sorted({row["width"] for row in rows if row["experiment"] == "frontier"})
        if not widths[-place:]:
            return None
        group = best(rows, "frontier", mixer, width=widths[place])
        return Group(f"{mixer}, width {widths[place]}", [row["accuracy"] for row in group])

    return find


def _learning(mixer: str, task: str, place: int) -> Callable[[Sequence[Row]], Group | None]:
    """Steps to 90 % on the shortest (0) or longest (-1) rows."""

    def find(rows: Sequence[Row]) -> Group | None:
        lengths = sorted({int(row["task"][len(task) :]) for row in rows if row["task"].startswith(task)})
        if not lengths:
            return None
        group = best(rows, "learning", mixer, f"{task}{lengths[place]}")
        return Group(f"{mixer}, length {lengths[place]}", [float(row["steps_to_90"] or math.inf) for row in group])

    return find


def _needle(mixer: str, kind: str, factor: int) -> Callable[[Sequence[Row]], Group | None]:
    """Rows found whole, at `factor` times the length that was learned."""

    def find(rows: Sequence[Row]) -> Group | None:
        group = best(rows, "needles", mixer)
        if not group:
            return None
        length = factor * min(int(label.split()[1]) for label in group[0]["tests"])
        return Group(f"{mixer}, {kind} at {length}", [row["tests"][f"{kind} {length}"]["rows"] for row in group])

    return find


CLAIMS = [
    Claim(
        "Softmax recalls more than a small delta memory",
        ZOOLOGY,
        "1.0 against .794",
        _frontier("softmax", 0),
        _frontier("deltanet", 0),
    ),
    Claim(
        "A larger delta memory recalls more", ZOOLOGY, ".964 against .794", _frontier("deltanet", -1), _frontier("deltanet", 0)
    ),
    Claim(
        "Gated DeltaNet recalls more than DeltaNet (its published state is twice as large)",
        ZOOLOGY,
        ".891 against .794",
        _frontier("gdn", 0),
        _frontier("deltanet", 0),
    ),
    *(
        Claim(
            f"KDA learns {title} sooner than Gated DeltaNet",
            KIMI,
            text,
            _learning("kda", task, -1),
            _learning("gdn", task, -1),
            True,
        )
        for task, title, text in (
            ("palindrome", "the palindrome", "94.2 % at 4,000 steps against 16,000 for as much"),
            ("recall", "recall", "93.4 % at 2,000 steps against 78.7 % at 20,000"),
            ("stack", "stacks", "98.2 % against 94.4 % at 4,000 steps"),
        )
    ),
    *(
        Claim(
            f"Gated DeltaNet learns {title} sooner than decay without delta",
            KIMI,
            "0 % in 20,000 steps (Mamba2, length 1,024)",
            _learning("gdn", task, -1),
            _learning("decay", task, -1),
            True,
        )
        for task, title in (("palindrome", "the palindrome"), ("recall", "recall"), ("stack", "stacks"))
    ),
    Claim(
        "Delta alone finds a needle in repeated noise and loses it in text",
        GDN,
        "99.0 against 18.6 at the training length",
        _needle("deltanet", "S1", 1),
        _needle("deltanet", "S2", 1),
    ),
    Claim(
        "In text, both find more than delta alone",
        GDN,
        "92.2 against 18.6 at the training length",
        _needle("gdn", "S2", 1),
        _needle("deltanet", "S2", 1),
    ),
    Claim(
        "In text, decay alone finds more than delta alone",
        GDN,
        "56.2 against 18.6 at the training length",
        _needle("decay", "S2", 1),
        _needle("deltanet", "S2", 1),
    ),
    Claim(
        "In repeated noise, delta alone finds more than decay alone",
        GDN,
        "98.8 against 30.4 at twice the training length",
        _needle("deltanet", "S1", 2),
        _needle("decay", "S1", 2),
    ),
    Claim(
        "In repeated noise, both find more than decay alone",
        GDN,
        "91.8 against 30.4 at twice the training length",
        _needle("gdn", "S1", 2),
        _needle("decay", "S1", 2),
    ),
]


def judged(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Every claim: {claim, source, published, ours, verdict, why}."""
    found = []
    for claim in CLAIMS:
        groups = [group for find in (claim.better, claim.worse) if (group := find(rows)) is not None]
        values = [group.values for group in groups] if len(groups) == 2 else [[], []]
        said, why = verdict(values[0], values[1], claim.in_steps)
        ours = " against ".join(_ours(group, claim.in_steps) for group in groups if group.values) or "not run"
        found.append(
            {
                "claim": claim.statement,
                "source": claim.source,
                "published": claim.published,
                "ours": ours,
                "verdict": said,
                "why": why,
            }
        )
    return found


def _ours(group: Group, in_steps: bool) -> str:
    if in_steps:
        texts = ["never" if math.isinf(value) else f"{value:,.0f}" for value in group.values]
    else:
        texts = [f"{100 * value:.1f} %" for value in group.values]
    return f"{', '.join(texts)} ({group.name})"
