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
def sigmoid(x):
    """1 / (1 + e^-x) as the square of an inverse root: a division takes more instructions than all else here."""
    root = tl.rsqrt(1 + tl.exp2(-x * LOG2E))
    return root * root


@triton.jit
def log_decay(raw, rate, bound, GATE: tl.constexpr):
    """log2 of the decay. GATE 1: raw is the log decay; 2: -rate softplus(raw); 3: bound sigmoid(rate raw)."""
    g = raw
    if GATE == 2:
        g = -rate * softplus(raw)
    if GATE == 3:
        g = bound * sigmoid(rate * raw)
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


# The pairs of rows j < i of a chunk fall into parts, in each of which exp(G_i - G_j) is a factor of row i times one of row j.
# At level l: i in the second half, j in the first of one block of two halves of 2^l rows, split at the middle. MIDDLE: both in
# one block of 32, split at its middle row, where no factor overflows. So MIDDLE and level 5 cover all pairs, as do levels 0 to
# 5. Part and level are ordinary arguments of one loop: every product written out once more would cost registers.
MIDDLE = tl.constexpr(-1)
# Which rows of g the sums of a chunk take, as [64,64] matrices in memory: rows up to this one, rows after it, rows from it on,
# rows before it; then the exponents of MIDDLE (with sign) and those of levels 0 to 5: rows between this one and the middle.
UP_TO, AFTER, FROM_HERE, BEFORE, PARTS = (tl.constexpr(kind) for kind in (0, 1, 2, 3, 5))
# Largest exponent (base 2) of a factor. A gate bounded by -5 reaches 115 from the middle of 32 rows. What overflows is only
# the product of two large factors, above the diagonal, where it is thrown away.
SAFE = tl.constexpr(118.0)


@triton.jit
def table_sums(table, kind, g, DT: tl.constexpr):
    """Sums of g [64,BK] over the rows that a kind of the table names."""
    i = tl.arange(0, CHUNK)
    return sums(tl.load(table + kind * CHUNK * CHUNK + (i[:, None] * CHUNK + i[None, :])), g, DT)


@triton.jit
def parts_of(table, g, DT: tl.constexpr):
    """How many parts there are, and whether the first is MIDDLE and the second level 5 (else they are levels 0 to 5)."""
    safe = tl.max(tl.abs(table_sums(table, PARTS + MIDDLE, g, DT))) <= SAFE
    return tl.where(safe, 2, 6), safe


@triton.jit
def factors_of(table, part, safe, g, DT: tl.constexpr):
    """The level of a part, and its factors of rows and of columns [64,BK]."""
    level = tl.where(safe, tl.where(part == 0, MIDDLE, 5), part)
    exponent = table_sums(table, PARTS + level, g, DT)
    of_row = tl.exp2(exponent)
    of_column = of_row
    if level == MIDDLE:
        of_column = tl.exp2(-exponent)
    return level, of_row, of_column


@triton.jit
def belongs(rows, level):
    """The pairs of row and column that a part consists of: rows [n] -> [n,n]."""
    i, j = rows[:, None], rows[None, :]
    block, half = tl.where(level == MIDDLE, 5, level + 1), tl.where(level == MIDDLE, 0, level)
    return (i >> block == j >> block) & ((i >> half) > (j >> half))
