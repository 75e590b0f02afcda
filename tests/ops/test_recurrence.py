"""The recurrent family: every backend equals the token loop, in outputs, final state and the gradient of every input."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from palimpsest import ops
from tests.conftest import ARGUMENTS, Inputs, assert_close, call, cast, make_inputs, outcome, relative

BACKENDS = ("reference", "chunked")
LENGTHS = (0, 1, 2, 15, 16, 17, 63, 64, 65, 200)
CHUNKS = (16, 32, 64, 100, 256)
GATED = ("gated_delta_rule", "kda")
CASES = [(op, decay) for op in ARGUMENTS for decay in ((0.0, -0.1, -5.0, -50.0) if op in GATED else (0.0,))]


def fp32_limits(op: str, inputs: Inputs, exact: Inputs, **options: Any) -> dict[str, float]:
    """1e-5, or 20 times what the float32 token loop itself is off where a quantity is ill-conditioned."""
    loop = outcome(op, cast(inputs, torch.float32), backend="reference", **options)
    return {name: max(1e-5, 20 * relative(x, exact[name])) for name, x in loop.items()}


def check_chunked(op: str, inputs: Inputs, chunks: tuple[int, ...] = CHUNKS, **options: Any) -> None:
    """Float64 to 1e-11 and float32 to 1e-5 of the float64 token loop; `inputs` are float32."""
    exact = outcome(op, cast(inputs, torch.float64), backend="reference", **options)
    limits = fp32_limits(op, inputs, exact, **options)
    for chunk in chunks:
        note = f"(T {inputs['q'].shape[1]}, chunk {chunk})"
        found = outcome(op, cast(inputs, torch.float64), backend="chunked", chunk_size=chunk, **options)
        assert_close(found, exact, 1e-11, f"float64 {note}")
        found = outcome(op, inputs, backend="chunked", chunk_size=chunk, **options)
        assert_close(found, exact, limits, f"float32 {note}")


@pytest.mark.parametrize(("op", "decay"), CASES)
def test_chunked_is_the_token_loop(op: str, decay: float) -> None:
    for tokens in LENGTHS:
        check_chunked(op, make_inputs(op, tokens, decay=decay, batch=2, seed=tokens))


@pytest.mark.parametrize("op", ARGUMENTS)
def test_identical_keys(op: str) -> None:
    """R004: one key over and over, almost no decay, beta near 1. The powers of a Neumann series would explode."""
    for tokens, decay in itertools.product((16, 65, 128), (0.0, -3e-5) if op in GATED else (0.0,)):
        check_chunked(op, make_inputs(op, tokens, decay=decay, identical_keys=True), (16, 32, 64, 128, 256))


@pytest.mark.parametrize("op", GATED)
def test_every_token_has_its_own_decay(op: str) -> None:
    """Tokens and channels that forget everything stand beside some that forget nothing."""
    for seed, values in enumerate([(0.0, -50.0), (0.0, -0.1, -5.0, -50.0), (0.0, 0.0, 0.0, -50.0), (-1e-4, -80.0)]):
        inputs = make_inputs(op, 97, seed=seed)
        pick = torch.randint(len(values), inputs["g"].shape)
        check_chunked(op, {**inputs, "g": torch.tensor(values)[pick]}, (16, 64, 256))
        whole = torch.randint(len(values), inputs["g"].shape[:2])  # all heads and channels of a token alike
        shape = (*whole.shape, *[1] * (inputs["g"].dim() - 2))
        g = torch.tensor(values)[whole].view(shape).expand_as(inputs["g"])
        check_chunked(op, {**inputs, "g": g.contiguous()}, (64,))


@pytest.mark.parametrize("rate", [-1.0, -1.5, -5.0, -20.0])
def test_strong_constant_decay(rate: float) -> None:
    """R001: exp(G_i) exp(-G_j) overflows once a chunk decays by more than 88 nats."""
    for op in GATED:
        inputs = make_inputs(op, 64, heads=1, value_heads=1, key_dim=32, value_dim=32)
        inputs["g"].fill_(rate)
        inputs["beta"].fill_(0.5)
        check_chunked(op, inputs, (16, 64))


@pytest.mark.parametrize("decay", [-0.1, -5.0, -50.0])
def test_additive_memory_that_fades(decay: float) -> None:
    """Forgetting without the delta rule: linear attention with a decay per head."""
    inputs: Inputs = {}
    for tokens in LENGTHS:
        inputs = make_inputs("gated_delta_rule", tokens, decay=decay, batch=2, seed=tokens)
        del inputs["beta"]
        check_chunked("linear_attention", inputs)
    q, k, v, g, state = (inputs[name].double() for name in ("q", "k", "v", "g", "state"))
    o, _ = ops.linear_attention(q, k, v, g=g, state=state)
    s = state[1, 3].clone()
    for t in range(3):
        s = g[1, t, 3].exp() * s + torch.outer(k[1, t, 1], v[1, t, 3])
        assert relative(o[1, t, 3], s.T @ q[1, t, 1] * 6**-0.5) < 1e-12
    with pytest.raises(ValueError, match=r"g has shape \[2, 200, 4, 1\]; expected \[2, 200, 4\]"):
        ops.linear_attention(q, k, v, g=g.unsqueeze(-1))


@pytest.mark.parametrize("op", ARGUMENTS)
def test_head_sizes(op: str) -> None:
    for seed, (key_dim, value_dim, heads, value_heads) in enumerate(
        [(1, 1, 1, 1), (1, 7, 1, 3), (9, 1, 2, 2), (24, 40, 2, 4), (40, 24, 1, 1)]
    ):
        inputs = make_inputs(op, 37, seed=seed, key_dim=key_dim, value_dim=value_dim, heads=heads, value_heads=value_heads)
        check_chunked(op, inputs, (16, 32))


def test_every_chunk_size() -> None:
    inputs = make_inputs("kda", 70, decay=-1.0)
    exact = outcome("kda", cast(inputs, torch.float64), backend="reference")
    for chunk in range(1, 257, 5):
        found = outcome("kda", cast(inputs, torch.float64), backend="chunked", chunk_size=chunk)
        assert_close(found, exact, 1e-11, f"(chunk {chunk})")
    for chunk in (0, -1, 257):
        with pytest.raises(ValueError, match=rf"chunk_size is {chunk}; it must be in 1..256"):
            call("kda", inputs, chunk_size=chunk)


def test_many_chunks_and_rows() -> None:
    """More chunk matrices than are worked on together, so that groups of chunks follow one another."""
    for op in ARGUMENTS:
        inputs = make_inputs(op, 300, batch=5, heads=1, value_heads=2, key_dim=3, value_dim=2, seed=3)
        check_chunked(op, inputs, (16,))
        packed = make_inputs(op, 460, heads=2, value_heads=4, sequences=5, key_dim=3, value_dim=2, seed=4)
        check_chunked(op, packed, (16,), cu_seqlens=torch.tensor([0, 30, 230, 230, 259, 460]))


def test_gradients_of_one_output_only() -> None:
    """Either o or the final state alone may be used; the other's gradient is then zero."""
    for op, used in itertools.product(ARGUMENTS, (0, 1)):
        leaves = {n: x.requires_grad_() for n, x in make_inputs(op, 33, dtype=torch.float64).items()}
        grads = []
        for backend in BACKENDS:
            result = call(op, leaves, backend=backend)[used].square().sum()
            grads.append(torch.autograd.grad(result, list(leaves.values()), allow_unused=True))
        for name, slow, fast in zip(leaves, *grads, strict=True):
            expected = torch.zeros_like(leaves[name]) if slow is None else slow
            assert fast is not None and relative(fast, expected) <= 1e-11, (op, used, name)


