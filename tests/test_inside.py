"""What is shown of a model's inside is what its equations say: every quantity is computed again, by the definition."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import palimpsest as pal
from palimpsest import inside
from palimpsest.config import InputError
from palimpsest.tokenizer import Tokenizer
from tests.conftest import TINY, blocks_of, make_ids, make_model

TOKENS = 40
RECURRENT = ["linear-attention-tiny", "deltanet-tiny", "gated-deltanet-tiny", "kda-tiny", "kimi-k3-tiny"]


def inputs_of(model: pal.Model, ids: Tensor) -> list[Tensor]:
    """What each mixer reads, [1,T,D]: the normed residual, taken in a pass of its own."""
    found: list[Tensor] = []
    hooks = [b.mixer.register_forward_pre_hook(lambda _, args: found.append(args[0])) for b in blocks_of(model)]
    with torch.no_grad():
        model(ids.unsqueeze(0))
    for hook in hooks:
        hook.remove()
    return found


def written(mixer: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """k, v [T,HV,...], g [T,HV,K] and beta [T,HV] of a layer, formed from its weights alone."""

    def convolved(name: str) -> Tensor:
        y = F.linear(x[0], getattr(mixer, f"{name}_proj").weight)
        taps = getattr(mixer, f"{name}_conv1d").weight.to(y.dtype)
        padded = F.pad(y, (0, 0, taps.shape[1] - 1, 0))
        return F.silu(sum(padded[i : i + len(y)] * taps[:, i] for i in range(taps.shape[1])))  # type: ignore[arg-type]

    heads = mixer.value_heads
    k = convolved("k").view(-1, mixer.key_heads, mixer.key_dim).repeat_interleave(heads // mixer.key_heads, 1)
    v = convolved("v").view(-1, heads, mixer.value_dim)
    g = beta = None
    if hasattr(mixer, "b_proj"):
        k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        beta = F.linear(x[0], mixer.b_proj.weight).sigmoid()
    else:
        k = F.elu(k) + 1
    if hasattr(mixer, "A_log"):
        rate = mixer.A_log.exp().view(-1, 1).to(k.dtype)
        raw = mixer.a_proj(x[0]).unsqueeze(-1) if hasattr(mixer, "a_proj") else mixer.f_b_proj(mixer.f_a_proj(x[0]))
        z = (raw.reshape(len(k), heads, -1) + mixer.dt_bias.view(heads, -1)).to(k.dtype)
        bound = getattr(mixer, "lower_bound", None)
        g = -rate * F.softplus(z) if bound is None else bound * torch.sigmoid(rate * z)
        g = g.expand(-1, -1, mixer.key_dim)
    return k, v, g, beta


def matrices(k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None) -> list[Tensor]:
    """S_t [HV,K,V] after every token, one head and one outer product at a time."""
    state, found = [torch.zeros(k.shape[2], v.shape[2], dtype=k.dtype) for _ in range(k.shape[1])], []
    for t in range(len(k)):
        for h in range(k.shape[1]):
            old = state[h] if g is None else torch.diag(g[t, h].exp()) @ state[h]
            new = v[t, h] if beta is None else beta[t, h] * (v[t, h] - old.T @ k[t, h])
            state[h] = old + torch.outer(k[t, h], new)
        found.append(torch.stack(state))
    return found


@pytest.mark.parametrize("preset", RECURRENT)
@torch.no_grad()
def test_memories(preset: str) -> None:
    model = make_model(preset).double()
    ids = make_ids(model, 1, TOKENS)[0]
    view = inside.look(model, ids)
    readings = inputs_of(model, ids)
    recurrent = [i for i, kind in enumerate(model.config.mixers) if kind not in ("attention", "mla")]
    assert [memory.layer for memory in view.memories] == recurrent
    for memory in view.memories:
        mixer: Any = blocks_of(model)[memory.layer].mixer
        k, v, g, beta = written(mixer, readings[memory.layer])
        counts = torch.cat([v, torch.ones(*v.shape[:2], 1)], -1) if beta is None else v
        states = matrices(k, counts, g, beta)
        assert memory.kind == model.config.mixers[memory.layer]
        if beta is None:
            assert memory.beta is None
        else:
            torch.testing.assert_close(memory.beta, beta)
        if g is None:
            assert memory.half_life is None
        else:
            assert memory.half_life is not None
            expected = math.log(2) / -g.mean(0)
            torch.testing.assert_close(memory.half_life.expand_as(expected), expected)
            # Fading at the mean rate for so long leaves half.
            assert torch.allclose((g.mean(0) * expected).exp(), torch.full_like(expected, 0.5))
        assert memory.places[0] == 0 and memory.places[-1] == TOKENS - 1 and len(memory.places) == inside.PLACES
        for i, t in enumerate(memory.places):
            for h in range(mixer.value_heads):
                matrix = states[t][h, :, : mixer.value_dim]
                values = torch.linalg.eigvalsh(matrix.T @ matrix).clamp(min=0).sqrt()
                shares = [float(x) for x in values / values.sum() if x > 0]
                rank = math.exp(-sum(p * math.log(p) for p in shares))
                assert float(memory.norm[i, h]) == pytest.approx(math.sqrt(float(matrix.square().sum())), rel=1e-6)
                assert float(memory.rank[i, h]) == pytest.approx(rank, rel=1e-3)
        for s, t in ((0, 0), (0, 9), (3, TOKENS - 1), (20, 21), (TOKENS - 1, TOKENS - 1)):
            read = torch.stack([states[t][h].T @ k[s, h] for h in range(mixer.value_heads)])
            read = read[:, :-1] / (read[:, -1:] + 1e-6) if beta is None else read
            error = math.sqrt(float((read - v[s]).square().sum())) / math.sqrt(float(v[s].square().sum()))
            assert float(memory.readout[s, t]) == pytest.approx(error, rel=1e-6)
        assert torch.equal(memory.readout.isnan(), torch.ones(TOKENS, TOKENS).tril(-1).bool())


@torch.no_grad()
def test_the_last_matrix_is_the_state_of_the_model() -> None:
    """What is followed here is what the model itself carries, also in float32 and by a fast backend."""
    model = make_model("kda-tiny")
    ids = make_ids(model, 1, TOKENS)[0]
    state = model(ids.unsqueeze(0)).state
    for memory, layer in zip(inside.look(model, ids).memories, state.layers, strict=True):
        torch.testing.assert_close(memory.norm[-1], layer.matrix[0].flatten(1).norm(dim=-1), rtol=1e-4, atol=1e-6)


def test_a_stored_pair_is_read_until_a_token_takes_its_place() -> None:
    """A bare memory by hand: with beta near 1 the write is exact, and the same key with another value replaces it."""
    model = make_model("deltanet-tiny", num_hidden_layers=1).double()
    mixer: Any = blocks_of(model)[0].mixer
    torch.nn.init.constant_(mixer.b_proj.weight, 0.0)
    with torch.no_grad():
        twice = inside.look(model, torch.tensor([7, 7, 7, 7, 7, 7, 7, 7, 7]))
    # Behind the convolution's four taps all keys and values are the same: each write halves what is left of the error.
    (memory,) = twice.memories
    assert memory.beta is not None and bool((memory.beta == 0.5).all())
    ratio = memory.readout[5, 6:] / memory.readout[5, 5:-1]
    torch.testing.assert_close(ratio, torch.full_like(ratio, 0.5), rtol=1e-3, atol=0)


@pytest.mark.parametrize("preset", ["gpt2-tiny", "smollm2-tiny", "qwen3-next-tiny", "kimi-linear-tiny", "kimi-k3-tiny"])
@torch.no_grad()
def test_attention_on_the_answer(preset: str) -> None:
    """The share of every token's softmax that falls on the chosen ones, with the weights taken from torch's own attention."""
    model = make_model(preset).double()
    ids, answer = make_ids(model, 1, TOKENS)[0], [3, 4, 11]
    view = inside.look(model, ids, answer)
    assert view.retrievals and view.answer == (3, 4, 11)
    readings = inputs_of(model, ids)
    for found in view.retrievals:
        block = blocks_of(model)[found.layer]
        heads = block.mixer.heads
        assert found.mass.shape == (TOKENS, heads) and found.last.shape == (heads, TOKENS)
        torch.testing.assert_close(found.last.sum(-1), torch.ones(heads, dtype=torch.float64))
        torch.testing.assert_close(found.last[:, answer].sum(-1), found.mass[-1])
        assert bool((found.mass[:3] == 0).all()) and float(found.mass.min()) >= 0
        weights = weights_of(block.mixer, readings[found.layer])
        torch.testing.assert_close(found.mass, weights[..., answer].sum(-1).T)
        torch.testing.assert_close(found.last, weights[:, -1])


def weights_of(mixer: Any, x: Tensor) -> Tensor:
    """[H,T,T] from torch's own attention: with one-hot values its output is its weights."""
    seen: list[Tensor] = []
    inner = F.scaled_dot_product_attention

    def spy(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        eye = torch.eye(k.shape[2], dtype=q.dtype).expand(*k.shape[:2], -1, -1)
        seen.append(inner(q, k, eye, **options)[0])
        return inner(q, k, v, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", spy)
        from palimpsest.state import Segments

        state = mixer.new_state(1, x.dtype, x.device)
        mixer(x, state, Segments((0,), (x.shape[1],), None, x.device))
    return seen[0]


@pytest.mark.parametrize("preset", ["kimi-linear-tiny", "kimi-k3-tiny", "qwen3-next-tiny"])
@torch.no_grad()
def test_experts_are_counted(preset: str) -> None:
    model = make_model(preset)
    ids = make_ids(model, 1, TOKENS)[0]
    view = inside.look(model, ids)
    assert [choice.layer for choice in view.choices] == [i for i, kind in enumerate(model.config.mlps) if kind == "moe"]
    gates = [blocks_of(model)[choice.layer].mlp.gate for choice in view.choices]
    rows: list[Tensor] = []
    hooks = [gate.register_forward_pre_hook(lambda _, args: rows.append(args[0])) for gate in gates]
    model(ids.unsqueeze(0))
    for hook in hooks:
        hook.remove()
    for choice, gate, x in zip(view.choices, gates, rows, strict=True):
        expected = [0] * model.config.num_experts
        for row in x.float() @ gate.weight.float().T:
            scores = row.sigmoid() if gate.score == "sigmoid" else row.softmax(-1)
            for expert in (scores + gate.e_score_correction_bias).argsort(descending=True)[: gate.top_k].tolist():
                expected[expert] += 1
        assert choice.counts.tolist() == expected and sum(expected) == TOKENS * gate.top_k


@pytest.mark.parametrize("residual", ["block_attention", "full_attention"])
@torch.no_grad()
def test_weights_over_depth(residual: str) -> None:
    """The mean over tokens of each one's softmax, by the equation."""
    model = make_model("kimi-k3-tiny", residual=residual).double()
    ids = make_ids(model, 1, TOKENS)[0]
    view = inside.look(model, ids)
    layers = model.config.num_hidden_layers
    assert len(view.depth) == 2 * layers + 1 and view.depth[-1].place == "head"
    assert view.depth[2].place == "layer 1, mixer" and view.depth[3].place == "layer 1, mlp"
    sources: list[list[Tensor]] = []
    sites = [s for b in blocks_of(model) for s in (b.mixer_residual, b.mlp_residual)] + [model.output_residual]
    hooks = [site.register_forward_pre_hook(lambda _, args: sources.append(list(args[0]))) for site in sites]
    model(ids.unsqueeze(0))
    for hook in hooks:
        hook.remove()
    for found, site, values in zip(view.depth, sites, sources, strict=True):
        assert len(found.weights) == len(values)
        mean = torch.zeros(len(values), dtype=torch.float64)
        for t in range(TOKENS):
            rows = [value[0, t] for value in values]
            scores = [float((x / (x.square().mean() + site.eps).sqrt() * site.norm) @ site.proj[0]) for x in rows]
            total = sum(math.exp(s) for s in scores)
            mean += torch.tensor([math.exp(s) / total for s in scores], dtype=torch.float64) / TOKENS
        torch.testing.assert_close(found.weights, mean)


@pytest.mark.parametrize("preset", TINY)
@torch.no_grad()
def test_looking_changes_nothing(preset: str) -> None:
    model = make_model(preset)
    ids = make_ids(model, 1, 12)[0]
    before = model(ids.unsqueeze(0)).logits
    model.train()
    inside.look(model, ids)
    assert model.training
    model.eval()
    assert torch.equal(model(ids.unsqueeze(0)).logits, before)
    for module in model.modules():
        assert not module._forward_pre_hooks and "remember" not in vars(module) and getattr(module, "observe", None) is None


def test_effective_rank() -> None:
    assert float(inside.effective_rank(torch.eye(5))) == pytest.approx(5)
    assert float(inside.effective_rank(torch.outer(torch.ones(4), torch.arange(3.0)))) == pytest.approx(1, abs=1e-5)
    assert float(inside.effective_rank(torch.zeros(3, 4))) == 0
    halves = inside.effective_rank(torch.diag(torch.tensor([3.0, 1.0])))
    assert float(halves) == pytest.approx(math.exp(-0.75 * math.log(0.75) - 0.25 * math.log(0.25)))


def test_an_answer_is_found_where_it_stands_last() -> None:
    tokenizer = Tokenizer.bytes()
    text = "k1 = a; é2 = bé; k1"
    ids = tokenizer.encode(text)
    assert inside.find(tokenizer, ids, "k1") == [len(ids) - 2, len(ids) - 1]
    assert bytes(ids[i] for i in inside.find(tokenizer, ids, "é2")).decode() == "é2"
    assert bytes(ids[i] for i in inside.find(tokenizer, ids, "bé")).decode() == "bé"
    learned = Tokenizer.train([text * 9], 290)
    ids = learned.encode(text)
    assert "é2" in learned.decode([ids[i] for i in inside.find(learned, ids, "é2")])
    for wrong in ("k3", ""):
        with pytest.raises(InputError, match="does not stand in the prompt"):
            inside.find(tokenizer, ids, wrong)


def test_what_cannot_be_looked_into_is_refused() -> None:
    model = make_model("kda-tiny")
    for count in (1, inside.LONGEST + 1):
        with pytest.raises(InputError, match=f"it has {count} tokens; 2 to {inside.LONGEST}"):
            inside.look(model, torch.zeros(count, dtype=torch.long))
    with pytest.raises(InputError, match="token 9 is not in the prompt of 5"):
        inside.look(model, torch.zeros(5, dtype=torch.long), [2, 9])
    learned = make_model("gpt2-tiny")
    limit = learned.config.max_position_embeddings
    with pytest.raises(InputError, match=f"2 to {limit}"):
        inside.look(learned, torch.zeros(limit + 1, dtype=torch.long))
