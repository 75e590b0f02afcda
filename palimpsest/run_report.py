"""Training runs over one another as one HTML file, drawn from their metrics.jsonl: what they lost, how, and how fast."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from palimpsest import plots
from palimpsest.checkpoint import read_json
from palimpsest.config import InputError
from palimpsest.findings import Plot, Table
from palimpsest.plots import Cell, Line, Panel, cell, count, duration, escaped, finite, percent, short, size, whole
from palimpsest.report import document, plot_html, section_html, table_html, write_page
from palimpsest.run_folder import differences
from palimpsest.watch import BETA_BINS, HALF_LIVES

MOST_POINTS = 400  # of a line; longer ones are averaged in pieces
KEYS = ("step", "tokens", "loss", "val_nats_per_token", "val_bits_per_byte", "tokens_per_s", "memory_bytes", "mfu", "seconds")
MOST_RUNS = len(plots.DASHES)


class Run(NamedTuple):
    """A run's name, its settings and the records of its metrics.jsonl."""

    name: str
    settings: dict[str, Any]
    records: list[dict[str, Any]]

    def last(self, key: str) -> Any:
        return next((record[key] for record in reversed(self.records) if record.get(key) is not None), None)


def read(folders: Sequence[Path]) -> list[Run]:
    """The runs in these folders, each named by as much of its path as tells it from the others. Raises InputError."""
    whole_names = [folder.absolute().parts for folder in folders]
    if len(set(whole_names)) < len(whole_names):
        raise InputError("a run was given twice; name each once")
    runs = []
    for folder, parts in zip(folders, whole_names, strict=True):
        path = folder / "metrics.jsonl"
        if not path.is_file():
            raise InputError(f"{path}: there is no such file; give the folder of a run that has trained")
        length = next(n for n in range(1, len(parts) + 1) if sum(other[-n:] == parts[-n:] for other in whole_names) == 1)
        settings = read_json(folder / "run.json") if (folder / "run.json").is_file() else {}
        runs.append(Run("/".join(parts[-length:]), settings, _records(path)))
    return runs


def _records(path: Path) -> list[dict[str, Any]]:
    lines = path.read_bytes().splitlines()
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict) and finite(record.get("tokens")) is not None:
            records.append(record)
        elif number < len(lines):  # a run that is being written may end in half a line
            raise InputError(f"{path}, line {number}: not a record of a run; the file is damaged")
    if not records:
        raise InputError(f"{path}: no step is recorded in it yet; wait for the first, or lower log_every")
    return records


def write(folders: Sequence[Path], path: Path) -> dict[str, Any]:
    """Writes the page and returns the last values of each run, ready for JSON. Raises InputError."""
    if not 1 <= len(folders) <= MOST_RUNS:
        raise InputError(f"report: {len(folders)} runs were given; one page shows 1 to {MOST_RUNS}")
    runs = read(folders)
    drawn = all_plots(runs)
    name = f"Palimpsest training: {', '.join(run.name for run in runs)}"
    body = [f'<header><h1>{escaped(name)}</h1><p class="lead">{escaped(_lead(runs))}</p></header>']
    links = "".join(f'<li><a href="#{plot.ident}">{escaped(plot.question)}</a></li>' for plot in drawn)
    body += [f'<nav aria-label="Contents"><ul>{links}</ul></nav>', "<main>"]
    body += [section_html("runs", "The runs side by side", table_html(_summary(runs)) + _differing(runs))]
    body += [*(plot_html(plot, "As recorded in metrics.jsonl of each run") for plot in drawn), "</main>"]
    write_page(document(name, body), path)
    return {"runs": [{"name": run.name, **{key: run.last(key) for key in KEYS}} for run in runs]}


