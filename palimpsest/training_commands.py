"""The commands around training: `palimpsest tokenize`, `train`, `evaluate` and `report`."""

from __future__ import annotations

import dataclasses
import math
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from palimpsest.config import InputError, TrainConfig
from palimpsest.output import Json, Text, check_file, write_json

if TYPE_CHECKING:
    TrainFlags = TrainConfig
else:
    # Those of TrainConfig, None where a flag was not given.
    _HINTS = typing.get_type_hints(TrainConfig)
    TrainFlags = dataclasses.make_dataclass(
        "TrainFlags",
        [
            (f.name, Annotated[_HINTS[f.name] | None, Parameter(show_default=lambda _, default=f.default: default)], None)
            for f in dataclasses.fields(TrainConfig)
        ],
        namespace={"__module__": __name__},
    )


def tokenize(
    text: list[Path],
    /,
    *,
    out: Path,
    tokenizer: str = "bytes",
    encoding_errors: Literal["strict", "replace"] = "strict",
    json: Json = None,
) -> None:
    """Turn text into tokens once, for runs with `tokens = "FOLDER"` under [data]; the folder may go to another machine.

    Parameters
    ----------
    text
        Files or folders of UTF-8 text, JSONL (field "text") or parquet (column "text").
    out
        Folder to write: tokens.bin, two bytes a token up to 65536 ids, and the tokenizer.
    tokenizer
        bytes, bpe:SIZE (learned from the text), a tokenizer.json, or a folder with one.
    encoding_errors
        strict refuses text that is not UTF-8 and says where; replace puts U+FFFD there.
    """
    check_file(json)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out}: not an empty folder; give another --out")
    from palimpsest import material, run_folder

    existed, learned = out.exists(), material.make_tokenizer(tokenizer, text, encoding_errors)
    try:
        tokens = material.prepare(text, out, learned, encoding_errors)
    except (InputError, KeyboardInterrupt):
        run_folder.leave(out, existed)
        raise
    facts = {"tokens": tokens.num_tokens, "documents": len(tokens.document_starts), "text_bytes": tokens.num_bytes}
    facts |= {"vocab_size": tokens.vocab_size, "file_bytes": tokens.path.stat().st_size}
    print(
        f"{out}: {tokens.num_tokens:,} tokens of {facts['documents']:,} documents, {tokens.num_bytes / tokens.num_tokens:.2f} "
        f"bytes of text each; vocabulary {tokens.vocab_size:,}, file {facts['file_bytes'] / 2**20:.1f} MiB"
    )
    write_json(json, facts)


def train(
    run: Path | None = None,
    /,
    *,
    out: Path | None = None,
    preset: str | None = None,
    text: list[Path] | None = None,
    tokenizer: str = "bytes",
    set: list[str] | None = None,
    encoding_errors: Literal["strict", "replace"] = "strict",
    resume: Annotated[bool, Parameter(negative="")] = False,
    minutes: float | None = None,
    tensorboard: Annotated[bool, Parameter(negative="")] = False,
    dry_run: Annotated[bool, Parameter(negative="")] = False,
    settings: Annotated[TrainFlags | None, Parameter(name="*")] = None,
    json: Json = None,
) -> None:
    """Train a model on text, from a run file or from flags. The folder then opens with `palimpsest generate`.

    Parameters
    ----------
    run
        A run file (TOML with tables [model], [data], [train], and [mesh] for torchrun).
        Leave out --preset, --text, --tokenizer and --set; flags like --seed take the place of what its [train] says.
    out
        Folder of the run: tokens, metrics.jsonl, checkpoints, the model.
    preset
        A name that `palimpsest presets` lists.
    text
        File or folder of UTF-8 text, JSONL (field "text") or parquet (column "text"); repeat for more.
    tokenizer
        bytes, bpe:SIZE (learned from the text), a tokenizer.json, or a folder with one.
    set
        A model field as name=value, e.g. hidden_size=128; repeat for more.
    encoding_errors
        strict refuses text that is not UTF-8 and says where; replace puts U+FFFD there.
    resume
        Go on with the run in the folder, at its newest checkpoint. With more --steps than before, a run whose schedule is
        constant or wsd is made longer.
    minutes
        Stop after so many minutes, with a checkpoint to resume from.
    tensorboard
        Also write what is logged for TensorBoard, into the folder `tensorboard` of the run.
    dry_run
        Print parameters, memory, tokens, learning rates and optimiser groups; train nothing and write nothing.
    """
    check_file(json)
    from palimpsest.recipe import Recipe, render

    if run is not None:
        given = [flag for flag, value in (("--preset", preset), ("--text", text), ("--set", set)) if value is not None]
        given += [flag for flag, value, default in (("--tokenizer", tokenizer, "bytes"),) if value != default]
        if given:
            raise InputError(f"{run} and {', '.join(given)} were both given; put it all into the file or all into flags")
        recipe = Recipe.from_file(run)
        recipe = dataclasses.replace(recipe, train=recipe.train.replace(**_given(settings))).checked()
    else:
        if preset is None or not text:
            raise InputError("train needs a run file, or --preset and --text; see `palimpsest train --help`")
        overrides = dict(_assignment(item) for item in set or [])
        recipe = Recipe(preset, overrides, TrainConfig(**_given(settings)), text, tokenizer, 0.1, encoding_errors).checked()
    if minutes is not None and not 0 <= minutes < math.inf:
        raise InputError(f"--minutes is {minutes}; it must be a number, and not negative")
    if dry_run:
        facts = recipe.rehearse()
        print(render(facts))
        write_json(json, facts)
        return
    if out is None:
        raise InputError("train: --out is missing; name the folder of the run, or give --dry-run")
    from palimpsest import distributed

    try:
        result = recipe.run(out, resume, minutes, tensorboard)
        distributed.meet()
    finally:
        distributed.leave()
    if not distributed.is_main():
        return
    done = f"{out}: {result['steps']} steps"
    if result["finished"]:
        print(f"{done}, validation {result['val_nats_per_token']:.4f} nats/token")
    else:
        print(f"{done} of {recipe.train.steps} in this and earlier pieces; go on with --resume")
    write_json(json, result)


