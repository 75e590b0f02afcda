"""Softmax attention: every token stays addressable.

    o_t = sum_{s <= t} softmax_s( q_t . k_s / sqrt(D) ) v_s

Options: grouped key/value heads, rotary positions, RMSNorm on q and k per head, a sigmoid output gate per channel
(y = W_o (o * sigmoid(W_g x)), Gated Attention, arXiv 2505.06708).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from palimpsest import ops
from palimpsest.config import ModelConfig
from palimpsest.heads import Heads, share
from palimpsest.linear import Linear
from palimpsest.state import KeyValue, Rows, Segments

Observer = Callable[[Tensor, Tensor, tuple[int, ...], float], None]  # q, k, past, scale as in _attend


class Attention(nn.Module):
    """x [B,T,D] -> [B,T,D]; carries keys and values."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, bias = config.hidden_size, config.use_bias
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.q_proj = Linear(width, self.heads * self.head_dim, bias=bias)
        self.k_proj = Linear(width, self.kv_heads * self.head_dim, bias=bias)
        self.v_proj = Linear(width, self.kv_heads * self.head_dim, bias=bias)
        self.o_proj = Linear(self.heads * self.head_dim, width, bias=bias)
        self.g_proj = Linear(width, self.heads * self.head_dim, bias=False) if config.attention_output_gate else None
        self.q_norm = nn.RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.norm_eps = config.rms_norm_eps
        self.rotated = int(self.head_dim * config.partial_rotary_factor) if config.position == "rope" else 0
        self.rope_theta = config.rope_theta
        self.observe: Observer | None = None  # told what is scored while training clips logits
        self.parallel: Heads | None = None  # in training: the processes that share the heads

    def new_state(self, batch: int, dtype: torch.dtype, device: torch.device) -> KeyValue:
        empty = torch.empty(batch, 0, self.kv_heads, self.head_dim, dtype=dtype, device=device)
        return KeyValue(Rows((empty, empty.clone()), 0))

    def forward(self, x: Tensor, state: KeyValue, segments: Segments) -> tuple[Tensor, KeyValue]:
        q = self.q_proj(x).unflatten(-1, (self.heads, self.head_dim))
        k = self.k_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q = ops.rms_norm(q, share(self.parallel, self.q_norm.weight), self.norm_eps)
            k = ops.rms_norm(k, share(self.parallel, self.k_norm.weight), self.norm_eps)
        if self.rotated:
            q = rotate(q, segments.positions, self.rope_theta, self.rotated)
            k = rotate(k, segments.positions, self.rope_theta, self.rotated)
        rows = state.rows
        if segments.context is None:
            rows = rows.append((k, v), segments)
        keys, values = rows.tensors if segments.context is None else segments.context.whole(k, v)
        o = causal_attention(q, keys, values, segments, self.head_dim**-0.5, self.observe).flatten(-2)
        if self.g_proj is not None:
            o = o * torch.sigmoid(self.g_proj(x))
        return self.o_proj(o), KeyValue(rows)


def rotate(x: Tensor, positions: Tensor, theta: float, channels: int) -> Tensor:
    """Rotary positions on the first `channels` channels of x [B,T,H,D]; channel i turns with channel i + channels/2."""
    half = channels // 2
    rate = theta ** -(torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angle = positions.to(torch.float64).unsqueeze(-1) * rate  # [B,T,half]; float64 keeps far positions exact
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    cos, sin = angle.cos().to(dtype).unsqueeze(2), angle.sin().to(dtype).unsqueeze(2)
    first, second, rest = x[..., :half].to(dtype), x[..., half:channels].to(dtype), x[..., channels:]
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
    return torch.cat([turned, rest], -1) if rest.shape[-1] else turned


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, observe: Observer | None = None
) -> Tensor:
    """Softmax attention of the new tokens over each sequence's rows, old and new.

    q [B,T,H,D] or packed [1,total,H,D]; k [B or N,S,Hkv,D], v [B or N,S,Hkv,V], left-aligned rows that already hold the new
    tokens. Token i of sequence b sees rows 0 .. past[b] + i. Returns [B,T,H,V] or [1,total,H,V]. With tokens spread over
    processes q are those of this one's stretch, and k and v [B,T,...] or [1,total,...] lie as in the whole row.
    """
    if segments.context is not None:
        return _attend_stretch(q, k, v, segments, segments.context.starts, scale, observe)
    if segments.cu_seqlens is None:
        return _attend(q, k, v, segments.past, scale, observe)
    if segments.new and len(set(segments.new)) == 1:
        together = q.view(len(segments.new), segments.new[0], *q.shape[2:])
        return _attend(together, k, v, segments.past, scale, observe).reshape(1, -1, q.shape[2], v.shape[3])
    pieces, start = [], 0
    for row, (past, new) in enumerate(zip(segments.past, segments.new, strict=True)):
        window = slice(row, row + 1), slice(0, past + new)
        pieces.append(_attend(q[:, start : start + new], k[window], v[window], (past,), scale, observe))
        start += new
    return torch.cat(pieces, 1) if pieces else q.new_zeros(1, 0, q.shape[2], v.shape[3])


def _attend_stretch(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, starts: tuple[int, ...], scale: float, observe: Observer | None
) -> Tensor:
    """Sequence n of the stretch stands at starts[n] of the whole row, and its new tokens behind past[n] others there."""
    if segments.cu_seqlens is None:
        end = segments.past[0] + segments.new[0]
        return _attend(q, k[:, :end], v[:, :end], segments.past, scale, observe)
    pieces, at = [], 0
    for start, past, new in zip(starts, segments.past, segments.new, strict=True):
        window = slice(start, start + past + new)
        pieces.append(_attend(q[:, at : at + new], k[:, window], v[:, window], (past,), scale, observe))
        at += new
    return torch.cat(pieces, 1)


def _attend(q: Tensor, k: Tensor, v: Tensor, past: tuple[int, ...], scale: float, observe: Observer | None) -> Tensor:
    """q [B,T,H,D] against k [B,S,Hkv,D], v [B,S,Hkv,V]; row b's first query stands at position past[b]."""
    tokens, size, channels = q.shape[1], k.shape[1], v.shape[3]
    if tokens == 0 or q.shape[0] == 0:
        return q.new_zeros(*q.shape[:3], channels)
    if observe is not None:
        observe(q, k, past, scale)
    if tokens == 1 and ops.can_attend(q, k, v):
        return ops.attend(q, k, v, [place + 1 for place in past], scale)
    mask, causal = None, False
    if len(set(past)) == 1 and past[0] + tokens == size:
        causal = past[0] == 0 and tokens > 1
        if past[0] > 0 and tokens > 1:
            mask = torch.ones(tokens, size, dtype=torch.bool, device=q.device).tril(past[0])
    else:
        last = torch.tensor(past, device=q.device).view(-1, 1, 1, 1) + torch.arange(tokens, device=q.device).view(-1, 1)
        mask = torch.arange(size, device=q.device) <= last
    # The fused kernels want one head size; zero channels behind v change nothing and are cheaper than the plain path.
    if channels < q.shape[3]:
        v = F.pad(v, (0, q.shape[3] - channels))
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    grouped = q.shape[2] != k.shape[2]
    with _kernels(q):
        o = F.scaled_dot_product_attention(*turned, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped)
    return o.transpose(1, 2)[..., :channels]


def _kernels(q: Tensor) -> AbstractContextManager[Any]:
    """Which of torch's kernels may serve: cuDNN's plans are made anew for every number of rows, some 20 ms at every token."""
    if q.shape[1] > 1 or not q.is_cuda:
        return nullcontext()
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
