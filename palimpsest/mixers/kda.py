"""Kimi Delta Attention (arXiv 2510.26692): Gated DeltaNet whose memory fades at its own rate in every key channel.

    S' = Diag(exp(g_t)) S_{t-1}     S_t = S' + beta_t k_t (v_t - S'^T k_t)^T     o_t = S_t^T q_t / sqrt(K)
    z = f_b_proj f_a_proj x + dt_bias
    g_t = -exp(A_log) softplus(z)  (Kimi Linear)    or    lower_bound sigmoid(exp(A_log) z)  (Kimi K3)

The normed output passes a sigmoid gate, of low rank in Kimi Linear and of full rank in Kimi K3.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from palimpsest import ops
from palimpsest.config import ModelConfig
from palimpsest.context import remembered
from palimpsest.heads import part
from palimpsest.linear import Linear
from palimpsest.mixers.gated_deltanet import GatedDeltaNet
from palimpsest.state import Segments


class KDA(GatedDeltaNet):
    """Gated DeltaNet with a vector gate. The gate's low-rank map has rank V."""

    def add_decay(self, config: ModelConfig) -> None:
        channels = self.value_heads * self.key_dim
        self.f_a_proj = Linear(config.hidden_size, self.value_dim, bias=False)
        self.f_b_proj = Linear(self.value_dim, channels, bias=False)
        self.A_log = nn.Parameter(torch.zeros(self.value_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.zeros(channels, dtype=torch.float32))
        self.lower_bound = config.gate_lower_bound

    def raw_gate(self, x: Tensor) -> Tensor:
        """What the gate is made of, [B,T,HV,K]."""
        return self.f_b_proj(self.f_a_proj(x)).unflatten(-1, (self.value_heads, self.key_dim))

    def log_decay(self, x: Tensor) -> Tensor:
        """g [B,T,HV,K], as the operation forms it inside."""
        raw = self.raw_gate(x)
        return ops.kda_gate(raw, self.A_log, self.dt_bias, self.lower_bound)

    def remember(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, matrix: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
        raw = self.raw_gate(x)
        return remembered(
            ops.kda,
            segments,
            q,
            k,
            v,
            raw,
            self.write_strength(x),
            state=matrix,
            A_log=part(self.parallel, self.A_log),
            dt_bias=part(self.parallel, self.dt_bias),
            lower_bound=self.lower_bound,
            qk_l2norm=True,
        )
