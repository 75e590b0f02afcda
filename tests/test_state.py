"""The state: byte counts of the real tensors, values that stay what they were, rows, snapshots, cropping."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import palimpsest as pal
from palimpsest.state import KeyValue, Latent, Recurrent, Rows, Segments, State
from tests.conftest import TINY, blocks_of, make_ids, make_model, published, relative, state_tensors

ATTENTION_ONLY = ("gpt2-tiny", "smollm2-tiny")


def run(model: pal.Model, ids: Tensor, state: State | None = None, **options: Any) -> tuple[Tensor, State]:
    with torch.no_grad():
        out = model(ids, state, **options)
    return out.logits, out.state


def tensor_bytes(state: State) -> int:
    return sum(x.numel() * x.element_size() for x in state_tensors(state))


def all_mla() -> pal.Model:
    return make_model(
        "kimi-linear-tiny", num_hidden_layers=2, mixers=["mla"] * 2, mlps=["swiglu"] * 2, linear_output_gate="none"
    )


# ---------------------------------------------------------------------------------------------------------- byte counts


@pytest.mark.parametrize("preset", TINY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_num_bytes_is_the_sum_of_the_tensors(preset: str, dtype: torch.dtype) -> None:
    """R116: for several batch sizes and lengths; kinds add up; `bytes_per_token` is what one more token really adds."""
    model = make_model(preset, dtype=dtype)
    for batch, tokens in ((1, 0), (1, 5), (3, 17)):
        state = model.new_state(batch) if tokens == 0 else run(model, make_ids(model, batch, tokens))[1]
        kinds = {kind: state.num_bytes(kind) for kind in ("kv", "recurrent", "conv")}  # type: ignore[arg-type]
        assert state.num_bytes() == sum(kinds.values()) == tensor_bytes(state)
        linear = any(isinstance(layer, Recurrent) for layer in state.layers)
        assert (kinds["recurrent"] > 0) == (kinds["conv"] > 0) == linear
        _, after = run(model, make_ids(model, batch, 1), state)
        assert after.num_bytes() - state.num_bytes() == batch * state.bytes_per_token()
        assert after.num_bytes("recurrent") == kinds["recurrent"] and after.num_bytes("conv") == kinds["conv"]
        growing = any(isinstance(layer, KeyValue) for layer in state.layers)
        assert (state.bytes_per_token() > 0) == growing
    with pytest.raises(ValueError, match="kind is 'keys'; it must be one of kv, recurrent, conv or None"):
        state.num_bytes("keys")  # type: ignore[arg-type]


def test_published_small_hybrid() -> None:
    """R116 to the letter: state 6,144 B + convolution 3,456 B + latents 12,800 B = 22,400 B after 100 tokens."""
    model = make_model(
        "kimi-linear-tiny",
        num_hidden_layers=4,
        mixers=["kda", "kda", "kda", "mla"],
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_conv_kernel_dim=4,
        kv_lora_rank=32,
        qk_rope_head_dim=0,
    )
    _, state = run(model, make_ids(model, 1, 100))
    assert state.num_bytes("recurrent") == 6144
    assert state.num_bytes("conv") == 3456
    assert state.num_bytes("kv") == 12800
    assert state.num_bytes() == 22400 == tensor_bytes(state)


def test_published_sizes_of_k3() -> None:
    """27,648 B per token; 434,110,464 B of matrices, 449,372,160 B with the bfloat16 convolution, whatever the length."""
    model = published("kimi-k3")
    state = model.new_state(1)
    assert state.bytes_per_token() == 27648
    assert state.num_bytes("recurrent") == 434_110_464
    assert state.num_bytes("conv") == 15_261_696
    assert state.num_bytes() == 449_372_160
    assert model.new_state(3).num_bytes() == 3 * 449_372_160
    small = published("kimi-linear-48b").new_state(1)
    assert small.bytes_per_token() == 2 * 4032
    assert small.num_bytes("recurrent") == 4 * 10_485_760 and small.num_bytes("conv") == 2 * 737_280
    gpt2 = published("gpt2-124m").new_state(1)
    assert gpt2.bytes_per_token() == 36_864 and gpt2.num_bytes() == 0


@pytest.mark.parametrize("preset", TINY)
def test_matrices_stay_float32(preset: str) -> None:
    """R012: whatever the model's dtype; rows and convolution inputs follow the model."""
    model = make_model(preset, dtype=torch.bfloat16)
    states = [model.new_state(2), run(model, make_ids(model, 2, 3))[1]]
    states.append(run(model, make_ids(model, 2, 1), states[1])[1])
    for layer in itertools.chain.from_iterable(state.layers for state in states):
        if isinstance(layer, Recurrent):
            assert layer.matrix.dtype == torch.float32 and layer.conv.dtype == torch.bfloat16
        else:
            assert all(x.dtype == torch.bfloat16 for x in layer.rows.tensors)


