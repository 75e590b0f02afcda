"""Models of flash-linear-attention: folders as it saves them give the logits that it computed (tests/golden/fla_models.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import palimpsest as pal
from tests.golden.fla_models import CASES, IDS, draw

FOUND = json.loads((Path(__file__).parents[1] / "golden" / "fla_models.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", CASES)
def test_logits(tmp_path: Path, case: str) -> None:
    found = FOUND[case]
    (tmp_path / "config.json").write_text(json.dumps(found["config"]))
    save_file({name: draw(name, shape) for name, shape in found["shapes"].items()}, tmp_path / "model.safetensors")
    model, _ = pal.load(tmp_path)
    logits = model(torch.tensor([IDS])).logits[0, -1]
    expected = torch.tensor(found["logits"])
    assert 0.5 < expected.std() < 3
    assert (logits - expected).abs().max() < 5e-5
