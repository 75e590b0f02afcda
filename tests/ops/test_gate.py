"""The forgetting gate: published values, finite gradients, and float32 arithmetic."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.nn import functional as F

from palimpsest.ops import kda_gate, l2norm
from tests.conftest import relative

# A_log, z, the bounded gate of Kimi K3, the softplus gate of Kimi Linear
PUBLISHED = [
    (0.0, 0.0, -2.5, -0.6931471805599453),
    (0.0, 1.0, -3.6552928931500244, -1.3132616875182228),
    (0.0, -1.0, -1.3447071068499756, -0.31326168751822286),
    (math.log(2), 1.0, -4.403985389889412, -2.6265233750364456),
    (math.log(16), 1.0, -4.99999943732419, -21.01218700029156),
    (0.0, 40.0, -5.0, -40.0),
    (0.0, -40.0, -2.1241771276457944e-17, -4.248354255291589e-18),
]


@pytest.mark.parametrize(("rate", "z", "bounded", "unbounded"), PUBLISHED)
def test_published_values(rate: float, z: float, bounded: float, unbounded: float) -> None:
    """R016: two formulas, chosen by the bound."""
    for dtype, limit in ((torch.float64, 1e-14), (torch.float32, 3e-6)):
        x, a = torch.full((1, 1), z, dtype=dtype), torch.full((1,), rate, dtype=dtype)
        for bound, expected in ((-5.0, bounded), (None, unbounded)):
            found = float(kda_gate(x, a, None, bound))
            # Where the bounded gate saturates, float32 rounds sigmoid(z) itself; relative to what is left that is exact.
            assert math.isclose(found, expected, rel_tol=limit), (found, expected)


def test_bias_and_rate_meet_their_channels() -> None:
    """dt_bias [HV*K] is head-major and enters before the rate; A_log is per head."""
    z = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    rate, bias = torch.randn(4, dtype=torch.float64), torch.randn(20, dtype=torch.float64)
    for h, c in itertools.product(range(4), range(5)):
        shifted = z[:, :, h, c] + bias[h * 5 + c]
        found = kda_gate(z, rate, bias, -3.0)[:, :, h, c]
        assert relative(found, -3 * torch.sigmoid(rate[h].exp() * shifted)) < 1e-14
        found = kda_gate(z, rate, bias)[:, :, h, c]
        assert relative(found, -rate[h].exp() * F.softplus(shifted)) < 1e-14


@pytest.mark.parametrize("bound", [None, -5.0, -0.5])
def test_gradients_are_finite(bound: float | None) -> None:
    """At |z| = 200 and A_log up to 6 an exp written out by hand would give 0 times infinity."""
    for dtype in (torch.float32, torch.bfloat16):
        z = torch.tensor([-200.0, -40.0, -1.0, 0.0, 2.0, 40.0, 200.0], dtype=dtype).repeat(4, 1).requires_grad_()
        rate = torch.tensor([-6.0, 0.0, 3.0, 6.0]).requires_grad_()
        bias = torch.zeros(28, requires_grad=True)
        g = kda_gate(z, rate, bias, bound)
        assert g.isfinite().all() and (g <= 0).all() and (bound is None or (g >= bound).all())
        weight = torch.randn(g.shape)
        a, b, c = (t.detach().double().requires_grad_() for t in (z, rate, bias))
        wanted = torch.autograd.grad(kda_gate(a, b, c, bound), [a, b, c], weight.double())
        for found, expected in zip(torch.autograd.grad(g, [z, rate, bias], weight), wanted, strict=True):
            assert found.isfinite().all() and relative(found, expected) < (1e-5 if dtype == torch.float32 else 1e-2)


def test_precision() -> None:
    """Half-precision inputs are worked on in float32, and the result is float32."""
    z = torch.randn(3, 2, 4).bfloat16()
    rate, bias = torch.randn(2), torch.randn(8)
    for bound in (None, -5.0):
        g = kda_gate(z, rate, bias, bound)
        assert g.dtype == torch.float32
        exact = kda_gate(z.double(), rate.double(), bias.double(), bound)
        assert exact.dtype == torch.float64 and relative(g, exact) < 1e-6


def test_refused() -> None:
    """R028: a bias or rate of another size is not read out of bounds."""
    z = torch.randn(5, 2, 4)
    with pytest.raises(ValueError, match=r"dt_bias has shape \[2\]; expected \[8\]"):
        kda_gate(z, torch.zeros(2), torch.zeros(2))
    with pytest.raises(ValueError, match=r"dt_bias has shape \[2, 4\]; expected \[8\]"):
        kda_gate(z, torch.zeros(2), torch.zeros(2, 4))
    with pytest.raises(ValueError, match=r"A_log has shape \[4\]; expected \[2\]"):
        kda_gate(z, torch.zeros(4), None)
    for bound in (0.0, 2.0, -5.01, float("nan")):
        with pytest.raises(ValueError, match=r"lower_bound is .*; it must be in \[-5, 0\)"):
            kda_gate(z, torch.zeros(2), None, bound)


def test_l2norm() -> None:
    """The epsilon is added to the sum of squares; it is neither a mean nor a clamp."""
    x = torch.tensor([[3.0, 4.0], [1e-3, 0.0], [0.0, 0.0]], dtype=torch.float64)
    expected = x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    assert relative(l2norm(x), expected) < 1e-15
    assert abs(float(l2norm(x)[1, 0]) - 0.5**0.5) < 1e-12
    zero = torch.zeros(3, requires_grad=True)
    (grad,) = torch.autograd.grad(l2norm(zero).sum(), zero)
    assert torch.allclose(grad, torch.full((3,), 1e3))
    assert l2norm(torch.ones(2, dtype=torch.bfloat16)).dtype == torch.float32
