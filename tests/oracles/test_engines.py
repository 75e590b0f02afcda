"""Kimi K3, Kimi Linear and GPT-2 in mlx-lm and llama.cpp: stored logits, for weights that every machine draws alike."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import palimpsest as pal
from tests.golden import engines
from tests.oracles.agreement import note
from tests.oracles.weights import CHECKPOINTS, IDS, NAMES, model_of

TOLERANCE = 3e-4  # float32 logits of spread near 1, ours in float64; mlx evaluates exponentials to fewer digits
TOLERANCES = {"gpt2-tiny llama.cpp": 5e-3}  # its GELU is a table in float16
PACKAGES = {"mlx-lm": "mlx-lm", "llama.cpp": "xllamacpp"}


@pytest.mark.parametrize("engine", engines.ENGINES)
@pytest.mark.parametrize("preset", engines.CONVERTERS)
def test_logits(preset: str, engine: str) -> None:
    """Our logits, whole and after a prefill of 9 tokens, against theirs, whole and decoded one by one."""
    model, stored = model_of(preset, **engines.ENGINES[engine]).double(), np.load(engines.FILE)
    with torch.no_grad():
        whole, start = model(IDS).logits, model(IDS[:, :9])
        steps, state = [start.logits], start.state
        for t in range(9, IDS.shape[1]):
            out = model(IDS[:, t : t + 1], state)
            steps, state = [*steps, out.logits], out.state
    assert 0.5 < whole.std() < 3
    (oracle,) = (str(each) for each in stored["versions"] if str(each).startswith(PACKAGES[engine]))
    for measure in ("output", "decode"):
        kept = torch.from_numpy(stored[f"{preset} {engine} {measure}"])
        for found in (whole, torch.cat(steps, 1)):
            difference = float((found[:, engines.PLACES] - kept).abs().max())
            note(f"{oracle} (stored)", NAMES[preset], measure, difference, "absolute")
            assert difference < TOLERANCES.get(f"{preset} {engine}", TOLERANCE)


def test_the_epsilons_show() -> None:
    """Why llama.cpp is compared at 1e-6 alone: with another, its key norms and low-rank norms would have that one."""
    with torch.no_grad():
        one, other = (model_of("kimi-k3-tiny", **fields)(IDS).logits for fields in engines.ENGINES.values())
    assert (one - other).abs().max() > 10 * TOLERANCE


def test_the_checkpoints_hold_every_kind_of_layer() -> None:
    """A difference in any part of Kimi K3 shows: dense and expert layers, both memories, sealed blocks, the bounded gate."""
    config = pal.ModelConfig.preset("kimi-k3-tiny", **CHECKPOINTS["kimi-k3-tiny"])
    assert set(config.mixers) == {"kda", "mla"} and len(set(config.mlps)) == 2 and config.residual == "block_attention"
    assert config.gate_lower_bound is not None and config.routed_expert_hidden_size and config.q_lora_rank
    assert config.num_hidden_layers > 2 * config.attn_res_block_size
