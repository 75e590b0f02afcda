"""The main job: eight stages, equal tokens, results in their fixed form, and nothing lost when something goes wrong."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import palimpsest as pal
from palimpsest import lineage, trial
from palimpsest.cli import main
from palimpsest.corpus import LEAST, Corpus
from palimpsest.optim import TrainingFailed
from palimpsest.stages import STAGES, config_for, recall_config
from palimpsest.tokenizer import Tokenizer
from tests.conftest import TINY

NAMES = ["gpt2", "linear-attention", "deltanet", "gated-deltanet", "kda", "kimi-linear", "hybrid-latent-moe", "kimi-k3"]
RECURRENT = NAMES[1:5]
CHINESE = "道可道，非常道。名可名，非常名。無名天地之始；有名萬物之母。故常無欲以觀其妙；常有欲以觀其徼。\n"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a text, where a lineage is a few steps long."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("".join(f"{i} bottles of beer on the wall, take {i % 7} down\n" for i in range(3000)))
    plan = {"steps": 2, "tokens": 2 * trial.BATCH * 256, "recall_steps": 1, "seconds": 0.0}
    monkeypatch.setattr(lineage, "_plan", lambda *_: plan)
    monkeypatch.setattr(trial, "CONTEXTS", [16, 64, 256])
    for name, value in (("VALIDATION_WINDOWS", 2), ("CURVE_WINDOWS", 1), ("RECALL_ROWS", 32)):
        monkeypatch.setattr(trial, name, value)
    sweep = lineage.benchmark.chunk_sweep
    monkeypatch.setattr(lineage.benchmark, "chunk_sweep", lambda sizes: sweep(sizes[:2], tokens=64, heads=1, dim=16))
    card = lineage.scale_card()
    monkeypatch.setattr(lineage, "scale_card", lambda: card)
    return tmp_path


def run(*extra: str) -> int:
    return main(["lineage", "--text", "text.txt", "--out", "run", *extra])


def results() -> dict[str, Any]:
    return json.loads(Path("run/results.json").read_text())


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_stages_are_the_lineage_at_one_size() -> None:
    assert [stage.name for stage in STAGES] == NAMES and {stage.preset for stage in STAGES} <= set(TINY)
    for size in (config_for, recall_config):
        configs = [size(stage, 512) for stage in STAGES]
        active = [pal.Model(config).num_parameters(active=True) for config in configs]
        assert all(abs(count / active[0] - 1) < 0.05 for count in active)
        assert len({(c.hidden_size, c.num_hidden_layers, c.vocab_size) for c in configs}) == 1
    for stage in STAGES:
        assert len(re.findall(r"[.:] ?[A-Z]|\.$", stage.memory)) >= 2, "two plain sentences"


def test_corpus(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("first " * 2000)
    (tmp_path / "b.txt").write_text(CHINESE * 100, encoding="utf-8")
    corpus = Corpus.read([tmp_path])
    assert corpus.train.startswith("first") and (corpus.train + corpus.validation).endswith(CHINESE)
    corpus.tokenize(tmp_path / "tokenizer")
    assert corpus.tokenizer is not None and corpus.train_tokens is not None
    assert corpus.tokenizer.decode(corpus.train_tokens.tolist()) == corpus.train
    assert Tokenizer.from_file(tmp_path / "tokenizer") == corpus.tokenizer
    again = Corpus.read([tmp_path / "a.txt", tmp_path / "b.txt"])
    assert again.digest == corpus.digest
    (tmp_path / "short.txt").write_text("x" * (LEAST - 1))
    with pytest.raises(pal.InputError, match=f"{LEAST - 1} bytes of text; give at least {LEAST}"):
        Corpus.read([tmp_path / "short.txt"])


@pytest.mark.slow
def test_the_whole_job(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--json", "copy.json") == 0
    found = results()
    assert json.loads(Path("copy.json").read_text()) == found
    assert [stage["name"] for stage in found["stages"]] == NAMES
    for stage in found["stages"]:
        assert stage["ok"] and stage["parameters"] >= stage["active_parameters"] > 0
        assert stage["tokens_seen"] == 2 * trial.BATCH * 256
        assert isinstance(stage["val_bits_per_byte"], float) and 0 < stage["val_bits_per_byte"] < 12
        assert [row["pairs"] for row in stage["recall"]] == trial.RECALL_PAIRS
        assert all(0 <= row["accuracy"] <= 1 for row in stage["recall"])
        assert [row["context"] for row in stage["decode_ms"]] == [16, 64, 256]
        assert all(row["ms"] > 0 for row in stage["decode_ms"])
        held = [row["bytes"] for row in stage["state_bytes"]]
        if stage["name"] == "gpt2":
            assert [count / held[0] for count in held] == [1, 4, 16]
        elif stage["name"] in RECURRENT:
            assert len(set(held)) == 1
        else:
            slope = (held[1] - held[0]) / 48
            assert slope > 0 and held[2] - held[1] == slope * 192
    last = found["readout"]["correlated"][-1]
    assert last["delta"] < last["additive"]
    overwritten = {row["memory"]: row["error_new"] for row in found["readout"]["overwrite"]}
    assert overwritten["delta"] < overwritten["additive"]
    card = found["scale_card"]
    assert card["parameters"] == 2_779_484_476_000 and card["kv_bytes_per_token"] == 27_648
    page = Page()
    html = Path("run/report.html").read_text(encoding="utf-8")
    page.feed(html)
    tags = [tag for tag, _ in page.tags]
    assert tags.count("svg") >= 8 and not {"script", "link", "iframe", "img"} & set(tags)
    loads = [attributes.get("src") or attributes.get("href") for tag, attributes in page.tags if tag != "a"]
    assert not [address for address in loads if address and not address.startswith("#")]
    model, tokenizer = pal.load("run/models/kimi-k3")
    assert tokenizer is not None
    assert str(pal.generate(model, tokenizer, ["1"], pal.SamplingConfig(max_new_tokens=4))[0])
    assert "report.html" in capsys.readouterr().err


def test_a_failed_stage_is_shown_and_the_others_finish(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measure = lineage.measure

    def flaky(stage: Any, *arguments: Any) -> dict[str, Any]:
        if stage.name == "deltanet":
            raise TrainingFailed("step 2: the loss is nan; lower learning_rate")
        return measure(stage, *arguments)

    monkeypatch.setattr(lineage, "measure", flaky)
    assert run("--stages", "gpt2,deltanet,kda") == 1
    good, bad, other = results()["stages"]
    assert good["ok"] and other["ok"] and not bad["ok"] and "the loss is nan" in bad["error"]
    assert "the loss is nan" in Path("run/report.html").read_text(encoding="utf-8")
    assert "failed: deltanet; the report says why" in capsys.readouterr().err
    monkeypatch.setattr(lineage, "measure", measure)
    assert run("--stages", "gpt2,deltanet,kda") == 0, "a failed stage is tried again"
    assert all(stage["ok"] for stage in results()["stages"])


def test_a_stopped_run_keeps_its_stages(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measure, trained = lineage.measure, []

    def stopped(stage: Any, *arguments: Any) -> dict[str, Any]:
        if stage.name == "kda" and "kda" not in trained:
            trained.append("kda")
            raise KeyboardInterrupt
        trained.append(stage.name)
        return measure(stage, *arguments)

    monkeypatch.setattr(lineage, "measure", stopped)
    assert run("--stages", "gpt2,gated-deltanet,kda") == 130
    assert "what was finished is kept" in capsys.readouterr().err and not Path("run/results.json").exists()
    assert run("--stages", "gpt2,gated-deltanet,kda") == 0
    assert trained == ["gpt2", "gated-deltanet", "kda", "kda"]


def test_another_run_in_the_folder_is_refused_or_replaced(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--stages", "gpt2") == 0
    before = Path("run/results.json").read_bytes()
    assert run("--stages", "gpt2", "--seed", "1") == 2
    assert "seed was 0, is 1" in capsys.readouterr().err and Path("run/results.json").read_bytes() == before
    assert run("--stages", "gpt2", "--seed", "1", "--fresh") == 0
    assert Path("run/results.json").read_bytes() != before


def test_text_of_any_language(place: Path) -> None:
    Path("text.txt").write_text("".join(f"{i}：{CHINESE}" for i in range(300)), encoding="utf-8")
    assert run("--stages", "kda") == 0
    (stage,) = results()["stages"]
    assert stage["sample"]["prompt"] and stage["sample"]["text"].encode("utf-8")
    assert "天地" in Path("run/report.html").read_text(encoding="utf-8")


def test_the_plan_fits_the_minutes(tmp_path: Path) -> None:
    """Calibration gives every stage the same number of steps, more for more minutes, and is kept for a rerun."""
    (tmp_path / "text.txt").write_text("to be or not to be " * 2000)
    corpus = Corpus.read([tmp_path / "text.txt"])
    corpus.tokenize(tmp_path / "tokenizer")
    stages = [stage for stage in STAGES if stage.name in ("gpt2", "kda")]
    plan = lineage._plan(tmp_path / "plan.json", stages, corpus, 5.0, 0)
    assert plan["steps"] > 4 and plan["tokens"] == plan["steps"] * trial.BATCH * 256
    assert lineage._plan(tmp_path / "plan.json", stages, corpus, 500.0, 0) == plan
