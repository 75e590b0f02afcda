"""Gated DeltaNet (arXiv 2412.06464): the delta rule on a memory that fades at a learned rate per head.

    S' = exp(g_t) S_{t-1}     S_t = S' + beta_t k_t (v_t - S'^T k_t)^T     o_t = S_t^T q_t / sqrt(K)
    g_t = -exp(A_log) softplus(a_proj x + dt_bias)

The normed output passes a gate: o_norm(o) * silu(g_proj x).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from palimpsest import ops
from palimpsest.config import ModelConfig
from palimpsest.context import remembered
from palimpsest.heads import part, share
from palimpsest.linear import Linear
from palimpsest.mixers.deltanet import DeltaNet
from palimpsest.state import Segments


class GatedDeltaNet(DeltaNet):
    """DeltaNet with forgetting and an output gate."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.add_decay(config)
        self.gate_activation = config.linear_output_gate
        self.add_output_gate(config)

    def add_decay(self, config: ModelConfig) -> None:
        self.a_proj = Linear(config.hidden_size, self.value_heads, bias=False)
        self.A_log = nn.Parameter(torch.zeros(self.value_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.zeros(self.value_heads, dtype=torch.float32))

    def add_output_gate(self, config: ModelConfig) -> None:
        width, values, rank = config.hidden_size, self.value_heads * self.value_dim, config.linear_output_gate_rank
        self.low_rank = rank is not None
        if self.gate_activation == "none":
            return
        bias = config.linear_output_gate_bias
        if rank is None:
            self.g_proj = Linear(width, values, bias=bias)
        else:
            self.g_a_proj = Linear(width, rank, bias=False)
            self.g_b_proj = Linear(rank, values, bias=bias)

    @torch.no_grad()
    def reset_decay(self, zero_rate: bool = False) -> None:
        """Draws A_log = log U(1,16) (or 0) and dt_bias = softplus^-1(dt), dt log-uniform in [1e-3, 0.1], in float32."""
        if zero_rate:
            self.A_log.zero_()
        else:
            self.A_log.uniform_(1, 16).log_()
        dt = self.dt_bias.uniform_(math.log(1e-3), math.log(0.1)).exp_().clamp_(min=1e-4)
        dt += torch.log(-torch.expm1(-dt))

    def log_decay(self, x: Tensor) -> Tensor:
        """g [B,T,HV,1], as the operation forms it inside."""
        return ops.kda_gate(self.a_proj(x).unsqueeze(-1), self.A_log, self.dt_bias)

    def remember(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, matrix: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
        return remembered(
            ops.gated_delta_rule,
            segments,
            q,
            k,
            v,
            self.a_proj(x),
            self.write_strength(x),
            state=matrix,
            A_log=part(self.parallel, self.A_log),
            dt_bias=part(self.parallel, self.dt_bias),
            qk_l2norm=True,
        )

    def read(self, x: Tensor, o: Tensor) -> Tensor:
        if self.gate_activation == "none":
            return super().read(x, o)
        gate = self.g_b_proj(self.g_a_proj(x)) if self.low_rank else self.g_proj(x)
        gate = gate.unflatten(-1, (self.value_heads, self.value_dim))
        return ops.gated_rms_norm(o, gate, share(self.parallel, self.o_norm.weight), self.norm_eps, self.gate_activation)
