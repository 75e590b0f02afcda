"""Whole models, every tiny preset: pieces equal the whole, padding and packing change nothing, mistakes are one line."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

import palimpsest as pal
from palimpsest.mixers import ShortConvolution
from palimpsest.moe import MoE, Router
from palimpsest.state import KeyValue, Recurrent, State
from tests.conftest import TINY, blocks_of, make_ids, make_model, relative, state_tensors
from tests.golden import make as golden

MODELS: dict[str, pal.Model] = {}


def tiny(preset: str) -> pal.Model:
    """One float64 model per preset, shared: no test here changes a parameter."""
    if preset not in MODELS:
        MODELS[preset] = make_model(preset, dtype=torch.float64)
    return MODELS[preset]


def value(loss: Tensor | None) -> float:
    assert loss is not None and loss.dim() == 0
    return float(loss.detach())


@contextlib.contextmanager
def saved_sizes() -> Iterator[list[int]]:
    """The sizes of the tensors that autograd keeps for a backward pass."""
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x.numel()), x)[1], lambda x: x):
        yield saved


@torch.no_grad()
def run(model: pal.Model, ids: Tensor, state: State | None = None, **options: Any) -> tuple[Tensor, State]:
    out = model(ids, state, **options)
    return out.logits, out.state


def assert_same_state(found: State, expected: State, limit: float = 1e-11) -> None:
    """The same lengths, and the same tensors in the rows that count."""
    assert found.lengths == expected.lengths
    for a, b in zip(found.layers, expected.layers, strict=True):
        assert type(a) is type(b)
        if isinstance(a, Recurrent) and isinstance(b, Recurrent):
            assert relative(a.matrix, b.matrix) < limit and relative(a.conv, b.conv) < limit
        elif isinstance(a, KeyValue) and isinstance(b, KeyValue):
            for x, y in zip(a.rows.tensors, b.rows.tensors, strict=True):
                for row, length in enumerate(found.lengths):
                    assert relative(x[row, :length], y[row, :length]) < limit


# ------------------------------------------------------------------------------------------------ pieces, and the whole


@pytest.mark.parametrize("preset", TINY)
@settings(max_examples=6)
@given(cuts=st.lists(st.integers(0, 30), max_size=5))
def test_any_split(preset: str, cuts: list[int]) -> None:
    model = tiny(preset)
    ids = make_ids(model, 2, 30)
    whole, last = run(model, ids)
    state, pieces = None, []
    for a, b in itertools.pairwise([0, *sorted(cuts), 30]):
        logits, state = run(model, ids[:, a:b], state)
        pieces.append(logits)
    assert state is not None and relative(torch.cat(pieces, 1), whole) < 1e-11
    assert_same_state(state, last)


@pytest.mark.parametrize("preset", TINY)
def test_splits_that_failed_elsewhere(preset: str) -> None:
    """R043: several tokens onto a filled state, below and above a chunk; one by one; nothing first."""
    model = tiny(preset)
    ids = make_ids(model, 1, 70)
    whole, last = run(model, ids)
    for cuts in ([5, 3, 62], [5, 64, 1], [5, 65], [0, 9, 61], [69, 1], [64, 6], [*[1] * 6, 64]):
        state, pieces = None, []
        for piece in ids.split(cuts, 1):
            logits, state = run(model, piece, state)
            pieces.append(logits)
        assert state is not None and relative(torch.cat(pieces, 1), whole) < 1e-11, cuts
        assert_same_state(state, last)


@pytest.mark.parametrize("preset", TINY)
def test_float32_is_near_float64(preset: str) -> None:
    """Logits, state and gradients; also for a prompt that repeats one token (R004)."""
    exact, single = tiny(preset), make_model(preset)
    for ids in (make_ids(exact, 2, 40), torch.full((1, 128), 7)):
        outs = [model(ids, labels=ids) for model in (exact, single)]
        assert outs[1].logits.dtype == torch.float32 and outs[1].logits.isfinite().all()
        assert relative(outs[1].logits, outs[0].logits) < 1e-5
        for a, b in zip(state_tensors(outs[1].state), state_tensors(outs[0].state), strict=True):
            assert relative(a, b) < 1e-5
        assert abs(value(outs[1].loss) - value(outs[0].loss)) < 1e-5
        grads = [
            torch.autograd.grad(out.loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)
            for out, model in zip(outs, (exact, single), strict=True)
        ]
        pairs = [(a, b) for a, b in zip(*grads, strict=True) if a is not None and b is not None]
        total = sum(float(a.square().sum()) for a, _ in pairs) ** 0.5
        wrong = sum(float((a - b.double()).square().sum()) for a, b in pairs) ** 0.5
        assert wrong < 1e-4 * total


@pytest.mark.parametrize("preset", TINY)
def test_calls_repeat(preset: str) -> None:
    """Same bits twice, nothing written over."""
    model = make_model(preset)
    ids = make_ids(model, 2, 20)
    before = ids.clone()
    first, again = run(model, ids), run(model, ids)
    assert torch.equal(first[0], again[0]) and torch.equal(ids, before)
    assert all(torch.equal(a, b) for a, b in zip(state_tensors(first[1]), state_tensors(again[1]), strict=True))


@pytest.mark.parametrize("preset", TINY)
def test_hidden_is_in_front_of_the_head(preset: str) -> None:
    model = tiny(preset)
    ids = make_ids(model, 2, 6)
    mask = torch.tensor([[0, 1, 1, 0, 1, 1], [1, 1, 1, 1, 1, 1]])
    for given_mask in (None, mask):
        hidden, state = model.hidden(ids, attention_mask=given_mask)
        logits, after = run(model, ids, attention_mask=given_mask)
        assert tuple(hidden.shape) == (2, 6, model.config.hidden_size)
        assert relative(model.logits(hidden), logits) < 1e-13
        assert_same_state(state, after)


@pytest.mark.parametrize("preset", TINY)
def test_the_batch_does_not_matter(preset: str) -> None:
    model = tiny(preset)
    ids = make_ids(model, 4, 9)
    together, state = run(model, ids)
    for row in range(4):
        alone, one = run(model, ids[row : row + 1])
        assert relative(together[row], alone[0]) < 1e-12
        assert_same_state(state.select([row]), one)


# -------------------------------------------------------------------------------------------------------------- padding


@pytest.mark.parametrize("preset", TINY)
@settings(max_examples=6)
@given(data=st.data())
def test_pads_anywhere_change_nothing(preset: str, data: st.DataObject) -> None:
    """Left, right, inner, a row of nothing else: real positions, state and later tokens equal each row alone."""
    model = tiny(preset)
    rows = data.draw(st.lists(st.lists(st.booleans(), min_size=11, max_size=11), min_size=1, max_size=3))
    mask = torch.tensor(rows)
    ids = make_ids(model, len(rows), 11)
    given_mask = mask.to(data.draw(st.sampled_from([torch.bool, torch.int64, torch.float32])))
    logits, state = run(model, ids, attention_mask=given_mask)
    assert logits.isfinite().all()
    assert state.lengths == tuple(sum(row) for row in rows)
    more = make_ids(model, len(rows), 4, seed=5)
    later, after = run(model, more[:, :3], state)
    last, after = run(model, more[:, 3:], after)
    for row in range(len(rows)):
        real = ids[row][mask[row]]
        alone, _ = run(model, torch.cat([real, more[row]]).unsqueeze(0))
        assert relative(logits[row][mask[row]], alone[0, : len(real)]) < 1e-11
        assert relative(torch.cat([later[row], last[row]]), alone[0, len(real) :]) < 1e-11
    scrambled = torch.where(mask, ids, (ids + 1) % model.config.vocab_size)
    again, other = run(model, scrambled, attention_mask=given_mask)
    assert torch.equal(again, logits) and all(
        torch.equal(a, b) for a, b in zip(state_tensors(other), state_tensors(state), strict=True)
    )


@pytest.mark.parametrize("preset", TINY)
def test_one_left_padded_row(preset: str) -> None:
    """R030: a batch of one with three pads in front, in float32."""
    model = make_model(preset)
    real = make_ids(model, 1, 5)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), real], 1)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
    logits, state = run(model, padded, attention_mask=mask)
    alone, expected = run(model, real)
    assert relative(logits[:, 3:], alone) < 1e-5
    assert_same_state(state, expected, 1e-5)


@pytest.mark.parametrize("preset", TINY)
def test_masks_while_decoding(preset: str) -> None:
    """R033: a mask speaks of the new tokens; rows may also pause. A mask over the whole history is refused."""
    model = tiny(preset)
    ids, mask = make_ids(model, 2, 8), torch.tensor([[1] * 8, [0] * 3 + [1] * 5])
    _, state = run(model, ids, attention_mask=mask)
    steps, step_mask = make_ids(model, 2, 4, seed=4), torch.tensor([[1, 0, 1, 1], [1, 1, 0, 1]])
    with pytest.raises(pal.InputError, match=r"attention_mask has shape \[2, 9\]; .*new tokens only, \[2, 1\]"):
        model(steps[:, :1], state, attention_mask=torch.ones(2, 9))
    outputs = []
    for at in range(4):
        logits, state = run(model, steps[:, at : at + 1], state, attention_mask=step_mask[:, at : at + 1])
        outputs.append(logits)
    assert state.lengths == (11, 8)
    for row in range(2):
        real = torch.cat([ids[row][mask[row].bool()], steps[row][step_mask[row].bool()]])
        alone, expected = run(model, real.unsqueeze(0))
        assert relative(torch.cat(outputs, 1)[row][step_mask[row].bool()], alone[0, -3:]) < 1e-11
        assert_same_state(state.select([row]), expected)


@pytest.mark.parametrize("preset", TINY)
def test_pads_get_no_gradient(preset: str) -> None:
    """R008: the pad's embedding row has a gradient of exactly zero, and nothing is NaN."""
    model = make_model(preset, tie_word_embeddings=False)
    ids = make_ids(model, 2, 10) % 250
    ids[0, :4] = ids[1, 7:] = 256
    out = model(ids, attention_mask=ids != 256, labels=ids)
    assert out.loss is not None
    out.loss.backward()
    grad = model.embed_tokens.weight.grad
    assert grad is not None and grad.any() and not grad[256].any()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


