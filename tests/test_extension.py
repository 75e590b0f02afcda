"""A run with more steps than before is the run of so many steps, where the schedule allows it, and is refused where not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import palimpsest as pal
from palimpsest import checkpoint
from palimpsest.cli import main
from palimpsest.config import TrainConfig
from palimpsest.optim import learning_rate, shared_steps
from palimpsest.train import Trainer

TOKENS = np.random.default_rng(0).integers(0, 256, 1500)


def trainer(folder: Path, schedule: str, steps: int, **fields: Any) -> Trainer:
    torch.manual_seed(0)
    model = pal.Model(pal.ModelConfig.preset("kimi-linear-tiny", num_hidden_layers=4, hidden_size=16))
    small = {"batch_size": 2, "context_length": 16, "warmup_steps": 2, "decay_share": 0.3, "log_every": 1, "eval_tokens": 64}
    config = TrainConfig.from_dict({**small, "schedule": schedule, "steps": steps, "checkpoint_every": 0, **fields})
    return Trainer(model, config, TOKENS[:1200], TOKENS[1200:], folder=folder)


def losses(folder: Path) -> dict[int, float]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("schedule", "begins"), [("constant", 10), ("wsd", 7)])
def test_a_finished_run_made_longer_is_the_long_run(schedule: str, begins: int, tmp_path: Path) -> None:
    trainer(tmp_path / "run", schedule, 10).run()
    assert set(losses(tmp_path / "run")) == {*range(1, 11)}
    longer, whole = trainer(tmp_path / "run", schedule, 20), trainer(tmp_path / "whole", schedule, 20)
    assert longer.resume() == begins
    # What came after it was of another run.
    assert checkpoint.step_of(checkpoint.checkpoints(tmp_path / "run")[-1]) == begins == max(losses(tmp_path / "run"))
    longer.run()
    whole.run()
    assert losses(tmp_path / "run") == losses(tmp_path / "whole") and len(losses(tmp_path / "run")) == 20
    for name, parameter in whole.model.named_parameters():
        assert torch.equal(parameter, longer.model.get_parameter(name)), name
    assert json.loads((tmp_path / "run" / "run.json").read_text()) == json.loads((tmp_path / "whole" / "run.json").read_text())
    assert trainer(tmp_path / "run", schedule, 20).resume() == 20


def test_wsd_keeps_the_checkpoint_that_a_longer_run_sets_out_from(tmp_path: Path) -> None:
    run = trainer(tmp_path / "run", "wsd", 12, checkpoint_every=1, keep_checkpoints=1)
    run.run()
    kept = [checkpoint.step_of(path) for path in checkpoint.checkpoints(tmp_path / "run")]
    assert kept == [run.branch, 12]
    rates = [learning_rate(step, run.config) for step in range(12)]
    assert run.branch == 8 and rates[run.branch - 1] == max(rates) > rates[run.branch]
    constant = trainer(tmp_path / "other", "constant", 3, checkpoint_every=1, keep_checkpoints=1)
    constant.run()
    assert [checkpoint.step_of(path) for path in checkpoint.checkpoints(tmp_path / "other")] == [3]


def test_another_number_of_steps_is_refused_where_the_rates_would_differ(tmp_path: Path) -> None:
    trainer(tmp_path / "cosine", "cosine", 6).run()
    trainer(tmp_path / "wsd", "wsd", 6).run()
    branch = checkpoint.checkpoints(tmp_path / "wsd")[0]
    branch.rename(tmp_path / "moved")
    for name, alike in (("cosine", 2), ("wsd", 4)):
        before = content(tmp_path / name)
        line = f"steps was 6, is 9; with schedule '{name}' .* after step {alike}, and no checkpoint"
        with pytest.raises(pal.InputError, match=line):
            trainer(tmp_path / name, name, 9).resume()
        assert content(tmp_path / name) == before
    with pytest.raises(pal.InputError, match="train.seed was 0, is 1"):
        trainer(tmp_path / "wsd", "wsd", 9, seed=1).resume()


def test_a_run_may_also_be_made_shorter(tmp_path: Path) -> None:
    trainer(tmp_path / "run", "constant", 8, checkpoint_every=2, keep_checkpoints=9).run()
    shorter = trainer(tmp_path / "run", "constant", 5)
    assert shorter.resume() == 4
    shorter.run()
    assert set(losses(tmp_path / "run")) == {1, 2, 3, 4, 5}


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_shared_steps_are_those_with_equal_rates(schedule: Any) -> None:
    for steps in range(1, 30):
        for more in (steps + 1, 2 * steps, 5 * steps):
            first, second = (TrainConfig(steps=n, warmup_steps=3, schedule=schedule, decay_share=0.25) for n in (steps, more))
            count = shared_steps(first, second)
            assert all(learning_rate(s, first) == learning_rate(s, second) for s in range(count))
            assert count == steps or learning_rate(count, first) != learning_rate(count, second)
            assert schedule != "constant" or count == steps


def test_the_command_makes_a_run_longer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("To be, or not to be: that is the question.\n" * 50)
    model = '[model]\npreset = "kda-tiny"\nhidden_size = 16\n[data]\ntext = "text.txt"\n[lora]\nrank = 2\n'
    train = '[train]\nsteps = 3\nbatch_size = 2\ncontext_length = 16\nwarmup_steps = 1\nschedule = "constant"\n'
    (tmp_path / "run.toml").write_text(model + train)
    command = ["train", str(tmp_path / "run.toml"), "--out", str(tmp_path / "out")]
    assert main(command) == 0
    first = content(tmp_path / "out")
    assert main([*command, "--resume", "--steps", "6", "--json", str(tmp_path / "facts.json")]) == 0
    facts, second = json.loads((tmp_path / "facts.json").read_text()), content(tmp_path / "out")
    assert facts["finished"] and facts["steps"] == 6 and facts["train"]["steps"] == 6
    for name in ("model.safetensors", "adapter/adapter.safetensors"):
        assert name in first and first[name] != second[name], sorted(first)
    capsys.readouterr()
    assert main([*command, "--resume", "--steps", "9", "--schedule", "cosine"]) == 2
    error = capsys.readouterr().err
    assert "train.schedule was 'constant', is 'cosine'" in error and error.splitlines()[-1].startswith("palimpsest:")
