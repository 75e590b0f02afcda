"""The recipes of examples/ are one comparison: models of one size on equal terms."""

from __future__ import annotations

import hashlib
import json
import re
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import palimpsest as pal
from palimpsest.cli import main
from palimpsest.recipe import Recipe

RECIPES = sorted((Path(__file__).parent.parent / "examples" / "recipes").glob("*.toml"))
VOCAB = 16384


def test_the_recipes_differ_in_the_model_alone() -> None:
    assert [path.stem for path in RECIPES] == ["gated-deltanet", "k3", "kda-mla", "kda", "softmax"]
    found = [Recipe.from_file(path) for path in RECIPES]
    first = found[0]
    for recipe in found:
        assert (recipe.train, recipe.tokens, recipe.validation_share) == (first.train, first.tokens, first.validation_share)
    train = first.train
    assert train.steps * train.batch_size * train.accumulation * train.context_length >= 200_000_000
    assert train.precision == "bf16" and train.schedule == "wsd"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_has_gpt2s_shape_and_as_many_parameters(path: Path) -> None:
    recipe, softmax = Recipe.from_file(path), Recipe.from_file(path.with_name("softmax.toml"))

    def parameters(of: Recipe, active: bool = False) -> int:
        assert of.preset is not None
        with torch.device("meta"):
            return pal.Model(pal.ModelConfig.preset(of.preset, **{"vocab_size": VOCAB, **of.overrides})).num_parameters(active)

    assert recipe.preset is not None
    config = pal.ModelConfig.preset(recipe.preset, **{"vocab_size": VOCAB, **recipe.overrides})
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (12, 768, VOCAB)
    assert config.tie_word_embeddings and parameters(recipe) == pytest.approx(parameters(softmax), rel=0.01)
    said = [float(number) for number in re.findall(r"([\d.]+) M", path.read_text(encoding="utf-8").partition("[model]")[0])]
    counted = [parameters(recipe) / 1e6, *([parameters(recipe, True) / 1e6] if "moe" in config.mlps else [])]
    assert said == [round(count, 1) for count in counted]
    mixers = {"softmax": {"attention"}, "gated-deltanet": {"gated_deltanet"}, "kda": {"kda"}}.get(path.stem, {"kda", "mla"})
    assert set(config.mixers) == mixers and (config.residual == "block_attention") == (path.stem == "k3")
    if mixers == {"kda", "mla"}:
        assert config.mixers == ("kda", "kda", "kda", "mla") * 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipes beside a small folder of tokens."""
    place = tmp_path_factory.mktemp("recipes")
    (place / "text.txt").write_text("To be, or not to be: that is the question.\n" * 6000)
    assert main(["tokenize", str(place / "text.txt"), "--out", str(place / "tokens"), "--json", str(place / "facts.json")]) == 0
    for path in RECIPES:
        shutil.copy(path, place)
    return place


@pytest.mark.parametrize("name", [path.stem for path in RECIPES])
def test_the_dry_run_of_every_recipe(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder / "dry.json"
    assert main(["train", str(folder / f"{name}.toml"), "--dry-run", "--seed", "1", "--json", str(out)]) == 0
    facts = json.loads(out.read_text())
    tokens = json.loads((folder / "facts.json").read_text())["tokens"]
    assert facts["tokens"]["train"] + facts["tokens"]["validation"] == tokens
    assert facts["tokens"]["repeats"] == facts["tokens"]["in_all"] / facts["tokens"]["train"] > 1
    assert f"the text is read {facts['tokens']['repeats']:.4g} times" in capsys.readouterr().out
    assert facts["train"]["seed"] == 1 and facts["estimate"]["memory_bytes"]["peak"] < 120 * 2**30


def test_the_text_is_what_stands_on_a_page(tmp_path: Path) -> None:
    """The script that makes the text: no navigation, scripts or styles; equal documents once, in an order by digest."""
    script: dict[str, Any] = runpy.run_path(str(RECIPES[0].with_name("text.py")))
    page = """<html><head><title>T</title><style>p {}</style></head><body><div class="sphinxsidebar"><p>side</p></div>
    <div role="navigation"><ul><li>away<li>far</ul></div><h1>One</h1><p>Two  <b>three</b>
    four &amp; five</p><pre>a  b
      c</pre><script>x()</script></body></html>"""
    assert script["page_text"](page) == "One\n\nTwo three four & five\n\na  b\n      c"
    documents = ["x" * 600, "y" * 700, "short", "x" * 600]
    assert script["write"](iter(documents), tmp_path / "text.jsonl") == (2, 1300)
    rows = [json.loads(line)["text"] for line in (tmp_path / "text.jsonl").read_text().splitlines()]
    assert rows == sorted({"x" * 600, "y" * 700}, key=lambda text: hashlib.sha256(text.encode()).digest())
