"""Every mixer equals its equation, written out slowly, in all the forms that a configuration can ask for."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import palimpsest as pal
from palimpsest import mixers
from palimpsest.mixers import GatedDeltaNet, attention
from palimpsest.mixers.attention import rotate
from palimpsest.state import Segments
from tests.conftest import relative

WIDTH = 12
LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 5,
    "linear_value_head_dim": 3,
}
SOFTMAX: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}
LATENT: dict[str, Any] = {
    "num_attention_heads": 3,
    "kv_lora_rank": 7,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 5,
}
GATED = {"linear_output_gate": "sigmoid"}
NORMED: dict[str, Any] = {"linear_output_norm": True, "linear_conv_kernel_dim": 0}
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "attention": ("attention", SOFTMAX),
    "attention, biases": ("attention", {**SOFTMAX, "use_bias": True}),
    "attention, all heads": ("attention", {**SOFTMAX, "num_key_value_heads": 4}),
    "attention, rotary": ("attention", {**SOFTMAX, "position": "rope", "rope_theta": 100.0}),
    "attention, partly rotary": ("attention", {**SOFTMAX, "position": "rope", "partial_rotary_factor": 0.34}),
    "attention, gate and norms": ("attention", {**SOFTMAX, "attention_output_gate": True, "qk_norm": True}),
    "linear attention": ("linear_attention", LINEAR),
    "linear attention, no convolution": ("linear_attention", {**LINEAR, "linear_conv_kernel_dim": 0}),
    "linear attention, product": ("linear_attention", {**LINEAR, **NORMED, "linear_feature_map": "product"}),
    "linear attention, relu": ("linear_attention", {**LINEAR, **NORMED, "linear_feature_map": "relu"}),
    "linear attention, identity": ("linear_attention", {**LINEAR, **NORMED, "linear_feature_map": "identity"}),
    "deltanet": ("deltanet", LINEAR),
    "deltanet, negative eigenvalues": ("deltanet", {**LINEAR, "allow_neg_eigval": True, "linear_conv_kernel_dim": 2}),
    "gated deltanet": ("gated_deltanet", {**LINEAR, "linear_output_gate": "silu"}),
    "gated deltanet, plain": ("gated_deltanet", LINEAR),
    "gated deltanet, low rank": ("gated_deltanet", {**LINEAR, **GATED, "linear_output_gate_rank": 2}),
    "kda, softplus": ("kda", {**LINEAR, **GATED, "linear_output_gate_rank": 3}),
    "kda, bias": ("kda", {**LINEAR, **GATED, "linear_output_gate_rank": 3, "linear_output_gate_bias": True}),
    "kda, bounded": ("kda", {**LINEAR, **GATED, "gate_lower_bound": -5.0}),
    "kda, negative eigenvalues": ("kda", {**LINEAR, "allow_neg_eigval": True, "linear_output_gate": "silu"}),
    "mla": ("mla", LATENT),
    "mla, low-rank query, gate": ("mla", {**LATENT, "q_lora_rank": 6, "mla_use_output_gate": True}),
    "mla, rotary": ("mla", {**LATENT, "mla_use_nope": False, "rope_theta": 50.0}),
    "mla, no shared key": ("mla", {**LATENT, "qk_rope_head_dim": 0}),
}


def make(form: str) -> tuple[Any, pal.ModelConfig]:
    name, fields = FORMS[form]
    base = {"vocab_size": 5, "hidden_size": WIDTH, "num_hidden_layers": 1, "mlps": ["swiglu"], "rms_norm_eps": 1e-3}
    config = pal.ModelConfig.from_dict({**base, "mixers": [name], **fields})
    mixer = mixers.build(name, config).double()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.normal_(0, 0.6)
    return mixer, config


def whole(tokens: int, batch: int = 2) -> Segments:
    return Segments((0,) * batch, (tokens,) * batch, None, torch.device("cpu"))


def run(mixer: Any, x: Tensor) -> Tensor:
    state = mixer.new_state(x.shape[0], x.dtype, x.device)
    return mixer(x, state, whole(x.shape[1], x.shape[0]))[0]


# ------------------------------------------------------------------------------------------------ the equations, slowly


def rms(x: Tensor, norm: nn.RMSNorm, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * norm.weight


def turn(x: Tensor, theta: float, channels: int) -> Tensor:
    """x [B,T,H,D]: channel i and i + channels/2 as one complex number, turned by position * theta^(-2i/channels)."""
    half = channels // 2
    number = torch.complex(x[..., :half].contiguous(), x[..., half:channels].contiguous())
    rate = theta ** (-2 * torch.arange(half, dtype=torch.float64) / channels)
    angle = torch.arange(x.shape[1], dtype=torch.float64).view(-1, 1, 1) * rate
    number = number * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([number.real, number.imag, x[..., channels:]], -1)


def softmax_loop(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q, k [B,T,H,D], v [B,T,H,V]: one token at a time, over what came before and itself."""
    outputs = []
    for t in range(q.shape[1]):
        scores = (q[:, t].unsqueeze(1) * k[:, : t + 1]).sum(-1) * scale
        outputs.append((scores.softmax(1).unsqueeze(-1) * v[:, : t + 1]).sum(1))
    return torch.stack(outputs, 1)


