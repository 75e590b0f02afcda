"""Experts that stay on disk: a layer reads those that its tokens chose, and the latest ones are kept.

All layers share one cache, bounded in bytes; what was used least recently leaves it first. A layer asks for all that it lacks
before it reads the first, so that the disk works on them side by side. Reading goes through the system's page cache, whose
memory the system takes back when it is wanted elsewhere.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from palimpsest import ops, shards
from palimpsest.config import ModelConfig
from palimpsest.moe import Experts
from palimpsest.shards import Stored

Parts = dict[str, Tensor]


class ExpertCache:
    """The experts read last, at most `limit` bytes of them, by layer and number; and how often they were found here."""

    def __init__(self, limit: int) -> None:
        self.limit, self.held = limit, 0
        self.hits = self.misses = self.bytes_read = 0
        self._experts: OrderedDict[tuple[int, int], Parts] = OrderedDict()
        self._files = shards.Scattered()

    @property
    def hit_rate(self) -> float:
        """The share of wanted experts that needed no reading; 0 before the first."""
        return self.hits / max(self.hits + self.misses, 1)

    def expect(self, layer: int, experts: Iterable[int], sources: Sequence[Mapping[str, tuple[str, Stored]]]) -> None:
        """Lets the system begin to fetch those of these experts that are not here, all at once."""
        for expert in experts:
            if (layer, expert) not in self._experts:
                for _, stored in sources[expert].values():
                    self._files.expect(stored)

    def get(self, layer: int, expert: int, parts: Mapping[str, tuple[str, Stored]]) -> Parts:
        """The tensors of an expert, by our names; read, and finite, when they are not here."""
        key = (layer, expert)
        if key in self._experts:
            self.hits += 1
            self._experts.move_to_end(key)
            return self._experts[key]
        self.misses += 1
        size = sum(stored.num_bytes for _, stored in parts.values())
        while self._experts and self.held + size > self.limit:
            _, old = self._experts.popitem(last=False)
            self.held -= sum(tensor.nbytes for tensor in old.values())
        found = {name: shards.values(published, stored, self._files.raw) for name, (published, stored) in parts.items()}
        self.bytes_read += size
        if size <= self.limit:
            self._experts[key] = found
            self.held += size
        return found


class DiskExperts(Experts):
    """The routed experts of one layer, read from disk when a token chose them. They are not trained, moved or saved."""

    def __init__(self, config: ModelConfig, layer: int, cache: ExpertCache) -> None:
        super().__init__(config)
        self.layer, self.cache = layer, cache
        self.sources: list[dict[str, tuple[str, Stored]]] = [{} for _ in range(self.count)]
        self.unread = 0  # values on disk

    def add_matrices(self, name: str, count: int, rows: int, columns: int) -> None:
        """None in memory."""

    def add_source(self, part: str, names: Sequence[str], stored: Mapping[str, Stored]) -> None:
        """Where the tensors of all experts that we call `part` lie, expert by expert."""
        for expert, name in enumerate(names):
            self.sources[expert][part] = (name, stored[name])
        values = 0 if part.endswith("_scale") else 2 if part.endswith("_packed") else 1
        self.unread += values * sum(torch.Size(stored[name].shape).numel() for name in names)

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """As `Experts`, expert by expert, so that one at a time is held beside the cache."""
        order = experts.flatten().argsort(stable=True)
        counts = experts.flatten().bincount(minlength=self.count).tolist()
        self.cache.expect(self.layer, (expert for expert, count in enumerate(counts) if count), self.sources)
        pieces = [x.new_zeros(0, x.shape[1])]
        for expert, rows in enumerate(x[order // experts.shape[1]].split(counts)):
            if len(rows):
                parts = self.cache.get(self.layer, expert, self.sources[expert])
                gate, up = (_product(rows, parts, name) for name in ("gate_proj", "up_proj"))
                pieces.append(_product(self.activation(gate, up), parts, "down_proj"))
        y = torch.cat(pieces).to(weights.dtype)[order.argsort()].unflatten(0, experts.shape)
        return (y * weights.unsqueeze(-1)).sum(1).to(x.dtype)


def _product(x: Tensor, parts: Parts, name: str) -> Tensor:
    if name in parts:
        return F.linear(x, parts[name].to(x.dtype))
    return ops.mxfp4_matmul(x, parts[f"{name}_packed"], parts[f"{name}_scale"])


def place(model: nn.Module, config: ModelConfig, limit: int) -> dict[str, DiskExperts]:
    """Puts DiskExperts with one cache of `limit` bytes in place of a model's experts; returns them by their names."""
    cache, placed = ExpertCache(limit), {}
    for name, module in list(model.named_modules()):
        if isinstance(module, Experts):
            layer = int(name.split(".")[1])
            placed[name] = DiskExperts(config, layer, cache)
            model.get_submodule(name.rpartition(".")[0]).experts = placed[name]
    return placed
