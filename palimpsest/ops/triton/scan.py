"""The one pass in order: a program holds the state of some value channels of one head on chip and walks the chunks.

With what `prepare` made of a chunk and S the state that enters it:

    R = v - k_down S     U = R - Z (beta R)     X = beta U     o = q_down S + P X     S <- exp(G_last) S + k_up^T X

v - k_down S is subtracted before it is rounded: what the memory already holds leaves no noise. Without erasing X = v.
"""

from __future__ import annotations

import triton
import triton.language as tl

from palimpsest.ops.triton.gates import CHUNK, chunk_of, dot, dot_add


@triton.jit(do_not_specialize=["tokens", "chunks"])
def scan(
    q, k, k_up, keep, reads, solve, rows, v, o, initial, final, entering, updates, bounds, firsts,
    tokens, chunks, stride_q, stride_k, stride_v,
    HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    VECTOR: tl.constexpr, GATED: tl.constexpr, ERASE: tl.constexpr, PACKED: tl.constexpr, INITIAL: tl.constexpr,
    KEEP: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """One sequence, one value head, BV value channels.

    VECTOR: q and k are q_down and k_down [slots,HV,64,KP]; else they are the inputs, and `rows` holds their factors.
    KEEP: also stores the state that enters each chunk, [slots,HV,K,V], and U, [slots,HV,64,V], for the backward pass.
    """
    at_v, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i, c, n = tl.arange(0, CHUNK), tl.arange(0, KP), at_v * BV + tl.arange(0, BV)
    key_head = head // (VALUE_HEADS // HEADS)
    inside = (c < K)[:, None] & (n < V)[None, :]
    cell = ((sequence.to(tl.int64) * VALUE_HEADS + head) * K + c)[:, None] * V + n[None, :]
    state = tl.zeros([KP, BV], tl.float32)
    if INITIAL:
        state = tl.load(initial + cell, mask=inside, other=0.0).to(tl.float32)
    if PACKED:
        first = tl.load(firsts + sequence)
        last = tl.load(firsts + sequence + 1)
    else:
        first = sequence * chunks
        last = first + chunks
    for step in range(last - first):
        slot = first + step
        start, count = chunk_of(slot, bounds, tokens, chunks, PACKED)
        place = slot.to(tl.int64) * VALUE_HEADS + head
        live = i < count
        token = start + i
        square = (place * CHUNK + i)[:, None] * CHUNK + i[None, :]
        tile = (place * CHUNK + i)[:, None] * KP + c[None, :]
        seen = live[:, None] & (n < V)[None, :]
        if KEEP:
            kept = (place * K + c)[:, None] * V + n[None, :]
            tl.store(entering + kept, state.to(entering.dtype.element_ty), mask=inside)
        memory = state.to(DT)
        x = tl.load(v + (token * stride_v + head * V)[:, None] + n[None, :], mask=seen, other=0.0)
        if VECTOR:
            b_q = tl.load(q + tile)
        else:
            some = live[:, None] & (c < K)[None, :]
            b_q = tl.load(q + (token * stride_q + key_head * K)[:, None] + c[None, :], mask=some, other=0.0)
            b_k = tl.load(k + (token * stride_k + key_head * K)[:, None] + c[None, :], mask=some, other=0.0)
            factors = rows + place * 4 * CHUNK + i
        if ERASE:
            if VECTOR:
                beta = tl.load(rows + place * CHUNK + i)
                missing = x.to(tl.float32) - dot(tl.load(k + tile), memory, DT)
            else:
                beta = tl.load(factors)
                missing = x.to(tl.float32) - tl.load(factors + 2 * CHUNK)[:, None] * dot(b_k, memory, DT)
            u = missing - dot(tl.load(solve + square), beta[:, None] * missing, DT)
            if KEEP:
                written = (place * CHUNK + i)[:, None] * V + n[None, :]
                tl.store(updates + written, u.to(updates.dtype.element_ty), mask=(n < V)[None, :])
            update = beta[:, None] * u
        else:
            update = x.to(tl.float32)
        read = dot(b_q, memory, DT)
        if not VECTOR:
            read = tl.load(factors + CHUNK)[:, None] * read
        read = dot_add(tl.load(reads + square), update, read, DT)
        tl.store(o + (token * VALUE_HEADS + head)[:, None] * V + n[None, :], read.to(o.dtype.element_ty), mask=seen)
        if VECTOR:
            state *= tl.load(keep + place * KP + c)[:, None]
            state = dot_add(tl.trans(tl.load(k_up + tile)), update, state, DT)
        else:
            if GATED:
                state *= tl.load(keep + place)
            state = dot_add(tl.trans(b_k), tl.load(factors + 3 * CHUNK)[:, None] * update, state, DT)
    tl.store(final + cell, state, mask=inside & (last > first))