def test_shapes() -> None:
    """Named fields with the documented axes."""
    model = make_model("gated-deltanet-tiny")
    layer = run(model, make_ids(model, 3, 5))[1].layers[0]
    assert isinstance(layer, Recurrent)
    assert tuple(layer.matrix.shape) == (3, 4, 16, 24) and tuple(layer.conv.shape) == (3, 3, 2 * 2 * 16 + 4 * 24)
    model = make_model("linear-attention-tiny")
    layer = run(model, make_ids(model, 3, 5))[1].layers[0]
    assert isinstance(layer, Recurrent) and tuple(layer.matrix.shape) == (3, 4, 16, 25), "one column for the normaliser"
    model = make_model("smollm2-tiny")
    layer = run(model, make_ids(model, 3, 5))[1].layers[0]
    assert isinstance(layer, KeyValue) and [tuple(x.shape) for x in layer.rows.tensors] == [(3, 5, 2, 16)] * 2
    model = make_model("kimi-k3-tiny")
    layer = run(model, make_ids(model, 3, 5))[1].layers[3]
    assert isinstance(layer, Latent) and [tuple(x.shape) for x in layer.rows.tensors] == [(3, 5, 32 + 8)]


# ------------------------------------------------------------------------------------------------------ value semantics


def contents(state: State) -> list[Tensor]:
    return [x.clone() for x in state_tensors(state)]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("preset", ["smollm2-tiny", "qwen3-next-tiny", "kimi-k3-tiny", "gated-deltanet-tiny"])
def test_two_futures_of_one_state(preset: str, mode: Any) -> None:
    """The state passed in still holds what it held, also where rows are appended in place behind it."""
    model = make_model(preset).double()  # whose answers rounding does not part
    ids = make_ids(model, 2, 60)
    with mode():
        state = model(ids[:, :5]).state
        for at in range(5, 9):  # far enough that spare room has been made and used
            state = model(ids[:, at : at + 1], state).state
        held, lengths = contents(state), state.lengths
        first, second = make_ids(model, 2, 6, seed=2), make_ids(model, 2, 6, seed=3)
        branches = {"first": state, "second": state}
        logits: dict[str, list[Tensor]] = {"first": [], "second": []}
        for at in range(6):  # the branches take turns
            for name, tokens in (("first", first), ("second", second)):
                out = model(tokens[:, at : at + 1], branches[name])
                branches[name] = out.state
                logits[name].append(out.logits)
            assert state.lengths == lengths == (9, 9)
            assert all(torch.equal(a, b) for a, b in zip(state_tensors(state), held, strict=True))
        for name, tokens in (("first", first), ("second", second)):
            expected = model(torch.cat([ids[:, :9], tokens], 1)).logits[:, 9:]
            assert relative(torch.cat(logits[name], 1), expected) < 1e-10
        # The old state can be continued again, by several tokens, with one of them dropped behind it.
        again = model(first, state).logits
        assert relative(again, torch.cat(logits["first"], 1)) < 1e-10
        middle = branches["first"]
        assert relative(model(second, middle).logits, model(torch.cat([ids[:, :9], first, second], 1)).logits[:, 15:]) < 1e-10


def test_modes_can_change_between_tokens() -> None:
    """Prefill with gradients or in inference mode, go on in any other."""
    model = make_model("kimi-k3-tiny")
    ids = make_ids(model, 2, 40)
    expected = model(ids).logits
    modes = (torch.enable_grad, torch.no_grad, torch.inference_mode)
    for order in itertools.product(modes, repeat=3):
        if torch.inference_mode in order and torch.enable_grad in order[order.index(torch.inference_mode) :]:
            continue  # torch itself refuses gradients through what inference mode made
        state, pieces = None, []
        for mode, piece in zip((*order, order[-1]), (ids[:, :9], ids[:, 9:10], ids[:, 10:11], ids[:, 11:]), strict=True):
            with mode():
                out = model(piece, state)
            state = out.state
            pieces.append(out.logits.clone())
        assert relative(torch.cat(pieces, 1), expected) < 1e-5, order


