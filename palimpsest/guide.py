"""The experiments and pictures of docs/lineage.md: what each memory of the lineage keeps, without training.

`measure` gives rows of numbers, which `palimpsest benchmark memory` records in benchmarks/memory.json; `draw` makes the
pictures from such rows. Everything is arithmetic: the same on every machine up to rounding.

    load        n pairs are written once each, then every key is read: the error over the size of the values
    overwrite   one of 16 keys gets a second value: the error against the new and against the old value
    ghost       64 pairs are written, then n tokens that write nothing: what a key that was never written reads
    needle      one pair, then n others whose keys share none of its channels: the errors of the first and of the last pair
    carried     bytes from token to token: what is fixed, what every token adds
    break-even  the context from which a hybrid of the same shape carries less than a model of exact layers only
    parameters  of a model: all, those that one token uses, one routed expert as it is and at the model's full width
    sources     what each sublayer of Kimi K3 can read over depth, by blocks and with every output apart
"""

from __future__ import annotations

import importlib.resources
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from palimpsest import ops, plots
from palimpsest.config import ModelConfig
from palimpsest.evaluate import readout
from palimpsest.model import Model
from palimpsest.plots import Line, Panel, escaped, short, size, whole
from palimpsest.report import write_page
from palimpsest.residuals import start

KEY_DIM = 64
PAIRS = [1, 2, 4, 8, 16, 32, 48, 64, 96, 128]
LATER = [0, 8, 16, 32, 64, 128, 256]  # tokens behind what is to be kept or forgotten
TRIALS = 8
SHARPNESS = 32.0  # of softmax: a matching key's logit, against about 0 for another's
DECAY = -0.05  # log decay a token; per channel: 0 in half of the channels and twice this in the others
CARRIED = [
    "gpt2-124m",
    "linear-attention-124m",
    "deltanet-124m",
    "gated-deltanet-124m",
    "kda-124m",
    "kimi-linear-48b",
    "kimi-k3",
]
CONTEXTS = [1024, 16_384, 131_072, 1_048_576]
NAMES = {"softmax": "softmax", "additive": "additive", "delta": "delta", "gated": "gated delta", "per_channel": "per channel"}

Row = dict[str, Any]


def measure(seed: int = 0) -> list[Row]:
    """All rows; each has its `experiment` and what tells it from the others. Half a minute."""
    return [*_load(seed), *_ghost(seed), *_needle(seed), *_carried(), *_break_even(), *_parameters(), *_sources()]


def _load(seed: int) -> list[Row]:
    found = readout(PAIRS, KEY_DIM, KEY_DIM, trials=TRIALS, seed=seed)
    rows: list[Row] = []
    for keys in ("random", "correlated"):
        for row in found[keys]:
            for memory in ("additive", "delta", "gated", "per_channel"):
                rows.append({"experiment": "load", "memory": memory, "keys": keys, "pairs": row["pairs"], "error": row[memory]})
    for pairs in PAIRS:
        k, v = _unit(seed, TRIALS, pairs), _values(seed, TRIALS, pairs)
        read = torch.einsum("bst,btv->bsv", (SHARPNESS * k @ k.mT).softmax(-1), v)
        error = _error(read, v)
        rows.append({"experiment": "load", "memory": "softmax", "keys": "random", "pairs": pairs, "error": error})
    for row in found["overwrite"]:
        rows.append({"experiment": "overwrite", **row})
    return rows


def _unit(seed: int, *shape: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(*shape, KEY_DIM, generator=draw, dtype=torch.float64), dim=-1)


def _values(seed: int, *shape: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed + 1)
    return torch.randn(*shape, KEY_DIM, generator=draw, dtype=torch.float64)


def _error(read: Tensor, value: Tensor) -> float:
    return float((read - value).norm() / value.norm())


