"""The report on training runs: metrics.jsonl is the truth, several runs lie over one another, and a damaged one is named."""

from __future__ import annotations

import copy
import itertools
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import palimpsest as pal
from palimpsest import run_report
from palimpsest.cli import main
from palimpsest.data import Batches
from palimpsest.run_report import MOST_POINTS, thinned
from palimpsest.train import Trainer

TOKENS = np.random.default_rng(0).integers(0, 256, 2000)


def train(folder: Path, **fields: Any) -> Trainer:
    torch.manual_seed(0)
    tiny = {"steps": 4, "batch_size": 2, "context_length": 16, "log_every": 1, "eval_every": 2, "eval_tokens": 64}
    config = pal.TrainConfig.from_dict({**tiny, "warmup_steps": 1, "checkpoint_every": 0, **fields})
    model = pal.Model(pal.ModelConfig.preset("kimi-linear-tiny", num_hidden_layers=4, hidden_size=32))
    trainer = Trainer(model, config, TOKENS[:1600], TOKENS[1600:], folder=folder)
    trainer.run()
    return trainer


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    place = tmp_path_factory.mktemp("runs")
    for name, fields in (("a/adamw", {}), ("b/muon", {"optimizer": "muon", "learning_rate": 2e-3})):
        train(place / name, **fields)
    return [place / "a" / "adamw", place / "b" / "muon"]


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_groups_are_recorded_before_clipping_and_add_up(runs: list[Path]) -> None:
    for folder in runs:
        rows = [row for row in records(folder) if "loss" in row]
        assert len(rows) == 4
        for row in rows:
            squares = sum(group["grad_norm"] ** 2 for group in row["groups"].values())
            assert math.sqrt(squares) == pytest.approx(row["grad_norm"], rel=1e-5) and row["grad_norm"] > 1.0


def test_update_ratios_are_those_of_the_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = pal.Model(pal.ModelConfig.preset("gpt2-tiny", num_hidden_layers=1))
    config = pal.TrainConfig(steps=1, batch_size=2, context_length=16, warmup_steps=0, checkpoint_every=0)
    trainer = Trainer(model, config, TOKENS)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer.step()
    for group in trainer.optimizer.param_groups:
        names = group["param_names"]
        now = {name: p.detach() for name, p in model.named_parameters()}
        moved = math.sqrt(sum(float((now[n] - before[n]).square().sum()) for n in names))
        held = math.sqrt(sum(float(before[n].square().sum()) for n in names))
        assert trainer.groups[group["name"]]["update_ratio"] == pytest.approx(moved / held, rel=1e-4)


