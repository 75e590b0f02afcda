"""Adapters: on every map of every kind of layer, nothing at first, merged into the same numbers, and never lost in silence."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import palimpsest as pal
from palimpsest import lora
from palimpsest.config import LoraConfig
from palimpsest.optim import make_optimizer
from tests.conftest import TINY, make_ids, make_model, relative

CONFIG = LoraConfig(rank=3, alpha=6.0)
# What is a matrix and still stays: tables, the head, taps, routers, queries over depth.
LEFT = re.compile(r"(embed_tokens|embed_positions|lm_head|_conv1d|mlp\.gate)\.weight$|_residual\.proj$")


def trained(model: pal.Model, steps: int = 3) -> pal.Model:
    """A few steps, after which every adapter matters."""
    optimizer = make_optimizer(model, pal.TrainConfig(learning_rate=0.02, warmup_steps=0))
    for seed in range(steps):
        optimizer.zero_grad()
        ids = make_ids(model, 2, 24, seed=seed)
        model.loss(ids, ids).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("preset", [*TINY, "product"])
def test_every_map_learns_and_merging_changes_nothing(preset: str) -> None:
    """R120: recurrent layers, their gates and experts are adapted; what is not is listed; merged = adapted."""
    fields: dict[str, Any] = {"linear_feature_map": "product", "linear_output_norm": True} if preset == "product" else {}
    model = make_model("linear-attention-tiny" if preset == "product" else preset, dtype=torch.float64, **fields)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    ids = make_ids(model, 2, 20)
    plain = model(ids).logits.detach()
    held = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    adapted, left = lora.add(model, CONFIG)
    matrices = {n.removesuffix(".weight") for n, s in shapes.items() if len(s) > 1 and not LEFT.search(n)}
    experts = {name.rpartition(".")[0] for name in matrices if ".experts." in name}
    assert set(adapted) == {name for name in matrices if ".experts." not in name} | experts
    assert set(left) == {name for name, shape in shapes.items() if len(shape) > 1 and LEFT.search(name)}
    assert torch.equal(model(ids).logits, plain)  # B is zero
    trained(model)
    moved = {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert moved.keys() == lora.weights(model).keys()
    assert all(bool(x.any()) for name, x in moved.items() if "lora_b" in name)  # each has learned
    after = model(ids).logits.detach()
    assert relative(after, plain) > 1e-3
    lora.merge(model)
    assert {name: parameter.shape for name, parameter in model.named_parameters()} == shapes
    assert relative(model(ids).logits, after) < 1e-12
    same = {name for name, parameter in model.named_parameters() if torch.equal(parameter, held[name])}
    assert {name for name in shapes if len(shapes[name]) < 2} | set(left) == same
    assert all(p.requires_grad != n.endswith("e_score_correction_bias") for n, p in model.named_parameters())


def test_decoding_reads_the_adapted_weights() -> None:
    """MLA in its absorbed form takes the matrix itself."""
    model = make_model("kimi-linear-tiny", dtype=torch.float64)
    lora.add(model, CONFIG)
    trained(model)
    ids = make_ids(model, 1, 12)
    with torch.no_grad():
        whole, out = model(ids).logits, model(ids[:, :1])
        for t in range(1, 12):
            out = model(ids[:, t : t + 1], state=out.state)
        assert relative(out.logits[:, -1], whole[:, -1]) < 1e-10


def test_adapters_are_saved_alone_and_only_fit_their_model(tmp_path: Path) -> None:
    model = make_model("kimi-k3-tiny")
    ids = make_ids(model, 1, 16)
    lora.add(model, CONFIG)
    trained(model)
    lora.save(model, tmp_path / "adapter")
    size = sum(path.stat().st_size for path in (tmp_path / "adapter").iterdir())
    assert size < 1.3 * 4 * sum(x.numel() for x in lora.weights(model).values())
    fresh = lora.load(make_model("kimi-k3-tiny"), tmp_path / "adapter")
    assert torch.equal(fresh(ids).logits, model(ids).logits)
    other = make_model("kda-tiny")
    before = {name: (p.detach().clone(), p.requires_grad) for name, p in other.named_parameters()}
    with pytest.raises(pal.InputError, match="tensors do not fit this model, first 'layers"):
        lora.load(other, tmp_path / "adapter")
    assert lora.config_of(other) is None
    assert all(torch.equal(p, before[n][0]) and p.requires_grad == before[n][1] for n, p in other.named_parameters())
    with pytest.raises(pal.InputError, match="it exists"):
        lora.save(model, tmp_path / "adapter")
    with pytest.raises(pal.InputError, match="has adapters already"):
        lora.add(model, CONFIG)
    packed = make_model("kimi-k3-tiny", moe_intermediate_size=32, routed_expert_hidden_size=32)
    packed.pack_experts()
    with pytest.raises(pal.InputError, match="packed or on disk"):
        lora.add(packed, CONFIG)
    for fields, line in (({"rank": 0}, "rank is 0"), ({"alpha": 0}, "alpha is 0")):
        with pytest.raises(pal.InputError, match=line):
            LoraConfig.from_dict(fields)
