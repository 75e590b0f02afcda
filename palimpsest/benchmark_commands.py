"""The commands of `palimpsest benchmark`."""

from __future__ import annotations

import importlib.util
import itertools
import math
import shlex
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import cyclopts
from cyclopts import Parameter

from palimpsest.config import InputError
from palimpsest.output import check_file, write_json

if TYPE_CHECKING:
    import torch

benchmark = cyclopts.App(name="benchmark", help="Measure this machine.")


@benchmark.command
def cpu(*, out: Path, peers: Annotated[bool, Parameter(negative="")] = False) -> None:
    """Time operations, decoding and training on the CPU. Nothing else should run; with peers about ten minutes.

    Parameters
    ----------
    out
        The file to write: every median with its spread, the machine, the commit and the command.
    peers
        Also run what transformers has for the same work, in the same process.
    """
    check_file(out, "--out")
    from palimpsest import peers as others

    write_json(out, {**_about(), "rows": others.cpu(peers, lambda line: print(line, flush=True))})


@benchmark.command
def gpu(*, out: Path, peers: Annotated[bool, Parameter(negative="")] = False, minutes: float | None = None) -> None:
    """Time the GPU kernels and check them against float64. Four minutes on a GPU that has nothing else to do; peers take more.

    Parameters
    ----------
    out
        The file to write: every error, every median beside its floor, the machine, the commit and the command. It is written
        anew after every row, so that a run that ends early keeps what it measured.
    peers
        Also run flash-linear-attention, where it is installed, and torch's softmax attention on the same inputs.
    minutes
        Start no further row after this time.
    """
    began = time.monotonic()
    if minutes is not None and not 0 < minutes < math.inf:
        raise InputError(f"benchmark gpu: --minutes {minutes}: must be more than 0")
    check_file(out, "--out")
    from palimpsest import benchmark_gpu, ops, peers_gpu

    runs, reason = next((runs, reason) for name, runs, reason in ops.backends() if name == "triton")
    if not runs or not benchmark_gpu.available():
        raise InputError(f"benchmark gpu: cannot run here: {reason if not runs else 'there is no CUDA device'}")
    say = partial(print, flush=True)
    rows: list[dict[str, Any]] = []
    about = {**_about(), "device": benchmark_gpu.device()}  # asked now: a fault on the way would leave no device to ask
    for row in itertools.chain(benchmark_gpu.timings(), peers_gpu.tables() if peers else (), benchmark_gpu.checks()):
        rows.append(row)
        write_json(out, {**about, "rows": rows})
        say(benchmark_gpu.line(row))
        if minutes is not None and time.monotonic() - began > 60 * minutes:
            say(f"stopped after {minutes:g} minutes: {out} has the rows above")
            break


@benchmark.command
def memory(*, out: Path, pictures: Path | None = None) -> None:
    """What each memory of the lineage keeps, without training: the numbers of docs/lineage.md. Half a minute.

    Parameters
    ----------
    out
        The file to write.
    pictures
        Also draw them into this folder.
    """
    check_file(out, "--out")
    if pictures is not None and not pictures.is_dir():
        raise InputError(f"--pictures {pictures}: there is no such folder; make it first")
    from palimpsest import guide

    rows = guide.measure()
    write_json(out, {**_about(), "rows": rows})
    for path in guide.draw(rows, pictures) if pictures is not None else []:
        print(path)
    print(f"{out}: {len(rows)} rows")


def _device(name: str) -> torch.device:
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("benchmark: --device is 'cuda'; torch finds no GPU here: leave it out")
    return torch.device(name)


def _about(device: torch.device | None = None) -> dict[str, Any]:
    """Where and when the figures of this process were measured."""
    from palimpsest import __version__, lineage
    from palimpsest.benchmark import machine

    return {
        "version": __version__,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": shlex.join(["palimpsest", *sys.argv[1:]]),
        "commit": lineage.commit(),
        "machine": machine(device),
    }


