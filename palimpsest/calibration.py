"""Rates of this machine, measured on this package's own operations; `palimpsest plan --device FILE` reads them.

On a CPU in float32, on a GPU in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from palimpsest import ops, residuals
from palimpsest.benchmark import machine, median_seconds
from palimpsest.config import ModelConfig
from palimpsest.mixers import MLA
from palimpsest.mixers.attention import causal_attention
from palimpsest.model import Model
from palimpsest.moe import Experts
from palimpsest.plan import flops
from palimpsest.plan.devices import FORMAT
from palimpsest.plan.times import form_of_mixer, form_of_mlp, forms
from palimpsest.progress import keep_memory
from palimpsest.state import Segments

ROWS = (1, 2, 4, 8, 16, 32, 128, 512, 2048)
LONG = (128, 512, 2048)  # of training
MANY = (8192, 32768)  # beside those on a GPU
Op = Callable[..., tuple[Tensor, Tensor]]
OPS: dict[str, Op] = {
    "linear_attention": lambda q, k, v, g, b, s: ops.linear_attention(q, k, v, state=s),
    "deltanet": lambda q, k, v, g, b, s: ops.delta_rule(q, k, v, b, state=s),
    "gated_deltanet": lambda q, k, v, g, b, s: ops.gated_delta_rule(q, k, v, g[..., 0], b, state=s),
    "kda": lambda q, k, v, g, b, s: ops.kda(q, k, v, g, b, state=s),
}
# Presets whose layers, too small to be work, tell what a sublayer costs for its calls alone.
TINY = ("gpt2-tiny", "smollm2-tiny", "linear-attention-tiny", "deltanet-tiny", "gated-deltanet-tiny", "kda-tiny")
TINY += ("kimi-linear-tiny", "hybrid-latent-moe-tiny")


def calibrate(device: torch.device) -> dict[str, Any]:
    """A calibration: operations or bytes a second by kind of work, fixed seconds of every sublayer, and the machine."""
    keep_memory()
    torch.manual_seed(0)
    with working_on(device):
        return _calibrate(device)


@contextmanager
def working_on(device: torch.device) -> Iterator[None]:
    """New tensors are there, and in the dtype that calibrations have there."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if device.type == "cpu" else torch.bfloat16)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)


def timed(work: Callable[[], Any], repeats: int) -> float:
    """The median seconds of `work`, without the detour that every call of torch takes where new tensors have a place."""
    with torch._C.DisableTorchFunction():
        return median_seconds(work, repeats)


def here() -> torch.device:
    """Where new tensors are made."""
    return torch.empty(0).device


def copies() -> int:
    """Sequences side by side in what is measured for its rate: a GPU is idle with one, and what it is asked for by one."""
    return 1 if here().type == "cpu" else 32


def _calibrate(device: torch.device) -> dict[str, Any]:
    many = () if device.type == "cpu" else MANY
    with torch.no_grad():
        found: dict[str, Any] = {
            "linear": [[rows, linear(rows)] for rows in (*ROWS, *many)],
            "head": [[rows, head(rows)] for rows in ROWS[:-1]],
            "experts": sorted(experts(tokens) for tokens in (*ROWS, *many)),
            "attention": attention(False),
            "cache": {"attention": cache(), "mla": latent_cache()},
            "chunks": {kind: recurrence(kind, 1024) for kind in OPS},
            "steps": {kind: recurrence(kind, 1) for kind in OPS},
            "bytes_per_s": elementwise(),
            "fixed_s": fixed(),
        }
    found["linear_training"] = [[rows, linear(rows, True)] for rows in (*LONG, *many)]
    found["head_training"] = head(LONG[1] if not many else many[0], True)
    found["experts_training"] = sorted(experts(tokens, True) for tokens in (*LONG, *many))
    found["attention_training"] = attention(True)
    found["chunks_training"] = {kind: recurrence(kind, 1024, training=True) for kind in OPS}
    facts = machine(device)
    dtype = "f32" if device.type == "cpu" else "bf16"
    about = {"calibration": FORMAT, "device": device.type, "dtype": dtype, "backend": ops.choose(1024, device)[0]}
    about["memory_bytes"] = facts["memory_bytes"]
    return {**about, "machine": facts, **found}


