"""Each generation reduces to its parent: what a newer policy adds can be switched off, and the older one is left."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import palimpsest as pal
from palimpsest import mixers, ops
from palimpsest.mixers.mla import MLA
from palimpsest.mlps import GatedMLP, situ, swiglu
from palimpsest.moe import MoE
from palimpsest.residuals import mix
from palimpsest.state import Segments
from tests.conftest import assert_close, call, make_ids, make_inputs, make_model, outcome, relative

BACKENDS = ("reference", "chunked")
PAIRS = list(itertools.product(BACKENDS, BACKENDS))
WIDTH = 12


# ------------------------------------------------------------------------------------------------------------ operators


@pytest.mark.parametrize(("newer", "older"), PAIRS)
def test_kda_with_equal_channels_is_gated_deltanet(newer: str, older: str) -> None:
    inputs = make_inputs("gated_delta_rule", 90, dtype=torch.float64)
    vector = {**inputs, "g": inputs["g"].unsqueeze(-1).expand(-1, -1, -1, 6).contiguous()}
    parent = outcome("gated_delta_rule", inputs, backend=older)
    child = outcome("kda", vector, backend=newer)
    child["d_g"] = child["d_g"].sum(-1)
    assert_close(child, parent, 1e-11)


@pytest.mark.parametrize(("newer", "older"), PAIRS)
@pytest.mark.parametrize("op", ["kda", "gated_delta_rule"])
def test_without_forgetting_it_is_deltanet(op: str, newer: str, older: str) -> None:
    inputs = make_inputs(op, 90, decay=0.0, dtype=torch.float64)
    assert not inputs["g"].any()
    parent = outcome("delta_rule", {n: x for n, x in inputs.items() if n != "g"}, backend=older)
    child = outcome(op, inputs, backend=newer)
    del child["d_g"]
    assert_close(child, parent, 1e-11)


@pytest.mark.parametrize(("newer", "older"), PAIRS)
def test_deltanet_on_orthonormal_keys_is_linear_attention(newer: str, older: str) -> None:
    """Keys that never meet again leave nothing to correct; beta = 1 then writes the value itself."""
    tokens = 24
    keys = torch.linalg.qr(torch.randn(2, 2, tokens, tokens, dtype=torch.float64)).Q.transpose(1, 2)
    inputs = make_inputs("delta_rule", tokens, batch=2, key_dim=tokens, dtype=torch.float64)
    inputs = {**inputs, "k": keys.contiguous(), "beta": torch.ones_like(inputs["beta"])}
    del inputs["state"]
    parent = call("linear_attention", {n: x for n, x in inputs.items() if n != "beta"}, backend=older)
    child = call("delta_rule", inputs, backend=newer)
    assert all(relative(a, b) < 1e-12 for a, b in zip(child, parent, strict=True))
    # One repeated key tells them apart: it is replaced, not added to.
    inputs["k"][:, 5] = inputs["k"][:, 2]
    assert relative(call("delta_rule", inputs)[1], call("linear_attention", {n: inputs[n] for n in "qkv"})[1]) > 0.1


@pytest.mark.parametrize("backend", BACKENDS)
def test_linear_attention_is_masked_attention_without_softmax(backend: str) -> None:
    inputs = make_inputs("linear_attention", 70, heads=4, dtype=torch.float64)
    del inputs["state"]
    o, state = call("linear_attention", inputs, scale=1.0, backend=backend)
    scores = torch.einsum("bthk,bshk->bhts", inputs["q"], inputs["k"]).tril()
    assert relative(o, torch.einsum("bhts,bshv->bthv", scores, inputs["v"])) < 1e-13
    assert relative(state, torch.einsum("bshk,bshv->bhkv", inputs["k"], inputs["v"])) < 1e-13


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_delta_write_replaces(backend: str) -> None:
    """beta = 1 and a unit key: reading that key back gives the value just written, whatever stood there."""
    inputs = make_inputs("kda", 40, dtype=torch.float64)
    inputs["beta"] = torch.ones_like(inputs["beta"])
    inputs["q"] = inputs["k"].clone()
    o, _ = call("kda", inputs, scale=1.0, backend=backend)
    assert relative(o, inputs["v"]) < 1e-12
    inputs["beta"] = torch.zeros_like(inputs["beta"])
    _, state = call("kda", {**inputs, "g": torch.zeros_like(inputs["g"])}, backend=backend)
    assert relative(state, inputs["state"]) < 1e-14, "beta = 0 writes nothing"


@pytest.mark.parametrize("backend", BACKENDS)
def test_total_forgetting_leaves_the_last_token(backend: str) -> None:
    inputs = make_inputs("kda", 40, decay=-1000.0, dtype=torch.float64)
    o, state = call("kda", inputs, scale=1.0, backend=backend)
    written = inputs["beta"].unsqueeze(-1) * inputs["v"]
    seen = (inputs["q"] * inputs["k"]).sum(-1).repeat_interleave(2, 2).unsqueeze(-1)
    assert relative(o, seen * written) < 1e-12
    last = inputs["k"][:, -1].repeat_interleave(2, 1).unsqueeze(-1) * written[:, -1].unsqueeze(-2)
    assert relative(state, last) < 1e-12


# --------------------------------------------------------------------------------------------------------------- layers


def config(mixer: str, **fields: Any) -> pal.ModelConfig:
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 5, "linear_value_head_dim": 3}
    base = {"vocab_size": 5, "hidden_size": WIDTH, "num_hidden_layers": 1, "mixers": [mixer], "mlps": ["swiglu"]}
    return pal.ModelConfig.from_dict({**base, **heads, **fields})


def drawn(module: nn.Module) -> Any:
    module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.6)
    return module


def share(child: nn.Module, parent: nn.Module) -> None:
    """The parent's parameters, by name, into the child."""
    target = dict(child.named_parameters())
    with torch.no_grad():
        for name, parameter in parent.named_parameters():
            if name in target and target[name].shape == parameter.shape:
                target[name].copy_(parameter)


