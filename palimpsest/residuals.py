"""How layers join over depth.

Sum: h <- h + f(norm h), every sublayer output in one pot. Attention residuals (arXiv 2603.15031) keep the outputs apart and
let each sublayer choose among them by a learned query w:

    k_j = V_j / rms(V_j)     score_j = sum_d k_j[d] n[d] w[d]     h = sum_j softmax(score)_j V_j     (raw values)

Full form: the sources V_j are the embedding and every earlier sublayer output. Block form (Kimi K3): outputs are summed
inside a block of layers; the sources are the sealed blocks and the running sum. A block is sealed at the start of every
`attn_res_block_size`-th layer, after that layer's mixer input is formed and before its mixer output is added; block 0 is the
embedding alone. Nothing of this is carried from token to token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from palimpsest.config import ModelConfig


def mix(sources: Tensor | Sequence[Tensor], norm_weight: Tensor, proj_weight: Tensor, eps: float = 1e-5) -> Tensor:
    """Attention over depth: sources [S,...,D] or S tensors [...,D], norm_weight and proj_weight [D] or [1,D] -> [...,D].

    Arithmetic in float32 (float64 when the sources are), result in the sources' dtype. One source is returned as it is.
    """
    values = list(sources)
    if len(values) == 1:
        return values[0]
    kept = values[0].dtype
    dtype = torch.float64 if kept == torch.float64 else torch.float32
    values = [value.to(dtype) for value in values]
    shares = depth_weights(values, norm_weight, proj_weight, eps).unsqueeze(-2)
    mixed = values[0] * shares[..., 0]
    for index, value in enumerate(values[1:], 1):
        mixed = torch.addcmul(mixed, value, shares[..., index])
    return mixed.to(kept)


def depth_weights(sources: Sequence[Tensor], norm_weight: Tensor, proj_weight: Tensor, eps: float = 1e-5) -> Tensor:
    """How much each of the sources counts in `mix`: S tensors [...,D], as there, -> [...,S] that sum to 1."""
    dtype = torch.float64 if sources[0].dtype == torch.float64 else torch.float32
    query = norm_weight.flatten().to(dtype) * proj_weight.flatten().to(dtype)
    values = [value.to(dtype) for value in sources]
    with torch.autocast(query.device.type, enabled=False):
        scores = [(value @ query) * torch.rsqrt(value.square().mean(-1) + eps) for value in values]
    return torch.stack(scores, -1).softmax(-1)


class Site(nn.Module):
    """A place that reads the residual: a norm weight and a query. Queries start at zero, so every source counts the same."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.ones(config.hidden_size))
        self.proj = nn.Parameter(torch.zeros(1, config.hidden_size))
        self.eps = config.rms_norm_eps

    def forward(self, sources: Sequence[Tensor]) -> Tensor:
        return mix(sources, self.norm, self.proj, self.eps)


class Sum:
    """The plain residual stream."""

    def __init__(self, embedded: Tensor) -> None:
        self.total = embedded

    def sources(self) -> list[Tensor]:
        return [self.total]

    def seal(self, layer: int) -> None:
        pass

    def write(self, output: Tensor) -> None:
        self.total = self.total + output


class FullAttention:
    """Every sublayer output is a source."""

    def __init__(self, embedded: Tensor) -> None:
        self.outputs = [embedded]

    def sources(self) -> list[Tensor]:
        return list(self.outputs)

    def seal(self, layer: int) -> None:
        pass

    def write(self, output: Tensor) -> None:
        self.outputs.append(output)


class BlockAttention:
    """Sealed blocks and one running sum, in the order of Kimi K3."""

    def __init__(self, embedded: Tensor, block_size: int) -> None:
        self.blocks: list[Tensor] = []
        self.partial: Tensor | None = embedded
        self.block_size = block_size

    def sources(self) -> list[Tensor]:
        return [*self.blocks] if self.partial is None else [*self.blocks, self.partial]

    def seal(self, layer: int) -> None:
        """Called between the taking of a mixer's sources and the write of its output."""
        if layer % self.block_size == 0 and self.partial is not None:
            self.blocks.append(self.partial)
            self.partial = None

    def write(self, output: Tensor) -> None:
        self.partial = output if self.partial is None else self.partial + output


Stream = Sum | FullAttention | BlockAttention


def join(sources: Sequence[Tensor], site: Site | None) -> Tensor:
    """What a sublayer reads, [B,T,D]: the site's mix of the sources, or the one source of the plain stream."""
    return sources[0] if site is None else site(sources)


def start(config: ModelConfig, embedded: Tensor) -> Stream:
    """A forward pass's residual stream, from the embedded tokens [B,T,D]."""
    if config.residual == "full_attention":
        return FullAttention(embedded)
    if config.residual == "block_attention":
        return BlockAttention(embedded, config.attn_res_block_size)
    return Sum(embedded)
