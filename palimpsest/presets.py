"""Named configurations, nothing else. Presets of one family differ in numbers only."""

from __future__ import annotations

from typing import Any

from palimpsest.config import InputError, ModelConfig, suggestion

_PLAIN: dict[str, Any] = {"residual": "sum", "norm": "rms"}
_GPT2: dict[str, Any] = {
    **_PLAIN,
    "norm": "layer",
    "use_bias": True,
    "tie_word_embeddings": True,
    "position": "learned",
    "rms_norm_eps": 1e-5,
}
_LLAMA: dict[str, Any] = {**_PLAIN, "position": "rope", "tie_word_embeddings": True}
_DELTANET: dict[str, Any] = {**_PLAIN, "tie_word_embeddings": True}
_GATED_DELTANET: dict[str, Any] = {**_DELTANET, "linear_output_gate": "silu"}
_KDA: dict[str, Any] = {**_DELTANET, "linear_output_gate": "sigmoid"}
_KIMI_LINEAR: dict[str, Any] = {
    **_PLAIN,
    "linear_output_gate": "sigmoid",
    "routed_scaling_factor": 2.446,
    "moe_hidden_act": "swiglu",
}
_LATENT_MOE: dict[str, Any] = {
    **_PLAIN,
    "linear_output_gate": "sigmoid",
    "gate_lower_bound": -5.0,
    "mla_use_output_gate": True,
    "moe_hidden_act": "situ",
}
_KIMI_K3: dict[str, Any] = {**_LATENT_MOE, "residual": "block_attention"}


def _layers(mixers: list[str], mlp: str, first_mlp: str | None = None) -> dict[str, Any]:
    mlps = [first_mlp or mlp, *[mlp] * (len(mixers) - 1)]
    return {"num_hidden_layers": len(mixers), "mixers": tuple(mixers), "mlps": tuple(mlps)}


def _hybrid(layers: int, full: str = "mla", linear: str = "kda", every: int = 4) -> list[str]:
    """`linear` with `full` at every fourth layer; the last layer is always `full`, as published."""
    return [full if (i + 1) % every == 0 or i == layers - 1 else linear for i in range(layers)]


def _linear_heads(heads: int, key_dim: int, value_dim: int | None = None, value_heads: int | None = None) -> dict[str, Any]:
    return {
        "linear_num_key_heads": heads,
        "linear_num_value_heads": value_heads or heads,
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": value_dim or key_dim,
    }


def _heads(heads: int, head_dim: int, kv_heads: int | None = None) -> dict[str, Any]:
    return {"num_attention_heads": heads, "num_key_value_heads": kv_heads or heads, "head_dim": head_dim}


def _latents(heads: int, kv: int, nope: int, rope: int, value: int, q: int | None = None) -> dict[str, Any]:
    return {
        **_heads(heads, nope),
        "kv_lora_rank": kv,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": value,
        "q_lora_rank": q,
    }


def _experts(count: int, chosen: int, shared: int, width: int, latent: int | None = None) -> dict[str, Any]:
    return {
        "num_experts": count,
        "num_experts_per_token": chosen,
        "num_shared_experts": shared,
        "moe_intermediate_size": width,
        "routed_expert_hidden_size": latent,
    }


_124M: dict[str, Any] = {"vocab_size": 50257, "hidden_size": 768, "intermediate_size": 2048, **_linear_heads(12, 64)}
_TINY: dict[str, Any] = {"vocab_size": 257, "hidden_size": 64, "intermediate_size": 128}
# Value heads outnumber key heads and K differs from V, so that no test passes by coincidence of shapes.
_TINY_HEADS = _linear_heads(2, 16, 24, 4)
_TINY_KDA = _linear_heads(4, 16)
_TINY_LATENTS = _latents(4, 32, 16, 8, 16)