def test_gradcheck_of_the_loop() -> None:
    """The token loop's own gradients against finite differences: it is the oracle of everything else."""
    for op in ARGUMENTS:
        inputs = make_inputs(op, 3, heads=1, value_heads=2, key_dim=2, value_dim=3, dtype=torch.float64)
        names = list(inputs)
        leaves = tuple(inputs[name].requires_grad_() for name in names)

        def function(*tensors: Tensor, op: str = op, names: list[str] = names) -> tuple[Tensor, Tensor]:
            return call(op, dict(zip(names, tensors, strict=True)), backend="reference")

        assert torch.autograd.gradcheck(function, leaves)


# -------------------------------------------------------------------------------------------- what the loop itself does


def test_the_loop_by_hand() -> None:
    """Forget, correct with the faded memory, write, read after the write: two tokens against plain arithmetic."""
    inputs = make_inputs("kda", 2, heads=1, value_heads=1, key_dim=2, value_dim=3, dtype=torch.float64)
    q, k, v, g, beta, state = (inputs[name][0] for name in ("q", "k", "v", "g", "beta", "state"))
    s = state[0].clone()
    for t in range(2):
        for c in range(2):
            s[c] *= g[t, 0, c].exp()
        seen = s[0] * k[t, 0, 0] + s[1] * k[t, 0, 1]
        for c in range(2):
            s[c] += k[t, 0, c] * beta[t, 0] * (v[t, 0] - seen)
        read = s[0] * q[t, 0, 0] + s[1] * q[t, 0, 1]
        for backend in BACKENDS:
            o, final = call("kda", inputs, backend=backend)
            assert relative(o[0, t, 0], read * 2**-0.5) < 1e-14
            assert t == 0 or relative(final[0, 0], s) < 1e-14