def test_appending_really_is_in_place() -> None:
    """Decoding does not copy the past at every token: most steps write into the buffer that is there."""
    model = make_model("smollm2-tiny")
    _, state = run(model, make_ids(model, 1, 20))
    owners = []
    for _ in range(60):
        _, state = run(model, make_ids(model, 1, 1), state)
        layer = state.layers[0]
        assert isinstance(layer, KeyValue)
        owners.append(layer.rows.tensors[0].data_ptr())
    assert len(set(owners)) <= 4


def test_gradients_reach_the_past() -> None:
    """Training through a state that was handed on gives the gradients of the whole."""
    for preset in ("smollm2-tiny", "kimi-k3-tiny", "gated-deltanet-tiny"):
        model = make_model(preset, dtype=torch.float64)
        ids = make_ids(model, 2, 12)
        grads = []
        for cuts in ([12], [5, 7], [4, 1, 1, 6]):
            state, pieces = None, []
            for piece in ids.split(cuts, 1):
                out = model(piece, state)
                state = out.state
                pieces.append(out.logits)
            loss = torch.cat(pieces, 1).log_softmax(-1)[..., 3].sum()
            parameters = [p for p in model.parameters() if p.requires_grad]
            grads.append(torch.autograd.grad(loss, parameters, allow_unused=True))
        for other in grads[1:]:
            for a, b in zip(other, grads[0], strict=True):
                assert (a is None) == (b is None)
                assert a is None or b is None or relative(a, b) < 1e-9 or float(b.norm()) < 1e-10


class TestRows:
    """The growing buffer by itself, against plain lists."""

    @settings(max_examples=60)
    @given(steps=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.booleans()), max_size=12), grad=st.booleans())
    def test_any_tree_of_appends(self, steps: list[tuple[int, int, bool]], grad: bool) -> None:
        """Every value ever made keeps its content, whichever of the earlier ones is appended to."""
        values: list[tuple[Rows, list[float]]] = [(Rows((torch.zeros(1, 0, 1),), 0), [])]
        counter = itertools.count(1.0)
        for parent, tokens, inference in steps:
            rows, content = values[parent % len(values)]
            new = [next(counter) for _ in range(tokens)]
            mode = torch.inference_mode() if inference and not grad else torch.set_grad_enabled(grad)
            with mode:
                segments = Segments((len(content),), (tokens,), None, torch.device("cpu"))
                grown = rows.append((torch.tensor(new).view(1, -1, 1),), segments)
            values.append((grown, content + new))
            torch.set_grad_enabled(True)
            for held, expected in values:
                assert held.tensors[0].flatten().tolist() == expected and held.size == len(expected)

    @settings(max_examples=60)
    @given(
        first=st.lists(st.integers(0, 4), min_size=3, max_size=3),
        rounds=st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3), max_size=4),
        grad=st.booleans(),
    )
    def test_unequal_rows(self, first: list[int], rounds: list[list[int]], grad: bool) -> None:
        """Packed tokens land behind each sequence's own past."""
        rows = Rows((torch.zeros(3, 0, 1),), 0)
        content: list[list[float]] = [[], [], []]
        counter = itertools.count(1.0)
        with torch.set_grad_enabled(grad):
            for lengths in [first, *rounds]:
                new = [[next(counter) for _ in range(count)] for count in lengths]
                bounds = torch.tensor([0, *itertools.accumulate(lengths)])
                past = tuple(len(c) for c in content)
                flat = torch.tensor([x for row in new for x in row]).view(1, -1, 1)
                rows = rows.append((flat,), Segments(past, tuple(lengths), bounds, flat.device))
                content = [old + more for old, more in zip(content, new, strict=True)]
                for row, expected in enumerate(content):
                    assert rows.tensors[0][row, : len(expected), 0].tolist() == expected


# -------------------------------------------------------------------------------------------------------------- methods


