"""Turns the results of a lineage run into one HTML file that needs nothing else: no network, no script, no font.

The page: what was found, the stages side by side, one section a plot, the scale card, then each stage by itself.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from palimpsest import plots
from palimpsest.checkpoint import write_text
from palimpsest.config import InputError
from palimpsest.findings import (
    UNMEASURED,
    Cell,
    Plot,
    Results,
    Table,
    all_plots,
    cell,
    failure,
    failures,
    listed,
    points,
    stage_rows,
    title,
    trained,
    unsolved,
)
from palimpsest.plots import bits, count, duration, escaped, finite, percent, short, size, whole
from palimpsest.recall import findings as recall

FORMAT = 1  # of the results


def write_report(results: Results, path: Path) -> None:
    """Writes the report on `results` (what `results.json` of a lineage run holds) to `path`, whole or not at all.

    Raises `InputError` when the results have another format or the file cannot be written.
    """
    if results.get("format") != FORMAT:
        raise InputError(f"results: format is {results.get('format')!r}; this version reads {FORMAT}, run the lineage again")
    if not isinstance(results.get("stages"), list) or not results["stages"]:
        raise InputError(f"results: stages is {results.get('stages')!r}; it must be a list of stages, run the lineage again")
    write_page(_page(results), path)


def write_recall(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Writes a page on runs of `benchmark recall`: rows of `recall.runner.read` and `not_run`. Errors as `write_report`."""
    drawn = recall.plots(rows)
    machines = dict.fromkeys(_machine(row) for row in rows if row["status"] != "not run")
    machine = "; ".join(machines) or "Nothing was measured"
    done = sum(row["status"] != "not run" for row in rows)
    name = "Palimpsest: who remembers what"
    places = [(plot.ident, plot.question) for plot in drawn] + [
        ("claims", "What others found, and we"),
        ("cells", "Every cell"),
    ]
    links = "".join(f'<li><a href="#{ident}">{escaped(text)}</a></li>' for ident, text in places)
    body = [
        f'<header><h1>{name}</h1><p class="lead">{done} of {len(rows)} cells were run.</p></header>',
        f'<nav aria-label="Contents"><ul>{links}</ul></nav>',
        "<main>",
        *(plot_html(plot, machine) for plot in drawn),
        section_html(*places[-2], table_html(recall.claims_table(rows))),
        section_html(*places[-1], table_html(recall.runs_table(rows))),
        "</main>",
    ]
    write_page(document(name, body), path)


def write_page(page: str, path: Path) -> None:
    """Writes a page whole or not at all. Raises `InputError` when the file cannot be written."""
    write_text(path, page.encode("utf-8", "replace").decode())


def _page(results: Results) -> str:
    drawn = all_plots(results)
    tasks = results.get("tasks") or []
    drawn += recall.plots(tasks)
    places = [("stages", "The stages side by side"), *((plot.ident, plot.question) for plot in drawn)]
    claims = [("claims", "What others found, and we")] if tasks else []
    places += claims
    places += [("scale", "How large is Kimi K3?"), ("each", "The stages one by one"), ("run", "How this was measured")]
    links = "".join(f'<li><a href="#{ident}">{escaped(name)}</a></li>' for ident, name in places)
    name = "Palimpsest: the lineage from GPT-2 to Kimi K3"
    body = [
        f'<header><h1>{name}</h1><p class="lead">{escaped(_lead(results))}</p>{_notice(results)}</header>',
        f'<nav aria-label="Contents"><ul>{links}</ul></nav>',
        "<main>",
        section_html("stages", places[0][1], table_html(_summary(results))),
        *(plot_html(plot, _machine(results)) for plot in drawn),
        *(section_html(*place, table_html(recall.claims_table(tasks))) for place in claims),
        section_html("scale", places[-3][1], _scale(results.get("scale_card") or {})),
        section_html("each", places[-2][1], _stages(results)),
        section_html("run", places[-1][1], table_html(_run(results))),
        "</main>",
    ]
    return document(name, body)


def document(title: str, body: Sequence[str]) -> str:
    """A whole HTML page that needs nothing else."""
    content = "\n".join(body)
    style = (importlib.resources.files("palimpsest") / "report.css").read_text(encoding="utf-8")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escaped(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n{content}\n</body>\n</html>\n"
    )


# Pieces of HTML.


def section_html(ident: str, heading: str, content: str) -> str:
    return f'<section id="{ident}"><h2>{escaped(heading)}</h2>{content}</section>'


