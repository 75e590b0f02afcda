"""Muon: torch's own where nothing is cut, block by block where heads and experts are, AdamW for everything that is no map."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import palimpsest as pal
from palimpsest.muon import Muon, MuonAndAdamW, matrices, orthogonal
from palimpsest.optim import make_optimizer
from palimpsest.train import Trainer
from tests.conftest import TINY, make_ids, make_model, relative

VECTOR = re.compile(r"\.(b_proj|a_proj|shared_expert_gate)\.weight$|mlp\.gate\.weight$")
CONFIG = pal.TrainConfig(optimizer="muon", learning_rate=0.02, weight_decay=0.1, warmup_steps=0, schedule="constant")


def stepped(model: pal.Model, steps: int = 3) -> MuonAndAdamW:
    optimizer = make_optimizer(model, CONFIG)
    assert isinstance(optimizer, MuonAndAdamW)
    for seed in range(steps):
        optimizer.zero_grad()
        ids = make_ids(model, 2, 16, seed=seed)
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("preset", TINY)
def test_matrices_go_to_muon_and_everything_once(preset: str) -> None:
    """R086: chosen by the kind of module, so that no name is missed; every parameter in exactly one group."""
    model = pal.Model(pal.ModelConfig.preset(preset))
    optimizer = MuonAndAdamW(model, CONFIG, 0.1)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    assert sorted(names) == sorted(named)
    (ours,) = optimizer.muon.param_groups
    expected = [n for n in named if re.search(r"_proj(_with_mqa)?\.weight$|\.experts\.\w+_proj$", n) and not VECTOR.search(n)]
    assert sorted(ours["param_names"]) == sorted(expected)
    assert all(named[name].dim() in (2, 3) for name in ours["param_names"])
    assert {"embed_tokens.weight", "norm.weight"} <= set(names) - set(ours["param_names"])
    stepped(model)


def test_the_whole_matrix_is_torchs_muon() -> None:
    for shape in ((24, 24), (40, 16), (16, 40)):
        first, second = (torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0))) for _ in range(2))
        ours = Muon([{"params": [first], "param_names": ["w"], "blocks": [1], "weight_decay": 0.1}], 0.02)
        theirs = torch.optim.Muon([second], lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
        for seed in range(4):
            first.grad = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
            second.grad = first.grad.clone()
            ours.step()
            theirs.step()
            # Newton-Schulz runs in bfloat16, where another order of the same sums shows.
            assert relative(first, second) < 1e-3


def test_singular_values_become_one() -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonal(torch.randn(3, 12, 30)))
    assert values.min() > 0.5 and values.max() < 1.4
    assert not orthogonal(torch.zeros(2, 4, 5)).any(), "an idle expert's update is zero, not NaN"


def test_heads_and_experts_are_orthogonalised_apart() -> None:
    model = make_model("kimi-k3-tiny")
    heads = {name: count for name, count in matrices(model).items() if count > 1}
    config = model.config
    kda, mla = (next(i for i, mixer in enumerate(config.mixers) if mixer == kind) for kind in ("kda", "mla"))
    assert heads[f"layers.{kda}.mixer.v_proj.weight"] == config.linear_num_value_heads
    assert heads[f"layers.{mla}.mixer.q_b_proj.weight"] == heads[f"layers.{mla}.mixer.kv_b_proj.weight"]
    assert not any("o_proj" in name or "mlp" in name for name in heads)
    for shape, blocks, count in (((12, 8), 3, 3), ((4, 6, 8), 1, 4)):
        whole, gradient = torch.nn.Parameter(torch.randn(shape)), torch.randn(shape)
        gradient[: shape[0] // count] *= 1000  # one block shouts
        before, whole.grad = whole.detach().clone(), gradient
        Muon([{"params": [whole], "param_names": ["w"], "blocks": [blocks], "weight_decay": 0.0}], 0.1).step()
        moved = (before - whole.detach()).view(count, -1, shape[-1])
        alone = orthogonal(gradient.view(count, -1, shape[-1])) * 0.1 * 0.2 * math.sqrt(8)
        for part, expected in zip(moved, alone, strict=True):
            assert relative(part, expected) < 0.1  # bfloat16; orthogonalised together the quiet blocks would hardly move


def test_updates_have_the_size_of_adamws() -> None:
    """Root mean square 0.2 times the rate, whatever the shape of the matrix or the size of its gradient."""
    for shape in ((64, 64), (128, 32), (32, 256)):
        weight = torch.nn.Parameter(torch.zeros(shape))
        weight.grad = 1e-6 * torch.randn(shape)
        Muon([{"params": [weight], "param_names": ["w"], "blocks": [1], "weight_decay": 0.0}], 0.01).step()
        assert 0.7 < float(weight.detach().square().mean().sqrt()) / (0.01 * 0.2) < 1.2


def test_bfloat16_weights_move() -> None:
    model = make_model("kda-tiny").to(torch.bfloat16)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    state = stepped(model).named_state()
    assert all(tensor.dtype == torch.float32 for tensor in state.values())
    assert all(not torch.equal(before[name], p) for name, p in model.named_parameters())


def test_a_resumed_run_is_the_same_run(tmp_path: Path) -> None:
    """R080 with Muon: 6 steps, against 3 and 3 in a new trainer, bit for bit."""
    tokens = np.random.default_rng(0).integers(0, 257, 4000)
    settings = pal.TrainConfig(optimizer="muon", steps=6, batch_size=2, context_length=32, checkpoint_every=3)

    def fresh(folder: Path) -> Trainer:
        torch.manual_seed(0)
        return Trainer(pal.Model(pal.ModelConfig.preset("kimi-k3-tiny")), settings, tokens, folder=folder)

    whole = fresh(tmp_path / "whole")
    losses = [whole.step() for _ in range(6)]
    first = fresh(tmp_path / "cut")
    cut = [first.step() for _ in range(3)]
    first.save()
    second = fresh(tmp_path / "cut")
    assert second.resume() == 3
    cut += [second.step() for _ in range(3)]
    assert cut == losses
    for a, b in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(pal.InputError, match="optimizer"):
        Trainer(second.model, settings.replace(optimizer="adamw"), tokens, folder=tmp_path / "cut").resume()


def test_state_of_other_parameters_is_refused_and_changes_nothing() -> None:
    optimizer = stepped(make_model("kda-tiny"))
    held = {name: tensor.clone() for name, tensor in optimizer.named_state().items()}
    name = next(key for key in held if key.endswith(".momentum"))
    for wrong in ({**held, "other.momentum": torch.zeros(2)}, {**held, name: torch.zeros(3)}):
        zeroed = {key: torch.zeros_like(x) if key in held and x.shape == held[key].shape else x for key, x in wrong.items()}
        with pytest.raises(ValueError, match="optimiser state"):
            optimizer.load_named_state(zeroed)
        now = optimizer.named_state()
        assert all(torch.equal(now[key], tensor) for key, tensor in held.items())
