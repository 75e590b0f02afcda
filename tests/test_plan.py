"""Plans: counts and bytes are those of built models and live states, and the command answers or refuses in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import palimpsest as pal
from palimpsest.cli import main
from tests.conftest import TINY, make_ids, make_model, published


@pytest.mark.parametrize("preset", [*TINY, "kimi-linear-48b", "kimi-k3", "gpt2-124m"])
def test_parameters_are_those_of_the_built_model(preset: str) -> None:
    plan = pal.plan(preset, context=512)
    numbers = plan.as_dict()["parameters"]
    model = published(preset)
    assert numbers["total"] == model.num_parameters() and numbers["active"] == model.num_parameters(active=True)


def test_checkpoint_bytes_of_k3() -> None:
    assert pal.plan("kimi-k3").as_dict()["parameters"]["total"] == 2_779_484_476_000


@pytest.mark.parametrize("preset", TINY)
@pytest.mark.parametrize(("batch", "tokens"), [(1, 7), (3, 40)])
def test_state_bytes_are_those_of_the_live_state(preset: str, batch: int, tokens: int) -> None:
    model = make_model(preset)
    with torch.no_grad():
        state = model(make_ids(model, batch, tokens)).state
    held = pal.plan(preset, context=tokens, batch=batch, dtype="f32").as_dict()["memory"]["state_bytes"]
    for kind in ("kv", "recurrent", "conv"):
        assert held[kind] == state.num_bytes(kind), kind
    assert held["total"] == state.num_bytes()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, page = tmp_path / "plan.json", tmp_path / "plan.html"
    argv = ["plan", "kimi-k3", "--context", "1M", "--batch", "64", "--device", "h200", "--devices", "64"]
    assert main([*argv, "--json", str(out), "--html", str(page)]) == 0
    shown = capsys.readouterr().out
    assert "2,779,484,476,000" in shown and "27,648 B a token" in shown and "1,560,860,324,864" in shown
    assert max(len(line) for line in shown.splitlines()) <= 100
    assert json.loads(out.read_text()) and "<svg" in page.read_text(encoding="utf-8")


NONSENSE = [["kimi-k4"], ["kimi-k3", "--context", "many"], ["kimi-k3", "--batch", "0"], ["kimi-k3", "--device", "abacus"]]


@pytest.mark.parametrize("argv", [*NONSENSE, ["no.json"]])
def test_nonsense_is_refused_in_one_line(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *argv]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
