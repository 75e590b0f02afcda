"""A server under many clients, good and bad ones: every answer is compared with what the model says alone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from palimpsest.config import SamplingConfig
from palimpsest.generate import generate
from palimpsest.model import Model
from palimpsest.tokenizer import Tokenizer

# What a client may do, and how often beside the others.
MANNERS = {
    "whole": 6,
    "stream": 6,
    "slow reader": 2,
    "leaves a stream": 3,
    "leaves at once": 2,
    "bad JSON": 1,
    "invalid UTF-8": 1,
    "huge body": 1,
}
REFUSED = {"bad JSON": 400, "invalid UTF-8": 400, "huge body": 413}
SAMPLE_S = 1.0  # between looks at the server's memory


def soak(folder: Path, model: Model, tokenizer: Tokenizer, clients: int, seconds: float) -> dict[str, Any]:
    """Runs `palimpsest serve FOLDER` under `clients` at a time; `wrong` lists what was not as it should be, at most ten."""
    prompts = [f"{number}: " + "once more " * (number % 7) for number in range(12)]
    config = SamplingConfig(max_new_tokens=24, temperature=0.0)
    expected = {prompt: str(generate(model, tokenizer, [prompt], config)[0]) for prompt in prompts}
    command = [
        sys.executable,
        "-m",
        "palimpsest",
        "serve",
        str(folder),
        "--port",
        "0",
        "--name",
        "m",
        "--prefix-memory",
        "20MB",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = re.search(r":(\d+) ", process.stdout.readline())
        if found is None:
            raise RuntimeError(f"{folder}: the server did not start")
        try:
            run = _Run(int(found[1]), expected, config.max_new_tokens)
            result = asyncio.run(run.all(clients, seconds))
        finally:
            process.send_signal(signal.SIGINT)
            status = process.wait(60)
    return {**result, "exit_status": status}


class _Run:
    def __init__(self, port: int, expected: dict[str, str], tokens: int) -> None:
        self.port, self.expected, self.tokens = port, expected, tokens
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.resident: list[float] = []

    async def all(self, clients: int, seconds: float) -> dict[str, Any]:
        end = time.monotonic() + seconds
        watcher = asyncio.create_task(self._watch(end))
        await asyncio.gather(*(self._client(number, end) for number in range(clients)))
        await watcher
        metrics = await self._metrics()
        for _ in range(100):
            if metrics["palimpsest_running"] == metrics["palimpsest_queued"] == 0:
                break
            await asyncio.sleep(0.1)
            metrics = await self._metrics()
        else:
            self.wrong.append("work went on after every client had gone")
        held = sum(value for name, value in metrics.items() if name.startswith("palimpsest_state_bytes"))
        if held:
            self.wrong.append(f"{held} bytes of state were still held")
        half = len(self.resident) // 2
        early, late = max(self.resident[: half or 1]), max(self.resident[half:])
        return {
            "clients": clients,
            "seconds": seconds,
            "requests": sum(self.done.values()),
            "by_manner": dict(self.done),
            "wrong": self.wrong[:10],
            "number_wrong": len(self.wrong),
            "resident_bytes_first_half": early,
            "resident_bytes_second_half": late,
            "resident_growth": late / early - 1,
            "completion_tokens": metrics["palimpsest_completion_tokens_total"],
        }

    async def _client(self, number: int, end: float) -> None:
        chance = random.Random(number)
        while time.monotonic() < end:
            (manner,) = chance.choices(list(MANNERS), list(MANNERS.values()))
            prompt = chance.choice(list(self.expected))
            try:
                async with asyncio.timeout(120):
                    mistake = await self._act(manner, prompt, chance)
            except (OSError, TimeoutError, ValueError, IndexError) as error:
                mistake = None if manner == "huge body" and isinstance(error, OSError) else f"{type(error).__name__} {error}"
            self.done[manner] += 1
            if mistake is not None:
                self.wrong.append(f"{manner}: {mistake}")

    async def _act(self, manner: str, prompt: str, chance: random.Random) -> str | None:
        """One request; what was wrong with its answer."""
        stream = manner in ("stream", "slow reader", "leaves a stream")
        body: dict[str, Any] = {"model": "m", "prompt": prompt, "temperature": 0, "max_tokens": self.tokens, "stream": stream}
        if manner.startswith("leaves"):
            body["max_tokens"] = 5000
        content = json.dumps(body).encode()
        content = {
            "bad JSON": content[: chance.randrange(len(content))],
            "invalid UTF-8": content[:-1] + b', "user": "\xff\xfe"}',
            "huge body": content[:-1] + b', "user": "' + b"x" * (5 << 20) + b'"}',
        }.get(manner, content)
        async with self._connection() as (reader, writer):
            head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
            writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
            await writer.drain()
            if manner == "leaves at once":
                return None
            if manner == "leaves a stream":
                await reader.readuntil(b"data: ")
                await reader.readuntil(b"data: ")
                return None
            answer = b""
            while part := await reader.read(64 if manner == "slow reader" else 1 << 16):
                answer += part
                if manner == "slow reader":
                    await asyncio.sleep(0.005)
        status = int(answer.split(b" ", 2)[1])
        if manner in REFUSED:
            return None if status == REFUSED[manner] else f"status {status}"
        if status != 200:
            return f"status {status}: {answer[-200:]!r}"
        payload = answer.partition(b"\r\n\r\n")[2]
        if stream:
            events = [json.loads(line) for line in re.findall(rb"data: (\{.*\})", payload)]
            text = "".join(event["choices"][0]["text"] for event in events)
            if b"data: [DONE]" not in payload:
                return "the stream had no end"
        else:
            text = json.loads(payload)["choices"][0]["text"]
        return None if text == self.expected[prompt] else f"{prompt!r} was answered with {text!r}"

    async def _watch(self, end: float) -> None:
        while time.monotonic() < end:
            await asyncio.sleep(SAMPLE_S)
            self.resident.append((await self._metrics())["palimpsest_process_bytes"])

    async def _metrics(self) -> dict[str, float]:
        async with self._connection() as (reader, writer):
            writer.write(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            text = (await reader.read(-1)).decode().partition("\r\n\r\n")[2]
        lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in lines}

    @contextlib.asynccontextmanager
    async def _connection(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            yield reader, writer
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
