"""Kimi K3 and Kimi Linear in mlx-lm, from folders that `pal.save` writes: logits, cached decode and gradients."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
import torch
from mlx.utils import tree_flatten
from torch import Tensor

import palimpsest as pal
from palimpsest.convert import to_published
from tests.oracles.agreement import note
from tests.oracles.weights import CHECKPOINTS, IDS, model_of

mx.set_default_device(mx.cpu)
MODULES = {"kimi-k3-tiny": "kimi_k3", "kimi-linear-tiny": "kimi_linear"}
FAMILIES = {"block_attention": "Kimi K3", "sum": "Kimi Linear"}
TOLERANCE = 3e-4  # float32 logits of spread near 1; mlx evaluates exponentials to fewer digits


def tensor(x: Any) -> Tensor:
    return torch.from_numpy(np.array(x.astype(mx.float32)))


@pytest.fixture(params=sorted(CHECKPOINTS))
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[pal.Model, Any]:
    """Our model and mlx-lm's, which must take every tensor of our folder and miss none."""
    ours, module = model_of(request.param), importlib.import_module(f"mlx_lm.models.{MODULES[request.param]}")
    pal.save(ours, tmp_path / "model")
    document = json.loads((tmp_path / "model" / "config.json").read_text())
    theirs = module.Model(module.ModelArgs.from_dict(document))
    weights = dict(mx.load(str(tmp_path / "model" / "model.safetensors")))
    theirs.load_weights(list(theirs.sanitize(weights).items()), strict=True)
    return ours, theirs


def test_logits(pair: tuple[pal.Model, Any]) -> None:
    ours, theirs = pair
    with torch.no_grad():
        expected = ours(IDS).logits
    assert 0.5 < expected.std() < 3
    difference = (tensor(theirs(mx.array(IDS.numpy()))) - expected).abs().max()
    note("mlx-lm", FAMILIES[ours.config.residual], "output", difference, "absolute")
    assert difference < TOLERANCE


def test_steps(pair: tuple[pal.Model, Any]) -> None:
    """Their cache after a prefill of 9 tokens and single steps, against our whole; their state survives uneven pieces."""
    ours, theirs = pair
    with torch.no_grad():
        expected = ours(IDS).logits
    cache, found = theirs.make_cache(), []
    for start, end in ((0, 9), (9, 10), (10, 14), *((t, t + 1) for t in range(14, 21))):
        found.append(tensor(theirs(mx.array(IDS[:, start:end].numpy()), cache=cache)))
    difference = (torch.cat(found, 1) - expected).abs().max()
    note("mlx-lm", FAMILIES[ours.config.residual], "decode", difference, "absolute")
    assert difference < TOLERANCE


def test_gradients(pair: tuple[pal.Model, Any]) -> None:
    """Of the same loss, by published name, for every tensor that mlx-lm keeps as it is published."""
    ours, theirs = pair

    def loss(model: Any) -> Any:
        logits = model(mx.array(IDS.numpy()))[:, :-1]
        return mlx.nn.losses.cross_entropy(logits, mx.array(IDS[:, 1:].numpy()), reduction="mean")

    value, gradients = mlx.nn.value_and_grad(theirs, loss)(theirs)
    own = ours.loss(IDS, IDS)
    assert abs(float(value) - float(own.detach())) < TOLERANCE
    own.backward()
    held = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in ours.named_parameters()}
    _, published = to_published(ours.config, held)
    compared, largest = 0, 0.0
    for name, gradient in tree_flatten(gradients):
        wanted = published.get(name)
        if wanted is None or wanted.numel() != gradient.size:
            continue  # mlx-lm splits kv_b_proj, stacks experts and pads nothing
        found = tensor(gradient).reshape(wanted.shape)
        compared += 1
        error = float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-6))
        assert error < 5e-3, name
        largest = max(largest, error)
    note("mlx-lm", FAMILIES[ours.config.residual], "gradients", largest, "relative")
    assert compared > 8 * ours.config.num_hidden_layers