# -------------------------------------------------------------------------------------------------------------- packing


@pytest.mark.parametrize("preset", TINY)
@settings(max_examples=6)
@given(lengths=st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 17]), min_size=1, max_size=4), kind=st.booleans())
def test_packed_equals_separate(preset: str, lengths: list[int], kind: bool) -> None:
    """Logits, states, loss; then more tokens for each, packed again onto the states."""
    model = tiny(preset)
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32 if kind else torch.int64)
    ids = make_ids(model, 1, int(bounds[-1]))
    later = [(length + 1) % 3 for length in lengths]
    more = make_ids(model, 1, sum(later), seed=6)
    logits, state = run(model, ids, cu_seqlens=bounds)
    next_logits, after = run(model, more, state, cu_seqlens=torch.tensor([0, *itertools.accumulate(later)]))
    assert state.lengths == tuple(lengths)
    pieces, next_pieces = [], []
    documents = zip(ids.split(lengths, 1), more.split(later, 1), strict=True)
    for row, (document, tail) in enumerate(documents):
        alone, one = run(model, torch.cat([document, tail], 1))
        pieces.append(alone[:, : document.shape[1]])
        next_pieces.append(alone[:, document.shape[1] :])
        assert_same_state(after.select([row]), one)
    assert relative(logits, torch.cat(pieces, 1)) < 1e-11
    assert relative(next_logits, torch.cat(next_pieces, 1)) < 1e-11