def linear(rows: int, training: bool = False) -> float:
    """Operations a second of x [rows,768] against matrices [3072,768]: for few rows so many that no cache holds them."""
    stack = [torch.randn(3072, 768, requires_grad=training) for _ in range(32 if rows <= 32 else 4)]
    x = torch.randn(rows, 768, requires_grad=training)

    def run() -> None:
        for weight in stack:
            y = F.linear(x, weight)
            if training:
                torch.autograd.grad(y, [x, weight], y.detach())

    return (3 if training else 1) * 2 * rows * len(stack) * 3072 * 768 / timed(run, 5)


def head(rows: int, training: bool = False) -> float:
    """Operations a second of logits over 32,768 words from x [rows,768]; in training of their loss and its gradients."""
    weight, x = torch.randn(32768, 768, requires_grad=training), torch.randn(rows, 768, requires_grad=training)
    targets = torch.zeros(rows, dtype=torch.long)

    def run() -> None:
        if training:
            ops.linear_cross_entropy(x, weight, targets).backward()
        else:
            F.linear(x, weight)

    return (3 if training else 1) * 2 * rows * weight.numel() / timed(run, 5)


def experts(tokens: int, training: bool = False) -> list[float]:
    """[rows an expert, operations a second] of 2 of 8 experts 256 wide at width 512, in layers enough to fill no cache."""
    config = ModelConfig.preset("kimi-linear-65m")
    layers = [Experts(config) for _ in range(6)]
    choice = torch.stack([torch.randperm(8)[:2] for _ in range(tokens)])
    x, weights = torch.randn(tokens, 512, requires_grad=training), torch.full((tokens, 2), 0.5)
    for layer in layers:
        layer.requires_grad_(training)

    def run() -> None:
        for layer in layers:
            y = layer(x, choice, weights)
            if training:
                torch.autograd.grad(y, [x, *layer.parameters()], y.detach())

    work = (3 if training else 1) * len(layers) * 6 * 2 * tokens * 256 * 512
    return [2 * tokens / len(choice.unique()), work / timed(run, 5)]


def attention(training: bool) -> float:
    """Unmasked operations a second of causal attention over 1,024 tokens, 12 heads of 64; in training forward and backward."""
    q, k, v = (x.requires_grad_(training) for x in torch.randn(3, copies(), 1024, 12, 64).unbind())
    segments = Segments((0,) * copies(), (1024,) * copies(), None, here())

    def run() -> None:
        o = causal_attention(q, k, v, segments, 0.125)
        if training:
            o.sum().backward()

    return (3 if training else 1) * copies() * 4 * 12 * 64 * 1024 * 1025 / 2 / timed(run, 5)


def cache() -> float:
    """Bytes a second of keys and values read by one query over 4,096 rows, in layers enough to fill no cache."""
    layers = [torch.randn(2, copies(), 4096, 12, 64) for _ in range(6)]
    q, segments = torch.randn(copies(), 1, 12, 64), Segments((4095,) * copies(), (1,) * copies(), None, here())

    def run() -> None:
        for k, v in layers:
            causal_attention(q, k, v, segments, 0.125)

    return sum(layer.nbytes for layer in layers) / timed(run, 5)


