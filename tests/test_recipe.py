"""A run file says everything, paths in it are its own, and a refused run leaves no trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import palimpsest as pal
from palimpsest.recipe import Recipe
from palimpsest.tokenizer import Tokenizer

EXAMPLES = Path(__file__).parent.parent / "examples"
CHINESE = "道可道，非常道。名可名，非常名。無名天地之始；有名萬物之母。\n" * 60
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 2}
SHORT = pal.TrainConfig(steps=3, batch_size=2, context_length=16, eval_tokens=64, warmup_steps=1)


def write(path: Path, **tables: str) -> Path:
    path.write_text("".join(f"[{name}]\n{body}\n" for name, body in tables.items()), encoding="utf-8")
    return path


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_examples_run(path: Path, tmp_path: Path) -> None:
    """Every run file in examples/, on a text beside it, for a few steps."""
    (tmp_path / "text.txt").write_text("To be, or not to be: that is the question.\nWhether 'tis nobler\n" * 300)
    text = path.read_text(encoding="utf-8").replace("steps = 300", "steps = 3").replace("warmup_steps = 30", "warmup_steps = 1")
    (tmp_path / path.name).write_text(text, encoding="utf-8")
    result = Recipe.from_file(tmp_path / path.name).run(tmp_path / "out")
    assert result["steps"] == 3
    model, tokenizer = pal.load(tmp_path / "out")
    assert tokenizer is not None and model.config.vocab_size == tokenizer.vocab_size


def test_paths_are_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "text.txt").write_text("abc " * 400)
    path = write(tmp_path / "here" / "run.toml", model='preset = "kda-tiny"', data='text = ["text.txt"]')
    monkeypatch.chdir(tmp_path)
    recipe = Recipe.from_file(path)
    assert recipe.text == [tmp_path / "here" / "text.txt"]
    assert (recipe.tokenizer, recipe.validation_share, recipe.train) == ("bytes", 0.1, pal.TrainConfig())


@pytest.mark.parametrize(
    ("tables", "line"),
    [
        ({"data": 'text = "a"'}, r"\[model\] preset is None"),
        ({"model": "preset = 3", "data": 'text = "a"'}, r"\[model\] preset is 3"),
        ({"model": 'preset = "kda-tiny"'}, r"\[data\] text is None"),
        ({"model": 'preset = "kda-tiny"', "data": "text = []"}, r"\[data\] text is \[\]"),
        ({"model": 'preset = "kda-tiny"', "data": "text = [1]"}, r"\[data\] text is \[1\]"),
        ({"model": 'preset = "kda-tiny"', "data": 'text = "a"\ntokeniser = "x"'}, "unknown key 'tokeniser'.*tokenizer"),
        ({"model": 'preset = "kda-tiny"', "data": 'text = "a"\nvalidation_share = 1.0'}, r"validation_share is 1.0"),
        ({"model": 'preset = "kda-tiny"', "data": 'text = "a"\nencoding_errors = "drop"'}, "encoding_errors is 'drop'"),
        ({"model": 'preset = "kda-tiny"', "data": 'text = "a"\ntokenizer = 5'}, "tokenizer is 5"),
        ({"model": 'preset = "kda-tiny"\nhidden_size = 0', "data": 'text = "a"'}, "hidden_size is 0"),
        ({"model": 'preset = "kda-tiny"', "data": 'text = "a"', "train": "steps = 1.5"}, "steps is 1.5"),
    ],
)
def test_mistakes_name_the_file_and_the_key(tables: dict[str, str], line: str, tmp_path: Path) -> None:
    path = write(tmp_path / "run.toml", **tables)
    with pytest.raises(pal.InputError, match=line) as caught:
        Recipe.from_file(path)
    assert "run.toml" in str(caught.value) and "\n" not in str(caught.value)


def test_a_refused_run_leaves_no_trace(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("abc " * 20)
    recipe = Recipe("kda-tiny", SMALL, pal.TrainConfig(context_length=500), [tmp_path / "text.txt"])
    with pytest.raises(pal.InputError, match="80 tokens|81 tokens"):
        recipe.run(tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.txt"]


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300", "own"])
def test_any_language_and_tokenizer(tokenizer: str, tmp_path: Path) -> None:
    """Chinese trains and generates whole characters, by bytes, by a learned encoding and by a given one."""
    (tmp_path / "text.txt").write_text(CHINESE, encoding="utf-8")
    if tokenizer == "own":
        Tokenizer.train([CHINESE], 280).save(tmp_path / "tok")
        tokenizer = str(tmp_path / "tok")
    result = Recipe("kda-tiny", SMALL, SHORT, [tmp_path / "text.txt"], tokenizer).run(tmp_path / "out")
    assert result["tokens"] == 3 * 2 * 16
    model, loaded = pal.load(tmp_path / "out")
    assert loaded is not None and loaded.decode(loaded.encode("道可道，非常道")) == "道可道，非常道"
    sampling: dict[str, Any] = {"max_new_tokens": 20, "temperature": 1.0, "seed": 1}
    (text,) = pal.generate(model, loaded, ["道可"], pal.SamplingConfig(**sampling))
    assert str(text).encode("utf-8").decode("utf-8") == str(text)
