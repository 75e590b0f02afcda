"""Every preset: the published parameter counts, component by component, and shapes that fit together."""

from __future__ import annotations

import collections

import pytest
import torch

import palimpsest as pal
from palimpsest.moe import Experts
from tests.conftest import TINY, blocks_of, published

NAMES = [
    "gpt2-124m",
    "gpt2-tiny",
    "smollm2-135m",
    "smollm2-tiny",
    "linear-attention-124m",
    "linear-attention-tiny",
    "deltanet-124m",
    "deltanet-tiny",
    "gated-deltanet-124m",
    "gated-deltanet-tiny",
    "kda-124m",
    "kda-tiny",
    "kda-340m",
    "qwen3-next-tiny",
    "kimi-linear-48b",
    "kimi-linear-65m",
    "kimi-linear-tiny",
    "hybrid-latent-moe-tiny",
    "kimi-k3",
    "kimi-k3-124m",
    "kimi-k3-tiny",
]
# Totals that are printed in papers, reports or model cards, and the active ones where there are experts.
PUBLISHED = {
    "gpt2-124m": (124_439_808, None),
    "smollm2-135m": (134_515_008, None),
    "kimi-linear-48b": (49_122_681_728, 3_106_972_544),
    "kimi-k3": (2_779_484_476_000, 104_189_612_640),
}


def components(model: pal.Model) -> dict[str, int]:
    """Parameters of each part of a model, summed over layers."""
    counts: collections.Counter[str] = collections.Counter()
    for name, p in model.named_parameters():
        parts = name.split(".")
        if parts[0] != "layers":
            counts[name] += p.numel()
            continue
        index, part = int(parts[1]), parts[2]
        if part == "mixer":
            part = model.config.mixers[index]
        elif part == "mlp":
            inner = parts[3] if model.config.mlps[index] == "moe" else "dense"
            part = "latent" if inner.startswith("routed_expert") else inner
        else:
            part = "vectors"
        counts[part] += p.numel()
    return dict(counts)


def numel(model: pal.Model, layer: int, *names: str) -> list[int]:
    found = dict(blocks_of(model)[layer].named_parameters())
    return [found[name].numel() for name in names]


@pytest.mark.parametrize("preset", PUBLISHED)
def test_published_counts(preset: str) -> None:
    total, active = PUBLISHED[preset]
    model = published(preset)
    assert model.num_parameters() == total
    if active is not None:
        assert model.num_parameters(active=True) == active


def test_components_of_k3() -> None:
    """The accounting of the released checkpoint, line by line."""
    model = published("kimi-k3")
    found = components(model)
    assert found == {
        "kda": 30_618_086_496,
        "mla": 5_572_706_304,
        "dense": 726_663_168,
        "gate": 590_955_008,
        "latent": 4_727_310_336,
        "shared_experts": 12_155_092_992,
        "experts": 2_722_740_830_208,
        "vectors": 3_999_744,
        "embed_tokens.weight": 1_174_405_120,
        "lm_head.weight": 1_174_405_120,
        "norm.weight": 7168,
        "output_residual.norm": 7168,
        "output_residual.proj": 7168,
    }
    kda = {
        "q_proj.weight": 88_080_384,
        "k_proj.weight": 88_080_384,
        "v_proj.weight": 88_080_384,
        "q_conv1d.weight": 49_152,
        "k_conv1d.weight": 49_152,
        "v_conv1d.weight": 49_152,
        "f_a_proj.weight": 917_504,
        "f_b_proj.weight": 1_572_864,
        "b_proj.weight": 688_128,
        "A_log": 96,
        "dt_bias": 12_288,
        "g_proj.weight": 88_080_384,
        "o_norm.weight": 128,
        "o_proj.weight": 88_080_384,
    }
    assert {name: p.numel() for name, p in blocks_of(model)[0].mixer.named_parameters()} == kda
    assert sum(kda.values()) == 443_740_384
    mla = {
        "q_a_proj.weight": 11_010_048,
        "q_a_layernorm.weight": 1_536,
        "q_b_proj.weight": 28_311_552,
        "kv_a_proj_with_mqa.weight": 4_128_768,
        "kv_a_layernorm.weight": 512,
        "kv_b_proj.weight": 12_582_912,
        "g_proj.weight": 88_080_384,
        "o_proj.weight": 88_080_384,
    }
    assert {name: p.numel() for name, p in blocks_of(model)[3].mixer.named_parameters()} == mla
    assert sum(mla.values()) == 232_196_096
    assert sum(p.numel() for p in blocks_of(model)[1].mlp.parameters()) == 29_784_936_832
    assert sum(numel(model, 1, "mlp.gate.weight", "mlp.gate.e_score_correction_bias")) == 6_423_424
    # Active tokens by the two other conventions: with the embedding, and without both tables.
    active, table = model.num_parameters(active=True), 1_174_405_120
    assert (active + table, active - table) == (105_364_017_760, 103_015_207_520)


