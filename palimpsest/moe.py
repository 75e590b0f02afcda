"""Mixture of experts: a router picks a few of many MLPs for each token.

    s = sigmoid(W_r x)  (or softmax)       chosen = top-k of s + bias       w_e = s_e / sum of the chosen s * factor
    y = sum_e w_e E_e(x) + shared(x)

The bias only chooses; it never enters the weights. In the latent form (LatentMoE, Kimi K3) experts work in a narrower space:

    y = W_up RMSNorm( sum_e w_e E_e(W_down x) ) + shared(x)

while the router and the shared expert see the full width. Router scores, weights and the sum over experts are float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from palimpsest import ops
from palimpsest.config import InputError, ModelConfig
from palimpsest.linear import Linear


def route(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    renormalize: bool = True,
    factor: float = 1.0,
    score: str = "sigmoid",
) -> tuple[Tensor, Tensor]:
    """logits [N,E], selection bias [E] or None -> experts int64 [N,top_k] (best first), weights float32 [N,top_k]."""
    scores = scores_of(logits, score)
    choice = scores if bias is None else scores + bias.to(scores.dtype)
    experts = choice.topk(top_k, -1).indices
    weights = scores.gather(-1, experts)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return experts, weights * factor


def scores_of(logits: Tensor, score: str) -> Tensor:
    """Router scores in float32 (float64 when the logits are), 'sigmoid' or 'softmax'."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return torch.sigmoid(logits) if score == "sigmoid" else torch.softmax(logits, -1)


class Router(nn.Module):
    """Linear scores in float32 and the selection bias, which training's load balancing moves and no gradient does."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(config.num_experts, config.hidden_size))
        bias = torch.zeros(config.num_experts, dtype=torch.float32)
        self.e_score_correction_bias = nn.Parameter(bias, requires_grad=False)
        self.top_k, self.score = config.num_experts_per_token, config.moe_router_activation_func
        self.renormalize, self.factor = config.moe_renormalize, config.routed_scaling_factor
        self.observe: Callable[[Tensor, Tensor], None] | None = None  # told logits and choice while training balances

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [N,D] -> experts [N,top_k], weights [N,top_k]."""
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.to(dtype), self.weight.to(dtype))
        chosen = route(logits, self.e_score_correction_bias, self.top_k, self.renormalize, self.factor, self.score)
        if self.observe is not None:
            self.observe(logits, chosen[0])
        return chosen

    def scores(self, logits: Tensor) -> Tensor:
        return scores_of(logits, self.score)


