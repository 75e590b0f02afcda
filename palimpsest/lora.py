"""Low-rank adapters (LoRA, arXiv 2106.09685): the model stays as it is, and every linear map learns a small difference.

    y = W x + s B A x        A [r,in] drawn, B [out,r] zero at first, s = alpha / r

Every linear map of the layers gets one: those of attention as those of recurrent memories with their gates, of MLPs, shared
and routed experts. Embeddings, the head, norms, decay rates, convolutions, routers and residual queries stay as they are.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from palimpsest import ops
from palimpsest.checkpoint import flush_all, opened, read_json, staged
from palimpsest.config import InputError, LoraConfig
from palimpsest.model import Model
from palimpsest.moe import Experts, PackedExperts

SETTINGS, WEIGHTS = "adapter.json", "adapter.safetensors"
FORMAT = "palimpsest-lora"


class Adapted(nn.Module):
    """A linear map and its adapter."""

    def __init__(self, base: nn.Linear, config: LoraConfig) -> None:
        super().__init__()
        self.base, self.config, self.scale = base, config, config.alpha / config.rank
        like: dict[str, Any] = {"dtype": base.weight.dtype, "device": base.weight.device}
        self.lora_a = nn.Parameter(torch.empty(config.rank, base.in_features, **like))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, config.rank, **like))
        nn.init.normal_(self.lora_a, 0, base.in_features**-0.5)

    @property
    def weight(self) -> Tensor:
        """W + s B A, for those who need the matrix itself."""
        return self.base.weight + (self.scale * (self.lora_b @ self.lora_a)).to(self.base.weight.dtype)

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * F.linear(F.linear(x, self.lora_a), self.lora_b)

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """The map with the difference in its weight."""
        self.base.weight.copy_(_sum(self.base.weight, self.lora_b, self.lora_a, self.scale))
        return self.base


class AdaptedExperts(Experts):
    """Routed experts, each with an adapter for each of its maps: `<name>_lora_a` [E,r,in] and `<name>_lora_b` [E,out,r]."""

    def __init__(self, base: Experts, config: LoraConfig) -> None:
        nn.Module.__init__(self)
        self.count, self.activation, self.exchange = base.count, base.activation, base.exchange
        self.config, self.scale = config, config.alpha / config.rank
        for name, weight in list(base.named_parameters()):
            like: dict[str, Any] = {"dtype": weight.dtype, "device": weight.device}
            a = torch.empty(len(weight), config.rank, weight.shape[2], **like).normal_(0, weight.shape[2] ** -0.5)
            self.register_parameter(name, weight)
            self.register_parameter(f"{name}_lora_a", nn.Parameter(a))
            b = torch.zeros(len(weight), weight.shape[1], config.rank, **like)
            self.register_parameter(f"{name}_lora_b", nn.Parameter(b))

    def product(self, name: str, x: Tensor, counts: Tensor) -> Tensor:
        y = super().product(name, x, counts)
        low = ops.grouped_matmul(x, self.held(f"{name}_lora_a"), counts)
        return y + self.scale * ops.grouped_matmul(low, self.held(f"{name}_lora_b"), counts)

    @torch.no_grad()
    def merged(self, into: Experts) -> Experts:
        """`into` with these experts' weights and their differences in them."""
        for name in [name for name, _ in self.named_parameters() if "_lora_" not in name]:
            a, b = self.get_parameter(f"{name}_lora_a"), self.get_parameter(f"{name}_lora_b")
            weight = self.get_parameter(name)
            weight.copy_(_sum(weight, b, a, self.scale))
            into.register_parameter(name, weight)
        into.exchange = self.exchange
        return into


