"""A decoding step by whole sublayers against the modules as written: outputs, states, and when it has to stand back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import palimpsest as pal
from palimpsest import step
from palimpsest.linear import Linear8, pack
from palimpsest.model import Block
from palimpsest.ops import cpu
from palimpsest.state import LayerState, Recurrent, Segments, State
from tests.conftest import TINY, blocks_of, make_ids, make_model, relative, state_tensors

pytestmark = pytest.mark.skipif(cpu.library()[0] is None, reason=f"the compiled backend: {cpu.library()[1]}")

# What the presets leave out, each with the layers that it changes.
FORMS: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in TINY} | {
    "negative eigenvalues": ("deltanet-tiny", {"allow_neg_eigval": True}),
    "no convolution": ("gated-deltanet-tiny", {"linear_conv_kernel_dim": 0}),
    "one tap": ("gated-deltanet-tiny", {"linear_conv_kernel_dim": 1}),
    "ungated": ("gated-deltanet-tiny", {"linear_output_gate": "none"}),
    "wide values": ("kda-tiny", {"linear_value_head_dim": 64, "linear_key_head_dim": 70}),
    "rotated latents": ("kimi-linear-tiny", {"mla_use_nope": False}),
    "no shared expert": ("kimi-linear-tiny", {"num_shared_experts": 0}),
    "odd sizes": ("smollm2-tiny", {"hidden_size": 60, "intermediate_size": 101, "head_dim": 10}),
    "latents without a norm": ("hybrid-latent-moe-tiny", {"latent_moe_use_norm": False}),
}
PASTS = {"one": (9,), "together": (5, 5, 5), "apart": (3, 11, 0, 6, 1)}


def drawn(form: str, dtype: str = "f32") -> pal.Model:
    preset, fields = FORMS[form]
    model = make_model(preset, **fields)
    if dtype == "q8_0":
        pack(model)
    return model.to(torch.bfloat16) if dtype == "bf16" else model


@torch.no_grad()
def begun(block: Any, past: tuple[int, ...], width: int, dtype: torch.dtype) -> LayerState:
    """The state of a layer's mixer after some tokens of each sequence."""
    bounds = torch.tensor([0, *torch.tensor(past).cumsum(0).tolist()])
    segments = Segments((0,) * len(past), past, bounds, bounds.device)
    return block.mixer(
        torch.randn(1, sum(past), width).to(dtype), block.mixer.new_state(len(past), dtype, bounds.device), segments
    )[1]


def converted(state: LayerState, dtype: torch.dtype) -> LayerState:
    if isinstance(state, Recurrent):
        return Recurrent(state.matrix.to(dtype), state.conv.to(dtype))
    return type(state)(type(state.rows)(tuple(x.to(dtype) for x in state.rows.tensors), state.rows.size))


def parts(state: LayerState, lengths: tuple[int, ...]) -> list[Tensor]:
    """What a state holds, without rows that nobody sees."""
    if isinstance(state, Recurrent):
        return [state.matrix, state.conv]
    return [tensor[row, :length] for tensor in state.rows.tensors for row, length in enumerate(lengths)]


def exact_copy(block: Any) -> Any:
    """The same layer in float64; eight-bit maps as plain ones."""
    twin = copy.deepcopy(block)
    for module in list(twin.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Linear8):
                plain = nn.Linear(child.code.shape[1], child.code.shape[0], bias=child.bias is not None)
                plain.weight = nn.Parameter(child.weight)
                plain.register_parameter("bias", child.bias)
                setattr(module, name, plain)
    return twin.double()


