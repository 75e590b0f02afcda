"""What serving reaches on this machine: tokens per second by the number of requests, beside llama.cpp, and what a remembered
prompt saves."""

from __future__ import annotations

import copy
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from palimpsest import llama_cpp
from palimpsest.config import InputError, ModelConfig, SamplingConfig
from palimpsest.engine import Engine, Piece, Request
from palimpsest.linear import pack
from palimpsest.model import Model
from palimpsest.published import save
from palimpsest.tokenizer import Tokenizer

PROMPT_TOKENS = 64
DRAWN_TOKENS = 64
REUSED_TOKENS = 2048
REPEATS = 3
CONCURRENT = (1, 2, 4, 8, 16)
BESIDE = (1, 4, 16)  # requests at a time, beside llama.cpp
WEIGHTS = ("f32", "q8_0")


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


def beside_llama_cpp(model: Model, tokenizer: Tokenizer, tell: Callable[[str], None]) -> dict[str, Any]:
    """Our throughput beside that of llama.cpp's parallel decoding on the same weights, for each type of weights: the same
    prompts at once, the same number of tokens drawn, on as many threads. What cannot be compared says why in `skipped`."""
    if not llama_cpp.is_installed():
        reason = f"the packages {' and '.join(llama_cpp.PACKAGES)} are not installed here"
        tell(f"llama.cpp left out: {reason}")
        return {"skipped": reason}
    found: dict[str, Any] = {}
    for dtype in WEIGHTS:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            try:
                save(model, path, tokenizer, dtype)
            except InputError as error:
                tell(f"llama.cpp left out: {error}")
                return {"skipped": str(error)}
            other = llama_cpp.Llama(path)
        ours = copy.deepcopy(model)
        if dtype == "q8_0":
            pack(ours)
        found[dtype] = [_beside(Engine(ours, tokenizer), other, count, dtype, tell) for count in BESIDE]
    return found


def _beside(engine: Engine, other: llama_cpp.Llama, count: int, dtype: str, tell: Callable[[str], None]) -> dict[str, Any]:
    ours = [throughput(engine, count, repeat) for repeat in range(REPEATS + 1)]
    theirs = []
    for repeat in range(REPEATS + 1):
        prompts = [each.prompt for each in _requests(engine, count, repeat)]
        drawn, seconds = other.together(prompts, DRAWN_TOKENS, torch.get_num_threads())
        theirs.append(sum(map(len, drawn)) / seconds)
    row: dict[str, Any] = {"concurrent": count}
    for name, rates in (("tokens_per_s", ours[1:]), ("llama_cpp_tokens_per_s", theirs[1:])):
        row[name] = {"median": statistics.median(rates), "lowest": min(rates), "highest": max(rates)}
    row["ratio"] = row["tokens_per_s"]["median"] / row["llama_cpp_tokens_per_s"]["median"]
    reached = row["llama_cpp_tokens_per_s"]["median"]
    tell(f"{count:>4} at a time, {dtype}: {row['ratio']:.2f} of llama.cpp's {reached:.1f} tokens/s")
    return row


def throughput(engine: Engine, count: int, seed: int) -> float:
    """Drawn tokens per second of `count` requests that come at once, reading their prompts included."""
    requests = _requests(engine, count, seed)
    start = time.perf_counter()
    answers = engine.run(requests)
    seconds = time.perf_counter() - start
    return sum(len(answer.row.token_ids) for (answer,) in answers) / seconds


def _requests(engine: Engine, count: int, seed: int) -> list[Request]:
    return [request(engine.model, engine.tokenizer, PROMPT_TOKENS, DRAWN_TOKENS, seed * 1000 + n) for n in range(count)]


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
