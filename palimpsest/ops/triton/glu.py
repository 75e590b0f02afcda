"""Gated activations y = a(g) b(u) in one pass each way. Only g and u are kept.

SwiGLU: a = SiLU, b the identity. SiTU: a = beta tanh(g / beta) sigmoid(g), b = lambda tanh(u / lambda).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from palimpsest.ops.triton.gates import LOG2E

BLOCK = {"BLOCK": 2048, "num_warps": 4}  # numbers of one program


@triton.jit
def sigmoids(x):
    """sigmoid(|x|) and sigmoid(-|x|), each to float32's accuracy relative to itself, from one exponential and one root."""
    small = tl.exp2(-LOG2E * tl.abs(x))
    root = tl.rsqrt(1 + small)
    large = root * root
    return large, small * large


@triton.jit
def tanh(x):
    """And its slope. Both to float32's accuracy relative to themselves: near zero tanh is its series, where a difference would
    lose digits; far from it the slope is no difference from 1."""
    square = x * x
    series = x * (1 + square * (-1 / 3 + square * (2 / 15 - square * (17 / 315))))
    large, small = sigmoids(2 * x)
    far = large - small
    return tl.where(tl.abs(x) < 0.2, series, tl.where(x < 0, -far, far)), 4 * large * small


@triton.jit
def factors(g, u, beta, linear_beta, SITU: tl.constexpr):
    """a(g), a'(g), b(u), b'(u)."""
    large, small = sigmoids(g)
    s, rest = tl.where(g < 0, small, large), tl.where(g < 0, large, small)
    if SITU:
        t, t_slope = tanh(g * (1 / beta))
        r, b_slope = tanh(u * (1 / linear_beta))
        a, a_slope = beta * t * s, t_slope * s + beta * t * s * rest
        b = linear_beta * r
    else:
        a, a_slope = g * s, s * (1 + g * rest)
        b, b_slope = u, tl.full(u.shape, 1.0, tl.float32)
    return a, a_slope, b, b_slope


# Known to be a multiple of 16, `size` lets threads read and write eight numbers at a time.
@triton.jit
def glu(gate, up, y, size, beta, linear_beta, SITU: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + at, mask=at < size, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=at < size, other=0.0).to(tl.float32)
    a, _, b, _ = factors(g, u, beta, linear_beta, SITU)
    tl.store(y + at, (a * b).to(y.dtype.element_ty), mask=at < size)


@triton.jit
def glu_back(gate, up, d_y, d_gate, d_up, size, beta, linear_beta, SITU: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + at, mask=at < size, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=at < size, other=0.0).to(tl.float32)
    flow = tl.load(d_y + at, mask=at < size, other=0.0).to(tl.float32)
    a, a_slope, b, b_slope = factors(g, u, beta, linear_beta, SITU)
    tl.store(d_gate + at, (flow * a_slope * b).to(d_gate.dtype.element_ty), mask=at < size)
    tl.store(d_up + at, (flow * a * b_slope).to(d_up.dtype.element_ty), mask=at < size)


class _Glu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, situ: tuple[float, float] | None) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.situ = situ
        y = torch.empty_like(gate)
        grid = (-(-gate.numel() // BLOCK["BLOCK"]),)
        glu[grid](gate, up, y, gate.numel(), *(situ or (1.0, 1.0)), SITU=situ is not None, **BLOCK)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
        grid, betas = (-(-gate.numel() // BLOCK["BLOCK"]),), ctx.situ or (1.0, 1.0)
        glu_back[grid](
            gate, up, d_y.contiguous(), d_gate, d_up, gate.numel(), *betas, SITU=ctx.situ is not None, **BLOCK
        )  # fmt: skip
        return d_gate, d_up, None


def gated(gate: Tensor, up: Tensor, situ: tuple[float, float] | None = None) -> Tensor:
    """gate and up of one shape and dtype -> SwiGLU, or SiTU with its beta and linear beta; arithmetic in float32."""
    return _Glu.apply(gate.contiguous(), up.contiguous(), situ)  # type: ignore[return-value]