@pytest.mark.parametrize("past", PASTS.values(), ids=PASTS)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "q8_0"])
@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_a_step_is_the_sublayer_as_written(form: str, dtype: str, past: tuple[int, ...]) -> None:
    """Every layer of a model on a token of each sequence; in bfloat16 as near to the exact numbers as the modules come."""
    model = drawn(form, dtype)
    width, kind = model.config.hidden_size, model.embed_tokens.weight.dtype
    segments = Segments(past, (1,) * len(past), None, torch.device("cpu"))
    assert step.serves(segments)
    for index, block in enumerate(blocks_of(model)):
        state, x = begun(block, past, width, kind), torch.randn(len(past), 1, width).to(kind)
        twin = exact_copy(block)
        exact, exact_state = twin.mixer(twin.mixer_norm(x.double()), converted(state, torch.float64), segments)
        written = block.mixer(block.mixer_norm(x), state, segments)[0] if dtype == "bf16" else None
        found = step.mix(block.mixer_step, block.mixer_norm, block.mixer, x, state, segments)
        assert (found is None) == (model.config.mixers[index] == "linear_attention")
        if found is not None:
            assert_near(found[0], exact, written)
            pairs = zip(parts(found[1], segments.lengths), parts(exact_state, segments.lengths), strict=True)
            limit = 2e-2 if dtype == "bf16" else 1e-5
            assert all(a.dtype in (kind, torch.float32) and relative(a, b) < limit for a, b in pairs)
        exact = twin.mlp(twin.mlp_norm(x.double()))
        written = block.mlp(block.mlp_norm(x)) if dtype == "bf16" else None
        fed = step.feed(block.mlp_step, block.mlp_norm, block.mlp, x, segments)
        assert fed is not None
        assert_near(fed, exact, written)


def assert_near(found: Tensor, exact: Tensor, written: Tensor | None) -> None:
    """Within 1e-5, or in bfloat16, where `written` is what the modules give, no farther than that."""
    limit = 1e-5 if written is None else relative(written, exact) + 2e-3
    assert found.dtype is (torch.float32 if written is None else written.dtype)
    assert relative(found, exact) < limit


