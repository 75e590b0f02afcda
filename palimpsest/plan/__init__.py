"""What a model costs, from its configuration alone: parameters, memory, operations, times.

    plan("kimi-k3", context=1_048_576, batch=8, device="h200", num_devices=64).as_dict()

counts.py      parameters and checkpoint bytes        devices.py   peaks with their sources, calibrations
memory.py      what a sequence carries                times.py     roofline, communication, what fits
training.py    memory of a training step              claims.py    published figures beside ours
flops.py       operations of matrix products          source.py    presets and config.json
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from palimpsest.config import InputError, ModelConfig, suggestion
from palimpsest.plan import flops, memory, times, training
from palimpsest.plan.counts import SIZES, checkpoint_bytes, parameters, weight_bytes
from palimpsest.plan.devices import Device, device_of
from palimpsest.plan.source import model_of
from palimpsest.plan.units import num_bytes, tokens

__all__ = ["Plan", "fit", "plan"]


@dataclass(frozen=True)
class Plan:
    """A model and how it is to run; the answers are computed when they are asked for."""

    name: str
    config: ModelConfig
    dtype: str
    context: int  # tokens of each sequence
    batch: int  # sequences over all devices
    device: Device
    num_devices: int
    optimizer: str
    recompute: bool
    accumulation: int
    sharding: str
    chunk: int  # tokens that a recurrent layer works on together

    @property
    def cut(self) -> times.Cut:
        return times.cut_over(self.device, self.num_devices)

    def memory(self) -> dict[str, Any]:
        """Bytes: of the weights, of the states in all, and on one device when the sequences are held there."""
        here = times.held(self.config, self.dtype, self.cut)
        room = times.USABLE * self.device.memory_bytes
        total = here.total(self.context, self.batch)
        return {
            "weight_bytes": weight_bytes(self.config, self.dtype),
            "kv_bytes_per_token": memory.kv_bytes_per_token(self.config, self.dtype),
            "recurrent_bytes_per_sequence": memory.recurrent_bytes(self.config),
            "conv_bytes_per_sequence": memory.conv_bytes(self.config, self.dtype),
            "state_bytes": memory.state_bytes(self.config, self.context, self.batch, self.dtype),
            "device_bytes": total,
            "fits": total <= room,
            "largest_batch": here.largest_batch(self.context, room),
            "largest_context": here.largest_context(self.batch, room),
        }

    def flops(self) -> dict[str, flops.Flops]:
        """Of reading the context, of one more token, and of one training micro-batch; masked scores included."""
        config, size, chunk = self.config, (self.batch, self.context), self.chunk
        return {
            "prefill": flops.forward(config, *size, 0, 1, chunk),
            "decode": flops.forward(config, self.batch, 1, max(self.context - 1, 0), 1),
            "training": flops.training(config, *size, chunk, recompute=self.recompute),
        }

    def traffic(self) -> dict[str, dict[str, float]]:
        """Bytes that each device moves, at the least, to read the context and for one more token."""
        common = self.config, self.dtype, self.cut, self.batch
        return {
            "prefill": times.traffic(*common, self.context, 0),
            "decode": times.traffic(*common, 1, max(self.context - 1, 0)),
        }

    def times(self) -> dict[str, Any]:
        """Seconds: one decode step of the batch, the first token of one sequence, one optimiser step."""
        where = self.device, self.cut
        common = self.config, self.dtype, *where
        step = times.pass_seconds(*common, self.batch, 1, max(self.context - 1, 0), 1)
        first = times.pass_seconds(*common, 1, self.context, 0, 1, self.chunk)
        how = self.recompute, self.accumulation, self.chunk
        train = times.training_seconds(self.config, *where, self.batch, self.context, *how)
        return {
            "decode_step_s": step,
            "decode_tokens_per_s": self.batch / step["total"],
            "first_token_s": first,
            "training_step_s": train,
            "training_tokens_per_s": self.batch * self.context * self.accumulation / train["total"],
        }

    def training(self) -> dict[str, float]:
        """Bytes on one device in a training step; the sequences of a micro-batch are dealt out to the devices."""
        dtype = "bf16" if self.dtype == "mxfp4" else self.dtype
        rows = -(-self.batch // self.num_devices)
        compiled = self.device.measured is not None and self.device.measured["backend"] == "cpu"
        how = self.optimizer, self.recompute, self.accumulation, self.sharding, self.num_devices, compiled
        return training.training_memory(self.config, rows, self.context, dtype, *how)

    def as_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        settings = ("context", "batch", "num_devices", "optimizer", "recompute", "accumulation", "sharding", "chunk")
        return {
            "model": self.name,
            "dtype": self.dtype,
            **{name: getattr(self, name) for name in settings},
            "device": self.device.as_dict(),
            "parameters": parameters(self.config),
            "checkpoint_bytes": {dtype: checkpoint_bytes(self.config, dtype) for dtype in _dtypes(self.config)},
            "memory": self.memory(),
            "training_bytes": self.training(),
            "flops": self.flops(),
            "traffic_bytes": self.traffic(),
            "times": self.times(),
            "crossover_tokens": {
                "recurrent": memory.crossover_tokens(self.config),
                "with_convolution": memory.crossover_tokens(self.config, conv=True),
            },
        }


def _dtypes(config: ModelConfig) -> list[str]:
    inner = config.moe_intermediate_size, config.routed_expert_hidden_size or config.hidden_size
    packs = "moe" in config.mlps and all(size % 32 == 0 for size in inner)
    return [dtype for dtype in SIZES if dtype != "mxfp4" or packs]


def plan(
    model: str | ModelConfig,
    *,
    context: int | str = 8192,
    batch: int = 1,
    device: str = "h200",
    num_devices: int = 1,
    dtype: str | None = None,
    optimizer: str = "adamw",
    recompute: bool = False,
    accumulation: int = 1,
    sharding: str = "none",
    chunk: int = 64,
) -> Plan:
    """The plan of a preset, a config.json (ours or published) or a ModelConfig.

    `context` in tokens (1_048_576 or "1M"); `device` a name of `devices.TABLE` or a calibration file; `dtype` f32, bf16, f16
    or mxfp4, by default as the model is published (f32 on a calibrated machine); `sharding` what training cuts over the
    devices: none, optimizer, gradients, weights; `chunk` tokens of a chunk, rounded up to a power of two.
    Raises InputError, one line, for whatever cannot be planned.
    """
    name, config, published = model_of(model)
    where = device_of(device)
    chosen = dtype or (where.measured["dtype"] if where.measured is not None else published)
    if chosen not in SIZES:
        raise InputError(f"plan: dtype is {chosen!r}; it must be one of {', '.join(SIZES)}{suggestion(chosen, SIZES)}")
    if chosen not in _dtypes(config):
        raise InputError(f"plan: dtype is {chosen!r}, which packs experts; {name} has none that pack: choose bf16")
    for field, value, known in (
        ("optimizer", optimizer, ("adamw", "muon")),
        ("sharding", sharding, training.SHARDINGS),
    ):
        if value not in known:
            raise InputError(f"plan: {field} is {value!r}; it must be one of {', '.join(known)}{suggestion(value, known)}")
    for field, value in (("batch", batch), ("num_devices", num_devices), ("accumulation", accumulation)):
        if type(value) is not int or not 1 <= value <= 10**9:
            raise InputError(f"plan: {field} is {value!r}; it must be a whole number from 1 to a billion")
    if type(chunk) is not int or not 1 <= chunk <= 256:
        raise InputError(f"plan: chunk is {chunk!r}; it must be a whole number in 1..256")
    if where.measured is not None and num_devices > 1:
        raise InputError(f"plan: num_devices is {num_devices}; a calibration is of one machine, so leave it at 1")
    length = tokens("context", context)
    if config.position == "learned" and length > config.max_position_embeddings:
        limit = config.max_position_embeddings
        raise InputError(f"plan: context is {length}; {name}'s position table ends at {limit}: give that or less")
    how = optimizer, recompute, accumulation, sharding, chunk
    return Plan(name, config, chosen, length, batch, where, num_devices, *how)


def fit(room: int | str, wanted: Plan) -> dict[str, Any]:
    """What fits into so many bytes on each device: this model's largest batch at its context and largest context at its batch
    (0: not even the weights), and the largest preset at this context and batch in the same dtype (None: none)."""
    size = num_bytes("fit", room)
    here = times.held(wanted.config, wanted.dtype, wanted.cut)
    best: tuple[int, str] | None = None
    for name in (preset for preset in _presets() if wanted.dtype in _dtypes(ModelConfig.preset(preset))):
        config = ModelConfig.preset(name)
        longest = config.max_position_embeddings if config.position == "learned" else wanted.context
        other = replace(wanted, name=name, config=config, context=min(wanted.context, longest))
        if times.held(config, wanted.dtype, other.cut).total(other.context, wanted.batch) <= size and longest >= wanted.context:
            best = max(best or (0, ""), (parameters(config)["total"], name))
    limit = here.largest_context(wanted.batch, size)
    if wanted.config.position == "learned":
        limit = min(wanted.config.max_position_embeddings, limit or 0)
    return {
        "bytes": size,
        "largest_batch": here.largest_batch(wanted.context, size),
        "largest_context": limit,
        "largest_preset": best[1] if best else None,
    }


def _presets() -> list[str]:
    from palimpsest.presets import presets

    return presets()