def slow_attention(m: Any, config: pal.ModelConfig, x: Tensor) -> Tensor:
    q, k, v = (p(x).unflatten(-1, (-1, config.head_dim)) for p in (m.q_proj, m.k_proj, m.v_proj))
    if config.qk_norm:
        q, k = rms(q, m.q_norm, config.rms_norm_eps), rms(k, m.k_norm, config.rms_norm_eps)
    if config.position == "rope":
        channels = int(config.head_dim * config.partial_rotary_factor)
        q, k = (turn(y, config.rope_theta, channels) for y in (q, k))
    share = config.num_attention_heads // config.num_key_value_heads
    owner = torch.arange(config.num_attention_heads) // share
    o = softmax_loop(q, k[:, :, owner], v[:, :, owner], config.head_dim**-0.5).flatten(-2)
    if config.attention_output_gate:
        o = o / (1 + (-(x @ m.g_proj.weight.mT)).exp())
    return m.o_proj(o)


def slow_mla(m: Any, config: pal.ModelConfig, x: Tensor) -> Tensor:
    heads, nope, rope, values = config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    q = m.q_proj(x) if config.q_lora_rank is None else m.q_b_proj(rms(m.q_a_proj(x), m.q_a_layernorm, 1e-6))
    q = q.unflatten(-1, (heads, nope + rope))
    down = m.kv_a_proj_with_mqa(x)
    latent, shared = down[..., : config.kv_lora_rank], down[..., config.kv_lora_rank :]
    up = m.kv_b_proj(rms(latent, m.kv_a_layernorm, 1e-6)).unflatten(-1, (heads, nope + values))
    shared = shared.unsqueeze(2)
    if not config.mla_use_nope:
        shared = turn(shared, config.rope_theta, rope)
        q = torch.cat([q[..., :nope], turn(q[..., nope:], config.rope_theta, rope)], -1)
    k = torch.cat([up[..., :nope], shared.expand(-1, -1, heads, -1)], -1)
    o = softmax_loop(q, k, up[..., nope:], (nope + rope) ** -0.5).flatten(-2)
    if config.mla_use_output_gate:
        o = o * torch.sigmoid(m.g_proj(x))
    return m.o_proj(o)


