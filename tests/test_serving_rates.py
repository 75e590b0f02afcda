"""What `palimpsest benchmark serve` measures, on a small model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import palimpsest as pal
from palimpsest import serving_rates, soak
from palimpsest.cli import main
from palimpsest.tokenizer import Tokenizer


def test_rates_and_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = serving_rates.preset("kimi-linear-tiny", vocab_size=257)
    monkeypatch.setattr(serving_rates, "preset", lambda *_, **__: tiny)
    monkeypatch.setattr(serving_rates, "CONCURRENT", (1, 4))
    monkeypatch.setattr(serving_rates, "REPEATS", 1)
    monkeypatch.setattr(serving_rates, "DRAWN_TOKENS", 8)
    monkeypatch.setattr(serving_rates, "REUSED_TOKENS", 1024)
    assert main(["benchmark", "serve", "--out", str(tmp_path / "serve.json"), "--soak-s", "0"]) == 0
    written = json.loads((tmp_path / "serve.json").read_text(encoding="utf-8"))
    assert written["machine"]["torch"] == torch.__version__ and "soak" not in written
    rates = written["rates"]["kimi-linear-65m"]
    assert [row["concurrent"] for row in rates["throughput"]] == [1, 4]
    assert all(0 < row["lowest"] <= row["tokens_per_s"] <= row["highest"] for row in rates["throughput"])
    assert rates["first_token"]["cached_tokens"] == 1024 and 0 < rates["first_token"]["share"] < 1
    assert "xllamacpp" in written["llama_cpp"]["kimi-linear-65m"]["skipped"]
    assert main(["benchmark", "serve", "--out", str(tmp_path / "x"), "--clients", "0"]) == 2


def test_beside_llama_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same prompts and as many tokens for both; the ratio is of medians; other models are left out, with a reason."""
    asked: list[tuple[int, set[int], int]] = []

    class Stub:
        def __init__(self, path: Path) -> None:
            assert path.read_bytes()[:4] == b"GGUF"

        def together(self, prompts: list[tuple[int, ...]], count: int, threads: int) -> tuple[list[list[int]], float]:
            asked.append((len(prompts), {len(prompt) for prompt in prompts}, count))
            return [[0] * count for _ in prompts], 0.5

    monkeypatch.setattr("palimpsest.llama_cpp.is_installed", lambda: True)
    monkeypatch.setattr("palimpsest.llama_cpp.Llama", Stub)
    monkeypatch.setattr(serving_rates, "REPEATS", 1)
    monkeypatch.setattr(serving_rates, "DRAWN_TOKENS", 4)
    monkeypatch.setattr(serving_rates, "throughput", lambda engine, count, repeat: 24.0 * count)
    lines: list[str] = []
    found = serving_rates.beside_llama_cpp(*serving_rates.preset("kimi-linear-tiny", vocab_size=257), lines.append)
    assert found.keys() == {"f32", "q8_0"} and len(lines) == 6
    assert [row["concurrent"] for row in found["q8_0"]] == [1, 4, 16]
    assert all(row["ratio"] == 3.0 for rows in found.values() for row in rows)
    assert asked == [(count, {64}, 4) for count in (1, 4, 16) for _ in range(2)] * 2
    other = serving_rates.beside_llama_cpp(*serving_rates.preset("deltanet-tiny", vocab_size=257), lines.append)
    assert other.keys() == {"skipped"} and lines[-1] == f"llama.cpp left out: {other['skipped']}"


@pytest.mark.slow
def test_a_server_under_good_and_bad_clients(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = pal.Model(pal.ModelConfig.preset("kimi-k3-tiny", vocab_size=257, initializer_range=0.2)).eval()
    pal.save(model, tmp_path / "tiny", Tokenizer.bytes())
    result = soak.soak(tmp_path / "tiny", model, Tokenizer.bytes(), 24, 4.0)
    assert result["wrong"] == [] and result["exit_status"] == 130
    assert result["requests"] > 100 and len(result["by_manner"]) == len(soak.MANNERS)
