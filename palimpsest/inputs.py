"""Checks on what a training run is given, before anything is written."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from torch import Tensor

from palimpsest.config import InputError, TrainConfig
from palimpsest.model import Model

BLOCK_TOKENS = 1 << 20  # token arrays may be larger than memory and are looked through in blocks


def check_lengths(model: Model, config: TrainConfig, validation_tokens: np.ndarray | Tensor | None) -> None:
    length, limit = config.context_length, model.config.max_position_embeddings
    if length < 2:
        raise InputError(f"train: context_length is {length}; predicting a token takes one before it: give 2 or more")
    if model.config.position == "learned" and length > limit:
        raise InputError(f"train: context_length is {length}; the model's position table ends at {limit}: give that or less")
    if validation_tokens is not None and min(len(validation_tokens), config.eval_tokens) < 2:
        raise InputError(f"validation_tokens: {len(validation_tokens)} tokens, {config.eval_tokens} used; 2 are the least")


def inspected(name: str, tokens: np.ndarray | Tensor, vocab_size: int) -> dict[str, Any]:
    """Checks every id against the vocabulary; returns the number of tokens and their digest."""
    array = tokens.numpy() if isinstance(tokens, Tensor) else tokens
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InputError(f"{name}: {array.dtype} with shape {list(array.shape)}; give a 1-D array of integers")
    digest = hashlib.sha256()
    for start in range(0, len(array), BLOCK_TOKENS):
        block = array[start : start + BLOCK_TOKENS]
        lowest, highest = int(block.min()), int(block.max())
        if lowest < 0 or highest >= vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise InputError(
                f"{name}: holds the id {wrong}; the model's vocab_size is {vocab_size}: use the tokenizer that the model is for"
            )
        digest.update(block.astype("<u4").tobytes())
    return {"tokens": len(array), "digest": digest.hexdigest()[:16]}
