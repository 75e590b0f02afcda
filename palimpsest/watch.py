"""What is looked at in a logged step beside the loss: the residual stream by depth, the gates of recurrent memories by layer,
gradients and updates by group of the optimiser."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from palimpsest import ops
from palimpsest.distributed import is_cut
from palimpsest.heads import part
from palimpsest.mixers import KDA, DeltaNet, GatedDeltaNet
from palimpsest.model import Model
from palimpsest.optim import AdamW, joint_norm

if TYPE_CHECKING:
    from palimpsest.muon import MuonAndAdamW

HALF_LIVES = tuple(2.0**power for power in range(13))  # tokens: bins below 1, from 1 to 2, ..., from 4096 on
BETA_BINS = 10  # equal ones from 0 to 1, or to 2 with negative eigenvalues


def half_lives(mixer: GatedDeltaNet, x: Tensor) -> Tensor:
    """Tokens after which half of a value is left at the decay of each token, head and, in KDA, channel: ln 2 / -g of the
    layer's input x [B,T,D], flat."""
    if isinstance(mixer, KDA):
        raw = mixer.f_b_proj(mixer.f_a_proj(x)).unflatten(-1, (mixer.value_heads, mixer.key_dim))
        g = ops.kda_gate(raw, part(mixer.parallel, mixer.A_log), part(mixer.parallel, mixer.dt_bias), mixer.lower_bound)
    else:
        g = ops.kda_gate(mixer.a_proj(x).unsqueeze(-1), part(mixer.parallel, mixer.A_log), part(mixer.parallel, mixer.dt_bias))
    return (math.log(2) / -g).flatten()


def shares(values: Tensor, edges: Tensor) -> list[float]:
    """How much of `values` lies below the first of the rising edges, between each two of them, and from the last on."""
    found = torch.bucketize(values, edges, right=True).flatten().bincount(minlength=len(edges) + 1)
    return (found / found.sum()).tolist()


class Watch:
    """Takes norms of a model's parameters, group by group."""

    def __init__(self, model: Model, optimizer: AdamW | MuonAndAdamW) -> None:
        named = dict(model.named_parameters())
        # The model's own parameters, which have the gradients, not the optimiser's float32 copies.
        self.groups = {group["name"]: [named[name] for name in group["param_names"]] for group in optimizer.param_groups}
        self.held: dict[str, list[Tensor]] = {}
        self.norms: list[Any] = [norm for block in model.layers for norm in (block.mixer_norm, block.mlp_norm)] + [model.norm]
        self.memories: dict[int, Any] = {i: block for i, block in enumerate(model.layers) if isinstance(block.mixer, DeltaNet)}
        self.inputs: dict[int, dict[str, list[float]]] = {}
        self.squares: dict[int, Tensor] = {}
        self.hooks: list[Any] = []

    def begin(self) -> None:
        """Call before the first micro-batch."""
        self.squares, self.inputs = {}, {}
        self.hooks = [norm.register_forward_pre_hook(partial(self._see, place)) for place, norm in enumerate(self.norms)]

        for layer, block in self.memories.items():
            # A compiled mixer would not run a hook of its own; one that is spread has its weights only while it runs.
            if is_cut(next(block.mixer.parameters())):
                hook = block.mixer.register_forward_pre_hook(lambda mixer, inputs, i=layer: self._see_gates(i, inputs[0]))
            else:
                hook = block.mixer_norm.register_forward_hook(lambda norm, inputs, x, i=layer: self._see_gates(i, x))
            self.hooks.append(hook)

    @torch.no_grad()
    def _see_gates(self, layer: int, x: Tensor) -> None:
        mixer = self.memories[layer].mixer
        x = x.detach()
        top = 2.0 if mixer.allow_neg_eigval else 1.0
        edges = torch.arange(1, BETA_BINS, device=x.device) * (top / BETA_BINS)
        self.inputs[layer] = {"beta": shares(mixer.write_strength(x), edges)}
        if isinstance(mixer, GatedDeltaNet):
            self.inputs[layer]["half_life"] = shares(half_lives(mixer, x), torch.tensor(HALF_LIVES, device=x.device))

    def gates(self) -> list[dict[str, Any]]:
        """Of every layer with a delta rule its number `layer`, from 0, and shares of what was seen in the last micro-batch,
        here: `beta` in BETA_BINS, and where it forgets `half_life` in those of HALF_LIVES. Call behind `residual_rms`."""
        return [{"layer": layer, **self.inputs[layer]} for layer in sorted(self.inputs)]

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
