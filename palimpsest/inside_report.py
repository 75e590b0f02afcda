"""What a model did with a prompt as one HTML file (inside.py says what is computed)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from palimpsest import plots
from palimpsest.config import InputError
from palimpsest.findings import Plot, Table
from palimpsest.inside import View, find, look
from palimpsest.model import Model
from palimpsest.plots import Line, Panel, cell, escaped, percent, short, whole
from palimpsest.report import document, plot_html, section_html, table_html, write_page
from palimpsest.tokenizer import Tokenizer

MOST_LINES = len(plots.DASHES)  # layers drawn over one another; the tables have all of them
RECORDED = "From one pass over the prompt; layers are counted from 0"


def write(
    model: Model, tokenizer: Tokenizer | None, prompt: str, path: Path, name: str, answer: str | None = None
) -> dict[str, Any]:
    """Writes the page on `prompt` and returns the numbers behind it, ready for JSON. Raises InputError, with nothing written.

    Attention and readout follow the tokens of `answer`, a part of the prompt; without it the first token.
    """
    if tokenizer is None:
        raise InputError(f"{name}: there is no tokenizer in it; save the model with one")
    ids = tokenizer.encode(prompt)
    places = find(tokenizer, ids, answer) if answer is not None else [0]
    view = look(model, torch.tensor(ids, device=model.embed_tokens.weight.device), places)
    stream = tokenizer.decode_stream()
    pieces = [stream.push(token) for token in ids]
    write_page(_page(view, pieces, name), path)
    return facts(view)


def facts(view: View) -> dict[str, Any]:
    """The numbers of a view: of memories the means over heads, of readouts the error by age and of the answer's last token."""
    memories = []
    for m in view.memories:
        row = {"layer": m.layer, "kind": m.kind, "half_life": None, "beta": None, "places": list(m.places)}
        if m.half_life is not None:
            row["half_life"] = [[_number(x) for x in head] for head in m.half_life.tolist()]
        if m.beta is not None:
            row["beta"] = m.beta.tolist()
        row |= {"norm": m.norm.tolist(), "rank": m.rank.tolist(), "error_by_age": by_age(m.readout)}
        row["error_of_answer"] = m.readout[view.answer[-1], view.answer[-1] :].tolist()
        memories.append(row)
    return {
        "tokens": view.tokens,
        "answer": list(view.answer),
        "memories": memories,
        "retrievals": [{"layer": r.layer, "kind": r.kind, "mass": r.mass.tolist()} for r in view.retrievals],
        "experts": [{"layer": c.layer, "counts": c.counts.tolist()} for c in view.choices],
        "depth": [{"place": d.place, "weights": d.weights.tolist()} for d in view.depth],
    }


def by_age(readout: Tensor) -> list[float]:
    """[T,T] by (s, t) -> the mean error of pairs that were written 0, 1, ... T-1 tokens ago."""
    return [float(readout.diagonal(age).mean()) for age in range(len(readout))]


def _page(view: View, pieces: Sequence[str], name: str) -> str:
    drawn = all_plots(view)
    title = f"Palimpsest inside: {name}"
    words = [f"<b>{escaped(piece)}</b>" if i in view.answer else escaped(piece) for i, piece in enumerate(pieces)]
    lead = f"{view.tokens} tokens, of which those in bold are followed."
    links = "".join(f'<li><a href="#{plot.ident}">{escaped(plot.question)}</a></li>' for plot in drawn)
    body = [
        f'<header><h1>{escaped(title)}</h1><p class="lead">{escaped(lead)}</p><pre dir="auto">{"".join(words)}</pre></header>',
        f'<nav aria-label="Contents"><ul>{links}</ul></nav>',
        "<main>",
        *(plot_html(plot, RECORDED) for plot in drawn if plot.panels),
        *(section_html(plot.ident, plot.question, table_html(plot.table)) for plot in drawn if not plot.panels),
        "</main>",
    ]
    return document(title, body)


def all_plots(view: View) -> list[Plot]:
    """In reading order; what the model has no layers for is left out."""
    found = [_half_lives(view), _strength(view), _state(view), _readout(view), _attention(view), _experts(view), _depth(view)]
    return [plot for plot in found if plot is not None]


Series = list[tuple[str, list[tuple[float, float]]]]


def _lines(series: Series) -> list[Line]:
    """At most MOST_LINES of them, spread from the first to the last."""
    count = min(len(series), MOST_LINES)
    chosen = sorted({round(i * (len(series) - 1) / max(count - 1, 1)) for i in range(count)})
    return [Line(series[place][0], style, series[place][1]) for style, place in enumerate(chosen)]


def _left_out(series: Series) -> str:
    return "" if len(series) <= MOST_LINES else f" {MOST_LINES} of the {len(series)} layers are drawn."