@benchmark.command
def calibrate(*, out: Path, device: Literal["cpu", "cuda"] = "cpu") -> None:
    """Measure what this machine reaches, for `palimpsest plan --device FILE`. A minute or two; nothing else should run.

    Parameters
    ----------
    out
        The file to write.
    device
        On a CPU float32 is measured, on a GPU bfloat16.
    """
    where = _device(device)
    check_file(out, "--out")
    from palimpsest.calibration import calibrate as measure

    write_json(out, {**_about(where), **measure(where)})
    print(f"{out}: give it to `palimpsest plan MODEL --device {out}`")


@benchmark.command
def validate(*, out: Path, device: Literal["cpu", "cuda"] = "cpu") -> None:
    """Calibrate, run decode, prefill and training of three models, and compare with what is planned. A few minutes.

    Parameters
    ----------
    out
        The file to write.
    device
        On a CPU float32 is measured, on a GPU bfloat16.
    """
    where = _device(device)
    check_file(out, "--out")
    from palimpsest import validation
    from palimpsest.calibration import calibrate as measure

    runs = validation.RUNS if device == "cpu" else validation.GPU_RUNS
    result = validation.validate(measure(where), where, runs)
    write_json(out, {**_about(where), **result})
    print("\n".join(validation.lines(result)))


@benchmark.command
def offload(
    *, out: Path, gigabytes: float = 13.0, cache_gigabytes: float = 2.0, tokens: int = 64, folder: Path | None = None
) -> None:
    """Decode a Kimi K3 whose experts stay on disk, and watch its memory. Writes a checkpoint of that size and removes it.

    Parameters
    ----------
    out
        The file to write.
    gigabytes
        Size of the checkpoint.
    cache_gigabytes
        Experts that are kept in memory.
    tokens
        How many tokens to decode.
    folder
        Where the checkpoint is written; the system's temporary folder if not given.
    """
    for name, value in (("gigabytes", gigabytes), ("cache-gigabytes", cache_gigabytes), ("tokens", tokens)):
        if not 0 < value < 1e6:
            raise InputError(f"benchmark offload: --{name} is {value}; expected more than 0")
    check_file(out, "--out")
    from palimpsest import oversize

    result = oversize.measure(int(1e9 * gigabytes), int(1e9 * cache_gigabytes), tokens, folder)
    write_json(out, {**_about(), **result})
    print("\n".join(oversize.lines(result)))


@benchmark.command
def serve(*, out: Path, model: Path | None = None, soak_s: float = 180.0, clients: int = 64) -> None:
    """Measure serving: many requests at a time, beside llama.cpp where it is installed, remembered prompts, and a server under
    good and bad clients. Twelve minutes.

    Parameters
    ----------
    out
        The file to write.
    model
        A folder or file to measure too; by default the hybrid `kimi-linear-65m` alone, with random weights.
    soak_s
        How long clients come and go; 0 leaves it out.
    clients
        How many of them at a time.
    """
    check_file(out, "--out")
    if not 0 <= soak_s < math.inf or clients < 1:
        raise InputError(f"--soak-s is {soak_s:g} and --clients {clients}; they must be at least 0 and 1")
    import tempfile

    from palimpsest import published, serving_rates, soak
    from palimpsest.progress import keep_memory

    def tell(line: str) -> None:
        print(line, flush=True)

    keep_memory()
    result: dict[str, Any] = {"rates": {}, "llama_cpp": {}}
    chosen: list[tuple[str, Any]] = [("kimi-linear-65m", serving_rates.preset("kimi-linear-65m"))]
    if model is not None:
        found, tokenizer = published.load(model)
        if tokenizer is None:
            raise InputError(f"{model}: there is no tokenizer in it; save the model with one")
        chosen.append((model.name, (found, tokenizer)))
    for name, (built, tokenizer) in chosen:
        tell(name)
        result["rates"][name] = serving_rates.measure(built, tokenizer, serving_rates.CONCURRENT, tell)
        result["llama_cpp"][name] = serving_rates.beside_llama_cpp(built, tokenizer, tell)
    missing = [name for name in ("fastapi", "uvicorn", "openai") if importlib.util.find_spec(name) is None]
    if soak_s and missing:
        result["soak"] = {"skipped": f"the package {missing[0]} is missing; install palimpsest-lm[serve]"}
        tell(f"clients left out: {result['soak']['skipped']}")
    elif soak_s:
        built, tokenizer = serving_rates.preset("kimi-k3-tiny", vocab_size=257, initializer_range=0.2)
        with tempfile.TemporaryDirectory() as folder:
            published.save(built, Path(folder) / "tiny", tokenizer)
            result["soak"] = soak.soak(Path(folder) / "tiny", built, tokenizer, clients, soak_s)
        tell(f"{result['soak']['requests']} requests, {result['soak']['number_wrong']} wrong")
    write_json(out, {**_about(), **result})


