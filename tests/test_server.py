"""The server, driven over a socket by the official client, and by clients that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import openai
import pytest
import torch
import uvicorn

import palimpsest as pal
from palimpsest.engine import Engine, Worker
from palimpsest.server import Settings, create_app
from palimpsest.tokenizer import Tokenizer

TOKENIZER = Tokenizer.bytes()
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
PLAIN = "User: Hello\nAssistant:"


@functools.cache
def make() -> pal.Model:
    torch.manual_seed(3)
    return pal.Model(pal.ModelConfig.preset("kimi-k3-tiny", vocab_size=257, initializer_range=0.2)).eval()


@dataclass
class Served:
    """A running server."""

    port: int
    engine: Engine
    uvicorn: uvicorn.Server
    clients: list[openai.OpenAI] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def client(self, **options: Any) -> openai.OpenAI:
        client = openai.OpenAI(base_url=self.url, max_retries=0, timeout=60, **{"api_key": "none", **options})
        self.clients.append(client)
        return client

    def raw(self, data: bytes) -> bytes:
        """All that comes back for bytes on a fresh connection."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=30) as connection:
            connection.sendall(data)
            return b"".join(iter(lambda: connection.recv(65536), b""))

    def post(self, path: str, body: bytes, **headers: str) -> tuple[int, Any]:
        lines = {"host": f"127.0.0.1:{self.port}", "content_type": "application/json", "connection": "close", **headers}
        lines["content_length"] = str(len(body))
        head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in lines.items())
        answer = self.raw(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + body)
        status, _, content = answer.partition(b"\r\n\r\n")
        return int(status.split()[1]), json.loads(content)

    def get(self, path: str) -> str:
        answer = self.raw(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
        return answer.decode()

    def settle(self) -> None:
        """Waits until nothing runs; the engine has a second for it."""
        until = time.monotonic() + 10
        while not self.engine.idle:
            assert time.monotonic() < until, "work goes on for a client that is gone"
            time.sleep(0.01)


@contextlib.contextmanager
def serving(
    settings: Settings | None = None, model: pal.Model | None = None, tokenizer: Tokenizer = TOKENIZER, **engine: Any
) -> Iterator[Served]:
    held = Engine(
        model or make(), tokenizer, **{"memory_bytes": 1 << 28, "cache_bytes": 1 << 24, "context_tokens": 4096, **engine}
    )
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(
        create_app(Worker(held), settings or Settings("tiny")),
        log_level="error",
        h11_max_incomplete_event_size=32 << 10,
        timeout_graceful_shutdown=5,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    served = Served(listener.getsockname()[1], held, server)
    try:
        yield served
    finally:
        for client in served.clients:
            client.close()
        server.should_exit = True
        thread.join()
        listener.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving() as served:
        yield served


@functools.cache
def text_of(prompt: str, tokens: int, stop: tuple[str, ...] = ()) -> str:
    """What the model says alone."""
    config = pal.SamplingConfig(max_new_tokens=tokens, temperature=0.0, stop=stop)
    return str(pal.generate(make(), TOKENIZER, [prompt], config)[0])


def check(server: Served) -> None:
    """It still answers, and rightly."""
    answer = server.client().completions.create(model="tiny", prompt="To be", temperature=0)
    assert answer.choices[0].text == text_of("To be", 16)


def post_head(content: bytes, more: str = "") -> bytes:
    start = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{start}content-length: {len(content)}\r\n{more}\r\n".encode()


# What the official client sees


def test_models(server: Served) -> None:
    client = server.client()
    assert [model.id for model in client.models.list()] == ["tiny"] == [client.models.retrieve("tiny").id]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")


def test_chat_whole_and_in_pieces(server: Served) -> None:
    """R106: text, reason and usage are the same in both modes; one terminal chunk per choice, then usage, then the end."""
    client = server.client()
    expected = text_of(PLAIN, 20, ("\nUser:",))
    for n in (1, 2):
        whole = client.chat.completions.create(model="tiny", messages=HELLO, temperature=0, max_completion_tokens=20, n=n)
        assert [choice.message.content for choice in whole.choices] == [expected] * n
        assert [choice.finish_reason for choice in whole.choices] == ["length"] * n
        assert whole.usage is not None and whole.usage.completion_tokens == 20 * n
        assert whole.usage.prompt_tokens == len(PLAIN)
        stream = client.chat.completions.create(
            model="tiny",
            messages=HELLO,
            temperature=0,
            max_tokens=20,
            n=n,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
        for index in range(n):
            own = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
            assert own[0].delta.role == "assistant"
            assert "".join(choice.delta.content or "" for choice in own) == expected
            assert [c.finish_reason for c in own if c.finish_reason] == ["length"] == [own[-1].finish_reason]
        assert chunks[-1].choices == [] and [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        usage = chunks[-1].usage
        assert usage is not None and usage.prompt_tokens_details is not None
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(PLAIN), 20 * n)
        assert usage.prompt_tokens_details.cached_tokens == len(PLAIN)
        assert len({chunk.id for chunk in chunks}) == 1


def test_completions_whole_and_in_pieces(server: Served) -> None:
    client = server.client()
    prompts = ["To be", "or not"]
    whole = client.completions.create(model="tiny", prompt=prompts, temperature=0, n=2, logprobs=1)
    expected = [text_of(prompt, 16) for prompt in prompts for _ in range(2)]
    assert [choice.text for choice in whole.choices] == expected
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    pieces = [""] * 4
    for chunk in client.completions.create(model="tiny", prompt=prompts, temperature=0, n=2, stream=True):
        for choice in chunk.choices:
            pieces[choice.index] += choice.text
    assert pieces == expected
    ids = TOKENIZER.encode("To be")
    assert client.completions.create(model="tiny", prompt=ids, temperature=0).choices[0].text == expected[0]
    both = client.completions.create(model="tiny", prompt=[ids, ids], temperature=0, max_tokens=16)
    assert [choice.text for choice in both.choices] == [expected[0]] * 2


def test_the_asynchronous_client_and_many_at_once(server: Served) -> None:
    """R104: forty requests at a time, whole and streamed, each answered as alone."""
    prompts = [f"number {n} " + "x" * n for n in range(20)]
    expected = [text_of(prompt, 12) for prompt in prompts]

    async def one(client: openai.AsyncOpenAI, prompt: str) -> str:
        whole = await client.completions.create(model="tiny", prompt=prompt, max_tokens=12, temperature=0)
        return whole.choices[0].text

    async def streamed(client: openai.AsyncOpenAI, prompt: str) -> str:
        text = ""
        async for chunk in await client.completions.create(
            model="tiny", prompt=prompt, max_tokens=12, temperature=0, stream=True
        ):
            text += chunk.choices[0].text
        return text

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, prompt) for ask in (one, streamed) for prompt in prompts))

    assert asyncio.run(all_of_them()) == expected * 2