def run(mixer: Any, x: Tensor) -> tuple[Tensor, Any]:
    segments = Segments((0,) * x.shape[0], (x.shape[1],) * x.shape[0], None, x.device)
    return mixer(x, mixer.new_state(x.shape[0], x.dtype, x.device), segments)


def test_kda_layer_with_equal_channels_is_a_gated_deltanet_layer() -> None:
    """One rate for all channels of a head: the low-rank gate map repeats the scalar one's rows."""
    for gate in ("none", "silu", "sigmoid"):
        parent = drawn(mixers.build("gated_deltanet", config("gated_deltanet", linear_output_gate=gate)))
        child = drawn(mixers.build("kda", config("kda", linear_output_gate=gate)))
        share(child, parent)
        with torch.no_grad():
            child.f_a_proj.weight.normal_()
            # a = f_b f_a x must be a_proj x: choose a_proj in the span of f_a.
            mixing = torch.randn(4, 3, dtype=torch.float64)
            parent.a_proj.weight.copy_(mixing @ child.f_a_proj.weight)
            child.f_b_proj.weight.copy_(mixing.repeat_interleave(5, 0))
            child.A_log.copy_(parent.A_log)
            child.dt_bias.copy_(parent.dt_bias.repeat_interleave(5))
        x = torch.randn(2, 21, WIDTH, dtype=torch.float64)
        (y, state), (expected, parent_state) = run(child, x), run(parent, x)
        assert relative(y, expected) < 1e-12 and relative(state.matrix, parent_state.matrix) < 1e-12


def test_gated_deltanet_layer_that_keeps_everything_is_a_deltanet_layer() -> None:
    parent = drawn(mixers.build("deltanet", config("deltanet")))
    for name in ("gated_deltanet", "kda"):
        child = drawn(mixers.build(name, config(name)))
        share(child, parent)
        with torch.no_grad():
            child.A_log.fill_(-1e9)  # exp gives zero: g = 0
        x = torch.randn(2, 21, WIDTH, dtype=torch.float64)
        (y, state), (expected, parent_state) = run(child, x), run(parent, x)
        assert relative(y, expected) < 1e-12 and relative(state.matrix, parent_state.matrix) < 1e-12


def test_absorbed_is_expanded() -> None:
    sizes = {"num_attention_heads": 3, "kv_lora_rank": 7, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 5}
    for fields in ({}, {"mla_use_nope": False}, {"q_lora_rank": 6, "mla_use_output_gate": True}):
        mixer = drawn(mixers.build("mla", config("mla", **sizes, **fields)))
        q = torch.randn(2, 9, 3, 6, dtype=torch.float64)
        segments = Segments((0, 0), (9, 9), None, q.device)
        arguments = q[..., :4], q[..., 4:], torch.randn(2, 9, 7 + 2, dtype=torch.float64), segments
        absorbed, expanded = mixer.attend_absorbed(*arguments), mixer.attend_expanded(*arguments)
        assert absorbed.shape == (2, 9, 3, 5) and relative(absorbed, expanded) < 1e-13


