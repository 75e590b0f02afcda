"""The mixture of experts: the router's published vector, a slow loop over experts, idle experts, and the call count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import palimpsest as pal
from palimpsest.mlps import situ, swiglu
from palimpsest.moe import MoE, route
from tests.conftest import relative

FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no shared expert": {"num_shared_experts": 0},
    "gated shared expert, softmax": {"shared_expert_gate": True, "moe_router_activation_func": "softmax"},
    "not renormalised, scaled": {"moe_renormalize": False, "routed_scaling_factor": 2.446},
    "latent": {"routed_expert_hidden_size": 5, "moe_hidden_act": "situ", "num_shared_experts": 2},
    "latent, no norm": {"routed_expert_hidden_size": 5, "latent_moe_use_norm": False},
    "one of many": {"num_experts": 9, "num_experts_per_token": 1},
    "all of them": {"num_experts": 3, "num_experts_per_token": 3},
}


def make(dtype: torch.dtype = torch.float64, **fields: Any) -> MoE:
    base = {"vocab_size": 3, "hidden_size": 8, "num_hidden_layers": 1, "mixers": ["attention"], "mlps": ["moe"]}
    sizes = {"num_experts": 6, "num_experts_per_token": 2, "moe_intermediate_size": 7, "rms_norm_eps": 1e-3}
    moe = MoE(pal.ModelConfig.from_dict({**base, **sizes, **fields})).to(dtype)
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.normal_(0, 0.7)
    return moe


# ----------------------------------------------------------------------------------------------------------- the router


def test_published_vector() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]], dtype=torch.float64)
    bias = torch.tensor([-0.5, 0.0, 0.4, 0.0], dtype=torch.float64)
    experts, weights = route(logits, bias, 2)
    assert experts.tolist() == [[2, 1]]
    assert torch.allclose(weights, torch.tensor([[0.40615452, 0.59384548]], dtype=torch.float64), atol=1e-8)
    experts, weights = route(logits, None, 2, renormalize=False, factor=2.0)
    assert experts.tolist() == [[0, 1]]
    assert torch.allclose(weights, 2 * torch.sigmoid(logits[:, :2]))
    experts, weights = route(logits.float(), None, 2, score="softmax")
    assert experts.tolist() == [[0, 1]] and weights.dtype == torch.float32
    assert torch.allclose(weights, torch.tensor([[2.0, 1.0]]).softmax(-1))
    _, weights = route(logits, None, 2, renormalize=False, score="softmax")
    assert torch.allclose(weights, logits.softmax(-1)[:, :2])


def test_weights_come_from_the_unbiased_scores() -> None:
    """R074: scores near 1e-8 beside a bias of 12 would vanish if the weights were taken from their sum."""
    logits = torch.tensor([[3e-8, 5e-8, 9e-8]]).logit()
    experts, weights = route(logits, torch.full((3,), 12.0), 3)
    assert sorted(experts[0].tolist()) == [0, 1, 2]
    ordered = weights[0][experts[0].argsort()]
    assert torch.allclose(ordered, torch.tensor([3.0, 5.0, 9.0]) / 17, rtol=1e-4)
    _, weights = route(torch.full((1, 4), -1e4), None, 2)
    assert weights.isfinite().all(), "scores that underflow give no 0/0"


def test_scores_are_float32_whatever_the_model_is() -> None:
    """A router in bfloat16 picks other experts for a few tokens in a hundred."""
    config = pal.ModelConfig.preset("kimi-k3-tiny", hidden_size=8, num_experts=64, num_experts_per_token=8)
    model = pal.Model(config)
    half = model.layers[1].mlp
    assert isinstance(half, MoE)
    half.gate.e_score_correction_bias.data.normal_(0, 0.1)
    model.bfloat16()
    x = torch.randn(200, 8)
    assert half.gate.e_score_correction_bias.dtype == torch.float32 and half.gate.weight.dtype == torch.bfloat16
    chosen, weights = half.gate(x.bfloat16())
    logits = x.bfloat16().double() @ half.gate.weight.double().mT
    expected, exact = route(logits, half.gate.e_score_correction_bias, 8)
    assert weights.dtype == torch.float32
    assert torch.equal(chosen.sort(-1).values, expected.sort(-1).values)
    assert relative(weights, exact) < 1e-6
    with torch.autocast("cpu", torch.bfloat16):
        again, same = half.gate(x.bfloat16())
    assert torch.equal(again, chosen) and torch.equal(same, weights)


def test_bias_only_chooses() -> None:
    """It gets no gradient, and changing all of it by one number changes nothing."""
    moe = make()
    x = torch.randn(10, 8, dtype=torch.float64)
    y = moe(x)
    y.sum().backward()
    assert not moe.gate.e_score_correction_bias.requires_grad and moe.gate.e_score_correction_bias.grad is None
    assert moe.gate.weight.grad is not None and moe.gate.weight.grad.any()
    moe.gate.e_score_correction_bias.data += 0.5
    assert torch.equal(moe(x), y)
    moe.gate.e_score_correction_bias.data[3] += 100
    experts, _ = moe.gate(x)
    assert (experts == 3).any(-1).all()


# ------------------------------------------------------------------------------------------------------- a slow version


def slow(moe: MoE, config: pal.ModelConfig, x: Tensor) -> Tensor:
    act = swiglu
    if config.moe_hidden_act == "situ":
        act = lambda g, u: situ(g, u, config.activation_situ_beta, config.activation_situ_linear_beta)  # noqa: E731
    rows = []
    for token in x.flatten(0, -2):
        logits = moe.gate.weight @ token
        scores = logits.softmax(-1) if config.moe_router_activation_func == "softmax" else torch.sigmoid(logits)
        ranked = (scores + moe.gate.e_score_correction_bias).argsort(descending=True).tolist()
        chosen = ranked[: config.num_experts_per_token]
        total = sum(scores[e] for e in chosen) if config.moe_renormalize else 1.0
        inner = token if config.routed_expert_hidden_size is None else moe.routed_expert_down_proj.weight @ token
        y = torch.zeros_like(inner)
        for e in chosen:
            gate, up, down = moe.experts.gate_proj[e], moe.experts.up_proj[e], moe.experts.down_proj[e]
            y = y + scores[e] / total * config.routed_scaling_factor * (down @ act(gate @ inner, up @ inner))
        if config.routed_expert_hidden_size is not None:
            if config.latent_moe_use_norm:
                scale = (y.square().mean() + config.rms_norm_eps).rsqrt()
                y = y * scale * moe.routed_expert_norm.weight  # type: ignore[operator]
            y = moe.routed_expert_up_proj.weight @ y
        if moe.shared_experts is not None:
            shared = moe.shared_experts
            out = shared.down_proj.weight @ act(shared.gate_proj.weight @ token, shared.up_proj.weight @ token)
            if moe.shared_expert_gate is not None:
                out = out * torch.sigmoid(moe.shared_expert_gate.weight @ token)
            y = y + out
        rows.append(y)
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize("form", FORMS)
def test_equals_the_slow_version(form: str) -> None:
    moe = make(**FORMS[form])
    sizes = {"num_experts": 6, "num_experts_per_token": 2, "moe_intermediate_size": 7, "rms_norm_eps": 1e-3}
    base = {"vocab_size": 3, "hidden_size": 8, "num_hidden_layers": 1, "mixers": ["attention"], "mlps": ["moe"]}
    config = pal.ModelConfig.from_dict({**base, **sizes, **FORMS[form]})
    x = torch.randn(3, 5, 8, dtype=torch.float64, requires_grad=True)
    leaves = [x] + [p for p in moe.parameters() if p.requires_grad]
    y, expected = moe(x), slow(moe, config, x)
    assert relative(y, expected) < 1e-13
    cotangent = torch.randn_like(y)
    for grad, wanted in zip(
        torch.autograd.grad(y, leaves, cotangent), torch.autograd.grad(expected, leaves, cotangent), strict=True
    ):
        # One renormalised expert has weight 1 whatever its score: the router's gradient is zero but for rounding.
        assert relative(grad, wanted) < 1e-12 or max(float(g.abs().max()) for g in (grad, wanted)) < 1e-12
    single = moe.float()(x.float())
    assert relative(single, slow(moe.double(), config, x.float().double())) < 1e-5


def test_shared_experts_are_one_wider_mlp() -> None:
    """Two shared experts are fused: the width is the sum, on the full width even when the routed ones are latent."""
    moe = make(**FORMS["latent"])
    assert moe.shared_experts is not None and tuple(moe.shared_experts.gate_proj.weight.shape) == (14, 8)
    assert tuple(moe.experts.gate_proj.shape) == (6, 7, 5) and tuple(moe.experts.down_proj.shape) == (6, 5, 7)
    assert tuple(moe.gate.weight.shape) == (6, 8)


def test_half_precision() -> None:
    for fields in FORMS.values():
        moe = make(torch.float32, **fields)
        x = torch.randn(40, 8).bfloat16()
        experts, _ = moe.gate(x)
        exact = moe.double()(x.double())
        moe = moe.bfloat16()
        moe.gate.float()  # rounding the router's weight may choose other experts, which is another matter
        again, _ = moe.gate(x)
        same = (experts == again).all(-1)
        y = moe(x)
        assert y.dtype == torch.bfloat16 and same.float().mean() > 0.8
        assert relative(y[same], exact[same]) < 0.05


# ------------------------------------------------------------------------------------------------------------ odd loads


@pytest.mark.parametrize("form", ["plain", "latent"])
def test_idle_experts(form: str) -> None:
    """R072: three steps with freed memory full of NaN; the gradient of an expert without tokens is exactly zero."""
    moe = make(torch.float32, num_experts=8, num_experts_per_token=1, **FORMS[form])
    optimizer = torch.optim.AdamW([p for p in moe.parameters() if p.requires_grad], lr=1e-2)
    for step in range(3):
        poison = [torch.full_like(p, torch.nan) for p in moe.parameters() for _ in range(3)]
        del poison
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(step))
        used = set(moe.gate(x)[0].flatten().tolist())
        loss = moe(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        assert loss.isfinite()
        for weight in moe.experts.parameters():
            assert weight.grad is not None and weight.grad.isfinite().all()
            for expert in range(8):
                assert bool(weight.grad[expert].any()) == (expert in used)
        optimizer.step()
        assert all(p.isfinite().all() for p in moe.parameters())


@pytest.mark.parametrize("form", FORMS)
def test_no_tokens(form: str) -> None:
    moe = make(torch.float32, **FORMS[form])
    for shape in ((2, 0, 8), (0, 8)):
        x = torch.randn(shape, requires_grad=True)
        y = moe(x)
        assert y.shape == shape
        y.sum().backward()
        assert all(p.grad is None or not p.grad.any() for p in moe.parameters())


def test_all_tokens_on_one_expert() -> None:
    moe = make(num_experts_per_token=1, num_shared_experts=0)
    moe.gate.e_score_correction_bias.data[4] = 100.0
    x = torch.randn(33, 8, dtype=torch.float64)
    gate, up, down = moe.experts.gate_proj[4], moe.experts.up_proj[4], moe.experts.down_proj[4]
    assert relative(moe(x), (F.silu(x @ gate.mT) * (x @ up.mT)) @ down.mT) < 1e-13


def test_batch_does_not_matter() -> None:
    """A token's result does not depend on which others share the call."""
    moe = make(num_experts_per_token=3)
    x = torch.randn(20, 8, dtype=torch.float64)
    together = moe(x)
    alone = torch.cat([moe(row) for row in x.split(1)])
    backwards = moe(x.flip(0)).flip(0)
    assert relative(alone, together) < 1e-14 and relative(backwards, together) < 1e-14


# ----------------------------------------------------------------------------------------------------------- call count


class CountMatmuls(TorchDispatchMode):
    """Counts the matrix products that really run."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if any(word in name for word in ("mm", "matmul", "linear", "bmm", "einsum", "mv", "dot")):
            self.calls.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("inner", [16, 7])
def test_call_count_does_not_grow_with_experts(dtype: torch.dtype, inner: int) -> None:
    """At most four matrix products for the experts of a layer, however many there are, whatever their load."""
    for count in (2, 8, 64):
        moe = make(dtype, num_experts=count, hidden_size=16, moe_intermediate_size=inner)
        x = torch.randn(24, 16, dtype=dtype)
        experts, weights = moe.gate(x)
        with CountMatmuls() as counter, torch.no_grad():
            moe.experts(x, experts, weights)
        assert 3 <= len(counter.calls) <= 4, counter.calls
        leaf = x.clone().requires_grad_()
        y = moe.experts(leaf, experts, weights.to(weights.dtype))
        with CountMatmuls() as counter:
            torch.autograd.grad(y.sum(), [leaf, *moe.experts.parameters()])
        assert len(counter.calls) <= 8, counter.calls