def _given(settings: Any) -> dict[str, Any]:
    """The training flags that were given."""
    return {name: value for name, value in vars(settings).items() if value is not None} if settings is not None else {}


def _assignment(item: str) -> tuple[str, Any]:
    """`name=value` with a value in TOML's spelling; bare words are text."""
    import tomllib

    name, equals, value = item.partition("=")
    if not equals or not name:
        raise InputError(f"--set {item!r}: write it as field=value")
    if value in ("none", "null"):
        return name, None
    try:
        return name, tomllib.loads(f"x = {value}")["x"]
    except (ValueError, RecursionError):
        return name, value


def evaluate(
    model: Path,
    text: list[Path],
    /,
    *,
    window: int | None = None,
    stride: int | None = None,
    encoding_errors: Literal["strict", "replace"] = "strict",
    json: Json = None,
) -> None:
    """What a model makes of texts: nats per token, bits per byte, by tokens seen, and where a pair of tokens came before.

    Each text is read in one go: memories and caches run on from window to window, however long it is. With --stride it is
    read in overlapping windows instead, each from an empty memory.

    Parameters
    ----------
    model
        A model folder of ours or as others publish them, a GGUF file, or the folder of a training run.
    text
        Files or folders of UTF-8 text, JSONL (field "text", each line a text of its own) or parquet (column "text").
    window
        Tokens read at a time; 1024, or what the position table holds. Without --stride it changes no number.
    stride
        Tokens from the start of one window to that of the next, less than the window.
    encoding_errors
        strict refuses text that is not UTF-8 and says where; replace puts U+FFFD there.
    """
    check_file(json)
    import torch

    from palimpsest import evaluate as scoring
    from palimpsest.progress import Tokens
    from palimpsest.published import load

    read = list(scoring.documents(text, encoding_errors))
    loaded, tokenizer = load(model)
    if tokenizer is None:
        raise InputError(f"{model}: there is no tokenizer in it; save the model with one")
    loaded.to("cuda" if torch.cuda.is_available() else "cpu")
    facts = scoring.texts(loaded, tokenizer, read, window, stride, Tokens("evaluated").at)
    print(scoring.render(facts))
    write_json(json, {"model": str(model), **facts})


def report(
    runs: list[Path] | None = None,
    /,
    *,
    out: Path = Path("report.html"),
    inside: Path | None = None,
    prompt: Annotated[str | None, Text] = None,
    answer: Annotated[str | None, Text] = None,
    json: Json = None,
) -> None:
    """Draw training runs over one another, or what a model does with a prompt, as one HTML file.

    Of runs: loss, rate, gradients, updates, experts, speed and memory. Of a prompt, layer by layer: half-lives of channels, how
    strongly each token is written, norm and rank of the memory, what can still be read of a stored pair, attention, experts
    chosen, weights over depth.

    Parameters
    ----------
    runs
        Folders of runs; their metrics.jsonl is read, also while they train.
    out
        The file to write.
    inside
        A model to look into: its folder, a GGUF file, or the folder of a run.
    prompt
        The text that it reads.
    answer
        A part of the prompt, the last of its kind, whose tokens are followed; without it the first token.
    """
    check_file(json)
    check_file(out, "--out")
    if inside is None:
        if prompt is not None or answer is not None or not runs:
            raise InputError("report: give folders of runs, or --inside MODEL with --prompt TEXT")
        _report_runs(runs, out, json)
        return
    if runs or prompt is None:
        wrong = "runs were given beside --inside; leave them out" if runs else "--prompt is missing; give the text to read"
        raise InputError(f"report: {wrong}")
    from palimpsest import inside_report
    from palimpsest.published import load

    facts = inside_report.write(*load(inside), prompt, out, inside.name or str(inside), answer)
    print(f"{facts['tokens']} tokens through {inside}")
    print(out)
    write_json(json, {"model": str(inside), "prompt": prompt, **facts})


def _report_runs(runs: list[Path], out: Path, json: Path | None) -> None:
    from palimpsest import run_report

    facts = run_report.write(runs, out)
    for row in facts["runs"]:
        val = row["val_nats_per_token"]
        print(f"{row['name']}: step {row['step']}" + ("" if val is None else f", validation {val:.4f} nats/token"))
    print(out)
    write_json(json, facts)
