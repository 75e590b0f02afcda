"""Memory of a training step: what autograd keeps to within a per cent, the measured peak within ten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import palimpsest as pal
from palimpsest.config import TrainConfig
from palimpsest.ops import cpu
from palimpsest.optim import make_optimizer
from palimpsest.plan import training
from tests.conftest import TINY, make_ids

BACKENDS = ["chunked", *(["cpu"] if cpu.library()[0] is not None else [])]


@pytest.fixture(params=BACKENDS)
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the compiled backend runs."""
    if request.param == "chunked":
        monkeypatch.setattr(cpu, "library", lambda: (None, "left out of this test"))
    return request.param == "cpu"


def kept_bytes(model: pal.Model, batch: int, tokens: int) -> int:
    """Bytes of the distinct storages that autograd saves, parameters apart."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    seen: dict[int, torch.Tensor] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        place = x.untyped_storage().data_ptr()
        if place not in own:
            seen.setdefault(place, x)
        return x

    ids = make_ids(model, batch, tokens)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = model.loss(ids, ids)
    assert loss.requires_grad
    return sum(x.untyped_storage().nbytes() for x in seen.values())


def peak_bytes(model: pal.Model, batch: int, tokens: int, optimizer: str, accumulation: int) -> int:
    """The most bytes that torch's allocator held during a step, weights and optimiser included."""
    ids = make_ids(model, batch, tokens)
    update = make_optimizer(model, TrainConfig(optimizer=optimizer))  # type: ignore[arg-type]

    def step() -> None:
        update.zero_grad()
        for _ in range(accumulation):
            model.loss(ids, ids).backward()
        update.step()

    step()
    update.zero_grad()
    held = [*model.parameters(), *update.named_state().values()]
    return allocated(step, sum(x.numel() * x.element_size() for x in held))


def allocated(step: Callable[[], Any], now: int) -> int:
    """The most bytes that torch's allocator held during a step that began with `now`."""
    peak = now
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as recorded:
        step()
    assert recorded.profiler is not None and recorded.profiler.kineto_results is not None
    events: list[Any] = recorded.profiler.kineto_results.events()
    for event in events:
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize(("batch", "tokens"), [(8, 256), (3, 100)])
def test_what_autograd_keeps(name: str, batch: int, tokens: int, compiled: bool) -> None:
    model = pal.Model(pal.ModelConfig.preset(name))
    planned = training.activations(model.config, batch, tokens, "f32", compiled=compiled)
    planned += training.loss(model.config, batch, tokens, "f32")[0]
    assert planned == pytest.approx(kept_bytes(model, batch, tokens), rel=0.01)


FEATURES: list[dict[str, Any]] = [
    {"linear_feature_map": "product", "linear_output_norm": True},
    {"linear_feature_map": "relu"},
    {"linear_conv_kernel_dim": 0},
]


@pytest.mark.parametrize("fields", FEATURES, ids=["product", "relu", "no convolution"])
def test_what_unusual_memories_keep(fields: dict[str, Any], compiled: bool) -> None:
    model = pal.Model(pal.ModelConfig.preset("linear-attention-tiny", **fields))
    planned = (
        training.activations(model.config, 8, 256, "f32", compiled=compiled) + training.loss(model.config, 8, 256, "f32")[0]
    )
    assert planned == pytest.approx(kept_bytes(model, 8, 256), rel=0.02)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", TINY)
def test_the_peak_of_a_step(name: str, recompute: bool, compiled: bool) -> None:
    model = pal.Model(pal.ModelConfig.preset(name))
    model.recompute = recompute
    planned = training.training_memory(model.config, 8, 256, recompute=recompute, compiled=compiled)
    assert planned["peak"] == pytest.approx(peak_bytes(model, 8, 256, "adamw", 1), rel=0.1)


@pytest.mark.parametrize(
    ("name", "optimizer", "accumulation", "fields"),
    [
        ("kda-tiny", "muon", 2, {"hidden_size": 256}),
        ("gpt2-tiny", "adamw", 2, {"hidden_size": 256, "head_dim": 64, "vocab_size": 8192}),
        ("kimi-k3-tiny", "adamw", 2, {"vocab_size": 4096}),
        ("smollm2-tiny", "muon", 1, {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 128}),
    ],
)
def test_the_peak_with_other_optimisers_and_sizes(name: str, optimizer: str, accumulation: int, fields: dict[str, Any]) -> None:
    model = pal.Model(pal.ModelConfig.preset(name, **fields))
    compiled = cpu.library()[0] is not None
    planned = training.training_memory(model.config, 4, 128, "f32", optimizer, False, accumulation, compiled=compiled)
    assert planned["peak"] == pytest.approx(peak_bytes(model, 4, 128, optimizer, accumulation), rel=0.1)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("name", TINY)
def test_optimiser_bytes_are_those_of_its_state(name: str, dtype: str, optimizer: str) -> None:
    model = pal.Model(pal.ModelConfig.preset(name))
    model = model.to(torch.bfloat16) if dtype == "bf16" else model
    update = make_optimizer(model, TrainConfig(optimizer=optimizer))  # type: ignore[arg-type]
    ids = make_ids(model, 1, 8)
    model.loss(ids, ids).backward()
    update.step()
    live = sum(x.numel() * x.element_size() for key, x in update.named_state().items() if not key.endswith(".step"))
    assert training.optimizer_bytes(model.config, optimizer, dtype) == live


def test_sharding_cuts_what_it_names() -> None:
    config = pal.ModelConfig.preset("kda-124m")
    whole, optimizer, gradients, weights = (
        training.training_memory(config, 1, 64, "bf16", accumulation=2, sharding=kind, num_devices=8)
        for kind in training.SHARDINGS
    )
    assert optimizer["optimizer"] * 8 == whole["optimizer"] and optimizer["gradients"] == whole["gradients"]
    assert gradients["gradients"] * 8 == whole["gradients"] and gradients["weights"] == whole["weights"]
    assert whole["weights"] / 8 < weights["weights"] < whole["weights"] / 4
    assert weights["peak"] < gradients["peak"] < optimizer["peak"] < whole["peak"]
    assert len({row["activations"] for row in (whole, optimizer, gradients, weights)}) == 1


def test_a_planned_step_at_published_size_is_mostly_optimiser() -> None:
    planned = training.training_memory(pal.ModelConfig.preset("kimi-linear-48b"), 1, 4096, "bf16", recompute=True)
    assert planned["optimizer"] == pytest.approx(12 * 49_122_681_728, rel=1e-3)  # two moments and a float32 copy
    assert planned["peak"] > planned["weights"] + planned["gradients"] + planned["optimizer"]
