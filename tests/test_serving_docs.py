"""docs/serving.md: its table of fields is what the server does, its figures are those of recorded runs."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from palimpsest.cli import main
from palimpsest.server.requests import ChatBody, CompletionBody
from tests.test_server import HELLO, Served, serving

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")


def fields() -> dict[str, tuple[str, str]]:
    """What the table says of each field, for chat and for completions."""
    rows = re.findall(r"^\| `(\w+)` \| (yes|refused|) ?\| (yes|refused|) ?\|", PAGE, re.MULTILINE)
    return {name: (chat, completion) for name, chat, completion in rows}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving() as served:
        yield served


def test_the_table_has_every_field_of_the_interface() -> None:
    table = fields()
    theirs = set(chat_create_params.CompletionCreateParamsBase.__annotations__) | {"stream"}
    old = set(completion_create_params.CompletionCreateParamsBase.__annotations__) | {"stream"}
    assert {name for name, (chat, _) in table.items() if chat} == theirs | {"top_k"}
    assert {name for name, (_, completion) in table.items() if completion} == old | {"top_k"}
    assert {name for name, (chat, _) in table.items() if chat == "yes"} == ChatBody.model_fields.keys()
    assert {name for name, (_, completion) in table.items() if completion == "yes"} == CompletionBody.model_fields.keys()


def test_what_the_table_calls_refused_is(server: Served) -> None:
    refused = [name for name, (chat, _) in fields().items() if chat == "refused"]
    for name in refused:
        status, content = server.post(
            "/v1/chat/completions", json.dumps({"model": "tiny", "messages": HELLO, name: "x"}).encode()
        )
        assert status == 400 and content["error"]["message"] == f"{name} is not supported here; leave it out"


def figures() -> Any:
    spec = importlib.util.spec_from_file_location("serving_figures", ROOT / "benchmarks" / "serving_figures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_figures_are_those_of_the_recorded_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = figures()
    assert module.render(module.recorded()) in PAGE and PAGE.count(module.BEGIN) == 1
    throughput = [{"concurrent": 1, "tokens_per_s": 12.34, "lowest": 12.0, "highest": 13.0}]
    first = {"prompt_tokens": 2048, "cached_tokens": 2000, "cold_s": 1.5, "remembered_s": 0.0125}
    rates = {"prompt_tokens": 64, "drawn_tokens": 32, "repeats": 3, "throughput": throughput, "first_token": first}
    beside = {"tokens_per_s": {"median": 30.0}, "llama_cpp_tokens_per_s": {"median": 20.0}, "ratio": 1.5, "concurrent": 4}
    soak = {"clients": 8, "seconds": 3.0, "requests": 99, "number_wrong": 0, "resident_growth": 0.012}
    run = {
        "machine": {"processor": "P", "threads": 2, "torch": "2"},
        "created": "2026-01-02T03:04:05Z",
        "rates": {"m": rates},
        "llama_cpp": {"m": {"f32": [beside]}, "k": {"skipped": "no file"}},
        "soak": soak,
    }
    text = module.render({"serve.json": run})
    for says in (
        "| 1 | 12.3 | 12.0 | 13.0 |",
        "| f32 | 4 | 30.0 | 20.0 | 1.50 |",
        "2000 of them remembered 0.0125 s",
        "left out, no file",
        "8 clients for 3 s: 99 requests, 0 answered wrongly, resident memory of the second half +1.2 %",
    ):
        assert says in text.replace("\n", " ")
    page = tmp_path / "serving.md"
    page.write_text(f"before\n{module.BEGIN}\nold\n{module.END}\nbehind\n", encoding="utf-8")
    monkeypatch.setattr(module, "PAGE", page)
    monkeypatch.setattr(module, "recorded", lambda: {"serve.json": run})
    module.main()
    assert page.read_text(encoding="utf-8") == f"before\n{text}\nbehind\n"


def test_commands_on_the_page_parse(capsys: pytest.CaptureFixture[str]) -> None:
    """Up to the folder, which does not exist here."""
    blocks = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    commands = [shlex.split(line) for block in blocks for line in block.splitlines()]
    assert len(commands) == 4
    for _, command, folder, *flags in commands:
        port = ["--port", "0"] if command == "serve" else []
        assert main([command, folder, *flags, *port]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"palimpsest: {folder}: ") and error.count("\n") == 1, error
