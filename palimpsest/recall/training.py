"""One cell at work: a small model learns a task until it can, or until its steps are spent.

On a GPU such a step is a few hundred kernels of some microseconds, and launching them takes longer than running them. So a
step is recorded once for each shape as a CUDA graph and then replayed, on a stream of its own, beside other cells' streams. On
a CPU, or where recording fails, the same step runs as it is written.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from palimpsest.config import TrainConfig
from palimpsest.model import Model
from palimpsest.optim import learning_rate, parameter_groups
from palimpsest.recall.cells import Cell
from palimpsest.recall.models import build
from palimpsest.tasks import IGNORED, Task, score, scored_positions

WARM = 3  # steps that run as they are written before one is recorded: they compile kernels and make the optimiser's state
POOL_TOKENS, POOL_STEPS = 1 << 22, 64  # rows are drawn for up to so many steps at once
SOLVED, REACHED = 0.99, 0.9
WARMUP_SHARE = 0.1  # of the steps, to the highest learning rate
BATCH = 64  # rows of a test at a time
TEST_SEED = 99  # all models are tested on the same rows

Rows = tuple[Tensor, Tensor, Tensor]  # ids [B,T], positions and targets [B,most_scored] as of `scored_positions`


class Training:
    """The model of a cell, its optimiser and its rows. `advance` returns before the work is done; `accuracy` waits for it."""

    def __init__(self, cell: Cell, device: torch.device) -> None:
        self.cell, self.device, self.done = cell, device, 0
        self.on_gpu = device.type == "cuda"
        self.refusal = "" if self.on_gpu else "not on a GPU"  # why steps are not recorded
        self.stream = torch.cuda.Stream(device) if self.on_gpu else None
        with self._here():
            self.model: Model = build(cell.mixer, cell.vocab_size, cell.width, cell.head_dim, cell.seed).to(device)
            self.config = TrainConfig(
                steps=cell.steps,
                learning_rate=cell.learning_rate,
                warmup_steps=max(1, round(WARMUP_SHARE * cell.steps)),
                weight_decay=0.1,
            )
            self.rate: Any = torch.zeros((), device=device) if self.on_gpu else 0.0
            self.optimizer = torch.optim.AdamW(
                parameter_groups(self.model, self.config.weight_decay),
                lr=self.rate,
                betas=(self.config.beta1, self.config.beta2),
                fused=True,
                capturable=self.on_gpu,
            )
            for group in self.optimizer.param_groups:
                group["lr"] = self.rate  # the very tensor: a recorded step reads it anew
            self.generator = torch.Generator(device).manual_seed(cell.seed + 1)
            self.pools: dict[Task, tuple[int, Rows]] = {}
            self.warm: dict[Task, int] = {}
            self.recorded: dict[Task, tuple[Any, Rows, Tensor]] = {}
            self.loss = torch.zeros((), device=device)

    def advance(self, steps: int) -> None:
        with self._here():
            self.model.train()
            for _ in range(steps):
                self._step(self.cell.train[self.done % len(self.cell.train)])
                self.done += 1

    def accuracy(self, examples: int, labels: Iterable[str]) -> dict[str, dict[str, float]]:
        """The tests of these labels: {accuracy, rows}."""
        with self._here():
            found = {}
            for label in labels:
                task = self.cell.test[label]
                generator = torch.Generator(self.device).manual_seed(TEST_SEED)
                result = score(self.model, task, examples, generator, BATCH)
                found[label] = {"accuracy": result.accuracy, "rows": result.rows}
            return found

    def last_loss(self) -> float:
        with self._here():
            return float(self.loss)

    def state_bytes(self, tokens: int) -> int:
        """What a sequence of so many tokens carries to the next, from the state itself."""
        with self._here(), torch.no_grad():
            ids = torch.zeros(1, tokens, dtype=torch.int64, device=self.device)
            return self.model.hidden(ids)[1].num_bytes()

    def _here(self) -> Any:
        return contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def _rows(self, task: Task) -> Rows:
        """The next step's rows, from a pool that is drawn for many steps at once."""
        size = self.cell.batch_size
        at, pool = self.pools.get(task, (0, None))
        if pool is None or at == len(pool[0]):
            count = max(1, min(POOL_STEPS, POOL_TOKENS // (size * task.length)))
            ids, labels = task.batch(count * size, self.generator)
            positions, targets = scored_positions(labels, task.most_scored)
            cut = (count, size)
            at, pool = 0, (ids.unflatten(0, cut), positions.unflatten(0, cut), targets.unflatten(0, cut))
        self.pools[task] = at + 1, pool
        return pool[0][at], pool[1][at], pool[2][at]

    def _step(self, task: Task) -> None:
        rows = self._rows(task)
        rate = learning_rate(self.done, self.config)
        if self.on_gpu:
            self.rate.fill_(rate)
        else:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
        warm = self.warm.get(task, 0)
        if self.refusal or warm < WARM:
            self.warm[task] = warm + 1
            self.loss = self._update(rows)
            return
        if task not in self.recorded and not self._record(task, rows):
            self.loss = self._update(rows)
            return
        graph, held, self.loss = self.recorded[task]
        for mine, new in zip(held, rows, strict=True):
            mine.copy_(new)
        graph.replay()

    def _record(self, task: Task, rows: Rows) -> bool:
        held = (rows[0].clone(), rows[1].clone(), rows[2].clone())
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                loss = self._update(held)
        except RuntimeError as error:
            self.refusal = str(error).splitlines()[0]
            self.optimizer.zero_grad(set_to_none=True)
            return False
        self.recorded[task] = graph, held, loss
        return True

    def _update(self, rows: Rows) -> Tensor:
        """One step on rows; nothing in it waits for the device."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._loss(*rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.detach()

    def _loss(self, ids: Tensor, at: Tensor, targets: Tensor) -> Tensor:
        hidden, _ = self.model.hidden(ids)
        picked = hidden.gather(1, at.unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))
        loss = F.cross_entropy(self.model.logits(picked).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        if self.cell.text_weight:
            logits = self.model.logits(hidden[:, :-1])
            loss = loss + self.cell.text_weight * F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        return loss


def run(training: Training) -> dict[str, Any]:
    """Trains to the end, for a caller without others to serve meanwhile."""
    curve = Curve(training.cell)
    while not curve.is_over(training.done):
        training.advance(curve.stretch(training.done))
        curve.add(training)
    return curve.result(training)


class Curve:
    """What a cell has shown so far, and whether that is enough."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.points: list[dict[str, float]] = []
        self.status = "finished"

    def stretch(self, done: int) -> int:
        return min(self.cell.every, self.cell.steps - done)

    def is_over(self, done: int) -> bool:
        return done >= self.cell.steps or self.status != "finished"

    def add(self, training: Training) -> None:
        tests = training.accuracy(self.cell.examples // 4, self.cell.probe)
        accuracy = sum(tests[label]["accuracy"] for label in self.cell.probe) / len(self.cell.probe)
        loss = training.last_loss()
        self.points.append({"step": training.done, "accuracy": accuracy, "loss": loss})
        if not math.isfinite(loss):
            self.status = "diverged"
        elif accuracy >= SOLVED:
            self.status = "solved"

    def result(self, training: Training) -> dict[str, Any]:
        tests = training.accuracy(self.cell.examples, self.cell.test)
        for label, found in tests.items():
            found["chance"] = self.cell.test[label].chance
        longest = max(task.length for task in self.cell.test.values())
        reached = [int(point["step"]) for point in self.points if point["accuracy"] >= REACHED]
        return {
            "status": self.status,
            "steps": training.done,
            "steps_to_90": reached[0] if reached else None,
            "accuracy": sum(found["accuracy"] for found in tests.values()) / len(tests),
            "probe_accuracy": sum(tests[label]["accuracy"] for label in self.cell.probe) / len(self.cell.probe),
            "tests": tests,
            "curve": [{**p, "loss": p["loss"] if math.isfinite(p["loss"]) else None} for p in self.points],
            "parameters": training.model.num_parameters(),
            "state_bytes": training.state_bytes(longest),
            "state_context": longest,
            "tokens": sum(
                self.cell.batch_size * self.cell.train[step % len(self.cell.train)].length for step in range(training.done)
            ),
            "recorded": training.refusal or "yes",
        }