def test_mla_with_a_full_latent_is_softmax_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """A latent as wide as what is cached, kept as it is: keys and values are plain projections again."""
    heads, size = 3, 4
    attention = drawn(mixers.build("attention", config("attention", num_attention_heads=3, num_key_value_heads=3, head_dim=4)))
    fields = {"num_attention_heads": 3, "kv_lora_rank": WIDTH, "qk_nope_head_dim": 4, "qk_rope_head_dim": 0, "v_head_dim": 4}
    mla = drawn(mixers.build("mla", config("mla", **fields)))
    assert isinstance(mla, MLA)
    with torch.no_grad():
        mla.q_proj.weight.copy_(attention.q_proj.weight)
        mla.o_proj.weight.copy_(attention.o_proj.weight)
        mla.kv_a_proj_with_mqa.weight.copy_(torch.eye(WIDTH))
        mla.kv_a_layernorm.weight.fill_(1)
        monkeypatch.setattr("palimpsest.mixers.mla.LOW_RANK_NORM_EPS", 0.0)
        k, v = (p.weight.view(heads, size, WIDTH) for p in (attention.k_proj, attention.v_proj))
        mla.kv_b_proj.weight.copy_(torch.cat([k, v], 1).flatten(0, 1))
    x = torch.randn(2, 9, WIDTH, dtype=torch.float64)
    x = x / x.square().mean(-1, keepdim=True).sqrt()  # so that the latent's norm leaves it alone
    assert relative(run(mla, x)[0], run(attention, x)[0]) < 1e-12


def test_output_gates_wide_open_are_no_gates() -> None:
    """A sigmoid gate that is 1 everywhere, in softmax attention and in MLA."""
    for name, fields, switch in (
        ("attention", {"num_key_value_heads": 2}, "attention_output_gate"),
        ("mla", {}, "mla_use_output_gate"),
    ):
        parent = drawn(mixers.build(name, config(name, **fields)))
        child = drawn(mixers.build(name, config(name, **fields, **{switch: True})))
        share(child, parent)
        x = torch.randn(2, 9, WIDTH, dtype=torch.float64).abs()
        with torch.no_grad():
            child.g_proj.weight.fill_(100.0)
        assert relative(run(child, x)[0], run(parent, x)[0]) < 1e-12


# --------------------------------------------------------------------------------------------- MLPs, experts, residuals


def test_situ_with_large_betas_is_swiglu() -> None:
    gate, up = torch.randn(2, 1000, dtype=torch.float64) * 3
    assert relative(situ(gate, up, 1e6, 1e6), swiglu(gate, up)) < 1e-10
    errors = [relative(situ(gate, up, beta, beta), swiglu(gate, up)) for beta in (40.0, 400.0, 4000.0)]
    assert all(b < a / 50 for a, b in itertools.pairwise(errors)), "the difference falls with the square of beta"


@pytest.mark.parametrize("act", ["swiglu", "situ"])
@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
def test_one_expert_is_its_mlp(act: str, score: str) -> None:
    """A single renormalised expert has weight 1; so have identical experts, however many are chosen."""
    for count, chosen in ((1, 1), (4, 3)):
        fields = {"num_experts": count, "num_experts_per_token": chosen, "num_shared_experts": 0, "moe_hidden_act": act}
        settings = config("attention", moe_router_activation_func=score, moe_intermediate_size=7, **fields)
        moe, mlp = drawn(MoE(settings)), drawn(GatedMLP(settings, act, 7))
        with torch.no_grad():
            for name in ("gate_proj", "up_proj", "down_proj"):
                getattr(moe.experts, name).copy_(getattr(mlp, name).weight.expand(count, -1, -1))
        x = torch.randn(3, 5, WIDTH, dtype=torch.float64)
        assert relative(moe(x), mlp(x)) < 1e-13


def test_latent_experts_of_full_width_are_plain_experts() -> None:
    """With identity maps in and out and no norm, the latent space is the model's own."""
    settings = config("attention", num_experts=4, moe_intermediate_size=7)
    parent = drawn(MoE(settings))
    child = drawn(MoE(settings.replace(routed_expert_hidden_size=WIDTH, latent_moe_use_norm=False)))
    share(child, parent)
    with torch.no_grad():
        child.routed_expert_down_proj.weight.copy_(torch.eye(WIDTH))
        child.routed_expert_up_proj.weight.copy_(torch.eye(WIDTH))
    x = torch.randn(3, 5, WIDTH, dtype=torch.float64)
    assert relative(child(x), parent(x)) < 1e-13