def heads_of(m: Any, config: pal.ModelConfig, x: Tensor, name: str, size: int) -> Tensor:
    """The projection, its convolution with SiLU, and one row for each value head."""
    y = getattr(m, f"{name}_proj")(x)
    taps = config.linear_conv_kernel_dim
    if taps:
        weight = getattr(m, f"{name}_conv1d").weight.unsqueeze(1)
        y = F.silu(F.conv1d(F.pad(y.mT, (taps - 1, 0)), weight, groups=y.shape[-1])).mT
    y = y.unflatten(-1, (-1, size))
    owner = torch.arange(config.linear_num_value_heads) // (config.linear_num_value_heads // y.shape[2])
    return y[:, :, owner]


def slow_linear(m: Any, config: pal.ModelConfig, x: Tensor) -> Tensor:
    name, keys, values = config.mixers[0], config.linear_key_head_dim, config.linear_value_head_dim
    q, k = (heads_of(m, config, x, letter, keys) for letter in "qk")
    v = heads_of(m, config, x, "v", values)
    tokens, heads = x.shape[1], v.shape[2]
    if name == "linear_attention":
        kind, normed, outputs = config.linear_feature_map, config.linear_output_norm, []
        if kind == "product":
            learned = ((y, getattr(m, f"feature_map_{letter}")) for y, letter in ((q, "q"), (k, "k")))
            q, k = (both.layer1(y) * both.layer2(y) for y, both in learned)
        else:
            q, k = ({"elu": F.elu(y) + 1, "relu": y.clamp(min=0), "identity": y}[kind] for y in (q, k))
        for t in range(tokens):
            share = (q[:, t].unsqueeze(1) * k[:, : t + 1]).sum(-1, keepdim=True)
            outputs.append((share * v[:, : t + 1]).sum(1) / (keys**0.5 if normed else share.sum(1) + 1e-6))
        o = torch.stack(outputs, 1)
        return m.o_proj((rms(o, m.o_norm, config.rms_norm_eps) if normed else o).flatten(-2))
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    beta = torch.sigmoid(m.b_proj(x)) * (2 if config.allow_neg_eigval else 1)
    keep = torch.ones(*v.shape[:3], keys, dtype=x.dtype)
    if name == "gated_deltanet":
        keep = (-m.A_log.exp() * F.softplus(m.a_proj(x) + m.dt_bias)).exp().unsqueeze(-1).expand_as(keep)
    elif name == "kda":
        z = (m.f_b_proj(m.f_a_proj(x)) + m.dt_bias).unflatten(-1, (heads, keys))
        rate, bound = m.A_log.exp().view(-1, 1), config.gate_lower_bound
        keep = (-rate * F.softplus(z) if bound is None else bound * torch.sigmoid(rate * z)).exp()
    state, outputs = x.new_zeros(x.shape[0], heads, keys, values), []
    for t in range(tokens):
        state = keep[:, t].unsqueeze(-1) * state
        wrong = v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t].unsqueeze(-1) * wrong)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) * keys**-0.5)
    o = rms(torch.stack(outputs, 1), m.o_norm, config.rms_norm_eps)
    if config.linear_output_gate != "none":
        gate = m.g_proj(x) if config.linear_output_gate_rank is None else m.g_b_proj(m.g_a_proj(x))
        gate = gate.unflatten(-1, (heads, values))
        o = o * (torch.sigmoid(gate) if config.linear_output_gate == "sigmoid" else F.silu(gate))
    return m.o_proj(o.flatten(-2))


@pytest.mark.parametrize("form", FORMS)
def test_equals_its_equation(form: str) -> None:
    mixer, config = make(form)
    slow = {"attention": slow_attention, "mla": slow_mla}.get(config.mixers[0], slow_linear)
    for tokens in (1, 2, 19):
        x = torch.randn(2, tokens, WIDTH, dtype=torch.float64)
        assert relative(run(mixer, x), slow(mixer, config, x)) < 1e-12
    x.requires_grad_()
    parameters = [x, *mixer.parameters()]
    cotangent = torch.randn(2, tokens, WIDTH, dtype=torch.float64)
    found = torch.autograd.grad(run(mixer, x), parameters, cotangent)
    wanted = torch.autograd.grad(slow(mixer, config, x), parameters, cotangent)
    for (name, _), grad, expected in zip([("x", x), *mixer.named_parameters()], found, wanted, strict=True):
        # Softmax does not see a shift of all scores, so the gradient of a key bias is zero but for rounding.
        assert relative(grad, expected) < 1e-10 or max(float(y.abs().max()) for y in (grad, expected)) < 1e-12, name


