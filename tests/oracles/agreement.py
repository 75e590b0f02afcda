"""What agrees with what, and by how much: oracle tests note their differences, `make agreement` puts them in the README.

python tests/oracles/agreement.py FILE     # FILE: the lines that a test run with AGREEMENT=FILE has written
"""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
STORED = ROOT / "benchmarks" / "agreement.json"
BEGIN, END = "<!-- agreement: written by `make agreement` -->", "<!-- end of agreement -->"


MEASURES = {"output": "output", "decode": "cached decode", "gradients": "gradients"}


def note(oracle: str, what: str, measure: str, difference: float, kind: str) -> None:
    """Adds a measured difference, 'absolute' of logits of spread 1 or 'relative', when a run asks for it.

    `oracle` is an installed package, or a name with a version; `measure` one of MEASURES.
    """
    assert measure in MEASURES
    path = os.environ.get("AGREEMENT")
    if path:
        name = oracle if " " in oracle else f"{oracle} {version(oracle)}"
        row = {"oracle": name, "what": what, "measure": measure, "difference": float(difference), "kind": kind}
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def largest(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each oracle, subject and measure, with the largest difference."""
    table: dict[tuple[str, str, str], dict[str, Any]] = {}
    for row in rows:
        key = row["oracle"], row["what"], row["measure"]
        if key not in table or table[key]["difference"] < row["difference"]:
            table[key] = row
    return [table[key] for key in sorted(table)]


def render(rows: list[dict[str, Any]]) -> str:
    """The README's block: a line for each oracle and subject."""
    lines = [BEGIN, "", f"| oracle | what | {' | '.join(MEASURES.values())} |", f"|---|---|{'---|' * len(MEASURES)}"]
    for oracle, what in dict.fromkeys((row["oracle"], row["what"]) for row in rows):
        own = {row["measure"]: row for row in rows if (row["oracle"], row["what"]) == (oracle, what)}
        cells = [f"{own[m]['difference']:.0e} {own[m]['kind']}" if m in own else "" for m in MEASURES]
        lines.append(f"| {oracle} | {what} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", END])


def main() -> None:
    lines = Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()
    rows = largest([json.loads(line) for line in lines])
    STORED.parent.mkdir(exist_ok=True)
    STORED.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    start, end = text.index(BEGIN), text.index(END) + len(END)
    readme.write_text(text[:start] + render(rows) + text[end:], encoding="utf-8")


if __name__ == "__main__":
    main()
