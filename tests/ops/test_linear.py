"""Linear maps of a few rows: against float64, the same alone as beside others, and eight-bit weights as ggml has them."""

from __future__ import annotations

import pytest
import torch

from palimpsest import ops
from palimpsest.convert import ggml
from tests.conftest import relative

SHAPES = [(1, 1), (5, 33), (64, 32), (33, 96), (100, 64), (257, 160)]  # out, in; odd ones have a row or columns left over


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 16, 17, 31])
def test_linear_equals_torch(shape: tuple[int, int], rows: int) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(rows, shape[1]), torch.randn(shape), torch.randn(shape[0])
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 4e-3)):
        mine = [y.to(dtype) for y in (x, weight, bias)]
        expected = torch.nn.functional.linear(*(y.double() for y in mine))
        with torch.no_grad():
            found = ops.linear(*mine)
        assert found.dtype is dtype and relative(found, expected) < tolerance
        with torch.no_grad():
            assert torch.equal(ops.linear(mine[0].view(1, rows, -1), *mine[1:])[0], found)


def test_a_row_is_the_same_alone_as_beside_others() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(31, 99), torch.randn(70, 99)
    with torch.no_grad():
        if ops.cpu.library()[0] is not None:
            whole = ops.linear(x, weight)
            assert torch.equal(torch.cat([ops.linear(row, weight) for row in x.split(1)]), whole)
            assert torch.equal(ops.linear(x[-16:], weight), whole[-16:])


@pytest.mark.skipif(ops.cpu.library()[0] is None, reason="the compiled backend is not here")
@pytest.mark.parametrize("shape", [(16, 32), (33, 96), (70, 160)])
def test_many_rows_of_eight_bits(shape: tuple[int, int]) -> None:
    """Above 16 rows a row is the same whatever goes beside it, and the codes are multiplied as the float32 weights they stand
    for: bit for bit what `linear` makes of those."""
    torch.manual_seed(0)
    x, (code, scale) = torch.randn(150, shape[1]), ops.q8_0_encode(torch.randn(shape))
    near = ops.q8_0_decode(code, scale)
    with torch.no_grad():
        whole = ops.q8_0_matmul(x, code, scale)
        for rows in (17, 18, 19, 24, 32, 101):
            assert torch.equal(ops.q8_0_matmul(x[-rows:], code, scale), whole[-rows:])
        assert torch.equal(ops.linear(x[:32], near), whole[:32])
    assert relative(whole, x.double() @ near.double().mT) < 1e-6


@pytest.mark.skipif(ops.cpu.library()[0] is None, reason="the compiled backend is not here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_rows_of_any_weights(dtype: torch.dtype) -> None:
    """Also with more rows than `linear` gives the compiled product: bit for bit those of the few, ends left over too."""
    torch.manual_seed(0)
    x, weight = torch.randn(45, 83, dtype=dtype), torch.randn(37, 83).to(dtype)
    few = torch.cat([ops.cpu.few_matmul(part, weight) for part in x.split(9)])
    assert torch.equal(ops.cpu.few_matmul(x, weight), few)


def test_gradients_and_double_are_torchs() -> None:
    x, weight = (torch.randn(2, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(ops.linear, (x, weight))


def test_not_a_number_and_infinity_pass_through() -> None:
    x = torch.tensor([[1.0] * 31 + [float("nan")], [1.0] * 31 + [float("inf")]])
    for dtype in (torch.float32, torch.bfloat16):
        with torch.no_grad():
            y = ops.linear(x.to(dtype), torch.ones(3, 32, dtype=dtype))
        assert y[0].isnan().all() and y[1].isinf().all()


@pytest.mark.parametrize("shape", [(64, 32), (33, 96), (7, 160)])
@pytest.mark.parametrize("rows", [1, 3, 4, 9, 16, 17, 40, 129, 513])
def test_eight_bits(shape: tuple[int, int], rows: int) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(rows, shape[1]), torch.randn(shape), torch.randn(shape[0])
    code, scale = ops.q8_0_encode(weight)
    assert (code.dtype, scale.dtype, scale.shape) == (torch.int8, torch.float16, (shape[0], shape[1] // 32))
    near = ops.q8_0_decode(code, scale)
    assert (near - weight).abs().max() <= weight.abs().max() / 127 * 0.51
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 4e-3), (torch.float64, 1e-12)):
        y = ops.q8_0_matmul(x.to(dtype), code, scale, bias.to(dtype))
        expected = x.to(dtype).double() @ near.double().mT + bias.to(dtype).double()
        assert y.dtype is dtype and relative(y, expected) < tolerance
    leaf = x.double().requires_grad_()
    (gradient,) = torch.autograd.grad(ops.q8_0_matmul(leaf, code, scale).sum(), leaf)
    torch.testing.assert_close(gradient, near.double().sum(0).expand_as(gradient))


def test_eight_bits_are_ggmls() -> None:
    """The same numbers as a GGUF file holds, also for rows of zeros and for factors that float16 has as subnormals only."""
    torch.manual_seed(0)
    weight = torch.randn(6, 64) * torch.tensor([1.0, 0.0, 1e-4, 1e3, 1e-6, 30000.0]).view(6, 1)
    code, scale = ops.q8_0_encode(weight)
    expected = ggml.decode(ggml.encode(weight, "Q8_0"), "Q8_0")
    assert torch.equal(ops.q8_0_decode(code, scale), expected)
    x = torch.randn(2, 64)
    assert relative(ops.q8_0_matmul(x, code, scale), x.double() @ expected.double().mT) < 1e-6


def test_what_eight_bits_cannot_hold() -> None:
    with pytest.raises(ValueError, match="expected the last axis a multiple of 32"):
        ops.q8_0_encode(torch.randn(2, 33))
    for value in (float("nan"), float("inf"), 1e30):
        with pytest.raises(ValueError, match="too large for eight bits, NaN or infinity"):
            ops.q8_0_encode(torch.full((1, 32), value))
    code, scale = ops.q8_0_encode(torch.randn(4, 64))
    with pytest.raises(ValueError, match=r"expected \[...,in\], \[out,in\], \[out,in/32\]"):
        ops.q8_0_matmul(torch.randn(1, 32), code, scale)
