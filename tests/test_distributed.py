"""A step on any mesh of processes is the step of one process, and so is what it leaves behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import palimpsest as pal
from palimpsest import distributed, lora
from palimpsest.config import LoraConfig, MeshConfig
from palimpsest.gradients import backward, split_documents
from palimpsest.tokenizer import Tokenizer
from palimpsest.train import Trainer
from tests.conftest import make_ids, make_model
from tests.processes import run

EOS, LAYERS = 5, 4
# (data, expert, context, and perhaps tensor), preset, whether documents are apart, whether sublayers are recomputed
CASES: dict[int, list[tuple[tuple[int, ...], str, bool, bool]]] = {
    2: [
        ((2, 1, 1), "gpt2-tiny", True, True),
        ((1, 2, 1), "kimi-k3-tiny", False, False),
        ((1, 2, 1), "qwen3-next-tiny", True, True),
        ((1, 1, 2), "kimi-k3-tiny", True, True),
        ((1, 1, 2), "qwen3-next-tiny", False, False),
        ((1, 1, 2), "linear-attention-tiny", True, False),
        ((1, 1, 2), "deltanet-tiny", False, False),
        ((1, 1, 1, 2), "gpt2-tiny", True, True),
        ((1, 1, 1, 2), "kimi-k3-tiny", False, False),
        ((1, 1, 1, 2), "qwen3-next-tiny", True, True),
        ((1, 1, 1, 2), "linear-attention-tiny", True, False),
        ((1, 1, 1, 2), "deltanet-tiny", False, False),
    ],
    4: [
        ((1, 4, 1), "kimi-linear-tiny", False, False),
        ((1, 1, 4), "kda-tiny", False, False),
        ((2, 1, 2), "smollm2-tiny", True, False),
        ((1, 2, 2), "kimi-k3-tiny", True, True),
        ((2, 1, 1, 2), "smollm2-tiny", True, False),
        ((2, 1, 1, 2), "gated-deltanet-tiny", False, True),
        ((1, 2, 1, 2), "kimi-linear-tiny", True, False),
        ((1, 1, 2, 2), "kimi-k3-tiny", False, False),
    ],
}


def batch(
    model: pal.Model, packed: bool, sizes: tuple[int, ...], rows: Any = lambda x: x
) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    """Two micro-batches, the second with ignored labels. Three rows for each part of a batch, with documents of 4, 22 and 6
    tokens, so that stretches of the packed rows begin inside documents."""
    found = []
    for seed in (1, 2):
        ids = rows(make_ids(model, 3 * sizes[0] * sizes[1], 32, seed=seed))
        ids[:, [3, 25]] = EOS
        labels = ids.clone()
        if seed == 2:
            labels[:, 3:9] = -100
        bounds = None
        if packed:
            ids, bounds = split_documents(ids, EOS)
            labels = labels.reshape(1, -1)
        found.append((ids, labels, bounds))
    return found


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference of any gradient, relative to that gradient's largest value; some are zero but for rounding."""
    assert found.keys() == expected.keys()
    floor = 1e-4 * max(float(x.abs().max()) for x in expected.values())
    return max(float((found[n] - x).abs().max() / x.abs().max().clamp(min=floor)) for n, x in expected.items())


