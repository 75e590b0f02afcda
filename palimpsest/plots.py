"""Line and bar plots as inline SVG that follows the page's colours.

matplotlib draws with placeholder colours and its own ids. Here the colours become CSS variables, so that one drawing serves
the light and the dark theme, and every id gets the plot's name in front, so that several drawings can share a page. Text
stays text: its family and size belong to the style sheet. Lengths are units of the view box, `WIDTH` across.
"""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from palimpsest.config import InputError

try:
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator
except ImportError as error:
    raise InputError("report: matplotlib is not installed; install palimpsest-lm[report]") from error

WIDTH, HEIGHT = 640, 380
FONT_SIZE = 20  # room is kept for text of this size; the style sheet uses it on a phone and a smaller one elsewhere
DIGIT = 0.6 * FONT_SIZE  # width of a digit

UNMEASURED = "not measured"

Points = list[tuple[float, float]]
Cell = str | tuple[str, str]  # of a table: the text, or the text and the exact value behind it

_COLOURS = {"paper": "#fe0001", "ink": "#fe0002", "muted": "#fe0003", "grid": "#fe0004"}
_COLOURS |= {f"s{i}": f"#fe01{i:02x}" for i in range(8)}


def _polygon(corners: int, turn: float = 0.0, inner: float = 1.0) -> list[tuple[float, float]]:
    """Corners of a regular polygon, the first at the top turned by `turn` degrees; a star when `inner` is below 1."""
    count = corners * 2 if inner < 1 else corners
    radii = [inner if inner < 1 and i % 2 else 1.0 for i in range(count)]
    angles = [math.radians(90 + turn + 360 * i / count) for i in range(count)]
    return [(r * math.cos(a), r * math.sin(a)) for r, a in zip(radii, angles, strict=True)]


# Line styles by number, each with its own dash pattern (in line widths) and marker; the colour is --s<number>.
DASHES: list[tuple[float, ...]] = [
    (),
    (4, 1.5),
    (1, 1.2),
    (5, 1.2, 1, 1.2),
    (8, 2),
    (2.2, 1.2),
    (5, 1.2, 1, 1.2, 1, 1.2),
    (10, 1.5, 2, 1.5),
]
MARKERS = [
    _polygon(24),
    _polygon(4, 45),
    _polygon(3),
    _polygon(4),
    _polygon(3, 180),
    _polygon(5, 0, 0.45),
    _polygon(4, 0, 0.4),
    _polygon(6),
]


@dataclass(frozen=True)
class Line:
    """One series: its name, the number of its style, and its points."""

    name: str
    style: int
    points: Points


@dataclass(frozen=True)
class Panel:
    """One set of axes. Labels carry the unit; `x_text` and `y_text` write a tick.

    `errors` scales y linearly up to 1 and logarithmically above. With `categories`, x counts them and bars are drawn.
    `top` cuts y; `references` are named horizontal lines.
    """

    x_label: str
    y_label: str
    lines: Sequence[Line]
    x_text: Callable[[float], str]
    y_text: Callable[[float], str]
    log_x: bool = True
    y_scale: Literal["data", "zero", "log", "errors"] = "data"
    top: float | None = None
    references: Sequence[tuple[str, float]] = ()
    categories: Sequence[str] = ()


def drawable(panel: Panel) -> Panel:
    """The panel without points that a logarithmic axis cannot hold, and without lines that have no point."""
    lines = [
        replace(
            line,
            points=[(x, y) for x, y in line.points if (x > 0 or not panel.log_x) and (y > 0 or panel.y_scale != "log")],
        )
        for line in panel.lines
    ]
    return replace(panel, lines=[line for line in lines if line.points])


def svg(ident: str, label: str, panels: Sequence[Panel]) -> str:
    """Panels one above the other as one `<svg role="img">` whose ids all begin with `ident`; `label` says what it is."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": ident, "font.size": FONT_SIZE})
        layout = ConstrainedLayoutEngine(h_pad=8 / 72, w_pad=4 / 72, hspace=0.04)
        figure = Figure(figsize=(WIDTH / 72, HEIGHT * len(panels) / 72), layout=layout)
        figure.patch.set_visible(False)
        for panel, axes in zip(panels, figure.subplots(len(panels), squeeze=False)[:, 0], strict=True):
            _draw(panel, axes)
        buffer = io.StringIO()
        FigureCanvasSVG(figure).print_svg(buffer, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return _inline(buffer.getvalue(), ident, label)


def legend(panel: Panel) -> str:
    """An HTML list of the series' names, each behind a sample of its line or bar."""
    samples = [_bar_sample(line.style, i) if panel.categories else sample(line.style) for i, line in enumerate(panel.lines)]
    items = (f"<li>{x}{escaped(line.name)}</li>" for x, line in zip(samples, panel.lines, strict=True))
    return f'<ul class="legend">{"".join(items)}</ul>'