@pytest.mark.parametrize("form", FORMS)
def test_low_precision_runs_like_high(form: str) -> None:
    """bfloat16 weights and inputs: finite, and as near as bfloat16 rounding of a few products lets it be."""
    mixer, _ = make(form)
    x = torch.randn(2, 40, WIDTH, dtype=torch.float64)
    exact = run(mixer, x)
    assert relative(run(mixer.float(), x.float()), exact) < 2e-5
    y = run(mixer.bfloat16(), x.bfloat16())
    assert y.dtype == torch.bfloat16 and y.isfinite().all() and relative(y, exact) < 0.1


# ------------------------------------------------------------------------------------------------------------------ MLA


@pytest.mark.parametrize("form", [form for form in FORMS if form.startswith("mla")])
def test_absorbed_equals_expanded(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever form runs, the numbers are the same; a step after a prefill takes the absorbed one, a prefill never."""
    mixer, _ = make(form)
    x = torch.randn(2, 30, WIDTH, dtype=torch.float64)
    exact = run(mixer, x)
    calls: list[str] = []
    for name in ("attend_absorbed", "attend_expanded"):
        original = getattr(mixer, name)

        def traced(*args: Any, name: str = name, original: Any = original) -> Tensor:
            calls.append(name)
            return original(*args)

        monkeypatch.setattr(mixer, name, traced)
    for way in (0.0, float("inf")):
        mixer.break_even = way
        state, at, pieces = mixer.new_state(2, x.dtype, x.device), 0, []
        for size in (4, 1, 7, 1, 17):
            y, state = mixer(x[:, at : at + size], state, Segments((at,) * 2, (size,) * 2, None, x.device))
            pieces.append(y)
            at += size
        assert relative(torch.cat(pieces, 1), exact) < 1e-12
    assert calls == ["attend_expanded"] * 5 + ["attend_expanded"] + ["attend_absorbed"] * 4


def test_break_even() -> None:
    """With a latent wider than what it expands to per head, a single token costs least absorbed, a long piece expanded."""
    config = pal.ModelConfig.preset("kimi-k3")
    with torch.device("meta"):
        mixer = mixers.build("mla", config)
    # Per token and head and row: expanded 320 to score and mix and 512 * 256 / T to form k and v; absorbed 576 + 512.
    expanded = lambda tokens: 320 + 512 * 256 / tokens  # noqa: E731
    assert isinstance(mixer, mixers.MLA)
    edge = mixer.break_even
    assert 1 < edge < 1000 and math.isclose(expanded(edge), 576 + 512, rel_tol=1e-6)


# ------------------------------------------------------------------------------------------------------------ positions


def test_rotation() -> None:
    """Scores depend on distance only; far positions keep float32's precision; the channels behind stay as they are."""
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)

    def score(at: int, distance: int) -> float:
        positions = torch.tensor([[at + distance]]), torch.tensor([[at]])
        return float((rotate(q, positions[0], 1e4, 6) * rotate(k, positions[1], 1e4, 6)).sum())

    for distance in (0, 1, 17):
        assert math.isclose(score(0, distance), score(1_000_000, distance), rel_tol=1e-9)
    assert not math.isclose(score(0, 1), score(0, 17), rel_tol=1e-3)
    far = torch.tensor([[1_048_575]])
    assert relative(rotate(q.float(), far, 1e4, 8), rotate(q, far, 1e4, 8)) < 1e-6
    assert torch.equal(rotate(q, far, 1e4, 6)[..., 6:], q[..., 6:])
    assert torch.equal(rotate(q, torch.tensor([[0]]), 1e4, 6), q)
    assert rotate(q.bfloat16(), far, 1e4, 8).dtype == torch.bfloat16


