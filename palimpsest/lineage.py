"""The main job: train every stage of the lineage on the same tokens, measure each memory, and compare them.

    for each stage: build -> train -> validation, recall, bytes carried, decode time, loss by position, a sample

Everything but the memory is held equal: width, depth, tokens, their order, the optimiser, and active parameters within 5 %
of the GPT-2 stage. Finished stages are kept in the output folder, so a stopped run goes on where it was.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from palimpsest import benchmark, data, evaluate, report, run_folder
from palimpsest.checkpoint import read_json, write_json
from palimpsest.config import MOST, InputError, ModelConfig, suggestion
from palimpsest.corpus import CONTEXT, Corpus
from palimpsest.model import Model
from palimpsest.progress import keep_memory
from palimpsest.recall import runner
from palimpsest.recall.cells import EXPERIMENTS, Cell, shortened, small
from palimpsest.stages import STAGES, Stage, config_for
from palimpsest.trial import BATCH, RecallTraining, build, measure, say, train_config, trainer_for

# Shares of the minutes: what is left goes to measuring, and to a machine that is slower later than at calibration.
TEXT_SHARE, RECALL_SHARE = 0.5, 0.22
TASK_MINUTES = {"frontier": 7.0, "learning": 5.0, "needles": 3.0}


def run(
    text: list[Path] | None,
    minutes: float,
    out: Path,
    seed: int = 0,
    stages: list[str] | None = None,
    fresh: bool = False,
    tasks: list[str] | None = None,
) -> int:
    """Runs the lineage into the folder `out` and returns the exit status: 1 when a stage failed, else 0.

    `tasks` are experiments of the recall benchmark that are added, or "all"; about a quarter of an hour more.
    Raises `InputError` for a text that is missing, empty or too short, an unknown stage or task, or a folder that holds a run
    with other settings (unless `fresh`, which starts over).
    """
    if not 0 < minutes <= 100_000:
        raise InputError(f"minutes is {minutes}; it must be above 0")
    if not 0 <= seed < MOST:
        raise InputError(f"seed is {seed}; it must be in [0, 2**63)")
    chosen = _choose(stages)
    cells = _cells(tasks)
    corpus = Corpus.read(text)
    settings = {
        "text": corpus.digest,
        "minutes": minutes,
        "seed": seed,
        "stages": [s.name for s in chosen],
        "format": 1,
    }
    with run_folder.alone(out):
        _claim(out, settings, fresh)
        return _run(corpus, chosen, cells, minutes, out, seed)


def _run(corpus: Corpus, chosen: list[Stage], cells: list[Cell], minutes: float, out: Path, seed: int) -> int:
    keep_memory()
    began = time.perf_counter()
    corpus.tokenize(out / "tokenizer")
    plan = _plan(out / "plan.json", chosen, corpus, minutes, seed)
    results = [_stage(stage, corpus, plan, out, seed, f"[{i}/{len(chosen)}]") for i, stage in enumerate(chosen, 1)]
    remembered = _remember(cells, out / "tasks")
    say("untrained memories, chunk sizes, scale card")
    seconds = sum(float(r.get("seconds_in_all", 0)) for r in results) + plan["seconds"]
    final = {
        **_header(minutes, corpus, plan, max(seconds, time.perf_counter() - began)),
        "stages": results,
        "readout": evaluate.readout([1, 2, 4, 8, 16, 32, 64, 128], seed=seed),
        "chunk_sweep": benchmark.chunk_sweep([8, 16, 32, 64, 128, 256]),
        "scale_card": scale_card(),
        **({"tasks": remembered} if remembered else {}),
    }
    write_json(out / "results.json", final)
    report.write_report(final, out / "report.html")
    say(f"{out / 'report.html'}\n{out / 'results.json'}")
    failed = [r["name"] for r in results if not r["ok"]]
    if failed:
        say(f"failed: {', '.join(failed)}; the report says why")
    return 1 if failed else 0


def _choose(names: list[str] | None) -> list[Stage]:
    known = {stage.name: stage for stage in STAGES}
    for name in names or []:
        if name not in known:
            raise InputError(f"stages: {name!r} is not a stage{suggestion(name, known)}; the stages are {', '.join(known)}")
    return [stage for stage in STAGES if names is None or stage.name in names]


def _cells(names: list[str] | None) -> list[Cell]:
    for name in names or []:
        if name not in (*EXPERIMENTS, "all"):
            hint = suggestion(name, EXPERIMENTS)
            raise InputError(f"tasks: {name!r} is not one{hint}; the tasks are {', '.join(EXPERIMENTS)}, or all")
    return [cell for cell in small() if {cell.experiment, "all"} & set(names or [])]


def _claim(out: Path, settings: dict[str, Any], fresh: bool) -> None:
    """Makes the folder this run's own, or refuses a folder that holds something else."""
    path = out / "settings.json"
    if fresh and path.exists():
        for name in ("stages", "models", "tokenizer", "tasks"):
            shutil.rmtree(out / name, ignore_errors=True)
        for name in ("plan.json", "settings.json", "results.json", "report.html"):
            (out / name).unlink(missing_ok=True)
    if path.exists():
        held = read_json(path)
        differing = [f"{k} was {held.get(k)!r}, is {v!r}" for k, v in settings.items() if held.get(k) != v]
        if differing:
            raise InputError(f"{out}: holds another run ({'; '.join(differing)}); use --fresh to replace it, or another --out")
        return
    if out.exists() and any(out.iterdir()):
        raise InputError(f"{out}: the folder is not empty and holds no lineage run; give another --out")
    (out / "stages").mkdir()
    write_json(path, settings)


# ------------------------------------------------------------------------------------------------------------------ the plan


