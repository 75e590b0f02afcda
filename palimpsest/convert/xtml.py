"""Kimi K3's chat format: a conversation as nested elements, made piece by piece so that no message can forge structure.

    element       <|open|>tag key="value"<|sep|> content <|close|>tag<|sep|>
    message       an element, and <|end_of_msg|> behind it
    assistant     think (when thinking), response, and tools around its calls

Only the four markers become special ids. Tags, attributes and contents are each encoded by themselves as ordinary text: the ids
are other than those of the whole text encoded at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from palimpsest.config import InputError
from palimpsest.tokenizer import Tokenizer

OPEN, CLOSE, SEP, END = MARKERS = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
EFFORTS = ("low", "high", "max")
Messages = Sequence[Mapping[str, Any]]
Piece = tuple[str, bool]  # a text, and whether it is a marker

# What K3 was trained to read, word for word.
_TOOLS = "# Tools\nHere are the available tools, described in JSONSchema.\n\n"
_MORE_TOOLS = (
    "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\nHere are the specs for the extended tools.\n\n"
)
_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\nNow the system is invoked with `thinking_effort={}`."
)
_CHOICE = "The system is invoked with `tool_choice={}`.\nYou {} in the next message."
_CHOICES = {"required": "MUST call tools", "none": "MUST NOT call any tools"}
_FORMAT = (
    "The system is invoked with `response_format={}`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."
)
_SCHEMA = "\nThe JSON data must match the following schema:\n"


def is_xtml(tokenizer: Tokenizer) -> bool:
    """Whether a tokenizer has the markers."""
    return tokenizer.special_tokens.keys() >= set(MARKERS)


def encode(
    tokenizer: Tokenizer,
    messages: Messages,
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    add_generation_prompt: bool = True,
    thinking: bool = True,
    thinking_effort: str = "max",
    tool_choice: str | None = None,
    response_format: Mapping[str, Any] | None = None,
) -> list[int]:
    """The ids of a conversation, as `chat.encode` describes it. Raises InputError."""
    if thinking_effort not in EFFORTS:
        raise InputError(f"thinking_effort is {thinking_effort!r}; expected one of {', '.join(EFFORTS)}")
    pieces: list[Piece] = []
    if tools:
        pieces += _told("tool-declare", _TOOLS + _fenced(tools))
    if thinking:
        pieces += _told("thinking-effort", _EFFORT.format(thinking_effort))
    pieces += _conversation(messages, thinking)
    if tool_choice in _CHOICES:
        pieces += _told("tool-choice", _CHOICE.format(tool_choice, _CHOICES[tool_choice]))
    if response_format is not None and response_format.get("type") in ("json_object", "json_schema"):
        wanted = _FORMAT.format(response_format["type"])
        if response_format["type"] == "json_schema":
            wanted += _SCHEMA + _fenced(response_format["json_schema"]["schema"])
        pieces += _told("response-format", wanted)
    if add_generation_prompt:
        pieces += [*_open("message", role="assistant"), *_open("think" if thinking else "response")]
    ids = tokenizer.special_tokens
    texts = iter(tokenizer.encode_batch([text for text, is_marker in pieces if not is_marker]))
    return [i for text, is_marker in pieces for i in ([ids[text]] if is_marker else next(texts))]


def _conversation(messages: Messages, thinking: bool) -> Iterator[Piece]:
    """The messages. An answer of a tool that does not name it answers the last calls in their order."""
    calls: list[str] = []
    answered = 0
    for number, message in enumerate(messages):
        role = message["role"]
        if role == "system" and message.get("tools"):
            yield from _told("tool-declare", _MORE_TOOLS + _fenced(message["tools"]))
            continue
        attributes = {"role": role}
        if role == "tool":
            answered += 1
            name = message.get("tool") or message.get("name") or next(iter(calls[answered - 1 : answered]), None)
            if name is None:
                raise InputError(f"messages[{number}]: no call that this tool answers; give its name")
            attributes |= {"tool": name, "index": str(answered)}
        elif message.get("name"):
            attributes["name"] = message["name"]
        yield from _open("message", **attributes)
        if role == "assistant":
            functions = [call.get("function", call) for call in message.get("tool_calls") or ()]
            calls, answered = [function["name"] for function in functions], 0
            yield from _assistant(message, functions, thinking)
        else:
            yield content(message.get("content"), number), False
        yield from _close("message")
        yield END, True


def _assistant(message: Mapping[str, Any], functions: Sequence[Mapping[str, Any]], thinking: bool) -> Iterator[Piece]:
    if thinking:  # the element stays when nothing was thought
        thought = content(message.get("reasoning_content"))
        yield from _element("think", thought if thought.strip() else "")
    yield from _element("response", content(message.get("content")))
    if functions:
        yield from _open("tools")
        for index, function in enumerate(functions, 1):
            yield from _open("call", tool=function["name"], index=str(index))
            for key, value in _arguments(function).items():
                text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                yield from _element("argument", text, key=key, type=_type(value))
            yield from _close("call")
        yield from _close("tools")


def _arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments, which OpenAI's interface gives as the text of a JSON object."""
    arguments = function.get("arguments") or {}
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise InputError(f"the arguments of a call of {function['name']!r} are not a JSON object")
    return arguments


def _type(value: Any) -> str:
    kinds = {bool: "boolean", str: "string", dict: "object", list: "array", type(None): "null"}
    return kinds.get(type(value), "number")


def content(value: Any, number: int | None = None) -> str:
    """A message's content: a text, or OpenAI's list of parts. Raises InputError for parts that are not text."""
    if value is None or isinstance(value, str):
        return value or ""
    other = next((part.get("type") for part in value if part.get("type") != "text"), None)
    if other is not None:
        raise InputError(f"messages[{number}]: a content part of type {other!r}; this model reads text only")
    return "".join(part["text"] for part in value)


def _told(kind: str, text: str) -> Iterator[Piece]:
    """A message of the system's own."""
    yield from _element("message", text, role="system", type=kind)
    yield END, True


def _element(tag: str, text: str, **attributes: str) -> Iterator[Piece]:
    yield from _open(tag, **attributes)
    yield text, False
    yield from _close(tag)


def _open(tag: str, **attributes: str) -> Iterator[Piece]:
    yield OPEN, True
    yield tag, False
    for key, value in attributes.items():
        yield f" {key}", False
        yield '="', False
        yield value.replace("&", "&amp;").replace('"', "&quot;"), False
        yield '"', False
    yield SEP, True


def _close(tag: str) -> Iterator[Piece]:
    yield from ((CLOSE, True), (tag, False), (SEP, True))


def _fenced(value: Any) -> str:
    """JSON with sorted keys and no spaces, between fences."""
    return f"```json\n{json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(',', ':'))}\n```"
