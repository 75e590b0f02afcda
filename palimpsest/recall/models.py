"""Models of two layers that differ in their memory and in nothing else.

softmax                keeps every key and value; no positions, but a short convolution in front like all others
linear                 adds                                          neither decay nor delta
decay                  adds, and the whole fades                     decay alone (Mamba-2's memory)
deltanet               replaces                                      delta alone
gdn                    replaces, and the whole fades                 both
kda                    replaces, and every channel fades by itself   both, per channel
hybrid                 a KDA layer, then one of MLA without positions
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from palimpsest import ops
from palimpsest.config import ModelConfig
from palimpsest.context import remembered
from palimpsest.mixers import Attention, GatedDeltaNet, ShortConvolution
from palimpsest.model import Model
from palimpsest.state import KeyValue, Segments

LAYERS = 2
MIXERS: dict[str, tuple[str, str]] = {
    "softmax": ("attention", "attention"),
    "linear": ("linear_attention", "linear_attention"),
    "decay": ("gated_deltanet", "gated_deltanet"),
    "deltanet": ("deltanet", "deltanet"),
    "gdn": ("gated_deltanet", "gated_deltanet"),
    "kda": ("kda", "kda"),
    "hybrid": ("kda", "mla"),
}
TITLES = {
    "softmax": "softmax attention",
    "linear": "linear attention",
    "decay": "decay without delta",
    "deltanet": "DeltaNet",
    "gdn": "Gated DeltaNet",
    "kda": "KDA",
    "hybrid": "KDA and MLA",
}


class Fading(GatedDeltaNet):
    """Gated DeltaNet without the delta rule: S = exp(g) S + k (beta v)^T. Everything else is the same."""

    def remember(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, matrix: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
        written = self.write_strength(x).unsqueeze(-1) * v
        g = ops.kda_gate(self.a_proj(x).unsqueeze(-1), self.A_log, self.dt_bias).squeeze(-1)

        def fade(q: Tensor, k: Tensor, v: Tensor, g: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
            return ops.linear_attention(q, k, v, g=g, **options)

        return remembered(fade, segments, ops.l2norm(q), ops.l2norm(k), written, g, state=matrix)


class Convolved(Attention):
    """Softmax attention behind a short convolution, as in Zoology: without one it learns recall much later, which says
    nothing about its memory. Its state does not hold the convolution's last inputs, so it reads whole rows only."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.conv1d = ShortConvolution(config.hidden_size, config.linear_conv_kernel_dim)

    def forward(self, x: Tensor, state: KeyValue, segments: Segments) -> tuple[Tensor, KeyValue]:
        if any(segments.past):
            raise ValueError("this layer reads whole rows only: its state does not hold the convolution's last inputs")
        return super().forward(ops.short_conv(x, self.conv1d.weight)[0], state, segments)


OWN: dict[str, type[Attention] | type[GatedDeltaNet]] = {"softmax": Convolved, "decay": Fading}


def config_for(mixer: str, vocab_size: int, width: int, head_dim: int) -> ModelConfig:
    """`width` must hold a whole number of heads; queries and keys take all of it, whatever the mixer."""
    heads = width // head_dim
    mixers = MIXERS[mixer]
    values: dict[str, Any] = {}
    if mixer in ("gdn", "decay"):
        values["linear_output_gate"] = "silu"
    if "kda" in mixers:
        values |= {"linear_output_gate": "sigmoid", "linear_output_gate_rank": head_dim}
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        num_hidden_layers=LAYERS,
        mixers=mixers,  # type: ignore[arg-type]
        mlps=("swiglu",) * LAYERS,
        intermediate_size=2 * width,
        tie_word_embeddings=True,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=head_dim,
        linear_num_key_heads=heads,
        linear_num_value_heads=heads,
        linear_key_head_dim=head_dim,
        linear_value_head_dim=head_dim,
        kv_lora_rank=width // 2,
        qk_nope_head_dim=head_dim,
        qk_rope_head_dim=head_dim // 2,
        v_head_dim=head_dim,
        **values,
    )


def build(mixer: str, vocab_size: int, width: int, head_dim: int, seed: int) -> Model:
    """Gated DeltaNet and decay without delta begin with the same weights for the same seed."""
    model = Model(config_for(mixer, vocab_size, width, head_dim))
    if mixer in OWN:
        for layer in model.layers:
            layer.mixer = OWN[mixer](model.config)
    torch.manual_seed(seed)
    model.reset_parameters()
    return model
