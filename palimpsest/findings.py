"""What each plot of the report shows: its question, its lines, the sentence that answers it, its table.

Everything is computed from a lineage run's results; nothing here is markup. A stage that failed has a row in every table and
no line. What was not measured is said to be so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from palimpsest.plots import UNMEASURED, Cell, Line, Panel, Points, bits, cell, count, finite, percent, short, size, whole

# A memory without training wears the style of the stage that works the same way.
_MEMORIES = {"additive": ("additive", 1), "delta": ("delta", 2), "gated": ("gated", 3)}
_MEMORIES |= {"per_channel": ("per-channel gated", 4)}

Results = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """In a row with fewer cells than `head`, the last cell spans the rest."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True)
class Plot:
    """Without a panel that has lines there is nothing to draw, and `finding` says why."""

    ident: str
    question: str
    panels: Sequence[Panel]
    finding: str
    table: Table


def all_plots(results: Results) -> list[Plot]:
    """All plots of the report, in reading order."""
    readout = results.get("readout") or {}
    stages = (_loss, _recall, _memory, _decode, _position)
    return [
        *(make(results) for make in stages),
        _stored(readout),
        _overwrite(readout),
        _chunks(results.get("chunk_sweep") or {}),
    ]


# Stages and their series.


def title(stage: dict[str, Any]) -> str:
    """What a stage is called in tables and sentences: its title up to a colon."""
    return str(stage.get("title") or stage.get("name")).partition(":")[0]


def trained(results: Results) -> list[dict[str, Any]]:
    """The stages that did not fail."""
    return [stage for stage in results["stages"] if stage.get("ok")]


def points(rows: Iterable[dict[str, Any]] | None, x: str, y: str) -> Points:
    """The pairs (x, y) of which both are finite numbers, by x."""
    pairs = [(finite(row.get(x)), finite(row.get(y))) for row in rows or ()]
    return sorted((a, b) for a, b in pairs if a is not None and b is not None)


def listed(names: Sequence[str], everyone: int | None = None) -> str:
    """`A, B and C`; `none`; or `all 8` when everyone is among them."""
    if not names:
        return "none"
    if everyone is not None and len(names) == everyone > 1:
        return f"all {everyone}"
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]


def failure(stage: dict[str, Any]) -> str:
    return f"failed: {stage.get('error') or 'no reason recorded'}"


def failures(results: Results) -> str:
    """A sentence about the stages that failed, or nothing."""
    failed = [title(stage) for stage in results["stages"] if not stage.get("ok")]
    return f" Failed, so not shown: {listed(failed)}." if failed else ""


def stage_rows(results: Results, cells: Callable[[dict[str, Any]], Sequence[Cell]]) -> list[Sequence[Cell]]:
    """One table row a stage: its title and its cells, or its error."""
    return [[title(stage), *(cells(stage) if stage.get("ok") else [failure(stage)])] for stage in results["stages"]]


def _lines(results: Results, key: str, x: str, y: str) -> list[Line]:
    lines = [
        Line(title(stage), style, points(stage.get(key), x, y))
        for style, stage in enumerate(results["stages"])
        if stage.get("ok")
    ]
    return [line for line in lines if line.points]


def _columns(lines: Sequence[Line]) -> list[float]:
    return sorted({x for line in lines for x, _ in line.points})


def _at(columns: Sequence[float], row: Points, text: Callable[[float], str]) -> list[Cell]:
    values = dict(row)
    return [cell(values.get(x), text) for x in columns]


def _ends(lines: Sequence[Line]) -> list[tuple[float, str]]:
    """The values at the last x of all, with the lines' names, in rising order."""
    last = _columns(lines)[-1]
    return sorted((y, line.name) for line in lines for x, y in line.points if x == last)


def _where(lines: Sequence[Line], holds: Callable[[Line], bool]) -> str:
    return listed([line.name for line in lines if holds(line)], len(lines))


# The plots.