def sample(style: int) -> str:
    colour, dashes = f"var(--s{style})", " ".join(f"{3 * dash:g}" for dash in DASHES[style])
    corners = " ".join(f"{24 + 6 * x:.1f},{9 - 6 * y:.1f}" for x, y in MARKERS[style])
    return (
        '<svg class="sample" viewBox="0 0 48 18" aria-hidden="true">'
        f'<path d="M0 9H48" style="fill:none;stroke:{colour};stroke-width:3;stroke-dasharray:{dashes or "none"}"/>'
        f'<polygon points="{corners}" style="fill:{colour};stroke:var(--paper)"/></svg>'
    )


def _bar_sample(style: int, place: int) -> str:
    colour = f"var(--s{style})"
    look = f"fill:{'none' if place else colour};stroke:{colour};stroke-width:2"
    bar = f'<path d="M8 2H40V16H8z" style="{look}"/>'
    return f'<svg class="sample" viewBox="0 0 48 18" aria-hidden="true">{bar}</svg>'


def _draw(panel: Panel, axes: Any) -> None:
    axes.set_facecolor("none")
    axes.set_axisbelow(True)
    axes.grid(axis="y", color=_COLOURS["grid"], linewidth=1)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_COLOURS["muted"])
    axes.tick_params(color=_COLOURS["muted"], labelcolor=_COLOURS["ink"], length=5, width=1)
    axes.tick_params(axis="y", length=0)
    axes.set_title(panel.y_label, loc="left", fontsize=FONT_SIZE, color=_COLOURS["muted"], pad=12)
    axes.set_xlabel(panel.x_label, color=_COLOURS["muted"])
    if panel.categories:
        _bars(panel, axes)
    else:
        top = math.inf if panel.top is None else panel.top
        heights = [[_height(min(y, top), panel.y_scale) for _, y in line.points] for line in panel.lines]
        near = 0.012 * (max(map(max, heights)) - min(map(min, heights)))
        for i, line in enumerate(panel.lines):
            later = zip(panel.lines[i + 1 :], heights[i + 1 :], strict=True)
            covered = [
                [x for x, _ in other.points] == [x for x, _ in line.points]
                and all(abs(a - b) <= near for a, b in zip(heights[i], places, strict=True))
                for other, places in later
            ]
            _line(line, sum(covered), axes)
        _x_axis(panel, axes)
    _y_axis(panel, axes)
    for name, value in panel.references:
        axes.axhline(value, color=_COLOURS["muted"], linewidth=1.5, dashes=(6, 4), zorder=1)
        left = _clearance(panel, value, 0) > _clearance(panel, value, -1)
        place, at = axes.get_yaxis_transform(), (0.01 if left else 1, value)
        axes.text(*at, name, transform=place, ha="left" if left else "right", va="bottom", color=_COLOURS["ink"])


def _clearance(panel: Panel, value: float, end: int) -> float:
    """How far the lines keep from `value` at their first (0) or last (-1) point."""
    place = _height(value, panel.y_scale)
    return min(abs(_height(line.points[end][1], panel.y_scale) - place) for line in panel.lines)


