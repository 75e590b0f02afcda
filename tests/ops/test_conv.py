"""The short convolution: taps in order, pieces equal the whole, documents do not see each other."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from palimpsest.ops import short_conv
from tests.conftest import relative


def draw(*shape: int, dtype: torch.dtype = torch.float64, **options: Any) -> Tensor:
    return torch.randn(*shape, dtype=dtype, **options)


def test_by_hand() -> None:
    """The last tap multiplies the current token, the first one the oldest; SiLU follows."""
    x = torch.tensor([1.0, 10.0, 100.0, 1000.0, 10000.0]).view(1, 5, 1)
    weight = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    y, state = short_conv(x, weight)
    sums = torch.tensor([0.1, 1.2, 12.3, 123.4, 1234.0])
    assert torch.allclose(y.flatten(), F.silu(sums))
    assert torch.equal(state, x[:, 2:])
    y, _ = short_conv(x[:, 3:], weight, state=torch.tensor([1.0, 10.0, 100.0]).view(1, 3, 1))
    assert torch.allclose(y.flatten(), F.silu(sums[3:]))


@pytest.mark.parametrize("taps", [1, 2, 3, 4, 7])
def test_is_a_depthwise_convolution(taps: int) -> None:
    x, weight = draw(2, 9, 5).requires_grad_(), draw(5, taps).requires_grad_()
    y, _ = short_conv(x, weight)
    expected = F.silu(F.conv1d(F.pad(x.mT, (taps - 1, 0)), weight.unsqueeze(1), groups=5)).mT
    assert relative(y, expected) < 1e-13
    cotangent = draw(2, 9, 5)
    found = torch.autograd.grad(y, [x, weight], cotangent)
    for grad, wanted in zip(found, torch.autograd.grad(expected, [x, weight], cotangent), strict=True):
        assert relative(grad, wanted) < 1e-13


@settings(max_examples=50)
@given(cuts=st.lists(st.integers(0, 12), max_size=4), taps=st.sampled_from([1, 2, 4]))
def test_pieces_equal_the_whole(cuts: list[int], taps: int) -> None:
    x, weight, start = draw(2, 12, 3), draw(3, taps), draw(2, taps - 1, 3)
    whole, last = short_conv(x, weight, start)
    bounds, state, pieces = [0, *sorted(cuts), 12], start, []
    for a, b in itertools.pairwise(bounds):
        y, state = short_conv(x[:, a:b], weight, state)
        assert state.shape == (2, taps - 1, 3)
        pieces.append(y)
    assert relative(torch.cat(pieces, 1), whole) < 1e-14 and torch.equal(state, last)


@settings(max_examples=50)
@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    taps=st.sampled_from([1, 2, 4]),
    with_state=st.booleans(),
    kind=st.sampled_from([torch.int32, torch.int64]),
)
def test_packed_equals_separate(lengths: list[int], taps: int, with_state: bool, kind: torch.dtype) -> None:
    """Short documents matter most: those of fewer tokens than taps, of one, and of none."""
    bounds = [0, *itertools.accumulate(lengths)]
    x, weight = draw(1, bounds[-1], 3).requires_grad_(), draw(3, taps).requires_grad_()
    start = draw(len(lengths), taps - 1, 3).requires_grad_() if with_state else None
    packed = short_conv(x, weight, start, torch.tensor(bounds, dtype=kind))
    pieces = [
        short_conv(x[:, a:b], weight, None if start is None else start[row : row + 1])
        for row, (a, b) in enumerate(itertools.pairwise(bounds))
    ]
    separate = torch.cat([y for y, _ in pieces], 1), torch.cat([state for _, state in pieces])
    leaves = [x, weight] if start is None else [x, weight, start]
    grads = []
    for y, state in (packed, separate):
        loss = y.sin().sum() + state.cos().sum()
        grads.append(torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))
    assert relative(packed[0], separate[0]) < 1e-14 and torch.equal(packed[1], separate[1])
    assert all(relative(a, b) < 1e-13 for a, b in zip(*grads, strict=True))


def test_first_tokens_of_a_document() -> None:
    """R034: a change in one document leaves the next one's bits alone."""
    x, weight = draw(1, 8, 2), draw(2, 4)
    bounds = torch.tensor([0, 3, 8])
    y, state = short_conv(x, weight, cu_seqlens=bounds)
    x[:, :3] += 1
    again, other = short_conv(x, weight, cu_seqlens=bounds)
    assert torch.equal(y[:, 3:], again[:, 3:]) and not torch.equal(y[:, :3], again[:, :3])
    assert torch.equal(state[1], other[1])


def test_nothing_changes_in_place() -> None:
    for bounds in (None, torch.tensor([0, 2, 6])):
        x, weight, state = draw(1, 6, 2), draw(2, 4), draw(1 if bounds is None else 2, 3, 2)
        before = [t.clone() for t in (x, weight, state)]
        first = short_conv(x, weight, state, bounds)
        again = short_conv(x, weight, state, bounds)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        assert all(torch.equal(a, b) for a, b in zip((x, weight, state), before, strict=True))


def test_dtypes() -> None:
    """The sum runs in float32 whatever the inputs are: bfloat16 is at most its own rounding away."""
    x, weight = draw(1, 40, 8), draw(8, 4)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        y, state = short_conv(x.to(dtype), weight.float())
        assert y.dtype == state.dtype == dtype
        exact, _ = short_conv(x.to(dtype).double(), weight.float().double())
        assert relative(y, exact) < torch.finfo(dtype).eps
        packed, _ = short_conv(x.to(dtype), weight.float(), cu_seqlens=torch.tensor([0, 40]))
        assert torch.equal(packed, y)


def test_empty() -> None:
    weight, state = draw(3, 4), draw(2, 3, 3)
    y, after = short_conv(draw(2, 0, 3), weight, state)
    assert y.shape == (2, 0, 3) and torch.equal(after, state)
    y, after = short_conv(draw(1, 0, 3), weight, state, torch.tensor([0, 0, 0]))
    assert y.shape == (1, 0, 3) and torch.equal(after, state)
    y, after = short_conv(draw(1, 0, 3), weight, cu_seqlens=torch.tensor([0]))
    assert y.shape == (1, 0, 3) and after.shape == (0, 3, 3)


def test_refused() -> None:
    x, weight = draw(2, 5, 3), draw(3, 4)
    for wrong in (draw(4, 4), draw(3, 1, 4), draw(4, 3)):
        with pytest.raises(ValueError, match=r"weight has shape .*; expected \[3, W\]"):
            short_conv(x, wrong)
    for wrong in (draw(2, 4, 3), draw(1, 3, 3), draw(2, 3, 2)):
        with pytest.raises(ValueError, match=r"state has shape .*; expected \[2, 3, 3\]"):
            short_conv(x, weight, wrong)
    with pytest.raises(ValueError, match="the batch is 2; with cu_seqlens it must be 1"):
        short_conv(x, weight, cu_seqlens=torch.tensor([0, 5]))
    with pytest.raises(ValueError, match="cu_seqlens ends with 4"):
        short_conv(x[:1], weight, cu_seqlens=torch.tensor([0, 4]))
