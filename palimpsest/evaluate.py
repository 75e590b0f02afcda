"""What a model knows and what a memory keeps.

Losses are nats per token, and bits per byte of text so that tokenizers do not matter. The readout experiments need no
training: they write pairs into a bare memory and read them back.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from palimpsest import ops
from palimpsest.model import Model

MEMORIES = ("additive", "delta", "gated", "per_channel")


def bits_per_byte(nats_per_token: float, bytes_per_token: float) -> float:
    """Nats per token of a text whose tokens stand for `bytes_per_token` bytes on average, as bits per byte."""
    return nats_per_token / math.log(2) / bytes_per_token


@torch.no_grad()
def loss_by_position(model: Model, tokens: np.ndarray | Tensor, context_length: int, windows: int) -> Tensor:
    """Mean nats per token at every position of a window, float64 [context_length - 1].

    Entry i is the loss of token i + 1 given tokens 0..i. Uses the first `windows` whole windows of the token array.
    """
    windows = min(windows, len(tokens) // context_length)
    if windows < 1:
        raise ValueError(f"{len(tokens)} tokens are fewer than one window of {context_length}")
    total = torch.zeros(context_length - 1, dtype=torch.float64)
    was_training = model.training
    model.eval()
    for start in range(0, windows, 8):
        rows = [tokens[i * context_length : (i + 1) * context_length] for i in range(start, min(start + 8, windows))]
        ids = torch.stack([torch.as_tensor(np.asarray(row).astype(np.int64)) for row in rows])
        logits = model(ids).logits
        losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
        total += losses.double().sum(0)
    model.train(was_training)
    return total / windows


def position_buckets(losses: Tensor, bytes_per_token: float) -> list[dict[str, float | int]]:
    """Losses by position, averaged over ranges that double in length, in bits per byte."""
    buckets, start, end = [], 0, 4
    while start < len(losses):
        end = min(end, len(losses))
        mean = float(losses[start:end].mean())
        buckets.append({"start": start + 1, "end": end, "bits_per_byte": bits_per_byte(mean, bytes_per_token)})
        start, end = end, end * 2
    return buckets


def readout(
    pairs: list[int], key_dim: int = 64, value_dim: int = 64, cosine: float = 0.5, trials: int = 8, seed: int = 0
) -> dict[str, Any]:
    """Untrained memories: n key-value pairs are written once each, then every key is read back.

    Reports the relative error ||read - value|| / ||value|| (root mean square over pairs and trials) for each of MEMORIES,
    for random unit keys and for keys whose expected pairwise cosine is `cosine`; and after one of 16 keys is written a
    second time with a new value, the error against the new and against the old value. The delta family writes with
    beta = 1. `gated` fades by the same log decay in every channel; `per_channel` fades half of the channels at twice that
    rate and keeps the other half, so that the mean rate is the same.
    """
    generator = torch.Generator().manual_seed(seed)
    memories = _memories(key_dim, decay=-0.01)
    result: dict[str, Any] = {"key_dim": key_dim, "value_dim": value_dim, "cosine": cosine}
    result["gate"] = (
        "gated: log decay -0.01 a step in every channel; per-channel: -0.02 in half of the channels and 0 in the others"
    )
    for name, rho in (("random", 0.0), ("correlated", cosine)):
        rows = []
        for count in pairs:
            k = _keys(trials, count, key_dim, rho, generator)
            v = torch.randn(trials, count, 1, value_dim, generator=generator, dtype=torch.float64)
            errors = {m: _relative(_recall(write, k, v, k), v) for m, write in memories.items()}
            rows.append({"pairs": count, **errors})
        result[name] = rows
    k = _keys(trials, 16, key_dim, 0.0, generator)
    v = torch.randn(trials, 17, 1, value_dim, generator=generator, dtype=torch.float64)
    twice = torch.cat([k, k[:, :1]], 1)
    result["overwrite"] = []
    for memory, write in memories.items():
        read = _recall(write, twice, v, k[:, :1])
        new, old = _relative(read, v[:, 16:]), _relative(read, v[:, :1])
        result["overwrite"].append({"memory": memory, "error_new": new, "error_old": old})
    return result


Write = Callable[[Tensor, Tensor], Tensor]


def _memories(key_dim: int, decay: float) -> dict[str, Write]:
    """Each memory as a function that writes k [B,n,1,K], v [B,n,1,V] and returns the state [B,1,K,V]."""
    channels = torch.zeros(key_dim, dtype=torch.float64)
    channels[: key_dim // 2] = 2 * decay

    def ones(k: Tensor) -> Tensor:
        return k.new_ones(k.shape[:3])

    return {
        "additive": lambda k, v: ops.linear_attention(k, k, v)[1],
        "delta": lambda k, v: ops.delta_rule(k, k, v, ones(k))[1],
        "gated": lambda k, v: ops.gated_delta_rule(k, k, v, decay * ones(k), ones(k))[1],
        "per_channel": lambda k, v: ops.kda(k, k, v, channels.expand_as(k), ones(k))[1],
    }


def _keys(trials: int, count: int, dim: int, cosine: float, generator: torch.Generator) -> Tensor:
    """Unit keys [trials,count,1,dim] float64 with the given expected pairwise cosine."""

    def unit(*shape: int) -> Tensor:
        return F.normalize(torch.randn(*shape, generator=generator, dtype=torch.float64), dim=-1)

    shared, own = unit(trials, 1, 1, dim), unit(trials, count, 1, dim)
    return F.normalize(math.sqrt(cosine) * shared + math.sqrt(1 - cosine) * own, dim=-1)


def _recall(write: Write, k: Tensor, v: Tensor, probes: Tensor) -> Tensor:
    return torch.einsum("bhkv,bnhk->bnhv", write(k, v), probes)


def _relative(read: Tensor, value: Tensor) -> float:
    return float((read - value).square().sum().sqrt() / value.square().sum().sqrt())
