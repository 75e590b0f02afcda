"""What an answer says beside words: calls of tools and, in Kimi K3's format, thoughts.

    Qwen, Hermes    <tool_call>{"name": ..., "arguments": {...}}</tool_call>
    Kimi K2         <|tool_calls_section_begin|>, and for each call its id (functions.NAME:NUMBER) and its arguments as JSON
    Kimi K3         the elements of convert/xtml.py: think, response, and tools around calls and their arguments

Texts come in pieces as they are drawn. What looks like a call but is none stays text, as it was written.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from palimpsest import chat
from palimpsest.convert import xtml
from palimpsest.generate import overlap
from palimpsest.tokenizer import Tokenizer

TAG = ("<tool_call>", "</tool_call>")
SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
SECTION_CALL = re.compile(
    r"\s*<\|tool_call_begin\|>\s*((?:functions\.)?([^:\s<]+)(?::\d+)?)\s*"
    r"<\|tool_call_argument_begin\|>(.*?)<\|tool_call_end\|>\s*",
    re.DOTALL,
)
ATTRIBUTE = re.compile(r'([\w-]+)="([^"]*)"')


@dataclass(frozen=True)
class Call:
    """A call of a tool; `arguments` is the text of a JSON object."""

    name: str
    arguments: str
    id: str


@dataclass
class Said:
    """What a piece of an answer adds."""

    content: str = ""
    thought: str = ""
    calls: list[Call] = field(default_factory=list)


def reader(tokenizer: Tokenizer, tools: bool, thinking: bool = True) -> Reader:
    """What reads answers of a model with this tokenizer. Calls are looked for when `tools` were shown; in Kimi K3's format an
    answer begins with a thought when `thinking`."""
    if not chat.has_template(tokenizer) and xtml.is_xtml(tokenizer):
        return Elements("think" if thinking else "response")
    if tools and tokenizer.special_tokens.keys() >= set(SECTION):
        return Blocks(*SECTION, _section)
    if tools and TAG[0] in str(tokenizer.config.get("chat_template")):
        return Blocks(*TAG, _tagged)
    return Reader()


class Reader:
    """Takes everything as words."""

    def push(self, text: str) -> Said:
        return Said(text)

    def finish(self) -> Said:
        """What was held back, once nothing can follow."""
        return Said()


class Blocks(Reader):
    """Calls between two marks. `parse` gives the calls of a block, None for what is no call."""

    def __init__(self, begin: str, end: str, parse: Callable[[str], list[Call] | None]) -> None:
        self.begin, self.end, self._parse = begin, end, parse
        self._held = ""
        self._tried = 0  # of the held block: up to here no end closes a call
        self._called = False  # spaces behind a call are no words

    def push(self, text: str) -> Said:
        self._held += text
        said = Said()
        while True:
            start = self._held.find(self.begin)
            keep = overlap(self._held, self.begin) if start < 0 else len(self._held) - start
            self._say(said, self._held[: len(self._held) - keep])
            self._held = self._held[len(self._held) - keep :]
            if start < 0 or not self._close(said):
                return said

    def finish(self) -> Said:
        said = Said()
        while self._held.startswith(self.begin):
            calls = self._parse(self._held[len(self.begin) :])  # its end was left out
            if calls is not None:
                said.calls += calls
                self._held = ""
                break
            self._say(said, self.begin)  # it began no call; one may follow
            self._held, self._tried = self._held[len(self.begin) :], 0
            rest = self.push("")
            said.content += rest.content
            said.calls += rest.calls
        self._say(said, self._held)
        self._held = ""
        return said

    def _close(self, said: Said) -> bool:
        """Takes the block in front; an argument may spell the end mark, so the first end that gives a call counts."""
        while (end := self._held.find(self.end, max(self._tried, len(self.begin)))) >= 0:
            calls = self._parse(self._held[len(self.begin) : end])
            if calls is not None:
                said.calls += calls
                self._held, self._tried, self._called = self._held[end + len(self.end) :], 0, True
                return True
            self._tried = end + 1
        return False

    def _say(self, said: Said, text: str) -> None:
        text = text.lstrip() if self._called else text
        if text:
            said.content += text
            self._called = False


class Elements(Reader):
    """Kimi K3's elements. The prompt has opened the first one."""

    def __init__(self, channel: str) -> None:
        self._held = ""
        self._open = ["message", channel]
        self._stray = False
        self._call: tuple[str, dict[str, Any]] = ("", {})
        self._argument: tuple[str, str, str] = ("", "", "")  # key, type, text

    def push(self, text: str) -> Said:
        self._held += text
        said = Said()
        while True:
            places = [place for mark in (xtml.OPEN, xtml.CLOSE) if (place := self._held.find(mark)) >= 0]
            if not places:
                keep = max(overlap(self._held, mark) for mark in (xtml.OPEN, xtml.CLOSE))
                self._say(said, self._held[: len(self._held) - keep])
                self._held = self._held[len(self._held) - keep :]
                return said
            self._say(said, self._held[: min(places)])
            self._held = self._held[min(places) :]
            head, found, rest = self._held.partition(xtml.SEP)
            if not found:
                return said
            self._held, self._stray = rest, False
            if head.startswith(xtml.OPEN):
                self._opened(head.removeprefix(xtml.OPEN))
            else:
                self._closed(head.removeprefix(xtml.CLOSE), said)

    def finish(self) -> Said:
        said = Said()
        self._say(said, self._held)
        self._held = ""
        return said

    def _opened(self, head: str) -> None:
        tag, _, _ = head.partition(" ")
        attributes = {key: value.replace("&quot;", '"').replace("&amp;", "&") for key, value in ATTRIBUTE.findall(head)}
        self._open.append(tag)
        if tag == "call":
            self._call = attributes.get("tool", ""), {}
        elif tag == "argument":
            self._argument = attributes.get("key", ""), attributes.get("type", "string"), ""

    def _closed(self, tag: str, said: Said) -> None:
        if tag not in self._open:
            return
        while self._open.pop() != tag:
            pass
        if tag == "argument":
            key, kind, text = self._argument
            self._call[1][key] = text if kind == "string" else _value(text)
        elif tag == "call" and (call := _call(*self._call)) is not None:
            said.calls.append(call)

    def _say(self, said: Said, text: str) -> None:
        place = self._open[-1] if self._open else ""
        if place == "think":
            said.thought += text
        elif place == "argument":
            self._argument = (*self._argument[:2], self._argument[2] + text)
        elif place == "response":
            said.content += text
        else:  # between elements: nothing is lost but the spaces in front
            text = text if self._stray else text.lstrip()
            self._stray = self._stray or bool(text)
            said.content += text


def _tagged(block: str) -> list[Call] | None:
    call = _value(block)
    found = _call(call.get("name"), call.get("arguments", {})) if isinstance(call, dict) else None
    return None if found is None else [found]


def _section(block: str) -> list[Call] | None:
    """Every call of a section, or None when one of them is none; the id is the model's own, which its template gives back."""
    calls: list[Call] = []
    place = 0
    while place < len(block) or not calls:
        match = SECTION_CALL.match(block, place)
        call = None if match is None else _call(match[2], _value(match[3]), match[1])
        if match is None or call is None:
            return None
        calls.append(call)
        place = match.end()
    return calls


def _call(name: Any, arguments: Any, number: str | None = None) -> Call | None:
    """None without a name or an object of arguments, or with what JSON cannot say."""
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        (name + text).encode()
    except (ValueError, RecursionError):  # infinity, half of a surrogate pair
        return None
    return Call(name, text, number or f"call_{uuid.uuid4().hex[:24]}")


def _value(text: str) -> Any:
    """What a JSON text says; the text itself where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
