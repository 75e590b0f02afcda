"""Plans as one HTML page that needs nothing else: tables, and plots that follow the page's colours."""

from __future__ import annotations

import importlib.resources
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from palimpsest.checkpoint import write_text
from palimpsest.plan import Plan, table
from palimpsest.plan.memory import crossover_tokens
from palimpsest.plan.units import tokens_text

QUESTIONS = (
    ("memory", "How much does the memory of the text take?", "state_bytes", "bytes of all sequences"),
    ("decode", "How long does the next token take?", "decode_s", "milliseconds"),
    ("first", "How long does the first token take?", "first_token_s", "milliseconds"),
)


def write(plans: Sequence[Plan], swept: Sequence[dict[str, Any]], claims: Sequence[dict[str, Any]], path: Path) -> None:
    """Writes the page, whole or not at all. Raises InputError when the file cannot be written or matplotlib is missing."""
    write_text(path, _page(plans, swept, claims))


def _page(plans: Sequence[Plan], swept: Sequence[dict[str, Any]], claims: Sequence[dict[str, Any]]) -> str:
    from palimpsest.plots import escaped

    style = (importlib.resources.files("palimpsest") / "report.css").read_text(encoding="utf-8")
    title = f"Palimpsest plan: {', '.join(plan.name for plan in plans)}" if plans else "Palimpsest: published claims"
    body = [f"<header><h1>{escaped(title)}</h1></header>", "<main>"]
    for plan in plans:
        content = _rows(table.heading(plan), ["question", "answer"], table.facts(plan))
        body.append(
            f'<section><h2>{escaped(plan.name)}</h2>{content}<p class="machine">{escaped(table.source(plan))}</p></section>'
        )
    body += [_plot(plans, swept, *question) for question in QUESTIONS if swept]
    if claims:
        cells = [
            (
                f"{row['claim']} ({row['source']})",
                f"{row['predicted']:,.5g}",
                f"{row['published']:,.5g}",
                f"{100 * row['gap']:+.1f} %",
                row["verdict"],
                row["why"],
            )
            for row in claims
        ]
        head = ["claim", "ours", "published", "gap", "verdict", "why"]
        body.append(f"<section><h2>Published claims</h2>{_rows('Published figures beside ours', head, cells)}</section>")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escaped(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )


def _rows(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    from palimpsest.plots import escaped

    top = "".join(f'<th scope="col">{escaped(name)}</th>' for name in head)
    lines = []
    for first, *others in rows:
        cells = "".join(f"<td>{escaped(value)}</td>" for value in others)
        lines.append(f'<tr><th scope="row">{escaped(first.strip())}</th>{cells}</tr>')
    label = escaped(caption)
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{label}"><table><caption><span>{label}</span></caption>'
        f"<thead><tr>{top}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _plot(plans: Sequence[Plan], swept: Sequence[dict[str, Any]], ident: str, question: str, key: str, unit: str) -> str:
    from palimpsest import plots

    scale = 1e3 if key.endswith("_s") else 1
    text = plots.size if key == "state_bytes" else plots.short
    lines = []
    for style, plan in enumerate(plans):
        points = [(float(row["context"]), scale * row[key]) for row in swept if row["model"] == plan.name]
        lines.append(plots.Line(plan.name, style % len(plots.MARKERS), points))
    panel = plots.Panel("tokens of context", unit, lines, tokens_text, text, y_scale="log")
    drawable = plots.drawable(panel)
    drawing = f'<p class="unmeasured">{plots.UNMEASURED}</p>'
    if drawable.lines:
        drawing = plots.svg(ident, f"{question} {unit} against tokens of context.", [drawable]) + plots.legend(drawable)
    crossings = [(plan.name, crossover_tokens(plan.config, plan.dtype, conv=True)) for plan in plans]
    said = [f"{name} holds less than its all-attention form from {at:,.0f} tokens on" for name, at in crossings if at]
    note = f'<p class="finding">{plots.escaped("; ".join(said))}.</p>' if said and key == "state_bytes" else ""
    return f'<section id="{ident}"><h2>{plots.escaped(question)}</h2><figure>{drawing}</figure>{note}</section>'
