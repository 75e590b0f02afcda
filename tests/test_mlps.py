"""The channel mixers: published values of SiTU and GELU, the equations, and the order gate before up."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

import palimpsest as pal
from palimpsest import mlps
from palimpsest.mlps import GELU, GatedMLP, situ, swiglu
from palimpsest.moe import MoE
from tests.conftest import relative

SITU = [
    (1.0, 1.0, 0.7158178280748404),
    (-1.0, 1.0, -0.26333466257272786),
    (4.0, 25.0, 56.95931951108434),
    (10.0, -100.0, -98.59078155386423),
    (100.0, 100.0, 99.93292997390671),
    (-4.0, 2.0, -0.10935235361265021),
    (0.0, 1.0, 0.0),
]


def config(**fields: object) -> pal.ModelConfig:
    base = {"vocab_size": 3, "hidden_size": 6, "num_hidden_layers": 1, "mixers": ["attention"], "mlps": ["swiglu"]}
    return pal.ModelConfig.from_dict({**base, "intermediate_size": 10, **fields})


@pytest.mark.parametrize(("gate", "up", "expected"), SITU)
def test_situ_published_values(gate: float, up: float, expected: float) -> None:
    for dtype, limit in ((torch.float64, 1e-14), (torch.float32, 1e-6)):
        found = situ(torch.tensor(gate, dtype=dtype), torch.tensor(up, dtype=dtype))
        assert found.dtype == dtype and math.isclose(float(found), expected, rel_tol=limit, abs_tol=1e-300)


def test_situ_bounds_and_precision() -> None:
    """Below beta * linear_beta everywhere, finite gradients, and computed in float32 for half-precision inputs."""
    grid = torch.linspace(-300, 300, 61)
    gate, up = torch.meshgrid(grid, grid, indexing="ij")
    assert (situ(gate, up).abs() <= 100).all() and (situ(gate, up, 2.0, 3.0).abs() <= 6).all()
    gate, up = gate.clone().requires_grad_(), up.clone().requires_grad_()
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(situ(gate, up).sum(), [gate, up]))
    gate, up = torch.randn(2, 500).bfloat16() * 4
    y = situ(gate, up)
    assert y.dtype == torch.bfloat16
    assert relative(y, situ(gate.double(), up.double())) < 2**-8, "only the result was rounded"
    other = situ(gate.double(), up.double(), 1.5, 7.0)
    by_hand = 1.5 * (gate.double() / 1.5).tanh() / (1 + (-gate.double()).exp()) * 7 * (up.double() / 7).tanh()
    assert relative(other, by_hand) < 1e-13


def test_gelu() -> None:
    """The tanh form of GPT-2, at values computed from its formula; biases only when asked for."""
    mlp = mlps.build("gelu", config(use_bias=True)).double()
    assert isinstance(mlp, GELU) and mlp.up_proj.bias is not None and mlp.down_proj.bias is not None
    x = torch.randn(4, 6, dtype=torch.float64)
    inner = x @ mlp.up_proj.weight.mT + mlp.up_proj.bias
    inner = 0.5 * inner * (1 + torch.tanh(math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3)))
    assert relative(mlp(x), inner @ mlp.down_proj.weight.mT + mlp.down_proj.bias) < 1e-13
    plain = mlps.build("gelu", config())
    assert isinstance(plain, GELU) and plain.up_proj.bias is None and plain.down_proj.bias is None


@pytest.mark.parametrize("name", ["swiglu", "situ"])
def test_gated(name: str) -> None:
    """The activation takes (gate, up), in this order, with the config's betas."""
    for bias in (False, True):
        settings = config(use_bias=bias, activation_situ_beta=1.5, activation_situ_linear_beta=2.0)
        mlp = mlps.build(name, settings).double()
        assert isinstance(mlp, GatedMLP) and (mlp.gate_proj.bias is not None) == bias
        x = torch.randn(4, 6, dtype=torch.float64)
        gate, up = mlp.gate_proj(x), mlp.up_proj(x)
        inner = F.silu(gate) * up
        if name == "situ":
            inner = 1.5 * torch.tanh(gate / 1.5) * torch.sigmoid(gate) * 2 * torch.tanh(up / 2)
        assert relative(mlp(x), mlp.down_proj(inner)) < 1e-13
    assert relative(swiglu(gate, up), gate * torch.sigmoid(gate) * up) < 1e-14


def test_build() -> None:
    assert isinstance(mlps.build("moe", config(mlps=["moe"])), MoE)
    mlp = mlps.build("swiglu", config())
    assert isinstance(mlp, GatedMLP) and tuple(mlp.down_proj.weight.shape) == (6, 10)