def all_plots(runs: Sequence[Run]) -> list[Plot]:
    """The plots in reading order; what no run has recorded is left out."""
    groups = list(dict.fromkeys(name for run in runs for record in run.records for name in record.get("groups") or {}))

    def of_group(group: str, key: str) -> Callable[[dict[str, Any]], Any]:
        return lambda record: ((record.get("groups") or {}).get(group) or {}).get(key)

    def busiest(record: dict[str, Any]) -> Any:
        return 1 + record["moe_max_violation"] if finite(record.get("moe_max_violation")) is not None else None

    losses = [
        ("training loss (nats per token)", _key("loss"), short),
        ("validation loss (nats per token)", _key("val_nats_per_token"), short),
    ]
    plotted = [
        ("loss", "How well is the next token predicted?", losses, "data"),
        ("rate", "How fast is it made to learn?", [("learning rate (per step)", _key("lr"), _small)], "zero"),
        (
            "gradients",
            "How large are the gradients?",
            [("gradient norm, all (before clipping)", _key("grad_norm"), _small)]
            + [(f"gradient norm, {name} (before clipping)", of_group(name, "grad_norm"), _small) for name in groups],
            "log",
        ),
        (
            "updates",
            "How far does a step move the weights?",
            [(f"update over weights, {name} (ratio of norms)", of_group(name, "update_ratio"), _small) for name in groups],
            "log",
        ),
        (
            "experts",
            "Are the experts busy alike?",
            [
                ("busiest expert of any layer (times its fair share)", busiest, short),
                ("experts without a token (number)", _key("moe_idle_experts"), whole),
            ],
            "zero",
        ),
        ("speed", "How fast is it?", [("tokens a second (number)", _key("tokens_per_s"), count)], "zero"),
        ("mfu", "How much of the machine is used?", [("MFU (share of the assumed peak)", _key("mfu"), percent)], "zero"),
        ("memory", "How much memory has it taken?", [("most memory so far (bytes)", _key("memory_bytes"), size)], "zero"),
    ]
    over_time = [plot for plot in (_plot(runs, *parts) for parts in plotted) if plot is not None]
    return [*over_time, *_loads(runs), *_depth(runs), *_gates(runs)]


