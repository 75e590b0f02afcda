"""A training run from plain text to a model folder, as a run file or a command line describes it.

[model]
preset = "kda-tiny"          # and any field of ModelConfig
[data]
text = ["plays/", "more.jsonl"]
tokenizer = "bpe:1024"       # or "bytes", or a tokenizer.json, or a folder with one
validation_share = 0.1
[train]
steps = 1000                 # and any field of TrainConfig
[mesh]                       # for many processes under torchrun; see distributed.py
data = 2

`tokens = "folder"` in place of text and tokenizer takes what `palimpsest tokenize` wrote, perhaps on another machine.

To go on from a trained model: `load = "folder or file"` in [model] in place of the preset, with its tokenizer unless another
is named; `chat = "chats.jsonl"` in [data] in place of text, to learn answers (conversations.py); a table [lora] with `rank` and
`alpha`, to train adapters only (lora.py), which are saved by themselves and merged into the model in the end.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
import textwrap
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from palimpsest import __version__, checkpoint, distributed, forecast, lora, material, published, run_folder, tensorboard
from palimpsest.benchmark import machine
from palimpsest.config import InputError, LoraConfig, MeshConfig, ModelConfig, TrainConfig, suggestion
from palimpsest.distributed import World
from palimpsest.material import Material
from palimpsest.model import Model
from palimpsest.optim import TrainingFailed, group_table, learning_rate
from palimpsest.plan.units import bytes_text, count_text
from palimpsest.progress import keep_memory
from palimpsest.tokenizer import Tokenizer
from palimpsest.train import Trainer, Work

KINDS = ("text", "chat", "tokens")
DATA = (*KINDS, "tokenizer", "validation_share", "encoding_errors")
TABLES = ("model", "data", "train", "mesh", "lora")


Note = Callable[[dict[str, Any], int], None]  # takes a record, and the step that the run went on from


@dataclass(frozen=True)
class Recipe:
    """What to train, on what, and how."""

    preset: str | None  # None with `load`
    overrides: dict[str, Any]  # ModelConfig fields; vocab_size follows the tokenizer unless given
    train: TrainConfig
    text: list[Path]
    tokenizer: str = "bytes"  # "model": the one that `load` has
    validation_share: float = 0.1
    encoding_errors: Literal["strict", "replace"] = "strict"
    mesh: MeshConfig | None = None  # None: data = the number of processes
    load: Path | None = None
    chat: list[Path] | None = None  # in place of text
    tokens: Path | None = None  # in place of text and tokenizer
    name: str = ""  # of the run file, for tables
    lora: LoraConfig | None = None

    @classmethod
    def from_file(cls, path: Path) -> Recipe:
        """Reads a run file; paths in it are relative to the file. Raises `InputError` naming file, table and key."""
        values = _tables(path)
        model, source = dict(values.get("model", {})), dict(values.get("data", {}))
        preset, load = model.pop("preset", None), model.pop("load", None)
        if load is not None:
            if preset is not None or model or not isinstance(load, str):
                raise InputError(f"{path}: [model] load is {load!r}; name a folder or file there, with nothing beside it")
            source.setdefault("tokenizer", "model")
        elif not isinstance(preset, str):
            raise InputError(f"{path}: [model] preset is {preset!r}; name one of those that `palimpsest presets` lists")
        for key in source:
            if key not in DATA:
                raise InputError(f"{path}: unknown key {key!r} in [data]{suggestion(key, DATA)}")
        named = [kind for kind in KINDS if kind in source]
        if len(named) > 1:
            raise InputError(f"{path}: [data] has both {named[0]} and {named[1]}; give one")
        kind = named[0] if named else "text"
        given = source.pop(kind, None)
        if kind == "tokens":
            if not isinstance(given, str) or "tokenizer" in values["data"] or "encoding_errors" in source:
                raise InputError(f"{path}: [data] tokens is {given!r}; name the folder, which has the tokenizer as well")
            source["tokenizer"] = str(path.parent / given)
        given = [given] if isinstance(given, str) else given
        if not isinstance(given, list) or not given or not all(isinstance(item, str) for item in given):
            raise InputError(f"{path}: [data] {kind} is {given!r}; it must be a file or folder, or a list of them")
        files = [path.parent / item for item in given]
        return cls(
            preset,
            model,
            TrainConfig.from_dict(values.get("train", {}), source=str(path)),
            files if kind == "text" else [],
            **source,
            mesh=MeshConfig.from_dict(values["mesh"], str(path)) if "mesh" in values else None,
            load=None if load is None else path.parent / load,
            chat=files if kind == "chat" else None,
            tokens=files[0] if kind == "tokens" else None,
            name=path.stem,
            lora=LoraConfig.from_dict(values["lora"], str(path)) if "lora" in values else None,
        ).checked(str(path))

    def checked(self, source: str = "") -> Recipe:
        """Itself, when every field is right; the model is checked with the vocabulary size it will have at least."""
        where = f"{source}: " if source else ""
        if not isinstance(self.tokenizer, str):
            raise InputError(f"{where}tokenizer is {self.tokenizer!r}; it must be 'bytes', 'bpe:SIZE' or a path")
        share = self.validation_share
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < 1:
            raise InputError(f"{where}validation_share is {share!r}; it must be in (0, 1)")
        if self.encoding_errors not in ("strict", "replace"):
            raise InputError(f"{where}encoding_errors is {self.encoding_errors!r}; it must be 'strict' or 'replace'")
        if self.lora is not None and self.train.optimizer != "adamw":
            raise InputError(f"{where}optimizer is {self.train.optimizer!r}; adapters are trained with 'adamw'")
        if self.preset is None:
            return self
        try:
            ModelConfig.preset(self.preset, **self.overrides)
        except InputError as error:
            raise InputError(f"{where}{error}") from None
        return self

    def run(
        self, out: Path, resume: bool = False, minutes: float | None = None, to_tensorboard: bool = False
    ) -> dict[str, Any]:
        """Prepares the tokens, trains, and leaves a model that `load` opens in `out`. Returns what came of it.

        Everything that can be refused is refused before anything is written. A stopped run goes on with `resume`. After
        `minutes` from this call the step is finished and a checkpoint saved; `finished` is then false.
        """
        write = tensorboard.writer(out / "tensorboard") if to_tensorboard else None
        until = None if minutes is None else time.perf_counter() + 60 * minutes
        world = distributed.start(self.mesh)
        if resume and not out.is_dir():
            raise InputError(f"{out}: there is no run to resume here; begin one without --resume")
        if not resume and out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise InputError(f"{out}: not an empty folder; resume the run in it with --resume, or give another --out")
        world.wait()  # until all have seen the folder as it was
        existed = out.exists()
        with run_folder.alone(out) if world.is_main else contextlib.nullcontext():
            return self._run(out, existed, resume, until, world, write)

    def _run(
        self, out: Path, existed: bool, resume: bool, until: float | None, world: World, write: Note | None
    ) -> dict[str, Any]:
        trainer = None
        try:
            trainer = self._trainer(out, resume, world)
            if resume:
                trainer.resume()
            keep_memory()
            if world.is_main:
                self._note(out, trainer)
                if write is not None:
                    began = trainer.steps_done
                    trainer.report = lambda record: write(record, began)
            trainer.run(until)
        except (InputError, KeyboardInterrupt, RuntimeError, MemoryError) as error:
            is_full = forecast.is_out_of_memory(error)
            config = self._begin(out, True)[1] if is_full else None
            is_expected = is_full or isinstance(error, InputError | KeyboardInterrupt)
            if is_expected and not resume and world.is_main and (trainer is None or trainer.steps_done == 0):
                self._undo(out, existed)  # so that the same command, or one that fits, can follow
            if config is None:
                raise
            raise TrainingFailed(forecast.advice(config, self.train, world.device, world.size)) from error
        result = {
            "folder": str(out),
            "finished": trainer.is_finished,
            "steps": trainer.steps_done,
            "tokens": trainer.tokens_done,
            "repeats": trainer.repeats,
            "seconds": trainer.seconds,
            "mesh": world.sizes.to_dict(),
        }
        if not trainer.is_finished:
            return result
        model = distributed.whole(trainer.model, world)
        if world.is_main:
            if self.lora is not None:
                shutil.rmtree(out / "adapter", ignore_errors=True)
                lora.save(model, out / "adapter")
                lora.merge(model)
            checkpoint.save(model, out, tokenizer=trainer.tokenizer)
        nats = trainer.evaluate()
        return {
            **result,
            "parameters": model.num_parameters(),
            "active_parameters": model.num_parameters(active=True),
            "val_nats_per_token": nats,
            "model": model.config.to_dict(),
            "train": self.train.to_dict(),
        }

    def _note(self, out: Path, trainer: Trainer) -> None:
        """Adds this start of the run to the list in its folder."""
        piece = {"recipe": self.name, "from_step": trainer.steps_done, "version": __version__}
        piece |= {"created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "processes": trainer.world.size}
        run_folder.add_piece(out, {**piece, "machine": machine(trainer.world.device)})

    def _trainer(self, out: Path, resume: bool, world: World) -> Trainer:
        """Tokens in `out`, the model and its trainer; a model that does not fit the device raises as torch does."""
        if not world.is_main:
            world.wait()  # for what the first one prepares
        reads = resume or not world.is_main
        tokenizer, config, model = self._begin(out, reads)
        material = self._material(out, tokenizer, config, reads)
        if world.is_main:
            world.wait()
        torch.manual_seed(self.train.seed)
        model = (Model(config) if model is None else model.float()).to(world.device)
        if self.lora is not None:
            adapted, left = lora.add(model, self.lora)
            if world.is_main:
                print(f"{len(adapted)} maps are adapted; not: {', '.join(left) or 'nothing'}", file=sys.stderr)
        peak, source = forecast.peak_flops(world.device, self.train.precision)
        if world.is_main:
            print(f"MFU is a share of {world.size} x {peak / 1e12:.4g} TFLOP/s ({source})", file=sys.stderr)
        return Trainer(
            model,
            self.train,
            material.train,
            material.validation,
            folder=out,
            bytes_per_token=material.bytes_per_token,
            tokenizer=tokenizer,
            work=Work(forecast.step_flops(config, self.train), world.size * peak),
            world=world,
            marks=material.marks,
        )

    def rehearse(self) -> dict[str, Any]:
        """What `run` would do, ready for JSON; reads the text, makes its tokens aside and keeps nothing."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        processes = (self.mesh or MeshConfig()).processes
        with tempfile.TemporaryDirectory() as folder:
            tokenizer, config, model = self._begin(Path(folder), False)
            material = self._material(Path(folder), tokenizer, config, False)
            found = {"train": len(material.train), "validation": len(material.validation)}
            found["vocab_size"] = tokenizer.vocab_size
        if model is None:
            with torch.device("meta"):
                model = Model(config)
        if self.lora is not None:
            lora.add(model, self.lora)
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        train = self.train
        step_tokens = train.batch_size * train.accumulation * train.context_length
        used = step_tokens * train.steps
        marks = sorted({1, train.warmup_steps or 1, *(max(train.steps * part // 4, 1) for part in range(1, 5))})
        return {
            "parameters": model.num_parameters(),
            "active_parameters": model.num_parameters(active=True),
            "groups": group_table(model, train),
            "tokens": {**found, "per_step": step_tokens, "in_all": used, "repeats": used / found["train"]},
            "schedule": [{"step": step, "lr": learning_rate(step - 1, train)} for step in marks if step <= train.steps],
            "estimate": forecast.facts(config, train, device, processes, trained / model.num_parameters()),
            "model": config.to_dict(),
            "train": train.to_dict(),
        }

    def _begin(self, out: Path, reads: bool) -> tuple[Tokenizer, ModelConfig, Model | None]:
        """The tokenizer and the model's configuration; with `load` also the model."""
        model = own = None
        if self.load is not None:
            model, own = published.load(self.load)
            if self.tokenizer == "model" and own is None:
                raise InputError(f"{self.load}: there is no tokenizer in it; name one in [data]")
        tokenizer = own if self.tokenizer == "model" and own is not None else self._tokenizer(out, reads)
        if model is not None:
            return tokenizer, model.config, model
        assert self.preset is not None
        return tokenizer, ModelConfig.preset(self.preset, **{"vocab_size": tokenizer.vocab_size, **self.overrides}), None

    def _material(self, out: Path, tokenizer: Tokenizer, config: ModelConfig, reads: bool) -> Material:
        """What is learned from and validated with. With `reads` the tokens of text are in `out` already."""
        length, share = self.train.context_length, self.validation_share
        if self.chat is not None:
            return material.of_conversations(self.chat, tokenizer, length, share)
        if self.tokens is not None:
            return material.of_tokens(material.opened(self.tokens, tokenizer), config.vocab_size, length, share)
        folder = out / "data"
        if reads and (folder / material.TOKENS).exists():
            tokens = material.opened(folder, tokenizer)
        else:
            tokens = material.prepare(self.text, folder, tokenizer, self.encoding_errors)
        return material.of_tokens(tokens, config.vocab_size, length, share)

    def _tokenizer(self, out: Path, reads: bool) -> Tokenizer:
        if reads and self.tokenizer.startswith("bpe:"):
            return Tokenizer.from_file(out / "data")
        return material.make_tokenizer(self.tokenizer, self.text, self.encoding_errors)

    def _undo(self, out: Path, existed: bool) -> None:
        shutil.rmtree(out / "data", ignore_errors=True)
        for name in (run_folder.RUN, run_folder.PIECES, run_folder.METRICS):
            (out / name).unlink(missing_ok=True)
        run_folder.leave(out, existed)


def _tables(path: Path) -> dict[str, Any]:
    """The tables of a run file."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:  # besides what tomllib says: not UTF-8, thousands of digits or brackets
        raise InputError(f"{path}: not valid TOML ({error})") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check the path") from None
    for name, table in values.items():
        if name not in TABLES:
            raise InputError(f"{path}: unknown table [{name}]{suggestion(name, TABLES)}")
        if not isinstance(table, dict):
            raise InputError(f"{path}: {name} is {table!r}; it must be a table, [{name}]")
    return values


def render(facts: dict[str, Any]) -> str:
    """What `Recipe.rehearse` found, as text for a terminal."""
    tokens, train, estimate = facts["tokens"], facts["train"], facts["estimate"]
    size = f"{train['accumulation']} x {train['batch_size']} x {train['context_length']}"
    lines = [
        f"parameters    {facts['parameters']:,} ({facts['active_parameters']:,} active for a token)",
        f"tokens        {tokens['train']:,} to train on, {tokens['validation']:,} to validate, "
        f"vocabulary {tokens['vocab_size']:,}",
        f"steps         {train['steps']:,} of {size} = {tokens['per_step']:,} tokens; {tokens['in_all']:,} in all, "
        f"so the text is read {tokens['repeats']:.4g} times",
        f"rate          {train['schedule']}: "
        + ", ".join(f"{mark['lr']:.4g} at step {mark['step']:,}" for mark in facts["schedule"]),
        f"operations    {count_text(estimate['step_flops'])} a step",
    ]
    held = estimate["memory_bytes"]
    kinds = ("weights", "gradients", "optimizer", "activations", "loss")
    parts = ", ".join(f"{kind} {bytes_text(held[kind])}" for kind in kinds)
    where = estimate["device"] if estimate["num_devices"] == 1 else f"each of {estimate['num_devices']} devices"
    lines.append(f"memory        about {bytes_text(held['peak'])} of tensors on {where} at the height of a step")
    lines.append(f"              {parts}")
    lines.append(f"\n{'group':<10}{'optimizer':<11}{'decay':>6}{'tensors':>9}{'parameters':>15}  of")
    for row in facts["groups"]:
        kinds = textwrap.wrap(", ".join(row["kinds"]), 74)
        numbers = f"{row['weight_decay']:>6g}{row['tensors']:>9,}{row['parameters']:>15,}"
        lines.append(f"{row['name']:<10}{row['optimizer']:<11}{numbers}  {kinds[0]}")
        lines += [" " * 53 + more for more in kinds[1:]]
    return "\n".join(lines)
