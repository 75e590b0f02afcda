"""Published claims about these models beside what their configurations give.

Each row: the claim, our prediction, the published figure, the gap, a verdict and why. The verdict is "borne out" when the gap
is within the rounding of what was printed. Where our figure is a limit (a gain when nothing but bytes or operations counts)
or the printed one is (an upper bound), "within the bound" says that the smaller one lies below; else "not borne out".
"""

from __future__ import annotations

from typing import Any

from palimpsest.config import ModelConfig
from palimpsest.plan import flops
from palimpsest.plan.counts import parameters
from palimpsest.plan.devices import TABLE
from palimpsest.plan.memory import all_attention, crossover_tokens, kv_bytes_per_token, state_bytes
from palimpsest.plan.times import Cut, pass_seconds
from palimpsest.plan.units import tokens_text

MILLION = 1_048_576
KIMI_LINEAR, ATTNRES, K3 = "arXiv 2510.26692", "arXiv 2603.15031", "arXiv 2607.24653"
ROUNDING = 0.006  # of a figure printed with three digits


def claims() -> list[dict[str, Any]]:
    """All of them, in the order of the papers."""
    return [*_memory(), *_speed(), *_depth(), *_size()]


def _row(claim: str, source: str, predicted: float, published: float, why: str, bound: str = "") -> dict[str, Any]:
    """`bound`: which of the two figures is an upper one, "ours" or "theirs"; empty when they should be equal."""
    gap = predicted / published - 1
    below = gap > 0 if bound == "ours" else gap < 0
    verdict = "borne out" if abs(gap) <= ROUNDING else "within the bound" if bound and below else "not borne out"
    return {
        "claim": claim,
        "source": source,
        "predicted": predicted,
        "published": published,
        "gap": gap,
        "verdict": verdict,
        "why": why,
    }


def _pair(name: str) -> tuple[ModelConfig, ModelConfig]:
    """A hybrid, and the same with MLA in every layer."""
    config = ModelConfig.preset(name)
    other = all_attention(config)
    assert other is not None
    return config, other


def _memory() -> list[dict[str, Any]]:
    rows = []
    printed = (("kimi-linear-48b", KIMI_LINEAR, 0.741, 1820, 1884), ("kimi-k3", K3, 0.742, 5461, 5653))
    for name, source, saving, alone, with_conv in printed:
        config, other = _pair(name)
        ours = 1 - kv_bytes_per_token(config, "bf16") / kv_bytes_per_token(other, "bf16")
        kept, layers = config.mixers.count("mla"), config.num_hidden_layers
        why = f"{kept} of {layers} layers keep latents"
        rows.append(_row(f"{name}: share of the cache saved by the hybrid", source, ours, saving, why))
        rows.append(
            _row(
                f"{name}: share of the cache saved, as the paper rounds it",
                source,
                ours,
                0.75,
                "three layers of four would be 75 %; the last layer keeps latents too",
            )
        )
        for conv, value in ((False, alone), (True, with_conv)):
            what = "with the convolution" if conv else "recurrent state alone"
            tokens = crossover_tokens(config, conv=conv)
            assert tokens is not None
            claim = f"{name}: tokens above which the hybrid holds less, {what}"
            rows.append(_row(claim, source, tokens, value, "float32 state against bf16 latents of the layers it replaces"))
    return rows


def _decode_gain(context: int, batch: tuple[int, int]) -> float:
    """Seconds a token of the all-MLA form over those of Kimi Linear, each at its own batch, on one H200."""
    config, other = _pair("kimi-linear-48b")
    cut, each = Cut(1, 1), []
    for model, size in zip((other, config), batch, strict=True):
        each.append(pass_seconds(model, "bf16", TABLE["h200"], cut, size, 1, context - 1, 1)["total"] / size)
    return each[0] / each[1]


def memory_bound_gain(context: int) -> float:
    """What the cache alone can give when both fill the same memory: bytes of a sequence, all-MLA over hybrid."""
    config, other = _pair("kimi-linear-48b")
    return state_bytes(other, context, 1, "bf16")["total"] / state_bytes(config, context, 1, "bf16")["total"]


