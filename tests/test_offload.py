"""Experts on disk give what experts in memory give, within their bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import palimpsest as pal
from palimpsest.moe import Experts
from palimpsest.offload import DiskExperts
from palimpsest.tokenizer import Tokenizer
from tests.conftest import blocks_of, make_ids, make_model

EXPERT = 3 * 32 * 64 * 4  # bytes of one of kimi-linear-tiny's experts


def layers_on_disk(model: pal.Model) -> list[DiskExperts]:
    return [block.mlp.experts for block in blocks_of(model) if isinstance(getattr(block.mlp, "experts", None), DiskExperts)]


@pytest.mark.parametrize(
    ("preset", "dtype"), [("kimi-k3-tiny", "mxfp4"), ("kimi-linear-tiny", None), ("qwen3-next-tiny", None)]
)
def test_same_numbers_and_text(tmp_path: Path, preset: str, dtype: str | None) -> None:
    source = make_model(preset)
    if preset == "qwen3-next-tiny":  # has no selection bias
        for name, weight in source.named_parameters():
            weight.data *= not name.endswith("e_score_correction_bias")
    pal.save(source, tmp_path / "model", tokenizer=Tokenizer.bytes(), dtype=dtype)
    whole, tokenizer = pal.load(tmp_path / "model")
    assert tokenizer is not None
    ids = make_ids(whole, 2, 30)
    greedy = pal.SamplingConfig(max_new_tokens=12, temperature=0.0)
    for limit in (0, 3 * EXPERT, 1 << 30):
        model, _ = pal.load(tmp_path / "model", offload="disk", cache_bytes=limit)
        experts = layers_on_disk(model)
        assert experts and not any(type(module) is Experts for module in model.modules())
        with torch.no_grad():
            found, expected = model(ids).logits, whole(ids).logits
        if dtype == "mxfp4":
            assert torch.equal(found, expected)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        texts = [pal.generate(each, tokenizer, ["To be"], greedy)[0].token_ids for each in (model, whole)]
        assert texts[0] == texts[1]
        assert (model.num_parameters(), model.num_parameters(True)) == (whole.num_parameters(), whole.num_parameters(True))
        cache = experts[0].cache
        assert cache.held <= limit and all(layer.cache is cache for layer in experts)
        assert 0 <= cache.hit_rate < 1
        if limit == 0:
            assert cache.hits == 0
        if limit == 1 << 30:
            assert cache.hits > cache.misses and cache.misses <= len(experts) * model.config.num_experts


def test_the_least_recently_used_leaves_first(tmp_path: Path) -> None:
    pal.save(make_model("kimi-linear-tiny"), tmp_path / "model")
    model, _ = pal.load(tmp_path / "model", offload="disk", cache_bytes=2 * EXPERT)
    layer = layers_on_disk(model)[0]

    def use(expert: int) -> bool:
        """Whether it was in memory."""
        before = layer.cache.hits
        layer(torch.randn(1, 64), torch.tensor([[expert]]), torch.ones(1, 1))
        return layer.cache.hits > before

    assert [use(expert) for expert in (0, 1, 0, 2, 0, 1, 2)] == [False, False, True, False, True, False, False]
    assert layer.cache.held == 2 * EXPERT and layer.cache.bytes_read == 5 * EXPERT
    assert layer.cache.hit_rate == 2 / 7


def test_damage_on_disk_is_said_when_it_is_met(tmp_path: Path) -> None:
    pal.save(make_model("kimi-k3-tiny"), tmp_path / "model", dtype="mxfp4")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    for expert in range(8):
        tensors[f"language_model.model.layers.1.block_sparse_moe.experts.{expert}.w2.weight_scale"][0, 0] = 255
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    with pytest.raises(pal.InputError, match=r"experts\.\d\.w2\.weight_scale' holds NaN"):
        pal.load(tmp_path / "model")
    model, _ = pal.load(tmp_path / "model", offload="disk")
    with pytest.raises(pal.InputError, match=r"experts\.\d\.w2\.weight_scale' holds NaN"):
        model(make_ids(model, 4, 60))


def test_such_a_model_is_not_saved(tmp_path: Path) -> None:
    pal.save(make_model("kimi-linear-tiny"), tmp_path / "model")
    model, _ = pal.load(tmp_path / "model", offload="disk")
    for name in ("copy", "copy.gguf"):
        with pytest.raises(pal.InputError, match="experts are on disk"):
            pal.save(model, tmp_path / name)
        assert not (tmp_path / name).exists()


@pytest.mark.parametrize(("offload", "published"), [("gpu", True), ("disk", False)])
def test_refused(tmp_path: Path, offload: Any, published: bool) -> None:
    model = make_model("kimi-linear-tiny", residual="sum" if published else "full_attention")
    pal.save(model, tmp_path / "model")
    with pytest.raises(pal.InputError, match=f"offload is '{offload}'; only 'disk'"):
        pal.load(tmp_path / "model", offload=offload)
