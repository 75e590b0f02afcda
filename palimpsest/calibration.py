"""Rates of this machine, measured on this package's own operations; `palimpsest plan --device FILE` reads them.

On a CPU in float32, on a GPU in bfloat16.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from palimpsest import ops, residuals
from palimpsest.benchmark import machine, median_seconds
from palimpsest.config import ModelConfig, TrainConfig
from palimpsest.gradients import backward
from palimpsest.mixers import MLA
from palimpsest.mixers.attention import causal_attention
from palimpsest.model import Block, Model, norm_of
from palimpsest.moe import Experts
from palimpsest.ops.linear import FEW
from palimpsest.optim import make_optimizer
from palimpsest.plan import flops
from palimpsest.plan.devices import FORMAT
from palimpsest.plan.times import MOVED, form_of_mixer, form_of_mlp
from palimpsest.plan.training import Kept, norm
from palimpsest.progress import keep_memory
from palimpsest.state import Segments

ROWS = (1, 2, 4, 8, 16, 32, 128, 512, 2048)
LONG = (128, 512, 2048)  # of training
MANY = (8192, 32768)  # beside those on a GPU
Op = Callable[..., tuple[Tensor, Tensor]]
# As the mixers call them: norms and gate inside.
OPS: dict[str, Op] = {
    "linear_attention": lambda q, k, v, g, b, s, gate: ops.linear_attention(q, k, v, state=s),
    "deltanet": lambda q, k, v, g, b, s, gate: ops.delta_rule(q, k, v, b, state=s, qk_l2norm=True),
    "gated_deltanet": lambda q, k, v, g, b, s, gate: ops.gated_delta_rule(
        q, k, v, g[..., 0], b, state=s, A_log=gate[0], dt_bias=gate[1][::64], qk_l2norm=True
    ),
    "kda": lambda q, k, v, g, b, s, gate: ops.kda(q, k, v, g, b, state=s, A_log=gate[0], dt_bias=gate[1], qk_l2norm=True),
}
# Layers too small to be work, which tell what a layer costs for its calls alone: preset, mixer, MLP, other fields. What one of
# them brings that those before it did not is found by subtraction.
TINY: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    *((f"{kind.replace('_', '-')}-tiny", kind, "swiglu", {}) for kind in OPS),
    ("smollm2-tiny", "attention", "swiglu", {}),
    ("smollm2-tiny", "attention", "swiglu", {"position": "none"}),
    ("gpt2-tiny", "attention", "gelu", {}),
    ("kimi-linear-tiny", "mla", "swiglu", {}),
    ("kimi-linear-tiny", "kda", "moe", {}),
    ("hybrid-latent-moe-tiny", "kda", "situ", {}),
    ("hybrid-latent-moe-tiny", "kda", "moe", {}),
    ("hybrid-latent-moe-tiny", "mla", "situ", {}),
)
SHALLOW, DEEP = 2, 10  # layers


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


def long() -> int:
    """Tokens of a recurrence by chunks: on a GPU so many that the host's calls are no part of the time."""
    return 1024 if here().type == "cpu" else 8192


def _calibrate(device: torch.device) -> dict[str, Any]:
    many = () if device.type == "cpu" else MANY
    with torch.no_grad():
        found: dict[str, Any] = {
            "linear": [[rows, linear(rows)] for rows in (*ROWS, *many)],
            "head": [[rows, head(rows)] for rows in ROWS[:-1]],
            "experts": sorted(experts(tokens) for tokens in (*ROWS, *many)),
            "attention": attention(False),
            "cache": {"attention": cache(), "mla": latent_cache()},
            "chunks": {kind: recurrence(kind, long()) for kind in OPS},
            "steps": {kind: recurrence(kind, 1) for kind in OPS},
            "bytes_per_s": elementwise(),
        }
    found["linear_training"] = [[rows, linear(rows, True)] for rows in (*LONG, *many)]
    rows = LONG[1] if not many else many[0]
    found["head_training"] = {"whole eights": head(rows, True), "odd": head(rows, True, 32767)}
    found["experts_training"] = sorted(experts(tokens, True) for tokens in (*LONG, *many))
    found["attention_training"] = attention(True)
    found["chunks_training"] = {kind: recurrence(kind, long(), training=True) for kind in OPS}
    found["elementwise_training"] = {kind: elementwise_training(kind) for kind in ("rms", "layer")}
    found["optimizer"] = optimizer()
    found["fixed_s"] = {kind: fixed(kind) for kind in ("decode", "prefill", "training")}
    facts = machine(device)
    dtype = "f32" if device.type == "cpu" else "bf16"
    about = {"calibration": FORMAT, "device": device.type, "dtype": dtype, "backend": ops.choose(1024, device)[0]}
    about["memory_bytes"] = facts["memory_bytes"]
    return {**about, "machine": facts, **found}