def test_stop_texts_never_leak(server: Served) -> None:
    """R097, R106: none of four stop texts is seen, whole or in pieces, and the reason says so."""
    client = server.client()
    whole = text_of(PLAIN, 60)
    place = next(n for n in range(3, 50) if whole[n : n + 2].isprintable() and whole.index(whole[n : n + 2]) == n)
    stop = [whole[place : place + 2], "never", "neither", "nor"]
    given: dict[str, Any] = {"model": "tiny", "messages": HELLO, "temperature": 0, "max_tokens": 60, "stop": stop}
    answer = client.chat.completions.create(**given).choices[0]
    assert (answer.message.content, answer.finish_reason) == (whole[:place], "stop")
    chunks = list(client.chat.completions.create(**given, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole[:place]
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_log_probabilities(server: Served) -> None:
    client = server.client()
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, temperature=0, max_tokens=8, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    ids = TOKENIZER.encode(PLAIN)
    for score in logprobs.content:
        with torch.no_grad():
            expected = torch.log_softmax(make()(torch.tensor([ids])).logits[0, -1, :257], -1)
        assert score.bytes is not None and len(score.bytes) == 1
        assert abs(float(expected[score.bytes[0]]) - score.logprob) < 1e-4
        assert score.top_logprobs[0].bytes == score.bytes and len(score.top_logprobs) == 3
        ids.append(score.bytes[0])
    streamed = client.chat.completions.create(
        model="tiny", messages=HELLO, temperature=0, max_tokens=8, logprobs=True, top_logprobs=3, stream=True
    )
    parts = [chunk.choices[0].logprobs for chunk in streamed]
    assert [score for part in parts if part is not None for score in part.content or ()] == logprobs.content
    old = client.completions.create(model="tiny", prompt="To be", temperature=0, max_tokens=4, logprobs=2).choices[0].logprobs
    assert old is not None and old.tokens is not None and old.top_logprobs is not None
    assert len(old.tokens) == 4 and old.text_offset == [0, 1, 2, 3] and all(len(top) <= 2 for top in old.top_logprobs)


def test_seeds_penalties_and_bias(server: Served) -> None:
    client = server.client()

    def say(**options: Any) -> str:
        given = {"model": "tiny", "prompt": "To be", "max_tokens": 12, **options}
        return client.completions.create(**given).choices[0].text

    assert say(seed=1) == say(seed=1) != say(seed=2)
    assert say(seed=-1) == say(seed=-1)
    assert len({say() for _ in range(3)}) == 3
    assert say(logit_bias={"97": 100}, temperature=0) == "a" * 12
    assert say(extra_body={"top_k": 1}) == say(temperature=0)
    twice = say(frequency_penalty=2, presence_penalty=2, logit_bias={"97": 5}, temperature=0)
    assert twice != say(logit_bias={"97": 5}, temperature=0)


@pytest.mark.parametrize("stream", [False, True])
def test_json_is_held_to_its_schema(server: Served, stream: bool) -> None:
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"enum": ["cat", "dog"]}},
        "required": ["age", "kind"],
        "additionalProperties": False,
    }
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "pet", "schema": schema, "strict": True}}
    for seed in range(3):
        given: dict[str, Any] = {"model": "tiny", "messages": HELLO, "response_format": wanted, "seed": seed}
        if stream:
            chunks = list(server.client().chat.completions.create(**given, max_tokens=300, stream=True))
            text, reason = "".join(c.choices[0].delta.content or "" for c in chunks), chunks[-1].choices[0].finish_reason
        else:
            choice = server.client().chat.completions.create(**given, max_tokens=300).choices[0]
            text, reason = choice.message.content or "", choice.finish_reason
        if reason == "stop":
            pet = json.loads(text)
            assert pet.keys() == {"age", "kind"} and pet["kind"] in ("cat", "dog") and 0 <= pet["age"] <= 99
        else:
            assert text.startswith("{")
    free = server.client().chat.completions.create(
        model="tiny", messages=HELLO, response_format={"type": "json_object"}, max_tokens=5
    )
    assert (free.choices[0].message.content or "").startswith("{")