@pytest.mark.parametrize("preset", TINY)
def test_two_documents(preset: str) -> None:
    """R034: boundaries [0, 3, 8] against two calls, float32, with the loss and every gradient; and R040's dense twin."""
    model = make_model(preset)
    ids = make_ids(model, 1, 8)
    trained = [p for p in model.parameters() if p.requires_grad]
    packed = model(ids, cu_seqlens=torch.tensor([0, 3, 8]), labels=ids)
    found = torch.autograd.grad(packed.loss, trained, allow_unused=True)
    first, second = model(ids[:, :3], labels=ids[:, :3]), model(ids[:, 3:], labels=ids[:, 3:])
    loss = (2 * first.loss + 4 * second.loss) / 6  # type: ignore[operator]
    expected = torch.autograd.grad(loss, trained, allow_unused=True)
    assert relative(packed.logits, torch.cat([first.logits, second.logits], 1)) < 1e-5
    assert abs(value(packed.loss) - value(loss)) < 1e-5
    for a, b in zip(found, expected, strict=True):
        assert a is None or b is None or relative(a, b) < 3e-4 or float((a - b).norm()) < 1e-7
    # The second document's bits do not depend on the first at all.
    changed = ids.clone()
    changed[:, :3] = (changed[:, :3] + 1) % model.config.vocab_size
    other = model(changed, cu_seqlens=torch.tensor([0, 3, 8]))
    assert relative(other.logits[:, 3:], packed.logits[:, 3:]) < 1e-5
    assert not torch.equal(other.logits[:, :3], packed.logits[:, :3])
    # The same documents as a right-padded batch.
    batch = torch.zeros(2, 5, dtype=torch.long)
    batch[0, :3], batch[1] = ids[0, :3], ids[0, 3:]
    padded = model(batch, attention_mask=torch.tensor([[1, 1, 1, 0, 0], [1] * 5]), labels=batch)
    assert abs(value(padded.loss) - value(packed.loss)) < 1e-5