def _plan(path: Path, stages: list[Stage], corpus: Corpus, minutes: float, seed: int) -> dict[str, Any]:
    """Steps on text and on recall, equal for all stages, so that all of them fit the minutes. Measured once, then kept."""
    if path.exists():
        return read_json(path)
    began = time.perf_counter()
    text_s, recall_s = 0.0, 0.0
    for stage in stages:
        say(f"calibrating {stage.name}")
        trainer = trainer_for(build(stage, corpus, seed), corpus, train_config(100, seed))
        text_s += benchmark.median_seconds(trainer.step, 3)
        recall = RecallTraining(stage, steps=100, seed=seed)
        recall_s += benchmark.median_seconds(recall.step, 4)
    budget = minutes * 60
    steps = max(4, int(TEXT_SHARE * budget / text_s))
    plan = {
        "steps": steps,
        "tokens": steps * BATCH * CONTEXT,
        "recall_steps": max(4, int(RECALL_SHARE * budget / recall_s)),
        "seconds": time.perf_counter() - began,
    }
    write_json(path, plan)
    return plan


# ------------------------------------------------------------------------------------------------------------------ one stage


def _stage(stage: Stage, corpus: Corpus, plan: dict[str, Any], out: Path, seed: int, label: str) -> dict[str, Any]:
    """A finished stage from the folder, or a new one. An exception becomes a failed stage, never a lost run."""
    path = out / "stages" / f"{stage.name}.json"
    if path.exists():
        say(f"{label} {stage.name}: done before")
        return read_json(path)
    began = time.perf_counter()
    config = config_for(stage, corpus.tokenizer.vocab_size)  # type: ignore[union-attr]
    result: dict[str, Any] = {
        "name": stage.name,
        "title": stage.title,
        "memory": stage.memory,
        "config": config.to_dict(),
    }
    try:
        result |= {"ok": True, "error": None} | measure(stage, corpus, plan, out, seed, label)
    except Exception as error:
        # Whatever goes wrong in one stage must not take the others with it; the report shows it.
        result |= {"ok": False, "error": f"{type(error).__name__}: {error}".splitlines()[0]}
        say(f"{label} {stage.name}: failed: {result['error']}")
    result["seconds_in_all"] = time.perf_counter() - began
    if result["ok"]:
        write_json(path, result)
    return result


# ------------------------------------------------------------------------------------------------------------------ the tasks


def _remember(cells: list[Cell], folder: Path) -> list[dict[str, Any]]:
    """Rows of the recall benchmark: what the folder holds, and the cells with as many of their steps as fit the time."""
    if not cells:
        return runner.read(folder)
    folder.mkdir(exist_ok=True)
    device, path = torch.device("cpu"), folder / "plan.json"
    shares = read_json(path) if path.exists() else {}
    for name in dict.fromkeys(cell.experiment for cell in cells):
        if name not in shares:
            say(f"calibrating {name}")
            shares[name] = runner.fitting([cell for cell in cells if cell.experiment == name], TASK_MINUTES[name], device)
            write_json(path, shares)
    planned = [cell for whole in cells for cell in shortened([whole], shares[whole.experiment])]
    runner.run(planned, folder, device, {"commit": commit(), "machine": benchmark.machine()}, say=say)
    rows = runner.read(folder)
    return [*rows, *runner.not_run(planned, rows)]


# ---------------------------------------------------------------------------------------------------------------- the results


def scale_card() -> dict[str, Any]:
    """What Kimi K3 and GPT-2 hold, counted on models that are built without memory."""
    with torch.device("meta"):
        k3 = Model(ModelConfig.preset("kimi-k3")).to(torch.bfloat16)
        gpt2 = Model(ModelConfig.preset("gpt2-124m"))
    total, small = k3.num_parameters(), gpt2.num_parameters()
    state = k3.new_state(1)
    return {
        "parameters": total,
        "active_parameters": k3.num_parameters(active=True),
        "gpt2_parameters": small,
        "size_ratio": total / small,
        # The figure in circulation divides the two rounded sizes, 2.8 T and 124 M.
        "size_ratio_rounded": float(f"{total:.1e}") / float(f"{small:.2e}"),
        "kv_bytes_per_token": state.bytes_per_token(),
        "recurrent_state_bytes": state.num_bytes("recurrent"),
        "conv_state_bytes": state.num_bytes("conv"),
        "source": "counted on the presets kimi-k3 (bfloat16) and gpt2-124m, built on the meta device",
    }


def _header(minutes: float, corpus: Corpus, plan: dict[str, Any], seconds: float) -> dict[str, Any]:
    from palimpsest import __version__

    assert corpus.tokenizer is not None
    train, validation = corpus.train.encode(), corpus.validation.encode()
    return {
        "format": 1,
        "version": __version__,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": shlex.join(["palimpsest", *sys.argv[1:]]),
        "commit": commit(),
        "machine": benchmark.machine(),
        "text": {
            "source": corpus.source,
            "bytes": len(train) + len(validation),
            "train_bytes": len(train),
            "validation_bytes": len(validation),
            "unigram_bits_per_byte": data.unigram_bits_per_byte(validation),
            "vocab_size": corpus.tokenizer.vocab_size,
            "bytes_per_token": corpus.bytes_per_token,
        },
        "budget": {
            "minutes": minutes,
            "tokens": plan["tokens"],
            "steps": plan["steps"],
            "batch_size": BATCH,
            "context_length": CONTEXT,
            "seconds_used": seconds,
        },
    }


def commit() -> str | None:
    """The commit of the checkout this package runs from, if it is one."""
    folder = Path(__file__).resolve().parent.parent
    if not (folder / ".git").exists():
        return None
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
