"""The operations of fla by its token loops, which are plain torch: outputs, states, gradients."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from palimpsest.residuals import mix
from tests.conftest import ARGUMENTS, call, cast, make_inputs, relative
from tests.oracles.agreement import note

TOLERANCE = 1e-5  # relative; fla's loops run in float32


def naive(package: str, name: str) -> Callable[..., Any]:
    """A function of fla/ops/<package>/naive.py, loaded by its path: importing fla itself needs triton."""
    spec = importlib.util.find_spec("fla")
    assert spec is not None and spec.submodule_search_locations
    path = f"{spec.submodule_search_locations[0]}/ops/{package}/naive.py"
    loaded = importlib.util.spec_from_file_location(f"naive_{package}", path)
    assert loaded is not None and loaded.loader is not None
    module = importlib.util.module_from_spec(loaded)
    loaded.loader.exec_module(module)
    return getattr(module, name)


def theirs(op: str, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """fla's loop on our inputs: (o [B,T,H,V], state [B,H,K,V])."""
    order = [inputs[name] for name in ARGUMENTS[op]]
    if op == "kda":
        return naive("kda", "naive_recurrent_kda")(*order, initial_state=inputs["state"], output_final_state=True)
    if op == "gated_delta_rule":
        q, k, v, g, beta = order
        function = naive("gated_delta_rule", "naive_recurrent_gated_delta_rule")
        return function(q, k, v, beta, g, initial_state=inputs["state"], output_final_state=True)
    heads_first = [x.transpose(1, 2).contiguous() for x in order]
    if op == "delta_rule":
        o, state = naive("delta_rule", "delta_rule_recurrence")(*heads_first, initial_state=inputs["state"])
        return o.transpose(1, 2), state
    o, state = naive("linear_attn", "naive_recurrent_linear_attn")(
        *order, initial_state=inputs["state"], output_final_state=True
    )
    return o, state


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("op", ARGUMENTS)
def test_ops(op: str, backend: str) -> None:
    inputs = cast(make_inputs(op, 70, batch=2, heads=4, value_heads=4, key_dim=8, value_dim=12), torch.float32)
    mine = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    other = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    o, state = call(op, mine, backend=backend)
    expected, final = theirs(op, other)
    error = max(relative(o, expected), relative(state, final))
    note("fla-core", f"`{op}`, with its state", "output", error, "relative")
    assert error < TOLERANCE
    weight, state_weight = torch.randn_like(o), torch.randn_like(state)
    found = torch.autograd.grad((o * weight).sum() + (state * state_weight).sum(), list(mine.values()))
    wanted = torch.autograd.grad((expected * weight).sum() + (final * state_weight).sum(), list(other.values()))
    errors = {name: relative(*pair) for name, *pair in zip(mine, found, wanted, strict=True)}
    note("fla-core", f"`{op}`, with its state", "gradients", max(errors.values()), "relative")
    assert max(errors.values()) < 10 * TOLERANCE, errors


def test_attention_residuals() -> None:
    """fla keeps the query and the norm's weight apart; only their product enters."""
    sources = torch.randn(5, 2, 7, 16, dtype=torch.float32)
    norm, query = torch.rand(16) + 0.5, torch.randn(16)
    expected = naive("attnres", "naive_attnres")(query, list(sources), norm, rms_eps=1e-5)
    error = relative(mix(sources, norm, query, 1e-5), expected)
    note("fla-core", "attention residuals", "output", error, "relative")
    assert error < TOLERANCE
    assert relative(mix(sources, norm, 2 * query, 1e-5), expected) > 1e-2