def test_nothing_to_do() -> None:
    """No new tokens: no logits, and the state that came in."""
    for preset in TINY:
        model = tiny(preset)
        _, state = run(model, make_ids(model, 2, 4))
        empty = torch.zeros(2, 0, dtype=torch.long)
        for options in ({}, {"attention_mask": torch.zeros(2, 0)}):
            logits, after = run(model, empty, state, **options)
            assert logits.shape == (2, 0, model.config.vocab_size)
            assert_same_state(after, state)
        logits, fresh = run(model, empty)
        assert_same_state(fresh, model.new_state(2))
        _, padded = run(model, torch.zeros(2, 3, dtype=torch.long), state, attention_mask=torch.zeros(2, 3))
        assert_same_state(padded, state)
        loss = model(empty, labels=empty).loss
        assert value(loss) == 0


# ----------------------------------------------------------------------------------------------------------------- loss


def test_loss_by_hand() -> None:
    """Label t under the logits at t - 1; -100 is left out; the mean is over predicted tokens, not over rows."""
    model = tiny("kda-tiny")
    ids = make_ids(model, 2, 7)
    labels = ids.clone()
    labels[0, 2] = labels[1, 0] = -100  # the first label of a row is never predicted anyway
    labels[1, 4:] = -100
    out = model(ids, labels=labels)
    shares = out.logits.log_softmax(-1)
    wanted = [-shares[row, t - 1, labels[row, t]] for row in range(2) for t in range(1, 7) if labels[row, t] != -100]
    assert len(wanted) == 8 and abs(value(out.loss) - float(torch.stack(wanted).mean().detach())) < 1e-12
    assert model(ids).loss is None
    with_state = model(ids[:, 3:], run(model, ids[:, :3])[1], labels=labels[:, 3:]).loss
    tail = [-shares[row, t - 1, labels[row, t]] for row in range(2) for t in range(4, 7) if labels[row, t] != -100]
    assert abs(value(with_state) - float(torch.stack(tail).mean().detach())) < 1e-11
    int32 = model(ids.int(), labels=labels.int()).loss
    assert abs(value(int32) - value(out.loss)) < 1e-12


