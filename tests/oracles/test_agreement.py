"""The README's table of agreement is the stored one, to the character, and complete."""

from __future__ import annotations

import json

from tests.oracles.agreement import BEGIN, END, MEASURES, ROOT, STORED, render
from tests.oracles.weights import NAMES


def test_readme_shows_what_was_measured() -> None:
    rows = json.loads(STORED.read_text(encoding="utf-8"))
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text[text.index(BEGIN) : text.index(END) + len(END)] == render(rows)
    oracles = {row["oracle"].split()[0] for row in rows}
    assert oracles == {"fla-core", "mlx-lm", "transformers", "xllamacpp"} and all(row["difference"] < 3e-3 for row in rows)
    compared = {
        (row["what"], row["measure"]) for row in rows if row["oracle"].startswith("mlx-lm") and "stored" not in row["oracle"]
    }
    assert compared == {(name, measure) for name in NAMES.values() for measure in MEASURES}
