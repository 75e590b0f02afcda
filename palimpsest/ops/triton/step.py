"""A few tokens at a time, as in decoding: the recurrence itself. The state is read once and written once."""

from __future__ import annotations

import triton
import triton.language as tl

from palimpsest.ops.triton.gates import log_decay


@triton.jit(do_not_specialize=["tokens"])
def step(
    q, k, v, g, beta, a_log, bias, initial, o, final, starts,
    tokens, stride_q, stride_k, stride_v, stride_g, stride_beta, scale, lower_bound,
    HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    GATE: tl.constexpr, VECTOR: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, LOGIT: tl.constexpr,
    ERASE: tl.constexpr, PACKED: tl.constexpr, INITIAL: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """All tokens of one sequence of at most FEW, one value head, BV value channels, in float32."""
    at_v, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    c, n = tl.arange(0, KP), at_v * BV + tl.arange(0, BV)
    wide, narrow = c < K, n < V
    key_head = head // (VALUE_HEADS // HEADS)
    inside = wide[:, None] & narrow[None, :]
    cell = ((sequence.to(tl.int64) * VALUE_HEADS + head) * K + c)[:, None] * V + n[None, :]
    if PACKED:
        first = tl.load(starts + sequence).to(tl.int64)
        count = tl.load(starts + sequence + 1) - tl.load(starts + sequence)
        inside &= count <= FEW
        count = tl.where(count <= FEW, count, 0)
    else:
        first = sequence.to(tl.int64) * tokens
        count = tokens
    state = tl.zeros([KP, BV], tl.float32)
    if INITIAL:
        state = tl.load(initial + cell, mask=inside, other=0.0)
    rate = 1.0
    if GATE > 1:
        rate = tl.exp(tl.load(a_log + head).to(tl.float32))
    for t in range(count):
        token = first + t
        x_q = tl.load(q + token * stride_q + key_head * K + c, mask=wide, other=0.0).to(tl.float32)
        x_k = tl.load(k + token * stride_k + key_head * K + c, mask=wide, other=0.0).to(tl.float32)
        update = tl.load(v + token * stride_v + head * V + n, mask=narrow, other=0.0).to(tl.float32)
        if NORM:
            x_q *= tl.rsqrt(tl.sum(x_q * x_q, 0) + 1e-6)
            x_k *= tl.rsqrt(tl.sum(x_k * x_k, 0) + 1e-6)
        if GATE > 0:
            if VECTOR:
                raw = tl.load(g + token * stride_g + head * K + c, mask=wide, other=0.0).to(tl.float32)
                if BIAS:
                    raw += tl.load(bias + head * K + c, mask=wide, other=0.0).to(tl.float32)
                state *= tl.exp2(log_decay(raw, rate, lower_bound, GATE))[:, None]
            else:
                raw = tl.load(g + token * stride_g + head).to(tl.float32)
                if BIAS:
                    raw += tl.load(bias + head).to(tl.float32)
                state *= tl.exp2(log_decay(raw, rate, lower_bound, GATE))
        if ERASE:
            strength = tl.load(beta + token * stride_beta + head).to(tl.float32)
            if LOGIT:
                strength = tl.sigmoid(strength)
            update = strength * (update - tl.sum(state * x_k[:, None], 0))
        state += x_k[:, None] * update[None, :]
        read = tl.sum(state * (x_q * scale)[:, None], 0)
        tl.store(o + (token * VALUE_HEADS + head) * V + n, read.to(o.dtype.element_ty), mask=narrow)
    tl.store(final + cell, state, mask=inside)