def test_the_residual_stream_is_what_the_sublayers_read(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = pal.Model(pal.ModelConfig.preset("kimi-k3-tiny", num_hidden_layers=2))
    config = pal.TrainConfig(steps=1, batch_size=2, context_length=16, warmup_steps=0, recompute=True)
    trainer = Trainer(model, config, TOKENS)
    ids = next(Batches(TOKENS, 2, 16, config.seed))
    first = model.embed_tokens(ids).square().mean().sqrt().item()
    trainer.step()
    assert len(trainer.residual_rms) == 2 * 2 + 1 and trainer.residual_rms[0] == pytest.approx(first, rel=1e-5)
    assert not any(norm._forward_pre_hooks for norm in trainer.watch.norms)


@pytest.mark.parametrize("preset", ["kda-tiny", "gated-deltanet-tiny", "kimi-k3-tiny", "deltanet-tiny", "gpt2-tiny"])
def test_gates_are_counted_as_the_layers_use_them(preset: str) -> None:
    """Shares of write strengths and half-lives, against the operation's own inputs taken to its token-by-token form."""
    torch.manual_seed(0)
    model = pal.Model(pal.ModelConfig.preset(preset, num_hidden_layers=2, initializer_range=0.5))
    config = pal.TrainConfig(steps=1, batch_size=2, context_length=16, warmup_steps=0, recompute=preset == "kda-tiny")
    trainer = Trainer(model, config, TOKENS)
    inputs: dict[int, torch.Tensor] = {}

    def keep(layer: int, mixer: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        inputs[layer] = given[0].detach()

    for layer, block in enumerate(model.layers):
        block.get_submodule("mixer").register_forward_pre_hook(partial(keep, layer))
    before = copy.deepcopy(model)
    trainer.step()
    assert [gate["layer"] for gate in trainer.gates] == ([] if preset == "gpt2-tiny" else [0, 1])
    for gate in trainer.gates:
        mixer: Any = before.layers[gate["layer"]].get_submodule("mixer")
        x = inputs[gate["layer"]]
        beta = torch.sigmoid(x @ mixer.b_proj.weight.T).flatten().tolist()
        expected = [sum(place / 10 <= value < (place + 1) / 10 for value in beta) / len(beta) for place in range(10)]
        assert gate["beta"] == pytest.approx(expected, abs=2 / len(beta)) and max(gate["beta"]) < 1
        if preset == "deltanet-tiny":
            assert "half_life" not in gate
            continue
        rate = mixer.A_log.exp().view(-1, 1)
        if "gated" in preset:
            z = (x @ mixer.a_proj.weight.T + mixer.dt_bias).unsqueeze(-1)
        else:
            z = (x @ mixer.f_a_proj.weight.T @ mixer.f_b_proj.weight.T + mixer.dt_bias).unflatten(-1, (len(rate), -1))
        g = -5 * torch.sigmoid(rate * z) if preset == "kimi-k3-tiny" else -rate * torch.nn.functional.softplus(z)
        kept = torch.exp(g).flatten().double()  # 0.5 after one half-life
        edges = [0.0, *(0.5 ** (1 / 2**power) for power in range(13)), 1.1]
        expected = [float(((low <= kept) & (kept < high)).double().mean()) for low, high in itertools.pairwise(edges)]
        assert gate["half_life"] == pytest.approx(expected, abs=2 / len(kept)) and sum(gate["half_life"]) == pytest.approx(1)
    assert not any(block.get_submodule("mixer_norm")._forward_hooks for block in model.layers)


def test_loads_are_by_layer_and_fair_on_average(runs: list[Path]) -> None:
    for row in records(runs[0]):
        if "loss" not in row:
            continue
        assert len(row["moe_load"]) == 3  # the first layer is dense
        assert max(loads[-1] for loads in row["moe_load"]) == pytest.approx(1 + row["moe_max_violation"])
        assert all(low <= middle <= high and low <= 1 <= high for low, middle, high in row["moe_load"])


def test_the_page_shows_every_run_in_every_plot(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.html"
    assert main(["report", *map(str, runs), "--out", str(out), "--json", str(tmp_path / "facts.json")]) == 0
    page = out.read_text()
    assert "adamw: step 4, validation" in capsys.readouterr().out
    idents = [plot.ident for plot in run_report.all_plots(run_report.read(runs))]
    over_time = ["loss", "rate", "gradients", "updates", "experts", "speed", "memory"]
    assert idents == [*over_time, "loads", "depth", "beta", "half_life"]
    for ident in idents:
        section = page.split(f'<section id="{ident}">')[1].split("</section>")[0]
        assert section.count("<svg") >= 1 and "adamw" in section and "muon" in section
    assert "train.optimizer was &#x27;adamw&#x27;, is &#x27;muon&#x27;" in page
    assert "http" not in page.replace("http-equiv", "") and "<script" not in page
    facts = json.loads((tmp_path / "facts.json").read_text())["runs"]
    last = [row for row in records(runs[1]) if "val_nats_per_token" in row][-1]
    assert facts[1]["val_nats_per_token"] == last["val_nats_per_token"] and facts[1]["name"] == "muon"


def test_names_tell_runs_apart(runs: list[Path], tmp_path: Path) -> None:
    for place in ("x", "y"):
        (tmp_path / place / "run").mkdir(parents=True)
        (tmp_path / place / "run" / "metrics.jsonl").write_text((runs[0] / "metrics.jsonl").read_text())
    found = run_report.read([tmp_path / "x" / "run", tmp_path / "y" / "run"])
    assert [run.name for run in found] == ["x/run", "y/run"]


def test_many_points_become_means_of_equal_pieces() -> None:
    points = [(float(x), float(x % 2)) for x in range(10_001)]
    drawn = thinned(points)
    assert len(drawn) <= MOST_POINTS and drawn[-1] == points[-1]
    assert all(0.4 < y < 0.6 for _, y in drawn[:-1]) and drawn == sorted(drawn)
    assert thinned(points[:50]) == points[:50]


def test_what_cannot_be_shown_is_one_line(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in (("broken", '{"step": 1}\nnot json\n{"step": 2, "tokens": 3}\n'), ("empty", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(text)
    out = tmp_path / "report.html"
    for folders, line in (
        ([tmp_path / "nowhere"], "nowhere/metrics.jsonl: there is no such file"),
        ([tmp_path / "broken"], "metrics.jsonl, line 1: not a record"),
        ([tmp_path / "empty"], "no step is recorded"),
        ([runs[0], runs[0]], "given twice"),
        ([tmp_path / str(n) for n in range(9)], "9 runs were given"),
    ):
        assert main(["report", *map(str, folders), "--out", str(out)]) == 2
        assert line in capsys.readouterr().err and not out.exists()
    (tmp_path / "half").mkdir()
    for end in (b'{"step": 5, "tok', b'{"step": "\xc3', 9999 * b"["):  # as a killed run leaves it
        (tmp_path / "half" / "metrics.jsonl").write_bytes((runs[0] / "metrics.jsonl").read_bytes() + end)
        assert run_report.read([tmp_path / "half"])[0].last("step") == 4
