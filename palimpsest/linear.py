"""Linear maps of all layers, y = x W^T + b, and the same with weights in eight bits; and the norm in front of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from palimpsest import ops


class Linear(nn.Linear):
    """torch's, whose steps of a few tokens on a CPU run at the speed of memory (ops/linear.py)."""

    def forward(self, input: Tensor) -> Tensor:
        return ops.linear(input, self.weight, self.bias)


class RMSNorm(nn.RMSNorm):
    """As in torch; a weight of more digits than x (checkpoints have such) keeps them, and the result has x's dtype.

    One whose result goes through linear maps and nowhere else gives it in autocast's dtype: every map would round it to that by
    itself. What is summed is summed in float32.
    """

    feeds_maps = False

    def forward(self, x: Tensor) -> Tensor:
        device, dtype = x.device.type, x.dtype
        if self.feeds_maps and torch.is_autocast_enabled(device) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device)
        same = x.dtype == self.weight.dtype == dtype
        return super().forward(x) if same else ops.rms_norm(x, self.weight, self.eps or 0.0, dtype)


class Linear8(nn.Module):
    """x [...,in] -> [...,out] with Q8_0 weights: `code` int8 [out,in] and `scale`, the bits of float16 [out,in/32].

    It is not trained. As whole numbers both keep their type when a model is moved to another dtype.
    """

    code: nn.Parameter
    scale: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, source: nn.Linear) -> None:
        super().__init__()
        code, scale = ops.q8_0_encode(source.weight.detach())
        self.code, self.scale = (nn.Parameter(x, requires_grad=False) for x in (code, scale.view(torch.int16)))
        self.bias = source.bias

    @property
    def weight(self) -> Tensor:
        """The weights [out,in] in float32."""
        return ops.q8_0_decode(self.code, self.scale.view(torch.float16))

    def forward(self, x: Tensor) -> Tensor:
        return ops.q8_0_matmul(x, self.code, self.scale.view(torch.float16), self.bias)


def pack(model: nn.Module) -> None:
    """Puts Linear8 in place of every linear map of a model that is a multiple of 32 wide and used as a map only."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is Linear and child.in_features % ops.Q8_0_GROUP == 0 and name != "kv_b_proj":
                setattr(parent, name, Linear8(child))  # kv_b_proj is taken apart where latents are attended to
