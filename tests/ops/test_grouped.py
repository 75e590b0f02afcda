"""Grouped matrix products equal a loop over the experts, forward and backward, whatever the sizes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from palimpsest.ops import grouped_matmul
from tests.conftest import relative


def loop(x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
    pieces = [rows @ weight[e].mT for e, rows in enumerate(x.split(counts))]
    return torch.cat(pieces)


def check(counts: list[int], inner: int, outer: int, dtype: torch.dtype, seed: int = 0) -> None:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(counts), inner, generator=draw, dtype=torch.float64)
    weight = torch.randn(len(counts), outer, inner, generator=draw, dtype=torch.float64)
    cotangent = torch.randn(sum(counts), outer, generator=draw, dtype=torch.float64)
    x, weight, cotangent = x.to(dtype), weight.to(dtype), cotangent.to(dtype)
    exact = [t.double().requires_grad_() for t in (x, weight)]
    wanted = loop(exact[0], exact[1], counts)
    wanted_grads = torch.autograd.grad(wanted, exact, cotangent.double())
    leaves = [t.clone().requires_grad_() for t in (x, weight)]
    y = grouped_matmul(leaves[0], leaves[1], torch.tensor(counts))
    grads = torch.autograd.grad(y, leaves, cotangent)
    limit = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    assert y.dtype == dtype and relative(y, wanted) < limit
    for grad, wanted_grad in zip(grads, wanted_grads, strict=True):
        assert grad.isfinite().all() and relative(grad, wanted_grad) < limit
    for expert, count in enumerate(counts):
        assert count or not grads[1][expert].any(), "an idle expert's gradient is exactly zero"


@settings(max_examples=40)
@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    inner=st.integers(1, 17),
    outer=st.integers(1, 17),
    dtype=st.sampled_from([torch.float64, torch.float32]),
)
def test_any_sizes(counts: list[int], inner: int, outer: int, dtype: torch.dtype) -> None:
    check(counts, inner, outer, dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_sizes_of_the_fast_path(dtype: torch.dtype) -> None:
    """Multiples of 16 bytes go to torch's grouped product where it has one; groups are empty first, last and between."""
    for counts in ([8], [0, 5, 0, 11, 1, 0], [0, 0, 3], [7, 0, 0], [1] * 8, [33, 2]):
        for inner, outer in ((8, 8), (16, 24), (64, 32), (8, 12)):
            check(counts, inner, outer, dtype)


def test_idle_experts_get_zero_whatever_memory_held() -> None:
    """R072: freed memory is full of NaN first, and the gradient is zero all the same, not NaN and not None."""
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for _ in range(5):
            poison = [torch.full((8, 16, 16), torch.nan, dtype=dtype) for _ in range(8)]
            del poison
            x = torch.randn(2, 16, dtype=dtype, requires_grad=True)
            weight = torch.randn(8, 16, 16, dtype=dtype, requires_grad=True)
            y = grouped_matmul(x, weight, torch.tensor([0, 1, 0, 0, 0, 1, 0, 0]))
            y.sum().backward()
            assert weight.grad is not None and weight.grad.isfinite().all()
            assert not weight.grad[[0, 2, 3, 4, 6, 7]].any() and weight.grad[[1, 5]].any()


def test_no_rows() -> None:
    x = torch.randn(0, 16, requires_grad=True)
    weight = torch.randn(3, 8, 16, requires_grad=True)
    y = grouped_matmul(x, weight, torch.zeros(3, dtype=torch.long))
    assert y.shape == (0, 8)
    y.sum().backward()
    assert weight.grad is not None and not weight.grad.any() and x.grad is not None


def test_strided_rows_and_gradients() -> None:
    """Views in, and a gradient of stride zero back (from a plain sum)."""
    wide = torch.randn(9, 40, dtype=torch.float64)
    for x, weight in (
        (wide[:, 3:11], torch.randn(3, 6, 8, dtype=torch.float64)),
        (wide[:, :8].mT.contiguous().mT, torch.randn(3, 8, 6, dtype=torch.float64).mT),
        (wide.float()[:, 3:11], torch.randn(3, 16, 8)),
        (wide.float()[:, ::2][:, :16], torch.randn(3, 8, 16)),
    ):
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        y = grouped_matmul(x, weight, torch.tensor([4, 0, 5]))
        wanted = loop(x, weight, [4, 0, 5])
        assert relative(y, wanted) < 1e-5
        found = torch.autograd.grad(grouped_matmul(leaves[0], leaves[1], torch.tensor([4, 0, 5])).sum(), leaves)
        for a, b in zip(found, torch.autograd.grad(loop(leaves[0], leaves[1], [4, 0, 5]).sum(), leaves), strict=True):
            assert relative(a, b) < 1e-5


@pytest.mark.parametrize("size", [16, 7])
@pytest.mark.parametrize("backward_inside", [False, True])
def test_under_autocast(size: int, backward_inside: bool) -> None:
    """Rows arrive in bfloat16, weights in float32; backward runs outside autocast, as it should, or inside."""
    x, weight = torch.randn(11, size, requires_grad=True), torch.randn(3, 8, size, requires_grad=True)
    linear = torch.nn.Linear(size, size, bias=False)
    counts = torch.tensor([4, 0, 7])
    exact = loop(linear(x), weight, [4, 0, 7])
    wanted = torch.autograd.grad(exact.square().sum(), [x, weight])
    for rows in (lambda: linear(x), lambda: x):
        with torch.autocast("cpu", torch.bfloat16):
            y = grouped_matmul(rows(), weight, counts)
            loss = y.float().square().sum()
        with torch.autocast("cpu", torch.bfloat16, enabled=backward_inside):
            grads = torch.autograd.grad(loss, [x, weight])
        assert y.dtype == torch.bfloat16, "autocast is there to make products cheap"
        assert all(grad.dtype == torch.float32 and grad.isfinite().all() for grad in grads)
        if rows() is not x:
            assert relative(y, exact) < 2e-2
            assert all(relative(a, b) < 5e-2 for a, b in zip(grads, wanted, strict=True))


def test_refused() -> None:
    x, weight, counts = torch.randn(4, 8), torch.randn(3, 6, 8), torch.tensor([1, 1, 2])
    for wrong in ((x[0], weight), (x, weight[0]), (torch.randn(4, 6), weight)):
        with pytest.raises(ValueError, match=r"x has shape .* and weight .*; expected \[N,in\] and \[E,out,in\]"):
            grouped_matmul(*wrong, counts)
    with pytest.raises(ValueError, match=r"counts has shape \[2\]; expected \[3\]"):
        grouped_matmul(x, weight, counts[:2])
