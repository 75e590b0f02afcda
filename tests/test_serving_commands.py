"""The commands that serve and talk, as a user starts them."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import openai
import pytest
import torch

import palimpsest as pal
from palimpsest.cli import main
from palimpsest.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    model = pal.Model(pal.ModelConfig.preset("kda-tiny", vocab_size=257, initializer_range=0.2)).eval()
    path = tmp_path_factory.mktemp("models") / "small"
    pal.save(model, path, Tokenizer.bytes())
    return path


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "palimpsest", *arguments]


def test_serve_until_it_is_told_to_end(folder: Path) -> None:
    with subprocess.Popen(
        command("serve", str(folder), "--port", "0", "--memory", "200MB", "--context", "512", "--draft", str(folder)),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.fullmatch(r"small at (http://127\.0\.0\.1:\d+) \(context: 512 tokens\); Ctrl-C ends it\n", line)
        assert found is not None, line
        with openai.OpenAI(base_url=f"{found[1]}/v1", api_key="none", max_retries=0) as client:
            answer = client.completions.create(model="small", prompt="To be", max_tokens=5, temperature=0)
        (alone,) = pal.generate(*pal.load(folder), ["To be"], pal.SamplingConfig(5, 0.0))  # type: ignore[arg-type]
        assert answer.choices[0].text == alone
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130


def test_mistakes_are_one_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """R109: the option, the value that was understood, and what to do."""
    other = tmp_path / "other"
    pal.save(pal.Model(pal.ModelConfig.preset("kda-tiny", vocab_size=258)), other, Tokenizer.train(["a b a b"], 258))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        wrong = {
            ("--memory", "much"): "--memory is 'much'; it must be a size",
            ("--memory", "1kB"): "memory: 1000 bytes",
            ("--prefix-memory", "-1"): "--prefix-memory is '-1'",
            ("--prefix-disk", "much"): "--prefix-disk is 'much'",
            ("--running", "0"): "--running is 0; it must be at least 1",
            ("--guesses", "-1"): "--guesses is -1",
            ("--draft", str(folder), "--guesses", "0"): "--guesses is 0; it must be at least 1",
            ("--draft", str(tmp_path / "nowhere")): "nowhere",
            ("--draft", str(other)): "draft: its tokenizer is another one (258 tokens, the model's 257)",
            ("--port", port): f"--port {port}: ",
            ("--port", "70000"): "--port 70000: ",
            ("--device", "abacus"): "--device abacus: ",
            ("--api-key", ""): "--api-key is empty",
        }
        for flags, says in wrong.items():
            assert main(["serve", str(folder), *flags]) == 2
            error = capsys.readouterr().err
            assert says in error and error.count("\n") == 1, error
    assert main(["serve", str(tmp_path / "nothing")]) == 2