def linear(rows: int, training: bool = False) -> float:
    """Operations a second of x [rows,768] against matrices [3072,768]: for few rows so many that no cache holds them. A step
    on a CPU takes them inside its sublayers: there those of SwiGLU, 768 wide."""
    if _is_step(rows, training):
        config = ModelConfig.preset("kda-124m")
        blocks = _blocks(config)
        return 2 * rows * len(blocks) * 3 * 768 * config.intermediate_size / _step_seconds(blocks, torch.randn(rows, 1, 768))
    stack = [torch.randn(3072, 768, requires_grad=training) for _ in range(32 if rows <= 32 else 4)]
    x = torch.randn(rows, 768, requires_grad=training)

    def run() -> None:
        for weight in stack:
            y = ops.linear(x, weight)
            if training:
                torch.autograd.grad(y, [x, weight], y.detach())

    return (3 if training else 1) * 2 * rows * len(stack) * 3072 * 768 / timed(run, 5)


def head(rows: int, training: bool = False, words: int = 32768) -> float:
    """Operations a second of logits from x [rows,768]; in training of their loss and its gradients. A GPU's products may want
    rows of whole 16 bytes, which a vocabulary of an odd size does not give them."""
    heads = [torch.randn(words, 768, requires_grad=training) for _ in range(4 if rows <= 32 else 1)]  # no cache holds them all
    x, targets = torch.randn(rows, 768, requires_grad=training), torch.zeros(rows, dtype=torch.long)

    def run() -> None:
        for weight in heads:
            if training:
                ops.linear_cross_entropy(x, weight, targets).backward()
            else:
                ops.linear(x, weight)

    return (3 if training else 1) * 2 * rows * len(heads) * words * 768 / timed(run, 5)


def experts(tokens: int, training: bool = False) -> list[float]:
    """[rows an expert, operations a second] of 2 of 8 experts 256 wide at width 512, in layers enough to fill no cache."""
    if _is_step(tokens, training):
        return _experts_of_a_step(tokens)
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


def _experts_of_a_step(tokens: int) -> list[float]:
    blocks = _blocks(ModelConfig.preset("kimi-linear-65m", num_shared_experts=0))
    x = torch.randn(tokens, 1, 512)
    used = sum(len(block.mlp.gate(block.mlp_norm(x).flatten(0, 1))[0].unique()) for block in blocks) / len(blocks)
    return [2 * tokens / used, len(blocks) * 6 * 2 * tokens * 256 * 512 / _step_seconds(blocks, x)]


def _is_step(rows: int, training: bool) -> bool:
    """Whether so many rows may be a decoding step that goes by whole sublayers (step.py), whose calls are then measured."""
    return here().type == "cpu" and rows <= FEW and not training


def _blocks(config: ModelConfig) -> list[Any]:
    """Layers with the last MLP of a configuration, more than a cache holds, that choose their experts by chance."""
    blocks: list[Any] = [Block(config, config.num_hidden_layers - 1) for _ in range(12)]
    for block in blocks:
        for weight in block.mlp.parameters():
            weight.normal_(0, 0.02)
    return blocks


def _step_seconds(blocks: list[Any], x: Tensor) -> float:
    """Seconds of their MLPs for x [rows,1,D], a token of each of so many sequences."""
    segments = Segments((1,) * len(x), (1,) * len(x), None, here())
    return timed(lambda: [block._feed([x], segments) for block in blocks], 9)


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
    layers = [torch.randn(copies(), size, mixer.rank + mixer.rope) for _ in range(6)]
    query = torch.randn(copies(), 1, mixer.heads, mixer.rank + mixer.rope)
    segments = Segments((size - 1,) * copies(), (1,) * copies(), None, here())

    def run() -> None:
        for rows in layers:
            key = rows.unsqueeze(2)
            causal_attention(query, key, key[..., : mixer.rank], segments, 0.125)

    return sum(rows.nbytes for rows in layers) / timed(run, 5)


