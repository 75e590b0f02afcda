"""The compiled short convolution against the torch form: outputs, states, gradients, and the same bits in any company."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from palimpsest import ops
from palimpsest.ops import cpu
from tests.conftest import relative

pytestmark = pytest.mark.skipif(cpu.library()[0] is None, reason=f"the compiled backend: {cpu.library()[1]}")


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


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def outcome(x: Tensor, weight: Tensor, state: Tensor, bounds: Tensor | None = None) -> list[Tensor]:
    """y, the new state, and gradients of all three under cotangents of both; that of y lies in a wider tensor."""
    leaves = [each.detach().requires_grad_() for each in (x, weight, state)]
    results = ops.short_conv(*leaves, cu_seqlens=bounds)
    flows = [torch.linspace(-1, 2, each.numel()).sin().view(each.shape).to(each.dtype) for each in results]
    flows[0] = torch.nn.functional.pad(flows[0], (2, 3))[..., 2:-3]
    grads = torch.autograd.grad(results, leaves, flows)
    return [*(each.detach() for each in results), *grads]


def is_compiled(y: Tensor) -> bool:
    return type(y.grad_fn).__name__ == "_ShortConvBackward"


PACKED = [[5], [0, 1, 2, 3, 0, 64, 65, 130, 0], [1] * 40, [0, 0], [700, 3]]


@pytest.mark.parametrize("taps", [1, 2, 3, 4, 5])
def test_is_the_torch_form(taps: int, instruction_set: str) -> None:
    """Batches and documents of fewer tokens than taps, of none, of strips that are full and not; C of whole vectors and not."""
    cases: list[tuple[list[int] | None, int, int]] = [(None, 2, tokens) for tokens in (0, 1, 2, 3, 4, 63, 64, 66, 150)]
    cases += [(lengths, 1, sum(lengths)) for lengths in PACKED]
    for (lengths, batch, tokens), channels in itertools.product(cases, (1, 5, 32, 150)):
        bounds = None if lengths is None else torch.tensor([0, *itertools.accumulate(lengths)])
        x = torch.randn(batch, tokens, channels + 9)[..., 4 : channels + 4]  # a slice, as of projections made in one
        weight, state = torch.randn(channels, taps), torch.randn(batch if lengths is None else len(lengths), taps - 1, channels)
        found = outcome(x, weight, state, bounds)
        wanted = outcome(x.double(), weight.double(), state.double(), bounds)
        for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
            assert a.shape == b.shape and (a.numel() == 0 or relative(a, b) < 2e-6), (i, lengths, batch, tokens, channels)
        with torch.no_grad():
            assert all(torch.equal(a, b) for a, b in zip(ops.short_conv(x, weight, state, bounds), found, strict=False))


@pytest.mark.parametrize("taps", [1, 2, 4])
def test_same_bits_in_any_company(taps: int, instruction_set: str, threads: None) -> None:
    """R034: alone, in a batch and packed, by one thread or two; only the taps' gradient is a sum over all."""
    lengths, channels = [1, 130, 0, 2, 64, 200, 700], 150
    bounds = [0, *itertools.accumulate(lengths)]
    x, weight = torch.randn(1, bounds[-1], channels), torch.randn(channels, taps)
    state = torch.randn(len(lengths), taps - 1, channels)
    runs = []
    for count in (1, 2, 2):
        torch.set_num_threads(count)
        runs.append(outcome(x, weight, state, torch.tensor(bounds)))
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))
    flow = torch.randn(x.shape)

    def run(x: Tensor, state: Tensor, flow: Tensor, bounds: Tensor | None = None) -> list[Tensor]:
        x, state = x.clone().requires_grad_(), state.clone().requires_grad_()
        y, last = ops.short_conv(x, weight, state, bounds)
        return [y, *torch.autograd.grad(y, [x, state], flow), last]

    y, d_x, d_state, last = run(x, state, flow, torch.tensor(bounds))
    for row, (start, end) in enumerate(itertools.pairwise(bounds)):
        if end > start:
            alone = run(x[:, start:end], state[row : row + 1], flow[:, start:end])
            whole = y[:, start:end], d_x[:, start:end], d_state[row : row + 1], last[row : row + 1]
            assert all(torch.equal(a, b) for a, b in zip(alone, whole, strict=True))
    x, state, flow = x[:, :1096].reshape(2, 548, channels), state[:2], flow[:, :1096].reshape(2, 548, channels)
    batch, alone = run(x, state, flow), run(x[1:], state[1:], flow[1:])
    assert all(torch.equal(a[1:], b) for a, b in zip(batch, alone, strict=True))
    assert torch.equal(run(x[:, :70], state, flow[:, :70])[0], batch[0][:, :70])  # what comes later reaches no output


