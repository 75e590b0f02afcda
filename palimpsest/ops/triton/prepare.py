"""What every chunk contributes, before any state is known: all chunks of all heads in parallel, then their solves.

With G the running sum of log decay inside a chunk, q and k normalised and q scaled, for rows i and j of a chunk

    P[i,j] = <q_i, exp(G_i - G_j) k_j>  (j <= i)        A[i,j] = <k_i, exp(G_i - G_j) k_j>  (j < i)
    Z = A (I + diag(beta) A)^-1  strictly lower         q_down = exp(G) q   k_down = exp(G) k   k_up = exp(G_last - G) k

Z is what the solve needs: (I + A diag(beta))^-1 = I - Z diag(beta). Its entries are what one write still weighs in a later
read, so |Z| <= |k|^2; so is every number on the way, since blocks are joined two by two:

    Z of [[A1, 0], [B, A2]] = [[Z1, 0], [(I - Z2 beta2) B (I - beta1 Z1), Z2]]

A vector gate splits exp(G_i - G_j) between the row and the column, in parts: see `gates.MIDDLE`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from palimpsest.ops.triton.gates import (
    CHUNK,
    MIDDLE,
    SAFE,
    belongs,
    chunk_of,
    dot,
    from_pivot,
    log_decay,
    ones,
    sums,
)


@triton.jit
def rsqrt_of_squares(x, stride, live, K: tl.constexpr, BK: tl.constexpr):
    """1 / sqrt(sum x^2 + 1e-6) of 64 rows at a distance of `stride`."""
    c = tl.arange(0, BK)
    i = tl.arange(0, CHUNK)
    total = tl.zeros([CHUNK], tl.float32)
    for block in tl.static_range((K + BK - 1) // BK):
        mask = live[:, None] & (block * BK + c < K)[None, :]
        part = tl.load(x + i[:, None] * stride + (block * BK + c)[None, :], mask=mask, other=0.0).to(tl.float32)
        total += tl.sum(part * part, 1)
    return tl.rsqrt(total + 1e-6)


@triton.jit
def solve(a, z, beta, COLUMNS: tl.constexpr, HALF: tl.constexpr):
    """Z [slots,HV,64,64] from A, whose upper part is zero; z may be the memory of a. beta at a distance of COLUMNS.

    HALF: keys have unit length, so that no number exceeds 2, and half precision holds 11 bits of each. Blocks of 16 on the
    diagonal come first, by themselves, and take the place of A's.
    """
    place = tl.program_id(0).to(tl.int64)
    a += place * CHUNK * CHUNK
    beta += place * COLUMNS
    block, inner = tl.arange(0, CHUNK // 16), tl.arange(0, 16)
    at = (block * (16 * CHUNK + 16))[:, None, None] + (inner * CHUNK)[None, :, None] + inner[None, None, :]
    small = tl.load(a + at).to(tl.float32)
    weak = tl.load(beta + block[:, None] * 16 + inner[None, :])
    found = tl.where(belongs(inner, 0)[None, :, :], small, 0.0)
    for level in range(1, 4):
        found = join(found, tl.where(belongs(inner, level)[None, :, :], small, 0.0), weak[:, :, None], weak[:, None, :], HALF)
    tl.debug_barrier()  # all of A's blocks are read
    tl.store(a + at, found.to(a.dtype.element_ty))
    tl.debug_barrier()  # all of Z's are written
    i = tl.arange(0, CHUNK)
    square = i[:, None] * CHUNK + i[None, :]
    full = tl.load(a + square).to(tl.float32)
    strength = tl.load(beta + i)
    whole = tl.where(i[:, None] // 16 == i[None, :] // 16, full, 0.0)
    for level in range(4, 6):
        whole = join(whole, tl.where(belongs(i, level), full, 0.0), strength[:, None], strength[None, :], HALF)
    tl.debug_barrier()
    tl.store(z + place * CHUNK * CHUNK + square, whole.to(z.dtype.element_ty))


@triton.jit
def join(z, b, of_row, of_column, HALF: tl.constexpr):
    """Z of blocks of twice the size: b holds what lies between their halves."""
    if HALF:
        narrow = z.to(tl.float16)
        w = b - tl.dot(narrow, (b * of_row).to(tl.float16))
        return z + w - tl.dot((w * of_column).to(tl.float16), narrow)
    else:
        w = b - tl.dot(z, b * of_row, input_precision="tf32x3")
        return z + w - tl.dot(w * of_column, z, input_precision="tf32x3")


@triton.jit(do_not_specialize=["tokens", "chunks"])
def prepare_vector(
    q, k, beta, total, bounds, q_down, k_down, k_up, keep, reads, overlaps, rows,
    tokens, chunks, stride_q, stride_k, stride_beta, scale,
    HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BK: tl.constexpr,
    NORM: tl.constexpr, LOGIT: tl.constexpr, PACKED: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """One chunk of one value head with a gate per key channel, `total` as `gates.running_sums` leaves it. Strides go from one
    token to the next; `rows` [slots,HV,3,64] gets beta and what q and k are divided by."""
    head, slot = tl.program_id(0), tl.program_id(1)
    start, count = chunk_of(slot, bounds, tokens, chunks, PACKED)
    place = slot.to(tl.int64) * VALUE_HEADS + head
    i = tl.arange(0, CHUNK)
    row, column = i[:, None], i[None, :]
    live = i < count
    key_head = head // (VALUE_HEADS // HEADS)
    # One 64-bit address per tensor; what is added to it inside a chunk fits 32 bits.
    q += start * stride_q + key_head * K
    k += start * stride_k + key_head * K
    reads += place * CHUNK * CHUNK
    r_q, r_k = tl.full([CHUNK], 1.0, tl.float32), tl.full([CHUNK], 1.0, tl.float32)
    if NORM:
        r_q, r_k = rsqrt_of_squares(q, stride_q, live, K, BK), rsqrt_of_squares(k, stride_k, live, K, BK)
    rows += place * 3 * CHUNK + i
    tl.store(rows + CHUNK, r_q)
    tl.store(rows + 2 * CHUNK, r_k)
    r_q *= scale
    strength = tl.load(beta + start * stride_beta + head + i * stride_beta, mask=live, other=0.0).to(tl.float32)
    if LOGIT:
        strength = tl.where(live, tl.sigmoid(strength), 0.0)
    tl.store(rows, strength)
    total += place * CHUNK * KP
    q_down += place * CHUNK * KP
    k_down += place * CHUNK * KP
    k_up += place * CHUNK * KP
    p, a = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
    square = row * CHUNK + column
    for block in range(KP // BK):
        c = block * BK + tl.arange(0, BK)
        mask = live[:, None] & (c < K)[None, :]
        x_k = tl.load(k + row * stride_k + c[None, :], mask=mask, other=0.0).to(tl.float32) * r_k[:, None]
        x_q = tl.load(q + row * stride_q + c[None, :], mask=mask, other=0.0).to(tl.float32) * r_q[:, None]
        here, last = tl.load(total + (row * KP + c[None, :])), tl.load(total + (CHUNK - 1) * KP + c)
        out = row * KP + c[None, :]
        tl.store(keep + place * KP + c, tl.exp2(last.to(tl.float32)))
        weight = tl.exp2(here.to(tl.float32))
        tl.store(q_down + out, (x_q * weight).to(DT))
        tl.store(k_down + out, (x_k * weight).to(DT))
        weight = tl.exp2((last[None, :] - here).to(tl.float32))
        tl.store(k_up + out, (x_k * weight).to(DT))
        p += tl.where(row == column, tl.sum(x_q * x_k, 1)[:, None], 0.0)
        offset = from_pivot(total, MIDDLE, c, KP)
        safe = tl.max(tl.abs(offset)) <= SAFE
        if safe:
            columns, inside = tl.trans((x_k * tl.exp2(-offset)).to(DT)), belongs(i, MIDDLE)
            weight = tl.exp2(offset)
            p += tl.where(inside, dot(x_q * weight, columns, DT), 0.0)
            a += tl.where(inside, dot(x_k * weight, columns, DT), 0.0)
        for level in range(tl.where(safe, 5, 0), 6):
            weight = tl.exp2(-tl.abs(from_pivot(total, level, c, KP)))
            lower = (x_k * weight).to(DT)
            columns, inside = tl.trans(lower), belongs(i, level)
            p += tl.where(inside, dot(x_q * weight, columns, DT), 0.0)
            a += tl.where(inside, dot(lower, columns, DT), 0.0)
    tl.store(reads + square, p.to(DT))
    tl.store(overlaps + place * CHUNK * CHUNK + square, a.to(overlaps.dtype.element_ty))


@triton.jit(do_not_specialize=["tokens", "chunks"])
def prepare_scalar(
    q, k, g, beta, a_log, bias, bounds, keep, reads, overlaps, rows,
    tokens, chunks, stride_q, stride_k, stride_g, stride_beta, scale,
    HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BK: tl.constexpr,
    GATE: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, LOGIT: tl.constexpr, ERASE: tl.constexpr,
    PACKED: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """One chunk of one value head with one gate per head (GATE 0: none). Decay and norms are factors of whole rows, which
    the scan applies: `rows` [slots,HV,6,64] gets beta, the factors of q_down, k_down and k_up, and those of q and k alone."""
    head, slot = tl.program_id(0), tl.program_id(1)
    start, count = chunk_of(slot, bounds, tokens, chunks, PACKED)
    place = slot.to(tl.int64) * VALUE_HEADS + head
    i = tl.arange(0, CHUNK)
    row, column = i[:, None], i[None, :]
    live = i < count
    key_head = head // (VALUE_HEADS // HEADS)
    # One 64-bit address per tensor; what is added to it inside a chunk fits 32 bits.
    q += start * stride_q + key_head * K
    k += start * stride_k + key_head * K
    reads += place * CHUNK * CHUNK
    c = tl.arange(0, BK)
    p, a = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
    square_q, square_k = tl.zeros([CHUNK], tl.float32), tl.zeros([CHUNK], tl.float32)
    for block in range(KP // BK):
        mask = live[:, None] & (block * BK + c < K)[None, :]
        x_k = tl.load(k + row * stride_k + (block * BK + c)[None, :], mask=mask, other=0.0)
        x_q = tl.load(q + row * stride_q + (block * BK + c)[None, :], mask=mask, other=0.0)
        if NORM:
            wide_q, wide_k = x_q.to(tl.float32), x_k.to(tl.float32)
            square_q += tl.sum(wide_q * wide_q, 1)
            square_k += tl.sum(wide_k * wide_k, 1)
        columns = tl.trans(x_k)
        p += dot(x_q, columns, DT)
        if ERASE:
            a += dot(x_k, columns, DT)
    r_q, r_k = tl.full([CHUNK], 1.0, tl.float32), tl.full([CHUNK], 1.0, tl.float32)
    if NORM:
        r_q, r_k = tl.rsqrt(square_q + 1e-6), tl.rsqrt(square_k + 1e-6)
    out = rows + place * 6 * CHUNK + i
    tl.store(out + 4 * CHUNK, r_q)
    tl.store(out + 5 * CHUNK, r_k)
    r_q *= scale
    p = p * r_q[:, None] * r_k[None, :]
    a = a * r_k[:, None] * r_k[None, :]
    down, up = tl.full([CHUNK], 1.0, tl.float32), tl.full([CHUNK], 1.0, tl.float32)
    if GATE > 0:
        raw = tl.load(g + start * stride_g + head + i * stride_g, mask=live, other=0.0).to(tl.float32)
        rate = 1.0
        if GATE > 1:
            rate = tl.exp(tl.load(a_log + head).to(tl.float32))
        if BIAS:
            raw += tl.load(bias + head).to(tl.float32)
        decay = tl.where(live, log_decay(raw, rate, 0.0, GATE), 0.0)
        # Every pair sums its own span, over the rows t with j < t <= i.
        weight = tl.exp2(sums(ones(row >= column), tl.where(row > column, decay[:, None], 0.0), DT))
        p, a = p * weight, a * weight
        down = tl.exp2(tl.sum(tl.where(row >= column, decay[None, :], 0.0), 1))
        up = tl.exp2(tl.sum(tl.where(row < column, decay[None, :], 0.0), 1))
        tl.store(keep + place, tl.exp2(tl.sum(decay, 0)))
    square = row * CHUNK + column
    tl.store(reads + square, tl.where(row >= column, p, 0.0).to(DT))
    tl.store(out + CHUNK, r_q * down)
    tl.store(out + 3 * CHUNK, r_k * up)
    if ERASE:
        strength = tl.load(beta + start * stride_beta + head + i * stride_beta, mask=live, other=0.0).to(tl.float32)
        if LOGIT:
            strength = tl.where(live, tl.sigmoid(strength), 0.0)
        tl.store(out, strength)
        tl.store(out + 2 * CHUNK, r_k * down)
        tl.store(overlaps + place * CHUNK * CHUNK + square, tl.where(row > column, a, 0.0).to(overlaps.dtype.element_ty))
