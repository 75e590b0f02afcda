"""What is planned equals what is built: every parameter by name, every byte of state by kind, checkpoint bytes by dtype."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import palimpsest as pal
from palimpsest.convert import Layout
from palimpsest.convert.inventory import inventory
from palimpsest.convert.kimi import Kimi
from palimpsest.plan import counts, memory
from palimpsest.plan.counts import VISION_PARAMETERS
from tests.conftest import TINY, make_ids, make_model, published

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
# Settings that no preset has.
UNUSUAL: dict[str, dict[str, Any]] = {
    "kda-tiny": {"linear_output_gate_bias": True, "linear_conv_kernel_dim": 0},
    "linear-attention-tiny": {"linear_feature_map": "product", "linear_output_norm": True},
    "gated-deltanet-tiny": {"linear_output_gate": "none", "tie_word_embeddings": False},
    "smollm2-tiny": {"use_bias": True, "attention_output_gate": True, "norm": "layer"},
    "kimi-k3-tiny": {"residual": "full_attention", "latent_moe_use_norm": False, "num_shared_experts": 0},
}


def meta(config: pal.ModelConfig) -> pal.Model:
    with torch.device("meta"):
        return pal.Model(config)


@pytest.mark.parametrize("name", pal.presets())
def test_every_parameter_of_every_preset(name: str) -> None:
    model = published(name)
    found = {row.name: row.shape for row in counts.weights(model.config)}
    assert found == {place: tuple(parameter.shape) for place, parameter in model.named_parameters()}
    numbers = counts.parameters(model.config)
    assert numbers["total"] == model.num_parameters() and numbers["active"] == model.num_parameters(active=True)
    assert sum(part["total"] for part in numbers["components"].values()) == numbers["total"]


@pytest.mark.parametrize(("name", "fields"), UNUSUAL.items(), ids=list(UNUSUAL))
def test_every_parameter_of_unusual_models(name: str, fields: dict[str, Any]) -> None:
    model = meta(pal.ModelConfig.preset(name, **fields))
    found = {row.name: row.shape for row in counts.weights(model.config)}
    assert found == {place: tuple(parameter.shape) for place, parameter in model.named_parameters()}
    assert counts.parameters(model.config)["active"] == model.num_parameters(active=True)


def test_kimi_k3_to_the_unit() -> None:
    """The accounting of the K3 specification, section 9."""
    numbers = counts.parameters(pal.ModelConfig.preset("kimi-k3"))
    rows = {name: (part["per_layer"], part["layers"], part["total"]) for name, part in numbers["components"].items()}
    assert rows == {
        "kda": (443_740_384, 69, 30_618_086_496),
        "mla": (232_196_096, 24, 5_572_706_304),
        "dense mlp": (726_663_168, 1, 726_663_168),
        "router": (6_423_424, 92, 590_955_008),
        "latent maps": (51_383_808, 92, 4_727_310_336),
        "shared experts": (132_120_576, 92, 12_155_092_992),
        "routed experts": (29_595_009_024, 92, 2_722_740_830_208),
        "layer vectors": (43_008, 93, 3_999_744),
        "embedding": (1_174_405_120, 1, 1_174_405_120),
        "head": (1_174_405_120, 1, 1_174_405_120),
        "final vectors": (21_504, 1, 21_504),
    }
    assert numbers["total"] == 2_779_484_476_000
    assert numbers["active"] == 104_189_612_640
    assert numbers["active_with_embedding"] == 105_364_017_760
    assert numbers["active_without_head"] == 103_015_207_520


def test_kimi_linear_and_gpt2_to_the_unit() -> None:
    numbers = counts.parameters(pal.ModelConfig.preset("kimi-linear-48b"))
    parts = numbers["components"]
    assert (parts["kda"]["per_layer"], parts["mla"]["per_layer"]) == (39_514_272, 29_114_880)
    moe = sum(parts[name]["per_layer"] for name in ("router", "shared experts", "routed experts"))
    assert (moe, numbers["total"], numbers["active"]) == (1_819_607_296, 49_122_681_728, 3_106_972_544)
    assert numbers["active_without_head"] == 2_729_485_184
    tied = counts.parameters(pal.ModelConfig.preset("gpt2-124m"))
    assert tied["total"] == 124_439_808 == tied["active_with_embedding"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", TINY)
def test_weight_bytes_are_those_of_the_model(name: str, dtype: str) -> None:
    model = pal.Model(pal.ModelConfig.preset(name)).to(DTYPES[dtype])
    live = sum(p.numel() * p.element_size() for p in model.parameters())
    assert counts.weight_bytes(model.config, dtype) == live


def test_packed_experts() -> None:
    model = pal.Model(pal.ModelConfig.preset("kimi-k3-tiny")).to(torch.bfloat16)
    model.pack_experts()
    live = sum(p.numel() * p.element_size() for p in model.parameters())
    assert counts.weight_bytes(model.config, "mxfp4") == live


@pytest.mark.parametrize("name", ["gpt2-124m", "smollm2-135m", "kimi-linear-48b", "kimi-k3-124m", "kimi-k3"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_checkpoint_bytes_are_those_of_the_published_layout(name: str, dtype: str) -> None:
    layout = Layout.of(pal.ModelConfig.preset(name))
    layout.model.to(DTYPES[dtype])
    tensors = itertools.chain.from_iterable(
        entry.dump(*(layout.model.get_parameter(ours) for ours in entry.ours)) for entry in layout.entries
    )
    text = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    vision = VISION_PARAMETERS * counts.SIZES[dtype] if name == "kimi-k3" else 0
    assert counts.checkpoint_bytes(layout.config, dtype) == text + vision


def test_kimi_k3_as_published() -> None:
    config = pal.ModelConfig.preset("kimi-k3")
    assert counts.checkpoint_bytes(config, "mxfp4") == 1_560_860_324_864
    document = {**Kimi().wrap(config, {**Kimi().write(config), **Kimi.quantization, "dtype": "bfloat16"})}
    sizes = {"F32": 4, "BF16": 2, "U8": 1}
    text = sum(sizes[row.dtype] * torch.Size(row.shape).numel() for row in inventory(document).values())
    assert text + 2 * VISION_PARAMETERS == 1_560_860_324_864


# ---------------------------------------------------------------------------------------------------------------------- states


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("batch", "context"), [(1, 1), (2, 33), (3, 100)])
@pytest.mark.parametrize("name", TINY)
def test_state_bytes_are_those_of_live_states(name: str, batch: int, context: int, dtype: str) -> None:
    model = make_model(name).to(DTYPES[dtype])
    with torch.no_grad():
        state = model(make_ids(model, batch, context)).state
    planned = memory.state_bytes(model.config, context, batch, dtype)
    assert planned == {
        **{kind: state.num_bytes(kind) for kind in ("kv", "recurrent", "conv")},  # type: ignore[arg-type]
        "total": state.num_bytes(),
    }
    assert memory.kv_bytes_per_token(model.config, dtype) == state.bytes_per_token()


@pytest.mark.parametrize(("name", "fields"), UNUSUAL.items(), ids=list(UNUSUAL))
def test_state_bytes_of_unusual_models(name: str, fields: dict[str, Any]) -> None:
    model = pal.Model(pal.ModelConfig.preset(name, **fields))
    with torch.no_grad():
        state = model(make_ids(model, 2, 40)).state
    assert memory.state_bytes(model.config, 40, 2, "f32")["total"] == state.num_bytes()


def test_published_small_hybrid() -> None:
    """R116: 3 KDA and 1 MLA layers, H 2, K = V = 16, W 4, latent 32, no rope, fp32, 100 tokens: 22,400 bytes."""
    config = pal.ModelConfig.preset(
        "kimi-linear-tiny",
        num_hidden_layers=4,
        mixers=("kda", "kda", "kda", "mla"),
        mlps=("swiglu",) * 4,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        qk_rope_head_dim=0,
    )
    assert memory.state_bytes(config, 100, 1, "f32") == {"kv": 12_800, "recurrent": 6_144, "conv": 3_456, "total": 22_400}


def test_published_states_and_crossovers() -> None:
    k3, linear = (pal.ModelConfig.preset(name) for name in ("kimi-k3", "kimi-linear-48b"))
    assert memory.kv_bytes_per_token(k3, "bf16") == 27_648
    assert memory.recurrent_bytes(k3) == 434_110_464
    assert memory.recurrent_bytes(k3) + memory.conv_bytes(k3, "bf16") == 449_372_160
    crossings = [memory.crossover_tokens(config, conv=conv) for config in (linear, k3) for conv in (False, True)]
    assert [int(tokens or 0) for tokens in crossings] == [1_820, 1_884, 5_461, 5_653]
    assert memory.crossover_tokens(pal.ModelConfig.preset("kda-124m")) is None


def test_a_crossover_is_where_the_bytes_cross() -> None:
    config = pal.ModelConfig.preset("kimi-linear-48b")
    other = memory.all_attention(config)
    at = memory.crossover_tokens(config, conv=True)
    assert other is not None and at is not None
    for context, more in ((int(at), True), (int(at) + 1, False)):
        sizes = [memory.state_bytes(model, context, 1, "bf16")["total"] for model in (config, other)]
        assert (sizes[0] > sizes[1]) is more
