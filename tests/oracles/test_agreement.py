"""The README's table of agreement is the stored one, to the character."""

from __future__ import annotations

import json

from tests.oracles.agreement import BEGIN, END, ROOT, STORED, render


def test_readme_shows_what_was_measured() -> None:
    rows = json.loads(STORED.read_text(encoding="utf-8"))
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text[text.index(BEGIN) : text.index(END) + len(END)] == render(rows)
    oracles = {row["oracle"].split()[0] for row in rows}
    assert oracles == {"fla-core", "mlx-lm", "transformers", "xllamacpp"} and all(row["difference"] < 1e-2 for row in rows)