class Experts(nn.Module):
    """The routed experts, stacked: gate_proj and up_proj [E,I,R], down_proj [E,R,I]; R the width they work in."""

    gate_proj: nn.Parameter
    up_proj: nn.Parameter
    down_proj: nn.Parameter

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        from palimpsest.mlps import activation

        count, inner = config.num_experts, config.moe_intermediate_size
        width = config.routed_expert_hidden_size or config.hidden_size
        self.count = count
        for name in ("gate_proj", "up_proj"):
            self.add_matrices(name, count, inner, width)
        self.add_matrices("down_proj", count, width, inner)
        self.activation = activation(config.moe_hidden_act, config)
        # Where other processes hold a part of the experts: takes rows there and back.
        self.exchange: Callable[[Tensor, Tensor, Callable[[Tensor, Tensor], Tensor]], Tensor] | None = None

    def add_matrices(self, name: str, count: int, rows: int, columns: int) -> None:
        self.register_parameter(name, nn.Parameter(torch.zeros(count, rows, columns)))

    def product(self, name: str, x: Tensor, counts: Tensor) -> Tensor:
        """Rows x [N,in], sorted by expert, counts[e] of each, times the matrices `name` -> [N,out]."""
        product = ops.grouped_in_graph if torch.compiler.is_compiling() else ops.grouped_matmul
        return product(x, self.held(name), counts)

    def held(self, name: str) -> Tensor:
        """The parameter `name`, of this process' experts where others hold the rest."""
        weight = self.get_parameter(name)
        return weight.to_local() if hasattr(weight, "device_mesh") else weight  # type: ignore[operator]

    def work(self, rows: Tensor, counts: Tensor) -> Tensor:
        """What the experts here make of rows [N,R], sorted by expert, counts[e] of each -> [N,R]."""
        gate, up = (self.product(name, rows, counts) for name in ("gate_proj", "up_proj"))
        return self.product("down_proj", self.activation(gate, up), counts)

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """x [N,R], experts and weights [N,k] -> the weighted sum [N,R] in x's dtype; three matrix products in all."""
        order = experts.flatten().argsort(stable=True)
        counts = torch.zeros(self.count, dtype=torch.int64, device=x.device)
        counts.scatter_add_(0, experts.flatten(), torch.ones_like(experts.flatten()))
        rows = x[order // experts.shape[1]]
        y = self.work(rows, counts) if self.exchange is None else self.exchange(rows, counts, self.work)
        y = y.to(weights.dtype)[order.argsort()].unflatten(0, experts.shape)
        return (y * weights.unsqueeze(-1)).sum(1).to(x.dtype)


class PackedExperts(Experts):
    """The same in four bits (ops/mxfp4.py): `<name>_packed` uint8 [E,out,in/2] and `<name>_scale` uint8 [E,out,in/32].

    They stay packed: a product unpacks a few rows of a chosen expert at a time. They are not trained.
    """

    def add_matrices(self, name: str, count: int, rows: int, columns: int) -> None:
        if columns % ops.MXFP4_GROUP:
            raise InputError(f"model: experts are {columns} wide; in MXFP4 that must be a multiple of {ops.MXFP4_GROUP}")
        for part, width in (("packed", columns // 2), ("scale", columns // ops.MXFP4_GROUP)):
            empty = torch.zeros(count, rows, width, dtype=torch.uint8)
            self.register_parameter(f"{name}_{part}", nn.Parameter(empty, requires_grad=False))

    def product(self, name: str, x: Tensor, counts: Tensor) -> Tensor:
        packed, scale = self.get_parameter(f"{name}_packed"), self.get_parameter(f"{name}_scale")
        each = zip(x.split(counts.tolist()), packed, scale, strict=True)
        return torch.cat([ops.mxfp4_matmul(*parts) for parts in each if len(parts[0])] or [x.new_zeros(0, packed.shape[1])])


class MoE(nn.Module):
    """x [...,D] -> [...,D]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        from palimpsest.mlps import GatedMLP

        width, latent = config.hidden_size, config.routed_expert_hidden_size
        self.gate = Router(config)
        self.experts = Experts(config)
        self.shared_experts = None
        if config.num_shared_experts:
            inner = config.num_shared_experts * config.moe_intermediate_size
            self.shared_experts = GatedMLP(config, config.moe_hidden_act, inner)
        self.shared_expert_gate = Linear(width, 1, bias=False) if config.shared_expert_gate else None
        self.latent = latent is not None
        if latent is not None:
            self.routed_expert_down_proj = Linear(width, latent, bias=False)
            use_norm, self.norm_eps = config.latent_moe_use_norm, config.rms_norm_eps
            self.routed_expert_norm = nn.RMSNorm(latent, config.rms_norm_eps) if use_norm else None
            self.routed_expert_up_proj = Linear(latent, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        experts, weights = self.gate(flat)
        if self.latent:
            routed = self.experts(self.routed_expert_down_proj(flat), experts, weights)
            if self.routed_expert_norm is not None:
                routed = ops.rms_norm(routed, self.routed_expert_norm.weight, self.norm_eps)
            routed = self.routed_expert_up_proj(routed)
        else:
            routed = self.experts(flat, experts, weights)
        if self.shared_experts is not None:
            shared = self.shared_experts(flat)
            if self.shared_expert_gate is not None:
                shared = shared * torch.sigmoid(self.shared_expert_gate(flat))
            routed = routed + shared
        return routed.view_as(x)