def latent_cache() -> float:
    """The same of the latents of MLA, in its absorbed form."""
    mixer, size = MLA(ModelConfig.preset("kimi-linear-65m")), 4096
    layers = [(torch.randn(copies(), size, mixer.rank), torch.randn(copies(), size, mixer.rope)) for _ in range(6)]
    query = torch.randn(copies(), 1, mixer.heads, mixer.nope), torch.randn(copies(), 1, mixer.heads, mixer.rope)
    segments = Segments((size - 1,) * copies(), (1,) * copies(), None, here())

    def run() -> None:
        for latent, shared in layers:
            mixer.attend_absorbed(*query, latent, shared, segments)

    return sum(x.nbytes + y.nbytes for x, y in layers) / timed(run, 5)


def recurrence(kind: str, tokens: int, training: bool = False) -> float:
    """Operations a second over many tokens, counted as chunks, or bytes of state a second for one; 8 heads of 64 x 64."""
    sizes = {"linear_num_key_heads": 8, "linear_num_value_heads": 8, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
    config = ModelConfig.preset("kda-tiny", **sizes)
    columns = 65 if kind == "linear_attention" else 64
    layers, drawn = 1 if tokens > 2 else 12, []
    for _ in range(layers):
        q, k, g = torch.randn(3, copies(), tokens, 8, 64).unbind()
        v, beta = torch.randn(copies(), tokens, 8, columns), torch.rand(copies(), tokens, 8)
        leaves = [x.requires_grad_(training) for x in (ops.l2norm(q), ops.l2norm(k), v, -0.1 * g.sigmoid(), beta)]
        drawn.append([*leaves, torch.zeros(copies(), 8, 64, columns, dtype=torch.float32)])

    def run() -> None:
        for values in drawn:
            o, _ = OPS[kind](*values)
            if training:
                torch.autograd.grad(o.sum(), values[:5], allow_unused=True)

    seconds = timed(run, 7)
    if tokens <= 2:
        return copies() * layers * 4 * 8 * 64 * columns / seconds
    return (
        copies()
        * (flops.recurrence(config, kind, tokens) + training * flops.recurrence_backward(config, kind, tokens))
        / seconds
    )


def elementwise() -> float:
    """Bytes a second of two operations on 1,024 tokens of 2,048 channels, by which five such tensors cross memory."""
    x, y = torch.randn(2, copies() * 1024, 2048).unbind()
    return 5 * x.nbytes / timed(lambda: F.silu(x) * y, 9)


def fixed() -> dict[str, float]:
    """Seconds of each kind of sublayer for one token of a tiny model, of a norm, of a residual's source, of a pass."""
    found: dict[str, float] = {}
    for preset in TINY:
        model = Model(ModelConfig.preset(preset)).eval()
        config = model.config
        ids = torch.ones(1, 1, dtype=torch.long)
        state = model(ids).state
        x, segments = torch.randn(1, 1, config.hidden_size), Segments((1,), (1,), None, here())
        blocks: list[Any] = list(model.layers)
        for index, (block, held) in enumerate(zip(blocks, state.layers, strict=True)):
            mixer, mlp = form_of_mixer(config, config.mixers[index]), form_of_mlp(config, config.mlps[index])
            if mixer not in found:
                found[mixer] = _brief(lambda b=block, h=held, y=x, s=segments: b.mixer(y, h, s))
            if mlp not in found:
                found[mlp] = _brief(lambda b=block, y=x: b.mlp(y))
        found.setdefault(f"norm {config.norm}", _brief(lambda n=model.norm, y=x: n(y) + y))
        if "pass" not in found:
            found["pass"] = 0.0
            whole = _brief(lambda m=model, i=ids, s=state: m(i, s))
            found["pass"] = max(whole - sum(count * found[form] for form, count in forms(config).items() if count), 0.0)
    values, weight = [torch.randn(1, 1, 64) for _ in range(4)], torch.ones(64)
    found["source"] = _brief(lambda: residuals.mix(values, weight, weight)) / 4
    return found


def _brief(work: Callable[[], Any], times: int = 20) -> float:
    """Seconds of something short, run some times in a row."""

    def run() -> None:
        for _ in range(times):
            work()

    return timed(run, 25) / times
