"""Parameters and checkpoint bytes of a configuration, from its sizes alone.

Letters: D width, H heads, K and V channels per head, HV value heads, W taps, R latent rank, n and r channels of an MLA key
(own and shared), E experts, k chosen, I expert width, L latent width of experts. For instance

    KDA     D(2HK + HV V) + W(2HK + HV V) + DV + V HV K + HV + HV K + D HV + gate + V + HV V D
    MLA     queries + D(R + r) + R + R H(n + V) + gate + HV D
    experts 3 E I L, of which k/E act on a token

Every tensor has the name and shape that the built model gives it; a test compares them one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

from palimpsest.config import ModelConfig
from palimpsest.model import FLOAT32

SIZES = {"f32": 4, "bf16": 2, "f16": 2, "mxfp4": 2}  # bytes a number; mxfp4 is bf16 around four-bit experts
PADDED_HEADS = 128  # Kimi K3's files keep decay rates in a multiple of this many places
# Vision tower (401,214,464) and projector (46,144,512) of the published Kimi K3, in bf16 (spec of its checkpoint, 9).
VISION_PARAMETERS = 447_358_976


class Weight(NamedTuple):
    """A parameter of the model: where it belongs, its name and its shape."""

    layer: int | None  # 0-based; None outside the layers
    component: str
    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def is_expert(self) -> bool:
        return self.component == "routed experts"

    def num_bytes(self, dtype: str) -> int:
        """In memory. Decay rates, taps and the router's bias stay float32; MXFP4 is half a byte and a scale per 32."""
        if self.name.endswith(FLOAT32):
            return 4 * self.numel
        if dtype == "mxfp4" and self.is_expert:
            return self.numel // 2 + self.numel // 32
        return SIZES[dtype] * self.numel


Shapes = Iterator[tuple[str, tuple[int, ...]]]


def weights(config: ModelConfig) -> list[Weight]:
    """Every parameter once (a tied head is the embedding), in the names of `Model.named_parameters`."""
    width, norm = config.hidden_size, list(_norm(config))
    found = [Weight(None, "embedding", "embed_tokens.weight", (config.vocab_size, width))]
    if config.position == "learned":
        found.append(Weight(None, "positions", "embed_positions.weight", (config.max_position_embeddings, width)))
    for layer, (mixer, mlp) in enumerate(zip(config.mixers, config.mlps, strict=True)):
        at = f"layers.{layer}."
        for site in ("mixer", "mlp"):
            found += [Weight(layer, "layer vectors", f"{at}{site}_norm.{part}", (width,)) for part in norm]
            found += [Weight(layer, "layer vectors", f"{at}{site}_residual.{n}", s) for n, s in _site(config)]
        found += [Weight(layer, mixer, f"{at}mixer.{name}", shape) for name, shape in _mixer(mixer, config)]
        found += [Weight(layer, part, f"{at}mlp.{name}", shape) for part, name, shape in _mlp(mlp, config)]
    found += [Weight(None, "final vectors", f"norm.{part}", (width,)) for part in norm]
    found += [Weight(None, "final vectors", f"output_residual.{name}", shape) for name, shape in _site(config)]
    if not config.tie_word_embeddings:
        found.append(Weight(None, "head", "lm_head.weight", (config.vocab_size, width)))
    return found


def _norm(config: ModelConfig) -> Iterator[str]:
    yield "weight"
    if config.norm == "layer":
        yield "bias"


def _site(config: ModelConfig) -> Shapes:
    if config.residual != "sum":
        yield "norm", (config.hidden_size,)
        yield "proj", (1, config.hidden_size)


def _linear(name: str, rows: int, columns: int, bias: bool = False) -> Shapes:
    yield f"{name}.weight", (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)


def _mixer(kind: str, c: ModelConfig) -> Shapes:
    if kind == "attention":
        yield from _attention(c)
    elif kind == "mla":
        yield from _mla(c)
    else:
        yield from _recurrent(kind, c)


def _attention(c: ModelConfig) -> Shapes:
    width, queries, keys = c.hidden_size, c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
        yield from _linear(name, rows, width, c.use_bias)
    yield from _linear("o_proj", width, queries, c.use_bias)
    if c.attention_output_gate:
        yield from _linear("g_proj", queries, width)
    if c.qk_norm:
        yield "q_norm.weight", (c.head_dim,)
        yield "k_norm.weight", (c.head_dim,)


def _mla(c: ModelConfig) -> Shapes:
    width, heads, rank = c.hidden_size, c.num_attention_heads, c.kv_lora_rank
    queries, values = heads * (c.qk_nope_head_dim + c.qk_rope_head_dim), heads * c.v_head_dim
    if c.q_lora_rank is None:
        yield from _linear("q_proj", queries, width)
    else:
        yield from _linear("q_a_proj", c.q_lora_rank, width)
        yield "q_a_layernorm.weight", (c.q_lora_rank,)
        yield from _linear("q_b_proj", queries, c.q_lora_rank)
    yield from _linear("kv_a_proj_with_mqa", rank + c.qk_rope_head_dim, width)
    yield "kv_a_layernorm.weight", (rank,)
    yield from _linear("kv_b_proj", heads * (c.qk_nope_head_dim + c.v_head_dim), rank)
    if c.mla_use_output_gate:
        yield from _linear("g_proj", values, width)
    yield from _linear("o_proj", width, values)


