"""Rates of this machine, measured on this package's own operations in float32; `palimpsest plan --device FILE` reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from palimpsest import ops
from palimpsest.benchmark import machine, median_seconds
from palimpsest.config import ModelConfig
from palimpsest.mixers import MLA
from palimpsest.mixers.attention import causal_attention
from palimpsest.model import Model
from palimpsest.plan import flops
from palimpsest.plan.devices import FORMAT
from palimpsest.plan.times import calls
from palimpsest.state import Segments

ROWS = (1, 2, 4, 8, 32, 128, 512, 2048)
CPU = torch.device("cpu")
OPS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "linear_attention": lambda q, k, v, g, b, s: ops.linear_attention(q, k, v, state=s),
    "deltanet": lambda q, k, v, g, b, s: ops.delta_rule(q, k, v, b, state=s),
    "gated_deltanet": lambda q, k, v, g, b, s: ops.gated_delta_rule(q, k, v, g[..., 0], b, state=s),
    "kda": lambda q, k, v, g, b, s: ops.kda(q, k, v, g, b, state=s),
}


def calibrate() -> dict[str, Any]:
    """A calibration: operations or bytes a second by kind of work, seconds of a call, and the machine."""
    torch.manual_seed(0)
    with torch.no_grad():
        found = {
            "linear": [[rows, linear(rows)] for rows in ROWS],
            "attention": attention(),
            "cache": {"attention": cache(), "mla": latent_cache()},
            "chunks": {kind: recurrence(kind, 1024) for kind in OPS},
            "steps": {kind: recurrence(kind, 1) for kind in OPS},
            "bytes_per_s": elementwise(),
            "call_s": call(),
        }
    found["chunks_training"] = {kind: recurrence(kind, 1024, training=True) for kind in OPS}
    facts = machine()
    return {"calibration": FORMAT, "dtype": "f32", "memory_bytes": facts["memory_bytes"], "machine": facts, **found}


def linear(rows: int) -> float:
    """Operations a second of x [rows,768] against enough matrices [3072,768] that none stays in a cache."""
    stack = torch.randn(32 if rows <= 32 else 4, 3072, 768)
    x = torch.randn(rows, 768)

    def run() -> None:
        for weight in stack:
            F.linear(x, weight)

    return 2 * rows * stack.numel() / median_seconds(run, 5)


def attention() -> float:
    """Unmasked operations a second of causal attention over 1,024 tokens, 12 heads of 64."""
    q, k, v = torch.randn(3, 1, 1024, 12, 64).unbind()
    segments = Segments((0,), (1024,), None, CPU)
    seconds = median_seconds(lambda: causal_attention(q, k, v, segments, 0.125), 5)
    return 4 * 12 * 64 * 1024 * 1025 / 2 / seconds


def cache() -> float:
    """Bytes a second of keys and values read by one query over 4,096 rows, in layers enough to fill no cache."""
    layers = [torch.randn(2, 1, 4096, 12, 64) for _ in range(6)]
    q, segments = torch.randn(1, 1, 12, 64), Segments((4095,), (1,), None, CPU)

    def run() -> None:
        for k, v in layers:
            causal_attention(q, k, v, segments, 0.125)

    return sum(4 * layer.numel() for layer in layers) / median_seconds(run, 5)


def latent_cache() -> float:
    """The same of the latents of MLA, in its absorbed form."""
    config = ModelConfig.preset("kimi-linear-65m")
    mixer, size = MLA(config), 4096
    heads, rank, rope = mixer.heads, mixer.rank, mixer.rope
    layers = [(torch.randn(1, size, rank), torch.randn(1, size, rope)) for _ in range(6)]
    query = torch.randn(1, 1, heads, mixer.nope), torch.randn(1, 1, heads, rope)
    segments = Segments((size - 1,), (1,), None, CPU)

    def run() -> None:
        for latent, shared in layers:
            mixer.attend_absorbed(*query, latent, shared, segments)

    return 6 * 4 * size * (rank + rope) / median_seconds(run, 5)


def recurrence(kind: str, tokens: int, training: bool = False) -> float:
    """Operations a second of the chunked form, or bytes of state a second of a single token; 8 heads of 64 x 64."""
    config = ModelConfig.preset("kda-tiny", linear_num_key_heads=8, linear_num_value_heads=8)
    config = config.replace(linear_key_head_dim=64, linear_value_head_dim=64)
    shape, layers = (1, tokens, 8, 64), 1 if tokens > 2 else 12
    drawn: list[list[Tensor]] = []
    for _ in range(layers):
        q, k, v = torch.randn(3, *shape).unbind()
        q, k, g, beta = ops.l2norm(q), ops.l2norm(k), -0.1 * torch.rand(shape), torch.rand(shape[:3])
        drawn.append([x.requires_grad_(training) for x in (q, k, v, g, beta)] + [torch.zeros(1, 8, 64, 64)])
    run = _runner(OPS[kind], drawn, training)
    seconds = median_seconds(run, 5)
    if tokens <= 2:
        return layers * tokens * 4 * 8 * 64 * 64 / seconds
    done = flops.recurrence(config, kind, tokens)
    return (done + (flops.recurrence_backward(config, kind, tokens) if training else 0)) / seconds


def _runner(op: Callable[..., tuple[Tensor, Tensor]], drawn: list[list[Tensor]], training: bool) -> Callable[[], None]:
    def run() -> None:
        for values in drawn:
            o, _ = op(*values)
            if training:
                o.sum().backward()

    return run


def elementwise() -> float:
    """Bytes a second of reading two tensors and writing one, each of 1,024 tokens by 2,048 channels."""
    x, y = torch.randn(2, 1024, 2048).unbind()
    return 3 * 4 * x.numel() / median_seconds(lambda: F.silu(x) * y, 9) * 5 / 3  # two operations: five tensors cross memory


def call() -> float:
    """Seconds of a torch call with nothing to do: the decode step of a model too small for anything else."""
    model = Model(ModelConfig.preset("kda-tiny")).eval()
    ids = torch.ones(1, 1, dtype=torch.long)
    state = model(ids).state
    return median_seconds(lambda: model(ids, state), 25) / calls(model.config)
