"""Conversations as training data: written as the model writes them, with loss on the answers alone.

    {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day."}]}     one a line

A tokenizer with a chat template, or Kimi K3's, has its own form (chat.py); one with <|im_start|> and <|im_end|> gets ChatML;
any other

    User: Hello <newline> Assistant: Good day. <end of text>

No text in a content can end a turn or begin one. Conversations are packed whole into
windows of `context_length` tokens and never see each other; what a window has left is filled with end-of-text tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from palimpsest import chat
from palimpsest.config import InputError
from palimpsest.tokenizer import Tokenizer

ROLES = {"system": "System", "user": "User", "assistant": "Assistant"}
START, END = "<|im_start|>", "<|im_end|>"
ANSWER, BEGIN = 1, 2  # bits of a token's mark: it is predicted; a conversation begins with it

Message = dict[str, str]


class Packed(NamedTuple):
    """Windows one behind the other: tokens int64 and marks uint8 of one length; and how many conversations were cut."""

    tokens: np.ndarray
    marks: np.ndarray
    cut: int


def read(paths: Sequence[Path]) -> list[list[Message]]:
    """The conversations of JSONL files, in order. Raises InputError naming the file, the line and what is wrong there."""
    found = []
    for path in paths:
        try:
            lines = path.read_text(encoding="utf-8-sig").splitlines()
        except UnicodeDecodeError as error:
            raise InputError(f"{path}: not UTF-8 at byte {error.start}; convert it") from None
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror}); check the path") from None
        found += [_conversation(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise InputError(f"{', '.join(map(str, paths))}: there is no conversation in it; write one a line")
    return found


def _conversation(line: str, where: str) -> list[Message]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not valid JSON ({error}); correct or remove the line") from None
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(messages, list) or not messages:
        raise InputError(f'{where}: needs an object with a list "messages"; correct the line')
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in ROLES or not isinstance(message.get("content"), str):
            raise InputError(f'{where}: a message needs "role" ({", ".join(ROLES)}) and a text "content"; correct the line')
    if not any(message["role"] == "assistant" for message in messages):
        raise InputError(f"{where}: it has no message of the assistant, so there is nothing to learn; remove the line")
    return messages


def encode(messages: Sequence[Message], tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """The ids of a conversation, and which of them an answer is made of, its end included.

    Raises InputError for a template that writes what came before an answer otherwise once the answer is there.
    """
    if chat.can_encode(tokenizer):
        return _by_template(messages, tokenizer)
    ids: list[int] = []
    learned: list[bool] = []
    for message in messages:
        before, after = _around(message["role"], tokenizer)
        content = tokenizer.encode(message["content"])
        ids += before + content + after
        is_answer = message["role"] == "assistant"
        # The first token behind an answer ends it; a newline that may follow is part of the form.
        learned += [False] * len(before) + [is_answer] * (len(content) + 1) + [False] * (len(after) - 1)
    return ids, learned


def _by_template(messages: Sequence[Message], tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """An answer is what its message adds to the prompt before it."""
    ids = chat.encode(tokenizer, messages, add_generation_prompt=False)
    learned = [False] * len(ids)
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            before = chat.encode(tokenizer, messages[:number])
            whole = chat.encode(tokenizer, messages[: number + 1], add_generation_prompt=False)
            if whole[: len(before)] != before or ids[: len(whole)] != whole:
                raise InputError(
                    f"chat_template: message {number} changes what stands before it, so it cannot be learned alone"
                )
            learned[len(before) : len(whole)] = [True] * (len(whole) - len(before))
    return ids, learned


def prompt(messages: Sequence[Message], tokenizer: Tokenizer) -> list[int]:
    """The ids behind which an answer comes; generate from them."""
    if chat.can_encode(tokenizer):
        return chat.encode(tokenizer, messages)
    return encode(messages, tokenizer)[0] + _around("assistant", tokenizer)[0]


def _around(role: str, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Ids in front of a message's content and behind it."""
    marks = [tokenizer.encode(text, allow_special=True) for text in (START, END)]
    if all(len(mark) == 1 for mark in marks):
        (start,), (end,) = marks
        return [start, *tokenizer.encode(f"{role}\n")], [end, *tokenizer.encode("\n")]
    if tokenizer.eos_id is None:
        raise InputError("tokenizer: it has no end-of-text token to end an answer with; use another")
    return tokenizer.encode(f"{ROLES[role]}: "), [tokenizer.eos_id] if role == "assistant" else tokenizer.encode("\n")


def pack(conversations: Sequence[Sequence[Message]], tokenizer: Tokenizer, context_length: int) -> Packed:
    """Conversations in order into windows, each in the first window with room for it; one that is longer loses its end."""
    if tokenizer.eos_id is None:
        raise InputError("tokenizer: it has no end-of-text token to fill windows with; use another")
    windows: list[tuple[list[int], list[int]]] = []
    open_windows: list[int] = []
    cut = 0
    for messages in conversations:
        ids, learned = encode(messages, tokenizer)
        cut += len(ids) > context_length
        ids, learned = ids[:context_length], learned[:context_length]
        if not any(learned[1:]):
            continue  # its answers lie behind the end
        place = next((i for i in open_windows if len(windows[i][0]) + len(ids) <= context_length), None)
        if place is None:
            place = len(windows)
            windows.append(([], []))
            open_windows = [*open_windows, place][-64:]
        tokens, marks = windows[place]
        tokens += ids
        marks += [ANSWER * answer + BEGIN * (i == 0) for i, answer in enumerate(learned)]
    if not windows:
        raise InputError(f"chat: no answer begins within context_length {context_length}; make it longer")
    for tokens, marks in windows:
        room = context_length - len(tokens)
        tokens += [tokenizer.eos_id] * room
        marks += [BEGIN] * bool(room) + [0] * (room - 1)
    tokens = np.asarray([window[0] for window in windows], np.int64).ravel()
    return Packed(tokens, np.asarray([window[1] for window in windows], np.uint8).ravel(), cut)
