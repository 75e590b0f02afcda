"""Floating-point operations of the matrix products in one pass, one multiply-add counting two.

    linear map         2 in out a token                      routed experts  6 k I L a token
    attention          2 H S (d + d) a token over S rows; masked scores count, as in FlopCounterMode
    MLA, expanded      2 R H (n + V) a row, then attention with keys and (padded) values of n + r channels
    MLA, absorbed      2 H R (n + V) a token, then attention over R + r channels (decode)
    recurrence, chunk  C (4 K + 4 V) + C (C + tile)/C K ... per token and head: see `_chunk`
    recurrence, token  4 K V (2 K V without correction)

`FlopCounterMode` counts the same where it has a formula: mm, addmm, bmm, baddbmm. It has none for the fused attention kernel
of the CPU, for grouped products of experts and for baddbmm in place (chunks), which are counted here; and none for triangular
solves and the matrix-vector products of attention residuals, which are not, no more than elementwise work. It sees the
operations inside custom autograd functions, forward and backward, but nothing of compiled CPU code: these are the counts of
torch's operations (`backend="chunked"`), which the compiled recurrence replaces with about 4 K V a token.
"""

from __future__ import annotations

from palimpsest.config import LINEAR_MIXERS, ModelConfig
from palimpsest.plan.counts import Weight, weights
from palimpsest.plan.memory import state_columns

Flops = dict[str, int]  # by kind: linear, experts, attention, recurrence, head


def forward(
    config: ModelConfig,
    batch: int,
    tokens: int,
    past: int = 0,
    logits: int | None = None,
    chunk: int = 64,
    tile: int | None = None,
) -> Flops:
    """A pass over `tokens` new tokens behind `past` held ones, for each of `batch` sequences.

    `logits`: positions of each sequence that get logits (None: all). `tile`: rows of a chunk over which KDA's decay spans at
    most 60 nats; None is the whole chunk, the upper bound: strong decay needs fewer operations, not more.
    """
    heads = batch * (tokens if logits is None else logits)
    found = {"linear": 0, "experts": 0, "attention": 0, "recurrence": 0, "head": 0}
    for row in weights(config):
        if row.is_expert:
            found["experts"] += 2 * batch * tokens * row.numel // config.num_experts * config.num_experts_per_token
        elif is_linear(row):
            found["linear"] += 2 * batch * tokens * row.numel * repeats(config, row)
    for mixer in config.mixers:
        if mixer in LINEAR_MIXERS:
            found["recurrence"] += batch * recurrence(config, mixer, tokens, chunk, tile)
        else:
            extra, scores = attention(config, mixer, tokens, past)
            found["linear"] += batch * extra
            found["attention"] += batch * scores
    found["head"] = 2 * heads * config.hidden_size * config.vocab_size
    return found


def is_linear(row: Weight) -> bool:
    """A linear map that every token passes. MLA's kv_b_proj is counted with its attention, the head by itself."""
    if row.layer is None or len(row.shape) != 2 or "conv1d" in row.name or "_residual." in row.name:
        return False
    return not row.name.endswith("kv_b_proj.weight")


def repeats(config: ModelConfig, row: Weight) -> int:
    """How often a token passes a map: a learned feature map works on every key head."""
    return config.linear_num_key_heads if "feature_map" in row.name else 1


def attention(config: ModelConfig, mixer: str, tokens: int, past: int) -> tuple[int, int]:
    """(products that form or absorb keys and values, scores and mixing) of one sequence in one layer."""
    size, heads = past + tokens, config.num_attention_heads
    if mixer == "attention":
        return 0, 4 * heads * tokens * size * config.head_dim
    rank, nope, rope, value = config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    if is_absorbed(config, tokens, past):
        return 2 * tokens * heads * rank * (nope + value), 4 * heads * tokens * size * (rank + rope)
    channels = nope + rope + max(value, nope + rope)  # values are padded to the keys' width, never cut
    return 2 * size * rank * heads * (nope + value), 2 * heads * tokens * size * channels


