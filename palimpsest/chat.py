"""Conversations as token ids: by the template that came with a tokenizer, or in Kimi K3's own format.

A message cannot forge a turn: where its text spells a special token, it stays text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from palimpsest.config import InputError
from palimpsest.convert import xtml
from palimpsest.tokenizer import Tokenizer

if TYPE_CHECKING:
    import jinja2

ROLES = ("system", "developer", "user", "assistant", "tool")
TEXT_LIMIT = 10_000_000  # characters that a template may write
NUMBER_LIMIT = 10_000_000  # a template may repeat a text, or raise a number, up to here
GUARD = "\ue0ff"  # private use; stands inside what spells a special token while a template runs


def can_encode(tokenizer: Tokenizer) -> bool:
    """Whether a tokenizer says how a conversation looks."""
    return has_template(tokenizer) or xtml.is_xtml(tokenizer)


def has_template(tokenizer: Tokenizer) -> bool:
    """Whether it says so by a template, which then counts before Kimi K3's markers."""
    return _template_text(tokenizer, None) is not None


def encode(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    add_generation_prompt: bool = True,
    **options: Any,
) -> list[int]:
    """The ids of a conversation, ready for the model's next words with `add_generation_prompt`.

    A message has a `role` (ROLES), `content` (a text or OpenAI's list of parts), and where it applies `name`, `tool_calls` and
    `reasoning_content`; `tools` are OpenAI's. `options` are variables of the template (`enable_thinking`, ...) or, for Kimi K3,
    the arguments of `xtml.encode`. Raises InputError: no template, one that fails, messages that are not such.
    """
    _check(messages)
    text = _template_text(tokenizer, tools)
    if text is None:
        if not xtml.is_xtml(tokenizer):
            raise InputError("tokenizer: it has no chat_template, so it does not say how a conversation looks; use `complete`")
        return xtml.encode(tokenizer, messages, tools, add_generation_prompt=add_generation_prompt, **options)
    # Interfaces send null for what is absent; templates ask whether a key is there.
    given = [{key: value for key, value in message.items() if value is not None} for message in messages]
    guarded = _guarded(tokenizer, given)
    variables = {"messages": guarded, "tools": tools, "add_generation_prompt": add_generation_prompt} | options
    flat = _render(text, {**_names(tokenizer), **variables})
    if guarded == given:
        return tokenizer.encode(flat, allow_special=True)
    parts = re.split(f"({_spelled(tokenizer)})", flat)
    plain = iter(tokenizer.encode_batch([part.replace(GUARD, "") for part in parts[::2]]))
    special = [tokenizer.encode(part, allow_special=True) for part in parts[1::2]]
    return [i for ids in (next(plain), *(ids for pair in zip(special, plain, strict=True) for ids in pair)) for i in ids]


def _check(messages: Sequence[Mapping[str, Any]]) -> None:
    if not messages:
        raise InputError("messages: empty; give at least one, such as {'role': 'user', 'content': 'Hello'}")
    for number, message in enumerate(messages):
        role = message.get("role") if isinstance(message, Mapping) else None
        if role not in ROLES:
            raise InputError(f"messages[{number}]: role is {role!r}; expected one of {', '.join(ROLES)}")


def _spelled(tokenizer: Tokenizer) -> str:
    """A pattern of the special tokens, longer ones first."""
    return "|".join(re.escape(token) for token in sorted(tokenizer.special_tokens, key=len, reverse=True)) or r"(?!)"


def _guarded(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The messages, with GUARD behind the first character of what spells a special token."""
    found = re.compile(_spelled(tokenizer))

    def guard(value: Any) -> Any:
        if isinstance(value, str):
            return found.sub(lambda match: match[0][0] + GUARD + match[0][1:], value)
        if isinstance(value, Mapping):
            return {key: guard(each) for key, each in value.items()}
        return [guard(each) for each in value] if isinstance(value, list | tuple) else value

    return [guard(message) for message in messages]


def _template_text(tokenizer: Tokenizer, tools: Any) -> str | None:
    """The template; of several with names the one for tools if there are any, else the default."""
    template = tokenizer.config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = (named.get("tool_use") if tools else None) or named.get("default")
    return template if isinstance(template, str) else None


def _names(tokenizer: Tokenizer) -> dict[str, str]:
    """`bos_token` and its like, as templates know them."""
    found = {key: value for key, value in tokenizer.config.items() if key.endswith("_token")}
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in found.items()}
    return {key: value for key, value in texts.items() if isinstance(value, str)}


def _render(text: str, variables: Mapping[str, Any]) -> str:
    import jinja2

    template = _compiled(text)
    written: list[str] = []
    length = 0
    try:
        for part in template.generate(variables):
            written.append(part)
            length += len(part)
            if length > TEXT_LIMIT:
                raise InputError(f"chat_template: it writes more than {TEXT_LIMIT:,} characters")
    except InputError:
        raise
    except jinja2.TemplateError as error:
        raise InputError(f"chat_template: {' '.join(str(error).split())}") from None
    except (TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError, MemoryError, RecursionError) as error:
        raise InputError(f"chat_template: these messages do not suit it ({type(error).__name__}: {error})") from None
    return "".join(written)


@lru_cache(maxsize=8)
def _compiled(text: str) -> jinja2.Template:
    """A template in a sandbox: no attributes of Python's own, nothing outside changed, no endless texts."""
    import jinja2
    from jinja2 import ext, nodes, sandbox

    class Generation(ext.Extension):
        """`{% generation %}`: marks the model's words for training; here only its content counts."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    class Sandbox(sandbox.ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"*", "**"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            sizes = [len(x) if isinstance(x, str | list | tuple) else x for x in (left, right)]
            if all(isinstance(x, int | float) for x in sizes):
                base, other = map(abs, sizes)
                if (base * other > NUMBER_LIMIT) if operator == "*" else (other > 64 or base > NUMBER_LIMIT):
                    raise jinja2.exceptions.SecurityError(f"{operator} makes something too large")
            return super().call_binop(context, operator, left, right)

    def fail(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
        separators = options.get("separators")
        sort_keys = bool(options.get("sort_keys"))
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols])
    environment.filters["tojson"] = to_json  # Jinja's own writes < and > as for HTML
    now: Callable[[str], str] = lambda pattern: datetime.now().strftime(pattern)  # noqa: E731
    environment.globals |= {"raise_exception": fail, "strftime_now": now}
    try:
        return environment.from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise InputError(f"chat_template, line {error.lineno}: {error.message}; the template is damaged") from None