def gradients(rank: int, cases: list[Any]) -> list[dict[str, float]]:
    results = []
    for number, (sizes, preset, packed, recompute) in enumerate(cases):
        began = time.perf_counter()
        model = make_model(preset, dtype=torch.float64, num_hidden_layers=LAYERS).train()
        model.recompute = recompute
        expected_loss = backward(model, batch(model, packed, sizes))
        expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        world = distributed.join(MeshConfig(*sizes), torch.device("cpu"))
        distributed.spread(model, world)
        loss = backward(model, batch(model, packed, sizes, world.rows), world=world)
        found = {n: distributed.full(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        whole = dict(distributed.whole(model, world).named_parameters())
        low = single(preset, sizes, packed) if number in (1, 3) or sizes[3:] else 0.0
        cut = model.get_parameter("layers.0.mixer.o_proj.weight").placements  # type: ignore[attr-defined]
        assert len(cut) == (2 if sizes[3:] else 1) and all(x.is_shard() for x in cut)
        fresh = make_model(preset, dtype=torch.float64, num_hidden_layers=LAYERS)
        results.append(
            {
                "loss": abs(loss - expected_loss) / expected_loss,
                "gradients": worst(found, expected),
                "weights": max(float((whole[n] - p).abs().max()) for n, p in fresh.named_parameters()),
                "float32": low,
                "seconds": time.perf_counter() - began,
            }
        )
    return results


def single(preset: str, sizes: tuple[int, ...], packed: bool) -> float:
    """The same in float32 and of adapters: the distance of all gradients together, relative to their size. With weights of
    usual size: large ones lose digits on one process already."""
    model = make_model(preset, num_hidden_layers=LAYERS, initializer_range=0.02).train()
    if not sizes[3:]:
        lora.add(model, LoraConfig(rank=2))
    with torch.no_grad():
        for adapter in lora.weights(model).values():
            adapter.normal_(0, 0.01)
    names = [name for name, _ in model.named_parameters()]
    backward(model, batch(model, packed, sizes))
    expected = torch.cat([p.grad.flatten().clone() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    world = distributed.join(MeshConfig(*sizes), torch.device("cpu"))
    distributed.spread(model, world)
    backward(model, batch(model, packed, sizes, world.rows), world=world)
    found = torch.cat([distributed.full(p.grad).flatten() for p in model.parameters() if p.grad is not None])
    assert [name for name, _ in distributed.whole(model, world).named_parameters()] == names
    return float((found - expected).norm() / expected.norm())


# Runs that one process begins, several go on with, and one ends: (mesh, preset, optimiser)
RUNS: dict[int, list[tuple[tuple[int, ...], str, str]]] = {
    2: [
        ((1, 2, 1), "kimi-k3-tiny", "adamw"),
        ((1, 1, 2), "kimi-linear-tiny", "muon"),
        ((1, 1, 1, 2), "kimi-k3-tiny", "muon"),
        ((1, 1, 1, 2), "gpt2-tiny", "adamw"),
    ],
    4: [((2, 2, 1), "qwen3-next-tiny", "muon"), ((2, 1, 1, 2), "qwen3-next-tiny", "adamw")],
}
TOKENS = np.random.default_rng(0).integers(0, 250, 3000)


def trainer(preset: str, optimizer: str, folder: Path, world: distributed.World | None = None) -> Trainer:
    model = make_model(preset, dtype=torch.float64, num_hidden_layers=LAYERS)
    config = pal.TrainConfig.from_dict(
        {"steps": 6, "batch_size": 4, "context_length": 32, "accumulation": 2, "warmup_steps": 2, "optimizer": optimizer}
        | {"eval_tokens": 150, "checkpoint_every": 0, "log_every": 2, "separate_documents": True}
    )
    return Trainer(model, config, TOKENS[:2700], TOKENS[2700:], folder, tokenizer=Tokenizer.bytes(), world=world)


def steps(run: Trainer, upto: int) -> list[float]:
    """Losses, and behind them the gradient norm and the validation loss in the end."""
    losses = []
    while run.steps_done < upto:
        losses.append(run.step())
    return [*losses, run.grad_norm, run.evaluate()]


def go_on(rank: int, runs: list[Any], folders: list[Path]) -> list[list[float]]:
    results = []
    for (sizes, preset, optimizer), folder in zip(runs, folders, strict=True):
        run = trainer(preset, optimizer, folder, distributed.join(MeshConfig(*sizes), torch.device("cpu")))
        assert run.resume() == 2
        results.append(steps(run, 4))
        run.save()
    return results


def work(rank: int, cases: list[Any], runs: list[Any], folders: list[Path]) -> tuple[Any, Any, Any]:
    """Everything at one start of processes."""
    return gradients(rank, cases), go_on(rank, runs, folders), refusals()


def refusals() -> list[str]:
    """What cannot be dealt out is refused before anything is changed."""
    lines = []
    world = distributed.World(MeshConfig(data=2, expert=1, context=3), torch.device("cpu"))
    model = make_model("kda-tiny", num_hidden_layers=1)
    for fields in ({"batch_size": 3}, {"context_length": 32}, {"context_length": 6}):
        with pytest.raises(pal.InputError) as caught:
            world.check(pal.TrainConfig.from_dict({"batch_size": 4, "context_length": 30, **fields}), model)
        lines.append(str(caught.value))
    with pytest.raises(pal.InputError) as caught:
        distributed.World(MeshConfig(expert=2), torch.device("cpu")).check(pal.TrainConfig(), model)
    wrong: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
        (3, {}, {}),
        (2, {"qk_clip": 100.0}, {}),
        (2, {}, {"linear_num_key_heads": 1, "linear_num_value_heads": 1}),
        (2, {}, {"intermediate_size": 33}),
    ]
    for sizes, fields, change in wrong:
        with pytest.raises(pal.InputError) as tensor:
            own = make_model("kda-tiny", num_hidden_layers=1, **change)
            distributed.World(MeshConfig(tensor=sizes), torch.device("cpu")).check(pal.TrainConfig.from_dict(fields), own)
        lines.append(str(tensor.value))
    lora.add(model, LoraConfig(rank=2))
    with pytest.raises(pal.InputError) as adapted:
        distributed.World(MeshConfig(tensor=2), torch.device("cpu")).check(pal.TrainConfig(), model)
    lines.append(str(adapted.value))
    with pytest.raises(pal.InputError) as other:
        distributed.start(MeshConfig(data=7))
    return [*lines, str(caught.value), str(other.value)]


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_processes_are_one(count: int, tmp_path: Path) -> None:
    """Loss and gradients to rounding; runs that change the number of processes on the way; nothing half-refused."""
    folders = [tmp_path / str(number) for number in range(len(RUNS[count]))]
    unbroken = []
    for (_, preset, optimizer), folder in zip(RUNS[count], folders, strict=True):
        unbroken.append(trainer(preset, optimizer, tmp_path / f"unbroken-{folder.name}"))
        first = trainer(preset, optimizer, folder)
        assert steps(first, 2) == steps(unbroken[-1], 2)
        first.save()
    found = run(count, work, CASES[count], RUNS[count], folders, timeout_s=300)
    for results, losses, lines in found:
        for case, errors in zip(CASES[count], results, strict=True):
            assert errors["loss"] < 1e-12, (case, errors)
            assert errors["gradients"] < 1e-10, (case, errors)
            assert errors["weights"] == 0, (case, errors)
            assert errors["float32"] < 1e-5, (case, errors)
        assert losses == found[0][1] and lines == found[0][2]
    for (_, preset, optimizer), folder, whole, losses in zip(RUNS[count], folders, unbroken, found[0][1], strict=True):
        close = 1e-9 if optimizer == "adamw" else 2e-3  # Muon works in bfloat16, where rounding shows
        assert losses == pytest.approx(steps(whole, 4), rel=close)
        last = trainer(preset, optimizer, folder)
        assert last.resume() == 4
        assert steps(last, 6) == pytest.approx(steps(whole, 6), rel=close)
    expected = ["batch_size is 3", "context_length is 32", "at least", "linear_num_key_heads, 2", "with qk_clip"]
    expected += ["linear_num_key_heads, 1", "intermediate_size, 33", "with adapters", "expert is 2", "torchrun"]
    for line, words in zip(found[0][2], expected, strict=True):
        assert words in line


@pytest.mark.slow
def test_torchrun_trains_and_another_number_goes_on(tmp_path: Path) -> None:
    """The command itself on two processes, then alone from its checkpoint, against a run that was alone throughout."""
    (tmp_path / "text.txt").write_text("To be, or not to be: that is the question.\n" * 200, encoding="utf-8")
    text = '[model]\npreset = "kimi-linear-tiny"\nnum_hidden_layers = 4\n[data]\ntext = "text.txt"\n[train]\nsteps = 4\n'
    text += "batch_size = 2\ncontext_length = 32\nlog_every = 1\ncheckpoint_every = 2\nwarmup_steps = 1\n"
    (tmp_path / "one.toml").write_text(text, encoding="utf-8")
    (tmp_path / "two.toml").write_text(text + "[mesh]\nexpert = 2\n", encoding="utf-8")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def command(launcher: list[str], *rest: str) -> None:
        argv = [sys.executable, *launcher, "-m", "palimpsest", "train", *rest]
        done = subprocess.run(argv, capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[1], timeout=120)
        assert done.returncode == 0, done.stderr[-3000:]

    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command(torchrun, str(tmp_path / "two.toml"), "--out", str(tmp_path / "two"))
    command([], str(tmp_path / "one.toml"), "--out", str(tmp_path / "one"))

    def losses() -> list[list[float]]:
        found = []
        for name in ("one", "two"):
            rows = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
            found.append([row["loss"] for row in rows if "loss" in row])
        return found

    one, two = losses()
    assert len(one) == 4 and two == pytest.approx(one, rel=1e-5)
    shutil.rmtree(tmp_path / "two" / "checkpoints" / "step-00000004")
    command([], str(tmp_path / "one.toml"), "--out", str(tmp_path / "two"), "--resume")
    one, two = losses()
    assert two == pytest.approx(one, rel=1e-5)
    model, tokenizer = pal.load(tmp_path / "two")
    assert tokenizer is not None and model.config.num_hidden_layers == 4
