"""Gradients of the whole family. Nothing is kept but the inputs: `prepare` and `scan` run again, and leave the state S that
enters each chunk and U. Then, with D the gradient of the state that leaves a chunk,

    scan_back, chunks in reverse:   X' = P^T o' + k_up D    Y = X' - Z^T (beta X')    v' = beta Y
                                    D <- exp(G_last) D + q_down^T o' - k_down^T v'
    pairs_back, all at once:        P' = o' X^T    A' = -v' X^T  (both lower)    beta' = sum U Y
    chunk_back, all at once:        q_down' = o' S^T    k_down' = -v' S^T    k_up' = X D^T, and from these and P', A' back
                                    through decays, gate and norms

A prime is a gradient. Without erasing X is v, Y its gradient, and A, Z, U, beta are absent.
"""

from __future__ import annotations

import triton
import triton.language as tl

from palimpsest.ops.triton.gates import (
    AFTER,
    CHUNK,
    FROM_MIDDLE,
    LN2,
    TO_HALF,
    UP_TO,
    chunk_of,
    corner,
    dot,
    dot_add,
    log_decay,
    ones,
    sums,
    table_sums,
    toward,
)
from palimpsest.ops.triton.prepare import SAFE, TILE, rsqrt_of_squares


@triton.jit(do_not_specialize=["tokens", "chunks"])
def scan_back(
    q, k, k_up, keep, reads, solved, rows, d_o, d_final, d_initial, leaving, adjoint, bounds, firsts,
    tokens, chunks, stride_q, stride_k,
    HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    VECTOR: tl.constexpr, GATED: tl.constexpr, ERASE: tl.constexpr, PACKED: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """One sequence, one value head, BV value channels, from its last chunk to its first: stores D of every chunk in `leaving`
    [slots,HV,K,V] and Y in `adjoint` [slots,HV,64,V]."""
    at_v, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i, c, n = tl.arange(0, CHUNK), tl.arange(0, KP), at_v * BV + tl.arange(0, BV)
    key_head = head // (VALUE_HEADS // HEADS)
    inside = (c < K)[:, None] & (n < V)[None, :]
    whole = (sequence.to(tl.int64) * VALUE_HEADS + head) * K * V
    cell = c[:, None] * V + n[None, :]
    state = tl.load(d_final + whole + cell, mask=inside, other=0.0)
    if PACKED:
        first = tl.load(firsts + sequence)
        last = tl.load(firsts + sequence + 1)
    else:
        first = sequence * chunks
        last = first + chunks
    square = i[:, None] * CHUNK + i[None, :]
    tile = i[:, None] * KP + c[None, :]
    for step in range(last - first):
        slot = last - 1 - step
        start, count = chunk_of(slot, bounds, tokens, chunks, PACKED)
        place = slot.to(tl.int64) * VALUE_HEADS + head
        live = (i < count)[:, None]
        seen = live & (n < V)[None, :]
        # As in `scan`: first everything is asked for, and products start before their neighbours are looked at.
        out = d_o + (start * VALUE_HEADS + head) * V + (i[:, None] * (VALUE_HEADS * V) + n[None, :])
        d_out = tl.load(out, mask=seen, other=0.0)
        if VECTOR:
            rest = tl.load(keep + place * KP + c)[:, None]
            b_up = tl.load(k_up + place * CHUNK * KP + tile)
            b_q = tl.load(q + place * CHUNK * KP + tile)
        else:
            some = live & (c < K)[None, :]
            b_q = tl.load(q + (start * stride_q + key_head * K) + (i[:, None] * stride_q + c[None, :]), mask=some, other=0.0)
            b_up = tl.load(k + (start * stride_k + key_head * K) + (i[:, None] * stride_k + c[None, :]), mask=some, other=0.0)
            factors = rows + place * 4 * CHUNK + i
            read_by, write_by = tl.load(factors + CHUNK)[:, None], tl.load(factors + 3 * CHUNK)[:, None]
            if GATED:
                rest = tl.load(keep + place)
        b_reads = tl.load(reads + place * CHUNK * CHUNK + square)
        if ERASE:
            b_solved = tl.load(solved + place * CHUNK * CHUNK + square)
            if VECTOR:
                beta = tl.load(rows + place * CHUNK + i)[:, None]
                b_down = tl.load(k + place * CHUNK * KP + tile)
            else:
                beta, down_by = tl.load(factors)[:, None], tl.load(factors + 2 * CHUNK)[:, None]
                b_down = b_up
        tl.store(leaving + place * K * V + cell, state.to(leaving.dtype.element_ty), mask=inside)
        d_x = dot(b_up, state, DT)
        if GATED:
            state *= rest
        if VECTOR:
            state = dot_add(tl.trans(b_q), d_out, state, DT)
        else:
            d_x *= write_by
            state = dot_add(tl.trans(b_q), read_by * d_out.to(tl.float32), state, DT)
        d_x = dot_add(tl.trans(b_reads), d_out, d_x, DT)
        if ERASE:
            d_x -= dot(tl.trans(b_solved), beta * d_x, DT)
            back = -beta * d_x
            if not VECTOR:
                back *= down_by
            state = dot_add(tl.trans(b_down), back, state, DT)
        there = adjoint + place * CHUNK * V + (i[:, None] * V + n[None, :])
        tl.store(there, d_x.to(adjoint.dtype.element_ty), mask=(n < V)[None, :])
    tl.store(d_initial + whole + cell, state, mask=inside)


@triton.jit(do_not_specialize=["tokens", "chunks"])
def pairs_back(
    v, d_o, updates, adjoint, rows, d_v, d_beta, d_reads, d_overlaps, bounds,
    tokens, chunks, stride_v,
    VALUE_HEADS: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, COLUMNS: tl.constexpr, LOGIT: tl.constexpr,
    ERASE: tl.constexpr, PACKED: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """One chunk of one value head: gradients of v and beta, of P [slots,HV,64,64] and of A."""
    head, slot = tl.program_id(0), tl.program_id(1)
    start, count = chunk_of(slot, bounds, tokens, chunks, PACKED)
    place = slot.to(tl.int64) * VALUE_HEADS + head
    i = tl.arange(0, CHUNK)
    live = i < count
    d_p, d_a = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
    d_strength = tl.zeros([CHUNK], tl.float32)
    if ERASE:
        beta = tl.load(rows + place * COLUMNS + i)[:, None]
    for block in range((V + BV - 1) // BV):
        n = block * BV + tl.arange(0, BV)
        wide = (n < V)[None, :]
        seen = live[:, None] & wide
        out = (start * VALUE_HEADS + head) * V + (i[:, None] * (VALUE_HEADS * V) + n[None, :])
        d_out = tl.load(d_o + out, mask=seen, other=0.0)
        held = place * CHUNK * V + (i[:, None] * V + n[None, :])
        y = tl.load(adjoint + held, mask=wide, other=0.0).to(tl.float32)
        if ERASE:
            u = tl.load(updates + held, mask=wide, other=0.0).to(tl.float32)
            d_strength += tl.sum(u * y, 1)
            y *= beta
            columns = tl.trans((u * beta).to(DT))
            d_a -= dot(y, columns, DT)
        else:
            x = tl.load(v + (start * stride_v + head * V) + (i[:, None] * stride_v + n[None, :]), mask=seen, other=0.0)
            columns = tl.trans(x.to(DT))
        tl.store(d_v + out, y.to(d_v.dtype.element_ty), mask=seen)
        d_p += dot(d_out, columns, DT)
    row, column = i[:, None], i[None, :]
    square = place * CHUNK * CHUNK + (row * CHUNK + column)
    tl.store(d_reads + square, tl.where(row >= column, d_p, 0.0).to(DT))
    if ERASE:
        tl.store(d_overlaps + square, tl.where(row > column, d_a, 0.0).to(DT))
        if LOGIT:
            strength = tl.load(rows + place * COLUMNS + i)
            d_strength *= strength * (1 - strength)
        out = start * VALUE_HEADS + head + i * VALUE_HEADS
        tl.store(d_beta + out, d_strength.to(d_beta.dtype.element_ty), mask=live)


@triton.jit
def pull(d_p, d_a, d_q, d_row, d_column, q, k, up, down, ERASE: tl.constexpr, DT: tl.constexpr):
    """Adds what masked P' and A' give to q, to k as a row and to k as a column, where row factors are `up`, column factors
    `down`. q, k [64,K]."""
    columns, queries = (k * down).to(DT), (q * up).to(DT)
    d_q += up * dot(d_p, columns, DT)
    back = dot(tl.trans(d_p.to(DT)), queries, DT)
    if ERASE:
        d_row += up * dot(d_a, columns, DT)
        back = dot_add(tl.trans(d_a.to(DT)), k * up, back, DT)
    return d_q, d_row, d_column + down * back


@triton.jit(do_not_specialize=["tokens", "chunks"])
def chunk_back(
    q, k, v, g, a_log, bias, d_o, updates, adjoint, entering, leaving, rows, d_reads, d_overlaps,
    d_q, d_k, d_g, d_bias, d_rate, table, bounds,
    tokens, chunks, stride_q, stride_k, stride_v, stride_g, scale, lower_bound,
    HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BK: tl.constexpr,
    V: tl.constexpr, BV: tl.constexpr, GATE: tl.constexpr, VECTOR: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr,
    COLUMNS: tl.constexpr, ERASE: tl.constexpr, PACKED: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """One chunk of one value head: gradients of q, k and g, and this chunk's part of those of the gate's bias and rate.

    A scalar gate is worked on as a vector gate with equal channels.
    """
    head, slot = tl.program_id(0), tl.program_id(1)
    start, count = chunk_of(slot, bounds, tokens, chunks, PACKED)
    place = slot.to(tl.int64) * VALUE_HEADS + head
    i = tl.arange(0, CHUNK)
    row, column = i[:, None], i[None, :]
    live = i < count
    key_head = head // (VALUE_HEADS // HEADS)
    q += start * stride_q + key_head * K
    k += start * stride_k + key_head * K
    d_q += (start * VALUE_HEADS + head) * K
    d_k += (start * VALUE_HEADS + head) * K
    if ERASE:
        updates += place * CHUNK * V
    adjoint += place * CHUNK * V
    entering += place * K * V
    leaving += place * K * V
    d_o += (start * VALUE_HEADS + head) * V
    v += start * stride_v + head * V
    r_q, r_k = tl.full([CHUNK], 1.0, tl.float32), tl.full([CHUNK], 1.0, tl.float32)
    if NORM:
        r_q, r_k = rsqrt_of_squares(q, stride_q, live, K, BK), rsqrt_of_squares(k, stride_k, live, K, BK)
    rate = 1.0
    if GATE > 1:
        rate = tl.exp(tl.load(a_log + head).to(tl.float32))
    if GATE > 0:
        if VECTOR:
            g += start * stride_g + head * K
            d_g += (start * VALUE_HEADS + head) * K
        else:
            plain = tl.load(g + start * stride_g + head + i * stride_g, mask=live, other=0.0).to(tl.float32)
            if BIAS:
                plain += tl.load(bias + head).to(tl.float32)
    square = place * CHUNK * CHUNK + (row * CHUNK + column)
    along_q, along_k = tl.zeros([CHUNK], tl.float32), tl.zeros([CHUNK], tl.float32)
    d_plain, d_speed = tl.zeros([CHUNK], tl.float32), tl.zeros([CHUNK], tl.float32)
    for block in range(KP // BK):
        c = block * BK + tl.arange(0, BK)
        mask = live[:, None] & (c < K)[None, :]
        down_q, down_k, up_k, d_keep = states_back(
            v, d_o, updates, adjoint, entering, leaving, rows + place * COLUMNS, c, live, stride_v,
            VALUE_HEADS, K, V, BK, BV, GATE > 0, ERASE, DT,
        )  # fmt: skip
        x_q = tl.load(q + row * stride_q + c[None, :], mask=mask, other=0.0).to(tl.float32) * (r_q * scale)[:, None]
        x_k = tl.load(k + row * stride_k + c[None, :], mask=mask, other=0.0).to(tl.float32) * r_k[:, None]
        d_p = tl.load(d_reads + square)
        d_a = d_p
        if ERASE:
            d_a = tl.load(d_overlaps + square)
        if GATE == 0:
            one = tl.full([CHUNK, BK], 1.0, tl.float32)
            total_q, total_k, d_column = pull(d_p, d_a, down_q, down_k, up_k, x_q, x_k, one, one, ERASE, DT)
            total_k += d_column
        else:
            if VECTOR:
                raw = tl.load(g + row * stride_g + c[None, :], mask=mask, other=0.0).to(tl.float32)
                if BIAS:
                    raw += tl.load(bias + head * K + c, mask=c < K, other=0.0).to(tl.float32)[None, :]
                decay = log_decay(raw, rate, lower_bound, GATE)
            else:
                decay = log_decay(plain, rate, lower_bound, GATE)[:, None]
            decay = tl.where(mask, decay, 0.0)
            total_q, total_k, d_log = through_decay(
                table, d_p, d_a, down_q, down_k, up_k, d_keep, x_q, x_k, decay, BK, ERASE, DT
            )  # fmt: skip
            if VECTOR:
                d_raw, part = gate_back(raw, decay, d_log, rate, lower_bound, GATE)
                tl.store(d_g + row * (VALUE_HEADS * K) + c[None, :], d_raw.to(d_g.dtype.element_ty), mask=mask)
                if BIAS:
                    tl.store(d_bias + place * K + c, tl.sum(tl.where(mask, d_raw, 0.0), 0), mask=c < K)
                d_speed += tl.sum(tl.where(mask, part, 0.0), 1)
            else:
                d_plain += tl.sum(tl.where(mask, d_log, 0.0), 1)
        total_q *= scale * r_q[:, None]
        total_k *= r_k[:, None]
        out = row * (VALUE_HEADS * K) + c[None, :]
        tl.store(d_q + out, total_q.to(d_q.dtype.element_ty), mask=mask)
        tl.store(d_k + out, total_k.to(d_k.dtype.element_ty), mask=mask)
        if NORM:
            along_q += tl.sum(total_q * x_q, 1) / scale
            along_k += tl.sum(total_k * x_k, 1)
    if GATE > 0:
        if not VECTOR:
            d_raw, d_speed = gate_back(plain, log_decay(plain, rate, lower_bound, GATE), d_plain, rate, lower_bound, GATE)
            d_raw, d_speed = tl.where(live, d_raw, 0.0), tl.where(live, d_speed, 0.0)
            there = d_g + start * VALUE_HEADS + head + i * VALUE_HEADS
            tl.store(there, d_raw.to(d_g.dtype.element_ty), mask=live)
            if BIAS:
                tl.store(d_bias + place, tl.sum(d_raw, 0))
        if GATE > 1:
            tl.store(d_rate + place, tl.sum(d_speed, 0))
    if NORM:
        # What points along a normalised vector does nothing. The rows of all channels are summed now, and written by us.
        tl.debug_barrier()
        for block in range(KP // BK):
            c = block * BK + tl.arange(0, BK)
            mask = live[:, None] & (c < K)[None, :]
            out = row * (VALUE_HEADS * K) + c[None, :]
            x = tl.load(q + row * stride_q + c[None, :], mask=mask, other=0.0).to(tl.float32) * r_q[:, None]
            found = tl.load(d_q + out, mask=mask, other=0.0).to(tl.float32) - x * along_q[:, None]
            tl.store(d_q + out, found.to(d_q.dtype.element_ty), mask=mask)
            x = tl.load(k + row * stride_k + c[None, :], mask=mask, other=0.0).to(tl.float32) * r_k[:, None]
            found = tl.load(d_k + out, mask=mask, other=0.0).to(tl.float32) - x * along_k[:, None]
            tl.store(d_k + out, found.to(d_k.dtype.element_ty), mask=mask)


@triton.jit
def states_back(
    v, d_o, updates, adjoint, entering, leaving, rows, c, live, stride_v,
    VALUE_HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    GATED: tl.constexpr, ERASE: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """Gradients of channels c of q_down, k_down and k_up [64,BK], and of exp(G_last) [BK], from the states on both sides."""
    i = tl.arange(0, CHUNK)
    down_q, down_k = tl.zeros([CHUNK, BK], tl.float32), tl.zeros([CHUNK, BK], tl.float32)
    up_k, d_keep = tl.zeros([CHUNK, BK], tl.float32), tl.zeros([BK], tl.float32)
    if ERASE:
        beta = tl.load(rows + i)[:, None]
    for block in range((V + BV - 1) // BV):
        n = block * BV + tl.arange(0, BV)
        seen = live[:, None] & (n < V)[None, :]
        held = i[:, None] * V + n[None, :]
        cell = c[:, None] * V + n[None, :]
        inside = (c < K)[:, None] & (n < V)[None, :]
        before, after = tl.load(entering + cell, mask=inside, other=0.0), tl.load(leaving + cell, mask=inside, other=0.0)
        d_out = tl.load(d_o + i[:, None] * (VALUE_HEADS * V) + n[None, :], mask=seen, other=0.0)
        down_q = dot_add(d_out, tl.trans(before), down_q, DT)
        if ERASE:
            y = tl.load(adjoint + held, mask=seen, other=0.0).to(tl.float32) * beta
            down_k -= dot(y, tl.trans(before), DT)
            x = tl.load(updates + held, mask=seen, other=0.0).to(tl.float32) * beta
        else:
            x = tl.load(v + i[:, None] * stride_v + n[None, :], mask=seen, other=0.0).to(tl.float32)
        up_k = dot_add(x, tl.trans(after), up_k, DT)
        if GATED:
            d_keep += tl.sum(before.to(tl.float32) * after.to(tl.float32), 1)
    return down_q, down_k, up_k, d_keep


@triton.jit
def gate_back(raw, decay, d_log, rate, bound, GATE: tl.constexpr):
    """From the gradient of the log decay to that of the gate's input, and to this element's part of that of A_log."""
    d_raw, part = d_log, d_log
    if GATE == 2:
        d_raw = -rate * tl.sigmoid(raw) * d_log
        part = decay * LN2 * d_log
    if GATE == 3:
        open = tl.sigmoid(rate * raw)
        d_raw = bound * open * (1 - open) * rate * d_log
        part = raw * d_raw
    return d_raw, part


@triton.jit
def through_decay(
    table, d_p, d_a, down_q, down_k, up_k, d_keep, q, k, decay, BK: tl.constexpr, ERASE: tl.constexpr, DT: tl.constexpr
):  # fmt: skip
    """Gradients of q, of k and of the log decay, [64,BK].

    The gradient of an exponential's exponent is the term itself. Terms of rows up to the end of the chunk count for every row
    before them, those of k_up for every row after: two sums in two directions, as one difference would lose their digits.
    """
    i = tl.arange(0, CHUNK)
    row, column = i[:, None], i[None, :]
    # A row's own key does not decay: it must leave no rounding noise in the gradient of the decay.
    diagonal = tl.sum(tl.where(row == column, d_p, 0.0), 1)[:, None]
    strict = tl.where(row > column, d_p, 0.0)
    zero = tl.zeros([CHUNK, BK], tl.float32)
    d_q, d_row, d_column = zero, zero, zero
    same = row // TILE == column // TILE
    offset = table_sums(table, FROM_MIDDLE, decay, DT)
    if tl.max(tl.abs(offset)) <= SAFE:
        d_q, d_row, d_column = pull(
            tl.where(same, strict, 0.0), tl.where(same, d_a, 0.0), d_q, d_row, d_column, q, k,
            tl.exp2(offset), tl.exp2(-offset), ERASE, DT,
        )  # fmt: skip
    else:
        for level in range(5):
            weight = tl.exp2(sums(toward(row, column, level), decay, DT))
            chosen = corner(row, column, level)
            d_q, d_row, d_column = pull(
                tl.where(chosen, strict, 0.0), tl.where(chosen, d_a, 0.0), d_q, d_row, d_column, q, k, weight, weight, ERASE, DT
            )
    weight = tl.exp2(table_sums(table, TO_HALF, decay, DT))
    d_q, d_row, d_column = pull(
        tl.where(same, 0.0, strict), tl.where(same, 0.0, d_a), d_q, d_row, d_column, q, k, weight, weight, ERASE, DT
    )
    weight = tl.exp2(table_sums(table, UP_TO, decay, DT))
    d_q += down_q * weight
    d_row += down_k * weight
    rise = up_k * tl.exp2(table_sums(table, AFTER, decay, DT))
    flow = q * d_q + k * d_row - k * d_column
    d_log = sums(ones(row <= column), flow, DT) + sums(ones(row > column), k * rise, DT)
    d_log += (d_keep * tl.exp2(tl.sum(decay, 0)))[None, :]
    return d_q + diagonal * k, d_row + d_column + rise + diagonal * q, d_log
