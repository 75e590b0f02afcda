"""MXFP4 against its definition: every byte under every scale, the published sample, and rounding to the nearest value."""

from __future__ import annotations

import math

import pytest
import torch

import palimpsest as pal
from palimpsest import ops
from palimpsest.moe import Experts, PackedExperts
from tests.conftest import make_ids, make_model

VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def grid() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All 256 bytes (16 groups) under each of the scales 0..254, and what they mean, computed by hand in Python."""
    packed = torch.arange(256, dtype=torch.uint8).expand(255, 256)
    scale = torch.arange(255, dtype=torch.uint8).unsqueeze(1).expand(255, 16)
    row = [VALUES[half] for byte in range(256) for half in (byte % 16, byte // 16)]
    meant = [[math.ldexp(value, exponent - 127) for value in row] for exponent in range(255)]
    return packed, scale, torch.tensor(meant, dtype=torch.float64)


def test_every_byte_under_every_scale() -> None:
    packed, scale, meant = grid()
    exact = ops.mxfp4_decode(packed, scale, torch.float64)
    assert torch.equal(exact, meant) and torch.equal(exact.signbit(), meant.signbit())
    for dtype in (torch.float32, torch.bfloat16):
        found = ops.mxfp4_decode(packed, scale, dtype)
        assert found.dtype == dtype
        assert torch.equal(found[:253].double(), meant[:253])  # with two more scales 6 * 2^126 and more: infinity
        assert torch.equal(found, meant.to(dtype))
    assert ops.mxfp4_decode(packed[:1], torch.full((1, 16), 255, dtype=torch.uint8)).isnan().all()


def test_published_sample_and_the_order_of_halves() -> None:
    """R063: the low half is the even column; the sample is from the released weights."""
    packed = torch.tensor([22, 185, 206, 35, *[0] * 12], dtype=torch.uint8)
    found = ops.mxfp4_decode(packed, torch.tensor([121], dtype=torch.uint8))
    sample = [0.0625, 0.0078125, -0.0078125, -0.0234375, -0.0625, -0.03125, 0.0234375, 0.015625]
    assert found[:8].tolist() == sample
    both = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE, *[0] * 8], dtype=torch.uint8)
    assert ops.mxfp4_decode(both, torch.tensor([127], dtype=torch.uint8))[:16].tolist() == VALUES


def test_what_was_decoded_is_encoded_without_loss() -> None:
    packed, scale, meant = grid()
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        weights = ops.mxfp4_decode(packed[:253], scale[:253], dtype)
        again = ops.mxfp4_decode(*ops.mxfp4_encode(weights), torch.float64)
        assert torch.equal(again, meant[:253]) and torch.equal(again.signbit(), meant[:253].signbit())


def test_nearest_ties_to_even() -> None:
    """With 6 in the group the scale is 1; each value goes to the nearest, halfway to the one whose code is even."""
    meant = {
        0.25: 0,
        0.26: 0.5,
        0.75: 1,
        0.74: 0.5,
        1.25: 1,
        1.26: 1.5,
        1.75: 2,
        2.5: 2,
        2.51: 3,
        3.5: 4,
        3.49: 3,
        5: 4,
        5.1: 6,
    }
    group = torch.zeros(2, 32)
    group[:, : len(meant)] = torch.tensor(list(meant))
    group[1] *= -1
    group[:, 31] = 6
    found = ops.mxfp4_decode(*ops.mxfp4_encode(group))
    assert found[0, : len(meant)].tolist() == list(meant.values())
    assert found[1, : len(meant)].tolist() == [-value for value in meant.values()]
    packed, scale = ops.mxfp4_encode(group)
    assert scale.flatten().tolist() == [127, 127] and packed.dtype == torch.uint8


def test_error_is_at_most_half_a_step() -> None:
    """For random groups of all sizes: nothing is further away than half the distance of neighbouring values there."""
    torch.manual_seed(0)
    weights = torch.randn(64, 256) * torch.logspace(-30, 30, 64).unsqueeze(1)
    found = ops.mxfp4_decode(*ops.mxfp4_encode(weights))
    largest = weights.unflatten(1, (8, 32)).abs().amax(2).repeat_interleave(32, 1)
    assert ((weights - found).abs() <= (weights.abs() / 4).maximum(largest / 14)).all()
    assert (found != 0).double().mean() > 0.8
    tiny = torch.full((1, 32), 2.0**-126)
    assert torch.equal(ops.mxfp4_decode(*ops.mxfp4_encode(tiny)), tiny)  # no floor under the scale
    assert not ops.mxfp4_decode(*ops.mxfp4_encode(torch.zeros(1, 32))).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_matmul_is_the_product_with_the_decoded_weights(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    packed, scale = ops.mxfp4_encode(torch.randn(50, 96))
    x = torch.randn(2, 3, 96, dtype=dtype, requires_grad=True)
    expected = x @ ops.mxfp4_decode(packed, scale, dtype).T
    for tile in (1, 7 * 48, 1 << 20):
        monkeypatch.setattr("palimpsest.ops.mxfp4.TILE_BYTES", tile)
        y = ops.mxfp4_matmul(x, packed, scale)
        torch.testing.assert_close(y, expected)
    y.sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()


def test_refused() -> None:
    packed, scale = ops.mxfp4_encode(torch.randn(4, 64))
    for call in (
        lambda: ops.mxfp4_decode(packed.int(), scale),
        lambda: ops.mxfp4_decode(packed, scale[:, :1]),
        lambda: ops.mxfp4_matmul(torch.randn(3, 32), packed, scale),
        lambda: ops.mxfp4_encode(torch.randn(4, 40)),
        lambda: ops.mxfp4_encode(torch.full((1, 32), math.nan)),
        lambda: ops.mxfp4_encode(torch.ones(1, 32, dtype=torch.int32)),
    ):
        with pytest.raises(ValueError):
            call()


def test_packed_experts_are_experts_with_the_decoded_weights() -> None:
    model = make_model("kimi-k3-tiny")
    twin = make_model("kimi-k3-tiny")
    counts = model.num_parameters(), model.num_parameters(active=True)
    model.pack_experts()
    for packed, plain in zip(model.modules(), twin.modules(), strict=False):
        assert isinstance(packed, PackedExperts) == isinstance(plain, Experts)
        if isinstance(packed, PackedExperts):
            for name, weight in plain.named_parameters():
                whole = [packed.get_parameter(f"{name}_{part}") for part in ("packed", "scale")]
                weight.data = ops.mxfp4_decode(whole[0], whole[1])
    assert (model.num_parameters(), model.num_parameters(active=True)) == counts
    ids = make_ids(model, 2, 9)
    torch.testing.assert_close(model(ids).logits, twin(ids).logits)
    assert torch.equal(model(ids[:, :0]).logits, twin(ids[:, :0]).logits)
    assert model.to(torch.bfloat16)(ids).logits.isfinite().all()
    with pytest.raises(pal.InputError, match="experts are 40 wide"):
        pal.Model(pal.ModelConfig.preset("kimi-k3-tiny", moe_intermediate_size=40)).pack_experts()