def table_html(table: Table) -> str:
    """A table with a caption, in a box of its own that scrolls when the table is wider than the page."""
    head = "".join(f'<th scope="col">{escaped(name)}</th>' for name in table.head)
    rows = []
    for first, *others in table.rows:
        cells = [_cell(value, 1) for value in others]
        if 1 + len(others) < len(table.head):
            cells[-1] = _cell(others[-1], len(table.head) - len(others))
        rows.append(f'<tr><th scope="row"{_exact(first)}>{escaped(_shown(first))}</th>{"".join(cells)}</tr>')
    caption = escaped(table.caption)
    kind = ' class="facts"' if len(table.head) == 2 else ""
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{caption}">'
        f"<table{kind}><caption><span>{caption}</span></caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _cell(value: Cell, span: int) -> str:
    shown = _shown(value)
    kind = "failed" if shown.startswith("failed") else "unmeasured" if shown == UNMEASURED else ""
    kind = f' class="{kind}"' if kind else ' class="number"' if isinstance(value, tuple) else ""
    wide = f' colspan="{span}"' if span > 1 else ""
    return f"<td{kind}{wide}{_exact(value)}>{escaped(shown)}</td>"


def _shown(value: Cell) -> str:
    return value if isinstance(value, str) else value[0]


def _exact(value: Cell) -> str:
    return f' title="{escaped(value[1])}"' if isinstance(value, tuple) and value[0] != value[1] else ""


def plot_html(plot: Plot, machine: str) -> str:
    panels = [panel for panel in map(plots.drawable, plot.panels) if panel.lines]
    drawing = f'<p class="unmeasured">{UNMEASURED}</p>'
    if panels:
        label = f"{plot.question} {'; '.join(f'{p.y_label} against {p.x_label}' for p in panels)}."
        drawing = plots.svg(plot.ident, label, panels)
        drawing += plots.legend(panels[0]) if len(panels[0].lines) > 1 else ""
    return section_html(
        plot.ident,
        plot.question,
        f'<p class="machine">{escaped(machine)}</p><figure>{drawing}</figure><p class="finding">{escaped(plot.finding)}</p>'
        f"<details open><summary>The numbers</summary>{table_html(plot.table)}</details>",
    )


# What the page says.


def _machine(results: Results) -> str:
    machine = results.get("machine") or {}
    parts = [machine.get("processor"), machine.get("platform")]
    if finite(machine.get("threads")) is not None:
        parts.insert(1, f"{machine['threads']} thread{'s' if machine['threads'] != 1 else ''}")
    if finite(machine.get("memory_bytes")):
        parts.insert(2, f"{size(machine['memory_bytes'])} of memory")
    parts += [f"{name} {machine[name]}" for name in ("torch", "python") if machine.get(name)]
    return f"Measured on {', '.join(str(part) for part in parts if part)}" if any(parts) else "Machine: not recorded"


def _lead(results: Results) -> str:
    stages = results["stages"]
    done = trained(results)
    text = f"{len(done)} of {len(stages)} stages finished"
    source = (results.get("text") or {}).get("source") or "an unnamed text"
    seen = sorted({n for stage in done if (n := finite(stage.get("tokens_seen"))) is not None})
    if len(seen) == 1:
        text += f", each trained on {count(seen[0])} tokens of {source}"
    elif seen:
        text += f", trained on different numbers of tokens ({count(seen[0])} to {count(seen[-1])}) of {source}"
    final = [(y, stage) for stage in done if (y := finite(stage.get("val_bits_per_byte"))) is not None]
    text += ". "
    if final:
        (low, best), (high, worst) = min(final, key=lambda x: x[0]), max(final, key=lambda x: x[0])
        text += f"{title(best)} predicts unseen text best, at {bits(low)} bits per byte"
        text += f"; {title(worst)} worst, at {bits(high)}. " if worst is not best else ". "
        first = next((y for y, stage in final if stage is stages[0]), None)
        if first is not None:
            better = [title(stage) for y, stage in final if y < first]
            text += f"Better than {title(stages[0])} ({bits(first)}): {listed(better, len(final) - 1)}. "
    rows = [(title(stage), dict(points(stage.get("state_bytes"), "context", "bytes"))) for stage in done]
    longest = max((context for _, row in rows for context in row), default=0)
    carried = {name: row[longest] for name, row in rows if longest in row}
    if len(carried) > 1:
        text += f"At {whole(longest)} tokens of context "
        for extreme, words in ((min, "the least memory"), (max, "; the most")):
            amount = extreme(carried.values())
            names = [name for name, held in carried.items() if held == amount]
            text += f"{words}, {size(amount)}, is carried by {listed(names, len(carried))}"
        text += ". "
    recalled = [stage for stage in done if points(stage.get("recall"), "pairs", "accuracy")]
    if recalled:
        solved = [title(stage) for stage in recalled if not unsolved(stage)]
        text += f"Clearly above chance on associative recall: {listed(solved, len(recalled))}."
    return text + failures(results)


