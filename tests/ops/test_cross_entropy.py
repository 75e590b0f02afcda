"""The fused loss is the plain one: value and gradients, whatever is ignored, cut into blocks or not, under autocast too."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from palimpsest.ops import cross_entropy, linear_cross_entropy
from tests.conftest import relative


def inputs(rows: int, vocab: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(rows + vocab)
    hidden = torch.randn(rows, 12, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(vocab, 12, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(vocab, (rows,), generator=draw)
    targets[::3] = cross_entropy.IGNORED
    return hidden, weight, targets


@pytest.mark.parametrize("block", [1, 64, 1 << 24])
@pytest.mark.parametrize(("rows", "vocab"), [(0, 5), (1, 1), (2, 7), (33, 20)])
def test_equals_the_plain_loss(rows: int, vocab: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "BLOCK", block)
    for dtype, limit in ((torch.float64, 1e-13), (torch.float32, 1e-6)):
        hidden, weight, targets = inputs(rows, vocab, dtype)
        plain = F.cross_entropy(F.linear(hidden, weight), targets, reduction="sum", ignore_index=cross_entropy.IGNORED)
        wanted = torch.autograd.grad(3 * plain, [hidden, weight])
        loss = linear_cross_entropy(hidden, weight, targets)
        found = torch.autograd.grad(3 * loss, [hidden, weight])
        assert loss.dtype == dtype and relative(loss, plain) < limit
        for ours, theirs in zip(found, wanted, strict=True):
            assert relative(ours, theirs) < limit


def test_everything_ignored_and_extreme_logits() -> None:
    hidden, weight, targets = inputs(9, 11, torch.float32)
    nothing = linear_cross_entropy(hidden, weight, torch.full_like(targets, cross_entropy.IGNORED))
    assert float(nothing.detach()) == 0
    assert not any(grad.any() for grad in torch.autograd.grad(nothing, [hidden, weight]))
    loud = linear_cross_entropy(hidden * 1e4, weight, targets)
    assert loud.isfinite() and all(grad.isfinite().all() for grad in torch.autograd.grad(loud, [hidden, weight]))


def test_half_precision_and_frozen_parts() -> None:
    hidden, weight, targets = inputs(40, 30, torch.float32)
    exact = F.cross_entropy(F.linear(hidden, weight), targets, reduction="sum")
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, targets)
    grads = torch.autograd.grad(loss, [hidden, weight])
    assert loss.dtype == torch.float32 and relative(loss, exact) < 1e-2
    for ours, theirs in zip(grads, torch.autograd.grad(exact, [hidden, weight]), strict=True):
        assert ours.dtype == torch.float32 and relative(ours, theirs) < 2e-2
    low = linear_cross_entropy(hidden.bfloat16(), weight.bfloat16(), targets)
    assert low.dtype == torch.float32 and relative(low, exact) < 1e-2
    frozen = linear_cross_entropy(hidden, weight.detach(), targets)
    assert torch.autograd.grad(frozen, [hidden])[0].isfinite().all()
    with torch.no_grad():
        assert linear_cross_entropy(hidden, weight, targets).isfinite()


def test_logits_never_stand_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the size [N,V] is kept for the backward pass."""
    monkeypatch.setattr(cross_entropy, "BLOCK", 4 * 1000)
    hidden, weight = torch.randn(256, 8, requires_grad=True), torch.randn(1000, 8, requires_grad=True)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x.numel()), x)[1], lambda x: x):
        linear_cross_entropy(hidden, weight, torch.zeros(256, dtype=torch.long)).backward()
    assert max(kept) == weight.numel()
