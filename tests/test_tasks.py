"""Associative recall: what a row holds, that it can be solved, and that chance is chance."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from palimpsest.config import InputError, ModelConfig
from palimpsest.model import Model
from palimpsest.tasks import recall_accuracy, recall_batch, recall_chance, recall_solver


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Stub(torch.nn.Module):
    """Stands in for a Model: `hidden` remembers the ids, `logits` votes for what `answer` makes of them."""

    def __init__(self, vocab_size: int, answer: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.config = SimpleNamespace(vocab_size=vocab_size)
        self.answer = answer
        self.batches: list[int] = []
        self.modes: list[bool] = []

    def hidden(self, ids: Tensor) -> tuple[Tensor, None]:
        self.batches.append(len(ids))
        self.modes.append(self.training)
        return self.answer(ids).unsqueeze(-1).float(), None

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(hidden.squeeze(-1).long(), self.config.vocab_size).float()


def next_id(ids: Tensor) -> Tensor:
    """A predictor that sees the future: at t it says the id at t + 1."""
    return ids.roll(-1, dims=1)


def recalled(ids: Tensor) -> Tensor:
    """A perfect memory: at t it says what followed the id at t the first time."""
    first = (ids.unsqueeze(1) == ids.unsqueeze(2)).int().argmax(-1)  # [B,T]: where ids[t] was first seen
    return ids.gather(1, (first + 1).clamp(max=ids.shape[1] - 1))


@given(
    vocab_size=st.integers(4, 70), share=st.floats(0, 1), queries=st.floats(0, 1), rows=st.integers(1, 4),
    seed=st.integers(0, 2**31),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_every_row_is_solvable_and_well_formed(vocab_size: int, share: float, queries: float, rows: int, seed: int) -> None:
    num_keys = vocab_size // 2 - 1
    num_pairs = 1 + round(share * (num_keys - 1))
    num_queries = 1 + round(queries * (num_pairs - 1))
    ids, labels = recall_batch(num_pairs, vocab_size, rows, seeded(seed), num_queries)
    assert ids.dtype == labels.dtype == torch.int64
    assert ids.shape == labels.shape == (rows, 2 * num_pairs + 1 + 2 * num_queries)
    torch.testing.assert_close(recall_solver(ids, labels), labels)
    for row in ids.tolist():
        keys, values = row[: 2 * num_pairs : 2], row[1 : 2 * num_pairs : 2]
        assert row.count(0) == 1 and row[2 * num_pairs] == 0
        assert len(set(keys)) == num_pairs and all(1 <= key <= num_keys for key in keys)
        assert all(num_keys < value < vocab_size for value in values)
        asked, answers = row[2 * num_pairs + 1 :: 2], row[2 * num_pairs + 2 :: 2]
        assert len(set(asked)) == num_queries
        assert answers == [values[keys.index(key)] for key in asked]


def test_labels_are_unshifted_and_only_on_the_answers() -> None:
    ids, labels = recall_batch(3, 16, 5, seeded())
    positions = torch.arange(ids.shape[1])
    scored = (positions >= 8) & (positions % 2 == 0)  # 6 ids of pairs, the separator, a key, its value, ...
    assert ids.shape == (5, 13)
    torch.testing.assert_close(labels != -100, scored.expand(5, -1))
    torch.testing.assert_close(labels[:, scored], ids[:, scored])


def test_the_whole_range_of_ids_is_used_and_queries_are_shuffled() -> None:
    ids, _ = recall_batch(7, 17, 200, seeded())
    assert set(ids.flatten().tolist()) == set(range(17))
    assert len({tuple(row) for row in ids[:, 15::2].argsort(-1).tolist()}) > 100
    in_order = (ids[:, 15::2] == ids[:, 0:14:2]).float().mean()
    assert abs(float(in_order) - 1 / 7) < 0.05


def test_values_are_uniform() -> None:
    ids, _ = recall_batch(8, 32, 1000, seeded())
    counts = ids[:, 1:16:2].flatten().bincount(minlength=32)[16:].double()
    chi_squared = float(((counts - 500) ** 2 / 500).sum())
    assert chi_squared < 40  # 15 degrees of freedom: exceeded by one fair draw in two thousand


def test_the_seed_decides_the_rows() -> None:
    first, again, other = (recall_batch(4, 32, 3, seeded(seed))[0] for seed in (5, 5, 6))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    generator = seeded(5)
    assert not torch.equal(recall_batch(4, 32, 3, generator)[0], recall_batch(4, 32, 3, generator)[0])


def test_the_solver_reads_only_what_came_before() -> None:
    ids, labels = recall_batch(4, 32, 1, seeded())
    answers = recall_solver(ids, labels)
    ids[0, -1] = 17 if int(ids[0, -1]) != 17 else 18  # the last answer itself: the solver must not look at it
    assert torch.equal(recall_solver(ids, labels), answers)


def test_accuracy_of_a_perfect_memory_and_of_an_oracle_is_one() -> None:
    for answer in (recalled, next_id):
        assert recall_accuracy(cast(Any, Stub(40, answer)), 6, 32, 20, seeded()) == 1.0


def test_accuracy_scores_the_position_before_the_answer() -> None:
    assert recall_accuracy(cast(Any, Stub(32, lambda ids: ids)), 6, 32, 20, seeded()) == 0.0


def test_guessing_among_the_values_scores_chance() -> None:
    generator = seeded(1)
    guess = Stub(32, lambda ids: torch.randint(16, 32, ids.shape, generator=generator))
    assert recall_chance(32) == 1 / 16
    assert recall_chance(17) == 1 / 9
    accuracy = recall_accuracy(cast(Any, guess), 8, 32, 1000, seeded())
    assert abs(accuracy - recall_chance(32)) < 0.012  # four and a half standard errors of 8,000 guesses


def test_accuracy_of_a_real_model_is_that_of_its_logits() -> None:
    torch.manual_seed(0)
    model = Model(ModelConfig.preset("kimi-linear-tiny", vocab_size=48))
    ids, labels = recall_batch(5, 32, 30, seeded())
    guesses = model.eval()(ids).logits.argmax(-1)
    expected = float((guesses[:, :-1] == labels[:, 1:])[labels[:, 1:] != -100].double().mean())
    assert recall_accuracy(model, 5, 32, 30, seeded()) == pytest.approx(expected, abs=1e-12)
    assert recall_accuracy(model, 5, 32, 30, seeded()) < 2 * recall_chance(32)


def test_accuracy_takes_the_asked_number_of_rows_in_eval_mode_and_restores_the_mode() -> None:
    stub = Stub(32, next_id)
    recall_accuracy(cast(Any, stub), 2, 32, 7, seeded(), batch_size=3)
    assert stub.batches == [3, 3, 1]
    assert stub.modes == [False, False, False] and stub.training


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_pairs": 16}, "num_pairs is 16; vocab_size 32 has 15 distinct keys"),
        ({"num_pairs": 0}, "num_pairs is 0"),
        ({"vocab_size": 3}, "vocab_size is 3"),
        ({"num_queries": 5}, "num_queries is 5; use 1 to num_pairs (4)"),
        ({"num_queries": 0}, "num_queries is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
    ],
)
def test_impossible_dials_are_refused_in_one_line(arguments: dict[str, int], words: str) -> None:
    dials: dict[str, Any] = {"num_pairs": 4, "vocab_size": 32, "batch_size": 2, **arguments}
    with pytest.raises(InputError) as refusal:
        recall_batch(**dials, generator=seeded())
    assert words in str(refusal.value) and "\n" not in str(refusal.value)


def test_accuracy_refuses_a_model_with_too_small_a_vocabulary_and_no_examples() -> None:
    with pytest.raises(InputError, match="vocab_size is 32; the model knows 31 ids"):
        recall_accuracy(cast(Any, Stub(31, next_id)), 4, 32, 8, seeded())
    with pytest.raises(InputError, match="examples is 0"):
        recall_accuracy(cast(Any, Stub(32, next_id)), 4, 32, 0, seeded())
