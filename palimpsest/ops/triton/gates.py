"""What several kernels share: decay from its raw input, sums of decay without cancellation, and the tokens of a chunk.

Decays are kept in base 2: exp2 is the instruction that the hardware has.
"""

from __future__ import annotations

import triton
import triton.language as tl

CHUNK = tl.constexpr(64)  # tokens that are worked on together
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
GONE = tl.constexpr(-160.0)  # 2^-160 is zero in float32: no token needs to forget more


@triton.jit
def softplus(x):
    """log(1 + e^x), also where e^x is too small to be added to one."""
    small = tl.exp(-tl.abs(x))
    return tl.maximum(x, 0.0) + tl.where(small < 1e-3, small * (1 - 0.5 * small), tl.log(1 + small))


@triton.jit
def log_decay(raw, rate, bound, GATE: tl.constexpr):
    """log2 of the decay. GATE 1: raw is the log decay; 2: -rate softplus(raw); 3: bound sigmoid(rate raw)."""
    g = raw
    if GATE == 2:
        g = -rate * softplus(raw)
    if GATE == 3:
        g = bound * tl.sigmoid(rate * raw)
    return tl.maximum(g * LOG2E, GONE)


@triton.jit
def dot(a, b, DT: tl.constexpr):
    """a @ b in float32 from operands of type DT; float32 operands are multiplied to float32 accuracy."""
    if DT == tl.float32:
        return tl.dot(a.to(DT), b.to(DT), input_precision="tf32x3")
    else:
        return tl.dot(a.to(DT), b.to(DT))


@triton.jit
def dot_add(a, b, c, DT: tl.constexpr):
    """c + a @ b, as `dot`."""
    if DT == tl.float32:
        return tl.dot(a.to(DT), b.to(DT), c, input_precision="tf32x3")
    else:
        return tl.dot(a.to(DT), b.to(DT), c)


@triton.jit
def sums(which, g, DT: tl.constexpr):
    """which @ g for a matrix of -1, 0 and 1: sums over rows. All terms of a sum have one sign, so no digit is lost.

    In bfloat16, which holds `which` exactly, g goes in as two parts: 16 bits of it.
    """
    if DT == tl.float32:
        return tl.dot(which, g, input_precision="tf32x3")
    else:
        high = g.to(DT)
        low = (g - high.to(tl.float32)).to(DT)
        return tl.dot(which.to(DT), low, tl.dot(which.to(DT), high))


@triton.jit
def chunk_of(slot, bounds, tokens, chunks, PACKED: tl.constexpr):
    """First token of a chunk in the flattened [B T] rows, and how many tokens it has.

    Packed documents have a table [slots,2] of both; otherwise slot = sequence * chunks + chunk.
    """
    if PACKED:
        start = tl.load(bounds + 2 * slot).to(tl.int64)
        count = tl.load(bounds + 2 * slot + 1)
    else:
        first = (slot % chunks) * CHUNK
        start = (slot // chunks).to(tl.int64) * tokens + first
        count = tl.minimum(tokens - first, CHUNK)
    return start, count


@triton.jit
def ones(where):
    return tl.where(where, 1.0, 0.0)


# Halves of blocks are powers of two, 2^level. The level is an ordinary argument: one loop over levels keeps a kernel small.
@triton.jit
def corner(i, j, level):
    """Where row i lies in the second half and column j in the first half of one block of two halves."""
    return (i >> (level + 1) == j >> (level + 1)) & ((i >> level) > (j >> level))


@triton.jit
def toward(i, t, level):
    """Rows t of g between row i and the middle of its block: up to and with i in the second half, after it in the first."""
    second = ((i >> level) & 1) == 1
    return ones((i >> level == t >> level) & ((second & (t <= i)) | ((second == 0) & (t > i))))


# Which rows of g the sums of a chunk take, as [64,64] matrices in memory: building them anew in every program costs more than
# the product. Rows up to this one; rows after it; from the middle of its block of 32 to it, with sign; and between it and the
# middle of the chunk.
UP_TO, AFTER, FROM_MIDDLE, TO_HALF = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@triton.jit
def table_sums(table, KIND: tl.constexpr, g, DT: tl.constexpr):
    """Sums of g [64,BK] over the rows that a kind of the table names."""
    i = tl.arange(0, CHUNK)
    return sums(tl.load(table + KIND * CHUNK * CHUNK + (i[:, None] * CHUNK + i[None, :])), g, DT)
