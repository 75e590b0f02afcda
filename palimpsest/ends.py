"""What ends an answer. A tokenizer names one end of text, but models also end a turn, or a call of a tool, with other tokens:
those that generation_config.json or config.json list, and the one that stands behind an answer in the chat format.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palimpsest.config import InputError

if TYPE_CHECKING:
    from palimpsest.tokenizer import Tokenizer

FILES = ("generation_config.json", "config.json")  # the first that says something counts
KEY = "eos_token_ids"  # in a tokenizer's own configuration, so that it is saved with it


def beside(path: Path) -> dict[str, Any]:
    """What the files beside a tokenizer's file name as ends, under KEY. InputError for what is no token id."""
    for name in FILES:
        file = path.with_name(name)
        try:
            held = json.loads(file.read_bytes()) if file.is_file() else {}
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(f"{file}: not valid JSON ({error}); check the file") from None
        found = held.get("eos_token_id") if isinstance(held, dict) else None
        if found is None:
            continue
        ids = found if isinstance(found, list) else [found]
        if not all(type(i) is int for i in ids):
            raise InputError(f"{file}: eos_token_id is {found!r}; expected a token id or a list of them")
        return {KEY: ids}
    return {}


def of(tokenizer: Tokenizer) -> frozenset[int]:
    """All ids that end an answer.

    Of listed ids only special tokens count: configurations of small models often carry the default of a large one.
    """
    special = set(tokenizer.special_tokens.values())
    listed = special.intersection(tokenizer.config.get(KEY) or ())
    return frozenset({tokenizer.eos_id, _turn(tokenizer, special), *listed} - {None})  # type: ignore[arg-type]


def _turn(tokenizer: Tokenizer, special: set[int]) -> int | None:
    """The special token behind an answer in the chat format: the first in what two conversations share that end with
    different answers. None where there is none, or a template that does not take a plain conversation."""
    from palimpsest import chat
    from palimpsest.convert import xtml

    if not chat.has_template(tokenizer):
        return tokenizer.special_tokens[xtml.END] if xtml.is_xtml(tokenizer) else None
    question = {"role": "user", "content": "a"}
    try:
        one, other = (
            chat.encode(tokenizer, [question, {"role": "assistant", "content": words}], add_generation_prompt=False)
            for words in ("b", "c d")
        )
    except InputError:
        return None
    behind: list[int] = []
    for mine, theirs in zip(reversed(one), reversed(other), strict=False):
        if mine != theirs:
            break
        behind.insert(0, mine)
    return next((token for token in behind if token in special), None)
