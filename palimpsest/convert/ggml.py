"""How GGUF files store numbers: plain, or in blocks of a row that share a scale.

type    values  bytes of a block                         value
F32     1       4                                        as it is; F16 and BF16 likewise with 2
Q8_0    32      d f16, 32 x int8                         d q
Q4_0    32      d f16, 16 bytes                          d (q - 8)         low halves first, then high halves
Q4_1    32      d f16, m f16, 16 bytes                   d q + m           the same order
Q6_K    256     128 low parts, 64 high, 16 scales, d     d scale (q - 32)
MXFP4   32      scale, 16 bytes                          as ops/mxfp4.py, in the order of Q4_0
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Kind(NamedTuple):
    """A type: its name, and the values and bytes of a block."""

    name: str
    values: int
    bytes: int


KINDS = {
    **{0: Kind("F32", 1, 4), 1: Kind("F16", 1, 2), 30: Kind("BF16", 1, 2), 8: Kind("Q8_0", 32, 34)},
    **{2: Kind("Q4_0", 32, 18), 3: Kind("Q4_1", 32, 20), 14: Kind("Q6_K", 256, 210), 39: Kind("MXFP4", 32, 17)},
}
NUMBERS = {kind.name: number for number, kind in KINDS.items()}
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
READ = (*PLAIN, "Q8_0", "Q4_0", "Q4_1", "Q6_K")


def decode(data: Tensor, kind: str) -> Tensor:
    """Bytes uint8 [...,blocks * bytes] -> float32 [...,blocks * values]; plain types keep their dtype."""
    if kind in PLAIN:
        return data.view(PLAIN[kind])
    size = KINDS[NUMBERS[kind]].bytes
    blocks = data.unflatten(-1, (-1, size))
    if kind == "Q6_K":
        return _decode_q6_k(blocks).flatten(-2)
    d, rest = _half(blocks[..., :2]), blocks[..., 2:]
    if kind == "Q8_0":
        return (d * rest.view(torch.int8)).flatten(-2)
    if kind == "Q4_0":
        return (d * (_halves(rest) - 8)).flatten(-2)
    return (d * _halves(rest[..., 2:]) + _half(rest[..., :2])).flatten(-2)


def _half(data: Tensor) -> Tensor:
    return data.contiguous().view(torch.float16).float()


def _halves(data: Tensor) -> Tensor:
    """Bytes [...,n] -> their low halves, then their high halves, float32 [...,2n]."""
    return torch.cat([data & 15, data >> 4], -1).float()


def _decode_q6_k(blocks: Tensor) -> Tensor:
    low, high, scales, d = blocks.split([128, 64, 16, 2], -1)
    # Two halves of 128 values; in each, four runs of 32 take their low parts from two rows of 32 bytes.
    low, high = low.unflatten(-1, (2, 2, 32)), high.unflatten(-1, (2, 1, 32))
    lows = torch.cat([low & 15, low >> 4], -2)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(4, 1)
    values = (lows | ((high >> shifts & 3) << 4)).float() - 32  # [...,2,4,32]
    factor = scales.contiguous().view(torch.int8).float().unflatten(-1, (2, 4, 2)).repeat_interleave(16, -1)
    return _half(d) * (values * factor).flatten(-3)


def encode(tensor: Tensor, kind: str) -> Tensor:
    """float [...,n] -> bytes uint8, for the plain types and Q8_0 (n a multiple of 32)."""
    if kind in PLAIN:
        return tensor.to(PLAIN[kind]).contiguous().view(torch.uint8)
    blocks = tensor.float().unflatten(-1, (-1, 32))
    step = blocks.abs().amax(-1, keepdim=True) / 127
    scaled = torch.where(step > 0, blocks / step, 0.0)
    whole = (scaled.abs() + 0.5).floor() * scaled.sign()  # halves away from zero
    d = step.to(torch.float16).view(torch.uint8)
    return torch.cat([d, whole.to(torch.int8).view(torch.uint8)], -1).flatten(-2)


def from_mxfp4(packed: Tensor, scale: Tensor) -> Tensor:
    """Packed rows of ops/mxfp4.py [...,n/2], [...,n/32] -> MXFP4 blocks, bytes uint8 [...,n/32 * 17], the same numbers."""
    pairs = packed.unflatten(-1, (-1, 16))
    codes = torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2)  # [...,blocks,32]
    first, second = codes.chunk(2, -1)
    return torch.cat([scale.unsqueeze(-1), first | (second << 4)], -1).flatten(-2)