def test_a_second_turn_is_not_read_again(server: Served) -> None:
    """R055: the usage of the second turn says that the first was remembered."""
    client = server.client()
    first: list[Any] = [{"role": "user", "content": "Tell me about foxes, " * 40}]
    bias = {"10": -100, "256": -100}  # an answer of one line comes back as it was said
    given: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 6, "logit_bias": bias}
    answer = client.chat.completions.create(messages=first, **given)
    assert answer.usage is not None and answer.choices[0].message.content
    second = [*first, {"role": "assistant", "content": answer.choices[0].message.content}, {"role": "user", "content": "More"}]
    again = client.chat.completions.create(messages=second, **given)
    assert again.usage is not None and again.usage.prompt_tokens_details is not None
    cached = again.usage.prompt_tokens_details.cached_tokens or 0
    assert cached >= answer.usage.prompt_tokens


# What is refused, and how


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"messages": []}, "messages is []"),
        ({"temperature": 2.5}, "temperature is 2.5"),
        ({"top_logprobs": 3}, "set logprobs to true"),
        ({"store": True}, "store is not supported here"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop holds 5 texts"),
        ({"stop": ""}, "empty stop text"),
        ({"n": 0}, "n is 0"),
        ({"n": 10**9}, "n is 1000000000"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": "12"}, "max_tokens is '12'"),
        ({"logit_bias": {"x": 1}}, "logit_bias names 'x'"),
        ({"logit_bias": {"300": 1}}, "logit_bias names token 300"),
        ({"stream_options": {"include_usage": True}}, "set stream to true"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "no chat template"),
        ({"response_format": {"type": "json_schema"}}, "json_schema.schema"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role is 'robot'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "image_url"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "5017 tokens and the context 4096"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}},
            "schema cannot be followed",
        ),
    ],
)
def test_mistakes_are_named(server: Served, body: dict[str, Any], says: str) -> None:
    status, content = server.post("/v1/chat/completions", json.dumps({"model": "tiny", "messages": HELLO, **body}).encode())
    assert status == 400 and content.keys() == {"error"}
    assert content["error"].keys() == {"message", "type", "param", "code"}
    assert says in content["error"]["message"] and "\n" not in content["error"]["message"]
    assert server.engine.idle