@benchmark.command
def recipes(runs: list[Path], /, *, out: Path) -> None:
    """Gather training runs, finished or not, into one table: loss with its spread over seeds, speed, memory, tokens seen.

    Parameters
    ----------
    runs
        Folders of runs on the same text; run.json, metrics.jsonl and pieces.json of each are enough.
    out
        The file to write.
    """
    check_file(out, "--out")
    from palimpsest import run_table

    table = run_table.gather(runs)
    write_json(out, {**_about(), **table})
    print("\n".join(run_table.lines(table)))


@benchmark.command
def recall(
    *,
    out: Path | None = None,
    device: Literal["cpu", "cuda"] = "cpu",
    size: Literal["full", "small"] | None = None,
    cells: str | None = None,
    minutes: float | None = None,
    steps: int | None = None,
    together: int | None = None,
    text: Path | None = None,
    list_cells: Annotated[bool, Parameter(name="--list", negative="")] = False,
    report: Path | None = None,
) -> None:
    """Train small models on synthetic memory tasks, cell by cell; a stopped run goes on where it was.

    Parameters
    ----------
    out
        Folder of the results, one line of JSON a cell; by default benchmarks/recall for full, runs/recall for small cells.
    device
        Where the models learn.
    size
        `full` is for a GPU, `small` for a CPU; by default what suits the device.
    cells
        Only those whose names match these shell patterns, separated by commas, such as 'frontier/*kda*-s0'.
    minutes
        Stop after so long; cells at work are given up and run anew the next time.
    steps
        Another budget of steps a cell.
    together
        Cells that learn at the same time; 4 on a GPU, 1 on a CPU.
    text
        A file for the haystacks, instead of made-up words.
    list_cells
        Only print which cells there are and which have a result.
    report
        Also write a page about all results in the folder to this HTML file.
    """
    where = _device(device)
    for name, value in (("minutes", minutes), ("steps", steps), ("together", together)):
        if value is not None and not 0 < value < 1e9:
            raise InputError(f"benchmark recall: --{name} is {value}; expected more than 0")
    check_file(report, "--report")
    from palimpsest.progress import keep_memory
    from palimpsest.recall import cells as plans
    from palimpsest.recall import runner

    words = b"" if text is None else text.read_bytes()
    size = size or ("full" if device == "cuda" else "small")
    every = plans.full(words) if size == "full" else plans.small(words)
    out = out or Path("benchmarks/recall" if size == "full" else "runs/recall")
    chosen = plans.with_steps(plans.select(every, cells), steps)
    if list_cells:
        waiting = {cell.name for cell in runner.missing(chosen, runner.read(out))}
        print("\n".join(f"{'not run' if cell.name in waiting else 'done':<9}{cell.name}" for cell in chosen))
    else:
        keep_memory()
        say = partial(print, flush=True)
        runner.run(chosen, out, where, _about(where), minutes, together or (4 if device == "cuda" else 1), say)
    if report is not None:
        from palimpsest.report import write_recall

        rows = runner.read(out)
        write_recall([*rows, *runner.not_run(chosen, rows)], report)
        print(report)
