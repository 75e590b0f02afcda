"""The eight stages of the lineage at one size, and the two sentences that say what each memory does."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from palimpsest.config import ModelConfig
from palimpsest.model import Model


@dataclass(frozen=True)
class Stage:
    """A stage: its preset gives the kinds of layers, `config_for` the size."""

    name: str
    title: str
    preset: str
    memory: str


STAGES = (
    Stage(
        "gpt2",
        "GPT-2: softmax attention",
        "gpt2-tiny",
        "Keeps the key and value of every token, compresses and overwrites nothing, and retrieves any of them exactly. "
        "The price is a memory that grows with every token.",
    ),
    Stage(
        "linear-attention",
        "Linear attention",
        "linear-attention-tiny",
        "Compresses all keys and values into one matrix by adding, and keeps no token apart. "
        "Nothing is overwritten: a key written twice retrieves the sum of its values, and everything blurs as more is added.",
    ),
    Stage(
        "deltanet",
        "DeltaNet: the delta rule",
        "deltanet-tiny",
        "Compresses into the same matrix, but first reads what a key retrieves and writes only the difference. "
        "A key written twice is overwritten; what is never written again is kept, wanted or not.",
    ),
    Stage(
        "gated-deltanet",
        "Gated DeltaNet: learned forgetting",
        "gated-deltanet-tiny",
        "Adds a learned rate at which the whole matrix of a head fades before each write. "
        "It overwrites single keys by the delta rule and clears everything by the gate, but cannot clear one part alone.",
    ),
    Stage(
        "kda",
        "Kimi Delta Attention: forgetting per channel",
        "kda-tiny",
        "Gives every key channel its own rate of fading, so that one part of the matrix is kept while another is cleared. "
        "Writes and retrieves by the delta rule as before, in a memory of fixed size.",
    ),
    Stage(
        "kimi-linear",
        "Kimi Linear: three KDA layers to one of MLA",
        "kimi-linear-tiny",
        "Three layers of four compress and overwrite in fixed matrices; the fourth keeps a short latent of every token. "
        "Exact retrieval is paid for in one layer of four, with a mixture of experts behind each mixer.",
    ),
    Stage(
        "hybrid-latent-moe",
        "Hybrid with latent experts",
        "hybrid-latent-moe-tiny",
        "Memory as in Kimi Linear, with a bounded forgetting rate in KDA and an output gate on MLA's exact retrieval. "
        "The experts work in a narrower latent space; what is kept, compressed and overwritten stays the same.",
    ),
    Stage(
        "kimi-k3",
        "Kimi K3: attention over depth",
        "kimi-k3-tiny",
        "Memory over time as before: fixed matrices overwritten by KDA, latents of every token kept by MLA for retrieval. "
        "Over depth, layers no longer add into one stream: each retrieves from the kept outputs of earlier blocks.",
    ),
)


def config_for(stage: Stage, vocab_size: int) -> ModelConfig:
    """The stage at the lineage's size, its active parameters matched to the GPT-2 stage."""
    return _sized(stage, vocab_size, width=128)


def recall_config(stage: Stage, vocab_size: int) -> ModelConfig:
    """The stage at the size that learns associative recall, matched in the same way."""
    return _sized(stage, vocab_size, width=64)


@cache
def _sized(stage: Stage, vocab_size: int, width: int) -> ModelConfig:
    """Four layers of heads 32 wide; the inner width of the MLPs (or experts) makes the active parameters equal."""
    heads = width // 32
    values: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": width,
        "num_hidden_layers": 4,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": 32,
        "intermediate_size": 4 * width,
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "kv_lora_rank": width // 2,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "num_experts": 8,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "tie_word_embeddings": True,
    }
    reference = ModelConfig.preset(STAGES[0].preset, **values)
    if stage is STAGES[0]:
        return reference
    plain = ModelConfig.preset(stage.preset)
    if plain.linear_output_gate_rank is not None:
        values["linear_output_gate_rank"] = 32
    if plain.q_lora_rank is not None:
        values["q_lora_rank"] = width // 2
    if plain.routed_expert_hidden_size is not None:
        values["routed_expert_hidden_size"] = width // 2
    field = "intermediate_size"
    if "moe" in plain.mlps:
        field, values["intermediate_size"] = "moe_intermediate_size", 2 * width

    def active(size: int) -> int:
        return _active(ModelConfig.preset(stage.preset, **{**values, field: size}))

    # Active parameters are linear in this width: two points give the line.
    low, step = active(8), active(16) - active(8)
    size = 8 + 8 * round((_active(reference) - low) / step)
    return ModelConfig.preset(stage.preset, **{**values, field: max(size, 8)})


def _active(config: ModelConfig) -> int:
    with torch.device("meta"):
        return Model(config).num_parameters(active=True)