def recurrence(kind: str, tokens: int, training: bool = False) -> float:
    """Operations a second over many tokens, counted as chunks, or bytes of state a second for one; 8 heads of 64 x 64. One
    token each of so many sequences that the call is no part of the time."""
    sizes = {"linear_num_key_heads": 8, "linear_num_value_heads": 8, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
    config = ModelConfig.preset("kda-tiny", **sizes)
    columns = 65 if kind == "linear_attention" else 64
    layers, drawn, batch = 1 if tokens > 2 else 12, [], copies() if tokens > 2 else max(copies(), 16)
    for _ in range(layers):
        q, k, g = torch.randn(3, batch, tokens, 8, 64).unbind()
        v, beta = torch.randn(batch, tokens, 8, columns), torch.rand(batch, tokens, 8, dtype=torch.float32)
        leaves = [x.requires_grad_(training) for x in (q, k, v, g, beta)]
        drawn.append([*leaves, torch.zeros(batch, 8, 64, columns, dtype=torch.float32)])
    gate = torch.zeros(8, dtype=torch.float32), torch.full((512,), -4.0, dtype=torch.float32)  # forgets 2 % a token

    def run() -> None:
        for values in drawn:
            o, _ = OPS[kind](*values, gate)
            if training:
                torch.autograd.grad(o.sum(), values[:5], allow_unused=True)

    seconds = timed(run, 7)
    if tokens <= 2:
        return batch * layers * 4 * 8 * 64 * columns / seconds
    work = flops.recurrence(config, kind, tokens) + training * flops.recurrence_backward(config, kind, tokens)
    return batch * work / seconds


def elementwise() -> float:
    """Bytes a second of two operations on 1,024 tokens of 2,048 channels, by which five such tensors cross memory."""
    x, y = torch.randn(2, copies() * 1024, 2048).unbind()
    return 5 * x.nbytes / timed(lambda: F.silu(x) * y, 9)


def elementwise_training(kind: str) -> float:
    """Bytes a second of a norm of this kind, an activation and a sum, forward and backward, counted as plans count them."""
    config = ModelConfig.preset("gpt2-tiny" if kind == "layer" else "kda-tiny", hidden_size=768)
    layer = norm_of(config)
    x, rows = torch.randn(copies(), 1024, 768, requires_grad=True), copies() * 1024
    kept = (norm(config) + Kept(768)).num_bytes("f32" if x.dtype == torch.float32 else "bf16")

    def run() -> None:
        y = x + F.silu(layer(x))
        torch.autograd.grad(y, [x, *layer.parameters()], y.detach())

    return 3 * MOVED * rows * kept / timed(run, 9)


def optimizer() -> float:
    """Parameters a second of the optimiser's step."""
    model = Model(ModelConfig.preset("gpt2-124m", num_hidden_layers=2))
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    return model.num_parameters() / timed(make_optimizer(model, TrainConfig()).step, 5)


def work_of(model: Model, kind: str, ids: Tensor) -> Callable[[], Any]:
    """A decoding step behind ids [B,T], which goes on from call to call; their prefill; or forward and backward over them."""
    if kind == "training":

        def train() -> None:
            model.zero_grad()
            backward(model, [(ids, ids, None)])

        return train
    if kind == "prefill":
        return torch.no_grad()(lambda: model.logits(model.hidden(ids)[0][:, -1:]))
    with torch.no_grad():
        state = model.hidden(ids)[1]

    def decode() -> None:
        nonlocal state  # behind an old state the past would be copied
        state = model(ids[:, -1:], state).state

    return torch.no_grad()(decode)


def fixed(kind: str) -> dict[str, float]:
    """Seconds of each form of layer in whole passes of tiny models, where they are one among others, and of a pass with none.

    A layer is one mixer and one MLP, so that only their sum can be told: SwiGLU is counted with the mixers, and other MLPs are
    what they take more. A residual's source is timed alone.
    """
    found: dict[str, float] = {form_of_mlp(ModelConfig.preset("kda-tiny"), "swiglu"): 0.0}
    # No work for either; on a GPU so many that the kernels for chunks are what is called.
    ids = torch.ones(1, 8 if kind == "decode" or here().type == "cpu" else 128, dtype=torch.long)
    for preset, mixer, mlp, changes in TINY:
        config = ModelConfig.preset(preset, **changes)
        few, many = (work_of(_tiny(config, mixer, mlp, layers), kind, ids) for layers in (SHALLOW, DEEP))
        pairs = [(timed(few, 1), timed(many, 1)) for _ in range(15)]  # in turn: what slows the machine slows both
        layer = statistics.median(slow - fast for fast, slow in pairs) / (DEEP - SHALLOW)
        forms = form_of_mixer(config, mixer), form_of_mlp(config, mlp)
        (new,) = [form for form in forms if form not in found]
        found[new] = layer - sum(found[form] for form in forms if form != new)
        found.setdefault("pass", statistics.median(fast for fast, _ in pairs) - SHALLOW * layer)
    found["source"] = _source(kind)
    return found


def _tiny(config: ModelConfig, mixer: str, mlp: str, layers: int) -> Model:
    """Such layers behind the first one of the configuration, without which its other fields would not fit."""
    mixers, mlps = ((first, *[other] * (layers - 1)) for first, other in ((config.mixers[0], mixer), (config.mlps[0], mlp)))
    return Model(replace(config, num_hidden_layers=layers, mixers=mixers, mlps=mlps))


def _source(kind: str) -> float:
    """Seconds of one of the sources that a site mixes."""
    training = kind == "training"
    values = [torch.randn(1, 1, 64, requires_grad=training) for _ in range(4)]
    weight = torch.ones(64, requires_grad=training)

    def run() -> None:
        for _ in range(20):
            mixed = residuals.mix(values, weight, weight)
            if training:
                torch.autograd.grad(mixed, [*values, weight], mixed.detach())

    with torch.set_grad_enabled(training):
        return timed(run, 25) / 20 / len(values)