def test_the_client_gets_its_own_kinds_of_error(server: Served) -> None:
    client = server.client()
    with pytest.raises(openai.BadRequestError, match="embed"):
        client.embeddings.create(model="tiny", input="x")
    with pytest.raises(openai.NotFoundError, match="'other' is not here"):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="x" * 4096)
    assert caught.value.code == "context_length_exceeded"


def test_an_empty_prompt_is_the_end_token_or_refused(server: Served) -> None:
    """R100: and the next request is served."""
    for prompt, status in (("", 200), ([""], 200), (" ", 200), ([], 400), ([[]], 400), ([257], 400), ([-1], 400)):
        body = json.dumps({"model": "tiny", "prompt": prompt, "max_tokens": 2}).encode()
        assert server.post("/v1/completions", body)[0] == status, prompt
    assert server.client().completions.create(model="tiny", prompt="To be", temperature=0).choices[0].text == text_of(
        "To be", 16
    )


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b"null", 400),
        (b'{"model": "tiny", "prompt": "\xff\xfe"}', 400),
        (b'{"model": "tiny", "prompt": "\\ud800"}', 400),
        (b'{"model": "tiny", "prompt": "x", "temperature": NaN}', 400),
        (b'{"model": "tiny", "prompt": "x", "top_p": 1e999}', 400),
        (b'{"model": "tiny", "prompt": "x", "seed": 1' + b"0" * 400 + b"}", 400),
        (b"[" * 100_000, 400),
        (b'{"model": "tiny", "prompt": "' + b"x" * (5 << 20) + b'"}', 413),
    ],
)
def test_bad_bodies(server: Served, body: bytes, status: int) -> None:
    with contextlib.suppress(ConnectionError):  # a body that is too large may be cut off while it is sent
        found, content = server.post("/v1/completions", body)
        assert found == status and content["error"]["message"]
    assert '"ok"' in server.get("/health")


def test_bad_requests_below_json(server: Served) -> None:
    good = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 1}).encode()
    assert server.post("/v1/completions", good)[0] == 200
    assert server.post("/v1/completions", good, content_type="text/plain")[0] == 415
    assert server.post("/v1/completions", good, origin="http://elsewhere.example")[0] == 403
    assert server.post("/v1/completions", good, origin=f"http://127.0.0.1:{server.port}")[0] == 200
    assert server.post("/v1/completions", good, host="elsewhere.example")[0] == 403
    assert server.post("/v1/nothing", good)[0] == 404
    assert b" 405 " in server.raw(b"GET /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    assert b" 431 " in server.raw(
        b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nx: " + b"y" * 40_000 + b"\r\n\r\n"
    )
    assert b" 400 " in server.raw(b"\x16\x03\x01 nonsense\r\n\r\n")
    assert '"ok"' in server.get("/health")


def test_keys() -> None:
    with serving(Settings("tiny", api_key="secret-\N{SNOWMAN}".encode().decode("latin-1"))) as server:
        with pytest.raises(openai.AuthenticationError, match="API key"):
            server.client(api_key="wrong").models.list()
        assert " 401 " in server.get("/metrics").splitlines()[0]
        assert " 200 " in server.get("/health").splitlines()[0] and " 200 " in server.get("/").splitlines()[0]
    with serving(Settings("tiny", api_key="secret")) as server:
        assert server.client(api_key="secret").models.list().data
        assert not any(server.engine.counts.values())


def test_a_full_queue_sends_away_with_a_time_to_return() -> None:
    with serving(Settings("tiny", most_queued=1), most_running=1) as server:
        streams = [
            server.client().completions.create(model="tiny", prompt="x", max_tokens=4000, stream=True, logit_bias={"256": -100})
            for _ in range(2)
        ]
        until = time.monotonic() + 10
        while server.engine.queued < 1 and time.monotonic() < until:
            time.sleep(0.01)
        with pytest.raises(openai.RateLimitError) as caught:
            server.client().completions.create(model="tiny", prompt="x")
        assert caught.value.response.headers["retry-after"] == "1"
        for stream in streams:
            stream.close()
        server.settle()
        assert server.client().completions.create(model="tiny", prompt="x").choices


# Clients that leave


