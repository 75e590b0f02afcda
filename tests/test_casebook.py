"""Public failures of comparable projects: casebook.toml says of each what holds here, and these tests hold it to that."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from tests.conftest import make_ids, make_model

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "palimpsest"
CASES = tomllib.loads((TESTS / "casebook.toml").read_text(encoding="utf-8"))


def test_every_case_is_tested_or_cannot_occur() -> None:
    for name, case in CASES.items():
        assert re.fullmatch(r"R\d{3}|K\d{2}", name)
        if "why" in case:
            assert not case.keys() - {"why", "while_absent"}
            if "while_absent" in case:
                assert not (PACKAGE / case["while_absent"]).exists(), f"{name} can occur now: write its test"
            continue
        assert case.keys() == {"holds", "tests"} and case["tests"]
        for test in case["tests"]:
            file, function = test.split("::")
            assert f"\ndef {function}(" in (TESTS / file).read_text(encoding="utf-8"), f"{name}: {test} does not exist"


def test_cases_named_in_tests_are_listed() -> None:
    named = {case for path in TESTS.rglob("*.py") for case in re.findall(r"\bR\d{3}\b", path.read_text(encoding="utf-8"))}
    assert named <= CASES.keys()


def test_nothing_needs_a_system_that_is_not_asked_for() -> None:
    """R114: without the modules that only Unix has, the package imports, trains a step and generates."""
    script = """
import sys
for name in ("resource", "fcntl", "termios", "pwd", "grp"):
    sys.modules[name] = None
import torch, palimpsest as pal
from palimpsest.progress import interrupts, memory_bytes
from palimpsest.tokenizer import Tokenizer
import threading
assert memory_bytes(torch.device("cpu")) != 0
model = pal.Model(pal.ModelConfig.preset("kimi-k3-tiny"))
ids = torch.arange(12).view(1, 12)
model(ids, labels=ids).loss.backward()
pal.generate(model, Tokenizer.bytes(), ["a"], pal.SamplingConfig(max_new_tokens=2))
def in_a_thread():
    with interrupts() as requested:
        assert not requested.is_set()
worker = threading.Thread(target=in_a_thread)
worker.start(); worker.join()
print("fine")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=TESTS.parent)
    assert done.stdout.strip() == "fine", done.stderr


class _Largest(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[misc]
    """Notes the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.bytes = max(self.bytes, tensor.numel() * tensor.element_size())
        return out


@torch.no_grad()
def test_prefill_in_pieces_needs_memory_for_the_piece() -> None:
    """R119: the largest tensor of a pass is the same at 1,000 tokens and at 8,000, but for keys and values kept per token."""
    model = make_model("kda-tiny")
    ids = make_ids(model, 1, 8000)
    largest, state = [], None
    for start in range(0, 8000, 500):
        with _Largest() as seen:
            hidden, state = model.hidden(ids[:, start : start + 500], state)
        assert hidden.shape[1] == 500
        largest.append(seen.bytes)
    widest = max(model.config.intermediate_size, model.config.vocab_size)
    assert max(largest) == min(largest[1:]) < 2 * 500 * 4 * widest


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the number is right by itself")
def test_a_process_does_not_count_the_memory_of_the_one_that_started_it() -> None:
    held = torch.ones(150_000_000)  # 600 MB
    script = "import torch; from palimpsest.progress import memory_bytes; print(memory_bytes(torch.device('cpu')))"
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=TESTS.parent, check=True)
    assert 0 < int(told.stdout) < held.nbytes
