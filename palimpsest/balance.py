"""Balancing the load of experts by their selection bias: no auxiliary loss, no dropped tokens.

Scores s [m,n] of m tokens for n experts, k chosen by s + b. Quantile balancing (Kimi K3): with the cutoff of each token

    alpha_i = the (k+1)-th largest of s_i + b        b_j <- the k/n quantile over tokens of alpha_i - s_ij

is the bias with which expert j would have won its fair share against those cutoffs. The sign rule (DeepSeek-V3) moves each
bias by a fixed step towards the fair share. Either way the mean of the biases is taken out, since only differences choose,
and the bias moves once per optimiser step, however often the tokens were split, and not when a pass is recomputed.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from palimpsest.config import TrainConfig
from palimpsest.model import Model
from palimpsest.moe import Router

BINS = 1000


def quantile_bias(scores: Tensor, bias: Tensor, top_k: int) -> Tensor:
    """The new bias [n] from all scores [m,n] at once: the definition that `Histogram` approximates. Needs k < n."""
    cutoffs = (scores + bias).topk(top_k + 1, -1).values[:, -1:]
    fair = torch.quantile((cutoffs - scores).double(), top_k / scores.shape[1], dim=0)
    return (fair - fair.mean()).to(bias.dtype)


class Histogram:
    """Counts [n, BINS] of alpha - s, which add up over micro-batches and ranks; the quantile is read off inside its bin."""

    def __init__(self, bias: Tensor, top_k: int) -> None:
        self.bias, self.top_k = bias.detach().clone().float(), top_k
        self.low = float(self.bias.min()) - 1
        self.width = (float(self.bias.max()) + 1 - self.low) / BINS
        self.counts = torch.zeros(len(bias), BINS, dtype=torch.int64, device=bias.device)

    def add(self, scores: Tensor) -> None:
        """scores [m,n] float32."""
        cutoffs = (scores + self.bias).topk(self.top_k + 1, -1).values[:, -1:]
        bins = ((cutoffs - scores - self.low) / self.width).floor().clamp_(0, BINS - 1).long()
        bins += BINS * torch.arange(len(self.bias), device=bins.device)
        self.counts += bins.flatten().bincount(minlength=self.counts.numel()).view_as(self.counts)

    def result(self) -> Tensor:
        """The new bias [n]; the old one when nothing was added."""
        tokens = int(self.counts[0].sum())
        if tokens == 0:
            return self.bias
        share = tokens * self.top_k / len(self.bias)
        upto = self.counts.cumsum(1)
        index = (upto < math.ceil(share)).sum(1, keepdim=True)
        inside = self.counts.gather(1, index).double()
        before = upto.gather(1, index) - inside
        fraction = ((share - before) / inside).clamp(0, 1)
        fair = (self.low + (index + fraction) * self.width).squeeze(1)
        return (fair - fair.mean()).float()


def sign_bias(bias: Tensor, load: Tensor, rate: float) -> Tensor:
    """The sign rule: bias [n] moved by `rate` up where the load [n] is below its mean, down where above."""
    load = load.double()
    step = rate * (load.mean() - load).sign()
    return (bias + step - step.mean()).to(bias.dtype)


class Balancer:
    """Watches the routers of a model in training and moves their bias after each optimiser step."""

    def __init__(self, model: Model, config: TrainConfig) -> None:
        self.rule, self.rate = config.moe_balance, config.moe_balance_rate
        self.routers = [module for module in model.modules() if isinstance(module, Router)]
        # Made once: a compiled graph looks whether they are still the same.
        self.observers: list[Any] = [torch.compiler.disable(partial(self._see, number)) for number in range(len(self.routers))]
        self.begin()

    def begin(self) -> None:
        """Forgets what was seen; call before the first micro-batch of a step."""
        self.loads = [torch.zeros_like(r.e_score_correction_bias, dtype=torch.int64) for r in self.routers]
        self.histograms: list[Histogram | None] = []
        for number, router in enumerate(self.routers):
            use = self.rule == "quantile" and router.top_k < len(router.e_score_correction_bias)
            self.histograms.append(Histogram(router.e_score_correction_bias, router.top_k) if use else None)
            router.observe = self.observers[number]

    def end(self) -> None:
        """Moves every bias and stops watching."""
        self._share()
        for router, load, histogram in zip(self.routers, self.loads, self.histograms, strict=True):
            router.observe = None
            bias = router.e_score_correction_bias
            if histogram is not None:
                bias.data.copy_(histogram.result())
            elif self.rule == "sign" and load.any():
                bias.data.copy_(sign_bias(bias.data, load, self.rate))

    def metrics(self) -> dict[str, Any]:
        """Of the last step: by how much the busiest expert of any layer exceeds its fair share, experts without tokens, and
        for every layer with experts the loads of the idlest, the median and the busiest as multiples of the fair share."""
        loads = [load.double() for load in self.loads if load.any()]
        if not loads:
            return {}
        worst = max(float(load.max() / load.mean()) - 1 for load in loads)
        idle = sum(int((load == 0).sum()) for load in loads)
        marks = torch.tensor([0, 0.5, 1], dtype=torch.float64, device=loads[0].device)
        by_layer = [(load / load.mean()).quantile(marks).tolist() for load in loads]
        return {"moe_max_violation": worst, "moe_idle_experts": idle, "moe_load": by_layer}

    @torch.no_grad()
    def _see(self, number: int, logits: Tensor, experts: Tensor) -> None:
        # A pass that is repeated inside the backward pass (recomputation) shows the same tokens again.
        if torch._C._current_graph_task_id() != -1 or not self.routers[number].training:
            return
        self.loads[number] += experts.flatten().bincount(minlength=len(self.loads[number]))
        histogram = self.histograms[number]
        if histogram is not None:
            histogram.add(self.routers[number].scores(logits).float())

    def _share(self) -> None:
        """Adds the counts of all ranks, in one message."""
        if not self.routers or not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return
        counts = [*self.loads, *(histogram.counts for histogram in self.histograms if histogram is not None)]
        message = torch.cat([count.flatten() for count in counts])
        torch.distributed.all_reduce(message)
        for count, part in zip(counts, message.split([count.numel() for count in counts]), strict=True):
            count.copy_(part.view_as(count))
