"""Muon: a matrix steps along the orthogonal matrix nearest to its momentum, so that every direction moves alike.

    M <- mu M + (1 - mu) G        U = orthogonal( (1 - mu) G + mu M )
    W <- W - lr (0.2 sqrt(max(rows, columns)) U + weight_decay W)

The factor gives an update the root mean square 0.2 that AdamW's has, so that both take the same rates (arXiv 2502.16982).
Query, key and value projections are orthogonalised head by head, stacked experts expert by expert, as in Kimi K3: a head is a
map of its own, and one large head no longer sets the scale of the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from palimpsest.config import TrainConfig
from palimpsest.distributed import full, joined, local, part_of
from palimpsest.mixers import MLA, Attention, LinearAttention
from palimpsest.model import Model
from palimpsest.moe import Experts
from palimpsest.optim import AdamW, Precise, parameter_groups

COEFFICIENTS, ITERATIONS, EPS = (3.4445, -4.7750, 2.0315), 5, 1e-7
# Maps to one number a head or a token act through exponentials and sigmoids, as vectors do.
VECTORS = ("b_proj", "a_proj", "shared_expert_gate", "lm_head")


def matrices(model: Model) -> dict[str, int]:
    """The parameters that Muon takes, and into how many blocks each is cut: heads of q, k and v, else 1.

    All others (embeddings, the head, norms, biases, decay rates, convolutions, routers, residual queries, and maps to one
    number a head) belong to AdamW. Stacked experts [E,out,in] are blocks as they are.
    """
    heads: dict[str, int] = {}
    taken: dict[str, int] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, Attention | LinearAttention | MLA):
            parts = module.parallel.size if module.parallel is not None else 1
            if isinstance(module, MLA):
                blocks = dict.fromkeys(("q_proj", "q_b_proj", "kv_b_proj"), module.heads)
            elif isinstance(module, Attention):
                blocks = {"q_proj": module.heads, "k_proj": module.kv_heads, "v_proj": module.kv_heads}
            else:
                blocks = {"q_proj": module.key_heads, "k_proj": module.key_heads, "v_proj": module.value_heads}
            heads |= {f"{prefix}.{name}": parts * count for name, count in blocks.items()}
        if isinstance(module, nn.Linear) and prefix.rsplit(".", 1)[-1] not in VECTORS:
            taken[f"{prefix}.weight"] = heads.get(prefix, 1)
        elif isinstance(module, Experts):
            taken |= {f"{prefix}.{name}": 1 for name, _ in module.named_parameters()}
    return taken


def orthogonal(x: Tensor) -> Tensor:
    """The nearest orthogonal matrix of each [...,A,B], roughly: five Newton-Schulz steps in bfloat16 bring every singular
    value to about 1 (0.7 to 1.2). Zero stays zero."""
    a, b, c = COEFFICIENTS
    y = x.bfloat16()
    is_tall = y.shape[-2] > y.shape[-1]
    y = y.mT if is_tall else y
    y = y / y.norm(dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for _ in range(ITERATIONS):
        square = y @ y.mT
        y = a * y + (b * square + c * square @ square) @ y
    return (y.mT if is_tall else y).to(x.dtype)


class Muon(Precise, torch.optim.Optimizer):
    """Muon with float32 momentum and weights; groups carry `blocks` beside `params` and `param_names`."""

    KEYS = ("momentum",)

    def __init__(self, groups: list[dict[str, Any]], lr: float, momentum: float = 0.95) -> None:
        super().__init__(self.precise(groups), {"lr": lr, "momentum": momentum, "weight_decay": 0.0})

    @torch.no_grad()
    def update(self) -> None:
        for group in self.param_groups:
            for parameter, blocks in zip(group["params"], group["blocks"], strict=True):
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                momentum = state.setdefault("momentum", torch.zeros_like(parameter))
                held, gradient = local(momentum), local(parameter.grad)
                held.lerp_(gradient, 1 - group["momentum"])
                # Only whole matrices have a direction; of a step cut over processes each works out all and keeps its part.
                ahead = full(joined(gradient.lerp(held, group["momentum"]), parameter))
                cut = ahead if ahead.dim() == 3 else ahead.unflatten(0, (blocks, -1))
                scale = 0.2 * math.sqrt(max(cut.shape[-2:]))
                weight = local(parameter)
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(part_of(orthogonal(cut).view_as(ahead), parameter), alpha=-group["lr"] * scale)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return self.stepped(self.update)


def muon_groups(model: Model, config: TrainConfig) -> list[dict[str, Any]]:
    """Muon's group first, with `blocks` beside its parameters, then AdamW's."""
    taken = matrices(model)
    ours: dict[str, Any] = {"name": "muon", "params": [], "param_names": [], "blocks": []}
    ours["weight_decay"] = config.weight_decay
    rest = []
    for group in parameter_groups(model, config.weight_decay):
        pairs = list(zip(group["param_names"], group["params"], strict=True))
        for name, parameter in pairs:
            if name in taken:
                ours["params"].append(parameter)
                ours["param_names"].append(name)
                ours["blocks"].append(taken[name])
        left = [(name, parameter) for name, parameter in pairs if name not in taken]
        if left:
            names, parameters = zip(*left, strict=True)
            rest.append({**group, "params": list(parameters), "param_names": list(names)})
    return [ours, *rest]


class MuonAndAdamW:
    """Both optimisers as one: Muon for `matrices`, AdamW for everything else."""

    def __init__(self, model: Model, config: TrainConfig, lr: float) -> None:
        ours, *rest = muon_groups(model, config)
        self.muon = Muon([ours], lr)
        self.adamw = AdamW(rest, lr, (config.beta1, config.beta2))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [*self.muon.param_groups, *self.adamw.param_groups]

    def step(self) -> None:
        self.muon.step()
        self.adamw.step()

    def zero_grad(self) -> None:
        self.muon.zero_grad()
        self.adamw.zero_grad()

    def named_state(self) -> dict[str, Tensor]:
        return {**self.muon.named_state(), **self.adamw.named_state()}

    def load_named_state(self, tensors: dict[str, Tensor]) -> None:
        """Takes what `named_state` gave. Raises ValueError, with nothing changed, when it does not fit the parameters."""
        own = {name for group in self.muon.param_groups for name in group["param_names"]}
        first = {key: tensor for key, tensor in tensors.items() if key.rpartition(".")[0] in own}
        second = {key: tensor for key, tensor in tensors.items() if key not in first}
        apply = self.muon.fitting(first), self.adamw.fitting(second)
        self.muon.take(apply[0])
        self.adamw.take(apply[1])
