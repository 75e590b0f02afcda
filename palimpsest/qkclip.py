"""QK-clip (MuonClip, arXiv 2507.20534): after a step, heads whose attention logits grew too large are scaled down.

    S_h = the largest q . k scale of head h in the step        gamma_h = min(1, threshold / S_h)

The weights of q and k take gamma^1/2 each, so that the logit itself takes gamma. In MLA the part of a key that all heads
share stays as it is, and the queries on it take all of gamma. Where heads share a key, it takes the root of their smallest
gamma, and each query the rest of its own. Heads whose queries and keys are normed have bounded logits and are left alone.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from palimpsest.distributed import local, part_of
from palimpsest.mixers import MLA, Attention
from palimpsest.model import Model
from palimpsest.optim import AdamW

if TYPE_CHECKING:
    from palimpsest.muon import MuonAndAdamW

ROWS = 256  # queries whose logits are looked at together


class QKClip:
    """Watches the softmax layers of a model in training and scales their heads after each optimiser step."""

    def __init__(self, model: Model, optimizer: AdamW | MuonAndAdamW, threshold: float) -> None:
        self.threshold = threshold
        named = dict(model.named_parameters())
        # The weights that the optimiser moves: float32 copies where the model's are of lower precision.
        moved = {name: p for g in optimizer.param_groups for name, p in zip(g["param_names"], g["params"], strict=True)}
        self.pairs = {name: (named[name], moved[name]) for name in named if name in moved}
        self.layers: list[tuple[str, Attention | MLA]] = []
        for name, module in model.named_modules():
            if isinstance(module, MLA) or (isinstance(module, Attention) and module.q_norm is None):
                self.layers.append((name, module))
        # Made once: a compiled graph looks whether they are still the same.
        self.observers: list[Any] = [torch.compiler.disable(partial(self._see, number)) for number in range(len(self.layers))]
        self.largest: list[Tensor] = []

    def begin(self) -> None:
        """Call before the first micro-batch of a step."""
        self.largest = [torch.zeros(module.heads) for _, module in self.layers]
        for number, (_, module) in enumerate(self.layers):
            module.observe = self.observers[number]

    @torch.no_grad()
    def end(self) -> None:
        """Scales what exceeded the threshold, and stops watching."""
        for _, module in self.layers:
            module.observe = None
        if not self.layers:
            return
        together = torch.cat(self.largest)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(together, torch.distributed.ReduceOp.MAX)
        self.largest = list(together.split([len(x) for x in self.largest]))
        for (name, module), seen in zip(self.layers, self.largest, strict=True):
            gamma = (self.threshold / seen).clamp(max=1)  # a head that saw nothing divides to infinity
            if bool((gamma < 1).any()):
                self._scale(name, module, gamma)

    def metrics(self) -> dict[str, float]:
        """Of the last step: the largest logit of any head, before clipping."""
        return {"max_attention_logit": max(float(x.max()) for x in self.largest)} if self.largest else {}

    @torch.no_grad()
    def _see(self, number: int, q: Tensor, k: Tensor, past: tuple[int, ...], scale: float) -> None:
        if self.layers[number][1].training and q.numel():
            found = largest_logits(q, k, past, scale)
            seen = self.largest[number] = self.largest[number].to(found)
            torch.maximum(seen, found, out=seen)

    def _scale(self, name: str, module: Attention | MLA, gamma: Tensor) -> None:
        root = gamma.sqrt()
        if isinstance(module, MLA):
            query = "q_proj" if hasattr(module, "q_proj") else "q_b_proj"
            self._rows(f"{name}.{query}", torch.cat([_spread(root, module.nope), _spread(gamma, module.rope)], 1))
            ones = torch.ones_like(_spread(gamma, module.value_dim))
            self._rows(f"{name}.kv_b_proj", torch.cat([_spread(root, module.nope), ones], 1))
            return
        shared = gamma.view(module.kv_heads, -1).amin(1)
        queries = gamma / shared.sqrt().repeat_interleave(module.heads // module.kv_heads)
        self._rows(f"{name}.q_proj", _spread(queries, module.head_dim))
        self._rows(f"{name}.k_proj", _spread(shared.sqrt(), module.head_dim))

    def _rows(self, name: str, factors: Tensor) -> None:
        """Multiplies the rows of a map, and its bias, by factors [heads, rows of a head]."""
        for part in ("weight", "bias"):
            if f"{name}.{part}" in self.pairs:
                own, moved = self.pairs[f"{name}.{part}"]
                column = factors.reshape(-1, *[1] * (own.dim() - 1)).to(moved.device)
                local(moved).mul_(part_of(column, moved).to(moved.dtype))
                if own is not moved:
                    own.copy_(moved)


def _spread(values: Tensor, channels: int) -> Tensor:
    return values.unsqueeze(1).expand(-1, channels)


def largest_logits(q: Tensor, k: Tensor, past: tuple[int, ...], scale: float) -> Tensor:
    """Of each head [H], in float32: q [B,T,H,D] against the k [B,S,Hkv,D] that it sees; past as in `causal_attention`."""
    keys = k.float().repeat_interleave(q.shape[2] // k.shape[2], 2)
    place = torch.arange(k.shape[1], device=q.device)
    first = torch.tensor(past, device=q.device).view(-1, 1, 1, 1)
    found = []
    for start in range(0, q.shape[1], ROWS):
        block = q[:, start : start + ROWS].float()
        logits = torch.einsum("bthd,bshd->bhts", block, keys) * scale
        mine = first + torch.arange(start, start + block.shape[1], device=q.device).view(-1, 1)
        found.append(logits.masked_fill(place > mine, float("-inf")).amax((0, 2, 3)))
    return torch.stack(found).amax(0)
