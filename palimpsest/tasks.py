"""Synthetic tasks that separate one memory policy from another. So far: associative recall.

A row of the recall task lists key-value pairs, then a separator, then the keys again in another order, each followed by
its value: `k1 v1 k2 v2 k3 v3 0 k2 v2 k3 v3 k1 v1`. Only the values after the separator are scored. What precedes
them says nothing about them except through the pairs, so a model scores above chance only by having kept the pairs
(multi-query associative recall in the form of Kimi Linear).

Id 0 is the separator, keys are ids 1 to vocab_size // 2 - 1, values are ids vocab_size // 2 to vocab_size - 1.

Dials: `num_pairs` is the load on the memory: beyond the number of key channels an additive or delta memory cannot hold
all pairs exactly. `vocab_size` sets how many keys must be told apart and the chance level. `num_queries` shortens a row
without lightening the load.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from palimpsest.config import InputError

if TYPE_CHECKING:
    from palimpsest.model import Model

SEPARATOR = 0
IGNORED = -100  # the label of a position that is not scored


def recall_batch(
    num_pairs: int,
    vocab_size: int,
    batch_size: int,
    generator: torch.Generator,
    num_queries: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw rows of associative recall: ids and labels, both int64 [B,T], T = 2 num_pairs + 1 + 2 num_queries.

    The keys of a row are distinct, its values are uniform and independent, and its queries are `num_queries` of its
    pairs (None: all) in random order. Labels are unshifted: `labels[b,t] == ids[b,t]` where position t is scored, to be
    predicted from the ids before t, and -100 everywhere else. The tensors live on the generator's device. Raises
    `InputError` when the vocabulary has too few keys or a number is out of range.
    """
    queries = num_pairs if num_queries is None else num_queries
    _check(num_pairs, vocab_size, batch_size, queries)
    num_keys, num_values = _vocabulary(vocab_size)
    device = generator.device
    order = torch.rand(batch_size, num_keys, generator=generator, device=device).argsort(-1)
    keys = 1 + order[:, :num_pairs]
    values = torch.randint(num_values, (batch_size, num_pairs), generator=generator, device=device) + num_keys + 1
    asked = torch.rand(batch_size, num_pairs, generator=generator, device=device).argsort(-1)[:, :queries]
    pairs = torch.stack([keys, values], -1)  # [B,P,2]
    answers = pairs.gather(1, asked.unsqueeze(-1).expand(-1, -1, 2))  # [B,Q,2]
    separator = torch.full((batch_size, 1), SEPARATOR, device=device)
    ids = torch.cat([pairs.flatten(1), separator, answers.flatten(1)], 1)
    labels = torch.full_like(ids, IGNORED)
    first = 2 * num_pairs + 2  # the first value after the separator
    labels[:, first::2] = ids[:, first::2]
    return ids, labels


def recall_solver(ids: Tensor, labels: Tensor) -> Tensor:
    """The answers of a perfect memory: int64 [B,T], -100 where nothing is scored.

    A scored position is answered from the ids before it alone: look up the key just read among the pairs. `labels` only
    says which positions are scored.
    """
    answers = torch.full_like(ids, IGNORED)
    for row, position in (labels != IGNORED).nonzero().tolist():
        seen = ids[row, :position].tolist()
        answers[row, position] = seen[seen.index(seen[-1]) + 1]
    return answers


def recall_chance(vocab_size: int) -> float:
    """The accuracy of guessing among the values, in (0, 1]. An untrained model, which guesses any id, is below it."""
    return 1 / _vocabulary(vocab_size)[1]


def recall_accuracy(
    model: Model,
    num_pairs: int,
    vocab_size: int,
    examples: int,
    generator: torch.Generator,
    batch_size: int = 32,
) -> float:
    """The share in [0, 1] of scored positions where the model's most likely id, of its whole vocabulary, is right.

    `examples` rows are drawn, `batch_size` at a time, every pair queried once. The model is left in the mode it was in.
    Raises `InputError` when the model's vocabulary is smaller than the task's.
    """
    if examples < 1:
        raise InputError(f"recall: examples is {examples}; it must be at least 1")
    known = model.config.vocab_size
    if known < vocab_size:
        raise InputError(f"recall: vocab_size is {vocab_size}; the model knows {known} ids, so use at most {known}")
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    correct = scored = 0
    try:
        with torch.no_grad():
            for start in range(0, examples, batch_size):
                rows = min(batch_size, examples - start)
                ids, labels = (t.to(device) for t in recall_batch(num_pairs, vocab_size, rows, generator))
                hidden, _ = model.hidden(ids)
                asked = labels[:, 1:] != IGNORED  # the hidden state at t - 1 predicts the id at t
                guesses = model.logits(hidden[:, :-1][asked]).argmax(-1)
                correct += int((guesses == labels[:, 1:][asked]).sum())
                scored += guesses.numel()
    finally:
        model.train(was_training)
    return correct / scored


def _vocabulary(vocab_size: int) -> tuple[int, int]:
    """The number of keys and of values."""
    if vocab_size < 4:
        raise InputError(f"recall: vocab_size is {vocab_size}; a separator, a key and two values need at least 4")
    return vocab_size // 2 - 1, vocab_size - vocab_size // 2


def _check(num_pairs: int, vocab_size: int, batch_size: int, num_queries: int) -> None:
    num_keys, _ = _vocabulary(vocab_size)
    if not 1 <= num_pairs <= num_keys:
        raise InputError(
            f"recall: num_pairs is {num_pairs}; vocab_size {vocab_size} has {num_keys} distinct keys, "
            f"so use 1 to {num_keys} or a larger vocab_size"
        )
    if not 1 <= num_queries <= num_pairs:
        raise InputError(f"recall: num_queries is {num_queries}; use 1 to num_pairs ({num_pairs})")
    if batch_size < 1:
        raise InputError(f"recall: batch_size is {batch_size}; it must be at least 1")
