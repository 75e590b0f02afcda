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
    q, k, k_up, keep, reads, solved, rows, v, o, initial, final, entering, updates, bounds, firsts,
    tokens, chunks, stride_q, stride_k, stride_v,
    HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    VECTOR: tl.constexpr, GATED: tl.constexpr, ERASE: tl.constexpr, PACKED: tl.constexpr, INITIAL: tl.constexpr,
    KEEP: tl.constexpr, ALONE: tl.constexpr, MAP: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """One sequence, one value head, BV value channels.

    VECTOR: q and k are q_down and k_down [slots,HV,64,KP]; else they are the inputs, and `rows` holds their factors.
    ALONE: no other kernel works on the documents without chunks. KEEP: also stores the state that enters each chunk
    [slots,HV,K,V], and U [slots,HV,64,V], for the backward pass. MAP: nothing is read out; V more columns are followed by K
    that start as the identity and get no values: what the tokens make of any state that enters.
    """
    at_v, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i, c, n = tl.arange(0, CHUNK), tl.arange(0, KP), at_v * BV + tl.arange(0, BV)
    key_head = head // (VALUE_HEADS // HEADS)
    inside = (c < K)[:, None] & (n < V)[None, :]
    WIDTH: tl.constexpr = V + K if MAP else V
    whole = (sequence.to(tl.int64) * VALUE_HEADS + head) * K * WIDTH
    cell = c[:, None] * WIDTH + n[None, :]
    state = tl.zeros([KP, BV], tl.float32)
    if MAP:
        state = tl.where(c[:, None] + V == n[None, :], 1.0, 0.0)
    if INITIAL:
        state = tl.load(initial + whole + cell, mask=inside, other=0.0).to(tl.float32)
    if PACKED:
        first = tl.load(firsts + sequence)
        last = tl.load(firsts + sequence + 1)
    else:
        first = sequence * chunks
        last = first + chunks
    square = i[:, None] * CHUNK + i[None, :]
    tile = i[:, None] * KP + c[None, :]
    for step in range(last - first):
        slot = first + step
        start, count = chunk_of(slot, bounds, tokens, chunks, PACKED)
        place = slot.to(tl.int64) * VALUE_HEADS + head
        live = (i < count)[:, None]
        seen = live & (n < V)[None, :]
        # Everything is asked for before anything is needed: the way from memory is long. Of products that do not need each
        # other the second starts before the first is looked at.
        x = tl.load(v + (start * stride_v + head * V) + (i[:, None] * stride_v + n[None, :]), mask=seen, other=0.0)
        if VECTOR:
            rest = tl.load(keep + place * KP + c)
            b_q = tl.load(q + place * CHUNK * KP + tile)
            b_up = tl.load(k_up + place * CHUNK * KP + tile)
        else:
            some = live & (c < K)[None, :]
            b_q = tl.load(q + (start * stride_q + key_head * K) + (i[:, None] * stride_q + c[None, :]), mask=some, other=0.0)
            b_up = tl.load(k + (start * stride_k + key_head * K) + (i[:, None] * stride_k + c[None, :]), mask=some, other=0.0)
            factors = rows + place * 6 * CHUNK + i
            read_by, write_by = tl.load(factors + CHUNK)[:, None], tl.load(factors + 3 * CHUNK)[:, None]
            if GATED:
                rest = tl.load(keep + place)
        if ERASE:
            b_solved = tl.load(solved + place * CHUNK * CHUNK + square)
            if VECTOR:
                beta = tl.load(rows + place * 3 * CHUNK + i)[:, None]
                b_down = tl.load(k + place * CHUNK * KP + tile)
            else:
                beta, down_by = tl.load(factors)[:, None], tl.load(factors + 2 * CHUNK)[:, None]
                b_down = b_up
        if not MAP:
            b_reads = tl.load(reads + place * CHUNK * CHUNK + square)
        if KEEP:
            tl.store(entering + place * K * V + cell, state.to(entering.dtype.element_ty), mask=inside)
        memory = state.to(DT)
        if ERASE:
            held = dot(b_down, memory, DT)
        if not MAP:
            read = dot(b_q, memory, DT)
        update = x.to(tl.float32)
        if ERASE:
            if not VECTOR:
                held *= down_by
            update -= held
            update -= dot(b_solved, beta * update, DT)
            if KEEP:
                written = updates + place * CHUNK * V + (i[:, None] * V + n[None, :])
                tl.store(written, update.to(updates.dtype.element_ty), mask=(n < V)[None, :])
            update *= beta
        if not MAP:
            if not VECTOR:
                read *= read_by
            read = dot_add(b_reads, update, read, DT)
        if VECTOR:
            state *= rest[:, None]
        elif GATED:
            state *= rest
        if not VECTOR:
            update *= write_by
        state = dot_add(tl.trans(b_up), update, state, DT)
        if not MAP:
            out = o + (start * VALUE_HEADS + head) * V + (i[:, None] * (VALUE_HEADS * V) + n[None, :])
            tl.store(out, read.to(o.dtype.element_ty), mask=seen)
    if MAP:
        tl.store(final + whole + cell, state, mask=(c < K)[:, None] & (n < WIDTH)[None, :])
    else:
        tl.store(final + whole + cell, state, mask=inside & ((last > first) | ALONE))


@triton.jit
def fold(
    maps, initial, starts, segments,
    VALUE_HEADS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, INITIAL: tl.constexpr,
):  # fmt: skip
    """The state that enters every segment of a document, from the segments' maps [segments,HV,K,V+K] (R | M): S <- M S + R.

    segments [N+1]: the first segment of every document. Fills `starts` [segments,HV,K,V].
    """
    at_v, head, document = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    c, n = tl.arange(0, KP), at_v * BV + tl.arange(0, BV)
    row, column = c[:, None], n[None, :]
    inside = (row < K) & (column < V)
    state = tl.zeros([KP, BV], tl.float32)
    if INITIAL:
        at = (document.to(tl.int64) * VALUE_HEADS + head) * K * V
        state = tl.load(initial + at + (row * V + column), mask=inside, other=0.0)
    first = tl.load(segments + document)
    for step in range(tl.load(segments + document + 1) - first):
        place = (first + step).to(tl.int64) * VALUE_HEADS + head
        tl.store(starts + place * K * V + (row * V + column), state, mask=inside)
        held = maps + place * K * (V + K)
        moved = tl.load(held + (row * (V + K) + V + c[None, :]), mask=(row < K) & (c < K)[None, :], other=0.0)
        added = tl.load(held + (row * (V + K) + column), mask=inside, other=0.0)
        state = tl.dot(moved, state, added, input_precision="tf32x3")
