"""Fused GPU kernels with gradients against their definitions, under triton's interpreter on a CPU.

Run by `make kernels` in an environment with triton; elsewhere they are left out.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from palimpsest import mlps, ops
from tests.conftest import relative
from tests.ops.interpreter import mend

pytest.importorskip("triton")
RUNS = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.skipif(not RUNS, reason="needs TRITON_INTERPRET=1, as `make kernels` sets it"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # overflow, which on a GPU is silent
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),  # inside the interpreter
]
if RUNS:
    mend()
LIMITS = {torch.float32: 1e-6, torch.bfloat16: 6e-3}
Function = Callable[..., tuple[Tensor, ...]]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Switches between the kernels and the definition."""
    return lambda on: monkeypatch.setattr(ops, "triton_runs", lambda *tensors: on)


def outcome(function: Function, inputs: list[Tensor]) -> list[Tensor]:
    """Results, and gradients of all inputs under cotangents that every dtype holds and that lie the other way round."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    results = function(*leaves)
    source = torch.Generator().manual_seed(0)
    flows = [torch.randn(x.shape, generator=source).bfloat16().to(x.dtype).mT.contiguous().mT for x in results]
    return [*(x.detach() for x in results), *torch.autograd.grad(results, leaves, flows)]


def compare(function: Function, inputs: list[Tensor], kernels: Callable[[bool], None], note: object) -> list[Tensor]:
    """The kernels' outcome: as close to the definition in float64 as their dtype lets it, and the same bits again."""
    kernels(False)
    exact = outcome(function, [x.double() for x in inputs])
    kernels(True)
    found, again = outcome(function, inputs), outcome(function, inputs)
    limit = max(LIMITS[x.dtype] for x in inputs)
    for i, (x, y) in enumerate(zip(found, exact, strict=True)):
        assert relative(x, y) < limit, (i, note)
    assert all(torch.equal(x, y) for x, y in zip(found, again, strict=True)), note
    results = len(found) - len(inputs)
    assert [x.dtype for x in found[results:]] == [x.dtype for x in inputs]
    return found


@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize("dtype", LIMITS)
def test_short_convolution(taps: int, dtype: torch.dtype, kernels: Callable[[bool], None]) -> None:
    """Batches, pieces and packed documents shorter than the taps; x a slice, as of the projections of q, k and v."""
    weight = torch.randn(150, taps)
    for lengths, batch, tokens in ((None, 2, 70), (None, 1, 1), (None, 3, 2), ([0, 1, 2, 40, 0, 3, 0], 1, 46)):
        bounds = None if lengths is None else torch.tensor([0, *itertools.accumulate(lengths)])
        x = torch.randn(batch, tokens, 200).to(dtype)[..., 20:170]
        state = torch.randn(batch if lengths is None else len(lengths), taps - 1, 150).to(dtype)
        run = lambda x, w, s, bounds=bounds: ops.short_conv(x, w, s, bounds)  # noqa: E731
        y, last, *_ = compare(run, [x, weight, state], kernels, (lengths, batch, tokens))
        assert all(torch.equal(a, b) for a, b in zip(run(x, weight, state), (y, last), strict=True))  # without gradients


def test_short_convolution_of_company(kernels: Callable[[bool], None]) -> None:
    """R034. A row of a batch and a packed document have the bits that they have alone, gradients too."""
    kernels(True)
    lengths = [1, 33, 0, 2, 40]
    x, weight, state = torch.randn(1, 76, 40).bfloat16(), torch.randn(40, 4), torch.randn(5, 3, 40).bfloat16()
    flow = torch.randn(1, 76, 40).bfloat16()

    def run(x: Tensor, state: Tensor, flow: Tensor, bounds: Tensor | None = None) -> list[Tensor]:
        x, state = x.clone().requires_grad_(), state.clone().requires_grad_()
        y, last = ops.short_conv(x, weight, state, bounds)
        return [y, *torch.autograd.grad(y, [x, state], flow), last]

    y, d_x, d_state, last = run(x, state, flow, torch.tensor([0, *itertools.accumulate(lengths)]))
    for row, (start, end) in enumerate(itertools.pairwise(itertools.accumulate(lengths, initial=0))):
        window = slice(start, end)
        if end > start:
            alone = run(x[:, window], state[row : row + 1], flow[:, window])
            whole = y[:, window], d_x[:, window], d_state[row : row + 1], last[row : row + 1]
            assert all(torch.equal(a, b) for a, b in zip(alone, whole, strict=True))
    x, state, flow = x.view(2, 38, 40), state[:2], flow.view(2, 38, 40)
    batch, alone = run(x, state, flow), run(x[1:], state[1:], flow[1:])
    assert all(torch.equal(a[1:], b) for a, b in zip(batch, alone, strict=True))
    x[:, 20:] = torch.nan  # what comes later reaches no output
    assert torch.equal(run(x, state, flow)[0][:, :20], batch[0][:, :20])


def test_short_convolution_keeps_its_inputs(kernels: Callable[[bool], None]) -> None:
    kernels(True)
    inputs = [torch.randn(2, 50, 24), torch.randn(24, 4), torch.randn(2, 3, 24)]
    before, kept = [x.clone() for x in inputs], []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x.data_ptr()), x)[1], lambda x: x):
        y, _ = ops.short_conv(*(x.requires_grad_() for x in inputs))
    y.sum().backward()
    assert set(kept) == {x.data_ptr() for x in inputs}
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))


