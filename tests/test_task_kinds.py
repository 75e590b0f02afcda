"""Every synthetic task: solvable from what came before, at chance for whoever keeps nothing, the same for the same seed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from palimpsest import tasks
from palimpsest.config import InputError, ModelConfig
from palimpsest.model import Model
from palimpsest.tasks import MQAR, Induction, Needle, Palindrome, Recall, SelectiveCopy, Stack, Task, Tracking
from palimpsest.tasks.needle import SENTENCE
from tests.test_tasks import Stub, next_id, seeded

TEXT = bytes(range(32, 127)) * 20

# Small dials of every task, and rows drawn with any dials.
SMALL: dict[str, Task] = {
    "recall": Recall(4, 40),
    "mqar": MQAR(24, 4, 16),
    "mqar without fillers": MQAR(24, 4, 16, random_fillers=False),
    "palindrome": Palindrome(6, 9),
    "selective copy": SelectiveCopy(12, 4, 8),
    "induction": Induction(12, 8),
    "stack": Stack(24, 4, 8),
    "needle": Needle(60, value_length=3, num_keys=4),
    "s-niah-1": Needle.single(1, 80),
    "s-niah-2": Needle.single(2, 80, TEXT),
    "s-niah-3": Needle.single(3, 120, TEXT),
    "multi-key": Needle(100, "sentence", 3, 10, num_keys=8, num_needles=5, num_queries=2),
    "variable tracking": Tracking(12, 2, 2, 4, 12, 5),
}


def whole(low: int, high: int) -> st.SearchStrategy[int]:
    return st.integers(low, high)


@st.composite
def recalls(draw: st.DrawFn) -> Task:
    vocab_size = draw(whole(4, 40))
    pairs = draw(whole(1, vocab_size // 2 - 1))
    return Recall(pairs, vocab_size, draw(st.none() | whole(1, pairs)))


@st.composite
def mqars(draw: st.DrawFn) -> Task:
    vocab_size = draw(whole(4, 40))
    pairs = draw(whole(1, vocab_size // 2 - 1))
    return MQAR(4 * pairs + draw(whole(0, 30)), pairs, vocab_size, draw(st.floats(0.01, 2)), draw(st.booleans()))


@st.composite
def needles(draw: st.DrawFn) -> Task:
    keys = draw(whole(1, 9))
    count = draw(whole(1, keys))
    asked, value = draw(whole(1, count)), draw(whole(1, 8))
    length = (count + asked) * (2 + value) + draw(whole(0, 60))
    depth = draw(st.none() | st.floats(0, 1)) if count == 1 else None
    kind = cast(Any, draw(st.sampled_from(["sentence", "synthetic", "text"])))
    return Needle(length, kind, value, draw(whole(2, 16)), keys, count, asked, depth, TEXT)


@st.composite
def trackings(draw: st.DrawFn) -> Task:
    chains, hops = draw(whole(1, 4)), draw(whole(0, 4))
    needed = chains * (hops + 1)
    return Tracking(
        needed + draw(whole(0, 9)),
        chains,
        hops,
        chains + draw(whole(0, 3)),
        max(needed, 2) + draw(whole(0, 9)),
        draw(whole(1, 9)),
    )


ANY = st.one_of(
    recalls(),
    mqars(),
    needles(),
    trackings(),
    st.builds(Palindrome, whole(1, 40), whole(3, 30)),
    st.builds(Induction, whole(4, 40), whole(3, 30)),
    st.builds(Stack, whole(2, 60), whole(1, 9), whole(2, 9)),
    whole(1, 30).flatmap(lambda n: st.builds(SelectiveCopy, whole(n, n + 30), st.just(n), whole(4, 30))),
)


@given(task=ANY, rows=whole(1, 4), seed=whole(0, 2**31))
@settings(max_examples=300)
def test_every_row_is_solvable_and_well_formed(task: Task, rows: int, seed: int) -> None:
    ids, labels = task.batch(rows, seeded(seed))
    assert ids.dtype == labels.dtype == torch.int64
    assert ids.shape == labels.shape == (rows, task.length)
    assert int(ids.min()) >= 0 and int(ids.max()) < task.vocab_size
    assert torch.equal(task.solve(ids, labels), labels)
    scored = labels != -100
    assert not scored[:, 0].any() and int(scored.sum(1).max()) <= task.most_scored
    assert 0 < task.chance <= 1
    assert torch.equal(ids, task.batch(rows, seeded(seed))[0]), "the seed decides the rows"


@pytest.mark.parametrize("name", SMALL)
def test_who_looks_at_neighbours_only_scores_chance(name: str) -> None:
    """What usually followed the two ids before, at this place, learned on 4,000 rows and tried on 1,000 others."""
    task = SMALL[name]
    # In these two an answer may stand two places before it is asked for.
    window = 1 if isinstance(task, Palindrome | Induction) else 2
    ids, labels = task.batch(4000, seeded(1))
    known: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for i, at, label in _scored(ids, labels):
        known[(at, *i[max(at - window, 0) : at])][label] += 1
    ids, labels = task.batch(1000, seeded(2))
    right = total = 0
    for i, at, label in _scored(ids, labels):
        seen = known.get((at, *i[max(at - window, 0) : at]))
        right += seen is not None and seen.most_common(1)[0][0] == label
        total += 1
    error = (task.chance * (1 - task.chance) / total) ** 0.5
    # Names of a chain differ: one that was given is not the next, which is worth a little.
    chance = task.chance if not isinstance(task, Tracking) else 1 / (task.num_names - task.num_hops)
    assert right / total < chance + 5 * error


def _scored(ids: Tensor, labels: Tensor) -> list[tuple[list[int], int, int]]:
    return [(ids[b].tolist(), t, int(labels[b, t])) for b, t in (labels != -100).nonzero().tolist()]


@pytest.mark.parametrize("name", SMALL)
def test_guessing_among_the_answers_scores_chance(name: str) -> None:
    task = SMALL[name]
    _, labels = task.batch(2000, seeded())
    answers = labels[labels != -100]
    kinds = answers.unique()
    assert len(kinds) == round(1 / task.chance), "every answer is possible"
    guesses = kinds[torch.randint(len(kinds), answers.shape, generator=seeded(3))]
    error = (task.chance / len(answers)) ** 0.5
    assert abs(float((guesses == answers).double().mean()) - task.chance) < 5 * error
    counts = answers.bincount()[kinds].double()
    assert float(counts.min() / counts.max()) > 0.6, "no answer is the usual one"


@pytest.mark.parametrize("name", SMALL)
def test_rows_differ(name: str) -> None:
    task = SMALL[name]
    generator = seeded()
    rows = torch.cat([task.batch(8, generator)[0] for _ in range(2)])
    assert len({tuple(row) for row in rows.tolist()}) == 16


def test_the_solver_is_given_nothing_but_what_came_before() -> None:
    for task in SMALL.values():
        ids, labels = task.batch(3, seeded())
        answers = task.solve(ids, labels)
        for b, t in (labels != -100).nonzero().tolist():
            cut = ids.clone()
            cut[b, t:] = 0
            one = torch.full_like(labels, -100)
            one[b, t] = 1
            assert task.solve(cut, one)[b, t] == answers[b, t]


# What each task is.


def test_mqar_asks_every_key_once_and_soon() -> None:
    task = MQAR(256, 16, 512)
    ids, labels = task.batch(200, seeded())
    gaps = []
    for row, label in zip(ids.tolist(), labels.tolist(), strict=True):
        keys, values = row[:32:2], row[1:32:2]
        assert len(set(keys)) == len(set(values)) == 16 and max(keys) < 256 <= min(values)
        places = [t for t, x in enumerate(label) if x != -100]
        assert sorted(row[t - 1] for t in places) == sorted(keys) and all(t % 2 for t in places)
        gaps += [(t - 33) // 2 for t in places]
    # p ~ 1 / gap: of 112 gaps the first 16 are nearly all taken by 16 draws; far ones are rare.
    near, far = sum(gap < 16 for gap in gaps), sum(gap >= 96 for gap in gaps)
    assert near > 4 * far > 0
    assert set(MQAR(40, 4, 16, random_fillers=False).batch(50, seeded())[0][:, 8:].flatten().tolist()) <= set(range(8))


def test_gaps_are_draws_from_the_power_law() -> None:
    """One pair: the share of every gap is p(gap)."""
    ids, labels = MQAR(20, 1, 16, power=0.5).batch(20000, seeded())
    gaps = ((labels != -100).int().argmax(1) - 3) // 2
    weights = torch.arange(1, 10) ** -0.5
    expected = 20000 * weights / weights.sum()
    chi_squared = float(((gaps.bincount(minlength=9) - expected) ** 2 / expected).sum())
    assert chi_squared < 30  # 8 degrees of freedom: exceeded by one fair draw in five thousand


def test_palindrome_and_copy_and_induction_by_hand() -> None:
    ids, labels = Palindrome(3, 5).batch(4, seeded())
    assert torch.equal(ids[:, :3].flip(1), ids[:, 4:]) and not ids[:, 3].any()
    assert torch.equal(labels[:, 4:], ids[:, 4:]) and (labels[:, :4] == -100).all()
    ids, labels = SelectiveCopy(10, 3, 6).batch(50, seeded())
    for row in ids.tolist():
        assert [x for x in row[:10] if x] == row[11:] and row[10] == 1 and min(row[11:]) > 1
    assert {t for row in ids.tolist() for t in range(10) if row[t]} == set(range(10)), "any place may hold an id"
    ids, labels = Induction(6, 9).batch(100, seeded())
    places = set()
    for row in ids.tolist():
        place = row.index(0)
        places.add(place)
        assert row.count(0) == 2 and row[4] == 0 and row[5] == row[place + 1]
    assert places == {0, 1, 2}


def test_stacks_are_last_in_first_out_and_often_popped() -> None:
    task = Stack(60, 5, 7)
    ids, labels = task.batch(40, seeded())
    pops = restored = 0
    for row in ids.tolist():
        stacks: dict[int, list[int]] = defaultdict(list)
        before: dict[int, int] = {}
        for at in range(0, 180, 3):
            stack = stacks[row[at + 1]]
            if row[at] == 0:
                stack.append(row[at + 2])
            else:
                assert stack.pop() == row[at + 2]
                pops += 1
                restored += before[row[at + 1]] == 1
            before[row[at + 1]] = row[at]
    assert pops == int((labels != -100).sum()) and 0.35 < pops / (40 * 60) < 0.5
    assert restored > 0.15 * pops, "a pop after a pop of the same stack finds what was below"


def test_needles_lie_anywhere_apart_and_at_their_depth() -> None:
    task = Needle(120, "sentence", 3, 10, num_keys=8, num_needles=4)
    ids, _ = task.batch(100, seeded())
    starts = [[t for t, x in enumerate(row) if x == 0] for row in ids.tolist()]
    assert all(len(row) == 4 and min(b - a for a, b in zip(row, row[1:], strict=False)) >= 5 for row in starts)
    firsts = {start for row in starts for start in row}
    assert min(firsts) == 0 and max(firsts) == 110, "from the first place to the last"
    for depth, place in ((0.0, 0), (0.5, 55), (1.0, 110)):
        ids, _ = Needle(120, "sentence", 3, depth=depth).batch(5, seeded())
        assert all(row.index(0) == place for row in ids.tolist())


@pytest.mark.parametrize("kind", ["sentence", "synthetic", "text"])
def test_what_the_haystack_is_made_of(kind: Any) -> None:
    text = TEXT if kind != "sentence" else SENTENCE * 9
    ids, _ = Needle(200, kind, 2, text=TEXT, depth=1.0).batch(20, seeded())
    stretches = {bytes(x - 76 for x in row[:190]) for row in ids.tolist()}  # 2 marks, 10 digits and 64 keys come before
    assert len(stretches) > 10
    if kind == "synthetic":
        words = Counter(word for stretch in stretches for word in stretch.split()[:-1])
        assert {len(word) for word in words} == {5} and words.most_common(1)[0][1] > 20
    else:
        assert all(stretch in text for stretch in stretches)


def test_single_needles_are_rulers() -> None:
    one, two, three = (Needle.single(kind, 200, TEXT) for kind in (1, 2, 3))
    assert (one.haystack, two.haystack, three.haystack) == ("sentence", "text", "text")
    assert (one.most_scored, two.most_scored, three.most_scored) == (7, 7, 32)
    assert Needle.single(2, 200).haystack == "synthetic"
    with pytest.raises(InputError, match="the kind of S-NIAH is 4"):
        Needle.single(4, 200)


def test_chains_of_names_by_hand() -> None:
    task = Tracking(10, 2, 2, 4, 12, 5)
    for row in task.batch(50, seeded())[0].tolist():
        statements = [row[t : t + 3] for t in range(0, 30, 3) if row[t] == 0]
        assert len(statements) == 6
        held: dict[int, int] = {}
        for _, name, source in statements:
            assert name not in held
            held[name] = held[source] if source >= 6 else source
        assert row[30] == 1 and [name for name, value in held.items() if value == row[31]] == row[32:]


# Scoring.


def solver_model(task: Task) -> Stub:
    """Votes at t for the right answer at t + 1 where one is scored."""

    def answer(ids: Tensor) -> Tensor:
        labels = task.batch(len(ids), seeded())[1]
        return labels.roll(-1, dims=1).clamp(min=0)

    return Stub(task.vocab_size, answer)


@pytest.mark.parametrize("name", SMALL)
def test_a_model_that_is_right_scores_one_and_a_fresh_one_nothing(name: str) -> None:
    task = SMALL[name]
    found = tasks.score(cast(Any, solver_model(task)), task, 8, seeded(), batch_size=8)
    labels = task.batch(8, seeded())[1]
    assert (found.accuracy, found.rows, found.scored) == (1.0, 1.0, int((labels != -100).sum()))
    model = Model(ModelConfig.preset("kda-tiny", vocab_size=512))
    assert tasks.score(model, task, 8, seeded()).accuracy < 0.3


def test_rows_count_only_when_all_of_them_is_right() -> None:
    task = Palindrome(4, 9)
    first_only: Callable[[Tensor], Tensor] = lambda ids: torch.where(torch.arange(9) < 6, next_id(ids), 0)  # noqa: E731
    found = tasks.score(cast(Any, Stub(9, first_only)), task, 10, seeded())
    assert found.accuracy == 0.5 and found.rows == 0.0  # positions 5 and 6 of 5, 6, 7, 8


def test_scored_positions_are_where_to_predict() -> None:
    labels = torch.tensor([[-100, 5, -100, 7, 8], [-100, -100, -100, -100, 3]])
    at, targets = tasks.scored_positions(labels, 3)
    assert at[0].tolist() == [0, 2, 3] and targets.tolist() == [[5, 7, 8], [3, -100, -100]]
    assert at[1, 0] == 3


def test_accuracy_by_position_adds_up_to_the_whole() -> None:
    task = Stack(24, 4, 8)
    late: Callable[[Tensor], Tensor] = lambda ids: torch.where(torch.arange(72) >= 35, next_id(ids), 0)  # noqa: E731
    rows = tasks.score_by_position(cast(Any, Stub(14, late)), task, 50, seeded(), buckets=4)
    whole_score = tasks.score(cast(Any, Stub(14, late)), task, 50, seeded())
    assert sum(row["scored"] for row in rows) == whole_score.scored
    assert [(row["first"], row["last"]) for row in rows] == [(0, 17), (18, 35), (36, 53), (54, 71)]
    assert [row["accuracy"] for row in rows] == [0, 0, 1, 1]
    uneven = tasks.score_by_position(cast(Any, Stub(14, late)), task, 50, seeded(), buckets=7)
    assert uneven[0]["first"] == 0 and uneven[-1]["last"] == 71
    assert all(a["last"] + 1 == b["first"] for a, b in zip(uneven, uneven[1:], strict=False))


def test_lengths_beyond_training() -> None:
    rows = tasks.score_by_length(cast(Any, Stub(9, next_id)), Palindrome(4, 9), [9, 17, 33], 4, seeded())
    assert [(row["length"], row["accuracy"]) for row in rows] == [(9, 1.0), (17, 1.0), (33, 1.0)]
    for name, task in SMALL.items():
        longer = task.at_length(4 * task.length)
        assert task.length < longer.length <= 4 * task.length and longer.vocab_size == task.vocab_size, name


BAD: list[tuple[Callable[[], Any], str]] = [
    (lambda: Recall(16, 32), "recall: num_pairs is 16; vocab_size 32 has 15 distinct keys"),
    (lambda: Recall(4, 32, 5), "num_queries is 5"),
    (lambda: Recall().at_length(4), "length is 4"),
    (lambda: MQAR(64, 17), "mqar: length is 64; 17 pairs and their queries need at least 68 tokens"),
    (lambda: MQAR(64, 8, 16), "num_pairs is 8; the vocabulary has 7 keys"),
    (lambda: MQAR(64, 0), "num_pairs is 0"),
    (lambda: MQAR(power=0.0), "power is 0.0"),
    (lambda: Palindrome(0), "palindrome: num_tokens is 0"),
    (lambda: Palindrome(4, 2), "vocab_size is 2"),
    (lambda: SelectiveCopy(4, 5), "selective copy: num_tokens is 5; use 1 to context (4)"),
    (lambda: SelectiveCopy(4, 2, 3), "vocab_size is 3"),
    (lambda: Induction(3), "induction: length is 3"),
    (lambda: Induction(4, 2), "vocab_size is 2"),
    (lambda: Stack(1), "stack: num_ops is 1"),
    (lambda: Stack(4, 0), "num_stacks is 0"),
    (lambda: Stack(4, 1, 1), "num_elements is 1"),
    (lambda: Needle(17), "needle: length is 17; the needles and queries alone need 18 tokens"),
    (lambda: Needle(haystack=cast(Any, "hay")), "haystack is 'hay'; use one of sentence, synthetic, text"),
    (lambda: Needle(64, "text", text=b"short"), "text is 5 bytes; a row needs more than 55 bytes of it"),
    (lambda: Needle(num_needles=65), "num_needles is 65"),
    (lambda: Needle(num_queries=2), "num_queries is 2"),
    (lambda: Needle(value_length=0), "value_length is 0"),
    (lambda: Needle(value_symbols=1), "value_symbols is 1"),
    (lambda: Needle(depth=1.5), "depth is 1.5"),
    (lambda: Needle(num_needles=2, depth=0.5), "depth is 0.5"),
    (lambda: Tracking(num_chains=0), "variable tracking: num_chains is 0"),
    (lambda: Tracking(num_hops=-1), "num_hops is -1"),
    (lambda: Tracking(num_names=7), "num_names is 7; the chains need 8"),
    (lambda: Tracking(num_slots=7), "num_slots is 7"),
    (lambda: Tracking(num_fillers=0), "num_fillers is 0"),
    (lambda: Palindrome().batch(0, seeded()), "batch_size is 0"),
    (lambda: tasks.score(cast(Any, Stub(63, next_id)), Palindrome(), 1, seeded()), "vocab_size is 64; the model knows 63"),
    (lambda: tasks.score(cast(Any, Stub(64, next_id)), Palindrome(), 0, seeded()), "examples is 0"),
    (lambda: tasks.score_by_position(cast(Any, Stub(64, next_id)), Palindrome(), 1, seeded(), 66), "buckets is 66"),
]


@pytest.mark.parametrize(("make", "words"), BAD)
def test_impossible_dials_are_refused_in_one_line(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(InputError) as refusal:
        make()
    assert words in str(refusal.value) and "\n" not in str(refusal.value)
