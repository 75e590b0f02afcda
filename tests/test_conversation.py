"""A conversation: each turn is what the model says to the whole, only new tokens are read, and a file brings it all back."""

from __future__ import annotations

import functools
import io
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import palimpsest as pal
from palimpsest.cli import main
from palimpsest.config import InputError
from palimpsest.conversation import Conversation
from palimpsest.messages import message_ids, stop_texts
from palimpsest.tokenizer import Tokenizer
from tests.conftest import state_tensors

TOKENIZER = Tokenizer.bytes()
PRESETS = ["smollm2-tiny", "kda-tiny", "kimi-k3-tiny"]
GREEDY = pal.SamplingConfig(max_new_tokens=20, temperature=0.0)


@functools.cache
def make(preset: str, seed: int = 3) -> pal.Model:
    torch.manual_seed(seed)
    return pal.Model(pal.ModelConfig.preset(preset, vocab_size=257, initializer_range=0.2)).eval()


def say(conversation: Conversation, text: str, sampling: pal.SamplingConfig = GREEDY) -> str:
    return "".join(conversation.say(text, sampling))


def afresh(preset: str, messages: list[dict[str, str]]) -> str:
    """What the model says to the whole conversation, read at once."""
    prompt = TOKENIZER.decode(message_ids(TOKENIZER, messages))
    return str(pal.generate(make(preset), TOKENIZER, [prompt], GREEDY.replace(stop=stop_texts(TOKENIZER)))[0])


@pytest.mark.parametrize("preset", PRESETS)
def test_turns_are_those_of_the_whole_and_read_only_what_is_new(preset: str) -> None:
    conversation = Conversation(make(preset), TOKENIZER, "Be brief.")
    messages = [{"role": "system", "content": "Be brief."}]
    for turn in ("Hello", "And then?", "Why? " * 150):
        held = conversation.state.lengths[0]
        messages.append({"role": "user", "content": turn})
        answer = say(conversation, turn)
        assert answer == afresh(preset, messages)
        messages.append({"role": "assistant", "content": answer})
        assert conversation.messages == messages
        before = len(message_ids(TOKENIZER, messages[:-1]))
        # An answer whose bytes are no characters is written as U+FFFD, which is other bytes: it is read again.
        assert conversation.tokens_read <= before - held + 20 + len(answer.encode())
        assert len(conversation.ids) == conversation.state.lengths[0]
    assert conversation.tokens_read < 5 * 150 + 200


def test_plain_answers_are_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """R055: an answer of letters comes back as it was drawn, so that only the last of its tokens and what is new are read."""
    monkeypatch.setattr("palimpsest.conversation.draw", lambda logits, *_: int(logits[97:123].argmax()) + 97)
    conversation = Conversation(make("kimi-k3-tiny"), TOKENIZER)
    answer = say(conversation, "Hello")
    assert len(answer) == 20 and conversation.tokens_read == len("User: Hello\nAssistant:")
    say(conversation, "More")
    assert conversation.tokens_read == 1 + len("\nUser: More\nAssistant:")


def test_an_answer_that_is_broken_off_is_kept_as_far_as_it_came() -> None:
    conversation = Conversation(make("kda-tiny"), TOKENIZER)
    pieces = conversation.say("Hello", GREEDY)
    said = next(pieces) + next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    assert conversation.messages[-1] == {"role": "assistant", "content": said}
    assert say(conversation, "More") == afresh("kda-tiny", conversation.messages[:-1])


@pytest.mark.parametrize("preset", PRESETS)
def test_a_file_brings_the_memory_back(preset: str, tmp_path: Path) -> None:
    first = Conversation(make(preset), TOKENIZER)
    say(first, "Hello")
    size = first.save(tmp_path / "a.memory")
    assert size == (tmp_path / "a.memory").stat().st_size > first.state.num_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["a.memory"]
    second = Conversation(make(preset), TOKENIZER)
    second.load(tmp_path / "a.memory")
    assert second.messages == first.messages and second.ids == first.ids
    for found, expected in zip(state_tensors(second.state), state_tensors(first.state), strict=True):
        assert torch.equal(found, expected)
    assert say(second, "More") == say(first, "More")
    empty = Conversation(make(preset), TOKENIZER)
    empty.save(tmp_path / "b.memory")
    second.load(tmp_path / "b.memory")
    assert second.messages == [] and second.state.lengths == (0,)


