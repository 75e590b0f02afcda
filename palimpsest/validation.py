"""Plans against measured runs on this machine: decode, prefill and training of models that are large enough to be work."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from palimpsest.calibration import timed, working_on
from palimpsest.config import ModelConfig, TrainConfig
from palimpsest.model import Model
from palimpsest.optim import make_optimizer
from palimpsest.plan import times
from palimpsest.plan.devices import Device, calibrated
from palimpsest.progress import keep_memory
from palimpsest.train import backward

ONE = times.Cut(1, 1)


class Run(NamedTuple):
    """What is measured: decode behind `context` tokens, prefill of them, or a training step over them."""

    work: str
    preset: str
    context: int  # tokens a sequence
    batch: int  # sequences


RUNS = (
    *(Run("decode", "gpt2-124m", *size) for size in ((128, 1), (512, 4), (960, 2))),
    *(Run("decode", "kda-124m", *size) for size in ((128, 1), (512, 4), (2048, 2))),
    *(Run("decode", "kimi-linear-65m", *size) for size in ((128, 1), (1024, 4), (4096, 2))),
    *(Run("prefill", name, 512, 1) for name in ("gpt2-124m", "kda-124m", "kimi-linear-65m")),
    *(Run("training", name, 256, 2) for name in ("gpt2-124m", "kda-124m", "kimi-linear-65m")),
)


# A GPU is not kept busy by small ones.
GPU_RUNS = (
    *(Run("decode", "gpt2-124m", *size) for size in ((128, 1), (512, 32), (960, 128))),
    *(Run("decode", "kda-124m", *size) for size in ((128, 1), (2048, 32), (4096, 128))),
    *(Run("decode", "kimi-linear-65m", *size) for size in ((128, 1), (4096, 16), (16384, 32))),
    *(Run("prefill", *run) for run in (("gpt2-124m", 1024, 8), ("kda-124m", 4096, 4), ("kimi-linear-65m", 8192, 2))),
    *(Run("training", *run) for run in (("gpt2-124m", 1024, 8), ("kda-124m", 2048, 4), ("kimi-linear-65m", 2048, 4))),
)


def validate(calibration: dict[str, Any], where: torch.device, runs: tuple[Run, ...], repeats: int = 15) -> dict[str, Any]:
    """Rows of predicted and measured seconds with their relative error, the median of its size, and the calibration used."""
    keep_memory()
    device, dtype = calibrated(calibration, "calibration"), calibration["dtype"]
    rows = []
    for preset in dict.fromkeys(run.preset for run in runs):
        torch.manual_seed(0)
        with working_on(where):
            model = Model(ModelConfig.preset(preset))
        for run in (each for each in runs if each.preset == preset):
            with working_on(where):
                measured = timed(_work(model, run), repeats)
            if where.type == "cuda":
                torch.cuda.empty_cache()  # libraries take their own memory, and what the last run held is not free to them
            predicted = predict(model.config, run, device, dtype)
            rows.append({**run._asdict(), "predicted_s": predicted, "measured_s": measured, "error": predicted / measured - 1})
    median = statistics.median(abs(row["error"]) for row in rows)
    return {"rows": rows, "median_error": median, "calibration": calibration}


def predict(config: ModelConfig, run: Run, device: Device, dtype: str) -> float:
    """Seconds of one run."""
    if run.work == "training":
        return times.training_seconds(config, device, ONE, run.batch, run.context)["total"]
    new, past = (1, run.context) if run.work == "decode" else (run.context, 0)
    return times.pass_seconds(config, dtype, device, ONE, run.batch, new, past, 1)["total"]


def _work(model: Model, run: Run) -> Callable[[], Any]:
    ids = torch.randint(model.config.vocab_size, (run.batch, run.context))
    if run.work == "training":
        optimizer = make_optimizer(model, TrainConfig())

        def step() -> None:
            optimizer.zero_grad()
            backward(model, [(ids, ids, None)])
            optimizer.step()

        return step
    if run.work == "prefill":
        return torch.no_grad()(lambda: model.logits(model.hidden(ids)[0][:, -1:]))
    with torch.no_grad():
        state = model.hidden(ids)[1]
    return torch.no_grad()(lambda: model(ids[:, -1:], state))


def lines(result: dict[str, Any]) -> Iterator[str]:
    """The table as text."""
    yield f"{'work':<9} {'model':<17} {'context':>7} {'batch':>5} {'predicted':>11} {'measured':>11} {'error':>8}"
    for row in result["rows"]:
        place = f"{row['work']:<9} {row['preset']:<17} {row['context']:>7} {row['batch']:>5}"
        ms = f"{1e3 * row['predicted_s']:>8,.1f} ms {1e3 * row['measured_s']:>8,.1f} ms"
        yield f"{place} {ms} {100 * row['error']:>+6.1f} %"
    yield f"median error {100 * result['median_error']:.1f} %"
