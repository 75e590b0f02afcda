"""The GPU kernels against the definition, under triton's interpreter on a CPU: outputs, states, gradients, company.

Run by `make kernels` in an environment with triton; elsewhere they are left out.
"""

from __future__ import annotations

import itertools
import os

import pytest
import torch

from palimpsest import ops
from tests.conftest import ARGUMENTS, Inputs, assert_close, call, cast, make_inputs, outcome, relative
from tests.ops.interpreter import mend

pytest.importorskip("triton")
RUNS = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.skipif(not RUNS, reason="needs TRITON_INTERPRET=1, as `make kernels` sets it"),
    # Products that no result uses overflow; on a GPU they do so silently.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),  # inside the interpreter
]
GATED = ("gated_delta_rule", "kda")
if RUNS:
    mend()


def sized(op: str, tokens: int, **options: object) -> Inputs:
    return make_inputs(op, tokens, **{"heads": 1, "value_heads": 2, "key_dim": 16, "value_dim": 16, **options})  # type: ignore


def check(op: str, inputs: Inputs, limit: float = 1e-5, **options: object) -> None:
    exact = outcome(op, cast(inputs, torch.float64), backend="reference", **options)  # type: ignore[arg-type]
    found = outcome(op, inputs, backend="triton", **options)  # type: ignore[arg-type]
    note = f"({op}, T {inputs['v'].shape[1]})"
    assert_close(found, exact, limit, note)
    o, final = call(op, inputs, backend="triton", **{k: v for k, v in options.items() if k != "gradients"})
    assert o.dtype == inputs["v"].dtype and final.dtype == torch.float32
    assert relative(o, exact["o"]) < limit and relative(final, exact["final"]) < limit, note


@pytest.mark.parametrize("decay", [0.0, -0.1, -5.0, -50.0])
@pytest.mark.parametrize("op", ARGUMENTS)
def test_is_the_token_loop(op: str, decay: float) -> None:
    if op not in GATED and decay:
        return
    for tokens in (0, 1, 8, 9, 63, 64, 65, 130):
        check(op, sized(op, tokens, decay=decay, seed=tokens))


def test_additive_memory_that_fades() -> None:
    for decay, tokens in itertools.product((-0.1, -5.0, -50.0), (1, 9, 64, 130)):
        inputs = sized("gated_delta_rule", tokens, decay=decay, seed=tokens)
        del inputs["beta"]
        check("linear_attention", inputs)


@pytest.mark.parametrize(("key_dim", "value_dim"), [(1, 1), (3, 17), (20, 33), (32, 64), (96, 32), (128, 16), (16, 128)])
def test_sizes(key_dim: int, value_dim: int) -> None:
    for op in ARGUMENTS if key_dim * value_dim <= 1024 else ("kda", "gated_delta_rule"):
        check(op, sized(op, 67, key_dim=key_dim, value_dim=value_dim, heads=2, value_heads=4))


@pytest.mark.parametrize("op", ["delta_rule", *GATED])
def test_one_key_all_along(op: str) -> None:
    """R004. In bfloat16 the solve goes by blocks: a power series would be off by more than the result."""
    inputs = sized(op, 200, identical_keys=True, decay=-3e-5 if op in GATED else None)
    check(op, inputs, 1e-5, gradients=False)
    low = cast(inputs, torch.bfloat16)
    exact = outcome(op, cast(low, torch.float64), backend="reference", gradients=False)
    for name, options in (("ready", {}), ("norm", {"qk_l2norm": True})):
        found = outcome(op, low, backend="triton", gradients=False, **options)
        assert relative(found["o"], exact["o"]) < 0.05, name


@pytest.mark.parametrize("op", ARGUMENTS)
def test_half_precision_inputs(op: str) -> None:
    inputs = {name: x if name == "state" else x.bfloat16() for name, x in sized(op, 100, key_dim=32).items()}
    exact = outcome(op, cast(inputs, torch.float64), backend="reference")
    found = outcome(op, inputs, backend="triton")
    assert found["o"].dtype == torch.bfloat16 and found["final"].dtype == torch.float32
    assert_close(found, exact, 2 * torch.finfo(torch.bfloat16).eps)
    check(op, cast(sized(op, 70), torch.float16), 4 * torch.finfo(torch.float16).eps)


@pytest.mark.parametrize("op", ARGUMENTS)
def test_pieces_documents_and_company(op: str) -> None:
    """Packed documents equal each alone and rows of a batch the row alone, bit for bit; pieces add up to the whole."""
    lengths = [0, 1, 8, 9, 64, 70]
    inputs = sized(op, sum(lengths), sequences=len(lengths))
    bounds = torch.tensor([0, *itertools.accumulate(lengths)])
    check(op, inputs, cu_seqlens=bounds)
    for dtype in (torch.float32, torch.bfloat16):
        given = cast(inputs, dtype)
        o, final = call(op, given, cu_seqlens=bounds, backend="triton")
        for row, (start, end) in enumerate(itertools.pairwise(bounds.tolist())):
            alone = {name: x[row : row + 1] if name == "state" else x[:, start:end] for name, x in given.items()}
            one, last = call(op, alone, backend="triton")
            assert torch.equal(one, o[:, start:end]) and torch.equal(last[0], final[row])
    batch = sized(op, 80, batch=3)
    o, final = call(op, batch, backend="triton")
    one, last = call(op, {name: x[1:2] for name, x in batch.items()}, backend="triton")
    assert torch.equal(one[0], o[1]) and torch.equal(last[0], final[1])
    first, state = call(op, {name: x if name == "state" else x[:, :30] for name, x in batch.items()}, backend="triton")
    tail = {name: state if name == "state" else x[:, 30:] for name, x in batch.items()}
    second, end = call(op, tail, backend="triton")
    assert relative(torch.cat([first, second], 1), o) < 1e-6 and relative(end, final) < 1e-6


