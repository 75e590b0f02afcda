"""Attention of one query a sequence, and small norms, in the compiled backend against their definitions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from palimpsest import ops
from palimpsest.ops import cpu

pytestmark = pytest.mark.skipif(cpu.library()[0] is None, reason=f"the compiled backend: {cpu.library()[1]}")


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], scale: float) -> Tensor:
    """One head and sequence at a time, in float64."""
    o = torch.empty(*q.shape[:3], v.shape[3], dtype=torch.float64)
    group = q.shape[2] // k.shape[2]
    for b, length in enumerate(lengths):
        for head in range(q.shape[2]):
            keys, values = (x[b, :length, head // group].double() for x in (k, v))
            weight = torch.softmax(scale * (keys @ q[b, 0, head].double()), 0)
            o[b, 0, head] = weight @ values
    return o


@pytest.mark.parametrize("dtype, close", [(torch.float32, 2e-6), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize(
    "heads, key_heads, key_dim, value_dim, lengths",
    [
        (12, 12, 64, 64, [512]),
        (8, 2, 32, 32, [1, 17, 40]),  # grouped heads, rows of several lengths
        (4, 1, 576, 512, [100, 33]),  # the latent form of MLA
        (3, 3, 20, 33, [5, 64]),  # no whole vectors
        (1, 1, 1, 1, [3]),
        (2, 1, 24, 16, [65, 64, 200]),  # in parts
        (2, 2, 16, 16, [4097, 130]),  # in longer ones
    ],
)
def test_one_query_equals_the_definition(
    dtype: torch.dtype, close: float, heads: int, key_heads: int, key_dim: int, value_dim: int, lengths: list[int]
) -> None:
    torch.manual_seed(0)
    batch, longest = len(lengths), max(lengths)
    q = torch.randn(batch, 1, heads, key_dim).to(dtype)
    # A part of a larger buffer, and keys beside values: strides count.
    both = torch.randn(batch, longest + 3, key_heads, key_dim + value_dim).to(dtype)
    k, v = both[:, :longest].split([key_dim, value_dim], -1)
    assert ops.can_attend(q, k, v)
    o = ops.attend(q, k, v, lengths, key_dim**-0.5)
    assert o.dtype == dtype
    wanted = softmax_attention(q, k, v, lengths, key_dim**-0.5)
    assert (o.double() - wanted).norm() <= close * wanted.norm()


def test_a_sequence_does_not_see_its_batch() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(5, 1, 4, 32), torch.randn(5, 90, 2, 32), torch.randn(5, 90, 2, 32)
    lengths = [90, 1, 16, 55, 32]
    together = ops.attend(q, k, v, lengths, 0.2)
    for b, length in enumerate(lengths):
        alone = ops.attend(q[b : b + 1], k[b : b + 1, :length], v[b : b + 1, :length], [length], 0.2)
        assert torch.equal(alone[0], together[b])


def test_threads_change_no_bit() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 1, 4, 64), torch.randn(2, 900, 4, 64), torch.randn(2, 900, 4, 64)
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        try:
            found.append(ops.attend(q, k, v, [900, 333], 0.2))
        finally:
            torch.set_num_threads(1)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_large_scores_are_stable_and_nan_stays_nan() -> None:
    q, k, v = torch.full((3, 1, 1, 16), 30.0), torch.full((3, 90, 1, 16), 30.0), torch.ones(3, 90, 1, 16)
    k[0, 64:] = -30.0  # a whole part weighs nothing beside another
    k[1, 7], k[2, 70] = float("nan"), float("nan")
    o = ops.attend(q, k, v, [90, 20, 90], 1.0)
    assert torch.allclose(o[0], torch.ones(1, 1, 16))
    assert o[1].isnan().all() and o[2].isnan().all()


def test_where_it_stands_back() -> None:
    q = torch.randn(1, 1, 2, 8)
    assert not ops.can_attend(q.double(), q.double(), q.double())
    assert not ops.can_attend(q, q, q.bfloat16())
    assert not ops.can_attend(q, q, q.transpose(2, 3))
    assert not ops.can_attend(q.clone().requires_grad_(), q, q)


@pytest.mark.parametrize("columns", [1, 15, 64, 200, 768])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_norms(columns: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(3, 2, columns).to(dtype), torch.randn(columns).to(dtype)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    y = ops.rms_norm(x, weight, 1e-5)
    assert y.dtype == dtype
    assert torch.allclose(y.double(), exact, rtol=1e-6 if dtype == torch.float32 else 8e-3, atol=1e-6)
