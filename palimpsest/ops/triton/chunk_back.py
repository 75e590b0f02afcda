"""Gradients of the whole family, second half: q, k and the gate, all chunks at once, from what `backward` left of each.

With S the state that enters a chunk, D the gradient of the one that leaves it, and a prime for a gradient,

    q_down' = o' S^T    k_down' = -beta Y S^T    k_up' = X D^T    exp(G_last)' = sum over value channels of S D

and these with P' and A' go back through decays, gate and norms. A vector gate has its products with states in a kernel of their
own, which works at the speed of memory; what they are multiplied by afterwards would leave it no registers for that. The
gradient of an exponential's exponent is the term itself, so the gate's gradient is sums of x x' over rows. q is meant before
its scale, which is in P' and q_down'.
"""

from __future__ import annotations

import triton
import triton.language as tl

from palimpsest.ops.triton.gates import (
    CHUNK,
    LN2,
    MIDDLE,
    SAFE,
    belongs,
    chunk_of,
    dot,
    dot_add,
    from_pivot,
    log_decay,
    sums,
)


@triton.jit
def through_states(
    d_o, x, adjoint, entering, leaving, live, c, stride_x,
    VALUE_HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    GATED: tl.constexpr, ERASE: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """o' S^T, Y S^T and x D^T of channels c of one chunk, [64,BK] each, and the sums of S D over value channels [BK]."""
    i = tl.arange(0, CHUNK)[:, None]
    read, erased, written = (
        tl.zeros([CHUNK, BK], tl.float32),
        tl.zeros([CHUNK, BK], tl.float32),
        tl.zeros([CHUNK, BK], tl.float32),
    )
    kept = tl.zeros([BK], tl.float32)
    for at in range(0, V, BV):
        n = (at + tl.arange(0, BV))[None, :]
        wide = live[:, None] & (n < V)
        cell, inside = c[:, None] * V + n, (c < K)[:, None] & (n < V)
        before, after = tl.load(entering + cell, mask=inside, other=0.0), tl.load(leaving + cell, mask=inside, other=0.0)
        d_out = tl.load(d_o + (i * (VALUE_HEADS * V) + n), mask=wide, other=0.0)
        new = tl.load(x + (i * stride_x + n), mask=wide, other=0.0)
        read = dot_add(d_out, tl.trans(before), read, DT)
        if ERASE:
            erased = dot_add(tl.load(adjoint + (i * V + n), mask=wide, other=0.0), tl.trans(before), erased, DT)
        written = dot_add(new, tl.trans(after), written, DT)
        if GATED:
            kept += tl.sum(before.to(tl.float32) * after.to(tl.float32), 1)
    return read, erased, written, kept


@triton.jit(do_not_specialize=["tokens", "chunks"])
def states_back(
    d_o, updates, adjoint, entering, leaving, rows, q_down, k_down, k_up, keep, bounds,
    tokens, chunks, scale,
    VALUE_HEADS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    PACKED: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """BK key channels of one chunk of one value head, vector gate: gradients of q_down, k_down and k_up in their place, and
    in that of keep = exp(G_last) the part of G_last's gradient that comes through it."""
    block, head, slot = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, count = chunk_of(slot, bounds, tokens, chunks, PACKED)
    place = slot.to(tl.int64) * VALUE_HEADS + head
    i, c = tl.arange(0, CHUNK), block * BK + tl.arange(0, BK)
    beta = tl.load(rows + place * 3 * CHUNK + i)[:, None]
    held = place * CHUNK * V
    state = place * K * V
    read, erased, written, kept = through_states(
        d_o + (start * VALUE_HEADS + head) * V, updates + held, adjoint + held, entering + state, leaving + state,
        i < count, c, V, VALUE_HEADS, K, V, BK, BV, True, True, DT,
    )  # fmt: skip
    out = place * CHUNK * KP + (i[:, None] * KP + c[None, :])
    tl.store(q_down + out, (scale * read).to(DT))
    tl.store(k_down + out, (-beta * erased).to(DT))
    tl.store(k_up + out, (beta * written).to(DT))
    keep += place * KP + c
    tl.store(keep, kept * tl.load(keep))


@triton.jit
def pull(d_p, d_a, d_q, d_row, d_column, q, k, up, down, DT: tl.constexpr):
    """Adds what masked P' and A' give to q, to k as a row and to k as a column, where row factors are `up`, column factors
    `down`. q, k [64,BK]."""
    columns, queries = (k * down).to(DT), (q * up).to(DT)
    back = dot(tl.trans(d_p), queries, DT)
    d_q += up * dot(d_p, columns, DT)
    back = dot_add(tl.trans(d_a), k * up, back, DT)
    d_row += up * dot(d_a, columns, DT)
    return d_q, d_row, d_column + down * back


@triton.jit(do_not_specialize=["tokens", "chunks"])
def chunk_back_vector(
    q, k, g, a_log, bias, total, q_down, k_down, k_up, keep, rows, d_reads, d_overlaps, along,
    d_q, d_k, d_g, d_bias, d_rate, table, bounds,
    tokens, chunks, stride_q, stride_k, stride_g, lower_bound,
    HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BK: tl.constexpr, SPAN: tl.constexpr,
    GATE: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, MILD: tl.constexpr, PACKED: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """SPAN key channels of one chunk and value head, BK at a time: gradients of q, k and g, and this chunk's part of those of
    the gate's bias and rate. `total` as `gates.running_sums` leaves it, q_down and its like as `states_back` does."""
    block, head, slot = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, count = chunk_of(slot, bounds, tokens, chunks, PACKED)
    place = slot.to(tl.int64) * VALUE_HEADS + head
    i = tl.arange(0, CHUNK)
    row, column = i[:, None], i[None, :]
    key_head = head // (VALUE_HEADS // HEADS)
    # One 64-bit address per tensor; what is added to it inside a chunk fits 32 bits.
    q += start * stride_q + key_head * K
    k += start * stride_k + key_head * K
    g += start * stride_g + head * K
    d_q += (start * VALUE_HEADS + head) * K
    d_k += (start * VALUE_HEADS + head) * K
    d_g += (start * VALUE_HEADS + head) * K
    q_down += place * CHUNK * KP
    k_down += place * CHUNK * KP
    k_up += place * CHUNK * KP
    total += place * CHUNK * KP
    keep += place * KP
    rows += place * 3 * CHUNK
    r_q, r_k = tl.load(rows + CHUNK + i)[:, None], tl.load(rows + 2 * CHUNK + i)[:, None]
    if NORM:
        along += place * 3 * CHUNK
        along_q, along_k = tl.load(along + i)[:, None], tl.load(along + CHUNK + i)[:, None]
    square = row * CHUNK + column
    d_p, d_a = tl.load(d_reads + place * CHUNK * CHUNK + square), tl.load(d_overlaps + place * CHUNK * CHUNK + square)
    # A row's own key does not decay: it must leave no rounding noise in the gradient of the decay.
    diagonal = tl.sum(tl.where(row == column, d_p, 0.0).to(tl.float32), 1)[:, None]
    near_p, near_a = tl.where(belongs(i, MIDDLE), d_p, 0.0).to(DT), tl.where(belongs(i, MIDDLE), d_a, 0.0).to(DT)
    from_here, before = tl.load(table + square), tl.load(table + CHUNK * CHUNK + square)
    rate, of_rate = 1.0, tl.zeros([CHUNK, BK], tl.float32)
    if GATE > 1:
        rate = tl.exp(tl.load(a_log + head).to(tl.float32))
    for first in range(0, SPAN, BK):
        c = block * SPAN + first + tl.arange(0, BK)
        mask = (i < count)[:, None] & (c < K)[None, :]
        x_q = tl.load(q + (row * stride_q + c[None, :]), mask=mask, other=0.0).to(tl.float32) * r_q
        x_k = tl.load(k + (row * stride_k + c[None, :]), mask=mask, other=0.0).to(tl.float32) * r_k
        held = row * KP + c[None, :]
        here = tl.load(total + held)
        weight = tl.exp2(here.to(tl.float32))
        total_q, total_k = weight * tl.load(q_down + held), weight * tl.load(k_down + held)
        d_column = tl.zeros([CHUNK, BK], tl.float32)
        offset = (here - pivots(total, c, KP)).to(tl.float32)
        if MILD:
            up, down = tl.exp2(offset), tl.exp2(-offset)
            total_q, total_k, d_column = pull(near_p, near_a, total_q, total_k, d_column, x_q, x_k, up, down, DT)
            weight = tl.exp2(-tl.abs((here - tl.load(total + 31 * KP + c)[None, :]).to(tl.float32)))
            up, down = tl.where(row < 32, 0.0, weight), tl.where(row < 32, weight, 0.0)
            total_q, total_k, d_column = pull(d_p, d_a, total_q, total_k, d_column, x_q, x_k, up, down, DT)
        else:
            safe = tl.max(tl.abs(offset)) <= SAFE
            if safe:
                up, down = tl.exp2(offset), tl.exp2(-offset)
                total_q, total_k, d_column = pull(near_p, near_a, total_q, total_k, d_column, x_q, x_k, up, down, DT)
            for level in range(tl.where(safe, 5, 0), 6):
                p, a = tl.where(belongs(i, level), d_p, 0.0).to(DT), tl.where(belongs(i, level), d_a, 0.0).to(DT)
                up = tl.exp2(-tl.abs(from_pivot(total, level, c, KP)))
                total_q, total_k, d_column = pull(p, a, total_q, total_k, d_column, x_q, x_k, up, up, DT)
        # Terms up to the end of the chunk count for every row before theirs, those of k_up for every row after: as one
        # difference the two sums would lose their digits.
        d_log = sums(from_here, x_q * total_q + x_k * (total_k - d_column), DT)
        rise = tl.load(k_up + held) * tl.exp2((tl.load(total + (CHUNK - 1) * KP + c)[None, :] - here).to(tl.float32))
        d_log += sums(before, x_k * rise, DT) + tl.load(keep + c)[None, :]
        d_log = tl.where(mask, d_log, 0.0)
        total_q += diagonal * x_k
        total_k += d_column + rise + diagonal * x_q
        if NORM:
            total_q -= x_q * along_q
            total_k -= x_k * along_k
        out = row * (VALUE_HEADS * K) + c[None, :]
        tl.store(d_q + out, (total_q * r_q).to(d_q.dtype.element_ty), mask=mask)
        tl.store(d_k + out, (total_k * r_k).to(d_k.dtype.element_ty), mask=mask)
        raw = tl.load(g + (row * stride_g + c[None, :]), mask=mask, other=0.0).to(tl.float32)
        if BIAS:
            raw += tl.load(bias + head * K + c, mask=c < K, other=0.0).to(tl.float32)[None, :]
        d_raw, part = gate_back(raw, d_log, rate, lower_bound, GATE)
        tl.store(d_g + out, d_raw.to(d_g.dtype.element_ty), mask=mask)
        if BIAS:
            tl.store(d_bias + place * K + c, tl.sum(d_raw, 0), mask=c < K)
        if GATE > 1:
            of_rate += part
    if GATE > 1:
        tl.store(d_rate + place * (KP // SPAN) + block, tl.sum(tl.sum(of_rate, 1), 0))


@triton.jit
def pivots(total, c, WIDTH: tl.constexpr):
    """G at the middle rows of blocks of 32, of every row's block: [64,BK]."""
    first, second = tl.load(total + 16 * WIDTH + c), tl.load(total + 48 * WIDTH + c)
    return tl.where(tl.arange(0, CHUNK)[:, None] < 32, first[None, :], second[None, :])


@triton.jit(do_not_specialize=["tokens", "chunks"])
def chunk_back_scalar(
    q, k, v, total, d_o, updates, adjoint, entering, leaving, rows, d_reads, d_overlaps, along, d_q, d_k, d_g, bounds,
    tokens, chunks, all_tokens, stride_q, stride_k, stride_v, scale,
    HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BK: tl.constexpr,
    V: tl.constexpr, BV: tl.constexpr, GATED: tl.constexpr, NORM: tl.constexpr, ERASE: tl.constexpr, PACKED: tl.constexpr,
    DT: tl.constexpr,
):  # fmt: skip
    """BK key channels of one chunk and value head with one gate per head, or none: gradients of q and k, and of the log decay
    one part [all_tokens,HV] for every block of channels. Decays and norms are factors of rows and of pairs."""
    block, head, slot = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, count = chunk_of(slot, bounds, tokens, chunks, PACKED)
    place = slot.to(tl.int64) * VALUE_HEADS + head
    i, c = tl.arange(0, CHUNK), block * BK + tl.arange(0, BK)
    row, column = i[:, None], i[None, :]
    live = i < count
    mask = live[:, None] & (c < K)[None, :]
    key_head = head // (VALUE_HEADS // HEADS)
    rows += place * 6 * CHUNK + i
    x, stride_x = v + start * stride_v + head * V, stride_v
    if ERASE:
        x, stride_x = updates + place * CHUNK * V, V
        adjoint += place * CHUNK * V
    state = place * K * V
    total_q, total_k, rise, kept = through_states(
        d_o + (start * VALUE_HEADS + head) * V, x, adjoint, entering + state, leaving + state,
        live, c, stride_x, VALUE_HEADS, K, V, BK, BV, GATED, ERASE, DT,
    )  # fmt: skip
    r_q, r_k = tl.load(rows + 4 * CHUNK), tl.load(rows + 5 * CHUNK)
    x_q = tl.load(q + (start * stride_q + key_head * K) + (row * stride_q + c[None, :]), mask=mask, other=0.0)
    x_k = tl.load(k + (start * stride_k + key_head * K) + (row * stride_k + c[None, :]), mask=mask, other=0.0)
    square = place * CHUNK * CHUNK + (row * CHUNK + column)
    p = tl.load(d_reads + square).to(tl.float32)
    a = p
    if ERASE:
        a = tl.load(d_overlaps + square).to(tl.float32)
        beta = tl.load(rows)[:, None]
        total_k *= -beta
        rise *= beta
    total_q *= scale
    if GATED:
        total += place * CHUNK
        here, last = tl.load(total + i), tl.load(total + CHUNK - 1)
        down = tl.exp2(here.to(tl.float32))
        total_q *= down[:, None]
        total_k *= down[:, None]
        rise *= tl.exp2((last - here).to(tl.float32))[:, None]
        d_from = tl.sum(x_q.to(tl.float32) * total_q, 1) * r_q
        if block == 0:
            d_from += tl.load(along + place * 3 * CHUNK + 2 * CHUNK + i)
        if ERASE:
            d_from += tl.sum(x_k.to(tl.float32) * total_k, 1) * r_k
        d_before = tl.sum(x_k.to(tl.float32) * rise, 1) * r_k
        d_log = tl.sum(tl.where(row >= column, d_from[:, None], d_before[:, None]), 0)
        d_log += tl.sum(kept, 0) * tl.exp2(last.to(tl.float32))
        out = (block.to(tl.int64) * all_tokens + start) * VALUE_HEADS + head + i * VALUE_HEADS
        tl.store(d_g + out, d_log, mask=live)
    total_q = dot_add(p * r_k[None, :], x_k, total_q, DT)
    rise = dot_add(tl.trans((p * r_q[:, None]).to(DT)), x_q, rise, DT)
    if ERASE:
        total_k = dot_add(a * r_k[None, :], x_k, total_k, DT)
        rise = dot_add(tl.trans((a * r_k[:, None]).to(DT)), x_k, rise, DT)
    total_k += rise
    if NORM:
        along += place * 3 * CHUNK + i
        total_q -= x_q.to(tl.float32) * (r_q * tl.load(along))[:, None]
        total_k -= x_k.to(tl.float32) * (r_k * tl.load(along + CHUNK))[:, None]
    out = (start * VALUE_HEADS + head) * K + (row * (VALUE_HEADS * K) + c[None, :])
    tl.store(d_q + out, (total_q * r_q[:, None]).to(d_q.dtype.element_ty), mask=mask)
    tl.store(d_k + out, (total_k * r_k[:, None]).to(d_k.dtype.element_ty), mask=mask)


@triton.jit
def gate_back(raw, d_log, rate, bound, GATE: tl.constexpr):
    """From the gradient of the log decay to that of the gate's input, and to this element's part of that of A_log."""
    d_raw, part = d_log, d_log
    if GATE == 2:
        d_raw = -rate * tl.sigmoid(raw) * d_log
        part = log_decay(raw, rate, bound, GATE) * LN2 * d_log
    if GATE == 3:
        open = tl.sigmoid(rate * raw)
        d_raw = bound * open * (1 - open) * rate * d_log
        part = raw * d_raw
    return d_raw, part
