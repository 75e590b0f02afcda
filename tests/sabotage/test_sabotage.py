"""The mutants are whole: each names one passage that exists once, and tests that exist. Running them is `make sabotage`."""

from __future__ import annotations

from tests.sabotage.sabotage import ROOT, read


def test_each_mutant_changes_one_passage() -> None:
    mutants = read()
    assert len(mutants) >= 25 and len({mutant.name for mutant in mutants}) == len(mutants)
    for mutant in mutants:
        source = (ROOT / "palimpsest" / mutant.file).read_text(encoding="utf-8")
        assert source.count(mutant.old) == 1, f"{mutant.name}: its passage is not in {mutant.file} exactly once"
        assert mutant.old != mutant.new and all((ROOT / test).exists() for test in mutant.tests)


def test_every_part_of_the_model_has_mutants() -> None:
    files = {mutant.file.split("/")[0] for mutant in read()}
    assert files >= {"ops", "mixers", "moe.py", "mlps.py", "residuals.py", "state.py", "model.py"}
