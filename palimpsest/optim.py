"""The optimiser: which parameters decay, AdamW in float32, the learning rate over the steps, gradient clipping."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from palimpsest.config import TrainConfig
from palimpsest.distributed import as_like, copies, full, is_cut, local
from palimpsest.model import Model
from palimpsest.moe import Experts, Router

if TYPE_CHECKING:
    from palimpsest.muon import MuonAndAdamW

MATRICES = (nn.Linear, Router, Experts)


class TrainingFailed(RuntimeError):
    """A loss or a gradient is no longer finite. The text is one line: the step, what was found, and what to change."""


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups for an optimiser: matrices, which decay, and everything else, which does not.

    Matrices are the weights of linear maps, their adapters, of routers and of stacked experts. Embeddings (also when the
    head is tied to one), norms, biases, decay rates, convolution taps and residual queries do not decay. Each parameter that
    requires a gradient is in one group, once; `param_names` beside `params` tells which is which. Groups are named for
    metrics.
    """
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    matrices = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, MATRICES)
        for parameter in module.parameters(recurse=False)
        if parameter.dim() >= 2 and id(parameter) not in tables
    }
    groups = [
        {"name": "matrices", "params": [], "param_names": [], "weight_decay": weight_decay},
        {"name": "others", "params": [], "param_names": [], "weight_decay": 0.0},
    ]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            group = groups[0] if id(parameter) in matrices or "lora_" in name else groups[1]
            group["params"].append(parameter)
            group["param_names"].append(name)
    return [group for group in groups if group["params"]]


States = dict[nn.Parameter, dict[str, Tensor]]


class Precise:
    """Part of an optimiser whose state and weights are float32 whatever the model's dtype.

    In bfloat16 the second moment stops moving and a small update rounds to nothing. A parameter of lower precision
    therefore gets a float32 copy, which is what the groups hold and what is updated; the model gets its rounded value.
    Make a new optimiser after loading other weights into such a model.
    """

    KEYS: tuple[str, ...]  # of a parameter's state
    param_groups: list[dict[str, Any]]
    state: Any

    def precise(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The groups with a float32 copy in the place of every parameter of lower precision."""
        self.rounded: list[tuple[nn.Parameter, nn.Parameter]] = []  # the model's parameter, its float32 copy
        return [{**group, "params": [self._precise(p) for p in group["params"]]} for group in groups]

    def _precise(self, parameter: nn.Parameter) -> nn.Parameter:
        if parameter.dtype in (torch.float32, torch.float64):
            return parameter
        self.rounded.append((parameter, nn.Parameter(parameter.detach().float())))
        return self.rounded[-1][1]

    @torch.no_grad()
    def stepped(self, update: Callable[[], Any]) -> Any:
        """Runs an update on the float32 copies and rounds them into the model."""
        for parameter, precise in self.rounded:
            precise.grad = None if parameter.grad is None else parameter.grad.float()
        result = update()
        for parameter, precise in self.rounded:
            parameter.copy_(precise)
            precise.grad = None
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)  # type: ignore[misc]
        for parameter, _ in self.rounded:
            parameter.grad = None

    def named_state(self) -> dict[str, Tensor]:
        """All that decides the next updates, as `{parameter name}.{a key of the state, or weight}`; whole tensors, so that
        processes that hold parts of them must all ask."""
        tensors = {}
        copies = {id(precise) for _, precise in self.rounded}
        for name, parameter in self._named():
            for key in self.KEYS:
                if parameter in self.state:
                    tensors[f"{name}.{key}"] = full(self.state[parameter][key])
            if id(parameter) in copies:
                tensors[f"{name}.weight"] = full(parameter.detach())
        return tensors

    def load_named_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes what `named_state` gave. Raises ValueError, with nothing changed, when it does not fit the parameters."""
        self.take(self.fitting(tensors))

    def fitting(self, tensors: Mapping[str, Tensor]) -> States:
        """Copies of the tensors by parameter; ValueError when one is missing, misshapen or belongs to no parameter."""
        copies = {id(precise) for _, precise in self.rounded}
        left, scalar = dict(tensors), torch.zeros(())
        states: States = {}
        for name, parameter in self._named():
            has_state = f"{name}.{self.KEYS[0]}" in left
            keys = [*(self.KEYS if has_state else ()), *(["weight"] if id(parameter) in copies else [])]
            found = {key: left.pop(f"{name}.{key}", None) for key in keys}
            for key, tensor in found.items():
                shape = [] if key == "step" else list(parameter.shape)
                if tensor is None or list(tensor.shape) != shape:
                    have = "is missing" if tensor is None else f"has shape {list(tensor.shape)}, expected {shape}"
                    raise ValueError(f"optimiser state {name}.{key} {have}")
            states[parameter] = {
                key: as_like(tensor.to(parameter.device, copy=True), scalar if key == "step" else parameter)
                for key, tensor in found.items()
                if tensor is not None
            }
        if left:
            raise ValueError(f"optimiser state {min(left)} belongs to no parameter")
        return states

    def take(self, states: States) -> None:
        """Puts in what `fitting` gave."""
        for parameter, state in states.items():
            if "weight" in state:
                parameter.data.copy_(state.pop("weight"))
            if state:
                self.state[parameter] = state
            else:
                self.state.pop(parameter, None)

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        return [pair for g in self.param_groups for pair in zip(g["param_names"], g["params"], strict=True)]


class AdamW(Precise, torch.optim.AdamW):
    """AdamW with float32 moments and weights."""

    KEYS = ("step", "exp_avg", "exp_avg_sq")

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float]) -> None:
        super().__init__(self.precise(groups), lr=lr, betas=betas, eps=1e-8, fused=True)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return self.stepped(lambda: torch.optim.AdamW.step(self, closure))