def test_long_documents_of_few_heads_go_by_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """What segments make of any state is folded up, and a document's cuts do not depend on its neighbours."""
    from palimpsest.ops.triton import launch

    monkeypatch.setattr(launch, "SEGMENT", 1)
    for op in ("linear_attention", "kda"):
        inputs = sized(op, 330, batch=2, decay=-0.05)
        check(op, inputs, gradients=False)
        bounds = torch.tensor([0, 0, 3, 40, 300, 330])
        packed = sized(op, 330, sequences=5, decay=-0.05)
        check(op, packed, gradients=False, cu_seqlens=bounds)
        o, final = call(op, packed, cu_seqlens=bounds, backend="triton")
        alone = {name: x[3:4] if name == "state" else x[:, 40:300] for name, x in packed.items()}
        one, last = call(op, alone, backend="triton")
        assert torch.equal(one, o[:, 40:300]) and torch.equal(last[0], final[3])


@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize("with_bias", [False, True])
def test_gate_norms_and_sigmoid_inside(bound: float | None, with_bias: bool) -> None:
    inputs = sized("kda", 70, key_dim=24)
    raw = {**inputs, "q": 3 * inputs["q"], "k": 0.1 * inputs["k"], "g": 8 * torch.randn_like(inputs["g"])}
    raw |= {"beta": 4 * inputs["beta"], "A_log": torch.randn(2)} | ({"dt_bias": torch.randn(48)} if with_bias else {})
    options = {"qk_l2norm": True, "beta_is_logit": True, "scale": 0.3}
    limits = 1e-5 if bound else 1e-3  # the gradient of A_log is a sum of large terms of both signs
    check("kda", raw, limits, lower_bound=bound, **options)
    scalar = sized("gated_delta_rule", 70)
    scalar |= {"g": 8 * torch.randn_like(scalar["g"]), "A_log": torch.randn(2)}
    check("gated_delta_rule", scalar | ({"dt_bias": torch.randn(2)} if with_bias else {}), 1e-3, **options)


def test_far_inputs_stay_finite() -> None:
    """Raw gates of +-200, no key, no strength, a decay of one strong token among weak ones."""
    inputs = sized("kda", 130, decay=-0.5)
    inputs["g"] = torch.where(torch.rand_like(inputs["g"]) < 0.5, 200.0, -200.0)
    inputs["k"][:, ::5] = 0
    inputs["beta"][:, ::3] = 0
    for bound in (None, -5.0):
        raw = {**inputs, "A_log": torch.ones(2)}
        check("kda", raw, 1e-4, lower_bound=bound, gradients=False)
        assert all(x.isfinite().all() for x in outcome("kda", raw, backend="triton", lower_bound=bound).values())
    lone = sized("kda", 130, decay=-0.01)
    lone["g"][:, 7::31] = -90.0
    check("kda", lone)
    nothing = sized("kda", 40)
    nothing["beta"].zero_()
    check("kda", nothing)


def test_offsets_beyond_32_bits() -> None:
    """R020: tokens so far apart that the last ones lie beyond 2^31 elements."""
    inputs = {name: x.bfloat16() for name, x in sized("delta_rule", 130, value_heads=1).items()}
    far = torch.empty(0, dtype=torch.bfloat16).new_empty(130 * (1 << 24) + 16)  # untouched memory is not taken
    spread = far.as_strided(inputs["v"].shape, (130 << 24, 1 << 24, 16, 1))
    spread.copy_(inputs["v"])
    o, final = call("delta_rule", {**inputs, "v": spread}, backend="triton")
    near, last = call("delta_rule", inputs, backend="triton")
    assert torch.equal(o, near) and torch.equal(final, last)


def test_inputs_stay_and_calls_repeat() -> None:
    inputs = sized("kda", 70)
    before = {name: x.clone() for name, x in inputs.items()}
    first, second = outcome("kda", inputs, backend="triton"), outcome("kda", inputs, backend="triton")
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(torch.equal(before[name], x) for name, x in inputs.items())
    spread = {name: x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() > 2 else x for name, x in inputs.items()}
    third = outcome("kda", spread, backend="triton")
    assert all(torch.equal(first[name], third[name]) for name in first)


def test_between_the_passes_only_inputs_are_kept() -> None:
    """R089 in its strictest form: no state, nothing that grows faster than the inputs."""
    leaves = {name: x.requires_grad_() for name, x in sized("kda", 200).items()}
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x.numel()), x)[1], lambda x: x):
        call("kda", leaves, backend="triton")
    assert sum(kept) == sum(x.numel() for x in leaves.values())


def test_chosen_and_refused_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ops.choose(100, torch.device("cpu"), "triton") == ("triton", "asked for")
    with pytest.raises(ValueError, match="backend 'triton' cannot run here: the inputs are float64"):
        call("kda", cast(sized("kda", 3), torch.float64), backend="triton")
    gpu, measured = torch.device("cuda"), [True]
    with monkeypatch.context() as patch:
        patch.setattr(ops, "_is_measured", lambda device: measured[0])
        assert ops.choose(100, gpu)[0] == ops.choose(1, gpu, dtype=torch.bfloat16)[0] == "triton"
        assert ops.choose(100, gpu, dtype=torch.float64)[0] == ops.choose(100, gpu, key_dim=257)[0] == "chunked"
        measured[0] = False
        assert ops.choose(100, gpu)[0] == "chunked" and "9.0" in ops.choose(100, gpu)[1]
    with pytest.raises(ValueError, match="more than 256"):
        call("delta_rule", sized("delta_rule", 3, key_dim=300), backend="triton")
