"""Our models against transformers: the same weights, carried over by `convert`, give the same numbers.

Every weight is drawn away from its initial value, scaled so that logits have a spread near 1 while the epsilons of the norms
still show, so that one wrong detail is far outside the tolerances.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention, recurrent_kimi_delta_attention
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

import palimpsest as pal
from palimpsest import checkpoint, ops
from palimpsest.cli import main
from palimpsest.convert import to_published
from palimpsest.tokenizer import Tokenizer
from tests.oracles.agreement import note

TOLERANCE = 1e-4  # absolute, float32 logits of spread near 1
IDS = torch.arange(2 * 21).view(2, 21) * 37 % 257


@torch.no_grad()
def randomise(model: pal.Model, seed: int = 0) -> None:
    torch.manual_seed(seed)
    for name, weight in model.named_parameters():
        leaf = name.split(".")[-2]
        if name.endswith("e_score_correction_bias") and model.config.moe_router_activation_func == "softmax":
            continue  # Qwen3-Next has none
        if weight.dim() == 1:
            weight.normal_(0, 0.3)
            if "norm" in leaf and name.endswith("weight"):
                weight.add_(1).clamp_(0.5, 2)
        elif name.startswith("embed"):
            weight.normal_(0, 0.15 if model.config.tie_word_embeddings else 0.05)
        elif "conv1d" in name:
            weight.normal_(0, 0.5)
        else:
            weight.normal_(0, weight.shape[-1] ** -0.5)
        if "A_log" in name or "dt_bias" in name:
            weight.normal_(0, 1)
        small = {"kv_a_proj_with_mqa": 0.05}
        if model.config.mixers[0] != "attention":
            small |= {"q_proj": 0.03, "k_proj": 0.03}
        weight.mul_(small.get(leaf, 1))


def pair(folder: Path, preset: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> tuple[pal.Model, PreTrainedModel]:
    """Our model with random weights, and transformers' model loaded from the same weights as published."""
    config = pal.ModelConfig.preset(preset, **overrides)
    ours = pal.Model(config).to(dtype)
    randomise(ours)
    folder = folder / "model"
    pal.save(ours, folder)
    options: dict[str, Any] = {"attn_implementation": "eager", "output_loading_info": True}
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)
    theirs, report = loaded
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    return ours, theirs.eval()


def compare(ours: pal.Model, theirs: PreTrainedModel, tolerance: float) -> None:
    """Logits of the whole sequences, then of a prefill and single steps on both sides."""
    with torch.no_grad():
        full, expected = ours(IDS).logits, theirs(IDS).logits
        assert 0.5 < expected.std() < 3
        note("transformers", subject(theirs, full), "output", (full - expected).abs().max(), "absolute")
        assert (full - expected).abs().max() < tolerance
        mine, cached = ours(IDS[:, :9]), theirs(IDS[:, :9], use_cache=True)
        assert (mine.logits - expected[:, :9]).abs().max() < tolerance
        for t in range(9, IDS.shape[1]):
            step = IDS[:, t : t + 1]
            mine, cached = ours(step, mine.state), theirs(step, cache=cached.cache, use_cache=True)
            assert (mine.logits[:, 0] - expected[:, t]).abs().max() < tolerance
            assert (cached.logits[:, 0] - full[:, t]).abs().max() < tolerance
            note("transformers", subject(theirs, full), "decode", error_of(mine, expected, t), "absolute")
        chunk = ours(IDS[:, 5:], ours(IDS[:, :5]).state).logits
        assert (chunk - expected[:, 5:]).abs().max() < tolerance


def subject(theirs: PreTrainedModel, x: Tensor) -> str:
    """`GPT2, float64`."""
    name = type(theirs).__name__.removesuffix("LMHeadModel").removesuffix("ForCausalLM")
    return f"{name}, {str(x.dtype).removeprefix('torch.')}"


def error_of(mine: Any, expected: Tensor, t: int) -> float:
    return float((mine.logits[:, 0] - expected[:, t]).abs().max())


