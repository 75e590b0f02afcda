"""How tokens mix over time, one generation a file. `build(name, config)` makes a layer's mixer."""

from __future__ import annotations

from palimpsest.config import ModelConfig
from palimpsest.mixers.attention import Attention
from palimpsest.mixers.deltanet import DeltaNet
from palimpsest.mixers.gated_deltanet import GatedDeltaNet
from palimpsest.mixers.kda import KDA
from palimpsest.mixers.linear_attention import LinearAttention, ShortConvolution
from palimpsest.mixers.mla import MLA

__all__ = [
    "KDA",
    "MLA",
    "Attention",
    "DeltaNet",
    "GatedDeltaNet",
    "LinearAttention",
    "Mixer",
    "ShortConvolution",
    "build",
]

Mixer = Attention | MLA | LinearAttention


def build(name: str, config: ModelConfig) -> Mixer:
    classes: dict[str, type[Mixer]] = {
        "attention": Attention,
        "linear_attention": LinearAttention,
        "deltanet": DeltaNet,
        "gated_deltanet": GatedDeltaNet,
        "kda": KDA,
        "mla": MLA,
    }
    return classes[name](config)
