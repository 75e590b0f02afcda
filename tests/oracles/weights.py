"""Weights that every machine draws alike, away from their initial values so that one wrong detail is far outside tolerances."""

from __future__ import annotations

import math
import zlib

import numpy as np
import torch
from torch import Tensor

import palimpsest as pal

IDS = torch.arange(2 * 21).view(2, 21) * 37 % 257
# Tiny presets that engines outside read: (preset, fields). The rest of the published shape is in the presets.
CHECKPOINTS: dict[str, dict[str, int]] = {
    "kimi-k3-tiny": {"num_hidden_layers": 8, "attn_res_block_size": 3},
    "kimi-linear-tiny": {},
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
def model_of(preset: str) -> pal.Model:
    """The preset with such weights, scaled so that logits have a spread near 1 while the epsilons of the norms still show."""
    model = pal.Model(pal.ModelConfig.preset(preset, **CHECKPOINTS[preset]))
    for name, weight in model.named_parameters():
        leaf = name.split(".")[-2]
        spread, centre = weight.shape[-1] ** -0.5, 0.0
        if name.endswith(("A_log", "dt_bias")):
            spread = 1.0
        elif weight.dim() == 1:
            spread, centre = 0.2, 1.0 if "norm" in name else 0.0
        elif name.startswith("embed"):
            spread = 0.05
        elif "conv1d" in name:
            spread = 0.5
        elif leaf in ("q_proj", "k_proj"):
            spread = 0.03
        elif leaf == "kv_a_proj_with_mqa":
            spread = 0.05
        weight.copy_((noise(name, weight.numel()) * spread + centre).view_as(weight))
    return model.eval()
