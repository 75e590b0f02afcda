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
# Rows that two sums of a gradient take, as [64,64] matrices in memory: rows from this one on, rows before it.
FROM_HERE, BEFORE = tl.constexpr(0), tl.constexpr(1)
# Largest exponent (base 2) of a factor. A gate bounded by -5 reaches 115 from the middle of 32 rows. What overflows is only
# the product of two large factors, above the diagonal, where it is thrown away.
SAFE = tl.constexpr(118.0)


@triton.jit
def table_sums(table, kind, g, DT: tl.constexpr):
    """Sums of g [64,BK] over the rows that a kind of the table names."""
    i = tl.arange(0, CHUNK)
    return sums(tl.load(table + kind * CHUNK * CHUNK + (i[:, None] * CHUNK + i[None, :])), g, DT)


@triton.jit(do_not_specialize=["tokens", "chunks"])
def running_sums(
    g, a_log, bias, total, bounds, tokens, chunks, stride_g, lower_bound,
    VALUE_HEADS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """G [slots,HV,64,KP] in base 2, one chunk of one head: the decay of row t is exp2(G_t) since the chunk began, and that from
    row j to row i is exp2(G_i - G_j). Rows behind the last token repeat it. K 1: a gate per head.

    In bfloat16 G is float32, whose last digit at 64 tokens of the strongest decay is 1e-3: still below the operands' own. Else
    it is float64, and differences keep float32's digits.
    """
    head, slot = tl.program_id(0), tl.program_id(1)
    start, count = chunk_of(slot, bounds, tokens, chunks, PACKED)
    c = tl.arange(0, KP)
    g += start * stride_g + head * K + c
    total += (slot.to(tl.int64) * VALUE_HEADS + head) * CHUNK * KP + c
    rate, moved = 1.0, tl.zeros([KP], tl.float32)
    if GATE > 1:
        rate = tl.exp(tl.load(a_log + head).to(tl.float32))
    if BIAS:
        moved += tl.load(bias + head * K + c, mask=c < K, other=0.0).to(tl.float32)
    here = tl.zeros([KP], total.dtype.element_ty)
    for first in range(0, CHUNK, 8):
        for t in tl.static_range(8):
            live = (first + t < count) & (c < K)
            raw = tl.load(g + (first + t) * stride_g, mask=live, other=0.0).to(tl.float32) + moved
            here += tl.where(live, log_decay(raw, rate, lower_bound, GATE), 0.0).to(here.dtype)
            tl.store(total + (first + t) * KP, here)


@triton.jit
def from_pivot(total, level, c, WIDTH: tl.constexpr):
    """G_i - G_pivot [64,BK] of channels c: pivots are the middle rows of blocks of 32 (MIDDLE), or of a level's blocks the last
    rows of their first halves. `total` points to a chunk's G, WIDTH channels a row, 1 for all of a scalar gate."""
    i = tl.arange(0, CHUNK)
    half = tl.where(level == MIDDLE, 0, level)
    of_level = (i >> (half + 1) << (half + 1)) + ((i * 0 + 1) << half) - 1
    pivot = tl.where(level == MIDDLE, (i >> 5 << 5) + 16, of_level)
    return (tl.load(total + (i[:, None] * WIDTH + c[None, :])) - tl.load(total + (pivot[:, None] * WIDTH + c[None, :]))).to(
        tl.float32
    )


@triton.jit
def belongs(rows, level):
    """The pairs of row and column that a part consists of: rows [n] -> [n,n]."""
    i, j = rows[:, None], rows[None, :]
    block, half = tl.where(level == MIDDLE, 5, level + 1), tl.where(level == MIDDLE, 0, level)
    return (i >> block == j >> block) & ((i >> half) > (j >> half))
