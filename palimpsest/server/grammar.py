"""Answers held to a JSON schema: before every draw the tokens that cannot go on are left out (package llguidance)."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from palimpsest.config import InputError
from palimpsest.engine import Constraint
from palimpsest.tokenizer import Tokenizer


def json_schema(tokenizer: Tokenizer, schema: dict[str, Any]) -> Callable[[], Constraint]:
    """A maker of constraints, one per answer. InputError for a schema that cannot be followed or has no package to do so."""
    try:
        from llguidance import LLMatcher
    except ImportError:
        raise InputError("response_format: the package llguidance is missing; install palimpsest-lm[serve]") from None
    grammar = ""
    try:
        grammar = LLMatcher.grammar_from_json_schema(schema)
        mistake = LLMatcher(_vocabulary(tokenizer), grammar).get_error()
    except ValueError as error:
        mistake = str(error)
    if mistake:
        raise InputError(f"response_format: the schema cannot be followed ({' '.join(mistake.split())[:300]})")
    return lambda: Grammar(tokenizer, grammar)


@lru_cache(maxsize=4)
def _vocabulary(tokenizer: Tokenizer) -> Any:
    from llguidance import LLTokenizer

    definition = json.dumps(tokenizer.definition)
    return LLTokenizer(definition, n_vocab=tokenizer.vocab_size, eos_token=tokenizer.eos_id)


class Grammar:
    """One answer's place in a grammar."""

    def __init__(self, tokenizer: Tokenizer, grammar: str) -> None:
        from llguidance import LLMatcher

        self._size = tokenizer.vocab_size
        self._matcher = LLMatcher(_vocabulary(tokenizer), grammar)
        self._bits = torch.arange(8, dtype=torch.uint8)

    def allowed(self) -> Tensor:
        """bool [vocab]: the mask has a bit per token, rounded up to whole words."""
        mask = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        return ((mask.unsqueeze(1) >> self._bits) & 1).bool().flatten()[: self._size]

    def accept(self, token: int) -> bool:
        self._matcher.consume_token(token)
        return self._matcher.is_stopped()
