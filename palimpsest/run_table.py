"""Runs of several recipes and seeds as one table, finished or not: what `palimpsest benchmark recipes` writes.

Losses are compared at equal tokens: the most tokens at which every run has a validation. Speed and memory are medians and
maxima over what the runs recorded.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from palimpsest import run_folder
from palimpsest.config import InputError, ModelConfig
from palimpsest.model import Model
from palimpsest.plan.units import bytes_text, count_text
from palimpsest.run_report import Run, read


def gather(folders: Sequence[Path]) -> dict[str, Any]:
    """The table, ready for JSON. Raises InputError for folders that are no runs, and for runs on different texts."""
    runs = read(folders)
    for run, folder in zip(runs, folders, strict=True):
        if not run.settings:
            raise InputError(f"{folder / 'run.json'}: there is no such file; give the folder of a run")
    texts = {run.settings["train_tokens"]["digest"]: run for run in runs}
    if len(texts) > 1:
        names = " and ".join(run.name for run in list(texts.values())[:2])
        raise InputError(f"{names} learn from different texts, so their losses do not compare; gather them apart")
    validated = [{r["tokens"] for r in run.records if r.get("val_nats_per_token") is not None} for run in runs]
    equal = max(set.intersection(*validated), default=None)
    found = [_row(run, folder, equal) for run, folder in zip(runs, folders, strict=True)]
    recipes = list(dict.fromkeys(row["recipe"] for row in found))
    rows = [_together([row for row in found if row["recipe"] == recipe]) for recipe in recipes]
    settings = [{**run.settings["train"], "seed": None} for run in runs]
    train = runs[0].settings["train_tokens"]["tokens"]
    return {
        "equal_tokens": equal,
        "train_tokens": train,
        "equal_repeats": None if equal is None else equal / train,
        "same_schedule": all(each == settings[0] for each in settings),
        "rows": rows,
    }


def _row(run: Run, folder: Path, equal: int | None) -> dict[str, Any]:
    pieces = run_folder.pieces(folder)
    at_equal = [r for r in run.records if r["tokens"] == equal and r.get("val_nats_per_token") is not None]
    step, of_steps = run.last("step"), run.settings["train"]["steps"]
    speeds = [r["tokens_per_s"] for r in run.records[1:] if r.get("tokens_per_s")]
    shares = [r["mfu"] for r in run.records[1:] if r.get("mfu")]
    with torch.device("meta"):
        model = Model(ModelConfig.from_dict(run.settings["model"], str(folder / "run.json")))
    return {
        "recipe": pieces[-1].get("recipe") or run.name if pieces else run.name,
        "run": run.name,
        "seed": run.settings["train"]["seed"],
        "parameters": model.num_parameters(),
        "active_parameters": model.num_parameters(active=True),
        "finished": step == of_steps,
        "steps": step,
        "of_steps": of_steps,
        "tokens": run.last("tokens"),
        "repeats": run.last("tokens") / run.settings["train_tokens"]["tokens"],
        "val_nats_per_token": run.last("val_nats_per_token"),
        "val_bits_per_byte": run.last("val_bits_per_byte"),
        "val_nats_per_token_at_equal_tokens": at_equal[-1]["val_nats_per_token"] if at_equal else None,
        "tokens_per_s": statistics.median(speeds) if speeds else None,
        "mfu": statistics.median(shares) if shares else None,
        "memory_bytes": run.last("memory_bytes"),
        "seconds": run.last("seconds"),
        "pieces": pieces,
    }


def _together(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """One recipe: its runs, and over them mean, lowest and highest of the losses, the median speed and the most memory."""

    def known(key: str) -> list[float]:
        return [run[key] for run in runs if run[key] is not None]

    row: dict[str, Any] = {key: runs[0][key] for key in ("recipe", "parameters", "active_parameters")}
    row["finished"] = all(run["finished"] for run in runs)
    for key in ("val_nats_per_token", "val_bits_per_byte", "val_nats_per_token_at_equal_tokens"):
        values = known(key)
        row[key] = {"mean": statistics.fmean(values), "lowest": min(values), "highest": max(values)} if values else None
    for key in ("tokens_per_s", "mfu"):
        row[key] = statistics.median(known(key)) if known(key) else None
    row["memory_bytes"] = max(known("memory_bytes"), default=None)
    return {**row, "runs": runs}


def lines(table: dict[str, Any]) -> list[str]:
    """The table as text for a terminal."""
    equal = table["equal_tokens"]
    if equal is None:
        first = "no validation that all runs have: losses are each run's last"
    else:
        first = f"validation loss after {equal:,} tokens of every run (the text {table['equal_repeats']:.3g} times)"
    found = [first]
    if not table["same_schedule"]:
        found.append("the runs differ in steps or other settings of training: compare with care")
    found.append(
        f"{'recipe':<18}{'parameters':>11}{'nats/token':>12}{'over seeds':>18}{'tokens/s':>10}{'MFU':>7}{'memory':>11}  runs"
    )
    for row in table["rows"]:
        loss = row["val_nats_per_token_at_equal_tokens"] or row["val_nats_per_token"]
        mean = f"{loss['mean']:.4f}" if loss else "-"
        spread = f"{loss['lowest']:.4f} to {loss['highest']:.4f}" if loss and len(row["runs"]) > 1 else "one"
        speed = f"{row['tokens_per_s']:,.0f}" if row["tokens_per_s"] else "-"
        share = f"{row['mfu']:.1%}" if row["mfu"] else "-"
        memory = bytes_text(row["memory_bytes"]) if row["memory_bytes"] else "-"
        states = (f"seed {run['seed']}: {_state(run)}" for run in row["runs"])
        numbers = f"{count_text(row['parameters']):>11}{mean:>12}{spread:>18}{speed:>10}{share:>7}{memory:>11}"
        found.append(f"{row['recipe']:<18}{numbers}  {'; '.join(states)}")
    return found


def _state(run: dict[str, Any]) -> str:
    read_times = f"{run['tokens']:,} tokens, text read {run['repeats']:.3g} times"
    return read_times if run["finished"] else f"UNFINISHED, step {run['steps']} of {run['of_steps']}, {read_times}"
