"""The states of all global random generators, to JSON and back."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def current() -> dict[str, Any]:
    """The states of Python's, numpy's and torch's global generators, ready for JSON."""
    name, keys, *rest = np.random.get_state(legacy=True)
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "python": random.getstate(),
        "numpy": [name, np.asarray(keys).tolist(), *rest],
        "torch": _hex(torch.get_rng_state()),
        "cuda": [_hex(state) for state in devices],
    }


def parse(state: dict[str, Any]) -> dict[str, Any]:
    version, numbers, gauss = state["python"]
    name, keys, *rest = state["numpy"]
    return {
        "python": (version, tuple(numbers), gauss),
        "numpy": (name, np.array(keys, np.uint32), *rest),
        "torch": _unhex(state["torch"]),
        "cuda": [_unhex(text) for text in state["cuda"]],
    }


def restore(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def _hex(state: Tensor) -> str:
    return bytes(state.tolist()).hex()


def _unhex(text: str) -> Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)
