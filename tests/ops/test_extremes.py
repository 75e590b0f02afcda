"""Corners of the input space: no and total forgetting, no and full writing, one key all along, very long runs."""

from __future__ import annotations

import itertools

import pytest
import torch

from palimpsest import ops
from tests.conftest import ARGUMENTS, Inputs, assert_close, call, cast, make_inputs, outcome, relative

GATED = ("gated_delta_rule", "kda")
RATES, STRENGTHS = (0.0, -5.0, -20.0, -50.0), (0.0, 1 - 1e-4, 1.0, 2.0)


def corner(op: str, rate: float, strength: float, *, same_key: bool, tokens: int = 130) -> Inputs:
    inputs = make_inputs(op, tokens, decay=rate if op in GATED else None, identical_keys=same_key)
    if "beta" in inputs:
        inputs["beta"].fill_(strength)
    return inputs


@pytest.mark.parametrize("op", [op for op in ARGUMENTS if op != "linear_attention"])
@pytest.mark.parametrize("same_key", [False, True])
def test_rates_and_strengths(op: str, same_key: bool) -> None:
    """Outputs, states and gradients in float32 against the float64 definition, for every pair of corners."""
    for rate, strength in itertools.product(RATES if op in GATED else (0.0,), STRENGTHS):
        if strength == 2.0 and not same_key and rate == 0.0:
            continue  # a reflection of random keys without forgetting: the definition itself amplifies rounding
        inputs = corner(op, rate, strength, same_key=same_key)
        exact = outcome(op, cast(inputs, torch.float64), backend="reference")
        found = outcome(op, cast(inputs, torch.float32), backend="chunked")
        note = f"({op}, g {rate}, beta {strength})"
        for name, value in found.items():
            assert value.isfinite().all(), f"{name} {note}"
        # Reflections of one key keep every rounding error alive. And where a key replaces itself, what the past still does is
        # a difference of nearly equal numbers, so that rounding a key alone changes it: the loop in float32 shows by how much.
        least = 5e-5 if strength == 2.0 and same_key else 1e-5
        loop = outcome(op, cast(inputs, torch.float32), backend="reference")
        assert_close(found, exact, {name: max(least, 4 * relative(loop[name], exact[name])) for name in exact}, note)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", ["delta_rule", *GATED])
def test_one_key_over_512_tokens(op: str, dtype: torch.dtype) -> None:
    """R004. The error in any precision is that of rounding the inputs, at most twice."""
    inputs = make_inputs(op, 512, identical_keys=True, decay=-3e-5 if op in GATED else None)
    exact = outcome(op, inputs | cast(inputs, torch.float64), backend="reference", gradients=False)
    rounded = cast(cast(inputs, dtype), torch.float64)
    floor = outcome(op, rounded, backend="reference", gradients=False)
    for chunk in (16, 64, 256):
        found = outcome(op, cast(inputs, dtype), backend="chunked", chunk_size=chunk, gradients=False)
        for name in ("o", "final"):
            limit = 2 * relative(floor[name], exact[name]) + torch.finfo(dtype).eps
            if dtype == torch.float32:
                limit = 2e-5 if chunk == 256 else 1e-5
            assert relative(found[name], exact[name]) < limit, f"{name}, chunk {chunk}"


def test_a_hundred_thousand_tokens() -> None:
    """No drift: a float32 state carried through 100,000 tokens in pieces stays with float64, and nothing grows."""
    pieces, size = 25, 4000
    for rate in (-1e-4, -1.0):
        states: dict[torch.dtype, torch.Tensor | None] = {torch.float32: None, torch.float64: None}
        outputs: dict[torch.dtype, torch.Tensor] = {}
        for piece in range(pieces):
            inputs = make_inputs("kda", size, decay=rate, heads=1, value_heads=1, batch=1, seed=piece)
            inputs.pop("state")
            for dtype in states:
                outputs[dtype], states[dtype] = call("kda", cast(inputs, dtype), state=states[dtype], backend="chunked")
        exact, found = states[torch.float64], states[torch.float32]
        assert exact is not None and found is not None and relative(found, exact) < 1e-5
        assert relative(outputs[torch.float32], outputs[torch.float64]) < 1e-5


def test_gates_far_out() -> None:
    """R016. Raw gates of +-200, both forms, all the way through the memory: finite, and gradients too."""
    for bound, rate in itertools.product((None, -5.0), (-2.0, 0.0, 2.7)):
        inputs = make_inputs("kda", 70)
        z = torch.where(inputs["g"] > inputs["g"].median(), 200.0, -200.0)
        z[:, ::7] = 40.0
        z = z.float().requires_grad_()
        rates = torch.full((z.shape[2],), rate, requires_grad=True)
        q, k, v, beta = (inputs[name] for name in ("q", "k", "v", "beta"))
        for backend in ("reference", "chunked"):
            o, state = ops.kda(q, k, v, z, beta, A_log=rates, lower_bound=bound, backend=backend)
            grads = torch.autograd.grad(o.square().sum() + state.square().sum(), [z, rates])
            assert all(x.isfinite().all() for x in (o, state, *grads))
