"""How channels mix.

GELU    W_down gelu(W_up x)                     (tanh form, biases when config.use_bias)
SwiGLU  W_down ( silu(W_gate x) * W_up x )
SiTU    W_down situ(W_gate x, W_up x)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from palimpsest import ops
from palimpsest.config import ModelConfig
from palimpsest.linear import Linear
from palimpsest.moe import MoE


def situ(gate: Tensor, up: Tensor, beta: float = 4.0, linear_beta: float = 25.0) -> Tensor:
    """SiTU-GLU: beta tanh(gate/beta) sigmoid(gate) * linear_beta tanh(up/linear_beta), in float32, in gate's dtype.

    Both branches saturate, so |result| < beta * linear_beta; for large betas it is SwiGLU.
    """
    if _fuses(gate, up):
        from palimpsest.ops.triton import glu

        return glu.gated(gate, up, (beta, linear_beta))
    dtype = torch.float64 if gate.dtype == torch.float64 else torch.float32
    g, u = gate.to(dtype), up.to(dtype)
    return (beta * torch.tanh(g / beta) * torch.sigmoid(g) * linear_beta * torch.tanh(u / linear_beta)).to(gate.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    if _fuses(gate, up):
        from palimpsest.ops.triton import glu

        return glu.gated(gate, up)
    return F.silu(gate) * up


def _fuses(gate: Tensor, up: Tensor) -> bool:
    return gate.shape == up.shape and gate.dtype == up.dtype and ops.trains_on_triton(gate, up)


def activation(name: str, config: ModelConfig) -> Callable[[Tensor, Tensor], Tensor]:
    """The gated activation `name`, 'swiglu' or 'situ'."""
    if name == "swiglu":
        return swiglu
    return partial(situ, beta=config.activation_situ_beta, linear_beta=config.activation_situ_linear_beta)


class GELU(nn.Module):
    """GPT-2's MLP: x [...,D] -> [...,D]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=config.use_bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=config.use_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.up_proj(x), approximate="tanh"))


class GatedMLP(nn.Module):
    """SwiGLU or SiTU: x [...,D] -> [...,D]."""

    def __init__(self, config: ModelConfig, name: str, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, intermediate_size, bias=config.use_bias)
        self.up_proj = Linear(config.hidden_size, intermediate_size, bias=config.use_bias)
        self.down_proj = Linear(intermediate_size, config.hidden_size, bias=config.use_bias)
        self.activation = activation(name, config)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_proj(x), self.up_proj(x)))


def build(name: str, config: ModelConfig) -> nn.Module:
    if name == "gelu":
        return GELU(config)
    if name == "moe":
        return MoE(config)
    return GatedMLP(config, name, config.intermediate_size)