def _line(line: Line, covered: int, axes: Any) -> None:
    """`covered` later lines lie on this one: it is drawn wider, so that it shows on both sides of them."""
    colour, x, y = _COLOURS[f"s{line.style}"], *zip(*line.points, strict=True)
    axes.plot(
        x,
        y,
        color=colour,
        linewidth=2.8 + 1.8 * covered,
        dashes=DASHES[line.style] or (None, None),
        marker=MARKERS[line.style],
        markersize=11 + 4 * covered,
        markeredgecolor=_COLOURS["paper"],
        markeredgewidth=0.8,
        markevery=max(1, len(x) // 10),
    )


def _height(y: float, scale: str) -> float:
    """Where on its axis a value stands, up to a constant factor."""
    if scale == "log" or (scale == "errors" and y > 1):
        return math.log10(y) + (scale == "errors")
    return y


def _bars(panel: Panel, axes: Any) -> None:
    """Groups of bars, one group a category: the first series filled, the others outlined."""
    width = 0.8 / len(panel.lines)
    for i, line in enumerate(panel.lines):
        colour = _COLOURS[f"s{line.style}"]
        places = [x + (i - (len(panel.lines) - 1) / 2) * width for x, _ in line.points]
        values = [y for _, y in line.points]
        axes.bar(places, values, width * 0.9, facecolor="none" if i else colour, edgecolor=colour, linewidth=2.4)
        for x, y in zip(places, values, strict=True):
            axes.text(x, y, f" {panel.y_text(y)}", ha="center", va="bottom", color=_COLOURS["ink"])
    axes.set_xticks(range(len(panel.categories)), panel.categories)


def _round_numbers() -> MaxNLocator:
    return MaxNLocator(5, steps=[1, 2, 2.5, 5, 10])


def _x_axis(panel: Panel, axes: Any) -> None:
    text = FuncFormatter(lambda value, _: panel.x_text(value))
    if not panel.log_x:
        axes.xaxis.set_major_locator(_round_numbers())
        axes.xaxis.set_major_formatter(text)
        return
    axes.set_xscale("log")
    measured = sorted({x for line in panel.lines for x, _ in line.points})
    room = sum((len(panel.x_text(x)) + 2) * DIGIT for x in measured) / (0.8 * WIDTH)
    ticks = measured[:: -math.ceil(room)]  # the largest always has one
    axes.set_xticks(ticks, [panel.x_text(x) for x in ticks])
    axes.xaxis.set_minor_locator(NullLocator())


def _y_axis(panel: Panel, axes: Any) -> None:
    values = [y for line in panel.lines for _, y in line.points] + [y for _, y in panel.references]
    low, high = min(values), max(values)
    if panel.y_scale == "log":
        first, last = math.floor(math.log2(low)), math.ceil(math.log2(high))
        ticks = [2.0**k for k in range(first, last + 1, math.ceil((last - first + 1) / 6))]
        axes.set_yscale("log", base=2)
    elif panel.y_scale == "errors":
        decades = range(max(1, math.ceil(math.log10(high))) if high > 1 else 0)
        ticks = [0, 0.5, 1, *(step * 10.0**k for k in decades for step in (2, 5, 10) if step * 10.0**k <= high)]
        axes.set_yscale("symlog", linthresh=1, linscale=1)
        axes.set_ylim(0, max(1.15, high * 1.1))
    else:
        ticks = []
        axes.yaxis.set_major_locator(_round_numbers())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: panel.y_text(value)))
        axes.margins(y=0.12 if panel.references or panel.categories else 0.06)
        if panel.y_scale == "zero":
            axes.set_ylim(bottom=0)
        if panel.top is not None and panel.top > low:
            axes.set_ylim(top=panel.top)
    if ticks:
        axes.set_yticks(ticks, [panel.y_text(tick) for tick in ticks])
        axes.yaxis.set_minor_locator(NullLocator())


def _inline(drawing: str, ident: str, label: str) -> str:
    """matplotlib's SVG file as an element of a page: no prolog, namespaces, fixed size or style of its own."""
    view_box = re.search(r'viewBox="([^"]+)"', drawing)
    assert view_box
    body = drawing[drawing.index(">", drawing.index("<svg")) + 1 :]
    body = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>", "", body, flags=re.DOTALL)
    body = re.sub(r"font(?:-\w+)?: [^;\"]*;? ?", "", body)
    body = re.sub(r'id="([^"]+)"', rf'id="{ident}-\1"', body)
    body = re.sub(r'(?:xlink:)?href="#([^"]+)"', rf'href="#{ident}-\1"', body)
    body = re.sub(r"url\(#([^)]+)\)", rf"url(#{ident}-\1)", body)
    for name, colour in _COLOURS.items():
        body = body.replace(colour, f"var(--{name})")
    return f'<svg class="plot" role="img" aria-label="{escaped(label)}" viewBox="{view_box[1]}">{body}'


def escaped(value: Any) -> str:
    """Any value as HTML text. Control characters, which HTML does not allow, are shown by their pictures."""
    pictures = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"} | {127: 0x2421}
    return html.escape(str(value).translate(pictures))


# Numbers for people.


def finite(value: Any) -> float | None:
    """The value when it is a finite number, else None."""
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def short(value: float) -> str:
    """Two decimals below 10, one below 1000, without trailing zeros."""
    text = f"{value:,.{2 if abs(value) < 10 else 1 if abs(value) < 1000 else 0}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def count(value: float) -> str:
    """1500000 -> 1.5 M."""
    for power, unit in ((12, "T"), (9, "B"), (6, "M")):
        if abs(value) >= 10**power:
            return f"{short(value / 10**power)} {unit}"
    return f"{short(value / 1000)} k" if abs(value) >= 10_000 else f"{value:,.0f}"


def size(value: float) -> str:
    """434110464 -> 414 MiB."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(value) >= 1024**power:
            return f"{short(value / 1024**power)} {unit}"
    return f"{short(value)} B"


def percent(value: float) -> str:
    """0.125 -> 12.5 %."""
    return f"{short(round(value * 100, 1))} %"


def whole(value: float) -> str:
    """16384 -> 16,384."""
    return f"{value:,.0f}"


def bits(value: float) -> str:
    """Three decimals: bits per byte."""
    return f"{value:.3f}"


def duration(seconds: float) -> str:
    """95.2 -> 1 min 35 s."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes:,} min {rest} s" if minutes else f"{short(seconds)} s"


def cell(value: Any, text: Callable[[float], str]) -> Cell:
    """A number as a table cell: for people, with the exact value behind it."""
    number = finite(value)
    if number is None:
        return UNMEASURED
    return text(number), f"{number:,}" if isinstance(number, int) else f"{number:.10g}"
