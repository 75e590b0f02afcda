"""The compiled CPU backend against the definition: outputs, states, gradients, and the same bits in any company."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from palimpsest import ops
from palimpsest.ops import cpu
from tests.conftest import ARGUMENTS, Inputs, assert_close, call, cast, make_inputs, outcome, relative

GATED = ("gated_delta_rule", "kda")
TOKENS = (0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 200)
AVAILABLE = cpu.library()[0] is not None
pytestmark = pytest.mark.skipif(not AVAILABLE, reason="no C++ compiler at installation: the backend is optional")


@pytest.fixture(params=sorted(set(cpu.LIBRARIES.values())))
def instruction_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Each build that this processor can run, in turn."""
    best = torch.backends.cpu.get_cpu_capability()
    order = list(cpu.LIBRARIES)
    runs = {name for key, name in cpu.LIBRARIES.items() if key == "DEFAULT" or order.index(best) <= order.index(key)}
    name = request.param if request.param in runs else cpu.LIBRARIES["DEFAULT"]
    monkeypatch.setattr(cpu, "LIBRARIES", dict.fromkeys(cpu.LIBRARIES, name))
    cpu.library.cache_clear()
    yield name
    monkeypatch.undo()
    cpu.library.cache_clear()


def check(op: str, inputs: Inputs, limit: float = 1e-5, **options: object) -> None:
    exact = outcome(op, cast(inputs, torch.float64), backend="reference", **options)  # type: ignore[arg-type]
    found = outcome(op, inputs, backend="cpu", **options)  # type: ignore[arg-type]
    assert_close(found, exact, limit, f"({op}, T {inputs['v'].shape[1]})")
    plain = outcome(op, inputs, backend="cpu", **{**options, "gradients": False})  # type: ignore[arg-type]
    for name in ("o", "final"):
        assert relative(plain[name], exact[name]) < limit


@pytest.mark.parametrize("decay", [0.0, -0.1, -5.0, -50.0])
@pytest.mark.parametrize("op", ARGUMENTS)
def test_is_the_token_loop(op: str, decay: float, instruction_set: str) -> None:
    if op not in GATED and decay:
        return
    for tokens in TOKENS:
        check(op, make_inputs(op, tokens, decay=decay, seed=tokens))


def test_additive_memory_that_fades(instruction_set: str) -> None:
    for decay, tokens in itertools.product((-0.1, -5.0, -50.0), TOKENS):
        inputs = make_inputs("gated_delta_rule", tokens, decay=decay, seed=tokens)
        del inputs["beta"]
        check("linear_attention", inputs)


@pytest.mark.parametrize("op", ARGUMENTS)
def test_sizes(op: str, instruction_set: str) -> None:
    """Key and value channels that fill vectors, blocks and neither; several value heads to a key head."""
    for seed, (key_dim, value_dim) in enumerate([(1, 1), (1, 40), (3, 17), (16, 32), (33, 31), (64, 64), (128, 96), (256, 33)]):
        check(op, make_inputs(op, 37, key_dim=key_dim, value_dim=value_dim, seed=seed, heads=1, value_heads=2))


def test_one_key_all_along(instruction_set: str) -> None:
    """R004: closer to the definition than any matrix form, since it is the definition."""
    for op in ("delta_rule", *GATED):
        inputs = make_inputs(op, 512, identical_keys=True, decay=-3e-5 if op in GATED else None)
        exact = outcome(op, cast(inputs, torch.float64), backend="reference", gradients=False)
        found = outcome(op, inputs, backend="cpu", gradients=False)
        assert_close(found, exact, 2e-6)


@pytest.mark.parametrize("op", ARGUMENTS)
def test_pieces_and_documents(op: str, instruction_set: str) -> None:
    """Packed documents of 0, 1, 33 and 70 tokens, with their states, equal each alone, bit for bit, whatever the threads."""
    lengths = [0, 1, 33, 70]
    inputs = make_inputs(op, sum(lengths), sequences=4)
    bounds = torch.tensor([0, *itertools.accumulate(lengths)])
    check(op, inputs, cu_seqlens=bounds)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        o, final = call(op, inputs, cu_seqlens=bounds, backend="cpu")
        torch.set_num_threads(2)
        assert all(
            torch.equal(a, b) for a, b in zip((o, final), call(op, inputs, cu_seqlens=bounds, backend="cpu"), strict=True)
        )
    finally:
        torch.set_num_threads(threads)
    for row, (start, end) in enumerate(itertools.pairwise(bounds.tolist())):
        alone = {name: x[row : row + 1] if name == "state" else x[:, start:end] for name, x in inputs.items()}
        one, last = call(op, alone, backend="cpu")
        assert torch.equal(one, o[:, start:end]) and torch.equal(last[0], final[row])
    whole, last = call(op, {name: x[-1:] if name == "state" else x for name, x in inputs.items()}, backend="cpu")
    head = {name: x[-1:] if name == "state" else x[:, :33] for name, x in inputs.items()}
    first, state = call(op, head, backend="cpu")
    tail = {name: state if name == "state" else x[:, 33:] for name, x in inputs.items()}
    second, final = call(op, tail, backend="cpu")
    assert relative(torch.cat([first, second], 1), whole) < 1e-6 and relative(final, last) < 1e-6


