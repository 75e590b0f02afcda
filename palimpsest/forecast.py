"""What a training run will take, from its settings: memory at its height, operations of a step, share of the machine used.

Memory is `plan.training`'s count for weights, gradients and optimiser in float32. With bf16 the matrix products run in
autocast: their inputs and outputs have 16 bits, while the residual stream and recurrent memories stay in float32.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from palimpsest.config import ModelConfig, TrainConfig
from palimpsest.ops import cpu
from palimpsest.plan import flops
from palimpsest.plan.devices import TABLE
from palimpsest.plan.training import activations, training_memory
from palimpsest.plan.units import bytes_text

# Where autocast's activations lie between those of 16 (0) and of 32 bits (1), by kind of layer, measured. Above 1 since
# tensors that pass between the two precisions are kept in both.
AUTOCAST = {"attention": 0.6, "mla": 0.7, "linear_attention": 1.2, "deltanet": 1.25, "gated_deltanet": 1.35, "kda": 1.35}
AUTOCAST |= {"moe": 0.15, "residual": 0.15}  # what experts and attention over depth add
SIDE = 768  # of the square matrices whose product stands for a machine that no table knows


def memory(
    config: ModelConfig, train: TrainConfig, device: torch.device, num_devices: int = 1, trained: float = 1.0
) -> dict[str, float]:
    """Bytes on one device by kind, and `peak`, the largest moment of a step. Sequences, weights, gradients and optimiser are
    dealt out to the devices. `trained` is the share of the weights that is (adapters)."""
    compiled = cpu.refusal(torch.float32, device, config.linear_key_head_dim) is None
    rows = -(-train.batch_size // num_devices)
    sharding = "weights" if num_devices > 1 else "none"
    how = train.optimizer, train.recompute, train.accumulation, sharding, num_devices, compiled
    found = training_memory(config, rows, train.context_length, "f32", *how)
    found["peak"] -= (1 - trained) * found["optimizer"]
    found["optimizer"], found["gradients"] = trained * found["optimizer"], trained * found["gradients"]
    if train.precision == "bf16":
        both = sum(AUTOCAST[mixer] for mixer in config.mixers) / config.num_hidden_layers
        long, short = (activations(config, rows, train.context_length, dtype, False, compiled) for dtype in ("f32", "bf16"))
        if train.recompute:
            # What joins the sublayers has 32 bits; the one that is recomputed, here a mixer, holds its tensors twice.
            found["peak"] += max(both - 1, 0) * long / (2 * config.num_hidden_layers)
        else:
            both += AUTOCAST["moe"] * config.mlps.count("moe") / config.num_hidden_layers
            both += AUTOCAST["residual"] * (config.residual != "sum")
            kept = short + both * (long - short)
            found["peak"] += kept - found["activations"]
            found["activations"] = kept
    # A logged step keeps the weights of before for the size of the update.
    update = (1 + trained) * found["weights"] + found["gradients"] + found["optimizer"]
    found["peak"] = max(found["peak"], update)
    return found


def step_flops(config: ModelConfig, train: TrainConfig) -> int:
    """Operations of one optimiser step's matrix products; what `recompute` repeats is not counted, as is usual for MFU."""
    return train.accumulation * sum(flops.training(config, train.batch_size, train.context_length).values())


def peak_flops(device: torch.device, precision: str) -> tuple[float, str]:
    """(operations a second that one device could do, where the number is from).

    The table's 16-bit peak for a GPU that it knows and bf16; otherwise what one product of square matrices reaches here.
    """
    if device.type == "cuda" and precision == "bf16":
        name = torch.cuda.get_device_name(device).lower()
        known = [entry for key, entry in TABLE.items() if key.replace("-", " ") in name.replace("-", " ")]
        if known:
            return known[0].flops_per_s, known[0].source
    side = SIDE if device.type == "cpu" else 8 * SIDE
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    x = torch.ones(side, side, dtype=dtype, device=device)
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        float((x @ x)[0, 0])
        seconds.append(time.perf_counter() - began)
    return 2 * side**3 / min(seconds), f"a product of {side} x {side} matrices, measured"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device, or the system, had no memory left for a tensor."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def advice(config: ModelConfig, train: TrainConfig, device: torch.device, num_devices: int = 1) -> str:
    """One line: what a step takes by our estimate, and what it would take with one setting changed, the least first."""

    def peak(changed: TrainConfig) -> float:
        return memory(config, changed, device, num_devices)["peak"]

    options: list[tuple[float, str]] = []
    if not train.recompute:
        options.append((peak(train.replace(recompute=True)), "recompute = true"))
    if train.batch_size % (2 * num_devices) == 0:
        half, twice = train.batch_size // 2, 2 * train.accumulation
        text = f"batch_size = {half} with accumulation = {twice} (the same step)"
        options.append((peak(train.replace(batch_size=half, accumulation=twice)), text))
    if train.context_length >= 4:
        half = train.context_length // 2
        options.append((peak(train.replace(context_length=half)), f"context_length = {half}"))
    now = peak(train)
    better = [f"{text} takes {bytes_text(size)}" for size, text in sorted(options) if size < now]
    remedy = "; ".join(better) if better else "the weights and their optimiser are most of it: choose a smaller model"
    return f"out of memory: a step takes about {bytes_text(now)} of tensors on {device.type} by our estimate; {remedy}"


def facts(
    config: ModelConfig, train: TrainConfig, device: torch.device, num_devices: int = 1, trained: float = 1.0
) -> dict[str, Any]:
    """The estimates of a run, ready for JSON."""
    return {
        "memory_bytes": memory(config, train, device, num_devices, trained),
        "step_flops": step_flops(config, train),
        "device": device.type,
        "num_devices": num_devices,
    }