def test_components_of_kimi_linear() -> None:
    model = published("kimi-linear-48b")
    found = components(model)
    assert found["kda"] == 20 * 39_514_272 and found["mla"] == 7 * 29_114_880
    moe = sum(found[part] for part in ("gate", "shared_experts", "experts"))
    assert moe == 26 * 1_819_607_296 and "latent" not in found
    assert model.num_parameters(active=True) - 163840 * 2304 == 2_729_485_184


def test_components_of_gpt2() -> None:
    model = published("gpt2-124m")
    assert sum(p.numel() for p in blocks_of(model)[0].parameters()) == 7_087_872
    found = dict(model.named_parameters())
    assert found["embed_tokens.weight"].numel() == 38_597_376 and found["embed_positions.weight"].numel() == 786_432
    assert "lm_head.weight" not in found, "tied"
    # Active: without the position table, the shared token table counted once, as the head.
    assert model.num_parameters(active=True) == 124_439_808 - 786_432


def test_active_parameters_by_hand() -> None:
    """Without token and position tables, the head once, and of the routed experts only the chosen ones."""
    for preset in TINY:
        model = pal.Model(pal.ModelConfig.preset(preset))
        config = model.config
        expected = sum(p.numel() for p in model.parameters())
        if not config.tie_word_embeddings:
            expected -= config.vocab_size * config.hidden_size
        if config.position == "learned":
            expected -= config.max_position_embeddings * config.hidden_size
        for module in model.modules():
            if isinstance(module, Experts):
                one = sum(p[0].numel() for p in module.parameters())
                expected -= (config.num_experts - config.num_experts_per_token) * one
        assert model.num_parameters(active=True) == expected


def test_schedules() -> None:
    """Attention at every fourth layer and the last one; the first MLP dense."""
    for preset, layers, full in (
        ("kimi-k3", 93, [*range(3, 92, 4), 92]),
        ("kimi-linear-48b", 27, [3, 7, 11, 15, 19, 23, 26]),
        ("kimi-linear-65m", 8, [3, 7]),
        ("kda-340m", 24, [3, 7, 11, 15, 19, 23]),
    ):
        config = pal.ModelConfig.preset(preset)
        assert [i for i, mixer in enumerate(config.mixers) if mixer == "mla"] == full and len(config.mixers) == layers
        assert {mixer for i, mixer in enumerate(config.mixers) if i not in full} == {"kda"}
    for preset, first in (("kimi-k3", "situ"), ("kimi-linear-48b", "swiglu")):
        config = pal.ModelConfig.preset(preset)
        assert config.mlps[0] == first and set(config.mlps[1:]) == {"moe"}
    assert pal.ModelConfig.preset("qwen3-next-tiny").mixers == ("gated_deltanet",) * 3 + ("attention",)


