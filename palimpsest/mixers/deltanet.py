"""DeltaNet (arXiv 2102.11174, 2406.06484): read what the key retrieves, write only the difference.

    S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T     o_t = S_t^T q_t / sqrt(K)

with unit q and k, and beta = sigmoid(b_proj x) in (0, 1), or twice that when `allow_neg_eigval`. With beta = 1 a repeated
key replaces its value instead of adding to it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from palimpsest import ops
from palimpsest.config import ModelConfig
from palimpsest.context import remembered
from palimpsest.heads import share
from palimpsest.linear import Linear
from palimpsest.mixers.linear_attention import LinearAttention
from palimpsest.state import Segments


class DeltaNet(LinearAttention):
    """Linear attention whose write is a correction; the output is normed per head instead of divided."""

    state_columns = 0

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.b_proj = Linear(config.hidden_size, self.value_heads, bias=False)
        self.o_norm = nn.RMSNorm(self.value_dim, config.rms_norm_eps)
        self.norm_eps = config.rms_norm_eps
        self.allow_neg_eigval = config.allow_neg_eigval

    def add_features(self, config: ModelConfig) -> None:
        """q and k are unit vectors, the output is always normed."""

    def write_strength(self, x: Tensor) -> Tensor:
        """beta [B,T,HV] in float32 (float64 when x is)."""
        logits = self.b_proj(x)
        beta = logits.to(torch.float64 if x.dtype == torch.float64 else torch.float32).sigmoid()
        return 2 * beta if self.allow_neg_eigval else beta

    def remember(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, matrix: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
        beta = self.write_strength(x)
        return remembered(ops.delta_rule, segments, q, k, v, beta, state=matrix, qk_l2norm=True)

    def read(self, x: Tensor, o: Tensor) -> Tensor:
        return ops.rms_norm(o, share(self.parallel, self.o_norm.weight), self.norm_eps)