def _notice(results: Results) -> str:
    failed = [stage for stage in results["stages"] if not stage.get("ok")]
    items = "".join(f"<li><strong>{escaped(title(s))}</strong> {escaped(failure(s))}</li>" for s in failed)
    luck = '<p class="machine">Each stage was trained once, so a small difference between two stages may be luck.</p>'
    return luck + (f'<ul class="failed">{items}</ul>' if failed else "")


def _summary(results: Results) -> Table:
    rows = [points(stage.get("state_bytes"), "context", "bytes") for stage in trained(results)]
    longest = max((row[-1][0] for row in rows if row), default=None)

    def cells(stage: dict[str, Any]) -> list[Cell]:
        held = {row["context"]: row.get("bytes") for row in stage.get("state_bytes") or ()}
        return [
            cell(stage.get("parameters"), count),
            cell(stage.get("active_parameters"), count),
            cell(stage.get("tokens_seen"), count),
            cell(stage.get("val_bits_per_byte"), bits),
            cell(stage.get("seconds"), duration),
            cell(held.get(longest), size),
        ]

    memory = "memory carried" if longest is None else f"memory carried at {whole(longest)} tokens"
    head = ["stage", "parameters", "active parameters", "tokens seen", "validation bits per byte", "training time", memory]
    return Table("The stages of the lineage", head, stage_rows(results, cells))


def _scale(card: dict[str, Any]) -> str:
    """Big numbers, each with what it counts, and all of them exactly in a table. Only what the card holds is shown."""
    facts = [
        ("parameters", "parameters", count),
        ("active_parameters", "parameters active for each token", count),
        ("gpt2_parameters", "parameters of GPT-2", count),
        ("size_ratio", "times the size of GPT-2", whole),
        ("size_ratio_rounded", "times, when both sizes are rounded first", lambda x: whole(float(f"{x:.4g}"))),
        ("kv_bytes_per_token", "bytes kept for each token of context", whole),
        ("recurrent_state_bytes", "of recurrent state, whatever the context", size),
        ("conv_state_bytes", "of convolution state, whatever the context", size),
    ]
    held = [(label, card[key], text) for key, label, text in facts if finite(card.get(key)) is not None]
    if not held:
        return f'<p class="unmeasured">{UNMEASURED}</p>'
    tiles = [
        f'<li><strong title="{escaped(_shown(cell(value, str)))}">{escaped(text(value))}</strong> {escaped(label)}</li>'
        for label, value, text in held
    ]
    rows = [
        [
            label,
            cell(value, lambda x: f"{x:,}"),
        ]
        for label, value, _ in held
    ]
    source = f'<p class="machine">{escaped(str(card.get("source") or ""))}</p>'
    exact = table_html(Table("Kimi K3, exact counts", ["what", "exact value"], rows))
    return f'{source}<ul class="card">{"".join(tiles)}</ul><details open><summary>The numbers</summary>{exact}</details>'


def _stages(results: Results) -> str:
    configs = [_flat(stage.get("config") or {}) for stage in results["stages"]]
    shared = {
        key: value
        for key, value in (configs[0] if configs else {}).items()
        if all(key in config and config[key] == value for config in configs)
    }
    common = _config_table("What all stages have in common", shared) if len(configs) > 1 else ""
    if len(configs) < 2:
        shared = {}
    parts = []
    for stage, config in zip(results["stages"], configs, strict=True):
        own = {key: value for key, value in config.items() if key not in shared}
        parts.append(_stage(stage, own, bool(shared)))
    return common + "".join(parts)


def _stage(stage: dict[str, Any], config: dict[str, str], some_shared: bool) -> str:
    name = str(stage.get("name"))
    full = str(stage.get("title") or name)
    if stage.get("ok"):
        content = table_html(_numbers(stage)) + _sample(stage.get("sample"))
    else:
        content = f'<p class="failed">{escaped(failure(stage))}</p>'
    caption = f"{title(stage)}: configuration" + (" where stages differ" if some_shared else "")
    return (
        f'<section class="stage" id="stage-{escaped(name)}"><h3>{escaped(full)}</h3><p>{escaped(stage.get("memory") or "")}</p>'
        f"{content}{_config_table(caption, config)}</section>"
    )