def test_clients_that_go_away_cost_nothing_more(server: Served) -> None:
    """R102: twenty streams and whole replies of 2,000 tokens, left after two chunks or at once."""
    body = {"model": "tiny", "prompt": "x", "max_tokens": 2000, "logit_bias": {"256": -100}}
    before = server.engine.counts["ended_cancelled"]

    def leave(number: int) -> None:
        content = json.dumps({**body, "stream": number % 2 == 0}).encode()
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
            connection.sendall(post_head(content) + content)
            seen = b""
            while number % 2 == 0 and seen.count(b"data:") < 2:
                seen += connection.recv(4096)
            if number % 2:
                time.sleep(0.1)

    with ThreadPoolExecutor(20) as pool:
        list(pool.map(leave, range(20)))
    server.settle()
    assert server.engine.counts["ended_cancelled"] - before == 20
    assert server.engine.held_bytes() == 0 and server.engine.running == 0
    assert server.client().completions.create(model="tiny", prompt="To be", temperature=0).choices[0].text == text_of(
        "To be", 16
    )


def test_a_slow_reader_holds_up_nobody(server: Served) -> None:
    content = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 300, "stream": True, "temperature": 0}).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as slow:
        slow.sendall(post_head(content, "connection: close\r\n") + content)
        assert server.client().completions.create(model="tiny", prompt="To be", temperature=0).choices[0].text
        seen = b"".join(iter(lambda: slow.recv(500), b""))
    assert seen.rstrip(b"0\r\n").endswith(b"data: [DONE]")
    pieces = [json.loads(line) for line in re.findall(rb"data: (\{.*\})", seen)]
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == text_of("x", 300)


def test_a_failing_answer_is_an_error_whole_and_in_pieces(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = server.engine.model.hidden

    def damaged(*arguments: Any) -> Any:
        found, state = hidden(*arguments)
        return found * float("nan"), state

    monkeypatch.setattr(server.engine.model, "hidden", damaged)
    client = server.client()
    with pytest.raises(openai.InternalServerError, match="logits"):
        client.completions.create(model="tiny", prompt="damaged")
    with pytest.raises(openai.APIError, match="logits"):
        list(client.completions.create(model="tiny", prompt="damaged", stream=True))
    monkeypatch.undo()
    assert client.completions.create(model="tiny", prompt="damaged", temperature=0).choices[0].text == text_of("damaged", 16)


def test_running_answers_are_finished_before_the_end() -> None:
    with serving() as server:
        stream = server.client().completions.create(model="tiny", prompt="x", max_tokens=100, temperature=0, stream=True)
        first = next(iter(stream)).choices[0].text
        server.uvicorn.should_exit = True
        assert first + "".join(chunk.choices[0].text for chunk in stream) == text_of("x", 100)


# Numbers


def test_metrics_are_prometheus_text(server: Served) -> None:
    server.client().completions.create(model="tiny", prompt="count me", max_tokens=3)
    server.settle()
    head, _, text = server.get("/metrics").partition("\r\n\r\n")
    assert "text/plain; version=0.0.4" in head
    samples = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            match = re.fullmatch(r'([a-z_]+(?:\{[a-z]+="[^"]+"\})?) ([0-9.e+-]+)', line)
            assert match is not None, line
            samples[match[1]] = float(match[2])
    assert samples["palimpsest_prompt_tokens_total"] >= 8 and samples["palimpsest_running"] == 0
    assert samples['palimpsest_first_token_seconds_bucket{le="+Inf"}'] == samples["palimpsest_first_token_seconds_count"] >= 1
    assert samples['palimpsest_http_requests_total{status="200"}'] >= 1
    assert sum(value for name, value in samples.items() if "state_bytes" in name) == 0


def test_the_memory_of_a_running_stream(server: Served) -> None:
    given: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 2000, "logit_bias": {"256": -100}}
    stream = server.client().chat.completions.create(**given, stream=True)
    chunks = iter(stream)
    name = next(chunks).id
    held: dict[str, Any] = {}
    for _ in range(10):
        next(chunks)
        held = json.loads(server.get(f"/memory/{name}").partition("\r\n\r\n")[2])
    state = make()(torch.zeros(1, held["tokens"], dtype=torch.long)).state
    assert [held[f"{kind}_bytes"] for kind in ("kv", "recurrent", "conv")] == [
        state.num_bytes(kind) for kind in ("kv", "recurrent", "conv")
    ]
    assert held["prompt_tokens"] == len(PLAIN) and held["cached_tokens"] <= held["prompt_tokens"]
    assert [layer["mixer"] for layer in held["layers"]] == list(make().config.mixers)
    for layer in held["layers"]:
        assert layer["kept"] is None if layer["mixer"] == "mla" else 0 < layer["kept"] <= 1
    stream.close()
    server.settle()
    until = time.monotonic() + 5
    while " 204 " not in server.get(f"/memory/{name}").splitlines()[0]:
        assert time.monotonic() < until
