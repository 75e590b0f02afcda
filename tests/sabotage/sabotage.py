"""Faults that the test suite must notice: one sign, mask, decay, transpose, scale, norm or boundary each.

A mutant of mutants.toml replaces one passage of one file; the tests it names must turn red. `make sabotage` breaks a copy of
the project once for each, and writes the table of mutants and killing tests to benchmarks/sabotage.json. The test that killed
a mutant the last time runs first: where it is red again, the others need not run.

With a part, as `1/3`, it takes every third mutant from the first on and leaves the record as it is; that every passage is still
there is looked at for all.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "benchmarks" / "sabotage.json"
# Of the libraries only the one that this processor loads: the others are not tested here, and take twice its time.
BUILD = """
import hatch_build, torch
from palimpsest.ops.cpu import LIBRARIES
name = LIBRARIES.get(torch.backends.cpu.get_cpu_capability(), LIBRARIES["DEFAULT"])
assert hatch_build.compiles("c++", hatch_build.TARGETS[name], name)
"""


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str  # inside palimpsest/
    old: str
    new: str
    tests: list[str]


def read() -> list[Mutant]:
    table = tomllib.loads(Path(__file__).with_name("mutants.toml").read_text(encoding="utf-8"))
    return [Mutant(**row) for row in table["mutant"]]


def recorded() -> dict[str, str]:
    """The test that killed each mutant the last time."""
    rows = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else []
    return {row["mutant"]: row["killed_by"] for row in rows if row["killed_by"]}


def killer(mutant: Mutant, folder: Path, known: str | None) -> str | None:
    """Breaks a copy of the project in `folder` and runs the mutant's tests, `known` first: the first that failed, or None."""
    copy = folder / "project"
    for part in ("palimpsest", "tests"):
        shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "hatch_build.py"):
        shutil.copy(ROOT / name, copy)
    path = copy / "palimpsest" / mutant.file
    source = path.read_text(encoding="utf-8")
    path.write_text(source.replace(mutant.old, mutant.new), encoding="utf-8")
    if path.suffix in (".cpp", ".h"):
        subprocess.run([sys.executable, "-c", BUILD], cwd=copy, check=True)
    if known is not None and known.split("::")[0] in mutant.tests and pytest(copy, [known]).returncode == 1:
        return known
    done = pytest(copy, mutant.tests)
    red = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    failed = [line.split(" - ")[0].split(" ", 1)[1] for line in red]
    if done.returncode == 1 and failed:
        return failed[0]
    if done.returncode != 0:
        raise RuntimeError(f"the tests did not run: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return None


def pytest(copy: Path, tests: list[str]) -> subprocess.CompletedProcess[str]:
    """Status 1: a test failed; 4: there is no such test."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=600, env=environment)


def row(mutant: Mutant, known: str | None = None) -> dict[str, str | None]:
    with tempfile.TemporaryDirectory() as folder:
        test = killer(mutant, Path(folder), known)
    print(f"{mutant.name:<45} {test or 'SURVIVES'}", flush=True)
    return {"mutant": mutant.name, "file": f"palimpsest/{mutant.file}", "killed_by": test}


def check_passages(mutants: list[Mutant]) -> None:
    for mutant in mutants:
        found = (ROOT / "palimpsest" / mutant.file).read_text(encoding="utf-8").count(mutant.old)
        if found != 1:
            raise ValueError(f"{mutant.name}: {mutant.file} holds {found} times: {mutant.old!r}")


def main(part: str = "1/1") -> int:
    mutants, known = read(), recorded()
    check_passages(mutants)
    first, parts = (int(number) for number in part.split("/"))
    chosen = mutants[first - 1 :: parts]
    with ThreadPoolExecutor(2) as pool:
        rows = list(pool.map(row, chosen, [known.get(mutant.name) for mutant in chosen]))
    if parts == 1:
        RECORD.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    alive = [each["mutant"] for each in rows if each["killed_by"] is None]
    print(f"{len(rows) - len(alive)} of {len(rows)} mutants killed" + (f"; alive: {alive}" if alive else ""))
    return int(bool(alive))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