# ------------------------------------------------------------------------------------------------ heads, initial values


@pytest.mark.parametrize("form", ["linear attention", "deltanet", "gated deltanet", "kda, softplus", "kda, bounded"])
def test_more_value_heads_than_key_heads(form: str) -> None:
    """R021 for whole layers: two value heads on a key head equal a layer whose key heads are written out twice."""
    mixer, config = make(form)
    wide = mixers.build(config.mixers[0], config.replace(linear_num_key_heads=4)).double()
    keys = config.linear_key_head_dim
    with torch.no_grad():
        target = dict(wide.named_parameters())
        for name, parameter in mixer.named_parameters():
            if name.startswith(("q_proj", "k_proj", "q_conv1d", "k_conv1d")):
                parameter = parameter.unflatten(0, (2, keys)).repeat_interleave(2, 0).flatten(0, 1)
            target[name].copy_(parameter)
    x = torch.randn(2, 21, WIDTH, dtype=torch.float64)
    assert relative(run(mixer, x), run(wide, x)) < 1e-13


def test_decay_starts_in_its_range() -> None:
    """A in [1, 16] (or exactly 1 with the bounded gate); softplus(dt_bias) in [1e-3, 0.1]."""
    for form, bounded in (("gated deltanet", False), ("kda, softplus", False), ("kda, bounded", True)):
        mixer, _ = make(form)
        for _ in range(20):
            mixer.reset_decay(zero_rate=bounded)
            rate, dt = mixer.A_log.exp(), F.softplus(mixer.dt_bias)
            assert (rate == 1).all() if bounded else ((rate >= 1) & (rate <= 16)).all()
            assert ((dt >= 0.999e-3) & (dt <= 0.1001)).all()


def test_decay_is_float32_under_a_bfloat16_default() -> None:
    """R006: drawn in bfloat16, A would be 0 now and then and its logarithm minus infinity."""
    fields = {"num_hidden_layers": 200, "hidden_size": 8, "linear_num_key_heads": 64, "linear_num_value_heads": 64}
    sizes = {"linear_key_head_dim": 2, "linear_value_head_dim": 2, "intermediate_size": 2, "vocab_size": 3}
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        for preset in ("gated-deltanet-tiny", "kda-tiny"):
            model = pal.Model(pal.ModelConfig.preset(preset, **fields, **sizes))
            assert model.embed_tokens.weight.dtype == torch.bfloat16
            layers = [module for module in model.modules() if isinstance(module, GatedDeltaNet)]
            assert len(layers) == 200
            for layer in layers:
                assert layer.A_log.dtype == layer.dt_bias.dtype == torch.float32
                assert layer.q_conv1d.weight.dtype == torch.float32
                assert layer.A_log.isfinite().all() and layer.dt_bias.isfinite().all()
                assert (layer.A_log.exp() >= 0.99).all()
            values = torch.cat([layer.A_log for layer in layers])
            assert values.unique().numel() > values.numel() / 2, "drawn with float32's steps"
    finally:
        torch.set_default_dtype(before)


def test_one_query_on_a_gpu_leaves_cudnn_out() -> None:
    """Its plans are made anew for every number of rows."""

    class OnGpu:
        is_cuda = True

        def __init__(self, *shape: int) -> None:
            self.shape = shape

    allowed = torch.backends.cuda.cudnn_sdp_enabled
    before = allowed()
    with attention._kernels(OnGpu(1, 1, 2, 8)):  # type: ignore[arg-type]
        assert not allowed() and torch.backends.cuda.flash_sdp_enabled()
    assert allowed() == before
    with attention._kernels(OnGpu(1, 7, 2, 8)):  # type: ignore[arg-type]
        assert allowed() == before
