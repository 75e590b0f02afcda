"""The page on a prompt: every kind of layer has its section, its numbers are those that were computed, and it stands alone."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch

import palimpsest as pal
from palimpsest import inside, inside_report
from palimpsest.cli import main
from palimpsest.tokenizer import Tokenizer
from tests.conftest import make_ids, make_model

PROMPT = "the key is 42 <b>and</b> the door"
SECTIONS = {
    "gpt2-tiny": ["attention"],
    "deltanet-tiny": ["half-lives", "beta", "state", "readout"],
    "linear-attention-tiny": ["half-lives", "state", "readout"],
    "kda-tiny": ["half-lives", "beta", "state", "readout"],
    "kimi-linear-tiny": ["half-lives", "beta", "state", "readout", "attention", "experts"],
    "kimi-k3-tiny": ["half-lives", "beta", "state", "readout", "attention", "experts", "depth"],
}


@pytest.mark.parametrize("preset", SECTIONS)
def test_the_page(preset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, tokenizer = make_model(preset, vocab_size=257), Tokenizer.bytes()
    pal.save(model, tmp_path / "model", tokenizer=tokenizer)
    out, facts_path = tmp_path / "inside.html", tmp_path / "facts.json"
    arguments = ["report", "--inside", str(tmp_path / "model"), "--prompt", PROMPT, "--answer", "42", "--out", str(out)]
    assert main([*arguments, "--json", str(facts_path)]) == 0
    assert capsys.readouterr().out.startswith(f"{len(PROMPT)} tokens through")
    page, facts = out.read_text(), json.loads(facts_path.read_text())
    idents = re.findall(r'<section id="([^"]+)">', page)
    assert sorted(idents) == sorted(SECTIONS[preset])
    assert facts["answer"] == [11, 12] and "<b>4</b><b>2</b>" in page and "&lt;" in page and "<b>and</b>" not in page
    assert "http" not in page and "<script" not in page and "nan" not in page.lower().split("</style>")[1]
    for ident in idents:
        section = page.split(f'<section id="{ident}">')[1].split("</section>")[0]
        assert "<table" in section
        assert ("<svg" in section) == (ident != "half-lives" or preset not in ("deltanet-tiny", "linear-attention-tiny"))


def test_the_numbers_are_those_of_the_view(tmp_path: Path) -> None:
    model, tokenizer = make_model("kimi-k3-tiny", vocab_size=257), Tokenizer.bytes()
    ids = torch.tensor(tokenizer.encode(PROMPT))
    view = inside.look(model, ids, [11, 12])
    facts = inside_report.write(model, tokenizer, PROMPT, tmp_path / "page.html", "a model", "42")
    for row, memory in zip(facts["memories"], view.memories, strict=True):
        assert memory.beta is not None and memory.half_life is not None
        assert row["half_life"] == memory.half_life.tolist() and row["beta"] == memory.beta.tolist()
        assert row["error_of_answer"] == memory.readout[12, 12:].tolist()
        for age in (0, 5, len(ids) - 1):
            pairs = [float(memory.readout[s, s + age]) for s in range(len(ids) - age)]
            assert row["error_by_age"][age] == pytest.approx(sum(pairs) / len(pairs), rel=1e-5)
    assert [row["counts"] for row in facts["experts"]] == [choice.counts.tolist() for choice in view.choices]
    assert [row["mass"] for row in facts["retrievals"]] == [r.mass.tolist() for r in view.retrievals]
    page = (tmp_path / "page.html").read_text()
    mass = max(float(r.mass[-1].mean()) for r in view.retrievals)
    assert f"{round(100 * mass, 1):g} %" in page.split('id="attention"')[1].split("</section>")[0]


def test_many_layers_are_drawn_in_part_and_listed_in_full() -> None:
    model = make_model("kda-tiny", num_hidden_layers=11)
    for plot in inside_report.all_plots(inside.look(model, make_ids(model, 1, 12)[0])):
        assert all(len(panel.lines) == 8 for panel in plot.panels) and len(plot.table.rows) == 11
        assert plot.panels[0].lines[0].name == "layer 0" and plot.panels[0].lines[-1].name == "layer 10"
        assert "8 of the 11 layers are drawn" in plot.finding


def test_channels_that_never_fade_are_said_so(tmp_path: Path) -> None:
    model = make_model("gated-deltanet-tiny", num_hidden_layers=1, vocab_size=257)
    model.layers[0].mixer.A_log.data.fill_(-math.inf)  # type: ignore[union-attr]
    facts = inside_report.write(model, Tokenizer.bytes(), "some text", tmp_path / "page.html", "a model")
    assert all(x is None for head in facts["memories"][0]["half_life"] for x in head)
    json.dumps(facts, allow_nan=False)
    assert "never fades" in (tmp_path / "page.html").read_text()


def test_mistakes_leave_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pal.save(make_model("kda-tiny", vocab_size=257), tmp_path / "model", tokenizer=Tokenizer.bytes())
    pal.save(make_model("kda-tiny", vocab_size=257), tmp_path / "bare")
    out, model = tmp_path / "out.html", str(tmp_path / "model")
    for arguments, words in (
        (["--inside", model], "--prompt is missing"),
        (["--prompt", "a"], "give folders of runs, or --inside MODEL"),
        ([], "give folders of runs"),
        ([model, "--inside", model, "--prompt", "abc"], "runs were given beside --inside"),
        (["--inside", model, "--prompt", "a"], "it has 1 tokens; 2 to"),
        (["--inside", model, "--prompt", "abc", "--answer", "x"], "'x' does not stand in the prompt"),
        (["--inside", str(tmp_path / "bare"), "--prompt", "abc"], "no tokenizer"),
    ):
        assert main(["report", *arguments, "--out", str(out)]) == 2
        assert words in capsys.readouterr().err and not out.exists()
