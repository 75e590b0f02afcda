"""The residual policies: the published mixing vector, K3's sealing order and source counts, slow versions of each policy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import palimpsest as pal
from palimpsest import residuals
from palimpsest.residuals import BlockAttention, mix
from palimpsest.state import Segments
from tests.conftest import blocks_of, make_ids, make_model, relative

# ----------------------------------------------------------------------------------------------------------- the mixing


def test_published_vector() -> None:
    sources = torch.tensor([[1.0, 0, 0, 0], [0, 2, 0, 0], [1, 1, 1, 1]], dtype=torch.float64)
    norm = torch.tensor([1.0, 0.5, 1.0, 2.0], dtype=torch.float64)
    query = torch.tensor([0.3, -0.2, 0.1, 0.4], dtype=torch.float64)
    scores = torch.tensor([0.599988, -0.199999, 1.0999945], dtype=torch.float64)
    shares = torch.tensor([0.32278194, 0.14503716, 0.5321809], dtype=torch.float64)
    out = torch.tensor([0.85496284, 0.82225522, 0.5321809, 0.5321809], dtype=torch.float64)
    assert (scores.softmax(0) - shares).abs().max() < 1e-6
    for values in (sources, list(sources)):
        assert (mix(values, norm, query) - out).abs().max() < 1e-7
        assert (mix(values, norm, query.unsqueeze(0)) - out).abs().max() < 1e-7
    batch = torch.stack([sources, sources.flip(0)], 1).unsqueeze(1).repeat(1, 3, 1, 1)
    assert (mix(batch, norm, query) - out).abs().max() < 1e-7, "any axes in between"


def test_mixing_by_hand() -> None:
    sources = torch.randn(4, 2, 3, 6, dtype=torch.float64)
    norm, query = torch.randn(2, 6, dtype=torch.float64)
    for eps in (1e-5, 0.3):
        keys = sources / (sources.square().mean(-1, keepdim=True) + eps).sqrt()
        shares = (keys * norm * query).sum(-1).softmax(0)
        assert relative(mix(sources, norm, query, eps), (shares.unsqueeze(-1) * sources).sum(0)) < 1e-14


def test_mixing_gradients() -> None:
    sources = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    norm, query = (torch.randn(4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(mix, (sources, norm, query))
    # A source of zeros, as a padded row would be, keeps every gradient finite.
    zero = torch.zeros(3, 2, 4, requires_grad=True)
    mix(zero, norm.float(), query.float()).sum().backward()
    assert zero.grad is not None and zero.grad.isfinite().all()


def test_mixing_runs_in_float32() -> None:
    sources = torch.randn(5, 7, 16).bfloat16()
    norm, query = torch.randn(2, 16).bfloat16()
    found = mix(sources, norm, query)
    assert found.dtype == torch.bfloat16
    exact = mix(sources.double(), norm.double(), query.double())
    assert relative(found, exact) < 2**-8, "only the result was rounded"
    plain = mix(sources.float(), norm.float(), query.float())
    with torch.autocast("cpu", torch.bfloat16):
        assert relative(mix(sources.float(), norm.float(), query.float()), plain) < 1e-6


# ----------------------------------------------------------------------------------------------- counts and order of K3


def scaled_down(name: str, **fields: Any) -> pal.ModelConfig:
    """A published schedule at a tiny width."""
    heads = {"linear_num_key_heads": 1, "linear_num_value_heads": 1, "linear_key_head_dim": 2, "linear_value_head_dim": 2}
    latent = {"num_attention_heads": 1, "kv_lora_rank": 2, "qk_nope_head_dim": 2, "qk_rope_head_dim": 2, "v_head_dim": 2}
    experts = {"num_experts": 2, "num_experts_per_token": 1, "moe_intermediate_size": 2, "routed_expert_hidden_size": 2}
    sizes = {"vocab_size": 5, "hidden_size": 4, "intermediate_size": 2, "q_lora_rank": 2}
    return pal.ModelConfig.preset(name, **{**heads, **latent, **experts, **sizes, **fields})


def counted_sources(config: pal.ModelConfig, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counts: list[int] = []

    def counting(sources: Any, *rest: Any) -> Tensor:
        counts.append(len(list(sources)))
        return mix(sources, *rest)

    monkeypatch.setattr(residuals, "mix", counting)
    model = pal.Model(config)
    model(torch.tensor([[1, 2, 3]]))
    return counts


def test_source_counts_of_the_published_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """93 layers in blocks of 12: ceil(i/12) + 1 sources before a mixer, floor(i/12) + 2 before an MLP, 9 at the end."""
    counts = counted_sources(scaled_down("kimi-k3"), monkeypatch)
    assert len(counts) == 187
    mixer, mlp, last = counts[:-1:2], counts[1:-1:2], counts[-1]
    assert mixer == [-(-i // 12) + 1 for i in range(93)]
    assert mlp == [i // 12 + 2 for i in range(93)]
    assert last == 9
    table = {0: (1, 2), 1: (2, 2), 11: (2, 2), 12: (2, 3), 13: (3, 3), 23: (3, 3), 24: (3, 4)}
    table |= {83: (8, 8), 84: (8, 9), 85: (9, 9), 92: (9, 9)}
    for layer, expected in table.items():
        assert (mixer[layer], mlp[layer]) == expected, layer


def test_source_counts_of_the_full_form(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = counted_sources(scaled_down("kimi-k3-tiny", residual="full_attention"), monkeypatch)
    assert counts == list(range(1, 12))


def test_sealing_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sealed is the raw running sum; the embedding is block 0; after layer i there are i // size + 1 blocks."""
    model = make_model("kimi-k3-tiny", dtype=torch.float64)
    streams: list[BlockAttention] = []
    original = residuals.start

    def keep(config: pal.ModelConfig, embedded: Tensor) -> Any:
        streams.append(original(config, embedded))  # type: ignore[arg-type]
        return streams[-1]

    monkeypatch.setattr(residuals, "start", keep)
    seen: list[tuple[Tensor, int]] = []
    for block in blocks_of(model):
        block.register_forward_pre_hook(lambda module, args: seen.append((args[0].partial, len(args[0].blocks))))
    first: list[Tensor] = []
    blocks_of(model)[0].mixer_norm.register_forward_pre_hook(lambda module, args: first.append(args[0]))
    outputs: list[Tensor] = []
    for block in blocks_of(model):
        block.mixer.register_forward_hook(lambda module, args, out: outputs.append(out[0]))
        block.mlp.register_forward_hook(lambda module, args, out: outputs.append(out))
    ids = make_ids(model, 2, 6)
    model(ids)
    (stream,) = streams
    embedded = model.embed_tokens(ids)
    assert torch.equal(first[0], embedded) and torch.equal(stream.blocks[0], embedded)
    assert [count for _, count in seen] == [0, 1, 1, 2, 2] and len(stream.blocks) == 3
    for index, span in enumerate([slice(0, 4), slice(4, 8)], 1):
        assert relative(stream.blocks[index], sum(outputs[span])) < 1e-14  # type: ignore[arg-type]
    assert stream.partial is not None and relative(stream.partial, sum(outputs[8:])) < 1e-14  # type: ignore[arg-type]
    # The sum that enters layers 2 and 4 is the very tensor that was sealed there, and nobody wrote to it later.
    assert seen[2][0] is stream.blocks[1] and seen[4][0] is stream.blocks[2]


