"""Chat messages to token ids, by what the tokenizer says about conversations or, where it says nothing, as plain lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from palimpsest import chat
from palimpsest.config import InputError
from palimpsest.tokenizer import Tokenizer


def message_ids(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    thinking: bool = True,
) -> list[int]:
    """The ids of a conversation up to where the model answers.

    Messages have a role and a text as content; tools are OpenAI's. Without `thinking` the answer begins at once, where the
    format knows thoughts. Raises InputError for tools without a template, and as
    the template does.
    """
    if chat.can_encode(tokenizer):
        direct = {"enable_thinking": False} if chat.has_template(tokenizer) else {"thinking": False}
        return chat.encode(tokenizer, messages, tools, **({} if thinking else direct))
    if tools:
        raise InputError("tools were given; this model's tokenizer has no chat template to show them with")
    return tokenizer.encode("".join(_line(message) for message in messages) + "Assistant:")


def stop_texts(tokenizer: Tokenizer) -> tuple[str, ...]:
    """What ends an answer beside the tokens that do (ends.py): without a template, the model writing the user's next line."""
    return () if chat.can_encode(tokenizer) else ("\nUser:",)


def _line(message: Mapping[str, Any]) -> str:
    """An answer stands as the model wrote it, with its own space or without, so that it need not be read again."""
    role, content = str(message["role"]).capitalize(), message.get("content") or ""
    return f"{role}:{content}\n" if role == "Assistant" else f"{role}: {content}\n"
