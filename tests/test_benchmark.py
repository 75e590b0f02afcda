"""What is timed is what is said to be timed, and bytes come from real states."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import palimpsest as pal
from palimpsest import benchmark, benchmark_commands, benchmark_gpu, ops


def test_bytes_grow_with_every_token_for_attention_and_stay_for_recurrent_memories():
    torch.manual_seed(0)
    contexts = [4, 8, 24]
    held, times = benchmark.decode(pal.Model(pal.ModelConfig.preset("gpt2-tiny")), contexts, repeats=1)
    per_token = 4 * 2 * 64 * 4  # layers, keys and values, width, bytes of float32
    assert [row["bytes"] for row in held] == [context * per_token for context in contexts]
    assert [row["kv"] for row in held] == [row["bytes"] for row in held]
    assert [row["context"] for row in times] == contexts
    assert all(row["ms"] > 0 for row in times)
    held, _ = benchmark.decode(pal.Model(pal.ModelConfig.preset("kda-tiny")), contexts, repeats=1)
    assert len({row["bytes"] for row in held}) == 1
    assert held[0]["bytes"] == held[0]["recurrent"] + held[0]["conv"]
    assert held[0]["recurrent"] == 4 * 4 * 16 * 24 * 4  # layers, heads, K, V, bytes


def test_operations_per_token_match_the_formula_at_published_points():
    # lineage specification: 6 d^2 + 10 C d + C^2 / 3 at d = 128
    assert benchmark.chunk_flops(16, 128, 128) == 118869
    assert benchmark.chunk_flops(64, 128, 128) == 181589
    assert benchmark.chunk_flops(256, 64, 64) == 210261


def test_the_sweep_measures_every_chunk():
    result = benchmark.chunk_sweep([8, 32], tokens=64, heads=1, dim=8, repeats=1)
    assert [row["chunk"] for row in result["rows"]] == [8, 32]
    assert all(row["ms"] > 0 for row in result["rows"])


def test_the_median_ignores_the_first_run():
    calls = []
    benchmark.median_seconds(lambda: calls.append(1), repeats=3)
    assert len(calls) == 4


def test_the_gpu_benchmark_is_refused_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark_gpu, "available", lambda: False)
    with pytest.raises(pal.InputError, match="benchmark gpu: cannot run here: "):
        benchmark_commands.gpu(out=tmp_path / "gpu.json")
    assert not (tmp_path / "gpu.json").exists()


def test_the_gpu_benchmark_keeps_every_row_as_it_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "gpu.json"

    def rows() -> Iterator[dict[str, Any]]:
        yield {"work": "first", "ms": 1.0}
        assert [row["work"] for row in json.loads(out.read_text())["rows"]] == ["first"]
        yield {"work": "second", "ms": 2.0}
        raise KeyboardInterrupt

    monkeypatch.setattr(ops, "backends", lambda: [("triton", True, "")])
    monkeypatch.setattr(benchmark_gpu, "available", lambda: True)
    monkeypatch.setattr(benchmark_gpu, "device", lambda: {"name": "none"})
    monkeypatch.setattr(benchmark_gpu, "timings", rows)
    with pytest.raises(KeyboardInterrupt):
        benchmark_commands.gpu(out=out)
    assert [row["work"] for row in json.loads(out.read_text())["rows"]] == ["first", "second"]
    benchmark_commands.gpu(out=out, minutes=1e-9)
    assert [row["work"] for row in json.loads(out.read_text())["rows"]] == ["first"]
    with pytest.raises(pal.InputError, match="--minutes 0"):
        benchmark_commands.gpu(out=out, minutes=0)


def test_floors_count_every_input_and_output_once() -> None:
    # q, k, v, g and o of two bytes, beta, and a float32 state
    assert benchmark_gpu.floor_ms("kda", 1, 10, 2, 1e3) == (2 * 10 * 2 * (5 * 128 + 1) + 4 * 2 * 128 * 128)