def _recurrent(kind: str, c: ModelConfig) -> Shapes:
    width, heads, value_dim = c.hidden_size, c.linear_num_value_heads, c.linear_value_head_dim
    keys, values = c.linear_num_key_heads * c.linear_key_head_dim, heads * value_dim
    for part, rows in (("q", keys), ("k", keys), ("v", values)):
        yield from _linear(f"{part}_proj", rows, width)
        if c.linear_conv_kernel_dim:
            yield f"{part}_conv1d.weight", (rows, c.linear_conv_kernel_dim)
    yield from _linear("o_proj", width, values)
    if kind == "linear_attention":
        if c.linear_feature_map == "product":
            for part, layer in (("q", 1), ("q", 2), ("k", 1), ("k", 2)):
                yield from _linear(f"feature_map_{part}.layer{layer}", c.linear_key_head_dim, c.linear_key_head_dim, True)
        if c.linear_output_norm:
            yield "o_norm.weight", (value_dim,)
        return
    yield from _linear("b_proj", heads, width)
    yield "o_norm.weight", (value_dim,)
    if kind == "deltanet":
        return
    yield "A_log", (heads,)
    if kind == "kda":
        channels = heads * c.linear_key_head_dim
        yield "dt_bias", (channels,)
        yield from _linear("f_a_proj", value_dim, width)
        yield from _linear("f_b_proj", channels, value_dim)
    else:
        yield "dt_bias", (heads,)
        yield from _linear("a_proj", heads, width)
    if c.linear_output_gate != "none":
        rank, bias = c.linear_output_gate_rank, c.linear_output_gate_bias
        if rank is None:
            yield from _linear("g_proj", values, width, bias)
        else:
            yield from _linear("g_a_proj", rank, width)
            yield from _linear("g_b_proj", values, rank, bias)


def _mlp(kind: str, c: ModelConfig) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    width = c.hidden_size
    if kind != "moe":
        names = ("up_proj",) if kind == "gelu" else ("gate_proj", "up_proj")
        for name in names:
            yield from (("dense mlp", *each) for each in _linear(name, c.intermediate_size, width, c.use_bias))
        yield from (("dense mlp", *each) for each in _linear("down_proj", width, c.intermediate_size, c.use_bias))
        return
    inner, latent = c.moe_intermediate_size, c.routed_expert_hidden_size or width
    yield "router", "gate.weight", (c.num_experts, width)
    yield "router", "gate.e_score_correction_bias", (c.num_experts,)
    yield "routed experts", "experts.gate_proj", (c.num_experts, inner, latent)
    yield "routed experts", "experts.up_proj", (c.num_experts, inner, latent)
    yield "routed experts", "experts.down_proj", (c.num_experts, latent, inner)
    if c.num_shared_experts:
        shared = c.num_shared_experts * inner
        for name, rows, columns in (("gate", shared, width), ("up", shared, width), ("down", width, shared)):
            parts = _linear(f"shared_experts.{name}_proj", rows, columns, c.use_bias)
            yield from (("shared experts", *each) for each in parts)
    if c.shared_expert_gate:
        yield "shared experts", "shared_expert_gate.weight", (1, width)
    if c.routed_expert_hidden_size is not None:
        yield "latent maps", "routed_expert_down_proj.weight", (latent, width)
        if c.latent_moe_use_norm:
            yield "latent maps", "routed_expert_norm.weight", (latent,)
        yield "latent maps", "routed_expert_up_proj.weight", (width, latent)


def parameters(config: ModelConfig) -> dict[str, Any]:
    """Totals: `total`, `active` (no token and position tables, the head once), `active_with_embedding` (both tables too),
    `active_without_head` (neither); `components` with `layers`, `per_layer` (the first that has it) and `total`."""
    rows = weights(config)
    tables = sum(row.numel for row in rows if row.component in ("embedding", "positions"))
    total = sum(row.numel for row in rows)
    idle = sum(row.numel // config.num_experts for row in rows if row.is_expert)
    active = total - tables - idle * (config.num_experts - config.num_experts_per_token)
    head = config.vocab_size * config.hidden_size
    tied = head if config.tie_word_embeddings else 0
    components: dict[str, dict[str, int]] = {}
    first: dict[str, int | None] = {}
    layers: dict[str, set[int | None]] = {}
    for row in rows:
        part = components.setdefault(row.component, {"layers": 0, "per_layer": 0, "total": 0})
        part["total"] += row.numel
        layers.setdefault(row.component, set()).add(row.layer)
        if first.setdefault(row.component, row.layer) == row.layer:
            part["per_layer"] += row.numel
    for name, part in components.items():
        part["layers"] = len(layers[name])
    return {
        "total": total,
        "active": active + tied,
        "active_with_embedding": active + tables,
        "active_without_head": active + tied - head,
        "components": components,
    }


def weight_bytes(config: ModelConfig, dtype: str) -> int:
    """Of the model in memory."""
    return sum(row.num_bytes(dtype) for row in weights(config))


def is_published_k3(config: ModelConfig) -> bool:
    """Whether the configuration is that of the released Kimi K3, whose files also hold a vision tower."""
    return config == ModelConfig.preset("kimi-k3")


def checkpoint_bytes(config: ModelConfig, dtype: str) -> int:
    """Of the tensors of a checkpoint, without the files' headers; of the released Kimi K3 with its vision tower.

    Kimi K3's layout pads decay rates to a multiple of 128 and keeps the output norms of KDA in float32.
    """
    total = weight_bytes(config, dtype)
    k3 = config.routed_expert_hidden_size is not None and set(config.mixers) <= {"kda", "mla"}
    if k3:
        heads, kda = config.linear_num_value_heads, config.mixers.count("kda")
        total += kda * (4 * (-heads % PADDED_HEADS) + (4 - SIZES[dtype]) * config.linear_value_head_dim)
    return total + (SIZES[dtype] * VISION_PARAMETERS if is_published_k3(config) else 0)
