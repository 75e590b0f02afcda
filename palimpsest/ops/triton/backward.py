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
    BEFORE,
    CHUNK,
    FROM_HERE,
    LN2,
    MIDDLE,
    SAFE,
    belongs,
    chunk_of,
    dot,
    dot_add,
    from_pivot,
    log_decay,
    table_sums,
)


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
            rest = tl.load(keep + place * KP + c)
            b_up = tl.load(k_up + place * CHUNK * KP + tile)
            b_q = tl.load(q + place * CHUNK * KP + tile)
        else:
            some = live & (c < K)[None, :]
            b_q = tl.load(q + (start * stride_q + key_head * K) + (i[:, None] * stride_q + c[None, :]), mask=some, other=0.0)
            b_up = tl.load(k + (start * stride_k + key_head * K) + (i[:, None] * stride_k + c[None, :]), mask=some, other=0.0)
            factors = rows + place * 6 * CHUNK + i
            read_by, write_by = tl.load(factors + CHUNK)[:, None], tl.load(factors + 3 * CHUNK)[:, None]
            if GATED:
                rest = tl.load(keep + place)
        b_reads = tl.load(reads + place * CHUNK * CHUNK + square)
        if ERASE:
            b_solved = tl.load(solved + place * CHUNK * CHUNK + square)
            if VECTOR:
                beta = tl.load(rows + place * 3 * CHUNK + i)[:, None]
                b_down = tl.load(k + place * CHUNK * KP + tile)
            else:
                beta, down_by = tl.load(factors)[:, None], tl.load(factors + 2 * CHUNK)[:, None]
                b_down = b_up
        tl.store(leaving + place * K * V + cell, state.to(leaving.dtype.element_ty), mask=inside)
        d_x = dot(b_up, state, DT)
        if VECTOR:
            state *= rest[:, None]
        elif GATED:
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
    v, o, d_o, updates, adjoint, rows, d_v, d_beta, d_reads, d_overlaps, along, bounds,
    tokens, chunks, stride_v,
    VALUE_HEADS: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, COLUMNS: tl.constexpr, LOGIT: tl.constexpr,
    NORM: tl.constexpr, ERASE: tl.constexpr, PACKED: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """One chunk of one value head: gradients of v and beta, of P [slots,HV,64,64] and of A.

    NORM: `along` [slots,HV,2,64] gets <q, q'> = <o, o'> and <k, k'> = beta <Y, 2 U - v> of every row: a normalised vector's
    gradient loses its part along the vector. (Scaling k_i acts in P, A, k_down and k_up; written out, all but this cancels.)
    """
    head, slot = tl.program_id(0), tl.program_id(1)
    start, count = chunk_of(slot, bounds, tokens, chunks, PACKED)
    place = slot.to(tl.int64) * VALUE_HEADS + head
    i = tl.arange(0, CHUNK)
    live = i < count
    d_p, d_a = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
    d_strength, along_q, along_k = (
        tl.zeros([CHUNK], tl.float32),
        tl.zeros([CHUNK], tl.float32),
        tl.zeros([CHUNK], tl.float32),
    )
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
        x = tl.load(v + (start * stride_v + head * V) + (i[:, None] * stride_v + n[None, :]), mask=seen, other=0.0)
        if NORM:
            along_q += tl.sum(tl.load(o + out, mask=seen, other=0.0).to(tl.float32) * d_out.to(tl.float32), 1)
        if ERASE:
            u = tl.load(updates + held, mask=wide, other=0.0).to(tl.float32)
            d_strength += tl.sum(u * y, 1)
            y *= beta
            along_k += tl.sum(y * (2 * u - x.to(tl.float32)), 1)
            columns = tl.trans((u * beta).to(DT))
            d_a -= dot(y, columns, DT)
        else:
            along_k += tl.sum(y * x.to(tl.float32), 1)
            columns = tl.trans(x.to(DT))
        tl.store(d_v + out, y.to(d_v.dtype.element_ty), mask=seen)
        d_p += dot(d_out, columns, DT)
    if NORM:
        tl.store(along + place * 2 * CHUNK + i, along_q)
        tl.store(along + place * 2 * CHUNK + CHUNK + i, along_k)
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
    q, k, v, g, a_log, bias, total, d_o, updates, adjoint, entering, leaving, rows, d_reads, d_overlaps, along,
    d_q, d_k, d_g, d_bias, d_rate, table, bounds,
    tokens, chunks, all_tokens, stride_q, stride_k, stride_v, stride_g, scale, lower_bound,
    HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BK: tl.constexpr,
    V: tl.constexpr, BV: tl.constexpr, GATE: tl.constexpr, VECTOR: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr,
    COLUMNS: tl.constexpr, ERASE: tl.constexpr, PACKED: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """BK key channels of one chunk of one value head: gradients of q, k and g, and this chunk's part of those of the gate's
    bias and rate.

    `total` as `gates.running_sums` leaves it. A scalar gate is worked on as a vector gate with equal channels; its g comes back
    as the gradient of the log decay, one part [all_tokens,HV] for every block of channels.
    """
    head, slot, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, count = chunk_of(slot, bounds, tokens, chunks, PACKED)
    place = slot.to(tl.int64) * VALUE_HEADS + head
    i, c = tl.arange(0, CHUNK), block * BK + tl.arange(0, BK)
    row, column = i[:, None], i[None, :]
    live = i < count
    mask = live[:, None] & (c < K)[None, :]
    key_head = head // (VALUE_HEADS // HEADS)
    rows += place * COLUMNS
    d_o += (start * VALUE_HEADS + head) * V
    v += start * stride_v + head * V
    adjoint += place * CHUNK * V
    entering += place * K * V
    leaving += place * K * V
    beta = tl.full([CHUNK, 1], 1.0, tl.float32)
    if ERASE:
        updates += place * CHUNK * V
        beta = tl.load(rows + i)[:, None]
    FACTORS: tl.constexpr = COLUMNS - 2 * CHUNK
    r_q, r_k = tl.load(rows + FACTORS + i)[:, None], tl.load(rows + FACTORS + CHUNK + i)[:, None]
    unit_q = tl.load(q + (start * stride_q + key_head * K) + (row * stride_q + c[None, :]), mask=mask, other=0.0)
    unit_q = unit_q.to(tl.float32) * r_q
    x_k = tl.load(k + (start * stride_k + key_head * K) + (row * stride_k + c[None, :]), mask=mask, other=0.0)
    x_k = x_k.to(tl.float32) * r_k
    x_q = unit_q * scale
    square = place * CHUNK * CHUNK + (row * CHUNK + column)
    d_p = tl.load(d_reads + square)
    d_a = d_p
    if ERASE:
        d_a = tl.load(d_overlaps + square)
    total_q, total_k, d_column = (
        tl.zeros([CHUNK, BK], tl.float32),
        tl.zeros([CHUNK, BK], tl.float32),
        tl.zeros([CHUNK, BK], tl.float32),
    )
    # Pairs come before states: what a product leaves is used up before the next one starts, so that few tiles live at once.
    if GATE == 0:
        one = tl.full([CHUNK, BK], 1.0, tl.float32)
        total_q, total_k, d_column = pull(d_p, d_a, total_q, total_k, d_column, x_q, x_k, one, one, ERASE, DT)
        total_q += against(d_o, VALUE_HEADS * V, beta, entering, c, live, K, V, BK, BV, False, DT)
        if ERASE:
            total_k -= against(adjoint, V, beta, entering, c, live, K, V, BK, BV, True, DT)
            total_k += against(updates, V, beta, leaving, c, live, K, V, BK, BV, True, DT)
        else:
            total_k += against(v, stride_v, beta, leaving, c, live, K, V, BK, BV, False, DT)
        total_k += d_column
    else:
        WIDTH: tl.constexpr = KP if VECTOR else 1
        from_channel = c if VECTOR else c * 0  # one for all
        total += place * CHUNK * WIDTH
        # A row's own key does not decay: it must leave no rounding noise in the gradient of the decay.
        diagonal = tl.sum(tl.where(row == column, d_p, 0.0), 1)[:, None]
        offset = from_pivot(total, MIDDLE, from_channel, WIDTH)
        safe = tl.max(tl.abs(offset)) <= SAFE
        if safe:
            inside = belongs(i, MIDDLE)
            p, a = tl.where(inside, d_p, 0.0), tl.where(inside, d_a, 0.0)
            up, down = tl.exp2(offset), tl.exp2(-offset)
            total_q, total_k, d_column = pull(p, a, total_q, total_k, d_column, x_q, x_k, up, down, ERASE, DT)
        for level in range(tl.where(safe, 5, 0), 6):
            inside = belongs(i, level)
            p, a = tl.where(inside, d_p, 0.0), tl.where(inside, d_a, 0.0)
            up = tl.exp2(-tl.abs(from_pivot(total, level, from_channel, WIDTH)))
            total_q, total_k, d_column = pull(p, a, total_q, total_k, d_column, x_q, x_k, up, up, ERASE, DT)
        here = tl.load(total + (row * WIDTH + from_channel[None, :]))
        last = tl.load(total + (CHUNK - 1) * WIDTH + from_channel)
        weight = tl.exp2(here.to(tl.float32))
        total_q += weight * against(d_o, VALUE_HEADS * V, beta, entering, c, live, K, V, BK, BV, False, DT)
        if ERASE:
            total_k -= weight * against(adjoint, V, beta, entering, c, live, K, V, BK, BV, True, DT)
            rise = against(updates, V, beta, leaving, c, live, K, V, BK, BV, True, DT)
        else:
            rise = against(v, stride_v, beta, leaving, c, live, K, V, BK, BV, False, DT)
        rise *= tl.exp2((last[None, :] - here).to(tl.float32))
        # The gradient of an exponential's exponent is the term itself. Terms up to the end of the chunk count for every row
        # before theirs, those of k_up for every row after: as one difference the two sums would lose their digits.
        d_log = table_sums(table, FROM_HERE, x_q * total_q + x_k * (total_k - d_column), DT)
        d_log += table_sums(table, BEFORE, x_k * rise, DT)
        d_keep = overlap(entering, leaving, c, K, V, BK, BV)
        d_log = tl.where(mask, d_log + (d_keep * tl.exp2(last.to(tl.float32)))[None, :], 0.0)
        total_q += diagonal * x_k
        total_k += d_column + rise + diagonal * x_q
        if VECTOR:
            rate = 1.0
            if GATE > 1:
                rate = tl.exp(tl.load(a_log + head).to(tl.float32))
            raw = tl.load(g + (start * stride_g + head * K) + (row * stride_g + c[None, :]), mask=mask, other=0.0)
            raw = raw.to(tl.float32)
            if BIAS:
                raw += tl.load(bias + head * K + c, mask=c < K, other=0.0).to(tl.float32)[None, :]
            d_raw, part = gate_back(raw, d_log, rate, lower_bound, GATE)
            out = (start * VALUE_HEADS + head) * K + (row * (VALUE_HEADS * K) + c[None, :])
            tl.store(d_g + out, d_raw.to(d_g.dtype.element_ty), mask=mask)
            if BIAS:
                tl.store(d_bias + place * K + c, tl.sum(d_raw, 0), mask=c < K)
            if GATE > 1:
                tl.store(d_rate + place * (KP // BK) + block, tl.sum(tl.sum(part, 1), 0))
        else:
            out = (block.to(tl.int64) * all_tokens + start) * VALUE_HEADS + head + i * VALUE_HEADS
            tl.store(d_g + out, tl.sum(d_log, 1), mask=live)
    total_q *= scale
    if NORM:
        total_q = r_q * (total_q - unit_q * tl.load(along + place * 2 * CHUNK + i)[:, None])
        total_k = r_k * (total_k - x_k * tl.load(along + place * 2 * CHUNK + CHUNK + i)[:, None])
    out = (start * VALUE_HEADS + head) * K + (row * (VALUE_HEADS * K) + c[None, :])
    tl.store(d_q + out, total_q.to(d_q.dtype.element_ty), mask=mask)
    tl.store(d_k + out, total_k.to(d_k.dtype.element_ty), mask=mask)


@triton.jit
def against(
    x, stride, beta, states, c, live,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SCALED: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """x S^T for channels c, [64,BK]: rows of x [64,V] at a distance of `stride`, times beta if SCALED, and S [K,V]."""
    i = tl.arange(0, CHUNK)
    total = tl.zeros([CHUNK, BK], tl.float32)
    for block in range((V + BV - 1) // BV):
        n = block * BV + tl.arange(0, BV)
        rows = tl.load(x + (i[:, None] * stride + n[None, :]), mask=live[:, None] & (n < V)[None, :], other=0.0)
        if SCALED:
            rows = rows.to(tl.float32) * beta
        state = tl.load(states + (c[:, None] * V + n[None, :]), mask=(c < K)[:, None] & (n < V)[None, :], other=0.0)
        total = dot_add(rows, tl.trans(state), total, DT)
    return total


@triton.jit
def overlap(entering, leaving, c, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """The gradient of exp(G_last) of channels c, [BK]: the state that enters times the gradient of the one that leaves."""
    total = tl.zeros([BK], tl.float32)
    for block in range((V + BV - 1) // BV):
        n = block * BV + tl.arange(0, BV)
        cell, inside = c[:, None] * V + n[None, :], (c < K)[:, None] & (n < V)[None, :]
        before, after = tl.load(entering + cell, mask=inside, other=0.0), tl.load(leaving + cell, mask=inside, other=0.0)
        total += tl.sum(before.to(tl.float32) * after.to(tl.float32), 1)
    return total


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