def _key(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda record: record.get(name)


def _small(value: float) -> str:
    return f"{value:.3g}"


Series = tuple[str, Callable[[dict[str, Any]], Any], Callable[[float], str]]


def _plot(runs: Sequence[Run], ident: str, question: str, series: Sequence[Series], scale: Any) -> Plot | None:
    panels, rows = [], []
    for label, value, text in series:
        lines = []
        for style, run in enumerate(runs):
            points = [(float(r["tokens"]), y) for r in run.records if (y := finite(value(r))) is not None]
            if points:
                lines.append(Line(run.name, style, thinned(points)))
                low, high = min(points, key=_height), max(points, key=_height)
                cells = [cell(points[-1][1], text), cell(low[1], text), cell(high[1], text)]
                rows.append([run.name if len(series) == 1 else f"{run.name}: {label.partition(' (')[0]}", *cells])
        if lines:
            panels.append(Panel("training tokens seen (number)", label, lines, count, text, log_x=False, y_scale=scale))
    if not panels:
        return None
    table = Table(question, ["what", "last", "lowest", "highest"], rows)
    return Plot(ident, question, panels, _ends(panels[0]), table)


def _height(point: tuple[float, float]) -> float:
    return point[1]


def _ends(panel: Panel) -> str:
    """The last value of every line, in rising order."""
    last = sorted((line.points[-1][1], line.name) for line in panel.lines)
    said = ", ".join(f"{name} {panel.y_text(y)}" for y, name in last)
    return f"{panel.y_label.partition(' (')[0].capitalize()} in the end: {said}."


def thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most MOST_POINTS points: means over pieces of equal length; the last point stays itself."""
    if len(points) <= MOST_POINTS:
        return points
    step = math.ceil((len(points) - 1) / (MOST_POINTS - 1))
    pieces = [points[start : min(start + step, len(points) - 1)] for start in range(0, len(points) - 1, step)]
    return [*((sum(x for x, _ in p) / len(p), sum(y for _, y in p) / len(p)) for p in pieces), points[-1]]


def _loads(runs: Sequence[Run]) -> list[Plot]:
    """The load of the busiest expert of every layer in the last record."""
    lines, rows, highest = [], [], 0
    for style, run in enumerate(runs):
        layers = run.last("moe_load") or []
        if layers:
            lines.append(Line(run.name, style, [(i + 1, loads[-1]) for i, loads in enumerate(layers)]))
            highest = max(highest, len(layers))
            for i, loads in enumerate(layers):
                rows.append([f"{run.name}: {i + 1}", *(cell(load, short) for load in loads)])
    if not lines:
        return []
    question = "Which layers' experts are busy unevenly?"
    panel = Panel(
        "layer with experts (number, from the first)", "busiest expert (times its fair share)", lines, whole, short, log_x=False
    )
    name, at, worst = max(((line.name, x, y) for line in lines for x, y in line.points), key=lambda found: found[2])
    finding = f"In the last record the busiest expert is in layer {at:g} of {name}: {short(worst)} times its fair share."
    return [Plot("loads", question, [panel], finding, Table(question, ["layer", "idlest", "median", "busiest"], rows))]


def _depth(runs: Sequence[Run]) -> list[Plot]:
    """What each sublayer reads, in the last record."""
    found = [(style, run, run.last("residual_rms")) for style, run in enumerate(runs)]
    lines = [Line(run.name, style, [(i + 1, y) for i, y in enumerate(values)]) for style, run, values in found if values]
    if not lines:
        return []
    question = "How does the residual stream grow with depth?"
    labels = "sublayer (number, from the first; the last is the head)", "what it reads, before its norm (root mean square)"
    panel = Panel(*labels, lines, whole, _small, log_x=False, y_scale="zero")
    rows = [[line.name, *(cell(line.points[at][1], _small) for at in (0, len(line.points) // 2, -1))] for line in lines]
    return [Plot("depth", question, [panel], _ends(panel), Table(question, ["run", "first", "middle", "head"], rows))]


def _gates(runs: Sequence[Run]) -> list[Plot]:
    """Write strengths and half-lives of recurrent memories in the last record: over all layers, and layer by layer."""
    steps = [HALF_LIVES[0] / 2, *HALF_LIVES]
    middles = [(place + 0.5) / BETA_BINS for place in range(BETA_BINS)]
    kinds = (
        ("beta", "How strongly do memories write?", "write strength (beta, over its largest)", middles, _small, False),
        ("half_life", "How long do memories keep what they hold?", "half-life (tokens, from)", steps, _small, True),
    )
    found = []
    for key, question, label, places, text, log_x in kinds:
        over_all, by_layer, rows = [], [], []
        for style, run in enumerate(runs):
            layers = [gate for gate in run.last("gates") or [] if key in gate]
            if not layers:
                continue
            means = [sum(column) / len(layers) for column in zip(*(gate[key] for gate in layers), strict=True)]
            over_all.append(Line(run.name, style, list(zip(places, means, strict=True))))
            upper = [(float(gate["layer"] + 1), float(sum(gate[key][len(places) // 2 :]))) for gate in layers]
            by_layer.append(Line(run.name, style, upper))
            rows += [[f"{run.name}: {layer:g}", cell(share, percent)] for layer, share in upper]
        if not over_all:
            continue
        middle = f"{'from ' if log_x else 'above '}{text(places[len(places) // 2] if log_x else 0.5)}"
        head = f"share {middle}{' tokens' if log_x else ''}"
        panels = [
            Panel(label, "share of tokens and channels, all layers", over_all, text, percent, log_x=log_x, y_scale="zero"),
            Panel("layer (number, from the first)", head, by_layer, whole, percent, log_x=False, y_scale="zero"),
        ]
        low, high = (pick((y, x, line.name) for line in by_layer for x, y in line.points) for pick in (min, max))
        said = f"least in layer {low[1]:g} of {low[2]} ({percent(low[0])}), most in {high[1]:g} of {high[2]}"
        found.append(
            Plot(key, question, panels, f"The {head} is {said} ({percent(high[0])}).", Table(question, ["layer", head], rows))
        )
    return found


def _lead(runs: Sequence[Run]) -> str:
    final = [(y, run.name) for run in runs if (y := finite(run.last("val_nats_per_token"))) is not None]
    text = f"{len(runs)} run{'s' if len(runs) > 1 else ''} from metrics.jsonl. "
    if final:
        best, worst = min(final), max(final)
        text += f"Lowest validation loss in the end: {best[1]}, {best[0]:.4f} nats per token"
        text += f"; highest: {worst[1]}, {worst[0]:.4f}." if len(final) > 1 else "."
    return text


def _summary(runs: Sequence[Run]) -> Table:
    columns = (
        ("steps", "step", whole),
        ("tokens", "tokens", count),
        ("training loss", "loss", lambda y: f"{y:.4f}"),
        ("validation loss", "val_nats_per_token", lambda y: f"{y:.4f}"),
        ("bits per byte", "val_bits_per_byte", lambda y: f"{y:.4f}"),
        ("tokens a second", "tokens_per_s", count),
        ("memory", "memory_bytes", size),
        ("time", "seconds", duration),
    )
    rows: list[Sequence[Cell]] = [[run.name, *(cell(run.last(key), text) for _, key, text in columns)] for run in runs]
    return Table("The runs in the end", ["run", *(head for head, _, _ in columns)], rows)


def _differing(runs: Sequence[Run]) -> str:
    """What the settings of the runs differ in, against the first."""
    first = runs[0]
    rows: list[Sequence[Cell]] = []
    for run in runs[1:]:
        found = differences(first.settings, run.settings)
        rows.append([run.name, "; ".join(found) if found else "nothing"])
    return table_html(Table(f"Settings that differ from {first.name}", ["run", "difference"], rows)) if rows else ""
