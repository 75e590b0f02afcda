"""docs/lineage.md: its numbers are those of recorded rows, its rows those of the code, its pictures those of the rows."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import torch
from torch.nn import functional as F

import palimpsest as pal
from palimpsest import guide
from palimpsest.cli import main

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "lineage.md").read_text(encoding="utf-8")
RECORDED: list[dict[str, Any]] = json.loads((ROOT / "benchmarks" / "memory.json").read_text(encoding="utf-8"))["rows"]
CITATION = re.compile(r"\[([^\]]+)\]\(\.\./benchmarks/([^?)#]+)\?([^)#]+)#([^)]+)\)")
UNITS = {"": 1.0, "%": 0.01, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}
KEYS = ("experiment", "memory", "keys", "pairs", "later", "preset", "context", "sublayer")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


def rows_of(name: str) -> list[dict[str, Any]]:
    content = json.loads((ROOT / "benchmarks" / name).read_text(encoding="utf-8"))
    return content if isinstance(content, list) else content["rows"]


def cited(name: str, query: str, fragment: str) -> float:
    """The value that a citation points at; it must be one value of one row."""
    wanted = [part.split("=", 1) for part in query.split("&")]
    found = [row for row in rows_of(name) if all(str(row.get(key)) == unquote(value) for key, value in wanted)]
    assert len(found) == 1, f"{name}?{query} is {len(found)} rows"
    value: Any = found[0]
    for part in fragment.split("/"):
        value = value[unquote(part)]
    return float(value)


def shown(text: str) -> tuple[float, float]:
    """The number that a text shows, and half a unit of its last digit: `74.07 %` is 0.7407 and 0.00005."""
    match = re.fullmatch(r"(-?[\d,]+(?:\.(\d+))?)(?:e([+-]\d+))? ?(%|[KMG]iB|)", text)
    assert match, f"{text!r} is not a number with a known unit"
    factor = UNITS[match[4]] * 10.0 ** int(match[3] or 0)
    return float(match[1].replace(",", "")) * factor, 0.5 * 10.0 ** -len(match[2] or "") * factor


def wrong(text: str) -> Iterator[str]:
    for match in CITATION.finditer(text):
        number, half = shown(match[1])
        value = cited(match[2], match[3], match[4])
        if abs(value - number) > half * (1 + 1e-9):
            yield f"{match[0]} should be {value}"


def test_every_citation_is_a_row_and_says_its_number() -> None:
    assert len(CITATION.findall(TEXT)) >= 50 and {name for _, name, *_ in CITATION.findall(TEXT)} >= {"memory.json"}
    assert TEXT.count("](../benchmarks/") == len(CITATION.findall(TEXT))
    assert list(wrong(TEXT)) == []


def test_a_wrong_number_or_row_would_be_noticed() -> None:
    link = "(../benchmarks/memory.json?experiment=load&memory=additive&keys=random&pairs=64#error)"
    assert list(wrong(f"[0.99]{link}")) == []
    assert len(list(wrong(f"[0.98]{link}"))) == 1 and len(list(wrong(f"[99 %]{link} [98 %]{link}"))) == 1
    for broken in (link.replace("pairs=64", "pairs=63"), link.replace("&pairs=64", "")):
        with pytest.raises(AssertionError, match="rows"):
            list(wrong(f"[0.99]{broken}"))


def test_experiments_say_no_number_without_a_row() -> None:
    sections = re.findall(r"^### Experiment\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert len(sections) == 7
    # Set, not measured: channels, a cosine, a decay, a logit, pairs; named things.
    told = r"64\s+(?:channels|pairs)|16\s+keys|decay\s+of\s+-0\.05|logits\s+of\s+32|\(n - 1\)/K|would have 1\."
    allowed = re.compile(rf"GPT-2|K3|float32|bfloat16|{told}")
    for section in sections:
        rest = allowed.sub("", CITATION.sub("", section))
        assert re.findall(r"[^\s(]*\d[^\s)]*", rest) == []


def test_recorded_rows_are_what_the_code_gives() -> None:
    found = guide.measure()
    names = [tuple(row.get(key) for key in KEYS) for row in RECORDED]
    assert names == [tuple(row.get(key) for key in KEYS) for row in found] and len(set(names)) == len(names)
    for ours, held in zip(found, RECORDED, strict=True):
        assert ours.keys() == held.keys()
        for key, value in held.items():
            assert ours[key] == (pytest.approx(value, rel=1e-6, abs=1e-9) if isinstance(value, float) else value)


def row(**keys: Any) -> dict[str, Any]:
    (found,) = [each for each in RECORDED if all(each.get(key) == value for key, value in keys.items())]
    return found


def test_memories_follow_their_equations() -> None:
    for later in guide.LATER:
        faded = math.exp(guide.DECAY * later)
        ghost = {memory: row(experiment="ghost", memory=memory, later=later)["read"] for memory in guide.MATRICES}
        start = {memory: row(experiment="ghost", memory=memory, later=0)["read"] for memory in guide.MATRICES}
        assert ghost["gated"] == pytest.approx(start["gated"] * faded, rel=1e-6)
        assert (ghost["delta"], ghost["additive"]) == pytest.approx((start["delta"], start["additive"]), rel=1e-6)
        needle = {memory: row(experiment="needle", memory=memory, later=later) for memory in guide.MATRICES}
        assert needle["gated"]["needle_error"] == pytest.approx(1 - faded, abs=1e-9)
        for memory in ("additive", "delta", "per_channel"):
            assert needle[memory]["needle_error"] < 1e-12
    for pairs in guide.PAIRS[3:]:
        error = row(experiment="load", memory="additive", keys="random", pairs=pairs)["error"]
        assert error == pytest.approx(math.sqrt((pairs - 1) / guide.KEY_DIM), rel=0.12)


def test_softmax_and_ghost_by_a_loop() -> None:
    draw = torch.Generator().manual_seed(0)
    keys = F.normalize(torch.randn(guide.TRIALS, 16, guide.KEY_DIM, generator=draw, dtype=torch.float64), dim=-1)
    values = torch.randn(guide.TRIALS, 16, guide.KEY_DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    missed = size = 0.0
    for k, v in zip(keys, values, strict=True):
        for s in range(16):
            weights = [math.exp(guide.SHARPNESS * float(k[s] @ k[t])) for t in range(16)]
            read = sum(w * v[t] for t, w in enumerate(weights)) / sum(weights)
            missed += float((read - v[s]).square().sum())
            size += float(v[s].square().sum())
    expected = math.sqrt(missed / size)
    assert row(experiment="load", memory="softmax", keys="random", pairs=16)["error"] == pytest.approx(expected, rel=1e-6)


def test_bytes_are_those_of_real_states() -> None:
    config = pal.ModelConfig.preset("kda-124m", num_hidden_layers=1, vocab_size=64)
    model = pal.Model(config).to(torch.bfloat16)
    state = model(torch.zeros(1, 3, dtype=torch.long)).state
    held = row(experiment="carried", preset="kda-124m", context=1024)
    assert held["fixed_bytes"] == 12 * state.num_bytes() == held["bytes"] and held["bytes_per_token"] == 0
    for preset in ("kimi-linear-48b", "kimi-k3"):
        found = row(experiment="break-even", preset=preset)
        fixed = row(experiment="carried", preset=preset, context=1024)["fixed_bytes"]
        hybrid = [fixed + found["bytes_per_token"] * (found["tokens"] + i) for i in (-1, 0)]
        exact = [found["exact_bytes_per_token"] * (found["tokens"] + i) for i in (-1, 0)]
        assert hybrid[0] > exact[0] and hybrid[1] <= exact[1]
        assert found["exact_bytes_per_token"] * found["exact_layers"] == found["bytes_per_token"] * found["layers"]
    sources = [each for each in RECORDED if each["experiment"] == "sources"]
    layers = pal.ModelConfig.preset("kimi-k3").num_hidden_layers
    assert len(sources) == 2 * layers + 1 and [each["all"] for each in sources] == list(range(1, 2 * layers + 2))
    # Twelve layers a block; the embedding is one by itself, and the running sum is one more but where a block begins.
    expected = [1 + math.ceil((s // 2) / 12) if s % 2 == 0 else 2 + (s // 2) // 12 for s in range(2 * layers + 1)]
    assert [each["blocks"] for each in sources] == expected


def test_pictures_are_drawn_from_the_recorded_rows(tmp_path: Path) -> None:
    written = guide.draw(RECORDED, tmp_path)
    names = {path.name for path in written}
    assert names == {path.name for path in (ROOT / "docs" / "lineage").iterdir()}
    assert re.findall(r"\(lineage/([^)]+)\)", TEXT) == [path.name for path in written]
    for path in written:
        content = path.read_text(encoding="utf-8")
        assert content == (ROOT / "docs" / "lineage" / path.name).read_text(encoding="utf-8")
        assert "http" not in content.replace("http://www.w3.org", "") and "<script" not in content and len(content) < 25_000


def test_the_code_runs() -> None:
    code = blocks("python")
    assert len(code) == 7
    namespace: dict[str, object] = {}
    for block in code:
        exec(compile(block, "lineage.md", "exec"), namespace)


def test_the_commands_parse() -> None:
    from palimpsest.cli import app

    lines = [line for block in blocks("sh") for line in block.splitlines()]
    assert len(lines) >= 4
    for line in lines:
        app.parse_args(shlex.split(line, comments=True)[1:], print_error=False, exit_on_error=False)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guide, "measure", lambda: RECORDED)
    out = tmp_path / "memory.json"
    assert main(["benchmark", "memory", "--out", str(out), "--pictures", str(tmp_path)]) == 0
    assert json.loads(out.read_text())["rows"] == RECORDED and (tmp_path / "kda.svg").exists()
    capsys.readouterr()
    assert main(["benchmark", "memory", "--out", str(out), "--pictures", str(tmp_path / "none")]) == 2
    assert "there is no such folder" in capsys.readouterr().err