PRESETS: dict[str, dict[str, Any]] = {
    "gpt2-124m": {
        **_GPT2,
        **_layers(["attention"] * 12, "gelu"),
        **_heads(12, 64),
        "vocab_size": 50257,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "max_position_embeddings": 1024,
    },
    "gpt2-tiny": {**_GPT2, **_TINY, **_layers(["attention"] * 4, "gelu"), **_heads(4, 16)},
    "smollm2-135m": {
        **_LLAMA,
        **_layers(["attention"] * 30, "swiglu"),
        **_heads(9, 64, 3),
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "rope_theta": 100000.0,
        "max_position_embeddings": 8192,
        "initializer_range": 0.041666666666666664,
    },
    "smollm2-tiny": {**_LLAMA, **_TINY, **_layers(["attention"] * 4, "swiglu"), **_heads(4, 16, 2)},
    "linear-attention-124m": {**_DELTANET, **_124M, **_layers(["linear_attention"] * 12, "swiglu")},
    "linear-attention-tiny": {**_DELTANET, **_TINY, **_TINY_HEADS, **_layers(["linear_attention"] * 4, "swiglu")},
    "deltanet-124m": {**_DELTANET, **_124M, **_layers(["deltanet"] * 12, "swiglu")},
    "deltanet-tiny": {**_DELTANET, **_TINY, **_TINY_HEADS, **_layers(["deltanet"] * 4, "swiglu")},
    "gated-deltanet-124m": {**_GATED_DELTANET, **_124M, **_layers(["gated_deltanet"] * 12, "swiglu")},
    "gated-deltanet-tiny": {**_GATED_DELTANET, **_TINY, **_TINY_HEADS, **_layers(["gated_deltanet"] * 4, "swiglu")},
    "kda-124m": {**_KDA, **_124M, "linear_output_gate_rank": 64, **_layers(["kda"] * 12, "swiglu")},
    "kda-tiny": {**_KDA, **_TINY, **_TINY_HEADS, "linear_output_gate_rank": 16, **_layers(["kda"] * 4, "swiglu")},
    "kda-340m": {
        **_KDA,
        **_layers(_hybrid(24), "swiglu"),
        **_linear_heads(8, 128),
        **_latents(8, 256, 128, 64, 128),
        "tie_word_embeddings": False,
        "linear_output_gate_rank": 128,
        "vocab_size": 32000,
        "hidden_size": 1024,
        "intermediate_size": 2816,
    },
    "qwen3-next-tiny": {
        **_GATED_DELTANET,
        **_TINY,
        **_TINY_HEADS,
        **_layers(_hybrid(4, "attention", "gated_deltanet"), "moe"),
        **_heads(4, 16, 2),
        **_experts(8, 2, 1, 32),
        "tie_word_embeddings": False,
        "position": "rope",
        "partial_rotary_factor": 0.25,
        "qk_norm": True,
        "attention_output_gate": True,
        "moe_router_activation_func": "softmax",
        "shared_expert_gate": True,
        "rms_norm_eps": 1e-6,
    },
    "kimi-linear-48b": {
        **_KIMI_LINEAR,
        **_layers(_hybrid(27), "moe", "swiglu"),
        **_linear_heads(32, 128),
        **_latents(32, 512, 128, 64, 128),
        **_experts(256, 8, 1, 1024),
        "linear_output_gate_rank": 128,
        "vocab_size": 163840,
        "hidden_size": 2304,
        "intermediate_size": 9216,
    },
    "kimi-linear-65m": {
        **_KIMI_LINEAR,
        **_layers(_hybrid(8), "moe", "swiglu"),
        **_linear_heads(8, 64),
        **_latents(8, 128, 64, 32, 64),
        **_experts(8, 2, 1, 256),
        "linear_output_gate_rank": 64,
        "vocab_size": 32000,
        "hidden_size": 512,
        "intermediate_size": 1024,
    },
    "kimi-linear-tiny": {
        **_KIMI_LINEAR,
        **_TINY,
        **_layers(_hybrid(5), "moe", "swiglu"),
        **_TINY_KDA,
        **_TINY_LATENTS,
        **_experts(8, 2, 1, 32),
        "linear_output_gate_rank": 16,
    },
    "hybrid-latent-moe-tiny": {
        **_LATENT_MOE,
        **_TINY,
        **_layers(_hybrid(5), "moe", "situ"),
        **_TINY_KDA,
        **{**_TINY_LATENTS, "q_lora_rank": 24},
        **_experts(8, 2, 2, 32, 32),
    },
    "kimi-k3": {
        **_KIMI_K3,
        **_layers(_hybrid(93), "moe", "situ"),
        **_linear_heads(96, 128),
        **_latents(96, 512, 128, 64, 128, 1536),
        **_experts(896, 16, 2, 3072, 3584),
        "attn_res_block_size": 12,
        "vocab_size": 163840,
        "hidden_size": 7168,
        "intermediate_size": 33792,
    },
    "kimi-k3-124m": {
        **_KIMI_K3,
        **_layers(_hybrid(12), "moe", "situ"),
        **_linear_heads(8, 64),
        **_latents(8, 128, 64, 32, 64, 256),
        **_experts(16, 4, 1, 256, 256),
        "attn_res_block_size": 3,
        "vocab_size": 50257,
        "hidden_size": 512,
        "intermediate_size": 1536,
    },
    "kimi-k3-tiny": {
        **_KIMI_K3,
        **_TINY,
        **_layers(_hybrid(5), "moe", "situ"),
        **_TINY_KDA,
        **{**_TINY_LATENTS, "q_lora_rank": 24},
        **_experts(8, 2, 2, 32, 32),
        "attn_res_block_size": 2,
    },
}


def presets() -> list[str]:
    """The names of all presets."""
    return list(PRESETS)


def preset(name: str, **overrides: Any) -> ModelConfig:
    """A preset with fields overridden; see `ModelConfig.preset`."""
    if name not in PRESETS:
        raise InputError(f"preset {name!r} does not exist{suggestion(name, PRESETS)}; `palimpsest presets` lists them all")
    values = {**PRESETS[name], **overrides}
    layers = values["num_hidden_layers"]
    if isinstance(layers, int) and layers > 0:
        if "mixers" not in overrides:
            mixers = values["mixers"]
            values["mixers"] = tuple(mixers[i % len(mixers)] for i in range(layers))
        if "mlps" not in overrides:
            mlps = values["mlps"]
            values["mlps"] = tuple(mlps[min(i, len(mlps) - 1)] for i in range(layers))
    return ModelConfig.from_dict(values)
