"""What is looked at in a logged step beside the loss: the residual stream by depth, gradients and updates by group of the
optimiser."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from palimpsest.model import Model
from palimpsest.optim import AdamW, joint_norm

if TYPE_CHECKING:
    from palimpsest.muon import MuonAndAdamW


class Watch:
    """Takes norms of a model's parameters, group by group."""

    def __init__(self, model: Model, optimizer: AdamW | MuonAndAdamW) -> None:
        named = dict(model.named_parameters())
        # The model's own parameters, which have the gradients, not the optimiser's float32 copies.
        self.groups = {group["name"]: [named[name] for name in group["param_names"]] for group in optimizer.param_groups}
        self.held: dict[str, list[Tensor]] = {}
        self.norms: list[Any] = [norm for block in model.layers for norm in (block.mixer_norm, block.mlp_norm)] + [model.norm]
        self.squares: dict[int, Tensor] = {}
        self.hooks: list[Any] = []

    def begin(self) -> None:
        """Call before the first micro-batch."""
        self.squares = {}
        self.hooks = [norm.register_forward_pre_hook(partial(self._see, place)) for place, norm in enumerate(self.norms)]

    @torch.no_grad()
    def _see(self, place: int, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.squares[place] = inputs[0].detach().float().square().mean()

    def residual_rms(self) -> list[float]:
        """Root mean square of what each sublayer read, before its norm, and last of what the head read: of the last
        micro-batch, here."""
        for hook in self.hooks:
            hook.remove()
        return torch.stack([self.squares[place] for place in sorted(self.squares)]).sqrt().tolist()

    @torch.no_grad()
    def before_update(self) -> None:
        """Call with the gradients there, before they are clipped."""
        self.grad_norms = {name: joint_norm([p.grad for p in own if p.grad is not None]) for name, own in self.groups.items()}
        self.held = {name: [p.detach().clone() for p in own] for name, own in self.groups.items()}

    @torch.no_grad()
    def after_update(self) -> dict[str, dict[str, float]]:
        """By group: grad_norm, and update_ratio, the norm of the update over that of the weights before it."""
        found = {}
        for name, own in self.groups.items():
            before = self.held.pop(name)
            size = joint_norm(before)
            for old, parameter in zip(before, own, strict=True):
                old.sub_(parameter)  # in place: the weights are large
            moved = joint_norm(before)
            found[name] = {"grad_norm": self.grad_norms[name], "update_ratio": moved / size if size else 0.0}
        return found