@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize("with_bias", [False, True])
def test_gate_norms_and_sigmoid_inside(bound: float | None, with_bias: bool, instruction_set: str) -> None:
    inputs = make_inputs("kda", 45, key_dim=24)
    raw = {
        **inputs,
        "q": 3 * inputs["q"],
        "k": 0.1 * inputs["k"],
        "g": 8 * torch.randn_like(inputs["g"]),
        "beta": 4 * inputs["beta"],
    }
    raw |= {"A_log": torch.randn(4)} | ({"dt_bias": torch.randn(4 * 24)} if with_bias else {})
    options = {"lower_bound": bound, "qk_l2norm": True, "beta_is_logit": True, "scale": 0.3}
    check("kda", raw, **options)
    scalar = make_inputs("gated_delta_rule", 45)
    scalar |= {"g": 8 * torch.randn_like(scalar["g"]), "A_log": torch.randn(4)} | (
        {"dt_bias": torch.randn(4)} if with_bias else {}
    )
    check("gated_delta_rule", scalar, qk_l2norm=True)


def test_far_inputs_stay_finite(instruction_set: str) -> None:
    """Raw gates of +-200, decays to nothing, subnormal states, zero keys: finite, and as the definition says."""
    inputs = make_inputs("kda", 300, decay=-0.5)
    inputs["g"] = torch.where(torch.rand_like(inputs["g"]) < 0.5, 200.0, -200.0)
    inputs["k"][:, ::5] = 0
    for bound in (None, -5.0):
        raw = {**inputs, "A_log": torch.zeros(4)}
        check("kda", raw, lower_bound=bound, gradients=False)
        assert all(x.isfinite().all() for x in outcome("kda", raw, backend="cpu", lower_bound=bound).values())
    growing = make_inputs("kda", 60)
    growing["g"] = 0.3 * torch.randn_like(growing["g"])  # no decay at all; the other backends take it too
    check("kda", growing, 1e-4)
    fading = make_inputs("kda", 400, decay=-0.9)
    fading["v"][:, 1:] = 0
    check("kda", fading)


@pytest.mark.parametrize("op", ARGUMENTS)
def test_half_precision_inputs(op: str) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        inputs = cast(make_inputs(op, 70), dtype)
        exact = outcome(op, cast(inputs, torch.float64), backend="reference")
        found = outcome(op, inputs, backend="cpu")
        assert found["o"].dtype == dtype and found["final"].dtype == torch.float32
        assert_close(found, exact, 4 * torch.finfo(dtype).eps)


def test_inputs_stay_and_calls_repeat() -> None:
    inputs = make_inputs("kda", 70)
    before = {name: x.clone() for name, x in inputs.items()}
    first, second = outcome("kda", inputs, backend="cpu"), outcome("kda", inputs, backend="cpu")
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(torch.equal(before[name], x) for name, x in inputs.items())
    spread = {name: x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() > 2 else x for name, x in inputs.items()}
    third = outcome("kda", spread, backend="cpu")
    assert all(torch.equal(first[name], third[name]) for name in first)


def test_chosen_where_it_runs_and_refused_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    assert ops.choose(100, device)[0] == ops.choose(1, device)[0] == "cpu"
    assert ops.choose(100, device, dtype=torch.float64)[0] == "chunked" and ops.choose(9, torch.device("meta"))[0] == "chunked"
    assert ops.choose(100, device, key_dim=cpu.WIDEST + 1)[0] == "chunked"
    with pytest.raises(ValueError, match="backend 'cpu' cannot run here: the inputs are float64"):
        call("kda", cast(make_inputs("kda", 3), torch.float64), backend="cpu")
    with pytest.raises(ValueError, match="more than 256"):
        call("delta_rule", make_inputs("delta_rule", 3, key_dim=300), backend="cpu")
    cpu.library.cache_clear()
    monkeypatch.setattr(cpu, "LIBRARIES", {"DEFAULT": "none.so"})
    try:
        assert ops.choose(100, device)[0] == "chunked"
        (reason,) = (reason for name, _, reason in ops.backends() if name == "cpu")
        assert "no C++ compiler" in reason
        with pytest.raises(ValueError, match="backend 'cpu' cannot run here: not built"):
            call("kda", make_inputs("kda", 3), backend="cpu")
    finally:
        cpu.library.cache_clear()


def test_memory_of_a_backward_pass_grows_by_tiles() -> None:
    """R089: one state per 32 tokens is kept, not one a token."""
    sizes = []
    for tokens in (256, 512):
        leaves = {name: x.requires_grad_() for name, x in make_inputs("kda", tokens, key_dim=32, value_dim=32).items()}
        kept: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, kept=kept: (kept.append(x.numel()), x)[1], lambda x: x):
            call("kda", leaves, backend="cpu")
        sizes.append(max(kept))
    assert sizes == [256 // 32 * 4 * 32 * 32, 512 // 32 * 4 * 32 * 32]


def test_the_source_is_in_the_package() -> None:
    assert Path(cpu.__file__).with_name("cpu.cpp").exists()


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 16])
def test_packed_weights(rows: int, instruction_set: str) -> None:
    """Every code under every scale, and NaN for scale 255: the compiled product is that with the decoded weights."""
    draw = torch.Generator().manual_seed(0)
    packed = torch.arange(256, dtype=torch.uint8).repeat(3, 1)  # 512 columns
    scale = torch.randint(100, 150, (3, 16), generator=draw).to(torch.uint8)
    x = torch.randn(rows, 512, generator=draw)
    assert relative(ops.mxfp4_matmul(x, packed, scale), x.double() @ ops.mxfp4_decode(packed, scale).double().T) < 1e-6
    scale[1, 3] = 255
    y = ops.mxfp4_matmul(x, packed, scale)
    assert y[:, 1].isnan().all() and y[:, [0, 2]].isfinite().all()
    low = ops.mxfp4_matmul(x.bfloat16(), packed, scale)
    assert low.dtype == torch.bfloat16 and relative(low[:, 0], y[:, 0]) < 1e-2
