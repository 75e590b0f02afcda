"""Gradients of the whole family, first half: states, values and pairs. Nothing is kept but the inputs: `prepare` and `scan` run
again, and leave the state S that enters each chunk and U. Then, with D the gradient of the state that leaves a chunk,

    scan_back, chunks in reverse:   X' = P^T o' + k_up D    Y = X' - Z^T (beta X')    v' = beta Y
                                    D <- exp(G_last) D + q_down^T o' - k_down^T v'
    pairs_back, all at once:        P' = o' X^T    A' = -v' X^T  (both lower)    beta' = sum U Y

and the rest in `chunk_back`. A prime is a gradient. Without erasing X is v, Y its gradient, and A, Z, U, beta are absent.
"""

from __future__ import annotations

import triton
import triton.language as tl

from palimpsest.ops.triton.gates import CHUNK, chunk_of, dot, dot_add


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
    k, v, o, d_o, updates, adjoint, rows, total, d_v, d_beta, d_reads, d_overlaps, along, bounds,
    tokens, chunks, stride_k, stride_v, scale,
    HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    COLUMNS: tl.constexpr, LOGIT: tl.constexpr, NORM: tl.constexpr, FADES: tl.constexpr, ERASE: tl.constexpr,
    PACKED: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """One chunk of one value head: gradients of v and beta, of P [slots,HV,64,64], times `scale`, and of A, in the place of P
    and of Z.

    NORM: `along` [slots,HV,3,64] gets <q, q'> = <o, o'> and <k, k'> = beta <Y, 2 U - v> of every row: a normalised vector's
    gradient loses its part along the vector. (Scaling k_i acts in P, A, k_down and k_up; written out, all but this cancels.)
    FADES: a scalar gate. P' and A' are those of products before their decay exp(G_i - G_j), and `along` also gets what pairs
    give to G_i of every row: of P P' + A A', whose terms are their exponents' gradients, row sums less column sums.
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
        tl.store(along + place * 3 * CHUNK + i, along_q)
        tl.store(along + place * 3 * CHUNK + CHUNK + i, along_k)
    row, column = i[:, None], i[None, :]
    square = place * CHUNK * CHUNK + (row * CHUNK + column)
    if FADES:
        total += place * CHUNK
        span = (tl.load(total + i)[:, None] - tl.load(total + i)[None, :]).to(tl.float32)
        weight = tl.exp2(tl.minimum(span, 0.0))
        terms = d_p * tl.load(d_reads + square).to(tl.float32)
        d_p *= weight
        if ERASE:
            d_a *= weight
            r_k = rows + place * COLUMNS + (COLUMNS - CHUNK) + i
            terms += (
                d_a
                * tl.load(r_k)[:, None]
                * tl.load(r_k)[None, :]
                * overlaps(k + start * stride_k + head // (VALUE_HEADS // HEADS) * K, stride_k, live, K, BK, DT)
            )
        terms = tl.where(row > column, terms, 0.0)
        tl.store(along + place * 3 * CHUNK + 2 * CHUNK + i, tl.sum(terms, 1) - tl.sum(terms, 0))
        tl.debug_barrier()  # all of P is read
    tl.store(d_reads + square, tl.where(row >= column, scale * d_p, 0.0).to(DT))
    if ERASE:
        tl.store(d_overlaps + square, tl.where(row > column, d_a, 0.0).to(DT))
        if LOGIT:
            strength = tl.load(rows + place * COLUMNS + i)
            d_strength *= strength * (1 - strength)
        out = start * VALUE_HEADS + head + i * VALUE_HEADS
        tl.store(d_beta + out, d_strength.to(d_beta.dtype.element_ty), mask=live)


@triton.jit
def overlaps(k, stride, live, K: tl.constexpr, BK: tl.constexpr, DT: tl.constexpr):
    """k k^T of 64 rows at a distance of `stride`."""
    i = tl.arange(0, CHUNK)[:, None]
    total = tl.zeros([CHUNK, CHUNK], tl.float32)
    for block in range((K + BK - 1) // BK):
        c = (block * BK + tl.arange(0, BK))[None, :]
        x = tl.load(k + (i * stride + c), mask=live[:, None] & (c < K), other=0.0)
        total = dot_add(x, tl.trans(x), total, DT)
    return total
