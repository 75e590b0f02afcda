"""The speed tables: every row has times and a line for the terminal, with and without peers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from palimpsest import ops, peers
from palimpsest.cli import main
from tests.conftest import relative


def test_runs_follow_one_another_and_the_first_does_not_count() -> None:
    order: list[str] = []
    times = peers.medians({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, repeats=3)
    assert order == ["a"] * 4 + ["b"] * 4
    assert all(row["least"] <= row["ms"] <= row["most"] for row in times.values())


def test_the_skeleton_is_a_delta_rule() -> None:
    """It does the delta rule's work: on one chunk's worth of keys it gives its numbers, but for the scale."""
    x = peers.inputs(128, 16, heads=2)
    o = peers.skeleton(x["q"], x["k"], x["v"], x["beta"], chunk=32).transpose(1, 2).reshape(1, 128, 2, 16)
    expected, _ = ops.delta_rule(x["q"], x["k"], x["v"], x["beta"], scale=1.0)
    assert relative(o, expected) < 1e-4


def test_the_command_writes_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def few(has_transformers: bool) -> list[peers.Row]:
        assert not has_transformers
        times = peers.medians({"kda": lambda: torch.ones(3).sum()}, repeats=3)
        return [{"work": "something", "times": times, "figures": {"us": 1.0}}]

    for name in ("forward", "backward", "step", "packed", "long_sequence", "decode", "training"):
        monkeypatch.setattr(peers, name, few)
    out = tmp_path / "cpu.json"
    assert main(["benchmark", "cpu", "--out", str(out)]) == 0
    held = json.loads(out.read_text())
    assert len(held["rows"]) == 7 and held["machine"]["processor"] and "benchmark" in held["command"] or held["command"]
    assert main(["benchmark", "cpu", "--out", str(tmp_path / "no" / "cpu.json")]) == 2
