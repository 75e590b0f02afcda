"""Times from a roofline: each kind of work takes the longer of its arithmetic and its traffic, kinds follow one another.

    t = sum over kinds of max( flops / (peak efficiency), bytes / (bandwidth efficiency) ) + communication     (table devices)
    t = sum over kinds of flops / measured rate + bytes / measured rate + fixed time of every layer            (calibrations)

A GPU works while it is being asked for more: the calibrated time of a pass, in training forward and backward, is the longer
of the work and the fixed times (`calls`). The optimiser's step, before which the loss is waited for, comes on top.

Bytes of a pass: all weights but those of experts no token chose, E (1 - (1 - k/E)^tokens) of which are expected to be read;
keys and values or latents once; recurrent matrices read and written.

Several devices: linear maps are cut over `tensor` devices of a host (two all-reduces of [tokens, D] a layer), sequences are
dealt out to groups of such devices, experts lie spread over all devices (each token's vector goes to k of them and back).
A group cuts keys and values by heads and latents by tokens; an engine that copies latents needs `tensor` times the room.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

from palimpsest.config import LINEAR_MIXERS, ModelConfig
from palimpsest.plan import flops
from palimpsest.plan.counts import SIZES, weights
from palimpsest.plan.devices import BANDWIDTH_EFFICIENCY, EFFICIENCY, Device, rate_of
from palimpsest.plan.memory import conv_bytes, kv_bytes_per_token, kv_values, recurrent_bytes, recurrent_values
from palimpsest.plan.training import activations, recurrence_keeps, sources

MESSAGE_S = 10e-6  # latency of one collective operation
USABLE = 0.9  # of a device's memory, for weights and states
MOVED = 3  # times that an elementwise result crosses memory: two reads, one write


class Cut(NamedTuple):
    """How devices share the work."""

    devices: int
    tensor: int

    @property
    def groups(self) -> int:
        return self.devices // self.tensor


def cut_over(device: Device, num_devices: int) -> Cut:
    """Tensor parallelism inside a host, experts over all devices."""
    tensor = min(num_devices, device.devices_per_host)
    return Cut(num_devices, tensor if num_devices % tensor == 0 else 1)


@dataclass(frozen=True)
class Held:
    """Bytes on one device: the trunk's part, the experts' part, and one sequence's state by kind."""

    trunk: float
    experts: float
    kv_per_token: float
    fixed: float  # recurrent and convolution
    groups: int

    def total(self, context: int, batch: int) -> float:
        return self.trunk + self.experts + -(-batch // self.groups) * (context * self.kv_per_token + self.fixed)

    def largest_batch(self, context: int, room: float) -> int:
        left = room - self.trunk - self.experts
        each = context * self.kv_per_token + self.fixed
        return max(int(left // each), 0) * self.groups if each else 0

    def largest_context(self, batch: int, room: float) -> int | None:
        """None: any context fits."""
        rows = -(-batch // self.groups)
        left = room - self.trunk - self.experts - rows * self.fixed
        if left < 0:
            return 0
        return int(left // (rows * self.kv_per_token)) if self.kv_per_token else None


def held(config: ModelConfig, dtype: str, cut: Cut) -> Held:
    """Keys and values go with their heads, and a latent, which serves all heads, with its token: a group cuts its cache."""
    trunk = experts = 0
    for row in weights(config):
        if row.is_expert:
            experts += row.num_bytes(dtype)
        else:
            trunk += row.num_bytes(dtype)
    heads_cut = min(cut.tensor, config.num_key_value_heads)
    kv = sum(kv_values(config, kind) / (heads_cut if kind == "attention" else cut.tensor) for kind in config.mixers)
    fixed = (recurrent_bytes(config) + conv_bytes(config, dtype)) / cut.tensor
    return Held(trunk / cut.tensor, experts / cut.devices, SIZES[dtype] * kv, fixed, cut.groups)


def touched(config: ModelConfig, tokens: float) -> float:
    """Share of the experts that so many tokens are expected to use, when all are equally liked."""
    return 1 - (1 - config.num_experts_per_token / config.num_experts) ** tokens


def pass_seconds(
    config: ModelConfig,
    dtype: str,
    device: Device,
    cut: Cut,
    batch: int,
    tokens: int,
    past: int,
    logits: int,
    chunk: int = 64,
) -> dict[str, float]:
    """Seconds of one forward pass by kind of work, and `total`; `logits` rows of each sequence go through the head. A
    calibration was measured with the chunks that run on its machine; `chunk` does not change its times."""
    if device.measured is not None:
        parts = _measured(config, dtype, device.measured, batch, tokens, past, logits)
    else:
        parts = _roofline(config, dtype, device, cut, batch, tokens, past, logits, chunk)
    return {**parts, "total": _total(parts, device)}


def _total(parts: dict[str, float], device: Device) -> float:
    whole, apart = sum(parts.values()), parts.get("optimizer", 0.0)
    if device.measured is not None and device.measured.get("device") == "cuda":
        return max(parts["calls"], whole - parts["calls"] - apart) + apart
    return whole


def _roofline(
    c: ModelConfig, dtype: str, device: Device, cut: Cut, batch: int, tokens: int, past: int, logits: int, chunk: int
) -> dict[str, float]:
    peak, bandwidth = device.flops_per_s * EFFICIENCY, device.bytes_per_s * BANDWIDTH_EFFICIENCY
    mine = -(-batch // cut.groups)  # sequences of one group
    ops, moved = flops.forward(c, mine, tokens, past, logits, chunk), traffic(c, dtype, cut, batch, tokens, past)
    work = {
        "linear": (ops["linear"] + ops["head"]) / cut.tensor,
        "experts": ops["experts"] * cut.groups / cut.devices,
        "attention": causal(ops["attention"], tokens, past) / cut.tensor,
        "recurrence": ops["recurrence"] / cut.tensor,
    }
    parts = {kind: max(value / peak, moved[kind] / bandwidth) for kind, value in work.items()}
    return {**parts, "communication": communication(c, device, cut, mine * tokens)}


def traffic(c: ModelConfig, dtype: str, cut: Cut, batch: int, tokens: int, past: int) -> dict[str, float]:
    """Bytes that a pass moves on each device, by the work that moves them: weights (of a table only the rows looked up, which
    are not counted), experts that some token chose, keys and values or latents, states read and written."""
    mine, here = -(-batch // cut.groups), held(c, dtype, cut)
    table = 0 if c.tie_word_embeddings else SIZES[dtype] * c.vocab_size * c.hidden_size / cut.tensor
    return {
        "linear": here.trunk - table,
        "experts": here.experts * touched(c, batch * tokens) if here.experts else 0.0,
        "attention": mine * (past + tokens) * here.kv_per_token,
        "recurrence": 2 * mine * here.fixed,
    }


def causal(scores: float, tokens: int, past: int) -> float:
    """Operations of the scores that are not masked, of all that `flops` counts."""
    return scores * (past + (tokens + 1) / 2) / (past + tokens)


def communication(c: ModelConfig, device: Device, cut: Cut, tokens: int) -> float:
    """Seconds of a pass over `tokens` tokens in each group: all-reduces inside a host, experts' vectors between all devices."""
    if cut.devices == 1:
        return 0.0
    vector, layers, moe = 2 * c.hidden_size, c.num_hidden_layers, c.mlps.count("moe")
    latent = 2 * (c.routed_expert_hidden_size or c.hidden_size)
    reduced = 2 * layers * 2 * (cut.tensor - 1) / cut.tensor * tokens * vector
    sent = 2 * moe * c.num_experts_per_token * latent * tokens / cut.tensor * (1 - 1 / cut.devices)
    inside = cut.devices <= device.devices_per_host
    messages = (2 * layers if cut.tensor > 1 else 0) + 2 * moe
    between = device.link_bytes_per_s if inside else device.network_bytes_per_s
    return reduced / device.link_bytes_per_s + sent / between + messages * MESSAGE_S


def form_of_mixer(c: ModelConfig, kind: str) -> str:
    """The name under which a calibration holds what a mixer takes for next to no work."""
    turned = kind == "attention" and c.position == "rope"
    return kind + (" rope" if turned else " low-rank" if kind == "mla" and c.q_lora_rank is not None else "")


def form_of_mlp(c: ModelConfig, kind: str) -> str:
    return kind + (" latent" if kind == "moe" and c.routed_expert_hidden_size is not None else "")


def forms(c: ModelConfig) -> Counter[str]:
    """What a pass runs: sublayers with their norms, sources that attention residuals mix, and the pass itself."""
    found = Counter({"pass": 1})
    found["source"] = sum(count for count in sources(c) if count > 1)
    found.update(form_of_mixer(c, kind) for kind in c.mixers)
    found.update(form_of_mlp(c, kind) for kind in c.mlps)
    return found


def fixed_seconds(c: ModelConfig, rates: dict[str, Any], work: str) -> float:
    """Seconds of a pass that no size explains: calls, one after the other. `work`: decode, prefill, or training (forward and
    backward of a micro-batch), which go different ways through the same layers."""
    # Each is a difference of measurements. Where a disturbed calibration has them below zero for the whole model, a pass would
    # otherwise take less time than its work, or none.
    return max(sum(count * rates["fixed_s"][work][form] for form, count in forms(c).items() if count), 0.0)


def _measured(
    c: ModelConfig, dtype: str, rates: dict[str, Any], batch: int, tokens: int, past: int, logits: int
) -> dict[str, float]:
    ops, rows = flops.forward(c, batch, tokens, past, logits), batch * tokens
    parts = {"linear": ops["linear"] / rate_of(rates["linear"], rows)}
    if logits:
        parts["head"] = ops["head"] / rate_of(rates["head"], batch * logits)
    if ops["experts"]:
        parts["experts"] = ops["experts"] / rate_of(rates["experts"], _rows_of_expert(c, rows))
    if ops["attention"] and tokens > 1:
        parts["attention"] = causal(ops["attention"], tokens, past) / rates["attention"]
    elif ops["attention"]:
        cached = batch * (past + tokens) * kv_bytes_per_token(c, dtype)
        parts["attention"] = cached / rates["cache"]["mla" if "mla" in c.mixers else "attention"]
    parts["recurrence"] = sum(_recurrence(c, kind, rates, batch, tokens) for kind in c.mixers if kind in LINEAR_MIXERS)
    if tokens > 1:
        parts["elementwise"] = MOVED * _activations(c, rates, batch, tokens) / rates["bytes_per_s"]
    parts["calls"] = fixed_seconds(c, rates, "prefill" if tokens > 1 else "decode")
    return parts


def _rows_of_expert(c: ModelConfig, tokens: int) -> float:
    """Rows that an expert meets on average, of those that meet any."""
    return tokens * c.num_experts_per_token / (c.num_experts * touched(c, tokens))


def _activations(c: ModelConfig, rates: dict[str, Any], batch: int, tokens: int) -> float:
    """Bytes of all results but those inside recurrences, whose rates were measured whole."""
    inside = sum(recurrence_keeps(kind, c, tokens) for kind in c.mixers if kind in LINEAR_MIXERS)
    return activations(c, batch, tokens, rates["dtype"], compiled=True) - 4 * batch * tokens * inside


def _recurrence(c: ModelConfig, kind: str, rates: dict[str, Any], batch: int, tokens: int) -> float:
    if tokens > 2:
        return batch * flops.recurrence(c, kind, tokens) / rates["chunks"][kind]
    return tokens * batch * 4 * recurrent_values(c, kind) / rates["steps"][kind]


def training_seconds(
    c: ModelConfig,
    device: Device,
    cut: Cut,
    batch: int,
    tokens: int,
    recompute: bool = False,
    accumulation: int = 1,
    chunk: int = 64,
) -> dict[str, float]:
    """Seconds of one optimiser step by kind, and `total`. `batch`: sequences of a micro-batch over all devices."""
    ops = flops.training(c, batch, tokens, chunk, recompute=recompute)
    count = sum(row.numel for row in weights(c))
    if device.measured is None:
        parameter_bytes = 28 * count / cut.devices  # AdamW: weight, gradient, moments read; weight and moments written
        done = {**ops, "attention": causal(ops["attention"], tokens, 0)}
        parts = {kind: value / cut.devices / (device.flops_per_s * EFFICIENCY) for kind, value in done.items()}
        local = -(-batch // cut.groups) * tokens
        parts["communication"] = 3 * communication(c, device, cut, local)
        parts["optimizer"] = parameter_bytes / (device.bytes_per_s * BANDWIDTH_EFFICIENCY) / accumulation
    else:
        parts = _measured_training(c, device.measured, ops, batch, tokens, recompute)
        parts["optimizer"] = count / device.measured["optimizer"] / accumulation
    parts = {kind: value * accumulation for kind, value in parts.items()}
    return {**parts, "total": _total(parts, device)}


def _measured_training(
    c: ModelConfig, rates: dict[str, Any], ops: flops.Flops, batch: int, tokens: int, recompute: bool
) -> dict[str, float]:
    rows, again = batch * tokens, 4 / 3 if recompute else 1
    words = "whole eights" if c.vocab_size % 8 == 0 else "odd"
    done = {
        "linear": ops["linear"] / rate_of(rates["linear_training"], rows),
        "head": ops["head"] / rates["head_training"][words],
        "attention": causal(ops["attention"], tokens, 0) / rates["attention_training"],
        "elementwise": 3 * again * MOVED * _activations(c, rates, batch, tokens) / rates["elementwise_training"][c.norm],
        "calls": again * fixed_seconds(c, rates, "training"),
    }
    if ops["experts"]:
        done["experts"] = ops["experts"] / rate_of(rates["experts_training"], _rows_of_expert(c, rows))
    for kind in c.mixers:
        if kind in LINEAR_MIXERS:
            work = flops.recurrence(c, kind, tokens) + flops.recurrence_backward(c, kind, tokens)
            done["recurrence"] = done.get("recurrence", 0.0) + again * batch * work / rates["chunks_training"][kind]
    return done