def test_numbers_out_of_range(instruction_set: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN and infinity come out where torch's form has them; far below, SiLU and its slope are 0."""
    extreme = torch.tensor(
        [torch.nan, torch.inf, -torch.inf, -87.5, -89.0, -200.0, -1e30, 1e37, -1e37, 88.0, 120.0, -0.0, 1e-30]
    )
    x, weight = torch.randn(1, 60, 13), torch.randn(13, 4)
    x[0, ::17] = extreme
    state = torch.randn(1, 3, 13)
    for taps in (weight, torch.tensor([0.0, 0.0, 0.0, 1.0]).repeat(13, 1)):
        found = outcome(x, taps, state)
        with monkeypatch.context() as patch:
            patch.setattr(cpu, "library", lambda: (None, "left out"))
            wanted = outcome(x, taps, state)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_any_layout() -> None:
    """x and its cotangent transposed, expanded, and cut from the middle of a batch's rows."""
    weight, whole = torch.randn(40, 4), torch.randn(3, 60, 50)
    flat = torch.randn(3, 40, 50)
    for x in (
        flat.mT,
        whole[:, 7:57, 10:],
        whole[::2, :50, :40],
        torch.randn(1, 50, 40).expand(3, 50, 40),
        whole[..., ::2][..., :20],
    ):
        taps, state = weight[: x.shape[2]], torch.randn(len(x), 3, x.shape[2])
        for flow in (x.cos(), torch.ones(1).expand(x.shape), torch.randn(3, x.shape[2], x.shape[1])[: len(x)].mT):
            results = []
            for y in (x, x.contiguous()):
                leaves = [each.detach().requires_grad_() for each in (y, taps, state)]
                z, _ = ops.short_conv(*leaves)
                flow = flow if y is x else flow.contiguous()
                results.append([z, *torch.autograd.grad(z, leaves, flow)])
            assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_taken_where_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """float32 alone, up to four taps, outside graphs and autocast, on a CPU; a second derivative is refused, not wrong."""
    x, weight = torch.randn(2, 9, 6, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    assert is_compiled(ops.short_conv(x, weight)[0])
    others: list[tuple[Tensor, Tensor]] = [(x.double(), weight), (x.bfloat16(), weight), (x, weight.bfloat16())]
    others += [(x, torch.randn(6, 5)), (x.to("meta"), weight.to("meta"))]
    assert not any(is_compiled(ops.short_conv(*each)[0]) for each in others)
    with torch.autocast("cpu", torch.bfloat16):
        assert not is_compiled(ops.short_conv(x, weight)[0])
    (d_x,) = torch.autograd.grad(ops.short_conv(x, weight)[0].square().sum(), [x], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        d_x.sum().backward()
    monkeypatch.setattr(cpu, "library", lambda: (None, "left out"))
    assert not is_compiled(ops.short_conv(x, weight)[0])


def test_keeps_its_inputs() -> None:
    inputs: list[Any] = [torch.randn(2, 50, 24), torch.randn(24, 4), torch.randn(2, 3, 24)]
    before, kept = [x.clone() for x in inputs], []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x.data_ptr()), x)[1], lambda x: x):
        y, _ = ops.short_conv(*(x.requires_grad_() for x in inputs))
    y.sum().backward()
    assert set(kept) == {x.data_ptr() for x in inputs}
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))
    inputs[1].requires_grad_(False)  # as under adapters
    assert ops.short_conv(*inputs)[0].sum().backward() is None