def test_attention_over_one_source_is_the_identity() -> None:
    source = torch.randn(2, 3, 6)
    norm, query = torch.randn(2, 6)
    assert torch.equal(mix([source], norm, query), source)
    assert torch.equal(mix(source.unsqueeze(0), norm, query), source)
    assert relative(mix([source] * 5, norm, query), source) < 1e-6, "so are copies of one source"


def with_zero_queries(parent: pal.Model, **fields: Any) -> pal.Model:
    """The parent's parameters under another residual policy, whose queries choose nothing."""
    child = make_model("smollm2-tiny", dtype=torch.float64, rms_norm_eps=1e-30, **fields)
    share(child, parent)
    with torch.no_grad():
        for name, parameter in child.named_parameters():
            if name.endswith("_residual.proj"):
                parameter.zero_()
    return child


def test_untrained_attention_residuals_are_a_mean() -> None:
    """Zero queries: every sublayer reads the mean of its sources, which its norm cannot tell from their sum. So the full
    form, and the block form of any block size, is the plain residual stream until training moves the queries."""
    parent = make_model("smollm2-tiny", dtype=torch.float64, rms_norm_eps=1e-30)
    ids = make_ids(parent, 2, 8)
    expected = parent(ids).logits
    assert relative(with_zero_queries(parent, residual="full_attention")(ids).logits, expected) < 1e-11
    for size in (1, 2, 3, 4, 100):
        child = with_zero_queries(parent, residual="block_attention", attn_res_block_size=size)
        assert relative(child(ids).logits, expected) < 1e-11
    trained = make_model("smollm2-tiny", dtype=torch.float64, rms_norm_eps=1e-30, residual="full_attention")
    share(trained, parent)
    assert relative(trained(ids).logits, expected) > 0.01, "queries that choose do change it"


def test_grouped_heads_with_one_group_each_are_plain_heads() -> None:
    grouped = drawn(mixers.build("attention", config("attention", num_attention_heads=4, num_key_value_heads=2, head_dim=3)))
    plain = drawn(mixers.build("attention", config("attention", num_attention_heads=4, num_key_value_heads=4, head_dim=3)))
    share(plain, grouped)
    with torch.no_grad():
        for name in ("k_proj", "v_proj"):
            weight = getattr(grouped, name).weight.view(2, 3, WIDTH)
            getattr(plain, name).weight.copy_(weight.repeat_interleave(2, 0).flatten(0, 1))
    x = torch.randn(2, 9, WIDTH, dtype=torch.float64)
    assert relative(run(plain, x)[0], run(grouped, x)[0]) < 1e-12


def test_models_of_one_layer_differ_only_in_the_mixer() -> None:
    """Change one policy, keep all else: the parameters outside the mixer have the same names and shapes."""
    names: list[dict[str, tuple[int, ...]]] = []
    for mixer in ("attention", "linear_attention", "deltanet", "gated_deltanet", "kda", "mla"):
        model = pal.Model(config(mixer))
        names.append({n: tuple(p.shape) for n, p in model.named_parameters() if ".mixer." not in n})
    assert all(other == names[0] for other in names)


def test_write_strength_above_one() -> None:
    """allow_neg_eigval doubles beta: it equals a layer whose op is given twice the strength."""
    plain = drawn(mixers.build("deltanet", config("deltanet")))
    double = drawn(mixers.build("deltanet", config("deltanet", allow_neg_eigval=True)))
    share(double, plain)
    x = torch.randn(2, 9, WIDTH, dtype=torch.float64)
    assert torch.equal(double.write_strength(x), 2 * plain.write_strength(x))
    k = torch.zeros(1, 2, 1, 3, dtype=torch.float64)
    k[..., 0] = 1
    v = torch.tensor([1.0, 0.0], dtype=torch.float64).view(1, 2, 1, 1)
    o, _ = ops.delta_rule(k, k, v, torch.tensor([[[1.0], [2.0]]], dtype=torch.float64), scale=1.0)
    assert o.flatten().tolist() == [1.0, -1.0], "beta = 2 reflects what the key retrieves"