def test_loss_over_pads() -> None:
    """A pad is neither predicted nor predicts, wherever it stands; the row's tokens close up around it."""
    model = tiny("kimi-k3-tiny")
    ids, mask = make_ids(model, 2, 8), torch.tensor([[0, 1, 1, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0, 0]]).bool()
    loss = model(ids, attention_mask=mask, labels=ids).loss
    parts = []
    for row in range(2):
        real = ids[row][mask[row]].unsqueeze(0)
        parts.append(F.cross_entropy(model(real).logits[0, :-1], real[0, 1:], reduction="none"))
    assert abs(value(loss) - float(torch.cat(parts).mean().detach())) < 1e-11


@pytest.mark.parametrize("preset", TINY)
def test_loss_without_logits_and_recomputation(preset: str) -> None:
    """`loss` is `forward`'s, with its gradients, dense, padded and packed; so is a pass that keeps little and runs twice."""
    model = make_model(preset, dtype=torch.float64).train()
    ids = make_ids(model, 2, 12)
    labels = ids.masked_fill(torch.rand(ids.shape) < 0.3, -100)
    mask = torch.tensor([[0] * 3 + [1] * 9, [1] * 12])
    for options in ({}, {"attention_mask": mask}, {"cu_seqlens": torch.tensor([0, 5, 6, 24])}):
        shape = (1, 24) if "cu_seqlens" in options else (2, 12)
        given = ids.view(shape), labels.view(shape)
        results, kept = [], []
        for method in ("forward", "loss", "recomputed"):
            model.recompute = method == "recomputed"
            model.zero_grad()
            with saved_sizes() as saved:
                if method == "forward":
                    loss = model(given[0], labels=given[1], **options).loss
                else:
                    loss = model.loss(*given, **options)
            assert loss is not None
            loss.backward()
            kept.append(sum(saved))
            results.append((value(loss), [p.grad for p in model.parameters() if p.requires_grad]))
        model.recompute = False
        assert kept[2] < kept[1]
        for found, grads in results[1:]:
            assert found == pytest.approx(results[0][0], rel=1e-13)
            for ours, theirs in zip(grads, results[0][1], strict=True):
                assert (ours is None) == (theirs is None)
                if ours is not None and theirs is not None:  # a softmax's key bias has no gradient but rounding
                    assert (ours - theirs).norm() < 1e-11 * max(float(theirs.norm()), 1e-3)
    with pytest.raises(pal.InputError, match="labels has shape"):
        model.loss(ids, labels[:, :3])


def test_loss_of_nothing() -> None:
    model = make_model("gpt2-tiny")
    ids = make_ids(model, 2, 5)
    for labels, count in ((torch.full_like(ids, -100), 5), (ids[:, :1], 1)):
        loss = model(ids[:, :count], labels=labels).loss
        assert value(loss) == 0
        loss.backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


# ------------------------------------------------------------------------------------------------------------- mistakes


def test_refused_ids() -> None:
    model = make_model("kda-tiny")
    for ids, message in (
        (torch.tensor([[1, 257]]), r"ids holds 257; this model's vocabulary is 0\.\.256"),
        (torch.tensor([[-1, 2]]), r"ids holds -1; this model's vocabulary is 0\.\.256"),
        (torch.tensor([1, 2]), r"ids is torch.int64 with shape \[2\]; it must be int64 or int32 \[B,T\]"),
        (torch.tensor([[1.0]]), r"ids is torch.float32 with shape \[1, 1\]; it must be int64 or int32"),
        (torch.zeros(0, 3, dtype=torch.long), "ids holds no sequences"),
    ):
        with pytest.raises(pal.InputError, match=message) as caught:
            model(ids)
        assert "\n" not in str(caught.value)


