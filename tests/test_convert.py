"""Published layouts: nothing is lost on the way there and back, and the published Kimi K3 inventory is met name by name."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from torch import Tensor

import palimpsest as pal
from palimpsest import convert
from palimpsest.convert import from_published, to_published

PRESETS = ["gpt2-tiny", "smollm2-tiny", "qwen3-next-tiny", "gated-deltanet-tiny", "kimi-linear-tiny"]
PRESETS += ["hybrid-latent-moe-tiny", "kimi-k3-tiny"]


def random_model(config: pal.ModelConfig, seed: int = 0) -> pal.Model:
    """Every parameter drawn anew, norms in [0.5, 2] so that w - 1 is exact."""
    torch.manual_seed(seed)
    model = pal.Model(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm.weight" in name:
                weight.uniform_(0.5, 2)
            elif not name.endswith("e_score_correction_bias") or config.moe_router_activation_func == "sigmoid":
                weight.normal_()
    return model


def published(preset: str, **overrides: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config = pal.ModelConfig.preset(preset, **overrides)
    return to_published(config, random_model(config).state_dict())


# Forms of other presets that flash-linear-attention has: one head of each kind, a learned feature map, a gate with bias.
EVEN: dict[str, Any] = {"linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 24}
PLAIN: dict[str, Any] = {"linear_output_norm": True, "linear_conv_kernel_dim": 0}
FLA: dict[str, tuple[str, dict[str, Any]]] = {
    "linear_attn": ("linear-attention-tiny", {**EVEN, **PLAIN, "linear_feature_map": "product"}),
    "linear_attn, relu": ("linear-attention-tiny", {**EVEN, **PLAIN, "linear_feature_map": "relu"}),
    "delta_net": ("deltanet-tiny", {**EVEN, "allow_neg_eigval": True, "tie_word_embeddings": False}),
    "kda": ("kda-tiny", {"linear_output_gate_bias": True, "linear_output_gate_rank": 24}),
    "kda, bounded": (
        "kda-tiny",
        {"linear_output_gate_bias": True, "linear_output_gate_rank": 24, "gate_lower_bound": -5.0, "allow_neg_eigval": True},
    ),
}


@pytest.mark.parametrize("form", [*PRESETS, *FLA])
def test_there_and_back_is_exact(form: str) -> None:
    preset, fields = FLA.get(form, (form, {}))
    config = pal.ModelConfig.preset(preset, **fields)
    before = random_model(config).state_dict()
    document, tensors = to_published(config, before)
    back, after = from_published(json.loads(json.dumps(document)), tensors)
    assert back == config
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype, name
        assert torch.equal(after[name], tensor), name
    again, tensors_again = to_published(back, after)
    assert again == document
    assert tensors_again.keys() == tensors.keys()
    assert all(torch.equal(tensors_again[name], tensor) for name, tensor in tensors.items())


# One other value for every field; the layers' lists change with the others.
OTHER: dict[str, Any] = {
    **{"vocab_size": 65, "hidden_size": 32, "residual": "full_attention"},
    **{"attn_res_block_size": 3, "norm": "layer", "rms_norm_eps": 1e-3, "use_bias": True, "tie_word_embeddings": True},
    **{"initializer_range": 0.1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "position": "learned"},
    **{"max_position_embeddings": 99, "rope_theta": 5e3, "partial_rotary_factor": 0.5, "attention_output_gate": True},
    **{"qk_norm": True, "linear_num_key_heads": 1, "linear_num_value_heads": 8, "linear_key_head_dim": 8},
    **{"linear_value_head_dim": 8, "linear_conv_kernel_dim": 3, "linear_output_gate": "none"},
    **{"linear_output_gate_bias": True, "linear_feature_map": "relu", "linear_output_norm": True},
    **{"linear_output_gate_rank": 8, "gate_lower_bound": -2.5, "allow_neg_eigval": True, "q_lora_rank": 12},
    **{"kv_lora_rank": 12, "qk_nope_head_dim": 12, "qk_rope_head_dim": 4, "v_head_dim": 12, "mla_use_nope": False},
    **{"mla_use_output_gate": True, "intermediate_size": 40, "activation_situ_beta": 3.0},
    **{"activation_situ_linear_beta": 9.0, "num_experts": 4, "num_experts_per_token": 3, "num_shared_experts": 3},
    **{"moe_intermediate_size": 24, "moe_hidden_act": "situ", "routed_expert_hidden_size": 24},
    **{"latent_moe_use_norm": False, "moe_router_activation_func": "softmax", "moe_renormalize": False},
    **{"routed_scaling_factor": 1.5, "shared_expert_gate": True},
}
FLIPPED = {"tie_word_embeddings", "use_bias", "attention_output_gate", "qk_norm", "mla_use_output_gate", "shared_expert_gate"}


@pytest.mark.slow
def test_every_field_is_kept_or_refused() -> None:
    """A configuration that is written comes back as the same function; one that cannot be written is refused."""
    assert {field.name for field in dataclasses.fields(pal.ModelConfig)} - {
        "num_hidden_layers",
        "mixers",
        "mlps",
    } == OTHER.keys()
    ids = torch.arange(12).view(2, 6)
    written = 0
    for preset in ("gpt2-tiny", "smollm2-tiny", "qwen3-next-tiny", "kimi-linear-tiny", "kimi-k3-tiny"):
        base = pal.ModelConfig.preset(preset)
        base = base.replace(num_hidden_layers=2, mixers=base.mixers[::-3][:2][::-1], mlps=base.mlps[:2])
        changes: list[dict[str, Any]] = [
            {field: not getattr(base, field) if field in FLIPPED else value} for field, value in OTHER.items()
        ]
        changes += [{"mlps": (mlp,) * base.num_hidden_layers} for mlp in ("gelu", "swiglu", "situ", "moe")]
        changes += [{"mixers": (mixer,) * base.num_hidden_layers} for mixer in ("attention", "kda", "mla", "gated_deltanet")]
        changes += [{"mlps": ("moe", "swiglu")}, {"mixers": base.mixers[::-1]}]
        changes += [{"num_hidden_layers": 1, "mixers": base.mixers[:1], "mlps": base.mlps[1:]}]
        for change in changes:
            try:
                config = base.replace(**change)
            except pal.InputError:
                continue
            model = random_model(config)
            try:
                document, tensors = to_published(config, model.state_dict())
            except pal.InputError as error:
                assert str(error).startswith("model: ") and "\n" not in str(error)
                continue
            written += 1
            back, ours = from_published(json.loads(json.dumps(document)), tensors)
            again = pal.Model(back)
            again.load_state_dict(ours)
            assert torch.equal(again(ids).logits, model(ids).logits), (preset, change)
    assert written > 120


@pytest.mark.parametrize("preset", PRESETS)
def test_a_missing_or_surplus_or_misshapen_tensor_is_named(preset: str) -> None:
    document, tensors = published(preset)
    for name in list(tensors)[:: len(tensors) // 4]:
        fewer = {other: tensor for other, tensor in tensors.items() if other != name}
        with pytest.raises(pal.InputError, match=rf"tensor '{name.removeprefix('language_model.')}' is missing"):
            from_published(document, fewer)
        with pytest.raises(pal.InputError, match=r"tensor '.*' has shape"):
            from_published(document, {**tensors, name: tensors[name].new_zeros(3, 5, 7)})
    with pytest.raises(pal.InputError, match="tensor 'model.layers.0.extra.weight' has no place"):
        from_published(document, {**tensors, "model.layers.0.extra.weight": torch.zeros(1)})
    config = pal.ModelConfig.preset(preset)
    ours = random_model(config).state_dict()
    with pytest.raises(pal.InputError, match="tensor 'layers.1.mlp_norm.weight' is missing"):
        to_published(config, {name: x for name, x in ours.items() if name != "layers.1.mlp_norm.weight"})
    with pytest.raises(pal.InputError, match="tensor 'extra' has no place"):
        to_published(config, {**ours, "extra": torch.zeros(1)})
    with pytest.raises(pal.InputError, match="tensor 'norm.weight' has shape"):
        to_published(config, {**ours, "norm.weight": torch.zeros(3)})


# ---------------------------------------------------------------- GPT-2 and Llama


def test_gpt2_stores_matrices_transposed_and_q_k_v_in_one() -> None:
    config = pal.ModelConfig.preset("gpt2-tiny")
    model = random_model(config)
    document, tensors = to_published(config, model.state_dict())
    x = torch.randn(5, 64)
    layer = model.layers[1]
    stored = {name: tensors[f"h.1.{name}"] for name in ("attn.c_attn.weight", "attn.c_attn.bias", "attn.c_proj.weight")}
    assert stored["attn.c_attn.weight"].shape == (64, 192)
    fused = x @ stored["attn.c_attn.weight"] + stored["attn.c_attn.bias"]
    expected = torch.cat([getattr(layer.mixer, f"{part}_proj")(x) for part in "qkv"], -1)  # type: ignore[union-attr]
    torch.testing.assert_close(fused, expected)
    assert torch.equal(stored["attn.c_proj.weight"], layer.mixer.o_proj.weight.T)  # type: ignore[union-attr]
    assert tensors["h.1.mlp.c_fc.weight"].shape == (64, 128)
    assert document["n_inner"] == 128 and document["n_positions"] == document["n_ctx"] == 1024


def test_gpt2_is_read_with_and_without_prefix_with_buffers_and_without_n_inner() -> None:
    document, bare = published("gpt2-tiny", intermediate_size=256)
    _, expected = from_published(document, bare)
    document["n_inner"] = None
    del document["model_type"]
    buffers = {"h.0.attn.bias": torch.ones(1), "h.3.attn.masked_bias": torch.ones(1)}
    named = {f"transformer.{name}": tensor for name, tensor in {**bare, **buffers}.items()}
    for tensors in ({**bare, **buffers}, named, {**named, "lm_head.weight": bare["wte.weight"].clone()}):
        config, ours = from_published(document, tensors)
        assert config.intermediate_size == 256
        assert ours.keys() == expected.keys()
        assert all(torch.equal(ours[name], expected[name]) for name in expected)


def test_a_tied_head_shares_the_embedding_wherever_it_was_stored() -> None:
    document, tensors = published("smollm2-tiny")
    embedding = tensors["model.embed_tokens.weight"]
    assert "lm_head.weight" not in tensors
    rest = {name: tensor for name, tensor in tensors.items() if name != "model.embed_tokens.weight"}
    for given in (tensors, {**rest, "lm_head.weight": embedding}, {**tensors, "lm_head.weight": embedding.clone()}):
        _, ours = from_published(document, given)
        assert ours["lm_head.weight"] is ours["embed_tokens.weight"]
        assert torch.equal(ours["lm_head.weight"], embedding)
    with pytest.raises(pal.InputError, match="differs from the embedding"):
        from_published(document, {**tensors, "lm_head.weight": embedding + 1})


def test_the_published_smollm2_config_is_its_preset() -> None:
    document = {
        **{"architectures": ["LlamaForCausalLM"], "attention_bias": False, "hidden_act": "silu", "hidden_size": 576},
        **{"initializer_range": 0.041666666666666664, "intermediate_size": 1536, "max_position_embeddings": 8192},
        **{"mlp_bias": False, "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30},
        **{"num_key_value_heads": 3, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False},
        **{"rope_scaling": None, "rope_theta": 100000, "tie_word_embeddings": True, "vocab_size": 49152},
    }
    config = pal.ModelConfig.preset("smollm2-135m")
    assert read(config, document) == config
    del document["rope_theta"]
    newer = {**document, "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}}
    assert read(config, newer) == config
    del document["num_key_value_heads"], document["rope_scaling"]
    config = config.replace(num_key_value_heads=9, rope_theta=1e4)
    assert read(config, document) == config


def read(config: pal.ModelConfig, document: dict[str, Any]) -> pal.ModelConfig:
    """What a config.json means, given the tensors of the configuration it should mean."""
    with torch.device("meta"):
        tensors = to_published(config, pal.Model(config).state_dict())[1]
    return from_published(document, tensors)[0]


@pytest.mark.parametrize(
    ("preset", "key", "value"),
    [
        ("gpt2-tiny", "activation_function", "relu"),
        ("smollm2-tiny", "hidden_act", "gelu"),
        ("smollm2-tiny", "model_type", "gemma"),
        ("smollm2-tiny", "num_attention_heads", "4"),
        ("smollm2-tiny", "hidden_size", 64.0),
        ("smollm2-tiny", "rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
        ("qwen3-next-tiny", "model_type", "qwen3_5"),
        ("qwen3-next-tiny", "decoder_sparse_step", 2),
        ("kimi-linear-tiny", "moe_router_activation_func", "softmax"),
        ("kimi-linear-tiny", "num_expert_group", 2),
        ("kimi-linear-tiny", "hidden_act", "gelu"),
    ],
)
def test_a_config_that_means_something_else_is_refused(preset: str, key: str, value: Any) -> None:
    document, tensors = published(preset)
    with pytest.raises(pal.InputError, match="^config.json: ") as caught:
        from_published({**document, key: value}, tensors)
    assert key in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_config_without_a_key_that_decides_is_refused(preset: str) -> None:
    document, tensors = published(preset)
    text = document.get("text_config", document)
    names = {"vocab_size", "rms_norm_eps", "n_layer", "hidden_act", "mla_use_nope", "linear_conv_kernel_dim", "num_experts"}
    for key in names & text.keys() - ({"hidden_act"} if "linear_attn_config" not in text else set()):
        fewer = {other: value for other, value in text.items() if other != key}
        with pytest.raises(pal.InputError, match=f"config.json: field '{key}' is missing"):
            from_published(fewer, tensors)


# ---------------------------------------------------------------- Qwen3-Next


def test_qwen3_next_groups_rows_by_key_head() -> None:
    """The published rows, counted out head by head as the layout describes them."""
    config = pal.ModelConfig.preset("qwen3-next-tiny")  # H 2, HV 4, K 16, V 24
    model = random_model(config)
    _, tensors = to_published(config, model.state_dict())
    there, here = "model.layers.0.linear_attn.", model.layers[0].mixer
    rows, gates, fused = [], [], tensors[f"{there}in_proj_qkvz.weight"]
    for head in range(2):
        keys, values = slice(head * 16, head * 16 + 16), slice(head * 48, head * 48 + 48)
        rows += [here.q_proj.weight[keys], here.k_proj.weight[keys]]  # type: ignore[union-attr]
        rows += [here.v_proj.weight[values], here.g_proj.weight[values]]  # type: ignore[union-attr]
        pair = slice(head * 2, head * 2 + 2)
        gates += [here.b_proj.weight[pair], here.a_proj.weight[pair]]  # type: ignore[union-attr]
    assert torch.equal(fused, torch.cat(rows))
    assert torch.equal(tensors[f"{there}in_proj_ba.weight"], torch.cat(gates))
    taps = torch.cat([here.q_conv1d.weight, here.k_conv1d.weight, here.v_conv1d.weight])  # type: ignore[union-attr]
    assert torch.equal(tensors[f"{there}conv1d.weight"], taps.unsqueeze(1))
    assert torch.equal(tensors[f"{there}norm.weight"], here.o_norm.weight)  # type: ignore[union-attr]
    attention, rows = model.layers[3].mixer, []
    for head in range(4):
        part = slice(head * 16, head * 16 + 16)
        rows += [attention.q_proj.weight[part], attention.g_proj.weight[part]]  # type: ignore[union-attr]
    assert torch.equal(tensors["model.layers.3.self_attn.q_proj.weight"], torch.cat(rows))
    assert torch.equal(tensors["model.layers.3.self_attn.q_norm.weight"], attention.q_norm.weight - 1)  # type: ignore[union-attr]
    assert tensors["model.layers.2.mlp.shared_expert.up_proj.weight"].shape == (32, 64)
    assert tensors["model.layers.2.mlp.experts.7.down_proj.weight"].shape == (64, 32)


def test_zero_centred_norms_do_not_lose_small_weights_in_bfloat16() -> None:
    document, tensors = published("qwen3-next-tiny")
    offset = torch.full((64,), 1e-3, dtype=torch.bfloat16)
    _, ours = from_published(document, {**tensors, "model.norm.weight": offset})
    assert torch.equal(ours["norm.weight"], 1 + offset.float())


def test_qwen3_next_layer_types_or_an_interval_and_no_selection_bias() -> None:
    document, tensors = published("qwen3-next-tiny")
    del document["layer_types"]
    assert document.pop("full_attention_interval") == 4
    assert "full_attention_interval" not in published("qwen3-next-tiny", mixers=("attention", *["gated_deltanet"] * 3))[0]
    extra = {"mtp.layers.0.mlp.gate.weight": torch.zeros(1)}
    assert from_published({**document, "full_attention_interval": 4}, {**tensors, **extra})[0].mixers[3] == "attention"
    with pytest.raises(pal.InputError, match="is missing"):
        from_published({**document, "full_attention_interval": 2}, tensors)
    config = pal.ModelConfig.preset("qwen3-next-tiny")
    state = random_model(config).state_dict()
    state["layers.0.mlp.gate.e_score_correction_bias"] += 1
    with pytest.raises(pal.InputError, match="e_score_correction_bias"):
        to_published(config, state)


# ---------------------------------------------------------------- Kimi Linear and Kimi K3


def kimi_linear_48b() -> dict[str, Any]:
    full = [4, 8, 12, 16, 20, 24, 27]
    return {
        **{"architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "vocab_size": 163840},
        **{"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 27, "num_attention_heads": 32},
        **{"num_key_value_heads": 32, "head_dim": 72, "hidden_act": "silu", "rms_norm_eps": 1e-5},
        **{"initializer_range": 0.02, "rope_theta": 10000.0, "rope_scaling": None, "model_max_length": 1048576},
        **{"dtype": "bfloat16", "num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1},
        **{"moe_intermediate_size": 1024, "first_k_dense_replace": 1, "moe_layer_freq": 1, "moe_renormalize": True},
        **{"moe_router_activation_func": "sigmoid", "routed_scaling_factor": 2.446, "use_grouped_topk": True},
        **{"num_expert_group": 1, "topk_group": 1, "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128},
        **{"qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_nope": True, "num_nextn_predict_layers": 0},
        "tie_word_embeddings": False,
        "linear_attn_config": {
            **{"full_attn_layers": full, "kda_layers": [i for i in range(1, 28) if i not in full]},
            **{"num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4},
        },
    }


def kimi_k3() -> dict[str, Any]:
    full = [*range(4, 93, 4), 93]
    text = {
        **{"architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "dtype": "bfloat16"},
        **{"vocab_size": 163840, "hidden_size": 7168, "intermediate_size": 33792, "num_hidden_layers": 93},
        **{"num_attention_heads": 96, "num_key_value_heads": 96, "hidden_act": "situ", "activation_situ_beta": 4.0},
        **{"activation_situ_linear_beta": 25.0, "rms_norm_eps": 1e-5, "initializer_range": 0.02},
        **{"max_position_embeddings": 1048576, "tie_word_embeddings": False, "q_lora_rank": 1536, "kv_lora_rank": 512},
        **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_nope": True},
        **{"mla_use_output_gate": True, "num_experts": 896, "num_experts_per_token": 16, "num_shared_experts": 2},
        **{"moe_intermediate_size": 3072, "routed_expert_hidden_size": 3584, "latent_moe_use_norm": True},
        **{"first_k_dense_replace": 1, "moe_layer_freq": 1, "moe_router_activation_func": "sigmoid"},
        **{"moe_renormalize": True, "routed_scaling_factor": 1.0, "use_grouped_topk": True, "num_expert_group": 1},
        **{"topk_group": 1, "topk_method": "noaux_tc", "attn_res_block_size": 12, "num_nextn_predict_layers": 0},
        "linear_attn_config": {
            **{"full_attn_layers": full, "kda_layers": [i for i in range(1, 94) if i not in full], "num_heads": 96},
            **{"head_dim": 128, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0, "use_full_rank_gate": True},
        },
    }
    return {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "text_config": text}


def test_the_published_kimi_linear_config_is_its_preset() -> None:
    config = pal.ModelConfig.preset("kimi-linear-48b", num_experts=8)
    assert read(config, {**kimi_linear_48b(), "num_experts": 8}) == config
    with torch.device("meta"):
        document, tensors = to_published(config, pal.Model(config).state_dict())
    assert tensors["model.layers.0.self_attn.A_log"].shape == (1, 1, 32, 1)
    ours, theirs = document["linear_attn_config"], kimi_linear_48b()["linear_attn_config"]
    assert ours == theirs
    different = {key for key, value in kimi_linear_48b().items() if document.get(key) != value}
    assert different == {"dtype", "num_experts"}


def k3_inventory() -> dict[str, tuple[list[int], str]]:
    """The text part of the published table: name, shape, and F32 or BF16 (experts before quantisation)."""
    bf16: dict[str, list[int]] = {"lm_head.weight": [163840, 7168]}
    f32: dict[str, list[int]] = {}
    model = {"embed_tokens.weight": [163840, 7168], "norm.weight": [7168]}
    model |= {"output_attn_res_norm.weight": [7168], "output_attn_res_proj.weight": [1, 7168]}
    bf16 |= {f"model.{name}": shape for name, shape in model.items()}
    for i in range(93):
        at = f"model.layers.{i}."
        bf16 |= {f"{at}{name}.weight": [7168] for name in ("input_layernorm", "post_attention_layernorm")}
        for site in ("self_attention_res", "mlp_res"):
            bf16 |= {f"{at}{site}_norm.weight": [7168], f"{at}{site}_proj.weight": [1, 7168]}
        attn = f"{at}self_attn."
        if i % 4 == 3 or i == 92:
            bf16 |= {f"{attn}q_a_proj.weight": [1536, 7168], f"{attn}q_a_layernorm.weight": [1536]}
            bf16 |= {f"{attn}q_b_proj.weight": [18432, 1536], f"{attn}kv_a_proj_with_mqa.weight": [576, 7168]}
            bf16 |= {f"{attn}kv_a_layernorm.weight": [512], f"{attn}kv_b_proj.weight": [24576, 512]}
        else:
            for part in "qkv":
                bf16[f"{attn}{part}_proj.weight"] = [12288, 7168]
                f32[f"{attn}{part}_conv1d.weight"] = [12288, 1, 4]
            bf16 |= {f"{attn}f_a_proj.weight": [128, 7168], f"{attn}f_b_proj.weight": [12288, 128]}
            bf16[f"{attn}b_proj.weight"] = [96, 7168]
            f32 |= {f"{attn}A_log": [128], f"{attn}dt_bias": [12288], f"{attn}o_norm.weight": [128]}
        bf16 |= {f"{attn}g_proj.weight": [12288, 7168], f"{attn}o_proj.weight": [7168, 12288]}
        moe = f"{at}block_sparse_moe."
        mlp, width = (f"{at}mlp.", 33792) if i == 0 else (f"{moe}shared_experts.", 6144)
        bf16 |= {f"{mlp}gate_proj.weight": [width, 7168], f"{mlp}up_proj.weight": [width, 7168]}
        bf16[f"{mlp}down_proj.weight"] = [7168, width]
        if i > 0:
            f32[f"{moe}gate.e_score_correction_bias"] = [896]
            bf16 |= {f"{moe}gate.weight": [896, 7168], f"{moe}routed_expert_down_proj.weight": [3584, 7168]}
            bf16 |= {f"{moe}routed_expert_norm.weight": [3584], f"{moe}routed_expert_up_proj.weight": [7168, 3584]}
            for e in range(896):
                bf16 |= {f"{moe}experts.{e}.{w}.weight": [3072, 3584] for w in ("w1", "w3")}
                bf16[f"{moe}experts.{e}.w2.weight"] = [3584, 3072]
    both = [(name, (shape, "bfloat16")) for name, shape in bf16.items()]
    both += [(name, (shape, "float32")) for name, shape in f32.items()]
    return {f"language_model.{name}": entry for name, entry in both}


@pytest.mark.slow
def test_the_published_kimi_k3_inventory() -> None:
    config = pal.ModelConfig.preset("kimi-k3")
    with torch.device("meta"):
        model = pal.Model(config).to(torch.bfloat16)
    document, tensors = to_published(config, model.state_dict())
    wanted = k3_inventory()
    assert tensors.keys() == wanted.keys()
    for name, (shape, dtype) in wanted.items():
        assert (list(tensors[name].shape), str(tensors[name].dtype)) == (shape, f"torch.{dtype}"), name
    experts = [name for name in tensors if ".block_sparse_moe.experts." in name]
    assert len(experts) == 92 * 896 * 3
    assert len(tensors) - len(experts) == 2455 + 5
    # Published: 1,560,860,324,864 bytes, of them 1,446,456,066,048 of 4-bit experts, the vision tower and the projector.
    trunk = sum(x.numel() * x.element_size() for name, x in tensors.items() if ".block_sparse_moe.experts." not in name)
    assert trunk == 1_560_860_324_864 - 1_446_456_066_048 - 2 * (401_214_464 + 46_144_512)
    assert document["text_config"]["linear_attn_config"] == kimi_k3()["text_config"]["linear_attn_config"]
    stated = kimi_k3()["text_config"]
    assert {key for key, value in stated.items() if document["text_config"].get(key) != value} <= {"topk_method"}


@pytest.mark.slow
def test_the_published_kimi_k3_config_is_its_preset() -> None:
    """With fewer experts: stacking a quarter of a million of them, even without memory, takes long."""
    config = pal.ModelConfig.preset("kimi-k3", num_experts=16)
    with torch.device("meta"):
        model = pal.Model(config)
        tensors = to_published(config, model.state_dict())[1]
    document = kimi_k3()
    document["text_config"]["num_experts"] = 16
    vision = {"vision_tower.patch_embed.proj.weight": torch.zeros(1), "mm_projector.proj.0.weight": torch.zeros(1)}
    back, ours = from_published(document, {**tensors, **vision})
    assert back == config
    assert {name: tensor.shape for name, tensor in ours.items()} == {n: x.shape for n, x in model.state_dict().items()}


def test_layer_lists_are_one_based_and_name_every_layer_once() -> None:
    document, tensors = published("kimi-linear-tiny")
    lists = document["linear_attn_config"]
    assert (lists["kda_layers"], lists["full_attn_layers"]) == ([1, 2, 3], [4, 5])
    for kda, full in ([0, 1, 2], [3, 4]), ([1, 2, 3], [4]), ([1, 2, 3, 4], [4, 5]), ([1, 2, 3], [4, 5, 6]):
        wrong = {**lists, "kda_layers": kda, "full_attn_layers": full}
        with pytest.raises(pal.InputError, match=r"config\.json: kda_layers and full_attn_layers"):
            from_published({**document, "linear_attn_config": wrong}, tensors)


def test_decay_rates_are_padded_and_only_padding_is_dropped() -> None:
    document, tensors = published("kimi-k3-tiny")
    name = "language_model.model.layers.0.self_attn.A_log"
    assert tensors[name].shape == (128,) and not tensors[name][4:].any()
    bare = {**tensors, name: tensors[name][:4].clone()}
    assert torch.equal(from_published(document, bare)[1]["layers.0.mixer.A_log"], tensors[name][:4])
    with pytest.raises(pal.InputError, match="A_log"):
        from_published(document, {**tensors, name: torch.ones(128)})
    with pytest.raises(pal.InputError, match="A_log.*shape"):
        from_published(document, {**tensors, name: torch.ones(3)})


@pytest.mark.parametrize("preset", ["kimi-linear-tiny", "kimi-k3-tiny", "qwen3-next-tiny"])
def test_convolution_taps_of_either_rank(preset: str) -> None:
    document, tensors = published(preset)
    flat = {name: x.squeeze(1) if "conv1d" in name else x for name, x in tensors.items()}
    assert sum(x.dim() == 3 for x in tensors.values()) >= 3 and not any(x.dim() == 3 for x in flat.values())
    _, expected = from_published(document, tensors)
    _, ours = from_published(document, flat)
    assert all(torch.equal(ours[name], tensor) for name, tensor in expected.items())


# ---------------------------------------------------------------- flash-linear-attention


def test_fla_gated_deltanet_is_read() -> None:
    """Written as Qwen3-Next elsewhere, so its tensors are named here one by one; value heads outnumber key heads."""
    config = pal.ModelConfig.preset("gated-deltanet-tiny", num_hidden_layers=1, tie_word_embeddings=False)
    model = random_model(config)
    document = {
        **{"model_type": "gated_deltanet", "attn_mode": "chunk", "hidden_size": 64, "expand_v": 1.5, "use_gate": True},
        **{"use_short_conv": True, "allow_neg_eigval": False, "conv_size": 4, "head_dim": 16, "num_heads": 2},
        **{"num_v_heads": 4, "max_position_embeddings": 2048, "hidden_ratio": 4, "intermediate_size": None},
        **{"hidden_act": "swish", "num_hidden_layers": 1, "norm_eps": 1e-5, "attn": None, "use_cache": True},
        **{"initializer_range": 0.02, "fuse_norm": True, "fuse_swiglu": True, "fuse_cross_entropy": True},
        **{"fuse_linear_cross_entropy": False, "use_l2warp": False, "vocab_size": 257, "attnres_block_size": None},
        **{"output_gate_activation": "swish", "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2},
    }
    document["intermediate_size"] = 128
    theirs = {"embed_tokens.weight": "model.embeddings.weight", "norm.weight": "model.norm.weight"}
    theirs |= {"lm_head.weight": "lm_head.weight"}
    parts = "q_proj.weight k_proj.weight v_proj.weight a_proj.weight b_proj.weight g_proj.weight o_proj.weight A_log dt_bias"
    parts += " q_conv1d.weight k_conv1d.weight v_conv1d.weight o_norm.weight"
    theirs |= {f"layers.0.mixer.{part}": f"model.layers.0.attn.{part}" for part in parts.split()}
    theirs |= {f"layers.0.mlp.{part}_proj.weight": f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
    theirs |= {f"layers.0.{part}_norm.weight": f"model.layers.0.{mine}_norm.weight" for part, mine in (("mlp", "mlp"),)}
    theirs["layers.0.mixer_norm.weight"] = "model.layers.0.attn_norm.weight"
    ours = model.state_dict()
    assert theirs.keys() == ours.keys()
    tensors = {theirs[name]: x.unsqueeze(1) if "conv1d" in name else x for name, x in ours.items()}
    back, found = from_published(document, tensors)
    assert back == config
    assert all(torch.equal(found[name], tensor) for name, tensor in ours.items())
    wide, _ = read_config({**document, "hidden_size": 2048, "intermediate_size": None})
    assert wide["intermediate_size"] == 5632  # 2/3 of four times the width, up to a multiple of 256
    for key, value in (("attn", {"layers": [1]}), ("attnres_block_size", 4), ("use_short_conv", False), ("hidden_act", "relu")):
        with pytest.raises(pal.InputError, match=f"config.json: .*{key}"):
            from_published({**document, key: value}, tensors)


def read_config(document: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The fields that a config.json of fla stands for, and the family's name."""
    family = convert._recognise(document)
    return family.read(document), family.name


@pytest.mark.parametrize(
    ("form", "key", "value"),
    [
        ("linear_attn", "feature_map", "dpfp"),
        ("linear_attn", "num_kv_heads", 1),
        ("linear_attn", "norm_q", True),
        ("delta_net", "use_gate", True),
        ("delta_net", "qk_norm", "sum"),
        ("kda", "output_gate", "none"),
        ("kda", "model_type", "rwkv7"),
    ],
)
def test_fla_settings_that_mean_something_else_are_refused(form: str, key: str, value: Any) -> None:
    preset, fields = FLA[form]
    document, tensors = published(preset, **fields)
    with pytest.raises(pal.InputError, match="^config.json: ") as caught:
        from_published({**document, key: value}, tensors)
    assert key in str(caught.value)


@pytest.mark.parametrize("preset", ["linear-attention-tiny", "deltanet-tiny", "kda-tiny"])
def test_models_without_a_published_layout_are_refused(preset: str) -> None:
    with pytest.raises(pal.InputError, match="^model: "):
        published(preset)
    with pytest.raises(pal.InputError, match="config.json: "):
        from_published({"model_type": "bert"}, {})
