"""The optimiser: what decays, float32 state under any model dtype, exact ends of the schedules, clipping."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import palimpsest as pal
from palimpsest.optim import AdamW, TrainingFailed, clip_gradients, learning_rate, make_optimizer, parameter_groups
from tests.conftest import TINY

MATRIX = re.compile(r"(_proj|_proj_with_mqa|lm_head|mlp\.gate|shared_expert_gate)\.weight|.*\.experts\.\w+_proj")


def single(value: float, dtype: torch.dtype, decay: float = 0.0) -> tuple[torch.nn.Module, AdamW]:
    """A module with one linear weight [1,4], and its optimiser."""
    module = torch.nn.Linear(4, 1, bias=False, dtype=dtype)
    torch.nn.init.constant_(module.weight, value)
    return module, AdamW(parameter_groups(module, decay), lr=1e-5, betas=(0.9, 0.95))


@pytest.mark.parametrize("preset", TINY)
def test_matrices_decay_and_nothing_else_does(preset: str) -> None:
    model = pal.Model(pal.ModelConfig.preset(preset))
    decayed, kept = parameter_groups(model, 0.1)
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    named = dict(model.named_parameters())
    for group in (decayed, kept):
        assert [id(p) for p in group["params"]] == [id(named[name]) for name in group["param_names"]]
    names = decayed["param_names"] + kept["param_names"]
    assert sorted(names) == sorted(name for name, p in named.items() if p.requires_grad)
    assert sorted(decayed["param_names"]) == sorted(name for name in names if MATRIX.search(name))
    assert {"embed_tokens.weight", "norm.weight"} <= set(kept["param_names"])


def test_one_step_without_gradient_only_shrinks_what_decays() -> None:
    model = pal.Model(pal.ModelConfig.preset("kimi-k3-tiny"))
    optimizer = make_optimizer(model, pal.TrainConfig(learning_rate=0.1, weight_decay=0.5, warmup_steps=0))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        factor = 0.95 if MATRIX.search(name) else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * factor, msg=name)


def test_bfloat16_weights_move_under_float32_state() -> None:
    low, low_optimizer = single(1.0, torch.bfloat16)
    high, high_optimizer = single(1.0, torch.float32)
    for _ in range(1000):
        for module, optimizer in ((low, low_optimizer), (high, high_optimizer)):
            module.weight.grad = torch.ones_like(module.weight)  # type: ignore[union-attr]
            optimizer.step()
    state = low_optimizer.named_state()
    assert {name: tensor.dtype for name, tensor in state.items()} == {
        "weight.step": torch.float32,
        "weight.exp_avg": torch.float32,
        "weight.exp_avg_sq": torch.float32,
        "weight.weight": torch.float32,
    }
    # A step of 1e-5 is far below bfloat16's spacing of 2**-8 just below 1, and yet the steps add up.
    torch.testing.assert_close(state["weight.weight"], high.weight.detach())  # type: ignore[arg-type]
    assert torch.equal(low.weight, high.weight.bfloat16()) and bool((low.weight < 1).all())  # type: ignore[operator, arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_named_state_continues_exactly(dtype: torch.dtype) -> None:
    def steps(module: torch.nn.Module, optimizer: AdamW, first: int, last: int) -> None:
        for i in range(first, last):
            module.weight.grad = torch.linspace(-i, i + 1, 4).view(1, 4).to(dtype)  # type: ignore[assignment]
            optimizer.step()
            optimizer.zero_grad()

    one, one_optimizer = single(0.3, dtype, 0.1)
    steps(one, one_optimizer, 0, 10)
    two, two_optimizer = single(0.3, dtype, 0.1)
    steps(two, two_optimizer, 0, 5)
    three, three_optimizer = single(0.0, dtype, 0.1)
    three.load_state_dict(two.state_dict())
    three_optimizer.load_named_state({name: t.clone() for name, t in two_optimizer.named_state().items()})
    steps(three, three_optimizer, 5, 10)
    assert torch.equal(one.weight, three.weight)  # type: ignore[arg-type]
    for name, tensor in one_optimizer.named_state().items():
        assert torch.equal(tensor, three_optimizer.named_state()[name]), name
    assert one.weight.grad is None


def test_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    module, optimizer = single(1.0, torch.float32)
    module.weight.grad = torch.ones(1, 4)  # type: ignore[assignment]
    optimizer.step()
    good = {name: tensor.clone() for name, tensor in optimizer.named_state().items()}
    for bad, message in [
        ({k: v for k, v in good.items() if k != "weight.exp_avg"}, "weight.exp_avg is missing"),
        ({**good, "weight.exp_avg": torch.zeros(2)}, r"weight.exp_avg has shape \[2\], expected \[1, 4\]"),
        ({**good, "bias.step": torch.zeros(())}, "bias.step belongs to no parameter"),
    ]:
        with pytest.raises(ValueError, match=message):
            optimizer.load_named_state(bad)
    assert all(torch.equal(tensor, good[name]) for name, tensor in optimizer.named_state().items())


@given(
    schedule=st.sampled_from(["cosine", "wsd", "constant"]),
    steps=st.integers(1, 60),
    warmup=st.integers(0, 70),
    ratio=st.floats(0, 1),
    share=st.floats(0, 1),
    rate=st.floats(1e-6, 1),
)
def test_schedules_rise_to_the_highest_rate_and_end_at_the_lowest(
    schedule: str, steps: int, warmup: int, ratio: float, share: float, rate: float
) -> None:
    config = pal.TrainConfig.from_dict(
        {"steps": steps, "warmup_steps": warmup, "learning_rate": rate, "schedule": schedule}
        | {"min_learning_rate_ratio": ratio, "decay_share": share}
    )
    rates = [learning_rate(step, config) for step in range(steps)]
    top = max(warmup - 1, 0)
    assert all(0 < r <= rate for r in rates[: top + 1])
    assert all(a < b for a, b in zip(rates[:top], rates[1 : top + 1], strict=False))
    assert all(a >= b * (1 - 1e-12) for a, b in zip(rates[top:], rates[top + 1 :], strict=False))  # rounding apart
    if steps > top:
        assert rates[top] == rate
    if steps > top + 1:
        decays = schedule == "cosine" or (schedule == "wsd" and round(share * steps) > 0)
        assert rates[-1] == (rate * ratio if decays else rate)
        assert learning_rate(steps + 5, config) == rates[-1]


def test_schedules_between_their_ends() -> None:
    config = pal.TrainConfig(steps=11, warmup_steps=1, learning_rate=1.0, min_learning_rate_ratio=0.0, decay_share=0.4)
    assert learning_rate(5, config) == pytest.approx(0.5)
    assert learning_rate(2, config) == pytest.approx(0.9045085)  # (1 + cos(pi / 5)) / 2
    wsd = config.replace(schedule="wsd")
    assert [learning_rate(step, wsd) for step in range(11)] == [1.0] * 7 + [0.75, 0.5, 0.25, 0.0]
    warm = config.replace(warmup_steps=4)
    assert [learning_rate(step, warm) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]


def test_clipping_scales_to_the_norm_and_reports_the_one_before() -> None:
    module = torch.nn.Linear(2, 1)
    gradients = torch.tensor([[3.0, 0.0]]), torch.tensor([4.0])

    def fill() -> None:
        module.weight.grad, module.bias.grad = (g.clone() for g in gradients)

    def norm() -> float:
        assert module.weight.grad is not None and module.bias.grad is not None
        return float(torch.cat([module.weight.grad.flatten(), module.bias.grad]).norm())

    for limit, after in ((1.0, 1.0), (5.0, 5.0), (7.0, 5.0), (0.0, 5.0)):
        fill()
        assert clip_gradients(module, limit) == pytest.approx(5.0)
        assert norm() == pytest.approx(after)
    assert clip_gradients(torch.nn.Linear(2, 1), 1.0) == 0.0
    for wrong in (float("nan"), float("inf")):
        fill()
        module.weight.grad[0, 0] = wrong  # type: ignore[index]
        with pytest.raises(TrainingFailed, match=rf"^step 7: the gradient norm is {wrong}; lower learning_rate"):
            clip_gradients(module, 1.0, step=7)
        assert module.bias.grad is not None and float(module.bias.grad) == 4.0


def test_norm_of_bfloat16_gradients_is_not_rounded() -> None:
    module = torch.nn.Linear(1000, 1, bias=False, dtype=torch.bfloat16)
    module.weight.grad = torch.full_like(module.weight, 1.0)
    assert clip_gradients(module, 0.0) == pytest.approx(1000**0.5, rel=1e-6)