def _numbers(stage: dict[str, Any]) -> Table:
    facts: list[tuple[str, Cell]] = [
        ("parameters", cell(stage.get("parameters"), count)),
        ("active parameters", cell(stage.get("active_parameters"), count)),
        ("training tokens", cell(stage.get("tokens_seen"), count)),
        ("training time", cell(stage.get("seconds"), duration)),
        ("training tokens per second", cell(stage.get("tokens_per_second"), count)),
        ("validation bits per byte", cell(stage.get("val_bits_per_byte"), bits)),
    ]
    series = [
        ("training loss (nats per token)", "train_curve", "tokens", "nats_per_token", bits, count, "tokens"),
        ("recall accuracy while it was trained", "recall_curve", "step", "accuracy", percent, whole, "steps"),
        ("recall accuracy in the end", "recall", "pairs", "accuracy", percent, whole, "pairs"),
        ("memory carried", "state_bytes", "context", "bytes", size, whole, "tokens"),
        ("time for the next token (ms)", "decode_ms", "context", "ms", short, whole, "tokens"),
    ]
    for label, key, x, y, value, place, unit in series:
        row = points(stage.get(key), x, y)
        ends = [row[0], row[-1]] if len(row) > 1 else row
        said = " → ".join(f"{value(b)} ({place(a)} {unit})" for a, b in ends)
        facts.append((label, (said, "; ".join(f"{a:g}: {b:.10g}" for a, b in row)) if row else UNMEASURED))
    return Table(f"{title(stage)}: its numbers", ["what", "value"], facts)


def _sample(sample: dict[str, Any] | None) -> str:
    if not sample:
        return f'<p class="unmeasured">Generated text: {UNMEASURED}</p>'
    prompt, text = str(sample.get("prompt") or ""), str(sample.get("text") or "")
    label = '<p class="label">Text it generates, after the prompt in bold:</p>'
    return f'{label}<pre dir="auto"><b>{escaped(prompt)}</b>{escaped(text)}</pre>'


def _config_table(caption: str, config: dict[str, str]) -> str:
    return table_html(Table(caption, ["setting", "value"], list(config.items()))) if config else ""


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Fields as text, nested ones joined by dots, repetitions in a list counted: `kda × 3, mla`."""
    rows: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            rows |= _flat(value, f"{prefix}{key}.")
        elif isinstance(value, list | tuple):
            runs = [(item, len(list(run))) for item, run in groupby(value)]
            rows[prefix + key] = ", ".join(f"{item} × {n}" if n > 1 else str(item) for item, n in runs)
        else:
            words = {"None": "none", "True": "yes", "False": "no"}
            rows[prefix + key] = value if isinstance(value, str) else words.get(str(value), str(value))
    return rows


def _run(results: Results) -> Table:
    text, budget = results.get("text") or {}, results.get("budget") or {}
    facts: Sequence[tuple[str, Cell]] = [
        ("command", str(results.get("command"))),
        ("version", str(results.get("version"))),
        ("commit", str(results.get("commit") or "not a checkout")),
        ("finished", str(results.get("created"))),
        ("machine", _machine(results).removeprefix("Measured on ")),
        ("text", str(text.get("source"))),
        ("text size", cell(text.get("bytes"), size)),
        ("trained on", cell(text.get("train_bytes"), size)),
        ("validated on", cell(text.get("validation_bytes"), size)),
        ("unigram entropy (bits per byte)", cell(text.get("unigram_bits_per_byte"), bits)),
        ("vocabulary (tokens)", cell(text.get("vocab_size"), whole)),
        ("bytes per token", cell(text.get("bytes_per_token"), short)),
        ("budget (minutes)", cell(budget.get("minutes"), short)),
        ("used in all", cell(budget.get("seconds_used"), duration)),
        ("training tokens a stage", cell(budget.get("tokens"), count)),
        ("training steps", cell(budget.get("steps"), whole)),
        ("sequences a step", cell(budget.get("batch_size"), whole)),
        ("tokens a sequence", cell(budget.get("context_length"), whole)),
    ]
    return Table("The run behind this page", ["what", "value"], facts)
