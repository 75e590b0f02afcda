"""The commands of `palimpsest benchmark`."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import cyclopts
from cyclopts import Parameter

from palimpsest.output import check_json, write_json

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
    check_json(out)
    from palimpsest import peers as others

    write_json(out, {**_about(), "rows": others.cpu(peers, lambda line: print(line, flush=True))})


@benchmark.command
def gpu(*, out: Path) -> None:
    """Check the GPU kernels against float64 and time them. Two minutes on a GPU that has nothing else to do.

    Parameters
    ----------
    out
        The file to write: every error, every median beside its floor, the machine, the commit and the command.
    """
    check_json(out)
    from palimpsest import benchmark_gpu, ops
    from palimpsest.config import InputError

    runs, reason = next((runs, reason) for name, runs, reason in ops.backends() if name == "triton")
    if not runs or not benchmark_gpu.available():
        raise InputError(f"benchmark gpu: cannot run here: {reason if not runs else 'there is no CUDA device'}")
    rows = benchmark_gpu.all_tables(lambda line: print(line, flush=True))
    write_json(out, {**_about(), "device": benchmark_gpu.device(), "rows": rows})


def _about() -> dict[str, Any]:
    """Where and when the figures of this process were measured."""
    from palimpsest import __version__, lineage
    from palimpsest.benchmark import machine

    return {
        "version": __version__,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": shlex.join(["palimpsest", *sys.argv[1:]]),
        "commit": lineage.commit(),
        "machine": machine(),
    }


@benchmark.command
def calibrate(*, out: Path) -> None:
    """Measure what this machine reaches, for `palimpsest plan --device FILE`. Half a minute; nothing else should run.

    Parameters
    ----------
    out
        The file to write.
    """
    check_json(out)
    from palimpsest.calibration import calibrate as measure

    write_json(out, {**_about(), **measure()})
    print(f"{out}: give it to `palimpsest plan MODEL --device {out}`")


@benchmark.command
def validate(*, out: Path) -> None:
    """Calibrate, run decode, prefill and training of three models, and compare with what is planned. Two minutes.

    Parameters
    ----------
    out
        The file to write.
    """
    check_json(out)
    from palimpsest import validation
    from palimpsest.calibration import calibrate as measure

    result = validation.validate(measure())
    write_json(out, {**_about(), **result})
    print("\n".join(validation.lines(result)))
