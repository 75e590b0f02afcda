"""Any history gives the same answer: whatever a state has been through, the next logits are those of the text read at once.

A random program drives one state: equal steps, padded steps, packed steps of unequal length, chosen and repeated rows, branches
that go back to a snapshot, and crops where memory allows them. After every step each row is compared with its own text.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import palimpsest as pal
from palimpsest.state import State
from tests.conftest import make_model, relative
from tests.test_mixers import FORMS, WIDTH

TINY = [name for name in pal.presets() if name.endswith("-tiny")]
MODELS: dict[str, pal.Model] = {}
LONGEST = 14


def model_of(name: str) -> pal.Model:
    """A tiny preset, or two layers of one form of mixer, in float64; shared, since nothing here changes a parameter."""
    if name not in MODELS:
        if name in FORMS:
            mixer, fields = FORMS[name]
            base: dict[str, Any] = {"vocab_size": 11, "hidden_size": WIDTH, "num_hidden_layers": 2, "intermediate_size": 8}
            torch.manual_seed(0)
            config = {**base, "mixers": [mixer] * 2, "mlps": ["swiglu"] * 2, "initializer_range": 0.5, **fields}
            MODELS[name] = pal.Model(pal.ModelConfig.from_dict(config)).double().eval()
        else:
            MODELS[name] = make_model(name, dtype=torch.float64)
    return MODELS[name]


@dataclass
class History:
    """The texts of the rows, beside the state that has read them."""

    model: pal.Model
    texts: list[list[int]]
    state: State | None = None
    numbers: Any = field(default_factory=itertools.count)

    def fresh(self, count: int) -> list[int]:
        """New tokens, another run of them every time."""
        return [(7 * i * i + 3 * i + 1) % self.model.config.vocab_size for i in itertools.islice(self.numbers, count)]

    def step(self, new: list[list[int]], **arguments: Any) -> list[Tensor]:
        """Reads the new tokens of every row, packed, padded or as they are; returns each row's new logits."""
        for text, tokens in zip(self.texts, new, strict=True):
            text += tokens
        mode = arguments.pop("mode")
        if mode == "packed":
            bounds = torch.tensor([0, *itertools.accumulate(len(tokens) for tokens in new)])
            ids = torch.tensor([list(itertools.chain(*new))], dtype=torch.long)
            out = self.model(ids, self.state, cu_seqlens=bounds)
            logits = [out.logits[0, a:b] for a, b in itertools.pairwise(bounds.tolist())]
        else:
            width = max(len(tokens) for tokens in new)
            mask = torch.zeros(len(new), width, dtype=torch.long)
            ids = torch.zeros(len(new), width, dtype=torch.long)
            for row, tokens in enumerate(new):
                places = slice(width - len(tokens), width) if mode == "left" else slice(0, len(tokens))
                ids[row, places], mask[row, places] = torch.tensor(tokens, dtype=torch.long), 1
            out = self.model(ids, self.state, attention_mask=mask if mode in ("left", "right") else None)
            logits = [out.logits[row][mask[row].bool()] for row in range(len(new))]
        self.state = out.state
        return logits

    def check(self, logits: list[Tensor]) -> None:
        assert self.state is not None and self.state.lengths == tuple(len(text) for text in self.texts)
        for text, found in zip(self.texts, logits, strict=True):
            if len(found):
                whole = self.model(torch.tensor([text])).logits[0, -len(found) :]
                assert relative(found, whole) < 1e-10


@torch.no_grad()
def play(model: pal.Model, data: st.DataObject) -> None:
    history = History(model, [[] for _ in range(data.draw(st.integers(1, 3), label="rows"))])
    kept: tuple[State, list[list[int]]] | None = None
    croppable = all(mixer in ("attention", "mla") for mixer in model.config.mixers)
    moves = ["dense", "left", "right", "packed", "select", "snapshot", "restore", *(["crop"] if croppable else [])]
    for _ in range(data.draw(st.integers(2, 6), label="steps")):
        move = data.draw(st.sampled_from(moves), label="move")
        room = LONGEST - max(len(text) for text in history.texts)
        if move in ("dense", "left", "right", "packed"):
            if move == "dense":
                counts = [data.draw(st.integers(0, room), label="tokens")] * len(history.texts)
            else:
                counts = [data.draw(st.integers(0, room), label="tokens") for _ in history.texts]
            history.check(history.step([history.fresh(count) for count in counts], mode=move))
        elif history.state is None:
            continue
        elif move == "select":
            rows = data.draw(st.lists(st.integers(0, len(history.texts) - 1), min_size=1, max_size=3), label="select")
            history.state = history.state.select(rows)
            history.texts = [list(history.texts[row]) for row in rows]
        elif move == "snapshot":
            kept = history.state.snapshot(), [list(text) for text in history.texts]
        elif move == "restore" and kept is not None:
            history.state = history.state.restore(kept[0])
            history.texts = [list(text) for text in kept[1]]
        elif move == "crop":
            shortest = min(len(text) for text in history.texts)
            size = data.draw(st.integers(0, shortest), label="crop")
            if len({len(text) for text in history.texts}) == 1 or size < shortest:
                history.state = history.state.snapshot().crop(size)
                history.texts = [text[:size] for text in history.texts]
    history.check(history.step([history.fresh(1) for _ in history.texts], mode="dense"))


@pytest.mark.parametrize("preset", TINY)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_history_of_a_preset(preset: str, data: st.DataObject) -> None:
    play(model_of(preset), data)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_history_of_a_mixer(form: str, data: st.DataObject) -> None:
    play(model_of(form), data)


@pytest.mark.parametrize("preset", ["gpt2-tiny", "kda-tiny", "kimi-k3-tiny"])
def test_long_histories(preset: str) -> None:
    """Past one chunk and with unequal rows: 150 tokens in uneven packed pieces."""
    model = model_of(preset)
    history = History(model, [[], [], []])
    with torch.no_grad():
        for counts in ([70, 3, 0], [1, 64, 65], [0, 1, 17], [33, 60, 5], [1, 1, 1]):
            history.check(history.step([history.fresh(count) for count in counts], mode="packed"))
