"""A step on any mesh of processes is the step of one process, and so is what it leaves behind."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor

import palimpsest as pal
from palimpsest import distributed
from palimpsest.config import MeshConfig
from palimpsest.gradients import backward, split_documents
from tests.conftest import make_ids, make_model
from tests.processes import run

EOS = 5
# (data, expert, context), preset, whether documents are apart, whether sublayers are recomputed
CASES: dict[int, list[tuple[tuple[int, int, int], str, bool, bool]]] = {
    2: [
        ((2, 1, 1), "kimi-k3-tiny", False, True),
        ((2, 1, 1), "gpt2-tiny", True, False),
        ((1, 2, 1), "kimi-k3-tiny", False, False),
        ((1, 2, 1), "qwen3-next-tiny", True, True),
        ((1, 1, 2), "kimi-k3-tiny", False, False),
        ((1, 1, 2), "kimi-linear-tiny", True, True),
        ((1, 1, 2), "qwen3-next-tiny", True, False),
        ((1, 1, 2), "smollm2-tiny", False, False),
        ((1, 1, 2), "linear-attention-tiny", True, False),
        ((1, 1, 2), "deltanet-tiny", False, False),
        ((1, 1, 2), "gpt2-tiny", False, False),
    ],
    4: [
        ((4, 1, 1), "gated-deltanet-tiny", False, False),
        ((1, 4, 1), "kimi-k3-tiny", False, False),
        ((1, 1, 4), "kda-tiny", True, False),
        ((2, 2, 1), "qwen3-next-tiny", False, False),
        ((2, 1, 2), "gpt2-tiny", True, False),
        ((1, 2, 2), "kimi-k3-tiny", True, True),
    ],
}


def batch(model: pal.Model, packed: bool, rows: Any = lambda x: x) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    """Two micro-batches of four rows, the second with ignored labels; the documents end at random."""
    found = []
    for seed in (1, 2):
        ids = rows(make_ids(model, 4, 32, seed=seed))
        ids[:, ::7] = EOS
        labels = ids.clone()
        if seed == 2:
            labels[:, 3:9] = -100
        bounds = None
        if packed:
            ids, bounds = split_documents(ids, EOS)
            labels = labels.reshape(1, -1)
        found.append((ids, labels, bounds))
    return found


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference of any gradient, relative to that gradient's largest value; some are zero but for rounding."""
    assert found.keys() == expected.keys()
    floor = 1e-4 * max(float(x.abs().max()) for x in expected.values())
    return max(float((found[n] - x).abs().max() / x.abs().max().clamp(min=floor)) for n, x in expected.items())


def gradients(rank: int, cases: list[Any]) -> list[dict[str, float]]:
    results = []
    for sizes, preset, packed, recompute in cases:
        began = time.perf_counter()
        model = make_model(preset, dtype=torch.float64).train()
        model.recompute = recompute
        expected_loss = backward(model, batch(model, packed))
        expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        world = distributed.join(MeshConfig(*sizes), torch.device("cpu"))
        distributed.spread(model, world)
        loss = backward(model, batch(model, packed, world.rows), world=world)
        found = {n: distributed.full(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        whole = dict(distributed.whole(model, world).named_parameters())
        fresh = make_model(preset, dtype=torch.float64)
        results.append(
            {
                "loss": abs(loss - expected_loss) / expected_loss,
                "gradients": worst(found, expected),
                "weights": max(float((whole[n] - p).abs().max()) for n, p in fresh.named_parameters()),
                "seconds": time.perf_counter() - began,
            }
        )
    return results


@pytest.mark.parametrize("count", [2, 4])
def test_loss_and_gradients_are_those_of_one_process(count: int) -> None:
    for results in run(count, gradients, CASES[count]):
        for case, errors in zip(CASES[count], results, strict=True):
            assert errors["loss"] < 1e-12, (case, errors)
            assert errors["gradients"] < 1e-10, (case, errors)
            assert errors["weights"] == 0, (case, errors)
