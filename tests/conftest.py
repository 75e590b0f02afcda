"""What several test files share: an error measure, seeded inputs of the recurrent family, and small models."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch import Tensor

import palimpsest as pal
from palimpsest import ops

torch.set_num_threads(1)
settings.register_profile("palimpsest", deadline=None, derandomize="CI" in os.environ, print_blob=True)
settings.load_profile("palimpsest")

TINY = [name for name in pal.presets() if name.endswith("-tiny")]
ARGUMENTS = {
    "linear_attention": ("q", "k", "v"),
    "delta_rule": ("q", "k", "v", "beta"),
    "gated_delta_rule": ("q", "k", "v", "g", "beta"),
    "kda": ("q", "k", "v", "g", "beta"),
}
Inputs = dict[str, Tensor]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def relative(x: Tensor, y: Tensor) -> float:
    """|x - y| / |y| in the Frobenius norm, in float64; 0 when both are zero or empty, inf when only y is zero."""
    assert x.shape == y.shape, f"shapes {list(x.shape)} and {list(y.shape)}"
    x, y = x.detach().double(), y.detach().double()
    error, size = float((x - y).norm()), float(y.norm())
    return error / size if size else (0.0 if error == 0 else float("inf"))


def make_inputs(
    op: str,
    tokens: int,
    *,
    batch: int = 1,
    heads: int = 2,
    value_heads: int = 4,
    key_dim: int = 6,
    value_dim: int = 10,
    decay: float | None = None,
    dtype: torch.dtype = torch.float32,
    sequences: int | None = None,
    identical_keys: bool = False,
    seed: int = 0,
) -> Inputs:
    """Arguments of `op` by name, and a `state`: unit q and k, g around `decay` (None: random in (-3, 0)), beta in (0, 1).

    With `identical_keys` every token has one and the same key, q = k, and beta is 0.9997. `sequences` is the number of
    states when the tokens are packed.
    """
    draw = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(batch, tokens, heads, key_dim, generator=draw, dtype=torch.float64) for _ in range(2))
    beta = torch.rand(batch, tokens, value_heads, generator=draw, dtype=torch.float64)
    if identical_keys:
        k = torch.randn(1, 1, heads, key_dim, generator=draw, dtype=torch.float64).expand(batch, tokens, -1, -1)
        q, beta = k, torch.full_like(beta, 0.9997)
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    gates = (batch, tokens, value_heads) + ((key_dim,) if op == "kda" else ())
    spread = torch.rand(gates, generator=draw, dtype=torch.float64)
    g = -3 * spread if decay is None else decay * (0.8 + 0.4 * spread)
    values = {
        "q": q,
        "k": k,
        "v": torch.randn(batch, tokens, value_heads, value_dim, generator=draw, dtype=torch.float64),
        "g": g,
        "beta": beta,
    }
    states = batch if sequences is None else sequences
    state = torch.randn(states, value_heads, key_dim, value_dim, generator=draw, dtype=torch.float64)
    chosen = {name: values[name] for name in ARGUMENTS[op]} | {"state": state}
    return {name: x.to(dtype).contiguous() for name, x in chosen.items()}


def cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    return {name: x.to(dtype) for name, x in inputs.items()}


def call(op: str, inputs: Inputs, **options: Any) -> tuple[Tensor, Tensor]:
    """`op` on named inputs; those it does not take by position (state, A_log, dt_bias) go by keyword."""
    function: Callable[..., tuple[Tensor, Tensor]] = getattr(ops, op)
    rest = {name: x for name, x in inputs.items() if name not in ARGUMENTS[op]}
    return function(*(inputs[name] for name in ARGUMENTS[op]), **rest, **options)


def outcome(op: str, inputs: Inputs, *, gradients: bool = True, seed: int = 7, **options: Any) -> Inputs:
    """o, the final state, and the gradient of every input under fixed random gradients of both, as `d_<name>`."""
    leaves = {name: x.detach().clone().requires_grad_(gradients) for name, x in inputs.items()}
    o, final = call(op, leaves, **options)
    found = {"o": o.detach(), "final": final.detach()}
    if gradients:
        draw = torch.Generator().manual_seed(seed)
        weights = [torch.randn(x.shape, generator=draw, dtype=torch.float64).to(x.dtype) for x in (o, final)]
        used = [i for i, x in enumerate((o, final)) if x.requires_grad]  # no token leaves o without a history
        grads = torch.autograd.grad(
            [(o, final)[i] for i in used], list(leaves.values()), [weights[i] for i in used], allow_unused=o.numel() == 0
        )
        for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
            found[f"d_{name}"] = torch.zeros_like(leaf) if grad is None else grad
    return found


def assert_close(found: Inputs, expected: Inputs, limit: float | dict[str, float], note: str = "") -> None:
    """Every tensor finite and within its relative limit."""
    assert found.keys() == expected.keys()
    for name, x in found.items():
        bound = limit[name] if isinstance(limit, dict) else limit
        assert x.isfinite().all(), f"{name} is not finite {note}"
        error = relative(x, expected[name])
        assert error <= bound, f"{name} is off by {error:.2e}, allowed {bound:.2e} {note}"


def make_model(preset: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **fields: Any) -> pal.Model:
    """A tiny model whose every parameter matters: large matrices, residual queries, router bias and norms off their start."""
    torch.manual_seed(seed)
    model = pal.Model(pal.ModelConfig.preset(preset, **{"initializer_range": 0.1, **fields})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("_residual.proj", "e_score_correction_bias")):
                parameter.normal_(0, 0.3)
            elif parameter.dim() == 1 and "A_log" not in name and "dt_bias" not in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(dtype)


@functools.cache
def published(preset: str) -> pal.Model:
    """A preset of any size in bfloat16, built without memory for its tensors. Do not change it: tests share it."""
    with torch.device("meta"):
        return pal.Model(pal.ModelConfig.preset(preset)).to(torch.bfloat16)


def make_ids(model: pal.Model, batch: int, tokens: int, seed: int = 1) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(model.config.vocab_size, (batch, tokens), generator=draw)


def blocks_of(model: pal.Model) -> list[Any]:
    """The layers, without torch's narrow idea of their attributes."""
    return list(model.layers)


def state_tensors(state: pal.State) -> list[Tensor]:
    """Every tensor that a state carries, in layer order."""
    found: list[Tensor] = []
    for layer in state.layers:
        rows = getattr(layer, "rows", None)
        found += list(rows.tensors) if rows is not None else [layer.matrix, layer.conv]  # type: ignore[union-attr]
    return found