# ----------------------------------------------------------------------------------------- slow versions of each policy


def sublayers(model: pal.Model, index: int, ids: Tensor) -> tuple[Any, Any]:
    block = blocks_of(model)[index]
    segments = Segments((0,) * ids.shape[0], (ids.shape[1],) * ids.shape[0], None, ids.device)
    state = block.mixer.new_state(ids.shape[0], torch.float64, ids.device)
    return (
        lambda h: block.mixer(block.mixer_norm(h), state, segments)[0],
        lambda h: block.mlp(block.mlp_norm(h)),
    )


def read(site: Any, sources: list[Tensor], eps: float) -> Tensor:
    values = torch.stack(sources)
    keys = values / (values.square().mean(-1, keepdim=True) + eps).sqrt()
    shares = (keys * site.norm * site.proj[0]).sum(-1).softmax(0)
    return (shares.unsqueeze(-1) * values).sum(0)


def slow_block(model: pal.Model, ids: Tensor, size: int) -> Tensor:
    partial: Tensor | None = model.embed_tokens(ids)
    bank: list[Tensor] = []
    eps = model.config.rms_norm_eps
    for index, block in enumerate(blocks_of(model)):
        mixer, mlp = sublayers(model, index, ids)
        assert partial is not None
        a = partial if not bank else read(block.mixer_residual, [*bank, partial], eps)
        if index % size == 0:
            bank.append(partial)
            partial = None
        h = mixer(a)
        total: Tensor = h if partial is None else partial + h
        partial = total + mlp(read(block.mlp_residual, [*bank, total], eps))
    assert partial is not None
    return model.norm(read(model.output_residual, [*bank, partial], eps))


