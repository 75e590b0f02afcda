"""The documents say what the code does: their Python blocks run, their commands parse."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (DOCS / name).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = blocks("checkpoints.md", "python")
    assert len(code) >= 5
    namespace: dict[str, object] = {}
    for block in code:
        exec(compile(block, "checkpoints.md", "exec"), namespace)
    assert {"gpt2", "gpt2-bf16", "deltanet", "k3", "llama.gguf"} == {path.name for path in tmp_path.iterdir()}


def test_plan() -> None:
    (code,) = blocks("plan.md", "python")
    exec(compile(code, "plan.md", "exec"), {})


def test_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code runs, and the run files are read, all but the paths in them."""
    from palimpsest.recipe import Recipe

    (code,) = blocks("training.md", "python")
    exec(compile(code, "training.md", "exec"), {})
    first, mesh, chat = blocks("training.md", "toml")
    for number, text in enumerate((first, first + mesh, chat)):
        (tmp_path / f"{number}.toml").write_text(text, encoding="utf-8")
        recipe = Recipe.from_file(tmp_path / f"{number}.toml")
        assert (recipe.mesh is not None, recipe.lora is not None) == (number == 1, number == 2)


@pytest.mark.parametrize("name", ["checkpoints.md", "plan.md", "training.md"])
def test_commands_parse(name: str) -> None:
    from palimpsest.cli import app

    lines = [line for block in blocks(name, "sh") for line in block.splitlines()]
    assert len(lines) >= 3
    for line in lines:
        app.parse_args(shlex.split(line, comments=True)[1:], print_error=False, exit_on_error=False)
