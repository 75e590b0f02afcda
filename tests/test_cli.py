"""The command line: a mistake is one line with exit status 2 and leaves nothing behind; what works works twice the same."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import palimpsest as pal
from palimpsest import checkpoint, output, run_folder
from palimpsest.cli import main
from palimpsest.optim import TrainingFailed
from palimpsest.tokenizer import Tokenizer
from palimpsest.train import Trainer

TINY = ["--set", "hidden_size=16", "--set", "num_hidden_layers=2", "--set", "linear_num_key_heads=2"]
TINY += ["--set", "linear_num_value_heads=2", "--set", "linear_key_head_dim=8", "--set", "linear_value_head_dim=8"]
SHORT = ["--steps", "4", "--batch-size", "2", "--context-length", "16", "--eval-tokens", "64", "--warmup-steps", "1"]
TEXT = "To be, or not to be, that is the question.\n" * 40


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a text, as the working folder."""
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(*extra: str, out: str = "run") -> list[str]:
    return ["train", "--preset", "kda-tiny", "--text", "text.txt", "--out", out, *TINY, *SHORT, *extra]


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def complaint(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Runs a command that must be refused: status 2, nothing on stdout, and one line that says why."""
    assert main(argv) == 2
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if line.startswith("palimpsest: ")]
    assert out == "" and len(lines) == 1 and "Traceback" not in err, err
    return lines[0]


BARE = ["train", "--preset", "kda-tiny", "--text", "text.txt", "--out", "run"]
RUN_FILE = '[model]\npreset = "kda-tiny"\n[data]\ntext = "text.txt"\n[train]\nsteps = 2\n'
MISTAKES: list[tuple[str, list[str], str]] = [
    ("a misspelt command", ["trian"], "trian.*train"),
    ("a misspelt flag", ["presets", "--jsn", "x"], "--jsn"),
    ("a misspelt training flag", train("--step", "3"), "--step.*--steps"),
    ("a misspelt preset", ["presets", "kda-tinny"], "kda-tinny.*kda-tiny"),
    ("a misspelt preset to train", ["train", "--preset", "gtp2-tiny", "--text", "text.txt", "--out", "run"], "gpt2-tiny"),
    ("a misspelt field", train("--set", "hiden_size=8"), "hiden_size.*hidden_size"),
    ("a field that is none", train("--set", "hidden_size"), "write it as field=value"),
    ("heads that do not divide", train("--set", "linear_num_value_heads=3"), "linear_num_value_heads is 3.*multiple"),
    ("a word for a number", train("--set", "hidden_size=wide"), "hidden_size is 'wide'"),
    ("no steps", [*BARE, "--steps", "0"], "steps is 0; it must be at least 1"),
    ("a negative rate", train("--learning-rate", "-1"), "learning_rate is -1"),
    ("an unknown schedule", train("--schedule", "linear"), "schedule"),
    ("a context longer than the text", [*BARE, "--context-length", "100000"], "context_length 100000.*shorter context"),
    ("a missing file", ["train", "--preset", "kda-tiny", "--text", "txet.txt", "--out", "run"], "txet.txt"),
    ("an empty text", ["train", "--preset", "kda-tiny", "--text", "empty.txt", "--out", "run"], "empty.txt"),
    ("a binary file", ["train", "--preset", "kda-tiny", "--text", "bytes.txt", "--out", "run"], "bytes.txt.*byte 3"),
    ("a model too small for its tokenizer", train("--set", "vocab_size=100"), "vocab_size is 100"),
    ("a tokenizer that is not there", train("--tokenizer", "nowhere.json"), "nowhere.json"),
    ("a vocabulary that is none", train("--tokenizer", "bpe:many"), "bpe:many.*bpe:SIZE"),
    ("no preset", ["train", "--text", "text.txt", "--out", "run"], "needs a run file, or --preset and --text"),
    ("no place to write", ["train", "--preset", "kda-tiny", "--text", "text.txt"], "out"),
    ("a folder that is a file", train(out="text.txt"), "text.txt.*not an empty folder"),
    ("a folder that is not empty", train(out="full"), "full: not an empty folder"),
    ("nothing to resume", train("--resume"), "run: there is no run to resume"),
    ("numbers into no folder", [*train(), "--json", "no/where.json"], "no/where.json"),
    ("numbers onto a folder", [*train(), "--json", "full"], "--json full"),
    ("a run file that is not there", ["train", "other.toml", "--out", "run"], "other.toml"),
    ("a run file that is not TOML", ["train", "broken.toml", "--out", "run"], "broken.toml: not valid TOML"),
    ("an unknown table", ["train", "table.toml", "--out", "run"], r"table.toml: unknown table \[trian\].*train"),
    ("an unknown key", ["train", "key.toml", "--out", "run"], "key.toml.*stepps.*steps"),
    ("a run file and flags", ["train", "run.toml", "--out", "run", "--preset", "kda-tiny"], "--preset were both given"),
    ("a wrong flag beside a run file", ["train", "run.toml", "--out", "run", "--steps", "0"], "steps is 0"),
    ("minutes below zero", ["train", "run.toml", "--out", "run", "--minutes", "-1"], "--minutes is -1"),
    ("no model", ["generate", "full", "a"], "full"),
    ("no folder", ["generate", "nowhere", "a"], "nowhere"),
    ("a model without a tokenizer", ["generate", "mute", "a"], "mute: there is no tokenizer"),
    ("a temperature below zero", ["generate", "model", "a", "--temperature", "-1"], "temperature is -1"),
    ("no tokens", ["generate", "model", "a", "--max-new-tokens", "0"], "max_new_tokens is 0"),
    ("a prompt file that is not text", ["generate", "model", "--prompt-file", "bytes.txt"], "bytes.txt: not UTF-8 at byte 3"),
    ("a prompt file that is not there", ["generate", "model", "--prompt-file", "gone.txt"], "gone.txt"),
    ("an unknown stage", ["lineage", "--text", "text.txt", "--stages", "gpt3", "--out", "run"], "'gpt3' is not a stage.*gpt2"),
    ("no minutes", ["lineage", "--text", "text.txt", "--minutes", "0", "--out", "run"], "minutes is 0"),
    ("a text too short", ["lineage", "--text", "text.txt", "--out", "run"], "bytes of text; give at least"),
    ("a number of thousands of digits", ["train", "digits.toml", "--out", "run"], "digits.toml: not valid TOML"),
    ("thousands of brackets", ["train", "deep.toml", "--out", "run"], "deep.toml: not valid TOML"),
    ("a run file that is not text", ["train", "bytes.txt", "--out", "run"], "bytes.txt: not valid TOML"),
    (
        "a number too large for a tensor",
        train("--set", "hidden_size=99999999999999999999"),
        r"is 9+; .*below 2\*\*63",
    ),
    ("a rate too large for a float", train("--learning-rate", "1e999"), "learning_rate is inf"),
    ("a field of thousands of brackets", train("--set", "hidden_size=" + 9999 * "["), "hidden_size is '"),
    ("a vocabulary of thousands of digits", train("--tokenizer", "bpe:" + 9999 * "9"), "write bpe:SIZE"),
    ("minutes that are no number", ["train", "run.toml", "--out", "run", "--minutes", "nan"], "--minutes is nan"),
    ("tokens of what is not text", ["tokenize", "bytes.txt", "--out", "tokens"], "bytes.txt: not UTF-8 at byte 3"),
    ("tokens of nothing", ["tokenize", "empty.txt", "--out", "tokens"], "empty.txt: there is no text"),
    ("a seed too large", ["lineage", "--text", "long.txt", "--out", "run", "--seed", 20 * "9"], "seed is 9+; it must be in"),
    ("a prompt that is not UTF-8", ["generate", "model", "a\udcffb"], "not UTF-8 at character 1"),
    ("a stop that is not UTF-8", ["generate", "model", "a", "--stop", "\udcff"], "not UTF-8 at character 0"),
    ("a report into no folder", ["report", "full", "--out", "no/page.html"], "--out no/page.html"),
    ("a benchmark onto a folder", ["benchmark", "cpu", "--out", "full"], "--out full"),
    ("a soak without an end", ["benchmark", "serve", "--out", "a.json", "--soak-s", "inf"], "--soak-s is inf"),
    ("a page onto a folder", ["plan", "kda-tiny", "--html", "full"], "--html full"),
    ("a calibration of thousands of brackets", ["plan", "kda-tiny", "--device", "deep.toml"], "deep.toml: not a calibration"),
    ("a path as long as no path", ["generate", "m" * 999, "a"], "m: "),
    ("nothing to look into", ["convert", "gone"], "gone: no such file or folder"),
    ("a folder of something else", ["convert", "full"], "full: neither a published folder nor a .gguf file"),
    ("a window of no tokens", ["evaluate", "model", "text.txt", "--window", "0"], "window is 0"),
    ("a lineage into another folder", ["lineage", "--text", "long.txt", "--out", "full"], "full: the folder is not empty"),
]


@pytest.mark.parametrize(("argv", "line"), [case[1:] for case in MISTAKES], ids=[case[0] for case in MISTAKES])
def test_mistakes(argv: list[str], line: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import re

    (place / "empty.txt").write_text("")
    (place / "bytes.txt").write_bytes(b"abc\xff\xfe")
    (place / "long.txt").write_text(TEXT * 20)
    (place / "full").mkdir()
    (place / "full" / "notes.txt").write_text("mine")
    (place / "broken.toml").write_text("[model\n")
    (place / "digits.toml").write_text(RUN_FILE.replace("2", 9999 * "2"))
    (place / "deep.toml").write_text("a = " + 9999 * "[")
    (place / "run.toml").write_text(RUN_FILE)
    (place / "table.toml").write_text(RUN_FILE.replace("[train]", "[trian]"))
    (place / "key.toml").write_text(RUN_FILE.replace("steps", "stepps"))
    model = pal.Model(pal.ModelConfig.preset("kda-tiny"))
    pal.save(model, place / "model", tokenizer=Tokenizer.bytes())
    pal.save(model, place / "mute")
    before = files(place)
    assert re.search(line, complaint(argv, capsys))
    assert files(place) == before, "something was left behind"


def test_train_generate_resume(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*train("--checkpoint-every", "2"), "--json", "numbers.json"]) == 0
    numbers = json.loads((place / "numbers.json").read_text())
    assert numbers["steps"] == 4 and numbers["parameters"] > 0 and numbers["train"]["steps"] == 4
    assert "4 steps, validation" in capsys.readouterr().out
    greedy = ["generate", "run", "To be", "--temperature", "0", "--max-new-tokens", "8"]
    texts = []
    for argv in (greedy, greedy, [*greedy[:4], "1", "--seed", "3"], [*greedy[:4], "1", "--seed", "3"]):
        assert main(argv) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and texts[2] == texts[3] and texts[0].startswith("To be")
    assert main(["generate", "run", "a", "b", "--max-new-tokens", "3", "--json", "out.json"]) == 0
    completions = json.loads((place / "out.json").read_text())["completions"]
    assert [row["prompt"] for row in completions] == ["a", "b"] and all(len(row["token_ids"]) <= 3 for row in completions)
    before = files(place / "run")
    capsys.readouterr()
    line = complaint(train("--resume", "--learning-rate", "0.5"), capsys)
    assert "learning_rate" in line and "0.5" in line and "0.001" in line
    assert files(place / "run") == before
    assert "not an empty folder; resume the run in it with --resume" in complaint(train(), capsys)


def test_a_stopped_run_goes_on(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C is status 130 and keeps a checkpoint; --resume ends where an unbroken run ends, bit for bit."""
    step = Trainer.step

    def interrupted(self: Trainer) -> float:
        if self.steps_done == 2:
            raise KeyboardInterrupt
        return step(self)

    assert main(train(out="whole")) == 0
    monkeypatch.setattr(Trainer, "step", interrupted)
    assert main(train()) == 130
    assert "step-00000002" in capsys.readouterr().err
    monkeypatch.setattr(Trainer, "step", step)
    assert main(train("--resume")) == 0
    for a, b in zip(checkpoint.load("whole")[0].parameters(), checkpoint.load("run")[0].parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_run_file_is_the_flags(place: Path) -> None:
    text = '[model]\npreset = "kda-tiny"\nhidden_size = 16\nnum_hidden_layers = 2\nlinear_num_key_heads = 2\n'
    text += "linear_num_value_heads = 2\nlinear_key_head_dim = 8\nlinear_value_head_dim = 8\n"
    text += '[data]\ntext = ["text.txt"]\n[train]\nsteps = 4\nbatch_size = 2\ncontext_length = 16\n'
    (place / "run.toml").write_text(text + "eval_tokens = 64\nwarmup_steps = 1\n")
    assert main(["train", "run.toml", "--out", "filed"]) == 0 and main(train()) == 0
    for a, b in zip(checkpoint.load("filed")[0].parameters(), checkpoint.load("run")[0].parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_failed_run_is_status_one(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(self: Trainer) -> float:
        raise TrainingFailed("step 1: the loss is nan; lower learning_rate")

    monkeypatch.setattr(Trainer, "step", fail)
    assert main(train()) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "palimpsest: step 1: the loss is nan; lower learning_rate"


def test_listings(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["presets", "--json", "presets.json"]) == 0
    shown = capsys.readouterr().out
    rows = json.loads((place / "presets.json").read_text())["presets"]
    assert [row["name"] for row in rows] == pal.presets() and all(name in shown for name in pal.presets())
    assert {row["name"]: row["parameters"] for row in rows}["kimi-k3"] == 2_779_484_476_000
    assert main(["presets", "kimi-linear-48b"]) == 0
    assert "(kda x3, mla) x6, kda x2, mla" in capsys.readouterr().out
    assert main(["doctor", "--json", "facts.json"]) == 0
    assert "chunked" in capsys.readouterr().out and json.loads((place / "facts.json").read_text())["backends"]
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == pal.__version__


@pytest.mark.parametrize("command", ["", "lineage", "train", "generate", "convert", "benchmark", "presets", "doctor"])
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*([command] if command else []), "--help"]) == 0
    shown = capsys.readouterr().out
    wanted = {
        "": "lineage",
        "lineage": "--minutes",
        "train": "--learning-rate",
        "generate": "--top-p",
        "doctor": "--check",
        "benchmark": "cpu",
    }
    assert "Usage" in shown and wanted.get(command, "--json") in shown


def test_a_closed_pipe_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("palimpsest.doctor.render", broken)
    monkeypatch.setattr("os.dup2", lambda *_: None)
    monkeypatch.setattr(sys.stdout, "fileno", lambda: 1, raising=False)
    assert main(["doctor"]) == 0


def test_a_folder_is_one_process_at_a_time(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if os.name == "nt":
        pytest.skip("folders are not locked on Windows")
    (place / "long.txt").write_text(TEXT * 20)
    lineage = ["lineage", "--text", "long.txt", "--stages", "gpt2", "--minutes", "0.01", "--out", "run"]
    recall = ["benchmark", "recall", "--minutes", "0.0001", "--out", "run", "--report", "page.html"]
    with run_folder.alone(place / "run"):
        for argv in (train(), lineage, recall):
            assert "run: another process is at work in it" in complaint(argv, capsys)
        assert list((place / "run").iterdir()) == []
    with run_folder.alone(place / "run"):  # free again
        pass
    with pytest.raises(pal.InputError, match=r"text.txt: it is a file"), run_folder.alone(place / "text.txt"):
        pass


def test_what_is_not_finite_is_null_in_json(place: Path) -> None:
    output.write_json(place / "a.json", {"a": [float("nan"), 1.5], "b": (float("inf"),)})
    assert json.loads((place / "a.json").read_text()) == {"a": [None, 1.5], "b": [None]}


def test_a_full_disk_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("palimpsest.doctor.render", full)
    monkeypatch.setattr("os.dup2", lambda *_: None)
    monkeypatch.setattr(sys.stdout, "fileno", lambda: 1, raising=False)
    assert "no space is left" in complaint(["doctor"], capsys)


def test_a_failed_write_leaves_nothing(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (place / "presets.json").write_text("before")
    before = files(place)
    monkeypatch.setattr(checkpoint, "flush", full)
    assert main(["presets", "--json", "presets.json"]) == 2
    assert "presets.json: cannot be written (No space left on device)" in capsys.readouterr().err
    assert files(place) == before


def test_too_little_memory_leaves_the_folder_as_it_was(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    before = files(place)
    for what in ("palimpsest.train.Trainer.step", "palimpsest.recipe.Model"):
        monkeypatch.setattr(what, full)
        for tokenizer in ("bytes", "bpe:260"):
            assert main(train("--tokenizer", tokenizer)) == 1
            assert files(place) == before


@pytest.mark.parametrize("what", ["palimpsest.train.Trainer.step", "palimpsest.recipe.Model", "palimpsest.data.prepare"])
def test_ctrl_c_before_the_first_step_leaves_no_folder(what: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the folder is neither empty nor a run to resume."""

    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    before = files(place)
    monkeypatch.setattr(what, interrupted)
    assert main(train()) == 130
    assert files(place) == before


def test_doctor_finds_a_wrong_backend(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from palimpsest import ops

    monkeypatch.setattr(sys.modules["palimpsest.ops.chunked"], "SAFE_SPAN", 1e9)
    assert main(["doctor", "--check"]) == 1
    assert "FAILS" in capsys.readouterr().out
    monkeypatch.undo()
    right = ops.chunked
    monkeypatch.setattr(ops, "chunked", lambda *arguments: tuple(1.01 * x for x in right(*arguments)))
    assert main(["doctor"]) == 1
    assert "SOME BACKEND IS WRONG HERE" in capsys.readouterr().out