def _over_tokens(values: Tensor) -> list[tuple[float, float]]:
    return [(float(t), float(y)) for t, y in enumerate(values.tolist())]


def _half_lives(view: View) -> Plot | None:
    fading = [m for m in view.memories if m.half_life is not None]
    series, rows = [], []
    for m in view.memories:
        if m.half_life is None:
            rows.append([f"{m.layer}, {m.kind}", "never fades", "", ""])
            continue
        values = m.half_life.flatten().double().sort().values
        ends = [values.min(), values.quantile(0.5, interpolation="nearest"), values.max()]
        rows.append([f"{m.layer}, {m.kind}", *(_tokens(float(value)) for value in ends)])
        steps = [round(i * (len(values) - 1) / 49) for i in range(50)] if len(values) > 50 else range(len(values))
        spread = [(100 * (i + 0.5) / len(values), float(values[i])) for i in steps]
        series.append((f"layer {m.layer}", [(x, y) for x, y in spread if math.isfinite(y)]))
    if not view.memories:
        return None
    table = Table("Half-lives over heads and channels (tokens)", ["layer", "shortest", "median", "longest"], rows)
    if not fading:
        finding = "No layer has a gate: what is written stays until something overwrites it."
        return Plot("half-lives", "How fast does each channel forget?", [], finding, table)
    panel = Panel(
        "channels of all heads, by half-life (per cent)", "half-life (tokens)", _lines(series), short, _short, False, "log"
    )
    every = torch.cat([m.half_life.flatten() for m in fading if m.half_life is not None])
    finding = (
        f"Channels lose half of what they hold within {_short(float(every.min()))} to {_short(float(every.max()))} tokens."
    )
    return Plot("half-lives", "How fast does each channel forget?", [panel], finding + _left_out(series), table)


def _tokens(value: float) -> Any:
    return cell(value, _short) if math.isfinite(value) else "never fades"


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 1e6 else "more than a million"


def _strength(view: View) -> Plot | None:
    writing = [m for m in view.memories if m.beta is not None]
    if not writing:
        return None
    series: Series = []
    rows = []
    for m in writing:
        assert m.beta is not None
        mean = m.beta.mean(1)
        series.append((f"layer {m.layer}", _over_tokens(mean)))
        rows.append([f"{m.layer}, {m.kind}", *(cell(float(x), short) for x in (m.beta.min(), mean.mean(), m.beta.max()))])
    panel = Panel("token (number, from 0)", "beta (mean over heads)", _lines(series), whole, short, False, "zero")
    table = Table("Beta over tokens and heads", ["layer", "lowest", "mean", "highest"], rows)
    strongest = max(range(view.tokens), key=lambda t: sum(float(m.beta[t].mean()) for m in writing if m.beta is not None))
    finding = f"Token {strongest} is written most strongly over all layers." + _left_out(series)
    return Plot("beta", "How strongly is each token written?", [panel], finding, table)


def _state(view: View) -> Plot | None:
    if not view.memories:
        return None
    norms: Series = []
    ranks: Series = []
    rows = []
    for m in view.memories:
        for series, values in ((norms, m.norm), (ranks, m.rank)):
            means = values.mean(1).tolist()
            series.append((f"layer {m.layer}", [(float(t), y) for t, y in zip(m.places, means, strict=True)]))
        last = (m.norm[-1].mean(), m.rank[-1].min(), m.rank[-1].mean(), m.rank[-1].max())
        rows.append([f"{m.layer}, {m.kind}", *(cell(float(x), _short) for x in last)])
    place = "token (number, from 0)"
    panels = [
        Panel(place, "norm of the memory (mean over heads)", _lines(norms), whole, _short, False, "zero"),
        Panel(place, "effective rank (mean over heads)", _lines(ranks), whole, short, False, "zero"),
    ]
    head = ["layer", "norm", "lowest rank of a head", "mean rank", "highest rank"]
    fullest = max(view.memories, key=lambda m: float(m.rank[-1].mean()))
    finding = f"In the end the memory of layer {fullest.layer} has the highest rank, {short(float(fullest.rank[-1].mean()))}."
    table = Table("Behind the last token", head, rows)
    return Plot("state", "How full is the memory?", panels, finding + _left_out(norms), table)


