"""torch.compile finds one graph in each model, and the graph does what the code does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import palimpsest as pal
from palimpsest.train import Trainer
from tests.conftest import make_ids, make_model

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, about its own


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compare(model: pal.Model, backend: str) -> None:
    """One graph for the whole loss (fullgraph raises at a break), with the loss and gradients of the plain code."""
    ids = make_ids(model, 2, 48)
    compiled: Any = torch.compile(model.loss, fullgraph=True, backend=backend)
    loss = compiled(ids, ids)
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    expected = model.loss(ids, ids)
    expected.backward()
    torch.testing.assert_close(loss.detach(), expected.detach())
    for name, p in model.named_parameters():
        if p.grad is not None:
            # As far as float32 itself leaves the digits of kimi-k3-tiny's gradients: a graph has its own kernels.
            atol = max(1e-6, 1e-4 * p.grad.abs().max().item())
            torch.testing.assert_close(found[name], p.grad, rtol=1e-4, atol=atol, msg=name)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("preset", ["gpt2-tiny", "smollm2-tiny", "linear-attention-tiny", "qwen3-next-tiny", "kimi-k3-tiny"])
def test_no_graph_break(preset: str, recompute: bool) -> None:
    if recompute and preset not in ("gpt2-tiny", "kimi-k3-tiny"):
        pytest.skip("the same code is recomputed in every preset")
    model = make_model(preset, num_hidden_layers=4).train()
    model.recompute = recompute
    compare(model, "eager")


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["kda-tiny", "kimi-k3-tiny"])
def test_the_graph_with_its_backward_pass(preset: str) -> None:
    compare(make_model(preset, num_hidden_layers=4).train(), "aot_eager")


def test_backends_and_packed_documents_inside_a_graph() -> None:
    """The operation itself, by name, with documents; against the same outside."""
    from palimpsest import ops

    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 40, 2, 8, generator=draw, dtype=torch.float64).requires_grad_() for _ in range(3))
    g, beta = -torch.rand(1, 40, 2, 8, generator=draw, dtype=torch.float64), torch.rand(1, 40, 2, generator=draw).double()
    for backend in ("reference", "chunked", None):

        def work(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, backend: str | None = backend) -> torch.Tensor:
            o, state = ops.kda(q, k, v, g, beta, qk_l2norm=True, backend=backend)
            return o.square().sum() + state.square().sum()

        expected = torch.autograd.grad(work(q, k, v), (q, k, v))
        found = torch.autograd.grad(torch.compile(work, fullgraph=True, backend="aot_eager")(q, k, v), (q, k, v))
        for one, two in zip(found, expected, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-12)


def test_training_compiles_and_loses_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *args, **options: plain(*args, **{**options, "backend": "eager"}))
    tokens = np.random.default_rng(0).integers(0, 250, 2000)
    losses = []
    for compiles in (False, True):
        torch.manual_seed(0)
        model = pal.Model(pal.ModelConfig.preset("kimi-linear-tiny", num_hidden_layers=4))
        config = {"steps": 3, "batch_size": 2, "context_length": 32, "warmup_steps": 1, "compile": compiles}
        trainer = Trainer(model, pal.TrainConfig.from_dict(config), tokens)
        losses.append([trainer.step() for _ in range(3)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_graphs_see_an_operation_of_known_shapes() -> None:
    """torch's own checks of an operation: schema, shapes without values, gradients registered."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 20, 2, 4, generator=draw, dtype=torch.float64).requires_grad_() for _ in range(3))
    beta, state = torch.rand(2, 20, 2, generator=draw).double(), torch.zeros(2, 2, 4, 4, dtype=torch.float64)
    torch.library.opcheck(torch.ops.palimpsest.recurrence.default, ("chunked", q, k, v, None, beta, state, None, 16))
    x, weight = torch.randn(6, 4, generator=draw).requires_grad_(), torch.randn(3, 5, 4, generator=draw).requires_grad_()
    torch.library.opcheck(torch.ops.palimpsest.grouped.default, (x, weight, torch.tensor([2, 0, 4])))


@pytest.mark.slow
def test_gates_are_seen_in_compiled_layers() -> None:
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = pal.Model(pal.ModelConfig.preset("kda-tiny", num_hidden_layers=1))
        config = pal.TrainConfig(steps=3, batch_size=2, context_length=16, warmup_steps=0, log_every=3, compile=compiled)
        trainer = Trainer(model, config, np.random.default_rng(0).integers(0, 256, 500))
        for _ in range(3):
            trainer.step()
        found.append(trainer.gates)
    assert found[0][0]["beta"] == pytest.approx(found[1][0]["beta"], abs=0.02) and len(found[1]) == 1