def group_table(model: Model, config: TrainConfig) -> list[dict[str, Any]]:
    """The groups that `make_optimizer` would make, ready for JSON; also of a model on the meta device.

    name, optimizer, weight_decay, tensors, parameters, kinds (the last words of the parameters' names, each once).
    """
    from palimpsest.muon import muon_groups

    groups = muon_groups(model, config) if config.optimizer == "muon" else parameter_groups(model, config.weight_decay)
    rows = []
    for group in groups:
        kinds = [re.sub(r"\.weight$", "", name).rsplit(".", 1)[-1] for name in group["param_names"]]
        row = {"name": group["name"], "optimizer": "muon" if "blocks" in group else "adamw"}
        row |= {"weight_decay": group["weight_decay"], "tensors": len(group["params"])}
        rows.append({**row, "parameters": sum(p.numel() for p in group["params"]), "kinds": list(dict.fromkeys(kinds))})
    return rows


def make_optimizer(model: Model, config: TrainConfig) -> AdamW | MuonAndAdamW:
    """The optimiser that the configuration names, at the learning rate of the first step."""
    from palimpsest.muon import MuonAndAdamW

    rate = learning_rate(0, config)
    if config.optimizer == "muon":
        return MuonAndAdamW(model, config, rate)
    return AdamW(parameter_groups(model, config.weight_decay), rate, (config.beta1, config.beta2))


def learning_rate(step: int, config: TrainConfig) -> float:
    """The rate of the 0-based `step`: a linear rise over `warmup_steps`, then the schedule.

    The highest rate is reached exactly at the last step of the rise, the lowest, `learning_rate * min_learning_rate_ratio`,
    at the last step of all; later steps keep it. `wsd` holds the highest rate and falls linearly over the last `decay_share`
    of the steps.
    """
    highest = config.learning_rate
    if step < config.warmup_steps:
        return highest * ((step + 1) / config.warmup_steps)
    first, last = max(config.warmup_steps - 1, 0), config.steps - 1
    if config.schedule == "wsd":
        first = max(first, last - round(config.decay_share * config.steps))
    if config.schedule == "constant" or step <= first or first >= last:
        return highest
    progress = min((step - first) / (last - first), 1.0)
    left = 1 - progress if config.schedule == "wsd" else (1 + math.cos(math.pi * progress)) / 2
    return highest * left + highest * config.min_learning_rate_ratio * (1 - left)


def shared_steps(first: TrainConfig, second: TrainConfig) -> int:
    """How many steps, from the first on, have the same rate under both."""
    least = min(first.steps, second.steps)
    return next((s for s in range(least) if learning_rate(s, first) != learning_rate(s, second)), least)


def joint_norm(tensors: Sequence[Tensor]) -> float:
    """The L2 norm of all tensors as one, in float32 (float64 when one of them is). Of tensors that are cut over
    processes every one must be; all processes get the same. What several processes hold counts once."""
    if not tensors:
        return 0.0
    held = [local(x) for x in tensors]
    norms = [torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in held]
    norms = [norm / copies(x) ** 0.5 for norm, x in zip(norms, tensors, strict=True)]
    dtype = torch.float64 if any(n.dtype == torch.float64 for n in norms) else torch.float32
    norm = torch.linalg.vector_norm(torch.stack([n.to(dtype) for n in norms]))
    if is_cut(tensors[0]):
        squares = norm.double().square()
        torch.distributed.all_reduce(squares)
        norm = squares.sqrt()
    return float(norm)


@torch.no_grad()
def clip_gradients(model: nn.Module, max_norm: float, step: int | None = None) -> float:
    """Scales all gradients so that their joint L2 norm is at most `max_norm` (0: leaves them); returns the norm before.

    Raises TrainingFailed when the norm is not finite, naming `step` when it is given; the gradients then stay as they are.
    """
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm = joint_norm(gradients)
    if not math.isfinite(norm):
        where = "" if step is None else f"step {step}: "
        raise TrainingFailed(f"{where}the gradient norm is {norm}; lower learning_rate, or raise warmup_steps")
    if 0 < max_norm < norm:
        for gradient in gradients:
            gradient.mul_(max_norm / norm)
    return norm
