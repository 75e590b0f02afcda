"""QK-clip: the largest logit of every head is what it is said to be, and after clipping no logit exceeds the threshold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import palimpsest as pal
from palimpsest.gradients import split_documents
from palimpsest.mixers import MLA, Attention
from palimpsest.optim import make_optimizer
from palimpsest.qkclip import QKClip, largest_logits
from palimpsest.train import Trainer
from tests.conftest import make_ids, make_model

PRESETS = ["gpt2-tiny", "smollm2-tiny", "kimi-linear-tiny", "kimi-k3-tiny"]


def watched(model: pal.Model, threshold: float) -> QKClip:
    return QKClip(model, make_optimizer(model, pal.TrainConfig()), threshold)


def logits(model: pal.Model, clip: QKClip, ids: Tensor, bounds: Tensor | None = None) -> list[Tensor]:
    clip.begin()
    with torch.no_grad():
        model.loss(ids, ids, bounds)
    return [x.clone() for x in clip.largest]


def test_the_largest_logit_by_hand() -> None:
    q, k = torch.randn(2, 300, 4, 8), torch.randn(2, 303, 2, 8)
    k[1, 301] *= 100  # one behind the last that anybody in this row sees
    expected = torch.full((4,), -torch.inf)
    for row, past in enumerate((3, 1)):
        for head in range(4):
            scores = q[row, :, head] @ k[row, :, head // 2].T * 0.3
            for t in (0, 1, 150, 255, 256, 299):
                assert scores[t, : past + t + 1].max() <= largest_logits(q, k, (3, 1), 0.3)[head] + 1e-6
            seen = scores.masked_fill(torch.ones(300, 303).triu(past + 1).bool(), -torch.inf)
            expected[head] = torch.maximum(expected[head], seen.max())
    torch.testing.assert_close(largest_logits(q, k, (3, 1), 0.3), expected)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("preset", PRESETS)
def test_afterwards_no_logit_is_larger_and_small_heads_stay(preset: str, packed: bool) -> None:
    fields: dict[str, Any] = {"mla_use_nope": False} if preset == "kimi-linear-tiny" else {}
    model = make_model(preset, dtype=torch.float64, initializer_range=0.6, num_hidden_layers=4, **fields).train()
    ids, bounds = make_ids(model, 2, 24), None
    if packed:
        ids, bounds = split_documents(ids, 7)
    # One layer alone: what others make of its output would change its own logits too, were there another pass.
    clip = watched(model, 1.0)
    first = next(i for i, kind in enumerate(model.config.mixers) if kind in ("attention", "mla"))
    clip.layers = [pair for pair in clip.layers if pair[0] == f"layers.{first}.mixer"]
    before = logits(model, clip, ids, bounds)[0]
    clip.threshold = float(before.median())
    held = {name: p.detach().clone() for name, p in model.named_parameters()}
    clip.end()
    assert clip.metrics()["max_attention_logit"] == pytest.approx(float(before.max()))
    after = logits(model, clip, ids, bounds)[0]
    torch.testing.assert_close(after, before.clamp(max=clip.threshold), rtol=1e-6, atol=0)
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, held[name])}
    mixer = model.layers[first].mixer
    assert isinstance(mixer, MLA | Attention)
    queries = {"q_proj"} if hasattr(mixer, "q_proj") else {"q_b_proj"}
    maps = queries | ({"kv_b_proj"} if isinstance(mixer, MLA) else {"k_proj"})
    parts = {f"layers.{first}.mixer.{name}.{part}" for name in maps for part in ("weight", "bias")}
    assert changed == {name for name in parts if name in held}
    if isinstance(mixer, MLA):  # values are not touched
        weight = f"layers.{first}.mixer.kv_b_proj.weight"
        new, old = (x.unflatten(0, (mixer.heads, -1))[:, mixer.nope :] for x in (mixer.kv_b_proj.weight, held[weight]))
        assert torch.equal(new, old)


def test_normed_heads_and_models_without_softmax_are_left_alone() -> None:
    for model in (make_model("kda-tiny"), make_model("qwen3-next-tiny")):
        clip = watched(model.train(), 0.1)
        assert clip.layers == []
        clip.begin()
        clip.end()
        assert clip.metrics() == {}


def test_training_clips_its_float32_weights_and_says_so() -> None:
    tokens = np.random.default_rng(0).integers(0, 250, 2000)
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        model = pal.Model(pal.ModelConfig.preset("gpt2-tiny", num_hidden_layers=2, initializer_range=0.5)).to(dtype)
        config = {"steps": 2, "batch_size": 2, "context_length": 32, "warmup_steps": 0, "learning_rate": 1e-5}
        trainer = Trainer(model, pal.TrainConfig.from_dict({**config, "qk_clip": 2.0, "log_every": 1}), tokens)
        records = trainer.run()
        seen = [record["max_attention_logit"] for record in records]
        assert seen[0] > 4 and seen[1] < 0.75 * seen[0]
        assert trainer.qk_clip is not None
        for own, moved in trainer.qk_clip.pairs.values():
            assert torch.equal(own, moved.to(dtype))
    with pytest.raises(pal.InputError, match="qk_clip is -1"):
        pal.TrainConfig(qk_clip=-1.0)