@pytest.mark.parametrize("width", [1, 5, 48, 128, 768])
@pytest.mark.parametrize("dtype", LIMITS)
def test_rms_norm(width: int, dtype: torch.dtype, kernels: Callable[[bool], None]) -> None:
    """Odd widths, rows that fill no tile, more of them than one program visits; x a slice; sizes far from 1."""
    rows = 3 if width == 768 else 4096 // width + 1100 * (width == 128)
    x = (torch.randn(rows, 2, width + 3) * torch.logspace(-1, 2, rows).view(rows, 1, 1)).to(dtype)[..., 3:]
    weight = torch.randn(width)
    compare(lambda x, w: (ops.rms_norm(x, w, 1e-3),), [x, weight], kernels, (width, rows))
    if width > 1:
        flat = torch.randn(rows, 2 * width).to(dtype)
        for kind in ("sigmoid", "silu"):
            gate = 3 * flat.unflatten(-1, (2, width))
            gated = lambda x, g, w, kind=kind: (ops.gated_rms_norm(x, g, w, 1e-3, kind),)  # noqa: E731
            compare(gated, [x, gate, weight], kernels, (width, kind))


def test_rms_norm_rounds_once_to_the_dtype_asked_for(kernels: Callable[[bool], None]) -> None:
    """A float32 stream goes to bfloat16 as its own norm, rounded; the gradient comes back in float32."""
    kernels(True)
    x, weight = torch.randn(7, 24, requires_grad=True), torch.randn(24, requires_grad=True)
    low, high = ops.rms_norm(x, weight, 1e-5, torch.bfloat16), ops.rms_norm(x, weight, 1e-5)
    assert high.dtype == torch.float32 and torch.equal(low, high.bfloat16())
    flow = torch.randn(7, 24).bfloat16()
    found = torch.autograd.grad(low, [x, weight], flow)
    for grad, wanted in zip(found, torch.autograd.grad(high, [x, weight], flow.float()), strict=True):
        assert torch.equal(grad, wanted)


@pytest.mark.parametrize("dtype", LIMITS)
def test_gated_activations(dtype: torch.dtype, kernels: Callable[[bool], None]) -> None:
    """SwiGLU and SiTU from near zero, where tanh has few digits to lose, to where both halves of SiTU stand still."""
    for rows, largest in itertools.product((1, 700), (1e-3, 1.0, 40.0)):
        scale = largest * torch.logspace(-2, 0, 5)
        gate, up = (scale * torch.randn(2, rows, 5)).to(dtype).mT.contiguous().mT
        compare(lambda g, u: (mlps.swiglu(g, u),), [gate, up], kernels, ("swiglu", rows, largest))
        for betas in ((4.0, 25.0), (0.5, 2.0)):
            compare(lambda g, u, b=betas: (mlps.situ(g, u, *b),), [gate, up], kernels, ("situ", rows, largest, betas))


def test_rows_do_not_see_their_company(kernels: Callable[[bool], None]) -> None:
    kernels(True)
    x, gate = torch.randn(2, 100, 48).bfloat16(), torch.randn(2, 100, 48).bfloat16()
    weight, flow = torch.randn(48), torch.randn(2, 100, 48).bfloat16()

    def run(x: Tensor, gate: Tensor, flow: Tensor) -> list[Tensor]:
        x, gate = x.clone().requires_grad_(), gate.clone().requires_grad_()
        y = ops.gated_rms_norm(x, gate, weight, 1e-5, "silu") * mlps.swiglu(x, gate) * ops.rms_norm(x, weight, 1e-5)
        return [y, *torch.autograd.grad(y, [x, gate], flow)]

    whole, part = run(x, gate, flow), run(x[1, 7:31], gate[1, 7:31], flow[1, 7:31])
    assert all(torch.equal(a[1, 7:31], b) for a, b in zip(whole, part, strict=True))


def test_only_inputs_are_kept(kernels: Callable[[bool], None]) -> None:
    kernels(True)
    x, gate, weight = (torch.randn(*shape, requires_grad=True) for shape in ((9, 16), (9, 16), (16,)))
    cases: list[tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = [
        (lambda x, w: ops.rms_norm(x, w, 1e-5), (x, weight)),
        (lambda x, g, w: ops.gated_rms_norm(x, g, w, 1e-5, "sigmoid"), (x, gate, weight)),
        (mlps.swiglu, (gate, x)),
        (mlps.situ, (gate, x)),
    ]
    for function, inputs in cases:
        kept: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x.data_ptr()), x)[1], lambda x: x):  # noqa: B023
            function(*inputs)
        assert set(kept) == {x.data_ptr() for x in inputs}


def test_taken_where_gradients_are_wanted(kernels: Callable[[bool], None]) -> None:
    """Not in inference, in float64, in a graph, or for rows wider than a program holds."""
    kernels(True)
    weight, x = torch.randn(16), torch.randn(3, 16, requires_grad=True)
    taken = lambda y: type(y.grad_fn).__name__  # noqa: E731
    assert taken(ops.rms_norm(x, weight, 1e-5)) == "_NormBackward" and taken(mlps.swiglu(x, x)) == "_GluBackward"
    with torch.no_grad():
        assert not ops.trains_on_triton(x, weight)
    assert not ops.trains_on_triton(x.detach(), weight)
    wide = torch.randn(1, 8193, requires_grad=True)
    assert taken(ops.rms_norm(wide, wide[0].detach(), 1e-5)) != "_NormBackward"
    kernels(False)
    assert taken(ops.rms_norm(x, weight, 1e-5)) != "_NormBackward"
