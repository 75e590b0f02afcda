"""Multi-head latent attention (arXiv 2405.04434), in the NoPE form of Kimi Linear and the gated form of Kimi K3.

    c = RMSNorm(W_DKV x) [R]     p = W_KR x [r], shared by the heads, not normed
    k_h = [W_UK,h c | p]     v_h = W_UV,h c     o_h = softmax( q_h . k_h / sqrt(nope + r) ) v_h
    y = W_o (o * sigmoid(W_g x)) when gated

Only [c | p] is kept per token. Two algebraically equal forms: expanded (k and v are formed; prefill and training) and
absorbed (W_UK and W_UV move to the query and the output; decode reads R + r values a token instead of H (nope + r + V)).
Without rotation the r extra channels stay and still count in the scale.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from palimpsest import ops
from palimpsest.config import ModelConfig
from palimpsest.heads import Heads, share
from palimpsest.linear import Linear
from palimpsest.mixers.attention import Observer, causal_attention, rotate
from palimpsest.state import Latent, Rows, Segments

LOW_RANK_NORM_EPS = 1e-6  # the published code leaves these two norms at its class default, whatever the model's epsilon


class MLA(nn.Module):
    """x [B,T,D] -> [B,T,D]; carries latents."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, self.heads = config.hidden_size, config.num_attention_heads
        self.rank, self.nope, self.rope = config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim
        self.value_dim = config.v_head_dim
        self.rope_theta = None if config.mla_use_nope else config.rope_theta
        queries, values = self.heads * (self.nope + self.rope), self.heads * self.value_dim
        if config.q_lora_rank is None:
            self.q_proj = Linear(width, queries, bias=False)
        else:
            self.q_a_proj = Linear(width, config.q_lora_rank, bias=False)
            self.q_a_layernorm = nn.RMSNorm(config.q_lora_rank, LOW_RANK_NORM_EPS)
            self.q_b_proj = Linear(config.q_lora_rank, queries, bias=False)
        self.kv_a_proj_with_mqa = Linear(width, self.rank + self.rope, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(self.rank, LOW_RANK_NORM_EPS)
        self.kv_b_proj = Linear(self.rank, self.heads * (self.nope + self.value_dim), bias=False)
        self.g_proj = Linear(width, values, bias=False) if config.mla_use_output_gate else None
        self.o_proj = Linear(values, width, bias=False)
        self.observe: Observer | None = None  # told what is scored while training clips logits
        self.parallel: Heads | None = None  # in training: the processes that share the heads
        # New tokens above which forming k and v for every row costs less than scoring in the latent space.
        extra = 2 * self.rank - self.nope - self.value_dim
        self.break_even = self.rank * (self.nope + self.value_dim) / extra if extra > 0 else float("inf")

    def new_state(self, batch: int, dtype: torch.dtype, device: torch.device) -> Latent:
        return Latent(Rows((torch.empty(batch, 0, self.rank + self.rope, dtype=dtype, device=device),), 0))

    def forward(self, x: Tensor, state: Latent, segments: Segments) -> tuple[Tensor, Latent]:
        if hasattr(self, "q_proj"):
            q = self.q_proj(x)
        else:
            q = self.q_b_proj(ops.rms_norm(self.q_a_proj(x), self.q_a_layernorm.weight, LOW_RANK_NORM_EPS))
        q_nope, q_rope = q.unflatten(-1, (self.heads, -1)).split([self.nope, self.rope], -1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([self.rank, self.rope], -1)
        k_rope = share(self.parallel, k_rope)
        latent = ops.rms_norm(latent, self.kv_a_layernorm.weight, LOW_RANK_NORM_EPS)
        if self.rope_theta is not None:
            q_rope = rotate(q_rope, segments.positions, self.rope_theta, self.rope)
            k_rope = rotate(k_rope.unsqueeze(2), segments.positions, self.rope_theta, self.rope).squeeze(2)
        rows, new = state.rows, torch.cat([latent, k_rope], -1)
        if segments.context is None:
            rows = rows.append((new,), segments)
        (cached,) = rows.tensors if segments.context is None else segments.context.whole(new)
        few = max(segments.past, default=0) > 0 and max(segments.new, default=0) < self.break_even
        absorb = few and segments.context is None
        attend = self.attend_absorbed if absorb else self.attend_expanded
        o = attend(q_nope, q_rope, cached, segments).flatten(-2)
        if self.g_proj is not None:
            o = o * torch.sigmoid(self.g_proj(x))
        return self.o_proj(o), Latent(rows)

    def attend_expanded(self, q_nope: Tensor, q_rope: Tensor, rows: Tensor, segments: Segments) -> Tensor:
        """q [B,T,H,nope], [B,T,H,r]; rows [c | p] [B,S,R+r] -> o [B,T,H,V], with k and v formed for every row."""
        latent, k_rope = rows.split([self.rank, self.rope], -1)
        k_nope, v = self.kv_b_proj(latent).unflatten(-1, (self.heads, -1)).split([self.nope, self.value_dim], -1)
        k = torch.cat([k_nope, k_rope.unsqueeze(2).expand(-1, -1, self.heads, -1).to(k_nope.dtype)], -1)
        q = torch.cat([q_nope, q_rope], -1)
        return causal_attention(q, k, v, segments, (self.nope + self.rope) ** -0.5, self.observe)

    def attend_absorbed(self, q_nope: Tensor, q_rope: Tensor, rows: Tensor, segments: Segments) -> Tensor:
        """The same numbers without forming k and v: a row is the key of all heads, and its c their value."""
        weight = self.kv_b_proj.weight.unflatten(0, (self.heads, -1))
        up_k, up_v = weight.split([self.nope, self.value_dim], 1)  # [H,nope,R], [H,V,R]
        query = torch.cat([torch.einsum("bthn,hnr->bthr", q_nope, up_k.to(q_nope.dtype)), q_rope], -1)
        key = rows.unsqueeze(2)
        context = causal_attention(query, key, key[..., : self.rank], segments, (self.nope + self.rope) ** -0.5)
        return torch.einsum("bthr,hvr->bthv", context, up_v.to(context.dtype))
