"""Every family in mlx-lm, from folders that `pal.save` writes: logits, cached decode, and gradients of every weight.

mlx-lm runs in float32, ours in float64, so that the differences are its rounding.
"""

from __future__ import annotations

import copy
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
from mlx_lm.models.cache import make_prompt_cache
from torch import Tensor

import palimpsest as pal
from palimpsest.convert import to_published
from tests.oracles.agreement import note
from tests.oracles.weights import CHECKPOINTS, IDS, NAMES, model_of

mx.set_default_device(mx.cpu)
MODULES = {
    **{"kimi-k3-tiny": "kimi_k3", "kimi-linear-tiny": "kimi_linear", "gpt2-tiny": "gpt2", "smollm2-tiny": "llama"},
    **{"qwen3-next-tiny": "qwen3_next"},
}
# Logits of spread near 1. mlx evaluates exponentials to fewer digits, and its Kimi Linear has the model's epsilon in the
# low-rank norms.
TOLERANCE = 3e-4
# Weights without gradient: what chooses experts, and what chooses between sources where there is only one.
IDLE = ("e_score_correction_bias", "layers.0.self_attention_res_norm.weight", "layers.0.self_attention_res_proj.weight")


def tensor(x: Any) -> Tensor:
    return torch.from_numpy(np.array(x.astype(mx.float32)))


@pytest.fixture(params=sorted(CHECKPOINTS))
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, pal.Model, Any]:
    """The family, our model and mlx-lm's, which must take every tensor of our folder and miss none."""
    ours, module = model_of(request.param), importlib.import_module(f"mlx_lm.models.{MODULES[request.param]}")
    pal.save(ours, tmp_path / "model")
    document = json.loads((tmp_path / "model" / "config.json").read_text())
    theirs = module.Model(module.ModelArgs.from_dict(document))
    weights = dict(mx.load(str(tmp_path / "model" / "model.safetensors")))
    theirs.load_weights(list(theirs.sanitize(weights).items()), strict=True)
    return NAMES[request.param], copy.deepcopy(ours).double(), theirs


def test_logits(case: tuple[str, pal.Model, Any]) -> None:
    """Whole, and with their cache: a prefill of 9 tokens, uneven pieces, single steps."""
    family, ours, theirs = case
    with torch.no_grad():
        expected = ours(IDS).logits
    assert 0.5 < expected.std() < 3
    difference = (tensor(theirs(mx.array(IDS.numpy()))) - expected).abs().max()
    note("mlx-lm", family, "output", difference, "absolute")
    assert difference < TOLERANCE
    cache, found = make_prompt_cache(theirs), []
    for start, end in ((0, 9), (9, 10), (10, 14), *((t, t + 1) for t in range(14, 21))):
        found.append(tensor(theirs(mx.array(IDS[:, start:end].numpy()), cache=cache)))
    difference = (torch.cat(found, 1) - expected).abs().max()
    note("mlx-lm", family, "decode", difference, "absolute")
    assert difference < TOLERANCE


def test_gradients(case: tuple[str, pal.Model, Any]) -> None:
    """Of the same loss, for every tensor.

    What mlx-lm does to weights as it reads them is done to our gradients too: it splits, joins and turns them, and the 1 that
    it adds to Qwen3-Next's norms is the one that `to_published` takes away.
    """
    family, ours, theirs = case

    def loss(model: Any) -> Any:
        logits = model(mx.array(IDS.numpy()))[:, :-1]
        return mlx.nn.losses.cross_entropy(logits, mx.array(IDS[:, 1:].numpy()), reduction="mean")

    value, gradients = mlx.nn.value_and_grad(theirs, loss)(theirs)
    own = ours.loss(IDS, IDS)
    assert abs(float(value) - float(own.detach())) < TOLERANCE
    own.backward()
    held = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in ours.named_parameters()}
    _, published = to_published(ours.config, held)
    wanted = theirs.sanitize({name: mx.array(x.float().numpy()) for name, x in published.items()})
    found: dict[str, Any] = dict(tree_flatten(gradients))
    assert found.keys() == wanted.keys() and len(found) > 4 * ours.config.num_hidden_layers
    errors = {}
    for name, gradient in found.items():
        expected, size = tensor(wanted[name]), tensor(wanted[name]).abs().max()
        assert (size > 1e-6) != name.endswith(IDLE), name
        errors[name] = float((tensor(gradient) - expected).abs().max() / size.clamp(min=1e-6))
    worst = max(errors, key=lambda name: errors[name])
    note("mlx-lm", family, "gradients", errors[worst], "relative")
    assert errors[worst] < 3e-3, worst
