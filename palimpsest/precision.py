"""Parameters that stay in float32 whatever dtype the model is cast to."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
from torch import nn


class KeepFloat32(nn.Module):
    """A module whose parameters named in `float32` ignore `.to(torch.bfloat16)`, `.half()` and their like.

    Decay rates and convolution taps act through exponentials and over thousands of steps, so rounding them changes the
    memory itself. Casting to float64 is honoured.
    """

    float32: ClassVar[tuple[str, ...]] = ()

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        before = {name: self._parameters[name] for name in self.float32 if self._parameters.get(name) is not None}
        tensors = {name: parameter.data for name, parameter in before.items() if parameter is not None}
        super()._apply(fn, recurse)
        for name, tensor in tensors.items():
            parameter = self._parameters[name]
            if parameter is not None and parameter.dtype in (torch.bfloat16, torch.float16):
                parameter.data = tensor.to(parameter.device)
        return self