def _state(memory: str, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """The matrix [B,K,V] of a memory that was given k, v [B,T,K], beta [B,T] in order."""
    k, v, beta = k.unsqueeze(2), v.unsqueeze(2), beta.unsqueeze(2)
    decay = torch.full_like(beta, DECAY)
    channels = torch.zeros(KEY_DIM, dtype=k.dtype)
    channels[KEY_DIM // 2 :] = 2 * DECAY
    if memory == "additive":
        _, state = ops.linear_attention(k, k, v * beta.unsqueeze(-1))
    elif memory == "delta":
        _, state = ops.delta_rule(k, k, v, beta)
    elif memory == "gated":
        _, state = ops.gated_delta_rule(k, k, v, decay, beta)
    else:
        _, state = ops.kda(k, k, v, channels.expand_as(k), beta)
    return state[:, 0]


MATRICES = ("additive", "delta", "gated", "per_channel")


def _ghost(seed: int) -> list[Row]:
    rows: list[Row] = []
    old = 64
    k, v = _unit(seed, TRIALS, old + LATER[-1]), _values(seed, TRIALS, old + LATER[-1])
    fresh = _unit(seed + 2, TRIALS, old)
    beta = torch.ones(TRIALS, old + LATER[-1], dtype=torch.float64)
    beta[:, old:] = 0
    for later in LATER:
        for memory in MATRICES:
            read = fresh @ _state(memory, *(x[:, : old + later] for x in (k, v, beta)))
            ghost = float(read.norm() / v[:, :old].norm())
            rows.append({"experiment": "ghost", "memory": memory, "later": later, "read": ghost})
    return rows


def _needle(seed: int) -> list[Row]:
    rows: list[Row] = []
    half = KEY_DIM // 2
    every_k, every_v = _unit(seed, TRIALS, 1 + LATER[-1]), _values(seed, TRIALS, 1 + LATER[-1])
    every_k[:, 0, half:], every_k[:, 1:, :half] = 0, 0
    every_k = F.normalize(every_k, dim=-1)
    for later in LATER:
        k, v = every_k[:, : 1 + later], every_v[:, : 1 + later]
        for memory in MATRICES:
            state = _state(memory, k, v, torch.ones(TRIALS, 1 + later, dtype=torch.float64))
            read = k @ state
            rows.append(
                {
                    "experiment": "needle",
                    "memory": memory,
                    "later": later,
                    "needle_error": _error(read[:, 0], v[:, 0]),
                    "last_error": _error(read[:, -1], v[:, -1]),
                    "noise_held": float(state[:, half:].norm() / v[:, 0].norm()),
                }
            )
    return rows


def _carried() -> list[Row]:
    """In bfloat16; recurrent matrices are float32 always."""
    rows: list[Row] = []
    for preset in CARRIED:
        fixed, each = _bytes(ModelConfig.preset(preset))
        for context in CONTEXTS:
            total = fixed + each * context
            row = {"experiment": "carried", "preset": preset, "context": context, "bytes": total}
            rows.append({**row, "fixed_bytes": fixed, "bytes_per_token": each})
    return rows


def _bytes(config: ModelConfig) -> tuple[int, int]:
    """What one sequence carries before its first token, and what each token adds."""
    with torch.device("meta"):
        state = Model(config).to(torch.bfloat16).new_state(1)
    return state.num_bytes(), state.bytes_per_token()


def _break_even() -> list[Row]:
    rows: list[Row] = []
    for preset in ("kimi-linear-48b", "kimi-k3"):
        config = ModelConfig.preset(preset)
        fixed, each = _bytes(config)
        plain = {"linear_output_gate": "none", "linear_output_gate_rank": None, "gate_lower_bound": None}
        _, exact = _bytes(config.replace(mixers=("mla",) * config.num_hidden_layers, **plain))
        tokens = math.ceil(fixed / (exact - each))
        rows.append(
            {
                "experiment": "break-even",
                "preset": preset,
                "tokens": tokens,
                "bytes_per_token": each,
                "exact_bytes_per_token": exact,
                "saved_per_token": 1 - each / exact,
                "exact_layers": sum(kind == "mla" for kind in config.mixers),
                "layers": config.num_hidden_layers,
            }
        )
    return rows


def _parameters() -> list[Row]:
    rows: list[Row] = []
    for preset in ("gpt2-124m", "kimi-linear-48b", "kimi-k3"):
        config = ModelConfig.preset(preset)
        with torch.device("meta"):
            model = Model(config)
        row = {"experiment": "parameters", "preset": preset, "parameters": model.num_parameters()}
        row |= {"active": model.num_parameters(active=True), "experts": 0, "chosen": 0, "expert": 0, "expert_at_full_width": 0}
        if "moe" in config.mlps:
            width = config.routed_expert_hidden_size or config.hidden_size
            inner = 3 * config.moe_intermediate_size
            row |= {"experts": config.num_experts, "chosen": config.num_experts_per_token}
            row |= {"expert": inner * width, "expert_at_full_width": inner * config.hidden_size}
        rows.append(row)
    return rows


def _sources() -> list[Row]:
    """Counted on the residual streams themselves, with one number in place of every vector."""
    config = ModelConfig.preset("kimi-k3")
    token = torch.zeros(1)
    streams = [start(config.replace(residual=kind), token) for kind in ("block_attention", "full_attention")]
    rows: list[Row] = []
    for sublayer in range(2 * config.num_hidden_layers + 1):
        by_block, apart = (len(stream.sources()) for stream in streams)
        rows.append({"experiment": "sources", "preset": "kimi-k3", "sublayer": sublayer, "blocks": by_block, "all": apart})
        for stream in streams:
            if sublayer % 2 == 0:
                stream.seal(sublayer // 2)
            stream.write(token)
    return rows


# Pictures.


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Writes one picture a chapter into a folder that exists: SVG files that follow the reader's light or dark theme."""
    written = []
    for name, label, *panels in _pictures(rows):
        path = folder / f"{name}.svg"
        write_page(standalone(name, label, panels), path)
        written.append(path)
    return written


def _pictures(rows: Sequence[Row]) -> list[tuple[Any, ...]]:
    """(file name, what it shows, panels ...), one a chapter."""

    def lines(x: str, y: str, key: str, names: dict[str, str], **only: Any) -> list[Line]:
        found = []
        for style, (value, name) in enumerate(names.items()):
            own = [r for r in rows if r.get(key) == value and all(r.get(k) == v for k, v in only.items())]
            found.append(Line(name, style, [(float(r[x]), float(r[y])) for r in own]))
        return [line for line in found if line.points]

    pairs, error = "pairs written (number)", "error of what is read"
    later = "tokens later (number)"
    context, carried = "tokens of context (number)", "carried from token to token"
    matrices = {name: NAMES[name] for name in MATRICES}
    rule = {name: NAMES[name] for name in ("additive", "delta")}
    text, held = (whole, short), (whole, size)
    gpt2 = {"gpt2-124m": "GPT-2", "kda-124m": "KDA, same width and depth"}
    large = {"kimi-linear-48b": "Kimi Linear", "kimi-k3": "Kimi K3"}
    sources = [
        Line(name, style, [(float(r["sublayer"]), float(r[key])) for r in rows if r["experiment"] == "sources"])
        for style, (key, name) in enumerate({"blocks": "sums of blocks (Kimi K3)", "all": "every output apart"}.items())
    ]
    load = {"experiment": "load", "keys": "random"}
    every = lines("pairs", "error", "memory", {name: NAMES[name] for name in ("softmax", "additive")}, **load)
    related = lines("pairs", "error", "memory", rule, experiment="load", keys="correlated")
    ghost = lines("later", "read", "memory", {name: NAMES[name] for name in ("delta", "gated")}, experiment="ghost")
    needle, noise = (lines("later", y, "memory", matrices, experiment="needle") for y in ("needle_error", "noise_held"))
    growth = [lines("context", "bytes", "preset", which, experiment="carried") for which in (gpt2, large)]
    return [
        ("softmax", "bytes carried against context", Panel(context, carried, growth[0], *held, True, "log")),
        ("linear-attention", "error against pairs written", Panel(pairs, error, every, *text, False, "zero")),
        ("deltanet", "error against pairs with correlated keys", Panel(pairs, error, related, *text, False, "errors")),
        (
            "gated-deltanet",
            "what an unwritten key reads, later",
            Panel(later, "read by a new key", ghost, *text, False, "zero"),
        ),
        (
            "kda",
            "error of the first pair, and what is held of the others",
            Panel(later, "error of the first pair", needle, *text, False, "zero"),
            Panel(later, "held of the later pairs (sizes of a value)", noise, *text, False, "zero"),
        ),
        ("kimi-linear", "bytes carried against context", Panel(context, carried, growth[1], *held, True, "log")),
        ("kimi-k3", "sources by sublayer", Panel("sublayer (number)", "sources it can read", sources, *text, False, "zero")),
    ]


def standalone(ident: str, label: str, panels: Sequence[Panel]) -> str:
    """Panels over the same series, with their legend, as an SVG file of its own."""
    panels = [plots.drawable(panel) for panel in panels]
    inner = plots.svg(ident, label, panels).replace(
        'class="plot"', f'width="{plots.WIDTH}" height="{plots.HEIGHT * len(panels)}"', 1
    )
    style = (importlib.resources.files("palimpsest") / "report.css").read_text(encoding="utf-8")
    colours = style[style.index(":root") : style.index("* {")]
    top = plots.HEIGHT * len(panels)
    legend = []
    for i, line in enumerate(panels[0].lines):
        y = top + 8 + 26 * i
        sample = plots.sample(line.style).replace('class="sample"', f'x="24" y="{y}" width="48" height="18"')
        legend.append(f'{sample}<text x="84" y="{y + 14}" fill="var(--ink)">{escaped(line.name)}</text>')
    height = top + 26 * len(legend) + 16
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {plots.WIDTH} {height}" width="{plots.WIDTH}" height="{height}">'
        f"<style>\n{colours}text {{ font: 16px system-ui, sans-serif; }}\n</style>"
        f'<rect width="100%" height="100%" fill="var(--paper)"/>{inner}{"".join(legend)}</svg>\n'
    )
