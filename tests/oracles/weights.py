"""Weights that every machine draws alike, away from their initial values so that one wrong detail is far outside tolerances."""

from __future__ import annotations

import math
import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

import palimpsest as pal

IDS = torch.arange(2 * 21).view(2, 21) * 37 % 257
# Tiny presets that engines outside read, and fields that differ. The rest of the published shape is in the presets.
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "kimi-k3-tiny": {"num_hidden_layers": 8, "mixers": (*["kda"] * 3, "mla") * 2, "attn_res_block_size": 3},
    "kimi-linear-tiny": {},
    "gpt2-tiny": {"rms_norm_eps": 1e-4, "intermediate_size": 256},  # elsewhere it is 4 widths, always
    "smollm2-tiny": {"rms_norm_eps": 1e-4, "rope_theta": 3000.0},
    "qwen3-next-tiny": {"rms_norm_eps": 1e-4, "num_hidden_layers": 6, "mixers": (*["gated_deltanet"] * 2, "attention") * 2},
}
NAMES = {
    **{"kimi-k3-tiny": "Kimi K3", "kimi-linear-tiny": "Kimi Linear", "gpt2-tiny": "GPT-2", "smollm2-tiny": "Llama"},
    **{"qwen3-next-tiny": "Qwen3-Next"},
}


def noise(name: str, count: int) -> Tensor:
    """`count` numbers of mean 0 and spread 1, float64, from integer arithmetic on the name and the position."""
    x = np.arange(count, dtype=np.uint64) + np.uint64(zlib.crc32(name.encode()) << 20)
    with np.errstate(over="ignore"):
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    x ^= x >> np.uint64(31)
    return torch.from_numpy((x >> np.uint64(11)).astype(np.float64) / 2**53 * 2 - 1) * math.sqrt(3)


@torch.no_grad()
def model_of(preset: str, **fields: Any) -> pal.Model:
    """The preset with such weights, scaled so that logits have a spread near 1 while the epsilons of the norms still show."""
    model = pal.Model(pal.ModelConfig.preset(preset, **{**CHECKPOINTS[preset], **fields}))
    config = model.config
    for name, weight in model.named_parameters():
        parts = name.split(".")
        spread, centre = weight.shape[-1] ** -0.5, 0.0
        if name.endswith("e_score_correction_bias") and config.moe_router_activation_func == "softmax":
            spread = 0.0  # Qwen3-Next has none
        elif name.endswith(("A_log", "dt_bias")):
            spread = 1.0
        elif weight.dim() == 1:
            spread, centre = 0.2, 1.0 if "norm" in name and parts[-1] != "bias" else 0.0
        elif name.startswith("embed"):
            spread = 0.15 if config.tie_word_embeddings else 0.05
        elif "conv1d" in name:
            spread = 0.5
        elif parts[-2] in ("q_proj", "k_proj") and config.mixers[int(parts[1])] in ("kda", "gated_deltanet"):
            spread = 0.03
        elif parts[-2] == "kv_a_proj_with_mqa":
            spread = 0.05
        weight.copy_((noise(name, weight.numel()) * spread + centre).view_as(weight))
    return model.eval()
