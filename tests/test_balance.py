"""Balancing experts: the quantile by its definition, once per step however it is cut, bounded for ever, and it balances."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import palimpsest as pal
from palimpsest.balance import BINS, Balancer, Histogram, quantile_bias, sign_bias
from palimpsest.moe import Router, route
from palimpsest.train import Trainer, backward
from tests.conftest import make_ids, make_model, relative


def skewed(tokens: int, experts: int, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, experts, generator=draw) + torch.linspace(2, -2, experts)
    return torch.sigmoid(logits)


def violation(scores: torch.Tensor, bias: torch.Tensor, top_k: int) -> float:
    load = (scores + bias).topk(top_k, -1).indices.flatten().bincount(minlength=scores.shape[1]).double()
    return float(load.max() / load.mean()) - 1


def biases(model: pal.Model) -> list[torch.Tensor]:
    return [module.e_score_correction_bias.detach().clone() for module in model.modules() if isinstance(module, Router)]


def test_quantile_by_hand() -> None:
    """Three tokens, three experts, one chosen: expert j gets the 1/3 quantile of second-best - own score, less the mean."""
    scores = torch.tensor([[0.9, 0.5, 0.1], [0.8, 0.6, 0.2], [0.7, 0.3, 0.4]])
    gaps = torch.tensor([[-0.4, 0.0, 0.4], [-0.2, 0.0, 0.4], [-0.3, 0.1, 0.0]])  # cutoffs 0.5, 0.6, 0.4
    share = 2 / 3  # of the way between the first and the second of three sorted values: position (3 - 1) / 3
    fair = torch.stack([torch.lerp(low, high, share) for low, high, _ in (column.sort().values for column in gaps.T)])
    assert torch.allclose(quantile_bias(scores, torch.zeros(3), 1), fair - fair.mean(), atol=1e-6)


@settings(max_examples=30)
@given(
    tokens=st.integers(40, 400),
    experts=st.integers(2, 12),
    cuts=st.lists(st.integers(0, 400), max_size=4),
    seed=st.integers(0, 99),
)
def test_the_histogram_is_the_quantile_to_a_bin_and_adds_up(tokens: int, experts: int, cuts: list[int], seed: int) -> None:
    top_k = 1 + seed % (experts - 1)
    scores, bias = skewed(tokens, experts, seed), torch.linspace(-0.2, 0.2, experts)
    whole, parts = Histogram(bias, top_k), Histogram(bias, top_k)
    whole.add(scores)
    for piece in scores.tensor_split(sorted(min(cut, tokens) for cut in cuts)):
        parts.add(piece)
    assert torch.equal(whole.counts, parts.counts) and torch.equal(whole.result(), parts.result())
    assert abs(float(whole.result().mean())) < 1e-6
    # torch interpolates between neighbouring values, the histogram inside a bin: they differ by the gap between tokens.
    cutoffs = (scores + bias).topk(top_k + 1, -1).values[:, -1:]
    ordered = (cutoffs - scores).sort(0).values
    place = top_k / experts * tokens
    low, high = ordered[max(math.ceil(place) - 2, 0)], ordered[min(math.ceil(place), tokens - 1)]
    gap = float((high - low).max()) + 3 * (2 + 0.4) / BINS
    assert (whole.result() - quantile_bias(scores, bias, top_k)).abs().max() < 2 * gap


@pytest.mark.parametrize("rule", ["quantile", "sign"])
def test_loads_become_equal(rule: str) -> None:
    scores, bias = skewed(4096, 16), torch.zeros(16)
    before = violation(scores, bias, 2)
    for _ in range(10 if rule == "quantile" else 400):
        if rule == "quantile":
            histogram = Histogram(bias, 2)
            histogram.add(scores)
            bias = histogram.result()
        else:
            load = (scores + bias).topk(2, -1).indices.flatten().bincount(minlength=16)
            bias = sign_bias(bias, load, 3e-3)
    assert before > 2 and violation(scores, bias, 2) < 0.1


def test_the_bias_stays_bounded() -> None:
    """R076: one expert always hot, 10,000 updates: the mean stays zero, and taking it out changes no choice."""
    bias, load = torch.zeros(4), torch.tensor([10, 1, 1, 1])
    for _ in range(10_000):
        bias = sign_bias(bias, load, 1e-3)
    assert abs(float(bias.mean())) < 1e-4
    logits = torch.randn(50, 4)
    assert torch.equal(route(logits, bias, 2)[0], route(logits, bias + 1.0, 2)[0])


@pytest.mark.parametrize("rule", ["quantile", "sign"])
def test_once_a_step_whatever_the_accumulation(rule: str) -> None:
    """R070: four micro-batches of one sequence move the bias as one batch of four does, once."""
    tokens = np.random.default_rng(0).integers(0, 257, 3000)
    found = []
    for batch, accumulation in ((4, 1), (2, 2), (1, 4)):
        values = {"batch_size": batch, "accumulation": accumulation, "context_length": 32, "moe_balance": rule}
        settings = pal.TrainConfig.from_dict({**values, "moe_balance_rate": 0.01})
        trainer = Trainer(make_model("kimi-k3-tiny"), settings, tokens)
        start = biases(trainer.model)
        trainer.step()
        found.append(biases(trainer.model))
        assert all(not torch.equal(a, b) for a, b in zip(start, found[-1], strict=True))
        for metric in ("moe_max_violation", "moe_idle_experts"):
            assert trainer.balancer.metrics()[metric] >= 0
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert relative(a, b) < 1e-5


def test_recomputed_tokens_count_once() -> None:
    model = make_model("kimi-linear-tiny").train()
    ids = make_ids(model, 2, 24)
    seen = []
    for recompute in (False, True):
        balancer = Balancer(model, pal.TrainConfig())
        hidden = model.embed_tokens(ids)
        block = next(layer for layer in model.layers if isinstance(getattr(layer.mlp, "gate", None), Router))
        mlp: Any = block.mlp
        y = checkpoint(mlp, hidden, use_reentrant=False) if recompute else mlp(hidden)
        y.square().sum().backward()
        seen.append(torch.stack(balancer.loads))
        assert int(seen[-1].sum()) == 48 * model.config.num_experts_per_token
    assert torch.equal(*seen)


def test_only_training_moves_the_bias() -> None:
    model = make_model("kimi-k3-tiny")
    start, ids = biases(model), make_ids(model, 2, 16)
    tokens = np.random.default_rng(0).integers(0, 257, 500)
    for rule in ("none", "quantile"):
        trainer = Trainer(model, pal.TrainConfig.from_dict({"moe_balance": rule, "context_length": 32}), tokens, tokens)
        trainer.evaluate()
        model.train()
        backward(model, [(ids, ids, None)])
        model.eval()(ids)
        if rule == "none":
            trainer.step()
        assert all(torch.equal(a, b) for a, b in zip(start, biases(model), strict=True))


def test_a_step_without_tokens_and_experts_without_choice() -> None:
    """Nothing seen, and every expert chosen anyway: the bias stays, and nothing is NaN."""
    model = make_model("kimi-k3-tiny")
    start = biases(model)
    balancer = Balancer(model, pal.TrainConfig())
    balancer.begin()
    balancer.end()
    assert all(torch.equal(a, b) for a, b in zip(start, biases(model), strict=True)) and balancer.metrics() == {}
    everyone = make_model("kimi-k3-tiny", num_experts_per_token=pal.ModelConfig.preset("kimi-k3-tiny").num_experts).train()
    start = biases(everyone)
    balancer = Balancer(everyone, pal.TrainConfig())
    ids = make_ids(everyone, 1, 8)
    everyone(ids)
    balancer.end()
    assert all(torch.equal(a, b) for a, b in zip(start, biases(everyone), strict=True))
    even = [[1.0, 1.0, 1.0]] * everyone.config.mlps.count("moe")
    assert balancer.metrics() == {"moe_max_violation": 0.0, "moe_idle_experts": 0, "moe_load": even}
