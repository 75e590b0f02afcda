"""Bytes that a sequence carries from token to token, as `State.num_bytes` counts them.

attention    2 Hkv d values a token                MLA   R + r values a token
recurrent    HV K V float32 a sequence (linear attention with its normaliser one column more)
convolution  (W - 1)(2 H K + HV V) values a sequence
"""

from __future__ import annotations

from palimpsest.config import LINEAR_MIXERS, ModelConfig
from palimpsest.plan.counts import SIZES

FLOAT_BYTES = 4  # of the recurrent matrices, whatever the model's dtype


def kv_values(config: ModelConfig, mixer: str) -> int:
    """Values that one token adds in one layer."""
    if mixer == "attention":
        return 2 * config.num_key_value_heads * config.head_dim
    return config.kv_lora_rank + config.qk_rope_head_dim if mixer == "mla" else 0


def recurrent_values(config: ModelConfig, mixer: str) -> int:
    """Values of one layer's matrices for one sequence."""
    if mixer not in LINEAR_MIXERS:
        return 0
    return config.linear_num_value_heads * config.linear_key_head_dim * state_columns(config, mixer)


def state_columns(config: ModelConfig, mixer: str) -> int:
    """V, and the normaliser of linear attention where it has one."""
    return config.linear_value_head_dim + (mixer == "linear_attention" and not config.linear_output_norm)


def conv_values(config: ModelConfig, mixer: str) -> int:
    """Values of one layer's convolution inputs for one sequence."""
    if mixer not in LINEAR_MIXERS:
        return 0
    return max(config.linear_conv_kernel_dim - 1, 0) * conv_channels(config)


def conv_channels(config: ModelConfig) -> int:
    """Channels of q, k and v together."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    return 2 * keys + config.linear_num_value_heads * config.linear_value_head_dim


def kv_bytes_per_token(config: ModelConfig, dtype: str) -> int:
    return SIZES[dtype] * sum(kv_values(config, mixer) for mixer in config.mixers)


def recurrent_bytes(config: ModelConfig) -> int:
    """Of one sequence."""
    return FLOAT_BYTES * sum(recurrent_values(config, mixer) for mixer in config.mixers)


def conv_bytes(config: ModelConfig, dtype: str) -> int:
    """Of one sequence."""
    return SIZES[dtype] * sum(conv_values(config, mixer) for mixer in config.mixers)


def state_bytes(config: ModelConfig, context: int, batch: int, dtype: str) -> dict[str, int]:
    """By kind, and `total`: of `batch` sequences that hold `context` tokens each."""
    kinds = {
        "kv": batch * context * kv_bytes_per_token(config, dtype),
        "recurrent": batch * recurrent_bytes(config),
        "conv": batch * conv_bytes(config, dtype),
    }
    return {**kinds, "total": sum(kinds.values())}


def all_attention(config: ModelConfig) -> ModelConfig | None:
    """The same model with every recurrent layer replaced by the kind that retrieves exactly; None when there is neither."""
    exact = next((mixer for mixer in config.mixers if mixer in ("mla", "attention")), None)
    if exact is None or not set(config.mixers) & set(LINEAR_MIXERS):
        return None
    layers = config.num_hidden_layers
    return config.replace(mixers=(exact,) * layers, gate_lower_bound=None, linear_output_gate="none")


def crossover_tokens(config: ModelConfig, dtype: str = "bf16", conv: bool = False) -> float | None:
    """Context at which a hybrid starts to hold less than its all-attention form; None when it has no such form."""
    other = all_attention(config)
    if other is None:
        return None
    saved = kv_bytes_per_token(other, dtype) - kv_bytes_per_token(config, dtype)
    return (recurrent_bytes(config) + (conv_bytes(config, dtype) if conv else 0)) / saved