@pytest.mark.parametrize("preset", TINY)
@torch.no_grad()
def test_states_stay_values(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps from one state give what each gives alone, and leave the state as it was; so do steps of the modules."""
    model = make_model(preset)
    ids = make_ids(model, 2, 12)
    start = model(ids[:, :9]).state
    held = [tensor.clone() for tensor in state_tensors(start)]
    taken = [model(ids[:, t : t + 1], start) for t in (9, 10, 9)]
    after = model(ids[:, 11:], taken[0].state)
    assert all(torch.equal(a, b) for a, b in zip(state_tensors(start), held, strict=True))
    assert torch.equal(taken[0].logits, taken[2].logits)
    monkeypatch.setattr(step, "serves", lambda segments: False)
    for t, found in zip((9, 10), taken, strict=False):
        expected = model(ids[:, t : t + 1], start)
        assert relative(found.logits, expected.logits) < 1e-5
        pairs = zip(state_tensors(found.state), state_tensors(expected.state), strict=True)
        assert all(relative(a, b) < 1e-5 for a, b in pairs)
        if t == 9:
            assert relative(after.logits, model(ids[:, 11:], expected.state).logits) < 1e-5


@pytest.mark.parametrize("preset", TINY)
@torch.no_grad()
def test_without_the_library_a_step_is_the_modules(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(preset)
    ids = make_ids(model, 2, 9)
    found = model(ids[:, 8:], model(ids[:, :8]).state).logits
    monkeypatch.setattr("palimpsest.ops.cpu.library", lambda: (None, "there is none"))
    expected = model(ids[:, 8:], model(ids[:, :8]).state).logits
    # float32 alone is up to 1e-5 from float64 in kimi-k3-tiny, whichever way a step is taken.
    assert relative(found, expected) < 3e-5
    whole = model(ids).logits
    assert relative(expected, whole[:, 8:]) < 3e-5


@pytest.mark.parametrize("preset", ["gpt2-tiny", "qwen3-next-tiny", "kimi-linear-tiny", "hybrid-latent-moe-tiny"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_row_does_not_see_its_batch_nor_the_threads(preset: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(preset, dtype=dtype)
    ids = make_ids(model, 6, 8)
    hidden, state = model.hidden(ids[:, :7])
    together, after = model.hidden(ids[:, 7:], state)
    for row in range(6):
        alone, own = model.hidden(ids[row : row + 1, 7:], state.select([row]))
        assert torch.equal(alone[0], together[row])
        assert all(torch.equal(a, b) for a, b in zip(state_tensors(own), state_tensors(after.select([row])), strict=True))
    monkeypatch.setattr("palimpsest.ops.cpu_layer.LARGE", 0)
    model.layers_step = step.GatheredLayers()
    for block in blocks_of(model):
        block.mixer_step, block.mlp_step = step.Gathered(), step.Gathered()
    torch.set_num_threads(2)
    try:
        shared = model.hidden(ids[:, 7:], state)[0]
    finally:
        torch.set_num_threads(1)
    assert torch.equal(shared, together)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "q8_0"])
@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_all_layers_in_one_call_are_each_in_its_own(form: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, the sums of the residual stream too; models that join layers in another way do not go there."""
    model = drawn(form, dtype)
    ids = make_ids(model, 3, 9)
    state, calls, run = model(ids[:, :7]).state, [], step.run

    def watched(*arguments: Any) -> Any:
        calls.append(run(*arguments))
        return calls[-1]

    def steps() -> tuple[Tensor, Any]:
        first = model.hidden(ids[:, 7:8], state)
        return model.hidden(ids[:, 8:], first[1])

    monkeypatch.setattr(step, "run", watched)
    hidden, after = steps()
    plain = model.config.residual == "sum"
    assert len(calls) == (2 if plain else 0)
    assert all((each is None) == ("linear_attention" in model.config.mixers) for each in calls)
    monkeypatch.setattr(step, "run", lambda *_: None)
    expected, expected_after = steps()
    assert torch.equal(hidden, expected)
    assert all(torch.equal(a, b) for a, b in zip(state_tensors(after), state_tensors(expected_after), strict=True))


@torch.no_grad()
def test_a_layer_of_ones_own_is_run() -> None:
    """One that is hooked, of another class, or left out: no call for all layers passes it by."""

    class Loud(Block):
        def forward(self, stream: Any, state: LayerState, segments: Segments, recompute: bool = False) -> LayerState:
            stream.total = stream.total * 2
            return super().forward(stream, state, segments, recompute)

    model = make_model("gpt2-tiny")
    ids = make_ids(model, 2, 6)
    state = model(ids[:, :5]).state
    before = model.hidden(ids[:, 5:], state)[0]
    seen: list[int] = []
    handle = model.layers[0].register_forward_hook(lambda *_: seen.append(1))
    assert torch.equal(model.hidden(ids[:, 5:], state)[0], before) and seen == [1]
    handle.remove()
    model.hidden(ids[:, 5:], state)
    assert seen == [1]
    layer = model.layers[1]
    layer.__class__ = Loud
    assert not torch.equal(model.hidden(ids[:, 5:], state)[0], before)
    layer.__class__ = Block
    assert torch.equal(model.hidden(ids[:, 5:], state)[0], before)
    del model.layers[-1]
    model.__dict__.pop("_forms", None)
    state = State(state.layers[:-1], state.lengths)
    shorter = model.hidden(ids[:, 5:], state)[0]
    model.layers_step = step.GatheredLayers()
    assert not torch.equal(shorter, before) and torch.equal(model.hidden(ids[:, 5:], state)[0], shorter)


def change_in_place(model: Any) -> None:
    for weight in model.layers.parameters():
        weight.data.mul_(1.1)


def change_parameters(model: Any) -> None:
    for module in model.layers.modules():
        for name, weight in list(module._parameters.items()):
            if weight is not None:
                setattr(module, name, nn.Parameter(weight.detach() * 1.1, requires_grad=weight.requires_grad))


def change_storage(model: Any) -> None:
    for weight in model.layers.parameters():
        weight.data = weight.data * 1.1


@pytest.mark.parametrize("change", [change_in_place, change_parameters, change_storage, pack, torch.nn.Module.bfloat16])
@pytest.mark.parametrize("preset", ["gpt2-tiny", "kimi-linear-tiny"])
@torch.no_grad()
def test_other_weights_are_seen(preset: str, change: Callable[[Any], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """What was gathered is gathered again when weights have changed or moved, and in a copy."""
    model, ids = make_model(preset), make_ids(make_model(preset), 2, 8)
    before = model(ids[:, 7:], model(ids[:, :7]).state).logits
    twin = copy.deepcopy(model)
    change(model)
    state = model(ids[:, :7]).state
    found = model(ids[:, 7:], state).logits
    assert torch.equal(twin(ids[:, 7:], twin(ids[:, :7]).state).logits, before)
    monkeypatch.setattr(step, "serves", lambda segments: False)
    expected = model(ids[:, 7:], state).logits
    assert relative(found, expected) < (3e-2 if change is torch.nn.Module.bfloat16 else 1e-5)
    assert relative(before, expected) > 1e-3


def test_where_it_stands_back() -> None:
    """Not in front of somebody who watches, wants gradients or another dtype, nor for other passes than a step."""
    cpu_device, model = torch.device("cpu"), make_model("kimi-linear-tiny")
    past, one = (4, 4), Segments((4, 4), (1, 1), None, torch.device("cpu"))
    assert not step.serves(one)  # gradients
    with torch.no_grad():
        assert not step.serves(Segments((4, 4), (2, 2), None, cpu_device))
        assert not step.serves(Segments((4, 4), (1, 1), torch.tensor([0, 1, 2]), cpu_device))
        assert not step.serves(Segments((4,) * 17, (1,) * 17, None, cpu_device))
        with torch.autocast("cpu"):
            assert not step.serves(Segments(past, (1, 1), None, cpu_device))
        x = torch.randn(2, 1, model.config.hidden_size)
        for block in blocks_of(model):
            state = begun(block, past, x.shape[2], x.dtype)

            def mixes(block: Any = block, state: LayerState = state, x: Tensor = x) -> bool:
                return step.mix(step.Gathered(), block.mixer_norm, block.mixer, x, state, one) is not None

            def feeds(block: Any = block, x: Tensor = x) -> bool:
                return step.feed(step.Gathered(), block.mlp_norm, block.mlp, x, one) is not None

            assert mixes() and feeds()
            for name, runs in (("mixer", mixes), ("mlp", feeds)):
                inner = list(getattr(block, name).children())[0]
                for module in (getattr(block, f"{name}_norm"), getattr(block, name), inner):
                    for hook in (module.register_forward_hook, module.register_forward_pre_hook):
                        handle = hook(lambda *_: None)
                        assert not runs()
                        handle.remove()
                assert runs()
                setattr(block, name, block.__getattr__(name).double())
                assert not runs()
                setattr(block, name, block.__getattr__(name).float())
            assert not mixes(x=x.transpose(0, 1).double().transpose(0, 1))


@torch.no_grad()
def test_interest_may_come_and_go() -> None:
    """What was gathered once is not used while somebody watches a part of it, and is when he has gone."""
    block = blocks_of(make_model("kimi-linear-tiny"))[3]
    gathered, x = step.Gathered(), torch.randn(2, 1, block.mlp.gate.weight.shape[1])
    one = Segments((4, 4), (1, 1), None, torch.device("cpu"))

    def feeds() -> bool:
        return step.feed(gathered, block.mlp_norm, block.mlp, x, one) is not None

    assert feeds()
    router = block.mlp.gate
    for name in ("observe", "forward"):
        before = router.__dict__.get(name)
        setattr(router, name, lambda *_: None)
        assert not feeds()
        assert not feeds()
        if before is None and name == "forward":
            del router.forward
        else:
            setattr(router, name, before)
        assert feeds()
    handle = router.register_forward_pre_hook(lambda *_: None)
    assert not feeds()
    handle.remove()
    assert feeds()
    part, block.mlp.shared_experts.up_proj = block.mlp.shared_experts.up_proj, nn.Identity()
    assert not feeds()
    block.mlp.shared_experts.up_proj = part
    assert feeds()


@torch.no_grad()
def test_observers_still_hear() -> None:
    model, heard = make_model("kimi-linear-tiny"), []
    blocks, ids = blocks_of(model), make_ids(make_model("kimi-linear-tiny"), 1, 6)
    state = model(ids[:, :5]).state
    blocks[1].mlp.gate.observe = lambda logits, experts: heard.append("router")
    blocks[3].mixer.register_forward_pre_hook(lambda *_: heard.append("mixer"))
    model(ids[:, 5:], state)
    assert heard == ["router", "mixer"]
