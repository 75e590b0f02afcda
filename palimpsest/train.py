"""Training: steps, validation, metrics, checkpoints, and resuming a run as if it had never stopped.

    trainer = Trainer(model, TrainConfig(steps=1000), tokens, validation_tokens, folder=Path("runs/first"))
    trainer.run()          # trainer.resume() first, to take up the run that the folder holds

Everything that decides a step is in the checkpoint: weights, optimiser, place in the data and random states, so that on a
CPU a resumed run has the same losses bit for bit.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from palimpsest import checkpoint, distributed, random_state, run_folder
from palimpsest.balance import Balancer
from palimpsest.config import InputError, TrainConfig
from palimpsest.conversations import ANSWER, BEGIN
from palimpsest.data import Batches
from palimpsest.distributed import World
from palimpsest.gradients import MicroBatch, arranged, backward, predicted, split_documents
from palimpsest.inputs import check_lengths, inspected
from palimpsest.model import Model
from palimpsest.optim import TrainingFailed, clip_gradients, learning_rate, make_optimizer, shared_steps
from palimpsest.progress import Display, interrupts, memory_bytes
from palimpsest.qkclip import QKClip
from palimpsest.run_folder import METRICS
from palimpsest.tokenizer import Tokenizer
from palimpsest.watch import Watch

__all__ = ["Trainer", "TrainingFailed", "Work", "backward", "split_documents"]

FREE = ("log_every", "eval_every", "checkpoint_every", "keep_checkpoints")  # may change when a run is resumed

Record = dict[str, Any]


class Work(NamedTuple):
    """Operations of one step, and how many the machine is taken to do in a second at its best: for MFU."""

    step_flops: float
    peak_flops_per_s: float


class Trainer:
    """Trains `model` in place on windows of `train_tokens`, a 1-D integer array (perhaps memory-mapped).

    With a `folder`, metrics and checkpoints (with the `tokenizer`) go there. `bytes_per_token` is that of the validation
    text, for bits per byte. In a `world` of several processes, all of which must give the same arguments, the model's weights
    are spread over them, and the first one writes. `marks` go with both arrays when they are conversations (conversations.py).
    `report` is called with every record of metrics.jsonl:

        step, tokens, repeats (how often the text was read), loss (of that step, nats per token), lr, grad_norm (before
        clipping), tokens_per_s, memory_bytes (the most so far), seconds (of all steps so far, without validation and
        saving); with experts also moe_max_violation, moe_idle_experts, moe_load (of that step); with `work` also mfu; with
        qk_clip max_attention_logit; groups: of every group of the optimiser its grad_norm and update_ratio;
        residual_rms of what each sublayer read and of what the head read; gates of recurrent layers (watch.py)
        step, tokens, repeats, val_nats_per_token, val_bits_per_byte, seconds

    Raises InputError, with nothing written, when model, settings, tokens and tokenizer do not fit one another.
    """

    def __init__(
        self,
        model: Model,
        config: TrainConfig,
        train_tokens: np.ndarray | Tensor,
        validation_tokens: np.ndarray | Tensor | None = None,
        folder: str | Path | None = None,
        bytes_per_token: float | None = None,
        tokenizer: Tokenizer | None = None,
        report: Callable[[Record], Any] | None = None,
        work: Work | None = None,
        world: World | None = None,
        marks: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> None:
        self.model, self.config, self.work = model, config, work
        self.folder = None if folder is None else Path(folder)
        self.validation_tokens, self.bytes_per_token = validation_tokens, bytes_per_token
        self.tokenizer, self.report = tokenizer, report
        self.device = next(model.parameters()).device
        self.world = world or distributed.alone(self.device)
        self.world.check(config, model)
        model.recompute = config.recompute
        check_lengths(model, config, validation_tokens)
        vocab_size = model.config.vocab_size
        if tokenizer is not None and tokenizer.vocab_size > vocab_size:
            raise InputError(
                f"model: vocab_size is {vocab_size}; the tokenizer has {tokenizer.vocab_size} ids; make vocab_size that or more"
            )
        if config.separate_documents and (tokenizer is None or tokenizer.eos_id is None):
            raise InputError("train: separate_documents is true, but the tokenizer has no end-of-text token to tell where")
        # What must be equal for a run to be resumed.
        self.identity: Record = {
            "model": model.config.to_dict(),
            "train": {name: value for name, value in config.to_dict().items() if name not in FREE},
            "tokenizer": None if tokenizer is None else tokenizer.fingerprint,
            "train_tokens": inspected("train_tokens", train_tokens, vocab_size),
            "validation_tokens": None,
        }
        if validation_tokens is not None:
            self.identity["validation_tokens"] = inspected("validation_tokens", validation_tokens, vocab_size)
        if marks is not None:
            self.identity["marks"] = [inspected("marks", x, ANSWER + BEGIN + 1) for x in marks]
        distributed.spread(model, self.world)
        if config.compile:
            for block in model.layers:
                block.mixer.compile()  # type: ignore[union-attr]
                block.mlp.compile()  # type: ignore[union-attr]
        how = config.batch_size, config.context_length, config.seed
        self.batches, self.train_length = Batches(train_tokens, *how), len(train_tokens)
        self.marks = None if marks is None else Batches(marks[0], *how)
        self.validation_marks = None if marks is None else marks[1]
        self.optimizer = make_optimizer(model, config)
        self.balancer = Balancer(model, config)
        self.qk_clip = QKClip(model, self.optimizer, config.qk_clip) if config.qk_clip else None
        self.watch, self.groups, self.residual_rms, self.gates = Watch(model, self.optimizer), {}, [], []
        self.steps_done, self.seconds, self.grad_norm = 0, 0.0, 0.0
        self._mark = (0, 0.0)  # tokens and seconds at the last record
        self._claimed = False
        self._torn = False  # inside a step, when weights, optimiser and data may be of different steps
        self._display = Display(config.steps)
        # From here the rates of wsd fall towards the end; a longer run sets out from the checkpoint of this step.
        self.branch = shared_steps(config, config.replace(steps=config.steps + 1)) if config.schedule == "wsd" else None

    @property
    def tokens_done(self) -> int:
        return self.steps_done * self.config.batch_size * self.config.accumulation * self.config.context_length

    @property
    def repeats(self) -> float:
        """How often the text has been read."""
        return self.tokens_done / self.train_length

    @property
    def is_finished(self) -> bool:
        return self.steps_done >= self.config.steps

    def step(self) -> float:
        """One optimiser step; returns its loss in nats per predicted token.

        Raises TrainingFailed, before the weights change, when the loss or the gradient norm is not finite.
        """
        began = time.perf_counter()
        number, rate = self.steps_done + 1, learning_rate(self.steps_done, self.config)
        self._torn = True
        self.model.train()
        self.optimizer.zero_grad()
        self.balancer.begin()
        if self.qk_clip is not None:
            self.qk_clip.begin()
        is_logged = self._due(self.config.log_every, number)
        if is_logged:
            self.watch.begin()
        micro_batches = [self._next() for _ in range(self.config.accumulation)]
        loss = backward(self.model, micro_batches, self.config.precision, self.world)
        try:
            if not math.isfinite(loss):
                raise TrainingFailed(f"step {number}: the loss is {loss}; lower learning_rate, or raise warmup_steps")
            if is_logged:
                self.residual_rms, self.gates = self.watch.residual_rms(), self.watch.gates()
                self.watch.before_update()
            self.grad_norm = clip_gradients(self.model, self.config.grad_clip, number)
        except TrainingFailed as error:
            raise TrainingFailed(f"{error} ({self._last_checkpoint()})") from None
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        if is_logged:
            self.groups = self.watch.after_update()
        self.balancer.end()
        if self.qk_clip is not None:
            self.qk_clip.end()
        self.steps_done = number
        self._torn = False
        self.seconds += time.perf_counter() - began
        return loss

    def _next(self) -> MicroBatch:
        """This process' rows of the next batch."""
        ids = self.world.rows(next(self.batches)).to(self.device)
        marks = None if self.marks is None else self.world.rows(next(self.marks)).to(self.device)
        return arranged(ids, self._eos_id, marks)

    @property
    def _eos_id(self) -> int | None:
        """What ends a document that the next must not see."""
        return self.tokenizer.eos_id if self.config.separate_documents and self.tokenizer is not None else None

    @torch.no_grad()
    def evaluate(self) -> float:
        """Nats per token over the first `eval_tokens` validation tokens, in windows of `context_length`, all tokens alike.

        A shorter rest is a window of its own. Draws no random number and leaves the model's mode as it was.
        """
        if self.validation_tokens is None:
            raise InputError("validation_tokens: none were given; there is nothing to evaluate on")
        windows, marks = (self._windows(x) for x in (self.validation_tokens, self.validation_marks))
        was_training, total, count = self.model.training, 0.0, 0
        self.model.eval()
        for number, window in enumerate(windows):
            rows = self.world.rows(window)
            # A process without rows goes along with one that counts nothing: the others wait for it in every sublayer.
            ids = (rows if len(rows) else window[:1]).to(self.device)
            own = self.world.rows(marks[number]).to(self.device) if marks and len(rows) else None
            ids, labels, bounds = arranged(ids, self._eos_id, own)
            labels = labels if len(rows) else torch.full_like(ids, -100)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.precision == "bf16"):
                loss = self.model.loss(ids, labels, bounds)
            here = predicted(labels, bounds)
            total, count = total + float(loss) * here, count + here / self.world.sizes.context
        self.model.train(was_training)
        total, count = self.world.summed(total, count)
        return total / count if count else float("nan")

    def _windows(self, values: np.ndarray | Tensor | None) -> list[Tensor]:
        """The first `eval_tokens` of them as batches of windows."""
        if values is None:
            return []
        length = self.config.context_length
        tokens = torch.as_tensor(np.asarray(values[: self.config.eval_tokens]).astype(np.int64))
        whole = len(tokens) // length * length
        windows = list(tokens[:whole].view(-1, length).split(self.config.batch_size)) if whole else []
        return [*windows, tokens[whole:].unsqueeze(0)] if len(tokens) - whole >= 2 else windows

    def run(self, until: float | None = None) -> list[Record]:
        """Trains until `config.steps`; returns the records of this call.

        When `time.perf_counter()` has passed `until` in any process, it saves a checkpoint and returns behind that step.
        Ctrl-C lets the step finish, saves a checkpoint and raises KeyboardInterrupt; a second one stops at once. Raises
        InputError, with nothing written, when the folder holds a run and `resume` was not called, and TrainingFailed.
        """
        self._claim()
        records: list[Record] = []
        self._mark = (self.tokens_done, self.seconds)
        with interrupts() as interrupted:
            try:
                while not self.is_finished:
                    loss = self.step()
                    self._after_step(loss, records)
                    is_late = until is not None and time.perf_counter() >= until
                    # Wherever Ctrl-C came to, all stop behind the same step.
                    stop, late = self.world.summed(interrupted.is_set(), is_late)
                    if stop:
                        raise KeyboardInterrupt
                    if late and not self.is_finished:
                        if self.folder is not None:
                            self.save()
                        break
            except KeyboardInterrupt:
                self._display.close()
                if self.folder is not None:
                    saved = self.steps_done and not self._torn and self.save()
                    where = f"{saved} is saved" if saved else self._last_checkpoint()
                    print(f"stopped after step {self.steps_done}; {where}", file=sys.stderr, flush=True)
                raise
            finally:
                self._display.close()
        return records

    def _due(self, every: int, step: int) -> bool:
        return step == self.config.steps or (every > 0 and step % every == 0)

    def _after_step(self, loss: float, records: list[Record]) -> None:
        is_logged = self._due(self.config.log_every, self.steps_done)
        (tokens, seconds), memory = self._mark, memory_bytes(self.device)
        tokens_per_s = (self.tokens_done - tokens) / max(self.seconds - seconds, 1e-9)
        if self.world.is_main:
            self._display.step(self.steps_done, loss, tokens_per_s, memory, is_logged)
        place = {"step": self.steps_done, "tokens": self.tokens_done, "repeats": self.repeats}
        if is_logged:
            record = {
                **place,
                "loss": loss,
                "lr": learning_rate(self.steps_done - 1, self.config),
                "grad_norm": self.grad_norm,
                "tokens_per_s": tokens_per_s,
                "memory_bytes": memory,
                "seconds": self.seconds,
                **self.balancer.metrics(),
                **(self.qk_clip.metrics() if self.qk_clip is not None else {}),
                **self._mfu(tokens_per_s),
                "groups": self.groups,
                "residual_rms": self.residual_rms,
                **({"gates": self.gates} if self.gates else {}),
            }
            self._mark = (self.tokens_done, self.seconds)
            self._record(record, records)
        if self.validation_tokens is not None and self._due(self.config.eval_every, self.steps_done):
            self._record({**place, **self._validate(), "seconds": self.seconds}, records)
        is_branch = self.steps_done == self.branch
        if self.folder is not None and (is_branch or self._due(self.config.checkpoint_every, self.steps_done)):
            self.save()

    def _mfu(self, tokens_per_s: float) -> Record:
        """Model FLOPs utilisation: the share of the assumed peak that the matrix products of a step make up."""
        if self.work is None:
            return {}
        steps_per_s = tokens_per_s * self.steps_done / self.tokens_done
        return {"mfu": steps_per_s * self.work.step_flops / self.work.peak_flops_per_s}

    def _validate(self) -> Record:
        nats = self.evaluate()
        if not math.isfinite(nats):
            raise TrainingFailed(
                f"step {self.steps_done}: the validation loss is {nats}; lower learning_rate, or raise warmup_steps "
                f"({self._last_checkpoint()})"
            )
        values = {"val_nats_per_token": nats}
        if self.bytes_per_token is not None:
            values["val_bits_per_byte"] = nats / math.log(2) / self.bytes_per_token
        if self.world.is_main:
            self._display.validation(self.steps_done, values)
        return values

    def _record(self, record: Record, records: list[Record]) -> None:
        records.append(record)
        if self.folder is not None and self.world.is_main:
            with open(self.folder / METRICS, "a", encoding="utf-8", newline="\n") as file:
                file.write(json.dumps(record, allow_nan=False) + "\n")
        if self.report is not None:
            self.report(record)

    # -------------------------------------------------------------------------------------------------------- the run folder

    def save(self) -> Path:
        """Writes a checkpoint of the steps done so far into the run folder and returns its path."""
        self._claim()
        assert self.folder is not None
        state = {
            "step": self.steps_done,
            "seconds": self.seconds,
            "data": self.batches.state_dict(),
            "random": random_state.current(),
        }
        model, optimizer = distributed.whole(self.model, self.world), self.optimizer.named_state()
        target = checkpoint.checkpoint_folder(self.folder, self.steps_done)
        if self.world.is_main:
            how = self.tokenizer, self.config.keep_checkpoints, self.branch
            checkpoint.save_checkpoint(self.folder, self.steps_done, model, optimizer, state, *how)
        self.world.wait()
        return target

    def resume(self) -> int:
        """Takes up the run in the folder at its newest complete checkpoint; returns the number of steps it has done.

        A run that stopped before its first checkpoint begins anew. With another number of `steps` than before it goes on
        from the newest checkpoint that a run of so many steps would have come by, and is then that run. Raises InputError,
        with nothing changed, when there is none, and when the folder holds no run, a run with other settings, model,
        tokenizer or data, or a damaged checkpoint.
        """
        if self.folder is None:
            raise InputError("folder: none was given; there is no run to resume")
        usable = run_folder.usable(self.folder, self.identity, self.config)
        if usable:
            self._restore(usable[-1])
        self.world.wait()  # until all have read what is there
        if self.world.is_main:
            run_folder.take_up(self.folder, self.identity, self.steps_done)
        self._claimed = True
        return self.steps_done

    @torch.no_grad()
    def _restore(self, path: Path) -> None:
        weights, optimizer, state = checkpoint.read_checkpoint(path, self.model)
        try:
            step, seconds, drawn = int(state["step"]), float(state["seconds"]), random_state.parse(state["random"])
            for batches in (self.batches, self.marks):
                if batches is not None:
                    batches.load_state_dict(state["data"])
            self.optimizer.load_named_state(optimizer)
        except (KeyError, TypeError, ValueError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else error
            raise InputError(f"{path}: {reason}; remove this folder to resume from the one before") from None
        for name, parameter in self.model.named_parameters():
            distributed.local(parameter).copy_(distributed.part_of(weights[name], parameter))
        self.steps_done, self.seconds = step, seconds
        # Last, so that nothing above draws from the restored states.
        random_state.restore(drawn)

    def _claim(self) -> None:
        """Makes the folder this run's own, or refuses one that holds a run."""
        if self.folder is None or self._claimed or not self.world.is_main:
            return
        run_folder.claim(self.folder, self.identity)
        self._claimed = True

    def _last_checkpoint(self) -> str:
        complete = [] if self.folder is None else checkpoint.checkpoints(self.folder)
        return f"the last checkpoint is {complete[-1]}" if complete else "there is no checkpoint yet"