def test_names() -> None:
    assert sorted(pal.presets()) == sorted(NAMES)
    with pytest.raises(pal.InputError, match="preset 'kimi-k3-tyni' does not exist; did you mean 'kimi-k3-tiny'"):
        pal.ModelConfig.preset("kimi-k3-tyni")
    with pytest.raises(pal.InputError, match="unknown field 'hiden_size'; did you mean 'hidden_size'"):
        pal.ModelConfig.preset("kda-tiny", hiden_size=3)


@pytest.mark.parametrize("preset", NAMES)
def test_every_preset_builds(preset: str) -> None:
    """On no memory at all; sizes within 30 % of what the name says; the tiny ones really are tiny."""
    model = published(preset)
    assert all(p.device.type == "meta" for p in model.parameters())
    count = model.num_parameters()
    size = preset.rsplit("-", 1)[1]
    if size.endswith("m") and size[:-1].isdigit():
        assert 0.7 < count / (int(size[:-1]) * 1e6) < 1.3, count
    if size == "tiny":
        assert count < 700_000


def test_families_differ_in_numbers_only() -> None:
    """Between two sizes of one family only sizes change: the kinds, gates and policies are the same."""
    kinds = {
        "residual", "norm", "use_bias", "tie_word_embeddings", "position", "attention_output_gate", "qk_norm",
        "linear_output_gate", "gate_lower_bound", "allow_neg_eigval", "mla_use_nope", "mla_use_output_gate",
        "activation_situ_beta", "activation_situ_linear_beta", "moe_hidden_act", "latent_moe_use_norm", "rms_norm_eps",
        "moe_router_activation_func", "moe_renormalize", "routed_scaling_factor", "shared_expert_gate",
    }  # fmt: skip
    for family, others in {
        "gpt2-124m": ["gpt2-tiny"],
        "smollm2-135m": ["smollm2-tiny"],
        "linear-attention-124m": ["linear-attention-tiny"],
        "deltanet-124m": ["deltanet-tiny"],
        "gated-deltanet-124m": ["gated-deltanet-tiny"],
        "kda-124m": ["kda-tiny"],
        "kimi-linear-48b": ["kimi-linear-65m", "kimi-linear-tiny"],
        "kimi-k3": ["kimi-k3-124m", "kimi-k3-tiny"],
    }.items():
        large = pal.ModelConfig.preset(family)
        for name in others:
            small = pal.ModelConfig.preset(name)
            assert {k: getattr(small, k) for k in kinds} == {k: getattr(large, k) for k in kinds}, name
            assert set(small.mixers) == set(large.mixers) and set(small.mlps) == set(large.mlps)
            for optional in ("linear_output_gate_rank", "q_lora_rank", "routed_expert_hidden_size"):
                assert (getattr(small, optional) is None) == (getattr(large, optional) is None), (name, optional)


def test_another_depth() -> None:
    """With only the number of layers changed the mixers repeat and the last MLP goes on; given lists win."""
    config = pal.ModelConfig.preset("kimi-linear-tiny", num_hidden_layers=7)
    assert config.mixers == ("kda", "kda", "kda", "mla", "mla", "kda", "kda")
    assert config.mlps == ("swiglu",) + ("moe",) * 6
    config = pal.ModelConfig.preset("kimi-k3-tiny", num_hidden_layers=2)
    assert config.mixers == ("kda", "kda") and config.mlps == ("situ", "moe")
    pal.Model(config)(torch.tensor([[1, 2]]))
    config = pal.ModelConfig.preset("kda-tiny", num_hidden_layers=2, mixers=["kda", "attention"])
    assert config.mixers == ("kda", "attention")
    with pytest.raises(pal.InputError, match="mixers"):
        pal.ModelConfig.preset("kda-tiny", num_hidden_layers=2, mixers=["kda"])


def test_overrides_do_not_touch_the_preset() -> None:
    before = pal.ModelConfig.preset("kimi-k3-tiny")
    pal.ModelConfig.preset("kimi-k3-tiny", vocab_size=999, num_hidden_layers=1)
    assert pal.ModelConfig.preset("kimi-k3-tiny") == before and before.vocab_size == 257
