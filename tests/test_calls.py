"""Calls of tools in answers: read in each format, whole or piece by piece, and nothing else is touched."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import palimpsest as pal
from palimpsest import chat
from palimpsest.calls import Elements, Reader, Said, reader
from palimpsest.convert import tiktoken
from palimpsest.tokenizer import Tokenizer
from tests.test_server import Served, serving
from tests.test_tiktoken import ranks, write

QWEN = """{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}{% for m in messages %}
<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}
<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>{% endfor %}
<|im_start|>assistant
"""
K2 = """{% for m in messages %}<|im_user|>{{ m.content }}{% if m.tool_calls %}<|tool_calls_section_begin|>\
{% for c in m.tool_calls %}<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}\
<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>{% endif %}<|im_end|>{% endfor %}<|im_assistant|>"""
MARKS = [f"<|tool_call{name}|>" for name in ("s_section_begin", "s_section_end", "_begin", "_argument_begin", "_end")]
TOOLS: list[Any] = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}]


def tokenizer(template: str, *special: str) -> Tokenizer:
    """Bytes, the end of text, and special tokens."""
    definition = json.loads(json.dumps(Tokenizer.bytes().definition))
    for token in special:
        entry = {**definition["added_tokens"][0], "id": 256 + len(definition["added_tokens"]), "content": token}
        definition["added_tokens"].append(entry)
    return Tokenizer(definition, {"chat_template": template})


HERMES = tokenizer(QWEN, "<|im_start|>", "<|im_end|>")
KIMI = tokenizer(K2, "<|im_user|>", "<|im_assistant|>", "<|im_end|>", *MARKS)
MAKERS: dict[str, Callable[[], Reader]] = {
    "qwen": lambda: reader(HERMES, tools=True),
    "k2": lambda: reader(KIMI, tools=True),
    "k3": lambda: Elements("response"),
}


def heard(make: Callable[[], Reader], pieces: list[str]) -> Said:
    read = make()
    said = [*(read.push(piece) for piece in pieces), read.finish()]
    parts = [part for each in said for part in (each.content, each.thought)]
    assert all(isinstance(part, str) for part in parts)
    return Said(
        "".join(each.content for each in said),
        "".join(each.thought for each in said),
        [call for each in said for call in each.calls],
    )


def read(make: Callable[[], Reader], text: str) -> tuple[str, str, list[tuple[str, Any]]]:
    """Content, thought, calls; the same however the text is cut."""
    found = []
    for size in (1, 2, 7, len(text) or 1):
        said = heard(make, [text[n : n + size] for n in range(0, len(text), size)])
        found.append((said.content, said.thought, [(call.name, json.loads(call.arguments)) for call in said.calls]))
    assert all(each == found[0] for each in found)
    return found[0]


def hermes(name: str = "find", arguments: Any = None) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments or {}})}\n</tool_call>"


def section(*calls: str) -> str:
    return MARKS[0] + "".join(calls) + MARKS[1]


def k2(number: str, arguments: str) -> str:
    return f"{MARKS[2]}{number}{MARKS[3]}{arguments}{MARKS[4]}"


def test_qwen() -> None:
    make = MAKERS["qwen"]
    deep = {"city": "Paris", "n": [1, {"a": None}], "text": "quote </tool_call> <tool_call> \u00e9"}
    assert read(make, hermes(arguments=deep)) == ("", "", [("find", deep)])
    two = f"I look.\n{hermes(arguments={'a': 1})}\n{hermes('stop')}\n"
    assert read(make, two) == ("I look.\n", "", [("find", {"a": 1}), ("stop", {})])
    assert read(make, hermes() + "\n and then") == ("and then", "", [("find", {})])
    assert read(make, '<tool_call>{"name": "find"}') == ("", "", [("find", {})])  # the end was left out


def test_k2() -> None:
    make = MAKERS["k2"]
    text = "Yes." + section(k2("functions.find:0", '{"a": "<b>"}'), k2(" functions.no.dot:12\n", "{}"))
    assert read(make, text) == ("Yes.", "", [("find", {"a": "<b>"}), ("no.dot", {})])
    assert [call.id for call in heard(make, [text]).calls] == ["functions.find:0", "functions.no.dot:12"]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("qwen", "<tool_call>"),
        ("qwen", "<tool_call>{]</tool_call> and more"),
        ("qwen", '<tool_call>{"name": 3}</tool_call>'),
        ("qwen", '<tool_call>{"name": "a", "arguments": "b"}</tool_call>'),
        ("qwen", '<tool_call>{"name": "a", "arguments": {"x": Infinity}}</tool_call>'),
        ("qwen", '<tool_call>{"name": "a", "arguments": {"x": "\\ud800"}}</tool_call>'),
        ("qwen", "<tool_call>" * 3 + "</tool_call>" * 2),
        ("qwen", "a <tool_call"),
        ("qwen", "<tool_call>" + "[" * 100_000 + "</tool_call>"),
        ("k2", section()),
        ("k2", section(k2("functions.find:0", "{"))),
        ("k2", section(k2("functions.find:0", "[1]"))),
        ("k2", section("nothing")),
        ("k2", MARKS[0] + "cut off" + MARKS[2]),
        ("k2", hermes()),
        ("qwen", section(k2("functions.find:0", "{}"))),
    ],
)
def test_what_is_no_call_stays_as_it_was_written(kind: str, text: str) -> None:
    if len(text) > 10_000:
        assert heard(MAKERS[kind], [text]).content == text
        return
    assert read(MAKERS[kind], text) == (text, "", [])
    if kind == "qwen":
        assert read(MAKERS[kind], text + hermes("real"))[2] == [("real", {})]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["a", " ", "\n", "<", "<tool_call", ">", "</tool_call>", "{}", "<|", "<|open|", "|>", "é"])))
def test_plain_text_is_untouched(pieces: list[str]) -> None:
    text = "".join(pieces)
    if "<tool_call>" not in text:
        assert heard(MAKERS["qwen"], pieces) == Said(text)
    assert heard(MAKERS["k2"], pieces) == heard(MAKERS["k3"], pieces) == heard(Reader, pieces) == Said(text)


# Kimi K3


@pytest.fixture(scope="module")
def k3(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("k3")
    write(folder, ranks())
    return tiktoken.read(folder)


def test_k3_reads_what_it_writes(k3: Tokenizer) -> None:
    """An answer in the format that prompts have, cut behind what the prompt opens, is the message again."""
    arguments = {"key": 'a "<b>" & c', "n": 3, "deep": {"b": [1, None]}, "yes": True, "no": None, "number": "3"}
    calls = [{"function": {"name": 'fi"nd', "arguments": arguments}}, {"function": {"name": "stop", "arguments": {}}}]
    for thinking in (True, False):
        message = {"role": "assistant", "content": " Found:\n", "reasoning_content": "hm \n", "tool_calls": calls}
        question = [{"role": "user", "content": "go"}]
        start = chat.encode(k3, question, thinking=thinking)
        whole = chat.encode(k3, [*question, message], thinking=thinking, add_generation_prompt=False)
        assert whole[: len(start)] == start
        text = k3.decode(whole[len(start) :]).removesuffix("<|end_of_msg|>")
        content, thought, found = read(lambda now=thinking: reader(k3, tools=False, thinking=now), text)
        assert (content, thought) == (" Found:\n", "hm \n" if thinking else "")
        assert found == [('fi"nd', arguments), ("stop", {})]


def test_k3_cut_off_or_out_of_order(k3: Tokenizer) -> None:
    make: Callable[[], Reader] = lambda: reader(k3, tools=False)  # noqa: E731
    assert read(make, "still thinking") == ("", "still thinking", [])
    assert read(make, "a<|close|>think<|sep|>\n<|open|>response<|sep|>b<|open|>oops") == ("b<|open|>oops", "a", [])
    assert read(make, "a<|close|>nothing<|sep|>b") == ("", "ab", [])
    assert read(make, "a<|close|>message<|sep|> lost ?") == ("lost ?", "a", [])


# Through the server


@contextlib.contextmanager
def talking(chosen: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Served, Callable[[str], None]]]:
    """A server, and what makes its model say something."""
    torch.manual_seed(3)
    model = pal.Model(pal.ModelConfig.preset("kda-tiny", vocab_size=chosen.vocab_size)).eval()
    end = max(chosen.end_ids)
    with serving(model=model, tokenizer=chosen) as served:

        def say(text: str) -> None:
            ids = [*chosen.encode(text, allow_special=True), end]
            # By the place in the answer: several answers may be drawn, whole and in pieces.
            places: dict[Any, int] = {}

            def draw(logits: Any, config: Any, generator: Any) -> int:
                place = places[generator] = places.get(generator, -1) + 1
                return ids[place]

            monkeypatch.setattr("palimpsest.engine.request.draw", draw)

        yield served, say


@pytest.fixture(params=["qwen", "k2", "k3"])
def spoken(
    request: pytest.FixtureRequest, k3: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, Served, Callable[[str], None]]]:
    """A server whose model says what it is told to."""
    with talking({"qwen": HERMES, "k2": KIMI, "k3": k3}[request.param], monkeypatch) as (served, say):
        yield request.param, served, say


ANSWERS = {
    "qwen": ("Let me see.\n" + hermes(arguments={"q": "é"}) + hermes("stop"), "Just words <tool_call"),
    "k2": ("Let me see.\n" + section(k2("functions.find:0", '{"q": "é"}'), k2("functions.stop:1", "{}")), "Just words <|"),
    "k3": (
        "hm<|close|>think<|sep|><|open|>response<|sep|>Let me see.\n<|close|>response<|sep|><|open|>tools<|sep|>"
        '<|open|>call tool="find" index="1"<|sep|><|open|>argument key="q" type="string"<|sep|>é<|close|>argument<|sep|>'
        '<|close|>call<|sep|><|open|>call tool="stop" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
        "<|close|>message<|sep|>",
        "<|close|>think<|sep|><|open|>response<|sep|>Just words <|<|close|>response<|sep|><|close|>message<|sep|>",
    ),
}


def test_the_official_client_gets_calls_whole_and_in_pieces(spoken: Any) -> None:
    kind, server, say = spoken
    client = server.client()
    given: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Find it"}], "tools": TOOLS}
    say(ANSWERS[kind][0])
    choice = client.chat.completions.create(**given).choices[0]
    calls = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see.\n"
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [("find", {"q": "é"}), ("stop", {})]
    assert len({call.id for call in calls}) == 2 and {call.type for call in calls} == {"function"}
    assert getattr(choice.message, "reasoning_content", None) == ("hm" if kind == "k3" else None)

    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**given, stream=True)]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "Let me see.\n"
    pieces = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
    assert [(call.index, call.function.name, json.loads(call.function.arguments)) for call in pieces] == [
        (0, "find", {"q": "é"}),
        (1, "stop", {}),
    ]
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["tool_calls"] == [chunks[-1].finish_reason]

    # The calls and what the tools say go back through the template.
    results: list[Any] = [{"role": "tool", "tool_call_id": call.id, "content": "found"} for call in calls]
    say(ANSWERS[kind][1])
    given["messages"] = [*given["messages"], choice.message.model_dump(exclude_none=True), *results]
    for again in (given, {**given, "tool_choice": "none"}):
        answer = client.chat.completions.create(**again).choices[0]
        assert (answer.finish_reason, answer.message.tool_calls) == ("stop", None)
        assert answer.message.content in ("Just words <tool_call", "Just words <|")


def test_without_tools_marks_are_text(spoken: Any) -> None:
    kind, server, say = spoken
    say(ANSWERS[kind][0])
    given: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Find it"}]}
    message = server.client().chat.completions.create(**given).choices[0].message
    assert (message.content == ANSWERS[kind][0]) == (kind != "k3") and (message.tool_calls is None) == (kind != "k3")
    body = {**given, "messages": [*given["messages"], {"role": "assistant", "tool_calls": [{"function": {"arguments": "["}}]}]}
    status, content = server.post("/v1/chat/completions", json.dumps(body).encode())
    assert status == 400 and "the arguments of a call are '['" in content["error"]["message"]


def test_k3_answers_held_to_json_begin_without_a_thought(k3: Tokenizer, tmp_path: Path) -> None:
    from palimpsest.messages import message_ids

    talk = [{"role": "user", "content": "go"}]
    assert k3.decode(message_ids(k3, talk, thinking=False)).endswith("<|open|>response<|sep|>")
    assert k3.decode(message_ids(k3, talk)).endswith("<|open|>think<|sep|>")
    direct = tokenizer("{{ messages[0].content }}{% if enable_thinking is false %}!{% endif %}")
    assert direct.decode(message_ids(direct, talk, thinking=False)) == direct.decode(message_ids(direct, talk)) + "!" == "go!"


def test_a_conversation_keeps_thoughts_apart(k3: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next turn goes on from the answer as it was drawn."""
    from palimpsest.conversation import Conversation

    torch.manual_seed(3)
    model = pal.Model(pal.ModelConfig.preset("kda-tiny", vocab_size=k3.vocab_size)).eval()
    text = "hm<|close|>think<|sep|><|open|>response<|sep|>So.<|close|>response<|sep|><|close|>message<|sep|>"
    answer = [*k3.encode(text, allow_special=True), k3.special_tokens["<|end_of_msg|>"]]
    drawn = iter(answer * 2)
    monkeypatch.setattr("palimpsest.conversation.draw", lambda *_: next(drawn))
    conversation = Conversation(model, k3)
    assert "".join(conversation.say("go", pal.SamplingConfig())) == "hmSo."
    assert conversation.messages[-1] == {"role": "assistant", "content": "So.", "reasoning_content": "hm"}
    held = conversation.state.lengths[0]
    "".join(conversation.say("on", pal.SamplingConfig()))
    assert conversation.tokens_read == len(chat.encode(k3, conversation.messages[:-1])) - held