def is_absorbed(config: ModelConfig, tokens: int, past: int) -> bool:
    """Whether MLA scores in the latent space, as `mixers.mla` decides."""
    rank, per_head = config.kv_lora_rank, config.qk_nope_head_dim + config.v_head_dim
    extra = 2 * rank - per_head
    return past > 0 and (extra <= 0 or tokens < rank * per_head / extra)


def recurrence(config: ModelConfig, mixer: str, tokens: int, chunk: int = 64, tile: int | None = None) -> int:
    """Of one sequence in one layer."""
    heads, keys, values, corrects = _sizes(config, mixer)
    if tokens <= 2:
        return heads * tokens * (4 if corrects else 2) * keys * values
    size = _chunk_size(tokens, chunk)
    scores = _scores(config, mixer, size, keys, tile) * (2 if corrects else 1)
    state = (6 if corrects else 4) * size * keys * values
    inside = 4 * size * size * values + 2 * size * size * keys if corrects else 2 * size * size * values
    return heads * -(-tokens // size) * (scores + state + inside)


def recurrence_backward(config: ModelConfig, mixer: str, tokens: int, chunk: int = 64, tile: int | None = None) -> int:
    """Of one sequence in one layer, for more than two tokens; what is recomputed included."""
    heads, keys, values, corrects = _sizes(config, mixer)
    size = _chunk_size(tokens, chunk)
    sets = 2 if corrects else 1
    products = 3 if mixer == "gated_deltanet" else 2  # a rate per head needs the scores once more
    scores = products * sets * _scores(config, mixer, size, keys, tile)
    state = (14 if corrects else 8) * size * keys * values
    inside = 2 * size * size * (4 * values + keys) if corrects else 4 * size * size * values
    return heads * -(-tokens // size) * (scores + state + inside)


def _sizes(config: ModelConfig, mixer: str) -> tuple[int, int, int, bool]:
    """HV, K, V (with the normaliser's column) and whether a write corrects."""
    additive = mixer == "linear_attention"
    return config.linear_num_value_heads, config.linear_key_head_dim, state_columns(config, mixer), not additive


def _chunk_size(tokens: int, chunk: int) -> int:
    return 1 << (min(chunk, tokens) - 1).bit_length()


def _scores(config: ModelConfig, mixer: str, size: int, keys: int, tile: int | None) -> int:
    """One C x C matrix of scores; with a rate per channel in tiles, of which the blocks above the diagonal are left out."""
    if mixer != "kda" or tile is None or tile >= size:
        return 2 * size * size * keys
    return keys * size * (size + tile if tile > 1 else size - 1)


def training(
    config: ModelConfig, batch: int, tokens: int, chunk: int = 64, tile: int | None = None, recompute: bool = False
) -> Flops:
    """Forward and backward of one micro-batch, optimiser apart. Both gradients of a linear map cost a forward each; the head's
    are taken with the loss, for all positions but the last."""
    once = forward(config, batch, tokens, 0, 0, chunk, tile)
    found = {kind: 3 * value for kind, value in once.items()}
    found["recurrence"] = once["recurrence"]
    for mixer in config.mixers:
        if mixer in LINEAR_MIXERS:
            found["recurrence"] += batch * recurrence_backward(config, mixer, tokens, chunk, tile)
    found["head"] = 6 * batch * (tokens - 1) * config.hidden_size * config.vocab_size
    if recompute:
        for kind, value in again(config, batch, tokens, once).items():
            found[kind] += value
    return found


def again(config: ModelConfig, batch: int, tokens: int, once: Flops) -> Flops:
    """What the backward pass repeats with `recompute`: all sublayers, but for the map that ends one, whose inputs suffice."""
    last = 0
    for row in weights(config):
        ends = row.name.endswith(("mixer.o_proj.weight", "mlp.down_proj.weight"))
        ends = ends or row.name.endswith("shared_experts.down_proj.weight") and not config.shared_expert_gate
        last += 2 * batch * tokens * row.numel if ends else 0
    return {**once, "linear": once["linear"] - last, "head": 0}
