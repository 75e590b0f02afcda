"""The commands of `palimpsest benchmark`."""

from __future__ import annotations

from pathlib import Path

import cyclopts

from palimpsest.output import check_json, write_json

benchmark = cyclopts.App(name="benchmark", help="Measure this machine.")


@benchmark.command
def calibrate(*, out: Path) -> None:
    """Measure what this machine reaches, for `palimpsest plan --device FILE`. About half a minute; nothing else should run.

    Parameters
    ----------
    out
        The file to write.
    """
    check_json(out)
    from palimpsest.calibration import calibrate as measure

    write_json(out, measure())
    print(f"{out}: give it to `palimpsest plan MODEL --device {out}`")


@benchmark.command
def validate(*, out: Path) -> None:
    """Calibrate, run decode, prefill and training of three models, and compare with what is planned. Some minutes.

    Parameters
    ----------
    out
        The file to write.
    """
    check_json(out)
    from palimpsest import validation
    from palimpsest.calibration import calibrate as measure

    result = validation.validate(measure())
    write_json(out, result)
    print("\n".join(validation.lines(result)))
