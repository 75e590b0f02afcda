"""What a run is said to take before it starts: memory as measured in a step, and a remedy when there is not enough."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import palimpsest as pal
from palimpsest import forecast
from palimpsest.cli import main
from palimpsest.train import Trainer
from tests.test_plan_training import allocated, peak_bytes

CPU = torch.device("cpu")


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["smollm2-tiny", "gated-deltanet-tiny", "kda-tiny", "kimi-k3-tiny"])
def test_the_peak_of_a_step_in_autocast(name: str, recompute: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = pal.Model(pal.ModelConfig.preset(name, hidden_size=128))
    model.recompute = recompute
    plain = pal.Model.loss

    def loss(self: pal.Model, *arguments: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return plain(self, *arguments)

    monkeypatch.setattr(pal.Model, "loss", loss)
    train = pal.TrainConfig(batch_size=8, context_length=256, precision="bf16", recompute=recompute)
    assert forecast.memory(model.config, train, CPU)["peak"] == pytest.approx(peak_bytes(model, 8, 256, "adamw", 1), rel=0.1)


def test_a_logged_step_of_few_tokens_is_mostly_weights() -> None:
    """The optimiser's moment is the height: weights twice, gradients, two moments; measured over a step that is logged."""
    model = pal.Model(pal.ModelConfig.preset("gpt2-tiny", hidden_size=512, head_dim=128, vocab_size=8192))
    train = pal.TrainConfig(steps=9, batch_size=1, context_length=8, log_every=1, warmup_steps=0)
    trainer = Trainer(model, train, np.arange(64) % 7)
    trainer.step()
    trainer.optimizer.zero_grad()
    held = [*model.parameters(), *trainer.optimizer.named_state().values()]
    peak = allocated(trainer.step, sum(x.numel() * x.element_size() for x in held))
    assert forecast.memory(model.config, train, CPU)["peak"] == pytest.approx(peak, rel=0.1)


def test_operations_are_those_of_the_whole_step() -> None:
    config, train = pal.ModelConfig.preset("gpt2-tiny"), pal.TrainConfig(batch_size=4, context_length=32)
    one = forecast.step_flops(config, train)
    assert forecast.step_flops(config, train.replace(accumulation=3)) == 3 * one
    assert forecast.step_flops(config, train.replace(recompute=True)) == one
    # 6 operations a parameter and token that a map has, the head's last position and scores apart.
    maps = sum(p.numel() for n, p in pal.Model(config).named_parameters() if n.endswith("proj.weight") and p.dim() == 2)
    assert one > 6 * maps * 4 * 32


def test_a_dry_run_tells_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("To be, or not to be.\n" * 100)
    argv = ["train", "--preset", "kimi-k3-tiny", "--text", str(tmp_path / "text.txt"), "--optimizer", "muon", "--steps", "10"]
    argv += ["--batch-size", "4", "--context-length", "64", "--warmup-steps", "2", "--accumulation", "2", "--dry-run"]
    assert main([*argv, "--out", str(tmp_path / "out"), "--json", str(tmp_path / "facts.json")]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["facts.json", "text.txt"]
    facts, shown = json.loads((tmp_path / "facts.json").read_text()), capsys.readouterr().out
    model = pal.Model(pal.ModelConfig.preset("kimi-k3-tiny", vocab_size=257))
    assert facts["parameters"] == model.num_parameters() and f"{model.num_parameters():,}" in shown
    tokens = facts["tokens"]
    assert (tokens["train"] + tokens["validation"], tokens["per_step"], tokens["in_all"]) == (2101, 512, 5120)
    assert tokens["repeats"] == pytest.approx(5120 / tokens["train"])
    assert [mark["step"] for mark in facts["schedule"]] == [1, 2, 5, 7, 10]
    assert facts["schedule"][1]["lr"] == 1e-3 and facts["schedule"][-1]["lr"] == pytest.approx(1e-4)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert sum(group["parameters"] for group in facts["groups"]) == trained
    assert [(group["name"], group["optimizer"]) for group in facts["groups"]] == [
        *[("muon", "muon"), ("matrices", "adamw"), ("others", "adamw")]
    ]
    assert facts["estimate"]["memory_bytes"]["peak"] > 4 * 3 * trained
    assert main(argv) == 0  # no --out is needed


def test_out_of_memory_says_what_to_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def step(self: Trainer) -> float:
        return float(torch.empty(1 << 55)[0])  # what the system's allocator refuses

    monkeypatch.setattr(Trainer, "step", step)
    (tmp_path / "text.txt").write_text("To be, or not to be.\n" * 100)
    argv = ["train", "--preset", "gpt2-tiny", "--text", str(tmp_path / "text.txt"), "--out", str(tmp_path / "out")]
    assert main([*argv, "--batch-size", "8", "--context-length", "128"]) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("palimpsest: ")]
    remedies = ("recompute = true", "batch_size = 4 with accumulation = 2", "context_length = 64")
    for word in ("out of memory", "our estimate", *remedies):
        assert word in line
    train = pal.TrainConfig(batch_size=1, context_length=2, recompute=True)
    assert "choose a smaller model" in forecast.advice(pal.ModelConfig.preset("gpt2-tiny"), train, CPU)


def test_advice_is_ordered_and_each_remedy_helps() -> None:
    config, train = pal.ModelConfig.preset("kda-tiny"), pal.TrainConfig(batch_size=8, context_length=256)
    text = forecast.advice(config, train, CPU)
    assert text.index("recompute") < text.index("batch_size")
    now = forecast.memory(config, train, CPU)["peak"]
    for change in ({"recompute": True}, {"batch_size": 4, "accumulation": 2}, {"context_length": 128}):
        assert forecast.memory(config, train.replace(**change), CPU)["peak"] < now


def test_the_share_of_the_peak_is_logged(tmp_path: Path) -> None:
    peak, source = forecast.peak_flops(CPU, "fp32")
    assert peak > 1e8 and "measured" in source
    (tmp_path / "text.txt").write_text("To be, or not to be.\n" * 100)
    argv = ["train", "--preset", "gpt2-tiny", "--text", str(tmp_path / "text.txt"), "--out", str(tmp_path / "out")]
    assert main([*argv, "--steps", "3", "--batch-size", "2", "--context-length", "32", "--log-every", "1"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert all(0 < row["mfu"] < 2 for row in rows if "mfu" in row) and "mfu" in rows[0]
