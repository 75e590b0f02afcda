"""The configurations: mistakes are one line that names the field and the remedy, and every field changes something."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import palimpsest as pal
from palimpsest.config import InputError, ModelConfig, SamplingConfig, TrainConfig
from tests.conftest import TINY, make_ids

BASE: dict[str, Any] = {
    "vocab_size": 11,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "mixers": ["attention", "attention"],
    "mlps": ["swiglu", "swiglu"],
}


def refused(message: str, **fields: Any) -> None:
    with pytest.raises(InputError, match=message) as caught:
        ModelConfig.from_dict({**BASE, **fields})
    assert "\n" not in str(caught.value) and isinstance(caught.value, ValueError)


# ------------------------------------------------------------------------------------------------------------- mistakes


def test_unknown_and_missing_fields() -> None:
    refused("model: unknown field 'hidden_sise'; did you mean 'hidden_size'", hidden_sise=3)
    refused("model: unknown field 'qqqqqq'$", qqqqqq=3)
    with pytest.raises(InputError, match="model: field 'hidden_size' is missing"):
        ModelConfig.from_dict({"vocab_size": 3})
    with pytest.raises(InputError, match=r"config.json: model: unknown field 'head_dims'; did you mean 'head_dim'"):
        ModelConfig.from_dict({**BASE, "head_dims": 3}, "config.json")
    with pytest.raises(InputError, match=r"run.toml: train: steps is 0; it must be at least 1"):
        TrainConfig.from_dict({"steps": 0}, "run.toml")
    with pytest.raises(InputError, match="expected a table of fields, found list"):
        ModelConfig.from_dict([1, 2])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [
        ("vocab_size", "11", "a whole number"),
        ("vocab_size", 11.0, "a whole number"),
        ("vocab_size", True, "a whole number"),
        ("vocab_size", None, "a whole number"),
        ("rms_norm_eps", "1e-5", "a number"),
        ("rms_norm_eps", True, "a number"),
        ("tie_word_embeddings", 1, "true or false"),
        ("tie_word_embeddings", "yes", "true or false"),
        ("q_lora_rank", 1.5, "a whole number or none"),
        ("gate_lower_bound", "low", "a number or none"),
        ("residual", "mean", "one of 'sum', 'full_attention', 'block_attention'"),
        ("residual", None, "one of 'sum', 'full_attention', 'block_attention'"),
        ("residual", ["sum"], "one of 'sum', 'full_attention', 'block_attention'"),
        ("mixers", "attention", "a list, each entry one of 'attention', "),
        ("mixers", ["attention", "atention"], "a list, each entry one of 'attention', "),
        ("mixers", ["attention", ["attention"]], "a list, each entry one of 'attention', "),
        ("mlps", ["swiglu", 3], "a list, each entry one of 'gelu', "),
        ("mlps", {"swiglu": 1}, "a list, each entry one of 'gelu', "),
    ],
)
def test_wrong_types(field: str, value: Any, wanted: str) -> None:
    refused(f"model: {field} is .*; it must be {wanted}", **{field: value})


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_none(number: float) -> None:
    """Neither NaN nor infinity is a size, a rate or a bound."""
    for kind in (ModelConfig, TrainConfig, SamplingConfig):
        for field in dataclasses.fields(kind):
            if "float" in str(field.type):
                with pytest.raises(InputError, match=field.name):
                    kind.from_dict({**(BASE if kind is ModelConfig else {}), field.name: number})


def test_sizes_below_one() -> None:
    for name, least in {
        "vocab_size": 1, "hidden_size": 1, "num_hidden_layers": 1, "attn_res_block_size": 1, "num_attention_heads": 1,
        "num_key_value_heads": 1, "head_dim": 1, "max_position_embeddings": 1, "linear_num_key_heads": 1,
        "linear_num_value_heads": 1, "linear_key_head_dim": 1, "linear_value_head_dim": 1, "kv_lora_rank": 1,
        "qk_nope_head_dim": 1, "v_head_dim": 1, "intermediate_size": 1, "num_experts": 1, "num_experts_per_token": 1,
        "moe_intermediate_size": 1, "linear_output_gate_rank": 1, "q_lora_rank": 1, "routed_expert_hidden_size": 1,
        "linear_conv_kernel_dim": 0, "qk_rope_head_dim": 0, "num_shared_experts": 0,
    }.items():  # fmt: skip
        refused(f"{name} is {least - 1}; it must", **{name: least - 1})
    for name in ("rms_norm_eps", "rope_theta", "initializer_range", "activation_situ_beta", "activation_situ_linear_beta"):
        refused(f"{name} is 0.0; it must be above 0", **{name: 0})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mixers": ["attention"]}, r"mixers is \('attention',\); it needs one entry for each of the 2 layers"),
        ({"mlps": ["gelu"] * 3}, "mlps is .*; it needs one entry for each of the 2 layers"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads is 3; it must divide num_attention_heads \(4\)"),
        (
            {"mixers": ["attention", "kda"], "linear_num_key_heads": 2, "linear_num_value_heads": 3},
            r"linear_num_value_heads is 3; it must be a multiple of linear_num_key_heads \(2\)",
        ),
        ({"position": "rope", "head_dim": 7}, "head_dim is 7; .*must be even"),
        ({"position": "rope", "partial_rotary_factor": 0.05}, "head_dim is 16; .*must be even"),
        ({"partial_rotary_factor": 0.0}, r"partial_rotary_factor is 0.0; it must be in \(0, 1\]"),
        ({"partial_rotary_factor": 1.5}, r"partial_rotary_factor is 1.5; it must be in \(0, 1\]"),
        ({"position": "rope", "mixers": ["kda", "kda"]}, "position is 'rope'; .*mixer 'attention'"),
        ({"gate_lower_bound": -5.0}, "gate_lower_bound is -5.0; only a 'kda' layer has this gate"),
        ({"mixers": ["kda", "kda"], "gate_lower_bound": -6}, r"gate_lower_bound is -6.0; it must be in \[-5, 0\)"),
        ({"mixers": ["kda", "kda"], "gate_lower_bound": 0}, r"gate_lower_bound is 0.0; it must be in \[-5, 0\)"),
        ({"linear_output_gate": "silu"}, "linear_output_gate is 'silu'; only 'gated_deltanet' and 'kda'"),
        (
            {"mixers": ["mla", "mla"], "mla_use_nope": False, "qk_rope_head_dim": 3},
            "qk_rope_head_dim is 3; it rotates in pairs and so must be even",
        ),
        (
            {"mlps": ["moe", "moe"], "num_experts": 2, "num_experts_per_token": 3},
            r"num_experts_per_token is 3; it must not exceed num_experts \(2\)",
        ),
        (
            {"mlps": ["moe", "moe"], "shared_expert_gate": True, "num_shared_experts": 0},
            "shared_expert_gate is True; there is no shared expert to gate",
        ),
    ],
)
def test_relations(fields: dict[str, Any], message: str) -> None:
    refused(f"model: {message}", **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"batch_size": 0}, "train: batch_size is 0; it must be at least 1"),
        ({"warmup_steps": -1}, "train: warmup_steps is -1; it must not be negative"),
        ({"learning_rate": 0}, "train: learning_rate is 0.0; it must be above 0"),
        ({"min_learning_rate_ratio": 1.5}, r"train: min_learning_rate_ratio is 1.5; it must be in \[0, 1\]"),
        ({"decay_share": -0.1}, r"train: decay_share is -0.1; it must be in \[0, 1\]"),
        ({"beta2": 1.0}, r"train: beta2 is 1.0; it must be in \[0, 1\)"),
        ({"schedule": "linear"}, "train: schedule is 'linear'; it must be one of 'cosine', 'wsd', 'constant'"),
        ({"precision": "fp16"}, "train: precision is 'fp16'; it must be one of 'fp32', 'bf16'"),
        ({"leraning_rate": 1}, "train: unknown field 'leraning_rate'; did you mean 'learning_rate'"),
    ],
)
def test_training_mistakes(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        TrainConfig.from_dict(fields)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_new_tokens": 0}, "sampling: max_new_tokens is 0; it must be at least 1"),
        ({"temperature": -1}, r"sampling: temperature is -1.0; it must be in \[0, 100\]"),
        ({"top_p": 0}, r"sampling: top_p is 0.0; it must be in \(0, 1\]"),
        ({"top_k": -1}, "sampling: top_k is -1; it must not be negative"),
        ({"seed": -1}, r"sampling: seed is -1; it must be in \[0, 2\*\*63\)"),
        ({"stop": [""]}, "sampling: stop is .*; an empty stop text"),
        ({"stop": "abc"}, "sampling: stop is 'abc'; it must be a list, each entry text"),
        ({"temprature": 1}, "sampling: unknown field 'temprature'; did you mean 'temperature'"),
    ],
)
def test_sampling_mistakes(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        SamplingConfig.from_dict(fields)


# ---------------------------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("preset", pal.presets())
def test_round_trip(preset: str) -> None:
    """Through plain values and through JSON; lists become tuples, whole numbers floats where a float is meant."""
    config = ModelConfig.preset(preset)
    values = config.to_dict()
    assert ModelConfig.from_dict(values) == config
    assert ModelConfig.from_dict(json.loads(json.dumps(values, allow_nan=False))) == config
    assert set(values) == {field.name for field in dataclasses.fields(ModelConfig)}
    assert isinstance(values["mixers"], list)


def test_values_are_coerced_and_frozen() -> None:
    config = ModelConfig.from_dict({**BASE, "rope_theta": 5000})
    assert config.rope_theta == 5000.0 and isinstance(config.rope_theta, float)
    assert config.mixers == ("attention", "attention")
    assert config == ModelConfig(11, 16, 2, ("attention",) * 2, ("swiglu",) * 2, rope_theta=5000.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.vocab_size = 3  # type: ignore[misc]
    assert hash(config) == hash(ModelConfig.from_dict({**BASE, "rope_theta": 5000.0}))


def test_replace() -> None:
    config = ModelConfig.from_dict(BASE)
    assert config.replace(vocab_size=12).vocab_size == 12 and config.vocab_size == 11
    with pytest.raises(InputError, match="unknown field 'vocab'; did you mean"):
        config.replace(vocab=12)
    with pytest.raises(InputError, match="num_key_value_heads is 3"):
        config.replace(num_key_value_heads=3)


def test_train_and_sampling_round_trip() -> None:
    for config in (TrainConfig(steps=3, precision="bf16"), SamplingConfig(seed=4, stop=("a", "b")), SamplingConfig()):
        assert type(config).from_dict(json.loads(json.dumps(config.to_dict()))) == config


@given(values=st.dictionaries(st.text(max_size=8), st.none() | st.integers() | st.text(max_size=4) | st.floats(), max_size=4))
def test_any_table_is_taken_or_refused_in_one_line(values: dict[str, Any]) -> None:
    try:
        config = SamplingConfig.from_dict(values)
    except InputError as error:
        assert "\n" not in str(error)
    else:
        assert config.to_dict().items() >= values.items()


# ------------------------------------------------------------------------------------------- every field does something

# field -> (preset, overrides that make it matter, another value)
EFFECTS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "vocab_size": ("gpt2-tiny", {}, 300),
    "hidden_size": ("gpt2-tiny", {}, 48),
    "num_hidden_layers": ("gpt2-tiny", {}, 3),
    "mixers": ("gpt2-tiny", {}, ["attention"] * 3 + ["mla"]),
    "mlps": ("gpt2-tiny", {}, ["gelu"] * 3 + ["swiglu"]),
    "residual": ("kimi-k3-tiny", {}, "full_attention"),
    "attn_res_block_size": ("kimi-k3-tiny", {}, 3),
    "norm": ("gpt2-tiny", {}, "rms"),
    "rms_norm_eps": ("kimi-k3-tiny", {}, 1e-2),
    "use_bias": ("gpt2-tiny", {}, False),
    "tie_word_embeddings": ("gpt2-tiny", {}, False),
    "initializer_range": ("gpt2-tiny", {}, 0.03),
    "num_attention_heads": ("gpt2-tiny", {}, 8),
    "num_key_value_heads": ("smollm2-tiny", {}, 4),
    "head_dim": ("smollm2-tiny", {}, 8),
    "position": ("gpt2-tiny", {}, "none"),
    "max_position_embeddings": ("gpt2-tiny", {}, 512),
    "rope_theta": ("smollm2-tiny", {}, 20000.0),
    "partial_rotary_factor": ("smollm2-tiny", {}, 0.5),
    "attention_output_gate": ("qwen3-next-tiny", {}, False),
    "qk_norm": ("qwen3-next-tiny", {}, False),
    "linear_num_key_heads": ("kda-tiny", {}, 4),
    "linear_num_value_heads": ("kda-tiny", {}, 2),
    "linear_key_head_dim": ("kda-tiny", {}, 8),
    "linear_value_head_dim": ("kda-tiny", {}, 8),
    "linear_conv_kernel_dim": ("deltanet-tiny", {}, 3),
    "linear_output_gate": ("gated-deltanet-tiny", {}, "sigmoid"),
    "linear_output_gate_rank": ("kda-tiny", {}, 8),
    "linear_output_gate_bias": ("kda-tiny", {}, True),
    "linear_feature_map": ("linear-attention-tiny", {}, "relu"),
    "linear_output_norm": ("linear-attention-tiny", {}, True),
    "gate_lower_bound": ("kimi-k3-tiny", {}, -4.0),
    "allow_neg_eigval": ("kda-tiny", {}, True),
    "q_lora_rank": ("kimi-k3-tiny", {}, 16),
    "kv_lora_rank": ("kimi-k3-tiny", {}, 16),
    "qk_nope_head_dim": ("kimi-k3-tiny", {}, 8),
    "qk_rope_head_dim": ("kimi-k3-tiny", {}, 4),
    "v_head_dim": ("kimi-k3-tiny", {}, 8),
    "mla_use_nope": ("kimi-k3-tiny", {}, False),
    "mla_use_output_gate": ("kimi-k3-tiny", {}, False),
    "intermediate_size": ("kimi-k3-tiny", {}, 96),
    "activation_situ_beta": ("kimi-k3-tiny", {}, 0.5),
    "activation_situ_linear_beta": ("kimi-k3-tiny", {}, 0.5),
    "num_experts": ("kimi-k3-tiny", {}, 4),
    "num_experts_per_token": ("kimi-k3-tiny", {}, 3),
    "num_shared_experts": ("kimi-k3-tiny", {}, 1),
    "moe_intermediate_size": ("kimi-k3-tiny", {}, 16),
    "moe_hidden_act": ("kimi-k3-tiny", {}, "swiglu"),
    "routed_expert_hidden_size": ("kimi-k3-tiny", {}, 16),
    "latent_moe_use_norm": ("kimi-k3-tiny", {}, False),
    "moe_router_activation_func": ("kimi-linear-tiny", {}, "softmax"),
    "moe_renormalize": ("kimi-linear-tiny", {}, False),
    "routed_scaling_factor": ("kimi-linear-tiny", {}, 1.5),
    "shared_expert_gate": ("qwen3-next-tiny", {}, False),
}


def fingerprint(config: ModelConfig) -> tuple[dict[str, tuple[int, ...]], list[torch.Tensor], torch.Tensor]:
    """Shapes, first values, and the output with every parameter set by its name alone (so that only the maths differs)."""
    torch.manual_seed(0)
    model = pal.Model(config)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    values = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 0.3)
        return shapes, values, model(make_ids(model, 1, 12) % 200).logits


def test_every_field_is_in_the_table() -> None:
    assert set(EFFECTS) == {field.name for field in dataclasses.fields(ModelConfig)}


@pytest.mark.parametrize("field", EFFECTS)
def test_every_field_changes_something(field: str) -> None:
    preset, fields, value = EFFECTS[field]
    before = ModelConfig.preset(preset, **fields)
    after = ModelConfig.preset(preset, **fields, **{field: value})
    assert getattr(before, field) != getattr(after, field)
    shapes, values, logits = fingerprint(before)
    other_shapes, other_values, other_logits = fingerprint(after)
    if shapes != other_shapes:
        return
    drawn = any(not torch.equal(a, b) for a, b in zip(values, other_values, strict=True))
    computed = not torch.allclose(logits, other_logits, rtol=1e-5, atol=1e-6)
    assert drawn or computed
    assert computed or field == "initializer_range"


def test_incompatible_choices_are_said() -> None:
    """Any mixer runs with any MLP and any residual; what cannot run is refused when the configuration is made."""
    mixers = ("attention", "linear_attention", "deltanet", "gated_deltanet", "kda", "mla")
    for mixer, mlp, residual in itertools.product(
        mixers, ("gelu", "swiglu", "situ", "moe"), ("sum", "full_attention", "block_attention")
    ):
        config = ModelConfig.from_dict({**BASE, "mixers": [mixer] * 2, "mlps": [mlp] * 2, "residual": residual})
        logits = pal.Model(config)(torch.tensor([[1, 2, 3]])).logits
        assert logits.shape == (1, 3, 11) and logits.isfinite().all()
    assert len(TINY) == 10