def _speed() -> list[dict[str, Any]]:
    config, other = _pair("kimi-linear-48b")
    bound = memory_bound_gain(MILLION)
    why = "two printed times divided; 6.24 is printed as 6.3"
    rows = [_row("kimi-linear-48b: 11.48 ms over 1.84 ms a token at 1M", KIMI_LINEAR, 11.48 / 1.84, 6.3, why)]
    why = "a limit: with equal memory full of caches the gain is the ratio of their bytes; the print needs another cause"
    rows.append(
        _row("kimi-linear-48b: gain a token at 1M, each at its largest batch", KIMI_LINEAR, bound, 11.48 / 1.84, why, "ours")
    )
    for context, printed in ((MILLION // 2, 5.7), (MILLION // 4, 4.8)):
        claim = f"kimi-linear-48b: the same at {tokens_text(context)}"
        rows.append(_row(claim, KIMI_LINEAR, memory_bound_gain(context), printed, "as above", "ours"))
    why = "one sequence reads the active weights as well as its cache; ours is a limit, bytes alone at equal bandwidth"
    for context, printed in ((MILLION, 2.2), (MILLION // 2, 1.8)):
        claim = f"kimi-linear-48b: gain a token at {tokens_text(context)}, batch 1"
        rows.append(_row(claim, KIMI_LINEAR, _decode_gain(context, (1, 1)), printed, why, "ours"))
    for context, printed in ((MILLION, 2.9), (MILLION // 2, 2.3)):
        work = [sum(_prefill(model, context)) for model in (other, config)]
        why = "ours is a limit: operations alone, without masked scores, both models at one efficiency"
        claim = f"kimi-linear-48b: gain of prefill at {tokens_text(context)}"
        rows.append(_row(claim, KIMI_LINEAR, work[0] / work[1], printed, why, "ours"))
    return rows


def _prefill(config: ModelConfig, tokens: int) -> tuple[float, float]:
    """(scores, everything else) in operations."""
    found = flops.forward(config, 1, tokens, 0, 1)
    keys = config.qk_nope_head_dim + config.qk_rope_head_dim
    scores = found.pop("attention") * (tokens + 1) / 2 / tokens * (keys + config.v_head_dim) / (2 * keys)  # values not padded
    return scores, sum(found.values())


def depth_traffic(blocks: int, size: int) -> dict[str, float]:
    """Vectors of width d read and written by a sublayer's residual, on average over `blocks` blocks of `size` sublayers.

    Sum: read stream and output, write stream. Attention residuals in two phases: each completed source is read once a block
    for all its queries, the partial result is written and read, the running sum is read and written with the output.
    """
    completed = (blocks + 1) / 2  # sealed blocks, the embedding among them, averaged over the blocks
    return {
        "sum": 3.0,
        "block": completed / size + 5,
        "full": (blocks - 1) / 2 + (size - 1) / 2 + 5,  # every earlier output once a block, those of its own block one by one
    }


def _depth() -> list[dict[str, Any]]:
    ours, rows = depth_traffic(8, 16), []
    rows.append(_row("residual traffic of a sublayer, sum (in d)", ATTNRES, ours["sum"], 3.0, "two reads, one write"))
    why = "the print takes all 8 blocks as complete (8/16 + 5); averaged over the depth fewer are"
    rows.append(_row("residual traffic, block attention (in d)", ATTNRES, ours["block"], 5.5, why, "theirs"))
    why = "the print is an upper bound (16 + 8 sources); averaged over the depth a sublayer reads fewer"
    rows.append(_row("residual traffic, full attention (in d)", ATTNRES, ours["full"], 24.0, why, "theirs"))
    return rows


def _size() -> list[dict[str, Any]]:
    k3, gpt2 = (parameters(ModelConfig.preset(name)) for name in ("kimi-k3", "gpt2-124m"))
    why = "2.8e12 / 1.24e8, both rounded first; the exact counts give 22,336"
    rows = [_row("Kimi K3 over GPT-2, in parameters", "an article's headline", k3["total"] / gpt2["total"], 22_580, why)]
    rows.append(_row("the same from rounded sizes", "an article's headline", 2.8e12 / 1.24e8, 22_580, "2.8 T over 124 M"))
    rows.append(_row("kimi-k3: active parameters (10^9)", K3, k3["active"] / 1e9, 104.2, "no token table, the head once"))
    return rows
