"""What is logged goes to TensorBoard as well, whatever is installed here: its writer is replaced by one that remembers."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from palimpsest.cli import main
from palimpsest.tensorboard import scalars

MODULE = "torch.utils.tensorboard.writer"


class Remembering:
    made: list[Remembering] = []

    def __init__(self, folder: str, purge_step: int) -> None:
        self.folder, self.purge_step, self.scalars = folder, purge_step, {}
        Remembering.made.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars[name, step] = value

    def flush(self) -> None:
        pass


@pytest.fixture
def run(tmp_path: Path) -> list[str]:
    (tmp_path / "text.txt").write_text("To be, or not to be: that is the question.\n" * 50)
    text = '[model]\npreset = "kimi-linear-tiny"\nhidden_size = 16\nnum_hidden_layers = 4\n[data]\ntext = "text.txt"\n'
    train = '[train]\nsteps = 4\nbatch_size = 2\ncontext_length = 16\nwarmup_steps = 1\nschedule = "constant"\nlog_every = 1\n'
    (tmp_path / "run.toml").write_text(text + train)
    return ["train", str(tmp_path / "run.toml"), "--out", str(tmp_path / "out"), "--tensorboard"]


def test_every_number_that_is_logged_is_written(run: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType(MODULE)
    module.SummaryWriter = Remembering
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.ModuleType("torch.utils.tensorboard"))
    monkeypatch.setitem(sys.modules, MODULE, module)
    Remembering.made = []
    assert main(run) == 0
    assert main([*run, "--resume", "--steps", "6"]) == 0
    first, second = Remembering.made
    assert (first.folder, first.purge_step, second.purge_step) == (str(tmp_path / "out" / "tensorboard"), 1, 5)
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        held = first.scalars if row["step"] <= 4 else second.scalars
        for name in ("loss", "val_nats_per_token", "tokens_per_s", "repeats"):
            if name in row:
                assert held[name, row["step"]] == row[name]
        if "loss" in row:
            assert held["groups/matrices/update_ratio", row["step"]] == row["groups"]["matrices"]["update_ratio"]
            assert held["residual_rms/08", row["step"]] == row["residual_rms"][8]
            assert held["moe_load/02/01", row["step"]] == row["moe_load"][2][1]
    assert {step for _, step in second.scalars} == {5, 6}


def test_without_the_package_nothing_begins(
    run: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, MODULE, None)
    assert main(run) == 2
    assert "palimpsest-lm[tensorboard]" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_scalars_are_named_by_their_path() -> None:
    record = {"step": 3, "loss": 1.5, "memory_bytes": None, "a": {"b": [1, [2, 3]]}, "gates": [{"beta": [1.0]}]}
    assert dict(scalars(record)) == {"loss": 1.5, "a/b/00": 1.0, "a/b/01/00": 2.0, "a/b/01/01": 3.0}