@pytest.mark.parametrize("backend", BACKENDS)
def test_published_two_token_vector(backend: str) -> None:
    rows = (
        [[1.0, 0.0], [1.0, 1.0]],
        [[3.0, 4.0], [0.0, 2.0]],
        [[1.0, 2.0], [-1.0, 0.5]],
        [[0.0, 1.0], [-1.0, -2.0]],
    )
    q, k, v, z = (torch.tensor(x, dtype=torch.float64).view(1, 2, 1, 2) for x in rows)
    beta = torch.tensor([[[0.0], [1.0]]], dtype=torch.float64)
    o, final = ops.kda(
        q,
        k,
        v,
        z,
        beta,
        A_log=torch.zeros(1, dtype=torch.float64),
        lower_bound=-5.0,
        qk_l2norm=True,
        beta_is_logit=True,
        backend=backend,
    )
    gate = ops.kda_gate(z, torch.zeros(1), None, -5.0)
    written = torch.tensor([[-2.5, -3.65529289], [-1.34470711, -0.59601461]], dtype=torch.float64)
    assert (gate.view(2, 2) - written).abs().max() < 1e-8
    outputs = torch.tensor([[0.21213192, 0.42426385], [-0.29679923, 0.32022442]], dtype=torch.float64)
    states = torch.tensor([[0.07818481, 0.15636961], [-0.67178341, 0.4840794]], dtype=torch.float64)
    assert (o.view(2, 2) - outputs).abs().max() < 1e-6
    assert (final.view(2, 2) - states).abs().max() < 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_scale(backend: str) -> None:
    """K**-0.5 by default in all four, multiplies q only, and any number may replace it."""
    for op in ARGUMENTS:
        inputs = make_inputs(op, 20, dtype=torch.float64)
        o, final = call(op, inputs, backend=backend)
        named, _ = call(op, inputs, backend=backend, scale=6**-0.5)
        other, same = call(op, inputs, backend=backend, scale=-3.0)
        assert relative(named, o) < 1e-14 and relative(other, o * -3.0 * 6**0.5) < 1e-14
        assert torch.equal(final, same)


