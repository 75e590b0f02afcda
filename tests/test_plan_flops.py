"""Operations predicted from the configuration equal what torch counts on the built model, to the unit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from math import prod
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import palimpsest as pal
from palimpsest import ops
from palimpsest.ops.chunked import _tile
from palimpsest.plan import flops
from tests.conftest import TINY, make_ids


def grouped(x: Any, weight: Any, *rest: Any, out_shape: Any = None, **named: Any) -> int:
    """Operations of torch's grouped product: rows [N,a] against [E,a,b], or [a,N] against [N,b] by groups of N."""
    return 2 * prod(x) * weight[-1]


def batched(total: Any, x: Any, weight: Any, *rest: Any, out_shape: Any = None, **named: Any) -> int:
    """Operations of x [b,m,k] times weight [b,k,n], added in place."""
    return 2 * prod(x) * weight[-1]


UNSEEN: dict[Any, Any] = {torch.ops.aten._grouped_mm: grouped, torch.ops.aten.baddbmm_: batched}


def built(name: str, **fields: Any) -> pal.Model:
    """With hardly any decay, so that a whole chunk is one product."""
    model = pal.Model(pal.ModelConfig.preset(name, **fields))
    for place, parameter in model.named_parameters():
        if place.endswith(("A_log", "dt_bias")):
            parameter.data.fill_(0.0 if place.endswith("A_log") else -8.0)
    return model


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's operations do the work, as on a GPU: the mode cannot see compiled code."""
    monkeypatch.setattr("palimpsest.ops.cpu.library", lambda: (None, "left out of this test"))


@contextlib.contextmanager
def counting() -> Iterator[FlopCounterMode]:
    """Counts with the plain attention kernel, whose products the mode sees."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False, custom_mapping=UNSEEN) as counter:
        yield counter


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (2, 2), (1, 33), (3, 100)])
def test_a_prefill(name: str, batch: int, tokens: int) -> None:
    model = built(name)
    with torch.no_grad(), counting() as counter:
        model(make_ids(model, batch, tokens))
    assert sum(flops.forward(model.config, batch, tokens).values()) == counter.get_total_flops()


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize(("past", "new"), [(1, 1), (70, 1), (70, 40)])
def test_tokens_behind_a_context(name: str, past: int, new: int) -> None:
    model = built(name)
    ids = make_ids(model, 2, past + new)
    with torch.no_grad():
        state = model(ids[:, :past]).state
        with counting() as counter:
            model(ids[:, past:], state)
    assert sum(flops.forward(model.config, 2, new, past).values()) == counter.get_total_flops()


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("recompute", [False, True])
def test_training(name: str, recompute: bool) -> None:
    model = built(name)
    model.recompute = recompute
    ids = make_ids(model, 2, 100)
    with counting() as counter:
        model.loss(ids, ids).backward()
    assert sum(flops.training(model.config, 2, 100, recompute=recompute).values()) == counter.get_total_flops()


@pytest.mark.parametrize("chunk", [8, 64])
@pytest.mark.parametrize("decay", [-0.01, -2.0, -8.0, -70.0])
def test_strong_decay_needs_the_tiles_that_are_said(chunk: int, decay: float) -> None:
    config = pal.ModelConfig.preset("kda-tiny")
    heads, keys, values = config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
    q, k = torch.randn(2, 1, 100, heads, keys).unbind()
    v, g, beta = torch.randn(1, 100, heads, values), torch.full((1, 100, heads, keys), decay), torch.rand(1, 100, heads)
    tile = _tile(g[0, :chunk].transpose(0, 1).cumsum(-2))
    leaves = [x.requires_grad_() for x in (q, k, v, g, beta)]
    with counting() as counter:
        o, _ = ops.kda(*leaves, chunk_size=chunk)
        forward = counter.get_total_flops()
        o.sum().backward()
    assert forward == flops.recurrence(config, "kda", 100, chunk, tile)
    backward = flops.recurrence_backward(config, "kda", 100, chunk, tile)
    assert counter.get_total_flops() - forward == backward


def test_the_sweep_over_chunks_is_the_published_one_without_the_solve() -> None:
    """lineage specification 7: 6 K V + C (6 K + 4 V) + C^2 / 3; the triangular solve is no product."""
    config = pal.ModelConfig.preset("kda-tiny", linear_key_head_dim=128, linear_value_head_dim=128, linear_num_value_heads=2)
    for chunk, published in ((16, 118_869), (64, 181_589)):
        ours = flops.recurrence(config, "kda", 1024, chunk) / 1024 / 2
        assert round(ours + chunk * chunk / 3) == published


def test_published_models_at_a_million_tokens() -> None:
    """Active parameters set the linear part: two operations each for every token but for the norms and vectors."""
    config = pal.ModelConfig.preset("kimi-k3")
    found = flops.forward(config, 1, 1, past=1_048_576)
    active = 104_189_612_640
    assert 0.99 < (found["linear"] + found["experts"] + found["head"]) / (2 * active) < 1.0
    assert found["attention"] == 24 * 4 * 96 * 1_048_577 * 576
    assert found["recurrence"] == 69 * 96 * 4 * 128 * 128
