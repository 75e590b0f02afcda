"""Plans as text for a terminal, at most `WIDTH` columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from textwrap import wrap
from typing import Any

from palimpsest.plan import Plan
from palimpsest.plan.counts import checkpoint_bytes, parameters
from palimpsest.plan.memory import crossover_tokens, state_bytes
from palimpsest.plan.units import bytes_text, count_text, seconds_text, tokens_text

WIDTH = 100


def facts(plan: Plan) -> list[tuple[str, str]]:
    """What a plan answers, line by line: (question, answer)."""
    numbers, held, times, train = parameters(plan.config), plan.memory(), plan.times(), plan.training()
    work = {kind: sum(each.values()) for kind, each in plan.flops().items()}
    read = plan.batch * plan.context
    states, step, first = held["state_bytes"], times["decode_step_s"], times["first_token_s"]
    limit = held["largest_context"]
    rows = [
        ("parameters", f"{numbers['total']:,}"),
        ("  active for a token", f"{numbers['active']:,} (without head {count_text(numbers['active_without_head'])})"),
        (f"checkpoint, {plan.dtype}", f"{checkpoint_bytes(plan.config, plan.dtype):,} B"),
        (f"weights in memory, {plan.dtype}", bytes_text(held["weight_bytes"])),
        ("keys, values, latents", f"{held['kv_bytes_per_token']:,} B a token"),
        ("recurrent state", f"{held['recurrent_bytes_per_sequence']:,} B a sequence, whatever its length"),
        ("convolution", f"{held['conv_bytes_per_sequence']:,} B a sequence"),
        (f"memory of {plan.batch:,} x {tokens_text(plan.context)} tokens", bytes_text(states["total"])),
        ("on each device", f"{bytes_text(held['device_bytes'])}, {'fits' if held['fits'] else 'does not fit'}"),
        ("largest batch at this context", f"{held['largest_batch']:,}"),
        ("largest context at this batch", "any" if limit is None else tokens_text(limit)),
        (
            "operations a token",
            f"{count_text(work['prefill'] / read)} to read, {count_text(work['decode'] / plan.batch)} to write",
        ),
        ("  in training", count_text(work["training"] / read)),
        (
            "decode",
            f"{count_text(times['decode_tokens_per_s'])} tokens/s, {seconds_text(step['total'])} a step ({_shares(step)})",
        ),
        ("first token", f"{seconds_text(first['total'])} ({_shares(first)})"),
        ("training", f"{count_text(times['training_tokens_per_s'])} tokens/s"),
        ("  memory on each device", f"{bytes_text(train['peak'])} at its peak ({_training_shares(train)})"),
    ]
    crossings = [crossover_tokens(plan.config), crossover_tokens(plan.config, conv=True)]
    if crossings[0] is not None and crossings[1] is not None:
        text = f"{crossings[0]:,.0f} tokens; {crossings[1]:,.0f} with the convolution (bf16)"
        rows.append(("holds less than all-attention from", text))
    return rows


def _shares(parts: dict[str, float]) -> str:
    """The two kinds of work that take most."""
    kinds = sorted(((value, kind) for kind, value in parts.items() if kind != "total"), reverse=True)
    return ", ".join(f"{kind} {100 * value / parts['total']:.0f} %" for value, kind in kinds[:2])


def _training_shares(parts: dict[str, float]) -> str:
    names = ("weights", "optimizer", "activations")
    return ", ".join(f"{name} {bytes_text(parts[name])}" for name in names)


def heading(plan: Plan) -> str:
    where = f"{plan.num_devices} x {plan.device.name}" if plan.num_devices > 1 else plan.device.name
    return f"{plan.name} in {plan.dtype} on {where}: {plan.batch:,} sequences of {tokens_text(plan.context)} tokens"


def source(plan: Plan) -> str:
    """Where the times come from."""
    device = plan.device
    if device.measured is not None:
        return f"Times: rates measured in {device.source}."
    efficiencies = "60 % of the arithmetic and 80 % of the bandwidth"
    return f"Times: roofline at {efficiencies} of {device.source}; fused kernels assumed, not measured."


def render(plan: Plan) -> str:
    rows = [f"{name:<34} {value}" for name, value in facts(plan)]
    return "\n".join([heading(plan), "", *_fold(rows, 35), "", *wrap(source(plan), WIDTH)])


def _fold(rows: Sequence[str], indent: int) -> list[str]:
    return [part for row in rows for part in wrap(row, WIDTH, subsequent_indent=" " * indent, drop_whitespace=True)]


Column = tuple[str, Callable[[Plan], str]]
COLUMNS: list[Column] = [
    ("parameters", lambda p: count_text(parameters(p.config)["total"])),
    ("active", lambda p: count_text(parameters(p.config)["active"])),
    ("weights", lambda p: bytes_text(p.memory()["weight_bytes"])),
    ("memory", lambda p: bytes_text(p.memory()["state_bytes"]["total"])),
    ("batch", lambda p: f"{p.memory()['largest_batch']:,}"),
    ("decode/s", lambda p: count_text(p.times()["decode_tokens_per_s"])),
    ("first", lambda p: seconds_text(p.times()["first_token_s"]["total"])),
    ("train/s", lambda p: count_text(p.times()["training_tokens_per_s"])),
]


def compare(plans: Sequence[Plan]) -> str:
    """Models side by side, a row each; memory is that of the states, batch the largest that fits."""
    rows = [[p.name[:22], *(text(p) for _, text in COLUMNS)] for p in plans]
    return "\n".join(_columns([["model", *(name for name, _ in COLUMNS)], *rows]))


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return lines


def sweep_rows(plans: Sequence[Plan], contexts: Sequence[int]) -> list[dict[str, Any]]:
    """For every context and model: bytes of the states, seconds of a decode step and of the first token."""
    rows = []
    for context in contexts:
        for plan in plans:
            at = replace(plan, context=context)
            times = at.times()
            held = state_bytes(at.config, context, at.batch, at.dtype)["total"]
            row = {"context": context, "model": plan.name, "state_bytes": held}
            rows.append({**row, "decode_s": times["decode_step_s"]["total"], "first_token_s": times["first_token_s"]["total"]})
    return rows


def sweep(rows: Sequence[dict[str, Any]]) -> str:
    head = ["model", "context", "memory", "decode step", "first token"]
    cells = [
        [
            row["model"][:30],
            tokens_text(row["context"]),
            bytes_text(row["state_bytes"]),
            seconds_text(row["decode_s"]),
            seconds_text(row["first_token_s"]),
        ]
        for row in rows
    ]
    return "\n".join(_columns([head, *cells]))


def fit(plan: Plan, found: dict[str, Any]) -> str:
    limit = found["largest_context"]
    rows = [
        f"In {bytes_text(found['bytes'])} on each device, {plan.name} in {plan.dtype}:",
        f"largest batch at {tokens_text(plan.context)} tokens    {found['largest_batch']:,}",
        f"largest context at batch {plan.batch:,}    {'any' if limit is None else tokens_text(limit)}",
        f"largest preset at that batch and context    {found['largest_preset'] or 'none'}",
    ]
    return "\n".join(rows)


def claims(rows: Sequence[dict[str, Any]]) -> str:
    """Each claim in two lines: figures and verdict, then the reason."""
    lines = []
    for row in rows:
        lines += wrap(f"{row['claim']} ({row['source']})", WIDTH)
        figures = (
            f"ours {row['predicted']:,.5g}, published {row['published']:,.5g}, gap {100 * row['gap']:+.1f} %: {row['verdict']}"
        )
        lines += wrap(f"{figures}. {row['why']}.", WIDTH, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines)