def test_a_recurrent_memory_is_small_whatever_it_holds(tmp_path: Path) -> None:
    conversation = Conversation(make("kda-tiny"), TOKENIZER)
    say(conversation, "x" * 100)
    tensors = conversation.state.num_bytes()
    say(conversation, "y" * 3000)
    assert conversation.state.num_bytes() == tensors


def test_files_that_are_refused_change_nothing(tmp_path: Path) -> None:
    conversation = Conversation(make("kimi-k3-tiny"), TOKENIZER)
    say(conversation, "Hello")
    path = tmp_path / "a.memory"
    conversation.save(path)
    tensors = load_file(path)
    other = Conversation(make("kimi-k3-tiny", seed=4), TOKENIZER)
    with pytest.raises(InputError, match="memory of another model"):
        other.load(path)
    held, messages = conversation.ids, conversation.messages

    def write(name: str, change: dict[str, torch.Tensor], about: dict[str, object] | None = None) -> Path:
        from palimpsest.conversation import FORMAT, fingerprint

        stated = {"ids": held, "messages": messages, "model": fingerprint(conversation.model, TOKENIZER)} | (about or {})
        save_file({**tensors, **change}, tmp_path / name, {"format": FORMAT, "about": json.dumps(stated)})
        return tmp_path / name

    matrix = tensors["layers.0.matrix"]
    wrong = {
        "another file": write("0", {}).with_name("missing"),
        "shape": write("1", {"layers.0.matrix": matrix[:, :1].clone()}),
        "values": write("2", {"layers.0.matrix": matrix * float("nan")}),
        "length": write("3", {}, {"ids": held[:-1]}),
        "words": write("4", {}, {"ids": None}),
    }
    (tmp_path / "5").write_bytes(path.read_bytes()[:500])
    (tmp_path / "6").write_text("nonsense")
    for bad in (*wrong.values(), tmp_path / "5", tmp_path / "6", tmp_path):
        with pytest.raises(InputError, match="cannot be read"):
            conversation.load(bad)
    save_file({"a": matrix}, tmp_path / "7")
    with pytest.raises(InputError, match="not a saved conversation"):
        conversation.load(tmp_path / "7")
    assert conversation.ids is held and conversation.messages is messages
    with pytest.raises(InputError, match="cannot be written"):
        conversation.save(tmp_path / "no folder" / "a")


def test_too_long_a_conversation_is_refused() -> None:
    conversation = Conversation(make("smollm2-tiny"), TOKENIZER)
    limit = conversation.model.config.max_position_embeddings
    with pytest.raises(InputError, match=f"the context {limit}"):
        conversation.say("x" * limit, GREEDY)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pal.save(make("kda-tiny"), tmp_path / "model", TOKENIZER)
    lines = ["Hello", "/memory", f"/save {tmp_path / 'a'}", "/clear", "/memory", f"/load {tmp_path / 'a'}", "/memory"]
    lines += ["/load", "/nothing", "/load nowhere", "/load ~nobody-of-this-name/a", "\udcff", "/help", "", "More"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines) + "\n"))
    assert main(["chat", str(tmp_path / "model"), "--temperature", "0", "--max-new-tokens", "5"]) == 0
    shown = capsys.readouterr().out
    held = f"{len('User: Hello') + 1 + len('Assistant:') + 4} tokens held in "
    assert shown.count(held) == 4 and "0 tokens held in 0 B of cache" in shown
    for says in (
        "2 messages",
        "give a file name",
        "no such command",
        "cannot be read",
        "write the folder out",
        "not UTF-8",
        "/save FILE",
    ):
        assert says in shown
    monkeypatch.setattr(sys, "stdin", io.StringIO("/memory\n/quit\n"))
    assert main(["chat", str(tmp_path / "model"), "--memory", str(tmp_path / "a")]) == 0
    assert capsys.readouterr().out.count(held) == 2
