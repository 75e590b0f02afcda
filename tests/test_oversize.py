"""The measurement of a model whose experts stay on disk, at the smallest size it has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from palimpsest import oversize
from palimpsest.cli import main


@pytest.mark.slow
def test_a_small_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, room = tmp_path / "offload.json", tmp_path / "room"
    room.mkdir()
    argv = ["--gigabytes", "0.25", "--cache-gigabytes", "0.05", "--tokens", "3", "--folder", str(room)]
    assert main(["benchmark", "offload", "--out", str(out), *argv]) == 0
    found = json.loads(out.read_text())
    assert found["twin_tokens_equal"] and found["checkpoint_bytes"] >= 2.5e8
    for name in ("page_cache_dropped", "page_cache_left"):
        run = found[name]
        # Every one of eight layers wants eight experts for each token.
        assert run["wanted_bytes_per_token"] == 8 * 8 * oversize.EXPERT_BYTES
        assert run["read_bytes_per_token"] == (1 - run["hit_rate"]) * run["wanted_bytes_per_token"]
    assert found["page_cache_dropped"]["from_disk_bytes_per_token"] > found["page_cache_left"]["from_disk_bytes_per_token"]
    assert list(room.iterdir()) == []
    assert "same tokens from disk as from memory: yes" in capsys.readouterr().out


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for argv, message in (
        (["--gigabytes", "0"], "--gigabytes is 0.0; expected more than 0"),
        (["--gigabytes", "900000", "--folder", str(tmp_path)], "GB free; "),
    ):
        assert main(["benchmark", "offload", "--out", str(tmp_path / "x.json"), *argv]) == 2
        assert message in capsys.readouterr().err
        assert list(tmp_path.iterdir()) == []