@pytest.mark.parametrize("preset", TINY)
def test_select(preset: str) -> None:
    """Rows in any order, several times, by list or tensor; each goes on as if it had been alone."""
    model = make_model(preset, dtype=torch.float64)
    ids, more = make_ids(model, 3, 7), make_ids(model, 4, 3, seed=2)
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3, [0, 1, 1, 1, 1, 1, 1]])
    _, state = run(model, ids, attention_mask=mask)
    held = contents(state)
    for rows in ([2, 0, 0, 1], torch.tensor([2, 0, 0, 1]), [-1, -3, 0, 1]):
        chosen = state.select(rows)
        assert chosen.lengths == (6, 7, 7, 4) and chosen.batch_size == 4
        logits, _ = run(model, more, chosen)
        for row, source in enumerate((2, 0, 0, 1)):
            past = ids[source][mask[source].bool()]
            alone, _ = run(model, torch.cat([past, more[row]]).unsqueeze(0))
            assert relative(logits[row], alone[0, -3:]) < 1e-11
    assert all(torch.equal(a, b) for a, b in zip(state_tensors(state), held, strict=True))
    one, none = state.select([1]), state.select([])
    assert one.lengths == (4,) and none.lengths == () and none.num_bytes("recurrent") == 0
    for wrong in (3, -4):
        with pytest.raises(ValueError, match=f"row {wrong} is outside the state's 3 sequences"):
            state.select([0, wrong])


@pytest.mark.parametrize("preset", TINY)
def test_snapshot_and_restore(preset: str) -> None:
    model = make_model(preset)
    ids = make_ids(model, 2, 12)
    _, state = run(model, ids[:, :8])
    saved = state.snapshot()
    held = contents(saved)
    expected, _ = run(model, ids[:, 8:], state)
    _, later = run(model, make_ids(model, 2, 5, seed=9), state)
    assert later.restore(saved) is later and later.lengths == (8, 8)
    assert relative(run(model, ids[:, 8:], later)[0], expected) < 1e-6
    assert all(torch.equal(a, b) for a, b in zip(contents(saved), held, strict=True))
    if all(isinstance(layer, KeyValue) for layer in state.layers):
        state.crop(3)
        assert saved.lengths == (8, 8), "a snapshot does not follow what happens to the state"
        assert all(torch.equal(a, b) for a, b in zip(contents(saved), held, strict=True))


@pytest.mark.parametrize("preset", [*ATTENTION_ONLY, "all-mla"])
def test_crop(preset: str) -> None:
    """Equals a fresh run of the prefix, and goes on as one."""
    model = all_mla() if preset == "all-mla" else make_model(preset)
    ids = make_ids(model, 2, 12)
    for keep in (0, 1, 7, 12):
        _, state = run(model, ids)
        _, earlier = run(model, ids)
        assert state.crop(keep) is state and state.lengths == (keep, keep)
        fresh = run(model, ids[:, :keep])[1] if keep else model.new_state(2)
        assert state.num_bytes() == fresh.num_bytes()
        assert all(relative(a, b) < 1e-6 for a, b in zip(state_tensors(state), state_tensors(fresh), strict=True))
        more = make_ids(model, 2, 3, seed=keep)
        assert relative(run(model, more, state)[0], run(model, torch.cat([ids[:, :keep], more], 1))[0][:, keep:]) < 1e-5
        assert earlier.lengths == (12, 12)


def test_crop_of_unequal_rows() -> None:
    model = make_model("smollm2-tiny")
    ids = make_ids(model, 2, 9)
    mask = torch.tensor([[1] * 9, [1] * 6 + [0] * 3])
    _, state = run(model, ids, attention_mask=mask)
    state.crop(4)
    more = make_ids(model, 2, 2, seed=3)
    expected, _ = run(model, torch.cat([ids[:, :4], more], 1))
    assert relative(run(model, more, state)[0], expected[:, 4:]) < 1e-5
    _, state = run(model, ids, attention_mask=mask)
    with pytest.raises(ValueError, match=r"cannot crop to 7 tokens: the sequences hold \[9, 6\]"):
        state.crop(7)
    with pytest.raises(ValueError, match=r"cannot crop to -1 tokens"):
        state.crop(-1)


