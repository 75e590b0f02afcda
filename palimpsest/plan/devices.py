"""What a device can do: peaks from data sheets with a stated efficiency, or rates measured on this machine.

A table device is taken to run fused kernels: a pass moves weights, keys and values and states once, and products reach
`EFFICIENCY` of the dense peak, reads `BANDWIDTH_EFFICIENCY` of the sheet's bandwidth. A calibration (written by `palimpsest
benchmark calibrate`) holds what this package's own plain torch operations reach, per kind of work.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palimpsest.config import InputError, suggestion

FORMAT = 2  # of a calibration
# A calibration's fields: rates by number of rows as [[rows, operations a second], ...], and single numbers or tables of them.
CURVES = ("linear", "linear_training", "head", "experts", "experts_training")
KEYS = (*CURVES, "head_training", "attention", "attention_training", "cache", "chunks", "chunks_training", "steps", "fixed_s")
KEYS += ("backend", "bytes_per_s", "elementwise_training", "optimizer", "dtype", "memory_bytes")
EFFICIENCY = 0.6  # of the peak, for large products: what well-tuned training and prefill reach
BANDWIDTH_EFFICIENCY = 0.8  # of the peak, for reads of weights and caches


@dataclass(frozen=True)
class Device:
    """Rates are peaks; `measured` holds a calibration's own rates and is None for a device from the table."""

    name: str
    flops_per_s: float  # dense, in 16 bits for table devices, in the calibration's dtype otherwise
    bytes_per_s: float
    memory_bytes: int
    link_bytes_per_s: float  # to devices of the same host, one direction
    devices_per_host: int
    network_bytes_per_s: float  # to other hosts, one direction
    source: str
    measured: dict[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "measured"}
        stated = {"efficiency": EFFICIENCY, "bandwidth_efficiency": BANDWIDTH_EFFICIENCY}
        return {**fields, **(stated if self.measured is None else {"measured": self.measured})}


# Dense bf16 peaks: the sheets print twice that, with sparsity. Links: half of the sheets' two-way figure. Network: 400 Gb/s a
# device, the usual build of such hosts. A consumer card has no link but its PCIe 4.0 x16 slot.
_HOPPER = {"link_bytes_per_s": 450e9, "devices_per_host": 8, "network_bytes_per_s": 50e9}
TABLE = {
    device.name: device
    for device in (
        Device("h200", 989e12, 4.8e12, 141_000_000_000, source="NVIDIA H200 data sheet (SXM)", **_HOPPER),
        Device("h100", 989e12, 3.35e12, 80_000_000_000, source="NVIDIA H100 data sheet (SXM)", **_HOPPER),
        Device("a100", 312e12, 2.039e12, 80_000_000_000, 300e9, 8, 25e9, "NVIDIA A100 80GB data sheet (SXM)"),
        Device("rtx-4090", 165e12, 1.008e12, 24_000_000_000, 32e9, 1, 3e9, "NVIDIA Ada GPU architecture paper"),
    )
}


def device_of(name: str) -> Device:
    """A device of the table, or a calibration by its file's name. Raises InputError."""
    if name in TABLE:
        return TABLE[name]
    path = Path(name)
    if path.suffix != ".json" and not path.is_file():
        known = ", ".join(TABLE)
        raise InputError(f"plan: device is {name!r}; it must be {known} or a calibration file{suggestion(name, TABLE)}")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise InputError(f"{path}: not a calibration; write one with `palimpsest benchmark calibrate --out {path}`") from None
    return calibrated(values, str(path))


def calibrated(values: Any, source: str) -> Device:
    """The device that a calibration describes. Raises InputError when it is not one that this version reads."""
    if not isinstance(values, dict) or values.get("calibration") != FORMAT:
        raise InputError(f"{source}: not a calibration of format {FORMAT}; write one with `palimpsest benchmark calibrate`")
    for key in KEYS:
        if key not in values:
            raise InputError(f"{source}: field {key!r} is missing; write the calibration again")
    peak = max(rate for _, rate in values["linear"])
    nothing = float("inf")  # one device only
    memory = int(values["memory_bytes"])
    return Device("calibrated", peak, values["bytes_per_s"], memory, nothing, 1, nothing, source, values)


def rate_of(points: Sequence[Sequence[float]], rows: float) -> float:
    """Operations a second with so many rows: between measured points [rows, rate] on logarithmic scales, flat outside."""
    place = bisect_left([size for size, _ in points], rows)
    if place == 0 or place == len(points):
        return points[min(place, len(points) - 1)][1]
    (low, slow), (high, fast) = points[place - 1], points[place]
    share = math.log(rows / low) / math.log(high / low)
    return slow * (fast / slow) ** share
