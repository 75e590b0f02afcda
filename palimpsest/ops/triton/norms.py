"""RMSNorm, perhaps with a gate, in one pass each way.

    u = x r     r = 1 / sqrt(mean(x^2) + eps)     y = w u a(g)     a: 1, sigmoid or SiLU
    u' = y' w a(g)     x' = r (u' - u mean(u u'))     w' = sum y' u a(g)     g' = y' w u a'(g)

A prime is a gradient. Only the inputs are kept. A row is summed the same whatever stands beside it; a weight's gradient is
summed over a fixed number of rows at a time, and these sums in their order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from palimpsest.ops.triton.gates import sigmoid

WIDEST = 8192  # columns of a row, which a program holds in registers
TILE = 4096  # numbers that a program works on at a time
TILES = 16  # of them that one program of the backward pass visits
NONE, SIGMOID, SILU = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
GATES = {"none": 0, "sigmoid": 1, "silu": 2}


@triton.jit
def opened(g, GATE: tl.constexpr):
    """a(g) and a'(g)."""
    s = sigmoid(g)
    if GATE == SIGMOID:
        value, slope = s, s * (1 - s)
    else:
        value, slope = g * s, s * (1 + g * (1 - s))
    return value, slope


@triton.jit(do_not_specialize=["rows"])
def norm(
    x, gate, weight, y, rows, eps,
    D: tl.constexpr, DP: tl.constexpr, BR: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """BR of the rows of x [rows,D]."""
    r, c = tl.program_id(0) * BR + tl.arange(0, BR), tl.arange(0, DP)
    live = (r < rows)[:, None] & (c < D)[None, :]
    at = r.to(tl.int64)[:, None] * D + c[None, :]
    value = tl.load(x + at, mask=live, other=0.0).to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, 1) / D + eps)[:, None]
    value *= tl.load(weight + c, mask=c < D, other=0.0).to(tl.float32)[None, :]
    if GATE != NONE:
        factor, _ = opened(tl.load(gate + at, mask=live, other=0.0).to(tl.float32), GATE)
        value *= factor
    tl.store(y + at, value.to(y.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["rows"])
def norm_back(
    x, gate, weight, d_y, d_x, d_gate, d_weight, rows, eps,
    D: tl.constexpr, DP: tl.constexpr, BR: tl.constexpr, TILES: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """BR * TILES rows: gradients of x and of the gate, and in `d_weight` [programs,D] these rows' part of the weight's."""
    c = tl.arange(0, DP)
    w = tl.load(weight + c, mask=c < D, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros([BR, DP], tl.float32)
    for tile in range(TILES):
        r = (tl.program_id(0) * TILES + tile) * BR + tl.arange(0, BR)
        live = (r < rows)[:, None] & (c < D)[None, :]
        at = r.to(tl.int64)[:, None] * D + c[None, :]
        unit = tl.load(x + at, mask=live, other=0.0).to(tl.float32)
        flow = tl.load(d_y + at, mask=live, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(unit * unit, 1) / D + eps)[:, None]
        unit *= scale
        if GATE != NONE:
            factor, slope = opened(tl.load(gate + at, mask=live, other=0.0).to(tl.float32), GATE)
            tl.store(d_gate + at, (flow * unit * w * slope).to(d_gate.dtype.element_ty), mask=live)
            flow *= factor
        total += flow * unit
        flow *= w
        flow -= unit * (tl.sum(flow * unit, 1) / D)[:, None]
        tl.store(d_x + at, (scale * flow).to(d_x.dtype.element_ty), mask=live)
    tl.store(d_weight + tl.program_id(0).to(tl.int64) * D + c, tl.sum(total, 0), mask=c < D)


def _tile(columns: int) -> dict[str, int]:
    """Shape of a tile of whole rows, and its warps: they depend on the width alone."""
    padded = triton.next_power_of_2(columns)
    return {"D": columns, "DP": padded, "BR": max(TILE // padded, 1), "num_warps": 4 if padded <= TILE else 8}


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, kind: int, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, gate, weight)
        ctx.eps, ctx.kind = eps, kind
        y = torch.empty_like(x, dtype=dtype)
        rows, options = x.numel() // len(weight), _tile(len(weight))
        norm[(-(-rows // options["BR"]),)](x, gate, weight, y, rows, eps, GATE=kind, **options)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> Any:
        x, gate, weight = ctx.saved_tensors
        d_x, d_gate = torch.empty_like(x), None if gate is None else torch.empty_like(gate)
        rows, options = x.numel() // len(weight), _tile(len(weight))
        programs = -(-rows // (options["BR"] * TILES))
        parts = x.new_empty(programs, len(weight), dtype=torch.float32)
        norm_back[(programs,)](
            x, gate, weight, d_y.contiguous(), d_x, d_gate, parts, rows, ctx.eps, TILES=TILES, GATE=ctx.kind, **options
        )
        d_weight = parts.sum(0).to(weight.dtype) if ctx.needs_input_grad[2] else None
        return d_x, d_gate, d_weight, None, None, None


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, gate: Tensor | None = None, kind: str = "none"
) -> Tensor:
    """x and gate [...,D], weight [D] -> [...,D] in `dtype`; arithmetic in float32. `kind` of a gate: 'sigmoid' or 'silu'."""
    gate = None if gate is None else gate.contiguous()
    return _Norm.apply(x.contiguous(), gate, weight.contiguous(), eps, GATES[kind], dtype)  # type: ignore[return-value]