def compare_gradients(ours: pal.Model, theirs: PreTrainedModel, tolerance: float) -> None:
    """Gradients of the same loss for every parameter, relative to each one's largest, under their published names."""
    loss = ours(IDS, labels=IDS).loss
    other = F.cross_entropy(theirs(IDS).logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
    assert loss is not None
    assert abs(loss.item() - other.item()) < tolerance
    loss.backward()
    other.backward()
    gradients = {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in ours.named_parameters()}
    centred = ours.config.qk_norm  # Qwen3-Next: `to_published` takes 1 from norms, which gradients do not want
    _, published = to_published(ours.config, gradients)
    expected = dict(their_gradients(theirs, published))
    assert expected.keys() == published.keys() - {name for name in published if "e_score_correction_bias" in name}
    for name, wanted in expected.items():
        found = published[name] + 1 if centred and "norm" in name and "linear_attn" not in name else published[name]
        assert wanted.abs().max() > 1e-7 or ".experts." in name, name  # an expert may have had no token
        error = (found - wanted.view_as(found)).abs().max()
        assert error <= tolerance * wanted.abs().max(), name
        if ".experts." not in name:
            share = float(error / wanted.abs().max())
            note("transformers", subject(theirs, found), "gradients", share, "relative")


def their_gradients(theirs: PreTrainedModel, published: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """By published name, from the names and fused tensors that transformers has in memory."""
    for name, parameter in theirs.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, name
        name = name.removeprefix("transformer.").replace("forget_gate.", "")
        if name not in published and ".mlp." in name and "layers.0.mlp.gate_up" not in name:
            kimi = name.replace(".mlp.", ".block_sparse_moe.")
            name = kimi if "block_sparse_moe" in "".join(published) else name
        stem = name.rpartition(".")[0]
        gate, up, down = ("w1", "w3", "w2") if "block_sparse_moe" in name else ("gate_proj", "up_proj", "down_proj")
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(gradient):
                yield f"{stem}.{expert}.{gate}.weight", both.chunk(2)[0]
                yield f"{stem}.{expert}.{up}.weight", both.chunk(2)[1]
        elif name.endswith("experts.down_proj"):
            yield from ((f"{stem}.{expert}.{down}.weight", each) for expert, each in enumerate(gradient))
        elif name.endswith("self_attn.conv1d.weight"):
            parts = zip("qkv", gradient.chunk(3), strict=True)
            yield from ((name.replace("conv1d", f"{part}_conv1d"), each) for part, each in parts)
        else:
            yield name, gradient


def compare_left_padding(ours: pal.Model, theirs: PreTrainedModel, tolerance: float) -> None:
    """Pads in front of the second row, at prefill and while decoding, on both sides; and without pads at all."""
    mask = torch.ones_like(IDS)
    mask[1, :6] = 0
    with torch.no_grad():
        expected = theirs(IDS, attention_mask=mask).logits
        found = ours(IDS, attention_mask=mask).logits
        alone = ours(IDS[1:, 6:]).logits[0]
        assert (found - expected)[mask.bool()].abs().max() < tolerance
        assert (alone - expected[1, 6:]).abs().max() < tolerance
        start = theirs(IDS[:, :12], attention_mask=mask[:, :12], use_cache=True)
        mine = ours(IDS[:, :12], attention_mask=mask[:, :12])
        for t in range(12, 15):
            step = IDS[:, t : t + 1]
            start = theirs(step, attention_mask=mask[:, : t + 1], cache=start.cache, use_cache=True)
            mine = ours(step, mine.state)
            assert (mine.logits - start.logits).abs().max() < tolerance


def test_gpt2(tmp_path: Path) -> None:
    ours, theirs = pair(tmp_path, "gpt2-tiny", torch.float64, rms_norm_eps=1e-3)
    compare(ours, theirs, 1e-9)
    compare_gradients(ours, theirs, 1e-9)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, TOLERANCE), (torch.float64, 1e-5)])
def test_llama(tmp_path: Path, dtype: torch.dtype, tolerance: float) -> None:
    """In float64 the difference is that of transformers' float32 angles."""
    ours, theirs = pair(tmp_path, "smollm2-tiny", dtype, rms_norm_eps=1e-3, rope_theta=3000.0)
    compare(ours, theirs, tolerance)
    compare_gradients(ours, theirs, tolerance)


def test_llama_with_untied_head_and_wide_heads(tmp_path: Path) -> None:
    ours, theirs = pair(tmp_path, "smollm2-tiny", head_dim=24, num_key_value_heads=1, tie_word_embeddings=False)
    compare(ours, theirs, TOLERANCE)


def test_qwen3_next(tmp_path: Path) -> None:
    ours, theirs = pair(tmp_path, "qwen3-next-tiny", rms_norm_eps=1e-3, partial_rotary_factor=0.5)
    compare(ours, theirs, TOLERANCE)
    compare_left_padding(ours, theirs, TOLERANCE)
    compare_gradients(ours, theirs, 1e-3)


def test_gated_deltanet_as_qwen3_next(tmp_path: Path) -> None:
    """Without attention and experts, key heads that serve two value heads, K != V."""
    ours, theirs = pair(tmp_path, "gated-deltanet-tiny", num_hidden_layers=2)
    with torch.no_grad():  # transformers' cache wants a layer with attention
        assert (ours(IDS).logits - theirs(IDS, use_cache=False).logits).abs().max() < TOLERANCE