def slow_full(model: pal.Model, ids: Tensor) -> Tensor:
    sources, eps = [model.embed_tokens(ids)], model.config.rms_norm_eps
    for index, block in enumerate(blocks_of(model)):
        mixer, mlp = sublayers(model, index, ids)
        sources.append(mixer(read(block.mixer_residual, sources, eps)))
        sources.append(mlp(read(block.mlp_residual, sources, eps)))
    return model.norm(read(model.output_residual, sources, eps))


def slow_sum(model: pal.Model, ids: Tensor) -> Tensor:
    h = model.embed_tokens(ids)
    for index in range(len(model.layers)):
        mixer, mlp = sublayers(model, index, ids)
        h = h + mixer(h)
        h = h + mlp(h)
    return model.norm(h)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 12])
def test_block_form_equals_the_slow_version(size: int) -> None:
    model = make_model("kimi-k3-tiny", dtype=torch.float64, attn_res_block_size=size)
    ids = make_ids(model, 2, 7)
    assert relative(model.hidden(ids)[0], slow_block(model, ids, size)) < 1e-12


def test_full_form_equals_the_slow_version() -> None:
    for preset in ("kimi-k3-tiny", "smollm2-tiny"):
        model = make_model(preset, dtype=torch.float64, residual="full_attention")
        ids = make_ids(model, 2, 7)
        assert relative(model.hidden(ids)[0], slow_full(model, ids)) < 1e-12


def test_sum_equals_the_slow_version() -> None:
    for preset in ("kimi-linear-tiny", "qwen3-next-tiny", "deltanet-tiny"):
        model = make_model(preset, dtype=torch.float64)
        ids = make_ids(model, 2, 7)
        assert relative(model.hidden(ids)[0], slow_sum(model, ids)) < 1e-12


def test_queries_start_at_zero() -> None:
    """Every source counts the same at first; every site but the first, which has one source, gets a gradient."""
    for residual in ("block_attention", "full_attention"):
        model = pal.Model(pal.ModelConfig.preset("kimi-k3-tiny", residual=residual))
        sites = {name: p for name, p in model.named_parameters() if "_residual." in name}
        assert len(sites) == 2 * (2 * 5 + 1)
        assert all((p == (0 if name.endswith("proj") else 1)).all() for name, p in sites.items())
        ids = make_ids(model, 2, 7)
        loss = model(ids, labels=ids).loss
        assert loss is not None
        loss.backward()
        idle = [name for name, p in sites.items() if name.endswith("proj") and (p.grad is None or not p.grad.any())]
        assert idle == ["layers.0.mixer_residual.proj"]
    sources = list(torch.randn(3, 4, 6))
    assert relative(mix(sources, torch.ones(6), torch.zeros(6)), torch.stack(sources).mean(0)) < 1e-6


def test_nothing_is_carried_between_tokens() -> None:
    """R045: block boundaries do not depend on how a sequence is cut; the mix uses a token's own values only."""
    model = make_model("kimi-k3-tiny", dtype=torch.float64)
    ids = make_ids(model, 1, 96)
    whole, _ = model.hidden(ids)
    for size in (48, 24, 1):
        state, pieces = None, []
        for piece in ids.split(size, 1):
            hidden, state = model.hidden(piece, state)
            pieces.append(hidden)
        assert relative(torch.cat(pieces, 1), whole) < 1e-11