def _sum(weight: Tensor, b: Tensor, a: Tensor, scale: float) -> Tensor:
    """W + s B A in float32 (float64 when W is), rounded once."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    return weight.to(dtype) + scale * (b.to(dtype) @ a.to(dtype))


def add(model: Model, config: LoraConfig) -> tuple[list[str], list[str]]:
    """Gives every linear map of the layers an adapter, and lets nothing else be trained.

    Returns (names of what is adapted, names of the matrices that are not). Raises InputError for a model that has adapters,
    and for one whose experts are packed in four bits or on disk.
    """
    if config_of(model) is not None:
        raise InputError("model: it has adapters already; merge them first")
    if any(isinstance(module, Experts) and type(module) is not Experts for module in model.modules()):
        raise InputError("model: its experts are packed or on disk, where they cannot be adapted; load them whole")
    model.requires_grad_(False)
    adapted = []
    for name, module in list(model.layers.named_modules()):
        if isinstance(module, nn.Linear):
            _put(model.layers, name, Adapted(module, config))
        elif isinstance(module, Experts) and not isinstance(module, PackedExperts):
            _put(model.layers, name, AdaptedExperts(module, config))
        else:
            continue
        adapted.append(f"layers.{name}")
    covered = tuple(f"{name}." for name in adapted)
    left = [name for name, parameter in model.named_parameters() if parameter.dim() > 1 and not name.startswith(covered)]
    return adapted, left


def merge(model: Model) -> Model:
    """The model, in place, with its adapters in its weights; it can then be saved, and trained in full."""
    for name, module in list(model.layers.named_modules()):
        if isinstance(module, Adapted):
            _put(model.layers, name, module.merged())
        elif isinstance(module, AdaptedExperts):
            with torch.device("meta"):
                fresh = Experts(model.config)
            _put(model.layers, name, module.merged(fresh))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.endswith("e_score_correction_bias"))
    return model


def config_of(model: Model) -> LoraConfig | None:
    """Of its adapters; None when it has none."""
    return next((module.config for module in model.modules() if isinstance(module, Adapted | AdaptedExperts)), None)


def weights(model: Model) -> dict[str, Tensor]:
    """The adapters' tensors."""
    return {name: parameter.detach() for name, parameter in model.named_parameters() if "lora_" in name}


def save(model: Model, folder: Path) -> None:
    """Writes the adapters alone, a small folder for `load`. Raises InputError for a folder that exists."""
    config = config_of(model)
    assert config is not None
    if folder.exists():
        raise InputError(f"{folder}: it exists; give another folder")
    with staged(folder.absolute()) as staging:
        save_file({name: tensor.contiguous() for name, tensor in weights(model).items()}, staging / WEIGHTS)
        (staging / SETTINGS).write_text(json.dumps({"format": FORMAT, **config.to_dict()}) + "\n", encoding="utf-8")
        flush_all(staging)
        staging.rename(folder.absolute())


@torch.no_grad()
def load(model: Model, folder: Path) -> Model:
    """The model, in place, with the adapters that `save` wrote. Raises InputError, with the model unchanged, when they are of
    another model: a tensor that has no place is never left out."""
    settings = read_json(folder / SETTINGS)
    if settings.pop("format", None) != FORMAT:
        raise InputError(f"{folder / SETTINGS}: no adapter of this library; give a folder that lora.save wrote")
    config = LoraConfig.from_dict(settings, str(folder / SETTINGS))
    with opened(folder / WEIGHTS) as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dictionary)
    flags = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    add(model, config)
    own = weights(model)
    wrong = {name for name in own.keys() | found.keys() if name not in own or name not in found}
    wrong |= {name for name in own.keys() & found.keys() if own[name].shape != found[name].shape}
    if wrong:
        merge(model)  # the fresh adapters are zero: nothing changes
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(flags[name])
        raise InputError(
            f"{folder / WEIGHTS}: {len(wrong)} tensors do not fit this model, first {min(wrong)!r}; "
            "use the model it was made for"
        )
    for name, tensor in own.items():
        tensor.copy_(found[name])
    return model


def _put(layers: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(layers.get_submodule(parent), last, module)
