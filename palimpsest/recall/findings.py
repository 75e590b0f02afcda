"""What runs of the recall benchmark show: plots, tables, and published results beside ours; all computed from the rows."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from palimpsest.findings import Plot, Table, listed
from palimpsest.plots import Cell, Line, Panel, cell, count, percent, short, size, whole
from palimpsest.recall.cells import EXPERIMENTS, FRONTIER, LEARNING, NEEDLES
from palimpsest.recall.claims import best, judged
from palimpsest.recall.models import TITLES

Row = dict[str, Any]
# Memories that a lineage run has too wear the style of their stage.
STYLES = {"softmax": 0, "linear": 1, "deltanet": 2, "gdn": 3, "kda": 4, "hybrid": 5, "decay": 7}
TASKS = {"palindrome": "a palindrome", "recall": "pairs in Kimi Linear's form", "stack": "many stacks"}


def plots(rows: Sequence[Row]) -> list[Plot]:
    """Rows of `runner.read` and `runner.not_run`. Only what was run, or was to be run, has a plot."""
    drawn = []
    if any(row["experiment"] == "frontier" for row in rows):
        drawn.append(_frontier(rows))
    drawn += [_learning(rows, task) for task in _learning_tasks(rows)]
    if any(row["experiment"] == "needles" for row in rows):
        drawn.append(_needles(rows))
    return drawn


def claims_table(rows: Sequence[Row]) -> Table:
    head = ["claim", "source", "published", "ours, one figure a seed", "verdict", "why"]
    keys = ("claim", "source", "published", "ours", "verdict", "why")
    caption = "Published results beside ours; verdicts are computed from the spread of seeds"
    return Table(caption, head, [[row[key] for key in keys] for row in judged(rows)])


def runs_table(rows: Sequence[Row]) -> Table:
    """Every cell, run or not."""
    head = ["cell", "status", "steps", "90 % at step", "accuracy", "state", "parameters", "tokens/s"]
    order = {name: place for place, name in enumerate(EXPERIMENTS)}
    table = []
    for row in sorted(rows, key=lambda row: order[row["experiment"]]):
        cells = [cell(row.get("steps"), whole), cell(row.get("steps_to_90"), whole), cell(row.get("accuracy"), percent)]
        cells += [cell(row.get("state_bytes"), size), cell(row.get("parameters"), count), cell(row.get("tokens_per_s"), count)]
        table.append([row["cell"], row["status"], *cells])
    return Table("Every cell", head, table)


def _unfinished(rows: Sequence[Row], experiment: str, task: str | None = None) -> str:
    mine = [row for row in rows if row["experiment"] == experiment and task in (None, row["task"])]
    left = sum(row["status"] == "not run" for row in mine)
    return f" {left} of {len(mine)} cells were not run." if left else ""


def _spread(values: Sequence[float]) -> str:
    """The mean, and how far the seeds lie apart."""
    text = percent(statistics.mean(values))
    return f"{text} ± {short(100 * statistics.stdev(values))}" if len(values) > 1 else text


def _frontier(rows: Sequence[Row]) -> Plot:
    lines, table = [], []
    widths = sorted({row["width"] for row in rows if row["experiment"] == "frontier"})
    for mixer in FRONTIER:
        points = []
        for width in widths:
            group = best(rows, "frontier", mixer, width=width)
            if not group:
                table.append([f"{TITLES[mixer]}, width {width}", "not run"])
                continue
            accuracies = [row["accuracy"] for row in group]
            points.append((float(group[0]["state_bytes"]), statistics.mean(accuracies)))
            cells: list[Cell] = [cell(group[0]["state_bytes"], size), (_spread(accuracies), f"{accuracies}")]
            cells += [
                cell(statistics.mean(row["tests"][label]["accuracy"] for row in group), percent) for label in group[0]["tests"]
            ]
            cells += [f"{group[0]['learning_rate']:g}", cell(len(group), whole), cell(group[0]["parameters"], count)]
            table.append([f"{TITLES[mixer]}, width {width}", *cells])
        if points:
            lines.append(Line(TITLES[mixer], STYLES[mixer], sorted(points)))
    run = [row for row in rows if row["experiment"] == "frontier" and row["status"] != "not run"]
    labels = list(run[0]["tests"]) if run else []
    context = f" at {whole(run[0]['state_context'])} tokens" if run else ""
    panel = Panel(
        f"memory carried{context} (bytes)", "accuracy, mean of all tests (% of queries)", lines, size, percent, top=1.05
    )
    finding = "Nothing was run."
    if lines:
        top = max((y, line.name) for line in lines for _, y in line.points)
        small = min(((x, -y, line.name) for line in lines for x, y in line.points if y >= 0.9), default=None)
        finding = f"Most accurate: {top[1]}, {percent(top[0])}. "
        finding += f"Least memory above 90 %: {small[2]} with {size(small[0])}." if small else "None reaches 90 %."
    head = ["model", "memory carried", "accuracy ± seeds", *labels, "learning rate", "seeds", "parameters"]
    caption = "Accuracy by row length x pairs, at each model's best learning rate"
    question = "How much recall does a byte of memory buy? (MQAR)"
    return Plot("frontier", question, [panel], finding + _unfinished(rows, "frontier"), Table(caption, head, table))


def _learning_tasks(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["task"] for row in rows if row["experiment"] == "learning"))


def _learning(rows: Sequence[Row], task: str) -> Plot:
    lines, table, reached = [], [], []
    for mixer in LEARNING:
        group = best(rows, "learning", mixer, task)
        if not group:
            table.append([TITLES[mixer], "not run"])
            continue
        last = min(group, key=lambda row: row["seed"])  # the curve of one seed: means would blur a jump
        lines.append(Line(TITLES[mixer], STYLES[mixer], [(p["step"], p["accuracy"]) for p in last["curve"]]))
        steps = [row["steps_to_90"] for row in group]
        if all(steps):
            reached.append((statistics.mean(steps), TITLES[mixer]))
        said = ", ".join(f"{n:,}" if n else f"not in {row['steps']:,}" for n, row in zip(steps, group, strict=True))
        accuracies = [row["accuracy"] for row in group]
        table.append(
            [
                TITLES[mixer],
                said,
                (_spread(accuracies), f"{accuracies}"),
                f"{group[0]['learning_rate']:g}",
                cell(group[0]["state_bytes"], size),
            ]
        )
    panel = Panel("step", "accuracy (% of scored ids)", lines, whole, percent, log_x=False, y_scale="zero", top=1.05)
    finding = "Nothing was run."
    if lines:
        never = [line.name for line in lines if line.name not in {name for _, name in reached}]
        order = [f"{name} ({whole(steps)})" for steps, name in sorted(reached)]
        finding = f"Steps to 90 %, fewest first: {listed(order)}. Not within the budget with every seed: {listed(never)}."
    name = next((text for key, text in TASKS.items() if task.startswith(key)), task)
    length = task.lstrip("abcdefghijklmnopqrstuvwxyz")
    head = ["model", "steps to 90 %, one figure a seed", "final accuracy ± seeds", "learning rate", "memory carried"]
    question = f"How soon is {name} of {length} ids learned?"
    plot_table = Table(f"Rows of {length} ids, at each model's best learning rate", head, table)
    return Plot(f"learning-{task}", question, [panel], finding + _unfinished(rows, "learning", task), plot_table)


def _needles(rows: Sequence[Row]) -> Plot:
    groups = {mixer: best(rows, "needles", mixer) for mixer in NEEDLES}
    labels = next((list(group[0]["tests"]) for group in groups.values() if group), [])
    lengths = sorted({int(label.split()[1]) for label in labels})
    panels, table = [], []
    for kind, hay in (("S1", "repeated noise"), ("S2", "text")):
        lines = []
        for mixer, group in groups.items():
            points = [
                (float(n), statistics.mean(row["tests"][f"{kind} {n}"]["rows"] for row in group)) for n in lengths if group
            ]
            if points:
                lines.append(Line(TITLES[mixer], STYLES[mixer], points))
        panels.append(
            Panel("length (tokens)", f"needles found in {hay} (% of rows)", lines, whole, percent, y_scale="zero", top=1.05)
        )
    for mixer, group in groups.items():
        if not group:
            table.append([TITLES[mixer], "not run"])
            continue
        values = [[row["tests"][label]["rows"] for row in group] for label in labels]
        table.append([TITLES[mixer], *((_spread(each), f"{each}") for each in values), f"{group[0]['learning_rate']:g}"])
    finding = "Nothing was run."
    if labels:
        gaps = [
            f"{TITLES[mixer]} {100 * (_rows_found(group, 'S1', lengths[0]) - _rows_found(group, 'S2', lengths[0])):+.0f}"
            for mixer, group in groups.items()
            if group
        ]
        finding = f"Found in repeated noise more often than in text, at the length learned, in points: {listed(gaps)}."
    head = ["model", *labels, "learning rate"]
    caption = "Rows whose whole value is found, by kind of haystack and length; ± is the spread of seeds"
    question = "Who keeps a needle: delta alone, decay alone, or both?"
    return Plot("needles", question, panels, finding + _unfinished(rows, "needles"), Table(caption, head, table))


def _rows_found(group: Sequence[Row], kind: str, length: int) -> float:
    return statistics.mean(row["tests"][f"{kind} {length}"]["rows"] for row in group)