def test_kimi_linear(tmp_path: Path) -> None:
    ours, theirs = pair(tmp_path, "kimi-linear-tiny", rms_norm_eps=1e-3)
    assert theirs.config.layer_types == ["linear_attention"] * 3 + ["full_attention"] * 2
    compare(ours, theirs, TOLERANCE)
    compare_left_padding(ours, theirs, TOLERANCE)
    compare_gradients(ours, theirs, 1e-3)


@pytest.mark.parametrize("size", ["1GB", "50KB"])
@pytest.mark.parametrize("preset", ["gpt2-tiny", "smollm2-tiny", "qwen3-next-tiny"])
def test_what_transformers_saves_is_read(tmp_path: Path, preset: str, size: str) -> None:
    """Its config.json has other keys than older files (`rope_parameters`), its GPT-2 tensors a prefix, large ones an index."""
    ours, theirs = pair(tmp_path, preset)
    theirs.save_pretrained(tmp_path / "saved", max_shard_size=size)
    assert (tmp_path / "saved" / "model.safetensors.index.json").exists() == (size == "50KB")
    loaded, _ = pal.load(tmp_path / "saved")
    assert loaded.config == ours.config
    before, after = ours.state_dict(), loaded.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_a_trained_run_gives_transformers_the_same_text(tmp_path: Path) -> None:
    """R123: a run folder through the command, its tokenizer too; the next tokens are the same."""
    config = pal.ModelConfig.preset("smollm2-tiny")
    model = pal.Model(config)
    randomise(model)
    tokenizer = Tokenizer.train(["to be or not to be, that is the question"] * 20, 300)
    model = pal.Model(config.replace(vocab_size=tokenizer.vocab_size))
    randomise(model)
    checkpoint.save(model, tmp_path / "run", tokenizer=tokenizer)
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    words: Any = AutoTokenizer.from_pretrained(tmp_path / "out")
    (mine,) = pal.generate(model, tokenizer, ["to be"], pal.SamplingConfig(max_new_tokens=12, temperature=0.0))
    given = words("to be", return_tensors="pt")
    drawn = theirs.generate(**given, max_new_tokens=12, do_sample=False, pad_token_id=0)[0, given["input_ids"].shape[1] :]
    assert list(mine.token_ids) == drawn.tolist()[: len(mine.token_ids)] and len(mine.token_ids) >= 1


def op_inputs(heads: int, value_heads: int, channels: bool) -> dict[str, Tensor]:
    torch.manual_seed(1)
    batch, tokens, keys, values = 2, 70, 8, 12  # K != V, an odd last chunk
    shape = (batch, tokens, value_heads, keys) if channels else (batch, tokens, value_heads)
    inputs = {
        "q": torch.randn(batch, tokens, heads, keys),
        "k": torch.randn(batch, tokens, heads, keys),
        "v": torch.randn(batch, tokens, value_heads, values),
        "g": -2 * torch.rand(shape),
        "beta": torch.rand(batch, tokens, value_heads),
        "state": torch.randn(batch, value_heads, keys, values),
    }
    return {name: tensor.requires_grad_() for name, tensor in inputs.items()}


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("rule", ["gated_delta_rule", "kda"])
def test_ops(rule: str, backend: str) -> None:
    """Outputs, final state and gradients; transformers' state is [B,HV,K,V] too."""
    mine = op_inputs(2 if rule == "gated_delta_rule" else 4, 4, rule == "kda")
    theirs = {name: tensor.detach().clone().requires_grad_() for name, tensor in mine.items()}
    chunked = chunk_kimi_delta_attention if rule == "kda" else torch_chunk_gated_delta_rule
    recurrent = recurrent_kimi_delta_attention if rule == "kda" else torch_recurrent_gated_delta_rule
    order = [theirs[name] for name in ("q", "k", "v")]
    options: dict[str, Any] = {"g": theirs["g"], "beta": theirs["beta"], "use_qk_l2norm_in_kernel": True}
    options |= {"initial_state": theirs["state"], "output_final_state": True}
    o, state = getattr(ops, rule)(**mine, backend=backend, qk_l2norm=True)
    for function in (chunked, recurrent):
        expected, final = function(*order, **options)
        assert (o - expected).abs().max() < 1e-5
        assert (state - final).abs().max() < 1e-5
        assert expected.abs().max() > 0.5 and final.abs().max() > 0.5
    expected, final = chunked(*order, **options)
    weight, state_weight = torch.randn_like(o), torch.randn_like(state)
    ((o * weight).sum() + (state * state_weight).sum()).backward()
    ((expected * weight).sum() + (final * state_weight).sum()).backward()
    for name, tensor in mine.items():
        gradient, wanted = tensor.grad, theirs[name].grad
        assert gradient is not None and wanted is not None
        assert (gradient - wanted).abs().max() < 1e-4 * wanted.abs().max(), name
