"""One stage of a lineage run: trained on text, measured, and trained once more, small, on associative recall."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from palimpsest import benchmark, checkpoint, evaluate, tasks
from palimpsest.config import SamplingConfig, TrainConfig
from palimpsest.corpus import CONTEXT, Corpus
from palimpsest.generate import generate
from palimpsest.model import Model
from palimpsest.optim import clip_gradients, learning_rate, make_optimizer
from palimpsest.stages import Stage, config_for, recall_config
from palimpsest.train import Trainer

BATCH = 4  # sequences per step
VALIDATION_WINDOWS, CURVE_WINDOWS = 128, 16
CONTEXTS = [16, 64, 256, 1023]  # the GPT-2 stage has 1024 positions
RECALL_VOCAB, RECALL_BATCH, RECALL_ROWS = 64, 32, 128
RECALL_TRAINED, RECALL_PAIRS = [2, 4, 8], [2, 4, 8, 12, 15]  # pairs in training and in the test


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def train_config(steps: int, seed: int) -> TrainConfig:
    warmup = max(1, min(100, steps // 10))
    return TrainConfig(
        steps=steps,
        batch_size=BATCH,
        context_length=CONTEXT,
        learning_rate=4e-3,
        warmup_steps=warmup,
        schedule="cosine",
        min_learning_rate_ratio=0.05,
        seed=seed,
        eval_every=0,
        checkpoint_every=0,
        log_every=max(1, steps // 100),
    )


def build(stage: Stage, corpus: Corpus, seed: int) -> Model:
    assert corpus.tokenizer is not None
    torch.manual_seed(seed)
    return Model(config_for(stage, corpus.tokenizer.vocab_size))


def trainer_for(model: Model, corpus: Corpus, config: TrainConfig) -> Trainer:
    assert corpus.train_tokens is not None
    return Trainer(model, config, corpus.train_tokens, bytes_per_token=corpus.bytes_per_token)


def measure(stage: Stage, corpus: Corpus, plan: dict[str, Any], out: Path, seed: int, label: str) -> dict[str, Any]:
    """Trains the stage for the plan's steps and measures it; the model goes to `out/models/<name>`. Raises what goes wrong."""
    assert corpus.tokenizer is not None and corpus.validation_tokens is not None
    model = build(stage, corpus, seed)
    steps, tokens, step_tokens = plan["steps"], corpus.validation_tokens, BATCH * CONTEXT
    trainer = trainer_for(model, corpus, train_config(steps, seed))
    train_curve: list[dict[str, Any]] = []
    val_curve: list[dict[str, Any]] = []
    spent, losses = 0.0, []
    for step in range(1, steps + 1):
        start = time.perf_counter()
        losses.append(trainer.step())
        spent += time.perf_counter() - start
        if step % max(1, steps // 40) == 0 or step == steps:
            train_curve.append({"tokens": step * step_tokens, "nats_per_token": sum(losses) / len(losses)})
            losses = []
            _progress(label, stage, step, steps, train_curve[-1]["nats_per_token"], spent)
        if step % max(1, steps // 6) == 0 and step < steps:
            nats = float(evaluate.loss_by_position(model, tokens, CONTEXT, CURVE_WINDOWS).mean())
            val_curve.append(
                {"tokens": step * step_tokens, "bits_per_byte": evaluate.bits_per_byte(nats, corpus.bytes_per_token)}
            )
    by_position = evaluate.loss_by_position(model, tokens, CONTEXT, VALIDATION_WINDOWS)
    bits = evaluate.bits_per_byte(float(by_position.mean()), corpus.bytes_per_token)
    if not np.isfinite(bits):
        raise RuntimeError(f"validation is {bits} bits per byte after {steps} steps: training diverged")
    val_curve.append({"tokens": steps * step_tokens, "bits_per_byte": bits})
    state_bytes, decode_ms = benchmark.decode(model, CONTEXTS)
    checkpoint.save(model, out / "models" / stage.name, tokenizer=corpus.tokenizer)
    return {
        "parameters": model.num_parameters(),
        "active_parameters": model.num_parameters(active=True),
        "tokens_seen": steps * step_tokens,
        "seconds": spent,
        "tokens_per_second": steps * step_tokens / spent,
        "val_bits_per_byte": bits,
        "val_curve": val_curve,
        "train_curve": train_curve,
        "position_bits": evaluate.position_buckets(by_position, corpus.bytes_per_token),
        "state_bytes": state_bytes,
        "decode_ms": decode_ms,
        "sample": _sample(model, corpus, seed),
        **RecallTraining(stage, plan["recall_steps"], seed).run(label),
    }


def _progress(label: str, stage: Stage, step: int, steps: int, nats: float, spent: float) -> None:
    line = f"{label} {stage.name}: step {step}/{steps}, {nats:.3f} nats/token, {step * BATCH * CONTEXT / spent:,.0f} tokens/s"
    if sys.stderr.isatty():
        print(f"\r{line:<79}", end="\n" if step == steps else "", file=sys.stderr, flush=True)
    elif step == steps or step * 4 // steps != (step - max(1, steps // 40)) * 4 // steps:
        say(line)


def _sample(model: Model, corpus: Corpus, seed: int) -> dict[str, str]:
    assert corpus.tokenizer is not None
    prompt = next((line for line in corpus.validation.splitlines() if len(line) > 8), corpus.validation)[:24]
    sampling = SamplingConfig(max_new_tokens=120, temperature=0.8, top_p=0.95, seed=seed)
    return {"prompt": prompt, "text": str(generate(model, corpus.tokenizer, [prompt], sampling)[0])}


class RecallTraining:
    """A small model of the stage's kind learns associative recall from scratch, on rows of 2 to 8 pairs."""

    def __init__(self, stage: Stage, steps: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.stage, self.steps, self.done = stage, steps, 0
        self.model = Model(recall_config(stage, RECALL_VOCAB))
        self.config = TrainConfig(steps=steps, learning_rate=3e-3, warmup_steps=min(50, steps // 4), weight_decay=0.01)
        self.optimizer = make_optimizer(self.model, self.config)
        self.generator = torch.Generator().manual_seed(seed + 1)

    def step(self) -> None:
        pairs = RECALL_TRAINED[int(torch.randint(len(RECALL_TRAINED), (1,), generator=self.generator))]
        ids, labels = tasks.recall_batch(pairs, RECALL_VOCAB, RECALL_BATCH, self.generator)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(min(self.done, self.steps - 1), self.config)
        loss = self.model(ids, labels=labels).loss
        assert loss is not None
        loss.backward()
        clip_gradients(self.model, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.done += 1

    def accuracies(self, examples: int) -> Iterator[dict[str, Any]]:
        for pairs in RECALL_PAIRS:
            generator = torch.Generator().manual_seed(99)
            accuracy = tasks.recall_accuracy(self.model, pairs, RECALL_VOCAB, examples, generator, RECALL_BATCH)
            yield {"pairs": pairs, "accuracy": accuracy}

    def run(self, label: str) -> dict[str, Any]:
        curve = []
        for step in range(1, self.steps + 1):
            self.step()
            if step % max(1, self.steps // 4) == 0:
                scores = [row["accuracy"] for row in self.accuracies(32)]
                curve.append({"step": step, "accuracy": sum(scores) / len(scores)})
        rows = list(self.accuracies(RECALL_ROWS))
        say(f"{label} {self.stage.name}: recall of {rows[1]['pairs']} pairs {rows[1]['accuracy']:.0%}")
        chance = tasks.recall_chance(RECALL_VOCAB)
        return {"recall": rows, "recall_chance": chance, "recall_steps": self.steps, "recall_curve": curve}
