"""Runs of recipes, in pieces or at once, make one table, finished or not; tokens may be made before."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import palimpsest as pal
from palimpsest import run_folder
from palimpsest.cli import main
from palimpsest.recipe import Recipe
from palimpsest.tokenizer import Tokenizer

LINES = "To be, or not to be: that is the question.\nWhether 'tis nobler in the mind to suffer\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two small recipes beside their tokens."""
    place = tmp_path_factory.mktemp("recipes")
    (place / "text.txt").write_text(LINES * 3000)
    assert main(["tokenize", str(place / "text.txt"), "--out", str(place / "tokens"), "--json", str(place / "facts.json")]) == 0
    for name, preset in (("small-a", "gated-deltanet-tiny"), ("small-b", "kda-tiny")):
        model = f'[model]\npreset = "{preset}"\nnum_hidden_layers = 1\nhidden_size = 16\n[data]\ntokens = "tokens"\n'
        train = '[train]\nsteps = 12\nbatch_size = 2\ncontext_length = 16\nwarmup_steps = 2\nschedule = "wsd"\n'
        (place / f"{name}.toml").write_text(model + train + "log_every = 2\neval_every = 4\neval_tokens = 64\n")
    return place


def test_pieces_make_the_run_and_runs_make_the_table(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run in pieces of one step each is the unbroken one; the table has both, and one that is not finished."""

    def train(name: str, out: str, *rest: str) -> None:
        assert main(["train", str(folder / f"{name}.toml"), "--out", str(tmp_path / out), *rest]) == 0

    train("small-a", "a0")
    train("small-a", "cut", "--minutes", "0")
    for _ in range(11):
        assert not (tmp_path / "cut" / "config.json").exists()
        train("small-a", "cut", "--minutes", "0", "--resume")
    rows = {name: _rows(str(tmp_path / name)) for name in ("a0", "cut")}
    timeless = [
        [{k: v for k, v in r.items() if k not in ("tokens_per_s", "seconds", "memory_bytes", "mfu")} for r in rows[name]]
        for name in ("a0", "cut")
    ]
    assert timeless[0] == timeless[1] and (tmp_path / "cut" / "config.json").exists()
    assert [piece["from_step"] for piece in run_folder.pieces(tmp_path / "cut")] == [*range(12)]
    train("small-a", "a1", "--seed", "1")
    train("small-b", "b0")
    (tmp_path / "b1").mkdir()
    for name in ("run.json", "pieces.json", "metrics.jsonl"):
        shutil.copy(tmp_path / "b0" / name, tmp_path / "b1")
    kept = [line for line in (tmp_path / "b1" / "metrics.jsonl").read_text().splitlines() if json.loads(line)["step"] <= 8]
    (tmp_path / "b1" / "metrics.jsonl").write_text("\n".join(kept) + "\n")
    capsys.readouterr()
    out, runs = tmp_path / "table.json", [str(tmp_path / name) for name in ("a0", "a1", "b0", "b1")]
    assert main(["benchmark", "recipes", *runs, "--out", str(out)]) == 0
    table, shown = json.loads(out.read_text()), capsys.readouterr().out
    assert table["equal_tokens"] == 8 * 2 * 16 and table["same_schedule"]
    assert table["equal_repeats"] == table["equal_tokens"] / table["train_tokens"]
    first, second = table["rows"]
    assert (first["recipe"], first["finished"], second["recipe"], second["finished"]) == ("small-a", True, "small-b", False)
    at = [next(r["val_nats_per_token"] for r in _rows(run) if r["step"] == 8 and "loss" not in r) for run in runs[:2]]
    loss = first["val_nats_per_token_at_equal_tokens"]
    assert (loss["lowest"], loss["highest"]) == (min(at), max(at)) and loss["mean"] == pytest.approx(sum(at) / 2)
    assert [run["seed"] for run in first["runs"]] == [0, 1] and first["runs"][0]["pieces"][0]["machine"]["processor"]
    assert shown.count("UNFINISHED, step 8 of 12") == 1


def _rows(folder: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def test_what_does_not_compare_is_refused(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.txt").write_text("another text " * 500)
    assert main(["tokenize", str(tmp_path / "other.txt"), "--out", str(tmp_path / "tokens")]) == 0
    for place in (folder, tmp_path):
        text = (folder / "small-b.toml").read_text()
        (place / "run.toml").write_text(text)
        assert main(["train", str(place / "run.toml"), "--out", str(place / "out"), "--steps", "2"]) == 0
    capsys.readouterr()
    both = [str(folder / "out"), str(tmp_path / "out")]
    assert main(["benchmark", "recipes", *both, "--out", str(tmp_path / "table.json")]) == 2
    assert "different texts" in capsys.readouterr().err and not (tmp_path / "table.json").exists()
    assert main(["tokenize", str(tmp_path / "other.txt"), "--out", str(tmp_path / "tokens")]) == 2
    assert "not an empty folder" in capsys.readouterr().err


def test_tokens_of_another_tokenizer_are_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "tokens", tmp_path / "tokens")
    Tokenizer.train([LINES], 260).save(tmp_path / "tokens")
    shutil.copy(folder / "small-b.toml", tmp_path)
    with pytest.raises(pal.InputError, match="tokens.bin: made with another tokenizer"):
        Recipe.from_file(tmp_path / "small-b.toml").run(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    text = (tmp_path / "small-b.toml").read_text().replace('tokens = "tokens"', 'tokens = "tokens"\ntokenizer = "bytes"')
    (tmp_path / "both.toml").write_text(text)
    with pytest.raises(pal.InputError, match="has the tokenizer as well"):
        Recipe.from_file(tmp_path / "both.toml")
