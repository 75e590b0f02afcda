"""Kimi K3 and Kimi Linear as mlx-lm and llama.cpp compute them: stored logits for weights that every machine draws alike."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import palimpsest as pal
from tests.golden import engines
from tests.oracles.agreement import note
from tests.oracles.weights import CHECKPOINTS, IDS, model_of

# llama.cpp norms keys with the model's epsilon instead of 1e-6, which shows on keys as short as these.
TOLERANCES = {"mlx-lm": 3e-4, "llama.cpp": 1e-2}
PACKAGES = {"mlx-lm": "mlx-lm", "llama.cpp": "xllamacpp"}


@pytest.mark.parametrize("engine", TOLERANCES)
@pytest.mark.parametrize("preset", CHECKPOINTS)
def test_logits(preset: str, engine: str) -> None:
    model = model_of(preset)
    stored = np.load(engines.FILE)
    kept = torch.from_numpy(stored[f"{preset} {engine}"])
    with torch.no_grad():
        whole = model(IDS).logits
        pieces = model(IDS[:, 9:], model(IDS[:, :9]).state).logits
    assert 0.5 < whole.std() < 3
    difference = float((whole[:, engines.PLACES] - kept).abs().max())
    (oracle,) = (str(each) for each in stored["versions"] if str(each).startswith(PACKAGES[engine]))
    note(f"{oracle} (stored)", {"kimi-k3-tiny": "Kimi K3"}.get(preset, "Kimi Linear"), "output", difference, "absolute")
    assert difference < TOLERANCES[engine]
    later = [place for place in engines.PLACES if place >= 9]
    found = pieces[:, [place - 9 for place in later]]
    assert (found - kept[:, [engines.PLACES.index(place) for place in later]]).abs().max() < TOLERANCES[engine]


def test_the_checkpoints_hold_every_kind_of_layer() -> None:
    """A difference in any part of Kimi K3 shows: dense and expert layers, both memories, sealed blocks, the bounded gate."""
    config = pal.ModelConfig.preset("kimi-k3-tiny", **CHECKPOINTS["kimi-k3-tiny"])
    assert set(config.mixers) == {"kda", "mla"} and len(set(config.mlps)) == 2 and config.residual == "block_attention"
    assert config.gate_lower_bound is not None and config.routed_expert_hidden_size and config.q_lora_rank
    assert config.num_hidden_layers > 2 * config.attn_res_block_size
