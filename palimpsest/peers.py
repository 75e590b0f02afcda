"""Our speed beside that of others, measured in one process: every figure is a ratio of medians.

A peer that is not installed is left out, and said to be. What a figure is worth depends on the machine being quiet; the spread
of every median is written beside it.
"""

from __future__ import annotations

import importlib.util
import itertools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from palimpsest import llama_cpp, ops
from palimpsest.config import ModelConfig
from palimpsest.linear import pack
from palimpsest.model import Model
from palimpsest.progress import keep_memory
from palimpsest.published import save
from palimpsest.tokenizer import Tokenizer

Row = dict[str, Any]
Run = Callable[[], Any]


def medians(runs: dict[str, Run], repeats: int = 7) -> dict[str, dict[str, float]]:
    """Milliseconds of each run: median, least and most of `repeats` in a row, after one that is not counted.

    Not in turns: a run that takes and returns gigabytes leaves the next one without warm pages.
    """
    return {name: turns({name: run}, repeats)[name] for name, run in runs.items()}


def turns(runs: dict[str, Run], repeats: int = 7) -> dict[str, dict[str, float]]:
    """The same with one run after the other, round by round: what slows the machine for a while slows all of them."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats + 1):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - began) * 1e3)
    counted = {name: sorted(each[1:]) for name, each in times.items()}
    return {name: {"ms": each[len(each) // 2], "least": each[0], "most": each[-1]} for name, each in counted.items()}


def cpu(peers: bool, say: Callable[[str], None]) -> list[Row]:
    """Every table of the CPU benchmark. With `peers`, transformers runs beside us where it is installed."""
    has_transformers = peers and importlib.util.find_spec("transformers") is not None
    keep_memory()
    rows: list[Row] = []
    for measure in (forward, backward, step, packed, long_sequence, decode, training):
        for row in measure(has_transformers):
            rows.append(row)
            say(line(row))
    return rows


def line(row: Row) -> str:
    """One row for a terminal."""
    times = "  ".join(f"{name} {t['ms']:.4g} ms" for name, t in row["times"].items())
    figures = "  ".join(f"{name} {value:.3g}" for name, value in row.get("figures", {}).items())
    return f"{row['work']:<44} {times}{'  | ' + figures if figures else ''}"


def inputs(tokens: int, dim: int, batch: int = 1, heads: int = 8) -> dict[str, Tensor]:
    """Unit q and k, mild decay, one row per sequence."""
    draw = torch.Generator().manual_seed(0)
    q, k, v, z = (torch.randn(batch, tokens, heads, dim, generator=draw) for _ in range(4))
    beta = torch.rand(batch, tokens, heads, generator=draw)
    return {"q": F.normalize(q, dim=-1), "k": F.normalize(k, dim=-1), "v": v, "g": -0.1 * z.sigmoid(), "beta": beta}


def skeleton(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, chunk: int = 64) -> Tensor:
    """The products and the triangular solve of the chunked delta rule without decay: what chunks cost at least in torch."""
    tokens, heads, dim = q.shape[1:]
    q, k, v = (x.view(tokens // chunk, chunk, heads, dim).transpose(1, 2) for x in (q, k, v))
    strength = beta.view(tokens // chunk, chunk, heads, 1).transpose(1, 2)
    both = torch.cat([k * strength, v * strength], -1)
    solved = torch.linalg.solve_triangular((k @ k.mT) * strength, both, upper=False, unitriangular=True)
    probes, written = solved.split(dim, -1)
    reads, state, out = (q @ k.mT).tril(), q.new_zeros(heads, dim, dim), []
    for i in range(len(q)):
        x = written[i] - probes[i] @ state
        out.append(q[i] @ state + reads[i] @ x)
        state = state + k[i].mT @ x
    return torch.stack(out)


@torch.no_grad()
def forward(has_transformers: bool) -> list[Row]:
    """KDA and its family forward, against the skeleton, softmax attention and transformers."""
    rows = []
    for tokens in (2048, 4096, 8192):
        for dim in (64, 128):
            x = inputs(tokens, dim)
            q, k, v, g, beta = x.values()
            heads_first = [y.transpose(1, 2) for y in (q, k, v)]
            scalar = g[..., 0].contiguous()
            runs: dict[str, Run] = {
                "kda": lambda x=x: _kda(x),
                "gated_delta_rule": lambda a=(q, k, v, scalar, beta): ops.gated_delta_rule(*a),
                "delta_rule": lambda a=(q, k, v, beta): ops.delta_rule(*a),
                "linear_attention": lambda a=(q, k, v): ops.linear_attention(*a),
                "kda, chunked": lambda x=x: _kda(x, backend="chunked"),
                "skeleton": lambda a=(q, k, v, beta): skeleton(*a),
                "softmax": lambda a=heads_first: F.scaled_dot_product_attention(a[0], a[1], a[2], is_causal=True),
            }
            if has_transformers:
                runs["transformers gdn"] = lambda a=(q, k, v, scalar, beta): _their_gdn(*a)
                if tokens == 2048:
                    runs["transformers kda"] = lambda x=x: _their_kda(x)
            times = medians(runs)
            ours = times["kda"]["ms"]
            figures = {f"{name} / kda": times[name]["ms"] / ours for name in runs if name != "kda"}
            rows.append({"work": f"forward, T {tokens}, D {dim}, H 8", "times": times, "figures": figures})
    return rows


def backward(has_transformers: bool) -> list[Row]:
    """KDA forward and backward, against transformers, and over lengths."""
    rows = []
    for tokens, dim in ((2048, 64), (2048, 128), (8192, 128), (65536, 64)):
        leaves = {name: y.requires_grad_() for name, y in inputs(tokens, dim).items()}
        runs: dict[str, Run] = {"kda": lambda x=leaves: _both_ways(_kda(x)[0], x)}
        if tokens < 10_000:
            runs["kda, chunked"] = lambda x=leaves: _both_ways(_kda(x, backend="chunked")[0], x)
        if has_transformers and tokens == 2048:
            runs["transformers kda"] = lambda x=leaves: _both_ways(_their_kda(x)[0], x)
        times = medians(runs)
        figures = {f"{name} / kda": times[name]["ms"] / times["kda"]["ms"] for name in runs if name != "kda"}
        figures["us per token"] = times["kda"]["ms"] * 1e3 / tokens
        rows.append({"work": f"forward and backward, T {tokens}, D {dim}, H 8", "times": times, "figures": figures})
    return rows


@torch.inference_mode()
def step(has_transformers: bool) -> list[Row]:
    """One token: time, and the share of the copy bandwidth at the same size that reading and writing the state reaches."""
    rows = []
    for batch, heads, dim in ((1, 8, 64), (1, 8, 128), (1, 32, 128), (8, 8, 64), (8, 32, 128), (32, 8, 64), (32, 32, 128)):
        x = inputs(1, dim, batch, heads)
        state = torch.randn(batch, heads, dim, dim)
        twin = state.clone()
        many = max(1, 2000 // (batch * heads * dim // 64))

        def steps(x: dict[str, Tensor] = x, state: Tensor = state, many: int = many) -> None:
            for _ in range(many):
                _kda(x, state=state)

        def copies(state: Tensor = state, twin: Tensor = twin, many: int = many) -> None:
            for _ in range(many):
                twin.copy_(state)

        times = {name: {key: ms / many for key, ms in t.items()} for name, t in medians({"kda": steps, "copy": copies}).items()}
        share = times["copy"]["ms"] / times["kda"]["ms"]
        figures = {"us": times["kda"]["ms"] * 1e3, "share of copy bandwidth": share}
        rows.append({"work": f"one token, B {batch}, H {heads}, D {dim}", "times": times, "figures": figures})
    return rows


@torch.inference_mode()
def packed(has_transformers: bool) -> list[Row]:
    """One token through an expert of Kimi K3's size, in four bits and in bfloat16, over more experts than caches hold."""
    experts, shapes, turn = 40, ((3072, 3584), (3072, 3584), (3584, 3072)), itertools.count()
    small = [torch.randint(256, (experts, rows, columns // 2), dtype=torch.uint8) for rows, columns in shapes]
    scales = [torch.randint(110, 130, (experts, rows, columns // 32), dtype=torch.uint8) for rows, columns in shapes]
    large = [torch.randint(1000, (experts, *shape), dtype=torch.int16).view(torch.bfloat16) for shape in shapes]
    xs = [torch.randn(1, columns) for _, columns in shapes]

    def four_bits() -> None:
        e = next(turn) % experts
        for x, codes, scale in zip(xs, small, scales, strict=True):
            ops.mxfp4_matmul(x, codes[e], scale[e])

    def sixteen_bits() -> None:
        e = next(turn) % experts
        for x, weight in zip(xs, large, strict=True):
            F.linear(x.bfloat16(), weight[e])

    times = medians({"mxfp4": four_bits, "bfloat16": sixteen_bits}, 41)
    figures = {"bfloat16 / mxfp4": times["bfloat16"]["ms"] / times["mxfp4"]["ms"]}
    return [{"work": "expert 3 x 3072 x 3584, one token", "times": times, "figures": figures}]


@torch.inference_mode()
def long_sequence(has_transformers: bool) -> list[Row]:
    """A million tokens through KDA in pieces: time of the first and of the last ones, and the size of the state."""
    x, state, seconds = inputs(8192, 64, heads=2), None, []
    for _ in range(128):
        began = time.perf_counter()
        _, state = _kda(x, state=state)
        seconds.append(time.perf_counter() - began)
    assert state is not None
    early, late = (sorted(part)[len(part) // 2] * 1e3 for part in (seconds[1:33], seconds[-32:]))
    times = {name: {"ms": ms, "least": ms, "most": ms} for name, ms in (("first pieces", early), ("last pieces", late))}
    figures = {"tokens": 128 * 8192.0, "late / early": late / early, "state bytes": float(state.numel() * 4)}
    return [{"work": "1,048,576 tokens in pieces of 8192, H 2, D 64", "times": times, "figures": figures}]


PROMPT, STEPS = 512, 32  # tokens
LONG = {"gpt2-124m": 512, "kimi-linear-65m": 2048}  # tokens of the prefill that is timed


@torch.inference_mode()
def decode(has_transformers: bool) -> list[Row]:
    """Whole models in three number formats: 32 tokens one by one behind a prompt of 512. Prefill in float32 only."""
    rows = []
    for preset, dtype in itertools.product(("gpt2-124m", "kimi-linear-65m"), ("f32", "bf16", "q8_0")):
        torch.manual_seed(0)
        model = Model(ModelConfig.preset(preset)).eval()
        long = torch.randint(model.config.vocab_size, (1, LONG[preset]))
        ids = long[:, :PROMPT]
        theirs: dict[str, Run] = {}
        if has_transformers and llama_cpp.is_installed():
            theirs = _their_llama(model, dtype, long)
        if dtype == "q8_0":
            pack(model)
        elif dtype == "bf16":
            model.to(torch.bfloat16)
        state = model(ids).state
        runs: dict[str, Run] = {}
        steps: dict[str, Run] = {"decode": lambda m=model, i=ids, s=state: _our_decode(m, i, s)}
        if dtype == "f32":
            runs["prefill"] = lambda m=model, i=long: m.logits(m.hidden(i)[0][:, -1:])
        if has_transformers and dtype == "f32":
            other = _their_model(model)
            cache = other(ids, use_cache=True)
            steps["transformers decode"] = lambda m=other, i=ids, c=cache: _their_decode(m, i, c)
            runs["transformers prefill"] = lambda m=other, i=long: m(i, use_cache=True, logits_to_keep=1)
        if "llama.cpp decode" in theirs:
            steps["llama.cpp decode"] = theirs.pop("llama.cpp decode")
        times = {**turns(steps), **medians({**runs, **theirs})}
        figures = {"decode tokens/s": STEPS * 1e3 / times["decode"]["ms"]}
        if "prefill" in times:
            figures["prefill tokens/s"] = LONG[preset] * 1e3 / times["prefill"]["ms"]
        for name in times:
            other_name, _, part = name.rpartition(" ")
            if other_name and part in times:
                figures[f"{other_name} / ours, {part}"] = times[name]["ms"] / times[part]["ms"]
        rows.append({"work": f"{preset}, {dtype}", "times": times, "figures": figures})
    return rows


def _our_decode(model: Model, ids: Tensor, state: Any) -> None:
    for t in range(STEPS):
        state = model(ids[:, t : t + 1], state).state


def _their_llama(model: Model, dtype: str, ids: Tensor) -> dict[str, Run]:
    """llama.cpp on a file that `pal.save` writes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        save(model, path, tokenizer=Tokenizer.bytes(), dtype=dtype)
        llama = llama_cpp.Llama(path)
    threads, prompt = torch.get_num_threads(), ids[0].tolist()

    def prefill(length: int) -> Any:
        context = llama.context(threads, max(1024, length))
        llama.step(context, prompt[:length], 0, every=False)
        return context

    # Its memory does not go back: eight runs follow one another, so they begin earlier to have the same length on average.
    start = PROMPT - 4 * STEPS
    context, places = prefill(start), itertools.count(start)

    def draw() -> None:
        for t in range(STEPS):
            llama.step(context, prompt[t : t + 1], next(places))

    runs: dict[str, Run] = {"llama.cpp decode": draw}
    if dtype == "f32":
        runs["llama.cpp prefill"] = lambda: llama.lib.llama_free(prefill(len(prompt)))
    return runs


def training(has_transformers: bool) -> list[Row]:
    """A step of a 10M-parameter hybrid of KDA and MLA at 1024 tokens."""
    torch.manual_seed(0)
    fields: dict[str, Any] = {"hidden_size": 256, "num_hidden_layers": 8, "num_experts": 4, "moe_intermediate_size": 128}
    fields |= {"linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
    fields |= {"linear_output_gate_rank": 64}
    model = Model(ModelConfig.preset("kimi-linear-tiny", vocab_size=1024, **fields)).train()
    ids = torch.randint(1024, (1, 1024))
    runs: dict[str, Run] = {"ours": lambda: _update(model, model.loss(ids, ids))}
    if has_transformers:
        theirs = _their_model(model).train()
        runs["transformers"] = lambda: _update(theirs, theirs(ids, labels=ids).loss)
    times = medians(runs)
    figures = {"parameters": float(model.num_parameters()), "tokens/s": 1024e3 / times["ours"]["ms"]}
    if has_transformers:
        figures["transformers / ours"] = times["transformers"]["ms"] / times["ours"]["ms"]
    return [{"work": "training pass, KDA and MLA, T 1024", "times": times, "figures": figures}]


def _kda(x: dict[str, Tensor], **options: Any) -> tuple[Tensor, Tensor]:
    return ops.kda(x["q"], x["k"], x["v"], x["g"], x["beta"], **options)


def _both_ways(o: Tensor, leaves: dict[str, Tensor]) -> None:
    torch.autograd.grad(o.sum(), list(leaves.values()))


def _update(model: Any, loss: Tensor) -> None:
    model.zero_grad()
    loss.backward()


def _their_kda(x: dict[str, Tensor]) -> Any:
    from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention

    return chunk_kimi_delta_attention(x["q"], x["k"], x["v"], g=x["g"], beta=x["beta"], output_final_state=True)


def _their_gdn(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Any:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    return torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta, output_final_state=True)


def _their_decode(model: Any, ids: Tensor, start: Any) -> None:
    import copy

    out = copy.copy(start)
    cache = copy.deepcopy(start.cache)
    for t in range(32):
        out = model(ids[:, t : t + 1], cache=cache, use_cache=True)
        cache = out.cache


def _their_model(model: Model) -> Any:
    """transformers' model of the same configuration, with its own random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from palimpsest.convert import Layout

    document = Layout.of(model.config).document("float32")
    kind = document.pop("model_type")
    config = AutoConfig.for_model(kind, **{key: value for key, value in document.items() if key != "architectures"})
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
