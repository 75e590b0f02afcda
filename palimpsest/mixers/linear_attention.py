"""Linear attention (arXiv 2006.16236): the past folded into one matrix by adding, never erasing.

    S_t = S_{t-1} + phi(k_t) v_t^T     z_t = z_{t-1} + phi(k_t)     o_t = S_t^T phi(q_t) / (z_t . phi(q_t))
    phi(x) = elu(x) + 1

The normaliser z is kept as one more column of S (v gets a channel of ones). With `linear_output_norm` there is none and
o_t = o_norm(S_t^T phi(q_t) / sqrt(K)); phi may also be relu, the identity, or a learned product (A x + a) * (B x + b). A
short causal convolution on q, k, v gives the layer the order of neighbouring tokens, as in its successors.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from palimpsest import ops
from palimpsest.config import ModelConfig
from palimpsest.context import remembered
from palimpsest.heads import Heads, part, share
from palimpsest.linear import Linear
from palimpsest.state import Recurrent, Segments

NORMALISER_EPS = 1e-6


class ShortConvolution(nn.Module):
    """Taps [C,W] of a causal depthwise convolution; `ops.short_conv` applies them."""

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels, taps, dtype=torch.float32))


class LearnedProduct(nn.Module):
    """(A x + a) * (B x + b) of a head's channels, the same in every head: [...,K] -> [...,K] in x's dtype."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layer1, self.layer2 = nn.Linear(channels, channels), nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        left, right = (F.linear(x, layer.weight.to(x.dtype), layer.bias.to(x.dtype)) for layer in (self.layer1, self.layer2))
        return left * right


def _elu_plus_one(x: Tensor) -> Tensor:
    return F.elu(x) + 1


def _identity(x: Tensor) -> Tensor:
    return x


class LinearAttention(nn.Module):
    """x [B,T,D] -> [B,T,D]; carries one matrix per value head and the convolution's last inputs.

    Its successors inherit the projections and the convolution, and replace `remember` (what is written) and `read`
    (what becomes of the output).
    """

    state_columns = 1  # columns of S beside the V value channels: the normaliser, where there is one

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.key_heads, self.value_heads = config.linear_num_key_heads, config.linear_num_value_heads
        self.key_dim, self.value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        self.taps = config.linear_conv_kernel_dim
        self.parallel: Heads | None = None  # in training: the processes that share the heads
        self.q_proj = Linear(width, keys, bias=False)
        self.k_proj = Linear(width, keys, bias=False)
        self.v_proj = Linear(width, values, bias=False)
        self.o_proj = Linear(values, width, bias=False)
        if self.taps:
            self.q_conv1d = ShortConvolution(keys, self.taps)
            self.k_conv1d = ShortConvolution(keys, self.taps)
            self.v_conv1d = ShortConvolution(values, self.taps)
        self.add_features(config)

    def add_features(self, config: ModelConfig) -> None:
        """What the feature map and the output need; successors have neither."""
        self.norm_eps, self.has_norm = config.rms_norm_eps, config.linear_output_norm
        features = {"elu": _elu_plus_one, "relu": F.relu, "identity": _identity}
        self.feature_map_q = self.feature_map_k = features.get(config.linear_feature_map)
        if config.linear_feature_map == "product":
            self.feature_map_q, self.feature_map_k = LearnedProduct(self.key_dim), LearnedProduct(self.key_dim)
        if self.has_norm:
            self.o_norm, self.state_columns = nn.RMSNorm(self.value_dim, config.rms_norm_eps), 0

    def new_state(self, batch: int, dtype: torch.dtype, device: torch.device) -> Recurrent:
        precision = torch.float64 if dtype == torch.float64 else torch.float32
        columns = self.value_dim + self.state_columns
        matrix = torch.zeros(batch, self.value_heads, self.key_dim, columns, dtype=precision, device=device)
        channels = 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
        return Recurrent(matrix, torch.zeros(batch, max(self.taps - 1, 0), channels, dtype=dtype, device=device))

    def forward(self, x: Tensor, state: Recurrent, segments: Segments) -> tuple[Tensor, Recurrent]:
        mixed, conv = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1), state.conv
        if self.taps:
            taps = torch.cat([part(self.parallel, conv.weight) for conv in (self.q_conv1d, self.k_conv1d, self.v_conv1d)])
            if segments.context is not None:
                conv = segments.context.before(mixed, self.taps - 1, segments)
            mixed, conv = ops.short_conv(mixed, taps, conv, segments.cu_seqlens)
        keys = self.key_heads * self.key_dim
        q, k, v = mixed.split([keys, keys, self.value_heads * self.value_dim], -1)
        q = q.unflatten(-1, (self.key_heads, self.key_dim))
        k = k.unflatten(-1, (self.key_heads, self.key_dim))
        v = v.unflatten(-1, (self.value_heads, self.value_dim))
        o, matrix = self.remember(x, q, k, v, state.matrix, segments)
        return self.o_proj(self.read(x, o).flatten(-2)), Recurrent(matrix, conv)

    def remember(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, matrix: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
        """Writes k, v [B,T,H,K], [B,T,HV,V] into the matrix and reads with q: (o [B,T,HV,V], the new matrix)."""
        dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
        q, k = self.feature_map_q(q.to(dtype)), self.feature_map_k(k.to(dtype))  # type: ignore[misc]
        if self.has_norm:
            return remembered(ops.linear_attention, segments, q, k, v, state=matrix)
        counted = F.pad(v.to(dtype), (0, 1), value=1.0)
        o, matrix = remembered(ops.linear_attention, segments, q, k, counted, scale=1.0, state=matrix)
        return (o[..., :-1] / (o[..., -1:] + NORMALISER_EPS)).to(v.dtype), matrix

    def read(self, x: Tensor, o: Tensor) -> Tensor:
        """What leaves the layer before o_proj, from o [B,T,HV,V]."""
        return ops.rms_norm(o, share(self.parallel, self.o_norm.weight), self.norm_eps) if self.has_norm else o