def test_value_head_reads_its_key_head() -> None:
    """R021: value head j reads key head j // (HV // H), the same as repeating q and k by hand."""
    for op, value_heads, backend in itertools.product(ARGUMENTS, (4, 6), BACKENDS):
        inputs = make_inputs(op, 70, value_heads=value_heads, key_dim=16, value_dim=24)
        explicit = {**inputs, **{n: inputs[n].repeat_interleave(value_heads // 2, 2) for n in ("q", "k")}}
        o, final = call(op, inputs, backend=backend)
        again, last = call(op, explicit, backend=backend)
        assert torch.equal(o, again) and torch.equal(final, last)
    with pytest.raises(ValueError, match="v has 3 heads; it must be a multiple of the 2 heads of q and k"):
        call("delta_rule", make_inputs("delta_rule", 5, value_heads=3))


def test_state_is_keys_by_values() -> None:
    """R026: [HV,K,V]. With K = V an asymmetric state tells a transpose apart; with K != V its shape does."""
    state = torch.zeros(1, 1, 8, 8, dtype=torch.float64)
    state[0, 0, 2, 5] = 1
    q = F.one_hot(torch.tensor(2), 8).double().view(1, 1, 1, 8)
    zero = torch.zeros(1, 1, 1, 8, dtype=torch.float64)
    for backend in BACKENDS:
        o, final = ops.linear_attention(q, zero, zero, state=state, scale=1.0, backend=backend)
        assert o.flatten().nonzero().item() == 5 and torch.equal(final, state)
        _, final = ops.linear_attention(zero, q, F.one_hot(torch.tensor(5), 8).double().view_as(q), backend=backend)
        assert final[0, 0].nonzero().tolist() == [[2, 5]]
    inputs = make_inputs("kda", 4, key_dim=8, value_dim=12)
    inputs["state"] = inputs["state"].mT.contiguous()
    with pytest.raises(ValueError, match=r"state has shape \[1, 4, 12, 8\]; expected \[1, 4, 8, 12\]"):
        call("kda", inputs)


# ------------------------------------------------------------------------------------------------- pieces and documents


def pieces_of(inputs: Inputs, bounds: list[int]) -> list[Inputs]:
    spans = zip(bounds, bounds[1:], strict=False)
    return [{n: x[:, a:b] for n, x in inputs.items() if n != "state"} for a, b in spans]


@settings(max_examples=25)
@given(
    op=st.sampled_from(list(ARGUMENTS)),
    cuts=st.lists(st.integers(0, 90), max_size=6),
    chunk=st.sampled_from([1, 16, 64]),
    backends=st.lists(st.sampled_from(BACKENDS), min_size=7, max_size=7),
)
def test_pieces_equal_the_whole(op: str, cuts: list[int], chunk: int, backends: list[str]) -> None:
    """Any split, each piece by any backend, gradients through the states that are handed on."""
    inputs = {n: x.requires_grad_() for n, x in make_inputs(op, 90, batch=2, dtype=torch.float64).items()}
    results = []
    for bounds in ([0, 90], [0, *sorted(cuts), 90]):
        outputs, state = [], inputs["state"]
        for piece, backend in zip(pieces_of(inputs, bounds), backends, strict=False):
            o, state = call(op, {**piece, "state": state}, chunk_size=chunk, backend=backend)
            outputs.append(o)
        o = torch.cat(outputs, 1)
        grads = torch.autograd.grad((o.sin().sum() + state.cos().sum()), list(inputs.values()))
        results.append({"o": o, "final": state} | dict(zip(inputs, grads, strict=True)))
    assert_close(results[1], results[0], 1e-11)


@settings(max_examples=25)
@given(
    op=st.sampled_from(list(ARGUMENTS)),
    lengths=st.lists(st.sampled_from([0, 1, 2, 3, 15, 16, 17, 33, 64, 70]), min_size=1, max_size=6),
    chunk=st.sampled_from([16, 32, 64]),
    kind=st.sampled_from([torch.int32, torch.int64]),
)
def test_packed_equals_separate(op: str, lengths: list[int], chunk: int, kind: torch.dtype) -> None:
    """Documents of any length, in any order, with their own states; a document of no tokens returns its state."""
    bounds = [0, *itertools.accumulate(lengths)]
    inputs = make_inputs(op, bounds[-1], sequences=len(lengths), dtype=torch.float64, seed=bounds[-1])
    cu_seqlens = torch.tensor(bounds, dtype=kind)
    for backend in BACKENDS:
        leaves = {n: x.clone().requires_grad_() for n, x in inputs.items()}
        packed = call(op, leaves, backend=backend, chunk_size=chunk, cu_seqlens=cu_seqlens)
        pieces = [
            call(op, {**piece, "state": leaves["state"][row : row + 1]}, backend="reference")
            for row, piece in enumerate(pieces_of(leaves, bounds))
        ]
        results = []
        for o, final in (packed, tuple(torch.cat(x, dim) for dim, x in zip((1, 0), zip(*pieces, strict=True), strict=True))):
            loss = o.sin().sum() + final.cos().sum()
            grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
            results.append({"o": o, "final": final} | dict(zip(inputs, grads, strict=True)))
        assert_close(results[0], results[1], 1e-11, backend)
        for row, length in enumerate(lengths):
            assert length or torch.equal(packed[1][row], inputs["state"][row])


def test_order_of_documents_does_not_matter() -> None:
    lengths = [5, 33, 1, 0, 16]
    starts = [0, *itertools.accumulate(lengths)]
    inputs = make_inputs("kda", sum(lengths), sequences=5, seed=9)
    o, final = call("kda", inputs, cu_seqlens=torch.tensor(starts), chunk_size=16, backend="chunked")
    for order in itertools.islice(itertools.permutations(range(5)), 0, 120, 17):
        tokens = torch.cat([torch.arange(starts[row], starts[row + 1]) for row in order])
        moved = {n: x[list(order)] if n == "state" else x[:, tokens] for n, x in inputs.items()}
        bounds = torch.tensor([0, *itertools.accumulate(lengths[row] for row in order)])
        again, states = call("kda", moved, cu_seqlens=bounds, chunk_size=16, backend="chunked")
        assert relative(again, o[:, tokens]) < 1e-6 and relative(states, final[list(order)]) < 1e-6


@pytest.mark.parametrize("backend", [*BACKENDS, None])
def test_nothing_at_all(backend: str | None) -> None:
    """T = 0 returns the state given, or zeros; so do no rows and no documents."""
    for op in ARGUMENTS:
        inputs = make_inputs(op, 0, batch=3)
        o, final = call(op, inputs, backend=backend)
        assert o.shape == (3, 0, 4, 10) and torch.equal(final, inputs["state"])
        state = inputs.pop("state")
        _, final = call(op, inputs, backend=backend)
        assert torch.equal(final, torch.zeros_like(state)) and final.dtype == torch.float32
        o, final = call(op, make_inputs(op, 4, batch=0), backend=backend)
        assert o.shape == (0, 4, 4, 10) and final.shape == (0, 4, 6, 10)
        none = make_inputs(op, 0, sequences=0)
        o, final = call(op, none, backend=backend, cu_seqlens=torch.tensor([0]))
        assert o.shape == (1, 0, 4, 10) and final.shape == (0, 4, 6, 10)
        empty = make_inputs(op, 0, sequences=2)
        _, final = call(op, empty, backend=backend, cu_seqlens=torch.tensor([0, 0, 0]))
        assert torch.equal(final, empty["state"])


REFUSED = {
    "decreasing": ([0, 12, 8, 16], 16, "must not decrease"),
    "not from zero": ([1, 5], 5, "must start with 0"),
    "too short (R037)": ([0, 100], 128, "ends with 100; it must end with the number of tokens, 128"),
    "shorter than T": ([0, 5], 9, "ends with 5; it must end with the number of tokens, 9"),
    "too long": ([0, 20], 16, "ends with 20; it must end with the number of tokens, 16"),
    "no boundaries": ([], 0, "must start with 0"),
}


@pytest.mark.parametrize(("bounds", "tokens", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_boundaries(bounds: list[int], tokens: int, message: str) -> None:
    """R037 and R038: what is wrong with the boundaries is said."""
    for op in ARGUMENTS:
        inputs = make_inputs(op, tokens)
        del inputs["state"]
        with pytest.raises(ValueError, match=f"cu_seqlens.*{message}"):
            call(op, inputs, cu_seqlens=torch.tensor(bounds, dtype=torch.int64))


def test_refused_boundary_tensors() -> None:
    inputs = make_inputs("kda", 4)
    del inputs["state"]
    for bounds in (torch.tensor([0.0, 4.0]), torch.tensor([[0, 4]]), torch.tensor(4), torch.tensor([True])):
        with pytest.raises(ValueError, match=r"cu_seqlens is torch\.\w+ with shape .*must be int32 or int64 \[N\+1\]"):
            call("kda", inputs, cu_seqlens=bounds)
    two = make_inputs("kda", 4, batch=2)
    del two["state"]
    with pytest.raises(ValueError, match="the batch is 2; with cu_seqlens it must be 1"):
        call("kda", two, cu_seqlens=torch.tensor([0, 4]))
    one = make_inputs("kda", 4)
    with pytest.raises(ValueError, match=r"state has shape \[1, 4, 6, 10\]; expected \[2, 4, 6, 10\]"):
        call("kda", one, cu_seqlens=torch.tensor([0, 1, 4]))


# ----------------------------------------------------------------------------------------------------- shapes and names


def test_refused_shapes() -> None:
    good = make_inputs("kda", 5)
    bad = {
        "q": (good["q"][0], r"q has shape \[5, 2, 6\]; it must be \[B,T,H,K\] with B=1 and T=5"),
        "k": (good["k"][:, :, :1], r"k has shape \[1, 5, 1, 6\]; expected \[1, 5, 2, 6\]"),
        "v": (good["v"][0], r"v has shape \[5, 4, 10\]; it must be \[B,T,HV,V\]"),
        "g": (good["g"][:, :, :2], r"g has shape \[1, 5, 2, 6\]; expected \[1, 5, 4, 6\]"),
        "beta": (good["beta"][..., :2], r"beta has shape \[1, 5, 2\]; expected \[1, 5, 4\]"),
        "state": (good["state"][:, :2], r"state has shape \[1, 2, 6, 10\]; expected \[1, 4, 6, 10\]"),
    }
    for name, (x, message) in bad.items():
        with pytest.raises(ValueError, match=message):
            call("kda", {**good, name: x})
    scalar = make_inputs("gated_delta_rule", 5)
    with pytest.raises(ValueError, match=r"g has shape \[1, 5, 4, 6\]; expected \[1, 5, 4\]"):
        call("gated_delta_rule", {**scalar, "g": good["g"]})
    with pytest.raises(ValueError, match=r"q has shape \[1, 4, 2, 6\]; .* T=5"):
        call("delta_rule", {**make_inputs("delta_rule", 5), "q": good["q"][:, :4]})


def test_backend_names() -> None:
    inputs = make_inputs("kda", 5)
    with pytest.raises(ValueError, match="backend is 'fast'; it must be one of reference, chunked"):
        call("kda", inputs, backend="fast")
    names = [name for name, _, _ in ops.backends()]
    assert names == ["reference", "chunked", "triton", "cpu"]
    for name, available, reason in ops.backends():
        assert reason
        if not available:
            with pytest.raises(ValueError, match=f"backend '{name}' cannot run here: "):
                call("kda", inputs, backend=name)
    device = torch.device("cpu")
    assert [ops.choose(tokens, device, dtype=torch.float64)[0] for tokens in (1, 2048)] == ["reference", "chunked"]
    assert ops.choose(2048, device, "reference") == ("reference", "asked for")


@pytest.mark.parametrize("backend", [*BACKENDS, None])
def test_inputs_stay_and_calls_repeat(backend: str | None) -> None:
    """R028: nothing is written over, so a second call gives the same bits."""
    for op, dtype in itertools.product(ARGUMENTS, (torch.float32, torch.float64, torch.bfloat16)):
        for bounds in (None, torch.tensor([0, 3, 3, 40])):
            inputs = make_inputs(op, 40, dtype=dtype, sequences=None if bounds is None else 3)
            before = {name: x.clone() for name, x in inputs.items()}
            first = outcome(op, inputs, backend=backend, cu_seqlens=bounds)
            again = outcome(op, inputs, backend=backend, cu_seqlens=bounds)
            with torch.no_grad():
                o, final = call(op, inputs, backend=backend, cu_seqlens=bounds)
            assert all(torch.equal(x, before[name]) for name, x in inputs.items())
            assert all(torch.equal(x, again[name]) for name, x in first.items())
            assert relative(o, first["o"]) < 1e-5 and relative(final, first["final"]) < 1e-5
            # The returned state is a new tensor: writing into it leaves the one that came in alone.
            final.zero_()
            assert torch.equal(inputs["state"], before["state"])


def test_short_input_state_is_new() -> None:
    """Also when there is nothing to do."""
    for backend, tokens in itertools.product(BACKENDS, (0, 1)):
        inputs = make_inputs("kda", tokens)
        before = inputs["state"].clone()
        call("kda", inputs, backend=backend)[1].zero_()
        assert torch.equal(inputs["state"], before)


def test_dtypes() -> None:
    """o has v's dtype; the state is float32, and float64 when q is."""
    for backend, dtype in itertools.product(BACKENDS, (torch.bfloat16, torch.float16, torch.float32, torch.float64)):
        inputs = make_inputs("kda", 20, dtype=dtype)
        for given_state in (True, False):
            if not given_state:
                del inputs["state"]
            o, final = call("kda", inputs, backend=backend)
            assert o.dtype == dtype
            assert final.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_layout_of_the_tensors_does_not_matter() -> None:
    """R017: T is not a multiple of the chunk and the inputs are views into larger buffers that end in NaN."""
    for tokens, op in itertools.product((1, 2, 63, 65, 100, 127, 129), ("delta_rule", "kda")):
        inputs = make_inputs(op, tokens)
        exact = outcome(op, cast(inputs, torch.float64), backend="reference")
        buffers, views = {}, {}
        for name, x in inputs.items():
            if name == "state":
                buffers[name] = views[name] = x.clone().requires_grad_()
                continue
            buffers[name] = torch.full((1, 160, *x.shape[2:]), torch.nan)
            buffers[name][:, :tokens] = x
            views[name] = buffers[name].requires_grad_()[:, :tokens]
        o, final = call(op, views, backend="chunked", chunk_size=64)
        draw = torch.Generator().manual_seed(7)
        weights = [torch.randn(x.shape, generator=draw, dtype=torch.float64).to(x.dtype) for x in (o, final)]
        grads = torch.autograd.grad([o, final], list(buffers.values()), weights)
        found = {"o": o, "final": final}
        for name, grad in zip(buffers, grads, strict=True):
            found[f"d_{name}"] = grad if name == "state" else grad[:, :tokens]
            assert name == "state" or not grad[:, tokens:].any(), f"{name} has a gradient behind its end"
        assert_close(found, exact, 1e-5, f"({op}, T {tokens})")


def test_strided_inputs() -> None:
    inputs = make_inputs("kda", 50, batch=2, dtype=torch.float64)
    strided = {n: x.transpose(1, 2).contiguous().transpose(1, 2) if n != "state" else x for n, x in inputs.items()}
    strided["state"] = inputs["state"].mT.contiguous().mT
    for backend in BACKENDS:
        found = outcome("kda", strided, backend=backend)
        assert_close(found, outcome("kda", inputs, backend=backend), 1e-12)
        o, final = call("kda", strided, backend=backend)
        assert relative(o, found["o"]) < 1e-12 and relative(final, found["final"]) < 1e-12
    # One gradient for all: autograd hands over tensors whose strides are zero.
    leaf = {n: x.clone().requires_grad_() for n, x in inputs.items()}
    o, final = call("kda", leaf, backend="chunked")
    (o.sum() + final.sum()).backward()
    slow = {n: x.clone().requires_grad_() for n, x in inputs.items()}
    o, final = call("kda", slow, backend="reference")
    (o.sum() + final.sum()).backward()
    for name in inputs:
        assert relative(leaf[name].grad, slow[name].grad) < 1e-11  # type: ignore[arg-type]


def test_no_warning_on_short_input() -> None:
    """R024: fewer tokens than heads is what every short prompt has."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for tokens in (6, 1):
            outcome("kda", make_inputs("kda", tokens, heads=32, value_heads=32, key_dim=4, value_dim=4))


# ------------------------------------------------------------------------------------------------------------ precision


@pytest.mark.parametrize("op", ARGUMENTS)
def test_half_precision_inputs(op: str) -> None:
    """At most twice the error that rounding the inputs makes by itself (R004, R010), and finite always."""
    half = (torch.bfloat16, torch.float16)
    sizes = {"key_dim": 24, "value_dim": 40}
    for backend, dtype, tokens, identical in itertools.product(BACKENDS, half, (17, 200), (False, True)):
        decay = -3e-5 if identical else -0.1
        inputs = make_inputs(op, tokens, decay=decay, identical_keys=identical, dtype=torch.float64, **sizes)
        exact = outcome(op, inputs, backend="reference")
        rounded = outcome(op, cast(cast(inputs, dtype), torch.float64), backend="reference")
        found = outcome(op, cast(inputs, dtype), backend=backend)
        # The result itself is rounded to half precision too, and so is the gradient that enters o.
        unit = torch.finfo(dtype).eps / 2
        limits = {name: 2 * max(relative(x, exact[name]), unit) for name, x in rounded.items()}
        assert_close(found, exact, limits, f"({backend}, {dtype}, T {tokens}, identical {identical})")


def test_identical_keys_in_every_precision() -> None:
    """R004 to the letter: T = 128, q = k = one unit key, g = -3e-5, beta = 0.9997."""
    for chunk, dtype, op in itertools.product((16, 32, 64), (torch.float32, torch.bfloat16, torch.float16), GATED):
        inputs = make_inputs(op, 128, identical_keys=True, heads=1, value_heads=1, key_dim=32, value_dim=32)
        inputs["g"].fill_(-3e-5)
        inputs = cast(inputs, dtype)
        o, final = call(op, inputs, backend="chunked", chunk_size=chunk)
        exact, last = call(op, cast(inputs, torch.float64), backend="reference")
        limit = 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
        assert relative(o, exact) < limit and relative(final, last) < 1e-5


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_changes_nothing(backend: str, inside: bool) -> None:
    """The recurrence stays in float32 under bfloat16 autocast, forward and backward, whether backward runs inside or not."""
    for op, tokens in itertools.product(ARGUMENTS, (1, 70)):
        inputs = make_inputs(op, tokens)
        plain = outcome(op, inputs, backend=backend)
        leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
        with torch.autocast("cpu", torch.bfloat16):
            o, final = call(op, leaves, backend=backend)
            draw = torch.Generator().manual_seed(7)
            weights = [torch.randn(x.shape, generator=draw, dtype=torch.float64).to(x.dtype) for x in (o, final)]
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            grads = torch.autograd.grad([o, final], list(leaves.values()), weights)
        found = {"o": o, "final": final} | {f"d_{n}": g for n, g in zip(leaves, grads, strict=True)}
        # Autograd's own products in the backward of the token loop follow autocast when it is on.
        limit = 2e-2 if inside and backend == "reference" else 1e-6
        assert_close(found, plain, {n: 1e-6 if n in ("o", "final") else limit for n in found}, f"({op}, T {tokens})")


# ---------------------------------------------------------------------------------------------------------- fused forms


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bound", [None, -5.0, -1.5])
def test_fused_kda(backend: str, bound: float | None) -> None:
    """R014 and R016: the gate, the norms and the sigmoid inside equal the same outside, with all their gradients."""
    for tokens in (1, 2, 15, 16, 17, 63, 64, 65, 130):
        inputs = make_inputs("kda", tokens, batch=2, dtype=torch.float64)
        inputs["q"], inputs["k"] = 3 * inputs["q"], 0.2 * inputs["k"]
        inputs["g"] = 2 * torch.randn_like(inputs["g"])
        inputs["beta"] = torch.randn_like(inputs["beta"])
        inputs["A_log"] = torch.randn(4, dtype=torch.float64)
        inputs["dt_bias"] = torch.randn(24, dtype=torch.float64)
        results = []
        for fused in (False, True):
            leaves = {n: x.clone().requires_grad_() for n, x in inputs.items()}
            given_inputs, options = dict(leaves), {}
            if fused:
                options = {"qk_l2norm": True, "beta_is_logit": True, "lower_bound": bound, "backend": backend}
            else:
                rate = leaves["A_log"].exp().view(4, 1)
                z = leaves["g"] + leaves["dt_bias"].view(4, 6)
                gate = -rate * F.softplus(z) if bound is None else bound * torch.sigmoid(rate * z)
                given_inputs = {n: x for n, x in leaves.items() if n not in ("A_log", "dt_bias")}
                given_inputs |= {"g": gate, "beta": leaves["beta"].sigmoid()}
                for name in ("q", "k"):
                    x = leaves[name]
                    given_inputs[name] = x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
                options = {"backend": "reference"}
            o, final = call("kda", given_inputs, **options)
            grads = torch.autograd.grad(o.sin().sum() + final.cos().sum(), list(leaves.values()))
            results.append({"o": o, "final": final} | dict(zip(leaves, grads, strict=True)))
        assert_close(results[1], results[0], 1e-10, f"(T {tokens})")


@pytest.mark.parametrize("backend", BACKENDS)
def test_fused_scalar_gate(backend: str) -> None:
    inputs = make_inputs("gated_delta_rule", 40, dtype=torch.float64)
    inputs["g"], inputs["beta"] = torch.randn_like(inputs["g"]), torch.randn_like(inputs["beta"])
    rate, bias = torch.randn(2, 4, dtype=torch.float64)
    fused, final = call(
        "gated_delta_rule",
        inputs,
        A_log=rate,
        dt_bias=bias,
        qk_l2norm=True,
        beta_is_logit=True,
        backend=backend,
    )
    explicit = {**inputs, "g": -rate.exp() * F.softplus(inputs["g"] + bias), "beta": inputs["beta"].sigmoid()}
    explicit |= {n: ops.l2norm(inputs[n]) for n in ("q", "k")}
    o, last = call("gated_delta_rule", explicit, backend="reference")
    assert relative(fused, o) < 1e-12 and relative(final, last) < 1e-12
    without, _ = call("gated_delta_rule", inputs, A_log=rate, backend=backend)
    o, _ = call("gated_delta_rule", {**inputs, "g": -rate.exp() * F.softplus(inputs["g"])}, backend="reference")
    assert relative(without, o) < 1e-12


def test_fused_delta_rule() -> None:
    for backend in BACKENDS:
        inputs = make_inputs("delta_rule", 40, dtype=torch.float64)
        inputs = {**inputs, "q": 5 * inputs["q"], "k": 0.1 * inputs["k"], "beta": torch.randn_like(inputs["beta"])}
        fused, _ = call("delta_rule", inputs, qk_l2norm=True, beta_is_logit=True, backend=backend)
        explicit = {**inputs, "q": ops.l2norm(inputs["q"]), "k": ops.l2norm(inputs["k"]), "beta": inputs["beta"].sigmoid()}
        assert relative(fused, call("delta_rule", explicit, backend="reference")[0]) < 1e-12


def test_refused_gate_arguments() -> None:
    inputs = make_inputs("kda", 4)
    rate, bias = torch.zeros(4), torch.zeros(24)
    for fields in ({"dt_bias": bias}, {"lower_bound": -5.0}):
        with pytest.raises(ValueError, match="give A_log too, or a ready g"):
            call("kda", inputs, **fields)
    with pytest.raises(ValueError, match="give A_log too, or a ready g"):
        call("gated_delta_rule", make_inputs("gated_delta_rule", 4), dt_bias=rate)
    with pytest.raises(ValueError, match=r"dt_bias has shape \[4\]; expected \[24\]"):
        call("kda", inputs, A_log=rate, dt_bias=rate)
    with pytest.raises(ValueError, match=r"A_log has shape \[2\]; expected \[4\]"):
        call("kda", inputs, A_log=rate[:2])
    for bound in (0.0, 1.0, -5.1):
        with pytest.raises(ValueError, match=rf"lower_bound is {bound}; it must be in \[-5, 0\)"):
            call("kda", inputs, A_log=rate, lower_bound=bound)


def test_zero_keys_and_queries() -> None:
    """R008: the norm of a zero vector has a finite gradient, at most 1/sqrt(eps) times what comes in."""
    for backend, whole in itertools.product(BACKENDS, (False, True)):
        inputs = {n: x.requires_grad_() for n, x in make_inputs("kda", 8).items()}
        with torch.no_grad():
            for name in ("q", "k"):
                inputs[name][:, slice(None) if whole else 3] = 0
        o, _ = call("kda", inputs, qk_l2norm=True, backend=backend)
        grads = torch.autograd.grad(o.sum(), list(inputs.values()))
        assert o.isfinite().all() and all(grad.isfinite().all() for grad in grads)
        assert max(float(grad.abs().max()) for grad in grads) < 1e5
        assert not o[:, slice(None) if whole else 3].any()


# --------------------------------------------------------------------------------------------------------------- memory


def saved_bytes(tokens: int, **options: Any) -> int:
    """Bytes of the distinct storages that a forward pass keeps for its backward pass."""
    inputs = make_inputs("kda", tokens, heads=4, value_heads=4, key_dim=64, value_dim=64)
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    kept: dict[int, int] = {}
    alive: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        alive.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        call("kda", leaves, **options)
    return sum(kept.values())


def test_saved_memory_grows_by_chunks() -> None:
    """R089: one state a chunk is kept for the backward pass, not one a token, chosen or by default."""
    default = saved_bytes(2048)
    short, long = saved_bytes(512, backend="chunked"), saved_bytes(2048, backend="chunked")
    assert long <= 4.1 * short
    states_per_token = 2048 * 4 * 64 * 64 * 4
    assert long < states_per_token / 3 and default < states_per_token / 3
    assert saved_bytes(512, backend="reference") > 512 * 4 * 64 * 64 * 4
    finer = saved_bytes(2048, chunk_size=16, backend="chunked")
    assert finer > long, "more chunks, more states"