def test_refused_companions() -> None:
    model = make_model("kda-tiny")
    ids = make_ids(model, 2, 4)
    for options, message in (
        ({"attention_mask": torch.ones(2, 4), "cu_seqlens": torch.tensor([0, 4])}, "both given"),
        ({"attention_mask": torch.ones(2, 5)}, r"attention_mask has shape \[2, 5\]"),
        ({"attention_mask": torch.ones(1, 4)}, r"attention_mask has shape \[1, 4\]"),
        ({"labels": ids[:, :3]}, r"labels has shape \[2, 3\]; expected that of ids, \[2, 4\]"),
        ({"cu_seqlens": torch.tensor([0, 4])}, "the batch is 2; with cu_seqlens it must be 1"),
        ({"state": model.new_state(3)}, "the state holds 3 sequences of 4 layers; these ids are 2 sequences for 4 layers"),
        ({"state": make_model("kimi-k3-tiny").new_state(2)}, "2 sequences of 5 layers; .* 2 sequences for 4 layers"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            model(ids, **options)
        assert "\n" not in str(caught.value)
    for bounds in ([0, 2], [1, 4], [0, 3, 2, 4], [0, 5]):
        with pytest.raises(ValueError, match="cu_seqlens"):
            model(ids[:1], cu_seqlens=torch.tensor(bounds))


@pytest.mark.parametrize(
    ("preset", "other"),
    [
        ("gpt2-tiny", "kda-tiny"),
        ("kda-tiny", "gpt2-tiny"),
        ("gpt2-tiny", "smollm2-tiny"),
        ("kda-tiny", "linear-attention-tiny"),
        ("kimi-k3-tiny", "kimi-linear-tiny"),
    ],
)
def test_state_of_another_model(preset: str, other: str) -> None:
    """Same number of layers, but other memories: refused in a sentence, not deep inside."""
    model, stranger = make_model(preset), make_model(other)
    if preset == "kimi-k3-tiny":
        stranger = make_model(other, kv_lora_rank=16)
    _, state = run(stranger, make_ids(stranger, 2, 3))
    with pytest.raises(ValueError, match="state"):
        model(make_ids(model, 2, 1), state)


def test_position_table_ends() -> None:
    """R091: refused before any work, for one long prompt and for a state that grew; exactly full is fine."""
    model = make_model("gpt2-tiny", max_position_embeddings=16)
    ids = make_ids(model, 2, 20)
    with pytest.raises(pal.InputError, match="the sequence reaches 20 tokens; this model's position table ends at 16"):
        model(ids)
    logits, state = run(model, ids[:, :16])
    assert logits.shape[1] == 16
    with pytest.raises(pal.InputError, match="reaches 17 tokens"):
        model(ids[:, 16:17], state)
    mask = torch.tensor([[1] * 16 + [0] * 4, [0] * 10 + [1] * 10])
    _, state = run(model, ids, attention_mask=mask)
    assert state.lengths == (16, 10), "pads take no position"
    run(model, ids[:1], cu_seqlens=torch.tensor([0, 10, 20]))
    rotary = make_model("smollm2-tiny", max_position_embeddings=16)
    assert run(rotary, ids)[0].isfinite().all(), "only a learned table ends"


# ------------------------------------------------------------------------------------------------------------ precision


@pytest.mark.parametrize("preset", TINY)
def test_bfloat16_models_keep_what_must_not_be_rounded(preset: str) -> None:
    """Decay rates, convolution taps, the router's bias and the matrices stay float32; logits are float32."""
    reference = make_model(preset)
    for cast in (lambda m: m.to(torch.bfloat16), lambda m: m.bfloat16(), lambda m: m.half().bfloat16()):
        model = cast(make_model(preset))
        for (name, p), (_, original) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
            kept = name.endswith(("A_log", "dt_bias", "conv1d.weight", "e_score_correction_bias"))
            assert p.dtype == (torch.float32 if kept else torch.bfloat16), name
            if kept:
                assert torch.equal(p, original), f"{name} was rounded on the way"
    ids = make_ids(model, 2, 20)
    logits, state = run(model, ids)
    assert logits.dtype == torch.float32 and logits.isfinite().all()
    exact, _ = run(model.double(), ids)
    assert exact.dtype == torch.float64
    assert all(p.dtype == torch.float64 for p in model.parameters())
    # Rounding the activations now and then sends a token to another expert; most tokens are near all the same.
    near = [relative(a, b) for a, b in zip(logits.flatten(0, 1), exact.flatten(0, 1), strict=True)]
    assert sorted(near)[len(near) // 2] < 0.05


def test_router_logits_are_float32() -> None:
    """The product itself runs in float32, in a bfloat16 model and under autocast."""
    for preset in ("qwen3-next-tiny", "kimi-k3-tiny"):
        model = make_model(preset, dtype=torch.bfloat16)
        for module in model.modules():
            if isinstance(module, Router):
                x = torch.randn(9, model.config.hidden_size).bfloat16()
                _, weights = module(x)
                with torch.autocast("cpu", torch.bfloat16):
                    _, again = module(x)
                assert weights.dtype == torch.float32 and torch.equal(again, weights)
                logits = x.double() @ module.weight.double().mT + 0
                scores = torch.sigmoid(logits) if module.score == "sigmoid" else logits.softmax(-1)
                choice = (scores + module.e_score_correction_bias).topk(module.top_k, -1).indices
                exact = scores.gather(-1, choice)
                exact = exact / exact.sum(-1, keepdim=True) * module.factor
                assert relative(weights, exact) < 1e-6


@pytest.mark.parametrize("preset", TINY)
def test_autocast(preset: str) -> None:
    """Training under bfloat16 autocast: finite, near float32, gradients in the weights' dtype; decoding too."""
    model = make_model(preset)
    ids = make_ids(model, 2, 24)
    exact = model(ids, labels=ids).loss
    with torch.autocast("cpu", torch.bfloat16):
        out = model(ids, labels=ids)
    assert out.logits.dtype == torch.float32 and abs(value(out.loss) - value(exact)) < 0.05
    assert out.loss is not None
    out.loss.backward()
    for name, p in model.named_parameters():
        assert p.grad is None or (p.grad.dtype == p.dtype and p.grad.isfinite().all()), name
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        state, pieces = None, []
        for piece in ids.split([10, 1, 1, 12], 1):
            step = model(piece, state)
            state = step.state
            pieces.append(step.logits)
    # By token: in 16 bits a near tie between two experts may fall either way.
    errors = (torch.cat(pieces, 1) - out.logits).norm(dim=-1) / out.logits.norm(dim=-1)
    assert errors.median() < 0.05 and errors.isfinite().all()


@pytest.mark.parametrize("preset", TINY)
def test_norms_in_front_of_maps_round_for_them(preset: str) -> None:
    """Under autocast their results have the 16 bits that every map would round them to: no bit of the output moves."""
    model = make_model(preset)
    ids = make_ids(model, 2, 24)
    norms = [module for module in model.modules() if getattr(module, "feeds_maps", False)]
    assert len(norms) == (0 if model.config.norm == "layer" else 2 * len(blocks_of(model)) - model.config.mlps.count("moe"))
    given: list[torch.dtype] = []
    hooks = [norm.register_forward_hook(lambda _, inputs, output: given.append(output.dtype)) for norm in norms]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        rounded = model(ids).logits
        assert given == [torch.bfloat16] * len(norms)
        for norm, hook in zip(norms, hooks, strict=True):
            hook.remove()
            norm.feeds_maps = False  # pyright: ignore[reportArgumentType]
        assert torch.equal(model(ids).logits, rounded)


def test_tied_head_stays_tied() -> None:
    model = make_model("smollm2-tiny")
    for cast in (model, model.bfloat16(), model.double()):
        assert cast.lm_head.weight is cast.embed_tokens.weight
    names = [name for name, _ in model.named_parameters()]
    assert "lm_head.weight" not in names
    assert make_model("kimi-k3-tiny").lm_head.weight is not None


# --------------------------------------------------------------------------------------------------------- first values


WRITERS = ("o_proj.weight", "mlp.down_proj.weight", "shared_experts.down_proj.weight", "routed_expert_up_proj.weight")


@torch.no_grad()
def test_first_values() -> None:
    """N(0, initializer_range); with the sum residual the maps that write to it scaled by 1/sqrt(2 layers)."""
    for residual, shrink in (("sum", 10**-0.5), ("block_attention", 1.0)):
        torch.manual_seed(0)
        model = pal.Model(pal.ModelConfig.preset("kimi-k3-tiny", residual=residual, hidden_size=128, initializer_range=0.03))
        for name, p in model.named_parameters():
            if p.dim() < 2 or "_residual" in name or "conv1d" in name:
                continue
            if name.endswith("experts.down_proj") and "shared" not in name:
                continue  # a norm follows
            # The latent form enters the experts by routed_expert_down_proj and writes by routed_expert_up_proj.
            expected = 0.03 * (shrink if name.endswith(WRITERS) and "routed_expert_down" not in name else 1.0)
            assert abs(float(p.std()) / expected - 1) < 8 / p.numel() ** 0.5, name
            assert abs(float(p.mean())) < 5 * expected / p.numel() ** 0.5, name
        for module in model.modules():
            if isinstance(module, ShortConvolution):
                assert abs(float(module.weight[:, -1].mean()) - 1) < 0.02 and abs(float(module.weight[:, :-1].mean())) < 0.02
            if isinstance(module, MoE):
                assert not module.gate.e_score_correction_bias.any()
        assert torch.equal(torch.as_tensor(model.norm.weight), torch.ones(128))
    one, two = (pal.Model(pal.ModelConfig.preset("kimi-k3-tiny")) for _ in range(2))
    assert not torch.equal(one.lm_head.weight, two.lm_head.weight)
    torch.manual_seed(3)
    one = pal.Model(pal.ModelConfig.preset("kimi-k3-tiny"))
    torch.manual_seed(3)
    two = pal.Model(pal.ModelConfig.preset("kimi-k3-tiny"))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


@pytest.mark.parametrize("preset", TINY)
def test_a_fresh_model_knows_nothing(preset: str) -> None:
    """The first loss is that of a uniform guess, and a step lowers it."""
    model = pal.Model(pal.ModelConfig.preset(preset))
    ids = make_ids(model, 4, 32)
    loss = model(ids, labels=ids).loss
    assert abs(value(loss) - math.log(257)) < 0.2
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
    assert value(model(ids, labels=ids).loss) < math.log(257) - 0.1


# --------------------------------------------------------------------------------------------------------------- golden


@pytest.mark.parametrize("preset", TINY)
def test_golden_losses(preset: str) -> None:
    """The first 20 losses of training, as stored: what changes them changes every published run."""
    stored = json.loads(golden.FILE.read_text(encoding="utf-8"))
    assert list(stored) == TINY, "run tests/golden/make.py when a preset is added"
    found = golden.losses(preset)
    assert found[:5] == pytest.approx(stored[preset][:5], rel=1e-4)
    assert found[5:] == pytest.approx(stored[preset][5:], rel=1e-3)
    assert found[-1] < found[0] - 1
