"""What serving reaches on this machine: tokens per second by the number of requests, and what a remembered prompt saves."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from palimpsest.config import ModelConfig, SamplingConfig
from palimpsest.engine import Engine, Piece, Request
from palimpsest.model import Model
from palimpsest.tokenizer import Tokenizer

PROMPT_TOKENS = 64
DRAWN_TOKENS = 64
REUSED_TOKENS = 2048
REPEATS = 3
CONCURRENT = (1, 2, 4, 8, 16)


def measure(model: Model, tokenizer: Tokenizer, concurrent: Sequence[int], tell: Callable[[str], None]) -> dict[str, Any]:
    """Throughput at each number of requests at a time, and the time to the first token of a prompt, cold and remembered."""
    rows = []
    for count in concurrent:
        engine = Engine(model, tokenizer)
        rates = [throughput(engine, count, repeat) for repeat in range(REPEATS + 1)][1:]
        rows.append(
            {"concurrent": count, "tokens_per_s": statistics.median(rates), "lowest": min(rates), "highest": max(rates)}
        )
        tell(f"{count:>4} at a time: {rows[-1]['tokens_per_s']:.1f} tokens/s")
    reuse = first_tokens(model, tokenizer)
    tell(f"first token of a prompt of {REUSED_TOKENS}: {reuse['cold_s']:.3f} s, remembered {reuse['remembered_s']:.4f} s")
    return {
        "prompt_tokens": PROMPT_TOKENS,
        "drawn_tokens": DRAWN_TOKENS,
        "repeats": REPEATS,
        "throughput": rows,
        "gain": rows[-1]["tokens_per_s"] / rows[0]["tokens_per_s"],
        "first_token": reuse,
    }


def throughput(engine: Engine, count: int, seed: int) -> float:
    """Drawn tokens per second of `count` requests that come at once, reading their prompts included."""
    requests = [request(engine.model, engine.tokenizer, PROMPT_TOKENS, DRAWN_TOKENS, seed * 1000 + n) for n in range(count)]
    start = time.perf_counter()
    answers = engine.run(requests)
    seconds = time.perf_counter() - start
    return sum(len(answer.row.token_ids) for (answer,) in answers) / seconds


def first_tokens(model: Model, tokenizer: Tokenizer) -> dict[str, Any]:
    """Seconds to the first token of a long prompt that nobody has sent, and of one whose beginning was: all but 16 tokens."""
    engine = Engine(model, tokenizer, cache_bytes=1 << 31)
    times: dict[str, list[float]] = {"cold_s": [], "remembered_s": []}
    cached = 0
    for repeat in range(REPEATS):
        first = request(model, tokenizer, REUSED_TOKENS, 1, repeat)
        again = Request(first.prompt + request(model, tokenizer, 16, 1, repeat + 100).prompt, first.sampling)
        for name, each in (("cold_s", first), ("remembered_s", again)):
            start, heard = time.perf_counter(), []

            def deliver(piece: Piece, heard: list[float] = heard) -> None:
                heard.append(time.perf_counter())

            ticket = engine.submit(each, deliver)
            while engine.step():
                pass
            times[name].append(heard[0] - start)
        cached = ticket.cached_tokens
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "prompt_tokens": REUSED_TOKENS,
        "cached_tokens": cached,
        **medians,
        "share": medians["remembered_s"] / medians["cold_s"],
        "prefix_bytes": engine.prefixes.num_bytes,
        "prefix_nodes": len(engine.prefixes),
    }


def request(model: Model, tokenizer: Tokenizer, tokens: int, drawn: int, seed: int) -> Request:
    """Random tokens; an end token is never drawn, so that every answer has its full length."""
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(min(256, tokenizer.vocab_size), (tokens,), generator=generator).tolist()
    bias = dict.fromkeys(tokenizer.end_ids, -1e9)
    return Request(tuple(prompt), SamplingConfig(max_new_tokens=drawn, temperature=0.0), logit_bias=bias)


def preset(name: str, **fields: Any) -> tuple[Model, Tokenizer]:
    """A preset with random weights and the byte tokenizer: speed does not ask what the weights say."""
    torch.manual_seed(3)
    return Model(ModelConfig.preset(name, **fields)).eval(), Tokenizer.bytes()