def _readout(view: View) -> Plot | None:
    if not view.memories:
        return None
    at = view.answer[-1]
    ages: Series = []
    followed: Series = []
    rows = []
    for m in view.memories:
        ages.append((f"layer {m.layer}", [(float(age), y) for age, y in enumerate(by_age(m.readout))]))
        own = m.readout[at, at:].tolist()
        followed.append((f"layer {m.layer}", [(float(at + i), y) for i, y in enumerate(own)]))
        rows.append(
            [f"{m.layer}, {m.kind}", *(cell(x, short) for x in (own[0], own[-1], ages[-1][1][0][1], ages[-1][1][-1][1]))]
        )
    panels = [
        Panel("token (number, from 0)", f"error of token {at}'s pair", _lines(followed), whole, short, False, "errors"),
        Panel("tokens since it was written", "mean error of all pairs", _lines(ages), whole, short, False, "errors"),
    ]
    head = [
        "layer",
        f"token {at}, when written",
        f"token {at}, in the end",
        "all pairs, when written",
        "oldest pair, in the end",
    ]
    best = min(view.memories, key=lambda m: float(m.readout[at, -1]))
    finding = f"Behind the last token layer {best.layer} reads token {at}'s value best, with an error of "
    finding += f"{short(float(best.readout[at, -1]))} of its size; 1 is what an empty memory gives." + _left_out(ages)
    return Plot("readout", "Can what was stored still be read?", panels, finding, Table("Readout errors", head, rows))


def _attention(view: View) -> Plot | None:
    if not view.retrievals:
        return None
    series: Series = [(f"layer {r.layer}", _over_tokens(r.mass.mean(1))) for r in view.retrievals]
    where = f"token {view.answer[0]}" if len(view.answer) == 1 else f"tokens {view.answer[0]} to {view.answer[-1]}"
    panel = Panel("token that looks (number, from 0)", f"attention on {where}", _lines(series), whole, percent, False, "zero")
    rows = []
    for r in view.retrievals:
        favourite = int(r.last.mean(0).argmax())
        looks = [cell(float(x), percent) for x in (r.mass[-1].mean(), r.mass[-1].max())]
        rows.append([f"{r.layer}, {r.kind}", *looks, cell(favourite, whole)])
    head = ["layer", "mean over heads", "highest of a head", "token looked at most"]
    most = max(view.retrievals, key=lambda r: float(r.mass[-1].mean()))
    finding = f"The last token gives {where} {percent(float(most.mass[-1].mean()))} of its attention in layer {most.layer}; "
    finding += f"spread evenly it would be {percent(len(view.answer) / view.tokens)}." + _left_out(series)
    table = Table("Attention of the last token", head, rows)
    return Plot("attention", f"How much attention falls on {where}?", [panel], finding, table)


def _experts(view: View) -> Plot | None:
    if not view.choices:
        return None
    series: Series = []
    rows = []
    for choice in view.choices:
        shares = choice.counts.double() / view.tokens
        order = shares.sort(descending=True)
        series.append((f"layer {choice.layer}", [(float(i + 1), y) for i, y in enumerate(order.values.tolist())]))
        favourites = ", ".join(map(str, order.indices[:3].tolist()))
        idle = int((choice.counts == 0).sum())
        rows.append([str(choice.layer), favourites, cell(float(order.values[0]), percent), cell(idle, whole)])
    label = "tokens that chose it (per cent of the prompt)"
    panel = Panel("expert (number, from the busiest)", label, _lines(series), whole, percent, False, "zero")
    head = ["layer", "busiest experts", "tokens of the busiest", "experts without a token"]
    idle = sum(int((choice.counts == 0).sum()) for choice in view.choices)
    count = sum(len(choice.counts) for choice in view.choices)
    finding = f"{idle} of {count} experts were chosen by no token of the prompt." + _left_out(series)
    return Plot("experts", "Which experts were chosen?", [panel], finding, Table("Choices of experts", head, rows))


def _depth(view: View) -> Plot | None:
    if not view.depth:
        return None
    series: Series = [(depth.place, _over_tokens(depth.weights)) for depth in view.depth if len(depth.weights) > 1]
    places = "source (number, 0 is the embedding; the last is the newest)"
    panel = Panel(places, "weight (mean over tokens)", _lines(series), whole, percent, False, "zero")
    rows = []
    for depth in view.depth:
        chosen = int(depth.weights.argmax())
        weights = (depth.weights[0], depth.weights[-1])
        rows.append([depth.place, cell(len(depth.weights), whole), *(cell(float(x), percent) for x in weights), str(chosen)])
    head = ["reader", "sources", "on the embedding", "on the newest", "source read most"]
    last = view.depth[-1].weights
    finding = f"The head reads source {int(last.argmax())} of {len(last)} most, with {percent(float(last.max()))}."
    table = Table("Reading over depth", head, rows)
    return Plot("depth", "Which earlier layers does each layer read?", [panel], finding + _left_out(series), table)


def _number(value: float) -> float | None:
    """JSON has no infinity: None is a channel that never fades."""
    return value if math.isfinite(value) else None