def _loss(results: Results) -> Plot:
    lines = _lines(results, "val_curve", "tokens", "bits_per_byte")
    entropy = finite((results.get("text") or {}).get("unigram_bits_per_byte"))
    highest = max((y for line in lines for _, y in line.points), default=0.0)
    cut = entropy is not None and highest > 1.1 * entropy
    whole_run = Panel(
        "training tokens seen (number)",
        "validation loss (bits per byte of text)",
        lines,
        count,
        short,
        log_x=False,
        top=1.1 * entropy if entropy and cut else None,
        references=[] if entropy is None else [("unigram entropy of the text", entropy)],
    )
    late = [Line(line.name, line.style, line.points[len(line.points) // 2 :]) for line in lines]
    end = Panel(whole_run.x_label, "the later half (bits per byte of text)", late, count, short, log_x=False)

    def cells(stage: dict[str, Any]) -> list[Cell]:
        curve = points(stage.get("val_curve"), "tokens", "bits_per_byte")
        first, change = (curve[0] if curve else (None, None)), (curve[-1][1] - curve[-2][1] if curve[1:] else None)
        final = cell(stage.get("val_bits_per_byte"), bits)
        return [cell(first[0], count), cell(first[1], bits), final, cell(change, lambda x: f"{x:+.3f}")]

    final = [(y, title(s)) for s in trained(results) if (y := finite(s.get("val_bits_per_byte"))) is not None]
    finding = _loss_finding(lines, sorted(final), entropy) if final else "Validation loss was not measured."
    finding += " Values above the top edge are in the table only." if cut else ""
    head = ["stage", "first measured at (tokens)", "first (bits per byte)", "final (bits per byte)", "last change"]
    caption = "Validation bits per byte of text. The last change is that between the last two measurements"
    table = Table(caption, head, stage_rows(results, cells))
    question = "How well does each stage predict text it has not seen?"
    return Plot("loss", question, [whole_run, end], finding + failures(results), table)


def _loss_finding(lines: Sequence[Line], final: Sequence[tuple[float, str]], entropy: float | None) -> str:
    (low, best), (high, worst) = final[0], final[-1]
    text = f"Lowest at the end: {best} with {bits(low)} bits per byte; highest: {worst} with {bits(high)}."
    if entropy is not None:
        below = [name for value, name in final if value < entropy]
        text += f" Below the text's unigram entropy of {bits(entropy)}: {listed(below, len(final))}."
    moving = [line for line in lines if len(line.points) > 1]
    if not moving:
        return f"{text} With fewer than two measurements no trend can be told."
    fell = _where(moving, lambda line: line.points[-1][1] < line.points[-2][1])
    rose = _where(moving, lambda line: line.points[-1][1] >= line.points[-2][1])
    return f"{text} Still falling between the last two measurements: {fell}; not falling: {rose}."


def unsolved(stage: dict[str, Any]) -> bool:
    """Whether the best recall accuracy is under twice the chance level plus 5 points."""
    best = max((y for _, y in points(stage.get("recall"), "pairs", "accuracy")), default=0.0)
    return best < 2 * (finite(stage.get("recall_chance")) or 0.0) + 0.05


def _recall(results: Results) -> Plot:
    lines = _lines(results, "recall", "pairs", "accuracy")
    stages = [stage for stage in trained(results) if points(stage.get("recall"), "pairs", "accuracy")]
    chances = sorted({c for stage in stages if (c := finite(stage.get("recall_chance"))) is not None})
    steps = sorted({n for stage in stages if (n := finite(stage.get("recall_steps"))) is not None})
    given = f"{listed([whole(n) for n in steps])} training steps"
    panel = Panel(
        "key-value pairs (number)",
        f"accuracy after {given} (% of queries)",
        lines,
        whole,
        percent,
        y_scale="zero",
        top=1.05,
        references=[(f"chance {percent(chance)}", chance) for chance in chances],
    )
    pairs = _columns(lines)

    def cells(stage: dict[str, Any]) -> list[Cell]:
        values = _at(pairs, points(stage.get("recall"), "pairs", "accuracy"), percent)
        return [cell(stage.get("recall_steps"), whole), cell(stage.get("recall_chance"), percent), *values]

    finding = "Associative recall was not measured."
    if lines:
        failed = {title(stage) for stage in stages if unsolved(stage)}
        best = max(lines, key=lambda line: sum(y for _, y in line.points) / len(line.points))
        (few, most), (many, least) = best.points[0], best.points[-1]
        finding = f"After {given}, best on average: {best.name}, {percent(most)} right with {whole(few)} pairs"
        finding += f" and {percent(least)} with {whole(many)}." if many != few else "."
        finding += f" Unsolved in this short run: {_where(lines, lambda line: line.name in failed)}."
    head = ["stage", "training steps", "chance", *(f"{whole(n)} pairs" for n in pairs)]
    table = Table(
        "Recall accuracy; unsolved means that the best is under twice chance plus 5 points", head, stage_rows(results, cells)
    )
    question = "How many key-value pairs can each stage recall?"
    return Plot("recall", question, [panel], finding + failures(results), table)


def _memory(results: Results) -> Plot:
    lines = _lines(results, "state_bytes", "context", "bytes")
    panel = Panel("context (tokens)", "memory carried (bytes)", lines, whole, size, y_scale="log")
    contexts = _columns(lines)
    longest = contexts[-1] if contexts else 0

    def cells(stage: dict[str, Any]) -> list[Cell]:
        rows = {row["context"]: row for row in stage.get("state_bytes") or ()}
        kinds = [cell(rows.get(longest, {}).get(kind), size) for kind in ("kv", "recurrent", "conv")]
        return [*(cell(rows.get(x, {}).get("bytes"), size) for x in contexts), *kinds]

    finding = "Memory was not measured."
    compared = [line for line in lines if len(line.points) > 1]
    if compared:
        finding = _memory_finding(compared)
    elif lines:
        finding = "Measured at one context only, so growth cannot be told."
    head = ["stage", *(f"{whole(x)} tokens" for x in contexts), "kv", "recurrent", "conv"]
    caption = "Bytes one sequence carries; at the longest context also their split into keys and values (kv), recurrent "
    caption += "state and convolution inputs (conv)"
    table = Table(caption, head, stage_rows(results, cells))
    question = "How much memory does each stage carry as the context grows?"
    return Plot("memory", question, [panel], finding + failures(results), table)


def _memory_finding(lines: Sequence[Line]) -> str:
    constant, growing = [], []
    for line in lines:
        (x0, y0), (x1, y1) = line.points[0], line.points[-1]
        if len({y for _, y in line.points}) == 1:
            constant.append(f"{line.name} ({size(y0)})")
        else:
            verb = "grows" if y1 > y0 else "changes"
            growing.append(f"{line.name} ({verb} by {size((y1 - y0) / (x1 - x0))} a token on average)")
    text = f"Constant at every context measured: {listed(constant)}. Not constant: {listed(growing)}."
    ends = _ends(lines)
    (low, _), (high, _) = ends[0], ends[-1]
    if low > 0:
        least, most = (listed([name for y, name in ends if y == end], len(ends)) for end in (low, high))
        text += f" At the longest context most is carried by {most}, {short(high / low)} times the least ({least})."
    return text


def _decode(results: Results) -> Plot:
    lines = _lines(results, "decode_ms", "context", "ms")
    panel = Panel("context (tokens)", "time for the next token (ms)", lines, whole, short, y_scale="zero")
    contexts = _columns(lines)
    finding = "Decode time was not measured."
    if lines:
        ends = _ends(lines)
        (low, fastest), (high, slowest) = ends[0], ends[-1]
        finding = (
            f"At the longest context, fastest: {fastest} ({short(low)} ms a token); slowest: {slowest} ({short(high)} ms)."
        )
        slower = [(line, line.points[-1][1] / line.points[0][1]) for line in lines if line.points[0][1] > 0]
        grown = [f"{line.name} ({short(ratio)} times)" for line, ratio in slower if ratio > 1.25]
        even = [line.name for line, ratio in slower if ratio <= 1.25]
        finding += f" Over a quarter slower there than at the shortest context: {listed(grown)}; not so: {listed(even)}."
    head = ["stage", *(f"{whole(x)} tokens (ms)" for x in contexts)]
    rows = stage_rows(results, lambda s: _at(contexts, points(s.get("decode_ms"), "context", "ms"), short) or [UNMEASURED])
    table = Table("Milliseconds for the next token by context, one sequence", head if contexts else [*head, "ms"], rows)
    question = "How long does the next token take as the context grows?"
    return Plot("decode", question, [panel], finding + failures(results), table)


def _position(results: Results) -> Plot:
    ranges: dict[float, str] = {}
    lines = []
    for style, stage in enumerate(results["stages"]):
        row: Points = []
        for bucket in (stage.get("position_bits") or ()) if stage.get("ok") else ():
            middle, value = math.sqrt(max(bucket["start"], 1) * bucket["end"]), finite(bucket.get("bits_per_byte"))
            ranges[middle] = "–".join(dict.fromkeys((str(bucket["start"]), str(bucket["end"]))))
            row += [(middle, value)] if value is not None else []
        lines += [Line(title(stage), style, sorted(row))] if row else []
    panel = Panel("position in the text (tokens)", "loss (bits per byte)", lines, lambda x: ranges[x], short)
    columns = _columns(lines)
    finding = "Loss by position was not measured."
    if lines:
        gains = sorted((line.points[0][1] - line.points[-1][1], line.name) for line in lines)
        (least, last), (most, first) = gains[0], gains[-1]
        finding = f"Easier at the last positions ({ranges[columns[-1]]}) than at the first ({ranges[columns[0]]}): "
        finding += f"{listed([name for gain, name in gains if gain > 0], len(gains))}. "
        finding += f"Most gained: {first} ({most:+.3f} bits per byte); least: {last} ({least:+.3f})."
    by_name = {line.name: line.points for line in lines}
    rows = stage_rows(results, lambda stage: _at(columns, by_name.get(title(stage), []), bits) or [UNMEASURED])
    head = ["stage", *(ranges[x] for x in columns)] if columns else ["stage", "bits per byte"]
    table = Table("Bits per byte by position (ranges of tokens, counted from the start)", head, rows)
    question = "Does a stage use what it has read: are later tokens easier?"
    return Plot("position", question, [panel], finding + failures(results), table)


def _stored(readout: dict[str, Any]) -> Plot:
    kinds = {"random": "random keys", "correlated": f"correlated keys (cosine {readout.get('cosine')})"}
    panels, findings, rows = [], [], []
    for key, kind in kinds.items():
        table = readout.get(key) or []
        curves = {memory: points(table, "pairs", memory) for memory in _MEMORIES}
        lines = [Line(name, style, curves[memory]) for memory, (name, style) in _MEMORIES.items() if curves[memory]]
        if not lines:
            continue
        label = f"relative readout error (no unit), {kind}"
        panel = Panel("stored pairs (number)", label, lines, whole, short, y_scale="errors", references=[("nothing read", 1)])
        panels.append(panel)
        findings.append(_stored_finding(kind, lines, curves["additive"], curves["delta"]))
        for n in _columns(lines):
            errors = [cell(dict(curves[memory]).get(n), lambda x: f"{x:.3f}") for memory in _MEMORIES]
            rows.append([key, cell(int(n), whole), *errors])
    dims = f"{kinds['correlated']}, {readout.get('key_dim')} key and {readout.get('value_dim')} value channels"
    caption = f"Relative readout error, {dims}; {readout.get('gate')}" if rows else "Relative readout error"
    head = ["keys", "stored pairs", *(name for name, _ in _MEMORIES.values())]
    finding = " ".join(findings) or "Readout error was not measured."
    question = "Without training, how well does each kind of memory read back what was stored?"
    return Plot("readout", question, panels, finding, Table(caption, head, rows or [["all", UNMEASURED]]))


def _stored_finding(kind: str, lines: Sequence[Line], additive: Points, delta: Points) -> str:
    ends = _ends(lines)
    text = f"{kind[0].upper()}{kind[1:]}: with {whole(_columns(lines)[-1])} pairs {ends[0][1]} memory reads back best (error "
    text += f"{ends[0][0]:.2f}) and {ends[-1][1]} memory worst ({ends[-1][0]:.2f})"
    both = [(dict(additive)[x], y) for x, y in delta if x in dict(additive)]
    lower = sum(new < old for old, new in both)
    return f"{text}; the delta rule's error is below additive memory's at {lower} of {len(both)} numbers of pairs."


def _overwrite(readout: dict[str, Any]) -> Plot:
    held = {row["memory"]: row for row in readout.get("overwrite") or ()}
    chosen = [memory for memory in _MEMORIES if finite(held.get(memory, {}).get("error_new")) is not None]
    names = [_MEMORIES[memory][0] for memory in chosen]
    bars = []
    for style, key, name in ((0, "error_new", "against the new value"), (4, "error_old", "against the old value")):
        bars.append(Line(name, style, [(x, held[memory][key]) for x, memory in enumerate(chosen)]))
    label = "relative error of what is read (no unit)"
    panel = Panel("memory", label, bars if chosen else [], whole, short, log_x=False, y_scale="zero", categories=names)
    finding = "Overwriting was not measured."
    if chosen:
        replaced = [name for name, m in zip(names, chosen, strict=True) if 2 * held[m]["error_new"] < held[m]["error_old"]]
        mixed = [name for name in names if name not in replaced]
        finding = "After a second write to the same key, the new value is read with less than half the old one's error by: "
        finding += f"{listed(replaced, len(names))}; the old value still weighs in: {listed(mixed, len(names))}."
    rows: list[Sequence[Cell]] = [
        [name, *(cell(held.get(memory, {}).get(key), lambda x: f"{x:.3f}") for key in ("error_new", "error_old"))]
        for memory, (name, _) in _MEMORIES.items()
    ]
    head = ["memory", "error against the new value", "error against the old value"]
    table = Table("Relative error after one key was written twice", head, rows)
    return Plot("overwrite", "What is left of a value when its key is written again?", [panel], finding, table)


def _chunks(sweep: dict[str, Any]) -> Plot:
    rows = sweep.get("rows") or []
    flops, times = points(rows, "chunk", "flops_per_token_per_head"), points(rows, "chunk", "ms")
    panels = [
        Panel("chunk size (tokens)", "work (FLOPs per token per head)", [Line("work", 0, flops)], whole, count, y_scale="zero"),
        Panel("chunk size (tokens)", "wall time (ms)", [Line("wall time", 4, times)], whole, short, y_scale="zero"),
    ]
    finding = "Chunk sizes were not measured."
    if flops and times:
        least, quickest = min(flops, key=lambda p: p[1]), min(times, key=lambda p: p[1])
        finding = f"Least work: chunks of {whole(least[0])} tokens with {count(least[1])} FLOPs per token per head. Fastest: "
        finding += f"chunks of {whole(quickest[0])} with {short(quickest[1])} ms. "
        finding += f"The least work is {'also' if least[0] == quickest[0] else 'not'} the fastest."
    dims = f"{sweep.get('heads')} heads of {sweep.get('key_dim')} key and {sweep.get('value_dim')} value channels"
    caption = f"Forward pass of chunked KDA over {sweep.get('tokens')} tokens, {dims}" if rows else "Chunk sizes"
    head = ["chunk size", "FLOPs per token per head", "wall time (ms)", "tokens per second"]
    cells = [
        [
            cell(row.get("chunk"), whole),
            cell(row.get("flops_per_token_per_head"), count),
            cell(row.get("ms"), short),
            cell(row.get("tokens_per_second"), count),
        ]
        for row in rows
    ]
    question = "Which chunk size is the least work, and which is the fastest?"
    return Plot(
        "chunks", question, panels if flops and times else [], finding, Table(caption, head, cells or [["all", UNMEASURED]])
    )