@pytest.mark.parametrize("preset", [name for name in TINY if name not in ATTENTION_ONLY])
def test_crop_is_refused_where_it_cannot_be_exact(preset: str) -> None:
    """What a recurrent memory has overwritten is gone. A refused crop changes nothing; cropping nothing is allowed."""
    model = make_model(preset)
    _, state = run(model, make_ids(model, 2, 6))
    held = contents(state)
    with pytest.raises(ValueError, match="cannot crop: layer 0 has a recurrent memory; restore a snapshot instead"):
        state.crop(5)
    assert state.lengths == (6, 6) and all(torch.equal(a, b) for a, b in zip(state_tensors(state), held, strict=True))
    assert state.crop(6) is state


def test_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """R052: every attention layer of one pass sees the same offset, 0 and then 5, 6, 7; the length is the tokens seen."""
    model = make_model("qwen3-next-tiny", position="rope")
    ids = make_ids(model, 1, 8)
    seen: list[list[int]] = []
    for block in blocks_of(model):
        block.mixer.register_forward_pre_hook(lambda module, args: seen[-1].append(args[2].past[0]))
    state = model.new_state(1)
    assert state.lengths == (0,)
    for count, piece in zip((5, 6, 7, 8), ids.split([5, 1, 1, 1], 1), strict=True):
        seen.append([])
        _, state = run(model, piece, state)
        assert state.lengths == (count,)
    assert seen == [[0] * 4, [5] * 4, [6] * 4, [7] * 4]


def test_segments() -> None:
    """Rows and positions of every token, dense and packed."""
    device = torch.device("cpu")
    dense = Segments((2, 5), (3, 3), None, device)
    assert dense.lengths == (5, 8) and not dense.is_uniform
    assert dense.rows.tolist() == [[0, 0, 0], [1, 1, 1]] and dense.positions.tolist() == [[2, 3, 4], [5, 6, 7]]
    packed = Segments((2, 0, 5), (3, 0, 1), torch.tensor([0, 3, 3, 4]), device)
    assert packed.rows.tolist() == [[0, 0, 0, 2]] and packed.positions.tolist() == [[2, 3, 4, 5]]
    assert Segments((4, 4), (1, 1), None, device).is_uniform


# Joined and rewound


@pytest.mark.parametrize("preset", TINY)
def test_join_puts_sequences_side_by_side(preset: str) -> None:
    """R046: joined states go on as each would alone; select takes them apart again."""
    model = make_model(preset)
    parts = [model(make_ids(model, rows, tokens, seed=tokens)).state for rows, tokens in ((1, 9), (2, 3), (1, 14))]
    new = make_ids(model, 4, 2, seed=5)
    together = model(new, pal.State.join(parts))
    start = 0
    for part in parts:
        rows = list(range(start, start + part.batch_size))
        alone = model(new[rows], part)
        assert relative(together.logits[rows], alone.logits) < 1e-5
        apart = together.state.select(rows)
        assert apart.lengths == alone.state.lengths and apart.num_bytes() == alone.state.num_bytes()
        for found, expected in zip(state_tensors(apart), state_tensors(alone.state), strict=True):
            assert relative(found, expected) < 1e-5
        start += part.batch_size


@pytest.mark.parametrize("preset", TINY)
@pytest.mark.parametrize("grad", [False, True])
def test_rewind_forgets_what_came_after(preset: str, grad: bool) -> None:
    """R048: some rows go back and some stay; what follows is as if the forgotten tokens had never been."""
    model = make_model(preset)
    with torch.set_grad_enabled(grad):
        ids, wrong, new = make_ids(model, 3, 8), make_ids(model, 3, 4, seed=2), make_ids(model, 3, 3, seed=3)
        before = model(ids).state
        state = model(wrong, before).state.rewind(before, [8, 12, 8])
        found = model(new, state).logits
        assert relative(found[[0, 2]], model(new, before).logits[[0, 2]]) < 1e-5
        assert relative(found[1], model(torch.cat([wrong[1], new[1]]).unsqueeze(0), before.select([1])).logits[0, 4:]) < 1e-5
        again = model(wrong, before).state
        if again.num_bytes("recurrent"):
            with pytest.raises(ValueError, match="10 tokens in row 1"):
                again.rewind(before, [12, 10, 12])
        else:
            shorter = again.rewind(before, [12, 10, 9])
            expected = model(torch.cat([wrong[1, :2], new[1]]).unsqueeze(0), before.select([1])).logits[0, 2:]
            assert relative(model(new, shorter).logits[1], expected) < 1e-5
