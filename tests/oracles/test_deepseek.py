"""MLA with rotation and the biased sigmoid router as DeepSeek-V3 has them in transformers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

import palimpsest as pal
from palimpsest import mixers
from palimpsest.moe import route
from palimpsest.state import Segments
from tests.oracles.agreement import note

SIZES: dict[str, Any] = {"hidden_size": 24, "num_attention_heads": 3, "kv_lora_rank": 8, "q_lora_rank": 10, "v_head_dim": 6}
SIZES |= {"qk_nope_head_dim": 5, "qk_rope_head_dim": 4}


def test_mla_with_rotation() -> None:
    """Whole, and decoding in the absorbed form; DeepSeek turns neighbouring channels, we turn halves: rows are reordered."""
    torch.manual_seed(0)
    config = pal.ModelConfig.from_dict(
        {"vocab_size": 7, "num_hidden_layers": 1, "mixers": ["mla"], "mlps": ["swiglu"], "mla_use_nope": False}
        | {**SIZES, "rope_theta": 100.0}
    )
    ours: Any = mixers.build("mla", config)
    settings: Any = {**SIZES, "num_key_value_heads": 3, "rope_interleave": True, "attn_implementation": "eager"}
    theirs_config = DeepseekV3Config(rope_parameters={"rope_type": "default", "rope_theta": 100.0}, **settings)
    theirs: Any = deepseek.DeepseekV3Attention(theirs_config, layer_idx=0)
    with torch.no_grad():
        for name, weight in ours.named_parameters():
            weight.normal_(0, 0.4).add_(1.0 if "norm" in name else 0.0)
            theirs.get_parameter(name).copy_(weight)
        turn = torch.tensor([0, 2, 1, 3])  # their channels (0,1), (2,3) are our (0,2), (1,3)
        theirs.kv_a_proj_with_mqa.weight[8:] = ours.kv_a_proj_with_mqa.weight[8:][turn]
        up = ours.q_b_proj.weight.view(3, 9, 10).clone()
        up[:, 5:] = up[:, 5:][:, turn]
        theirs.q_b_proj.weight.copy_(up.flatten(0, 1))
        x = torch.randn(2, 11, 24)
        rotary: Any = deepseek.DeepseekV3RotaryEmbedding(theirs_config)
        position = torch.arange(11).unsqueeze(0)
        mask = torch.full((11, 11), float("-inf")).triu(1)[None, None]
        expected = theirs(x, rotary(x, position), attention_mask=mask)[0]
        device = torch.device("cpu")
        whole, _ = ours(x, ours.new_state(2, x.dtype, device), Segments((0, 0), (11, 11), None, device))
        first, state = ours(x[:, :7], ours.new_state(2, x.dtype, device), Segments((0, 0), (7, 7), None, device))
        steps = [first]
        for t in range(7, 11):
            y, state = ours(x[:, t : t + 1], state, Segments((t, t), (1, 1), None, device))
            steps.append(y)
    assert expected.std() > 0.1
    for found in (whole, torch.cat(steps, 1)):
        error = float((found - expected).abs().max())
        note("transformers", "DeepSeek-V3 attention with rotation", "output", error, "absolute")
        assert error < 1e-5


def test_router() -> None:
    settings: Any = {"n_routed_experts": 12, "num_experts_per_tok": 3, "n_group": 1, "topk_group": 1, "hidden_size": 16}
    theirs: Any = deepseek.DeepseekV3TopkRouter(DeepseekV3Config(routed_scaling_factor=2.5, norm_topk_prob=True, **settings))
    with torch.no_grad():
        theirs.weight.normal_(0, 1)
        theirs.e_score_correction_bias.normal_(0, 0.3)
        logits, wanted, wanted_experts = theirs(torch.randn(40, 16))
        experts, weights = route(logits, theirs.e_score_correction_bias, 3, renormalize=True, factor=2.5)
    for row in range(40):
        ours = dict(zip(experts[row].tolist(), weights[row].tolist(), strict=True))
        other = dict(zip(wanted_experts[row].tolist(), wanted[row].tolist(), strict=True))
        assert ours.keys() == other.keys()
        error = max(abs(ours[expert] - other[expert]) for expert in ours)
        note("transformers", "DeepSeek-V3 router", "output", error, "absolute")
        assert error < 1e-6
