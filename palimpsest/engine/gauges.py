"""What a recurrent memory does with a token: how much of it stays, and how strongly the token is written."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from palimpsest.mixers import DeltaNet, GatedDeltaNet, LinearAttention
from palimpsest.model import Model


class Gauges:
    """While it is open, every pass of the model leaves its gauges here: per layer, means over heads for each token."""

    def __init__(self, model: Model) -> None:
        self._mixers = [block.mixer for block in model.layers]
        self.readings: list[tuple[Tensor | None, Tensor | None]] = [(None, None)] * len(self._mixers)
        self._hooks: list[Any] = []

    def __enter__(self) -> Gauges:
        for index, mixer in enumerate(self._mixers):

            def note(module: Any, arguments: tuple[Any, ...], index: int = index) -> None:
                self.readings[index] = gauge(module, arguments[0])

            self._hooks.append(mixer.register_forward_pre_hook(note))  # type: ignore[union-attr]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def at(self, place: int) -> list[dict[str, float | None]]:
        """Per layer `kept`, the share of the memory that stays, and `written`, at one token of the last pass."""
        return [{"kept": _at(kept, place), "written": _at(written, place)} for kept, written in self.readings]


def gauge(mixer: Any, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Mean decay factor and write strength of every token of x [B,T,D], each [B T]; None for layers that keep every token."""
    if not isinstance(mixer, LinearAttention):
        return None, None
    kept = written = torch.ones(x.shape[0] * x.shape[1])
    if isinstance(mixer, GatedDeltaNet):
        kept = mixer.log_decay(x).exp().mean((-1, -2)).flatten()
    if isinstance(mixer, DeltaNet):
        written = mixer.write_strength(x).mean(-1).flatten()
    return kept, written


def _at(values: Tensor | None, place: int) -> float | None:
    return None if values is None else float(values[place])
