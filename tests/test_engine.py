"""The engine: an answer is what the model alone would say, whoever else is served, remembered, guessed or turned away."""

from __future__ import annotations

import copy
import functools
import gc
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import palimpsest as pal
from palimpsest.config import InputError
from palimpsest.engine import DraftModel, Engine, Piece, Request, Worker
from palimpsest.engine.batches import Cost, grouped
from palimpsest.engine.drafts import PromptLookup, settled
from palimpsest.engine.prefixes import BLOCK
from palimpsest.engine.request import Answer
from palimpsest.engine.scheduler import HEADROOM
from palimpsest.tokenizer import Tokenizer

TOKENIZER = Tokenizer.bytes()
PRESETS = ["gpt2-tiny", "smollm2-tiny", "linear-attention-tiny", "qwen3-next-tiny", "kimi-k3-tiny"]
HYBRID = "kimi-linear-tiny"
TEXT = "the quick brown fox jumps over the lazy dog, and the dog lets it. " * 40


@functools.cache
def make(preset: str, **fields: Any) -> pal.Model:
    """A model whose distribution is sharp enough that greedy tokens differ from one another. Tests share it."""
    torch.manual_seed(3)
    fields = {"initializer_range": 0.2, "max_position_embeddings": 2560, **fields}
    return pal.Model(pal.ModelConfig.preset(preset, vocab_size=257, **fields)).eval()


def sampling(**fields: Any) -> pal.SamplingConfig:
    return pal.SamplingConfig(**{"max_new_tokens": 16, "temperature": 0.0, **fields})


def request(prompt: str, config: pal.SamplingConfig | None = None, **fields: Any) -> Request:
    return Request(tuple(TOKENIZER.encode(prompt)), config or sampling(), **fields)


def engine(preset: str, **fields: Any) -> Engine:
    return Engine(make(preset), TOKENIZER, **{"memory_bytes": 1 << 30, **fields})


def ask(server: Engine, *requests: Request) -> list[Answer]:
    """The first answer to each request."""
    return [answers[0] for answers in server.run(requests)]


def mixture() -> tuple[list[str], list[pal.SamplingConfig]]:
    lengths = [1, 300, 7, 40, 90, 513, 2, 512]
    temperatures = [0, 0, 1, 0, 0.8, 0, 1, 0]
    configs = [sampling(max_new_tokens=5 + 2 * n, temperature=t, seed=n) for n, t in enumerate(temperatures)]
    return [TEXT[n : n + length] for n, length in enumerate(lengths)], configs


@functools.cache
def alone(preset: str) -> list[tuple[tuple[int, ...], str]]:
    completions = [pal.generate(make(preset), TOKENIZER, [p], c)[0] for p, c in zip(*mixture(), strict=True)]
    return [(each.token_ids, each.finish_reason) for each in completions]


def found(answers: Sequence[Answer]) -> list[tuple[tuple[int, ...], str | None]]:
    return [(tuple(answer.row.token_ids), answer.reason) for answer in answers]


# The same answers alone and together


@pytest.mark.parametrize("preset", PRESETS)
def test_answers_are_those_given_alone_whatever_the_neighbours(preset: str) -> None:
    """R099, R104: unequal prompts read in pieces beside the drawing, sampled and greedy, with and without a memory of them."""
    server = engine(preset, read_tokens=150, cache_bytes=1 << 26)
    requests = [request(p, c) for p, c in zip(*mixture(), strict=True)]
    assert found(ask(server, *requests)) == alone(preset)
    assert found(ask(server, *reversed(requests))) == alone(preset)[::-1]
    assert server.counts["cached_tokens"] >= server.counts["prompt_tokens"] // 2
    assert server.idle and server.held_bytes() == 0


@pytest.mark.parametrize("preset", ["smollm2-tiny", "kda-tiny", HYBRID])
def test_answers_survive_giving_way(preset: str) -> None:
    """Too little memory for all: the newest leave and are read again, and memory stays within its budget at every round."""
    config = sampling(max_new_tokens=110, temperature=0.5)
    requests = [request(TEXT[n : n + 20], config.replace(seed=n), logit_bias={256: -100.0}) for n in range(6)]
    expected = found(ask(engine(preset), *requests))
    cost = Cost(make(preset))
    server = engine(preset, memory_bytes=cost.of([20 + HEADROOM] * 4), guess_tokens=4)
    tickets = [server.submit(each, lambda piece: None) for each in requests]
    while server.step():
        assert server.held_bytes() <= server.memory_bytes
    assert found([ticket.answers[0] for ticket in tickets]) == expected
    assert (server.counts["preempted"] > 0) == (cost.bytes_per_token > 0)


def test_a_row_of_a_batch_has_the_logits_it_has_alone() -> None:
    for preset in ("smollm2-tiny", "kimi-k3-tiny"):
        prompts = [TEXT[n : n + 30 * n + 5] for n in range(6)]
        requests = [request(prompt, top_logprobs=5) for prompt in prompts]
        tops: list[list[Any]] = []
        for many in (requests, [requests[4]]):
            pieces: list[Piece] = []
            server = engine(preset)
            for each in many:
                server.submit(each, pieces.append if each is requests[4] else lambda piece: None)
            while server.step():
                pass
            tops.append([score for piece in pieces for score in piece.scores])
        for one, other in zip(*tops, strict=True):
            assert [token for token, _ in one.top] == [token for token, _ in other.top]
            values = torch.tensor([[value for _, value in each.top] for each in (one, other)])
            torch.testing.assert_close(values[0], values[1], rtol=1e-5, atol=1e-5)


def test_a_seed_belongs_to_its_request_and_none_varies() -> None:
    config = sampling(temperature=1.0, seed=5)
    first, second = ask(engine(HYBRID), request("a", config), request("a", config))
    assert found([first]) == found([second])
    free = ask(engine(HYBRID), *[request("a", sampling(temperature=1.0)) for _ in range(2)])
    assert free[0].row.token_ids != free[1].row.token_ids


@pytest.mark.parametrize("preset", ["gpt2-tiny", HYBRID])
def test_n_answers_come_from_one_reading(preset: str) -> None:
    server = engine(preset)
    config = sampling(temperature=1.0, seed=7)
    ((*three,),) = server.run([request(TEXT[:100], config, n=3)])
    single = ask(engine(preset), *[request(TEXT[:100], config.replace(seed=7 + n)) for n in range(3)])
    assert found(three) == found(single)
    assert server.counts["prompt_tokens"] == 100


# Remembered beginnings


@pytest.mark.parametrize("preset", PRESETS)
def test_a_remembered_beginning_changes_nothing(preset: str) -> None:
    """R049: the same prompt twice, then its first blocks with another tail; more than one node and each kind of memory."""
    whole = TEXT[: 2 * BLOCK + 100]
    other = whole[: 2 * BLOCK + 10] + "something else"
    expected = found(ask(engine(preset), request(whole), request(whole), request(other)))
    server = engine(preset, cache_bytes=1 << 26)
    cached = []
    for prompt, right in zip((whole, whole, other), expected, strict=True):
        (answer,) = ask(server, request(prompt))
        assert found([answer]) == [right]
        cached.append(answer.ticket.cached_tokens)
    assert cached == [0, len(whole), 2 * BLOCK]


def test_a_second_turn_reads_only_what_is_new() -> None:
    """R055: turn two continues turn one's answer; an edited last message goes back to the block before it."""
    server = engine(HYBRID, cache_bytes=1 << 26)
    first = TEXT[:2000]
    (answer,) = ask(server, request(first, sampling(max_new_tokens=30)))
    history = tuple(answer.ids)
    second = Request((*history, *TOKENIZER.encode("and then?")), sampling())
    (again,) = ask(server, second)
    assert len(history) - 1 == again.ticket.cached_tokens
    assert found([again]) == found(ask(engine(HYBRID), second))
    (edited,) = ask(server, request(first[:1990] + "edited"))
    assert edited.ticket.cached_tokens == 1990 // BLOCK * BLOCK


def test_the_memory_of_beginnings_stays_within_its_budget() -> None:
    server = engine(HYBRID, cache_bytes=250_000)
    prompts = [f"{n} {TEXT[:600]}" for n in range(5)]
    config = sampling(max_new_tokens=2)
    expected = found(ask(engine(HYBRID), *[request(p, config) for p in prompts]))
    for _ in range(2):
        for prompt, right in zip(prompts, expected, strict=True):
            assert found(ask(server, request(prompt, config))) == [right]
            assert server.prefixes.num_bytes <= 250_000
    assert 0 < len(server.prefixes) < 12
    ask(server, request(prompts[-1], config))
    assert server.counts["cached_tokens"] == len(prompts[-1])
    held = [node.num_bytes for node in server.prefixes._order]
    assert sum(held) == server.prefixes.num_bytes
    for node in server.prefixes._order:
        assert node.memory is not None and node.hidden is not None
        assert node.num_bytes == node.memory.num_bytes() + len(node.tokens) + node.hidden.nbytes


def test_what_came_from_the_cache_is_not_written_to() -> None:
    server = engine("smollm2-tiny", cache_bytes=1 << 26)
    results = [found(ask(server, request(TEXT[:700], sampling(max_new_tokens=40)))) for _ in range(3)]
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("preset", ["smollm2-tiny", "kimi-k3-tiny"])
def test_what_leaves_memory_comes_back_from_disk(preset: str) -> None:
    """Seven long prompts in memory for one or two: each is remembered to its end, and answers are as without any memory."""
    prompts = [f"{n} {TEXT[: 2 * BLOCK + 10 * n]}" for n in range(7)]
    expected = found(ask(engine(preset), *[request(p) for p in prompts]))
    one = engine(preset, cache_bytes=1 << 30)
    ask(one, request(prompts[-1]))
    budget = one.prefixes.num_bytes * 3 // 2
    server = engine(preset, cache_bytes=budget, disk_bytes=1 << 30)
    disk = server.prefixes.disk
    for turn in range(2):
        for prompt, right in zip(prompts, expected, strict=True):
            (answer,) = ask(server, request(prompt))
            assert found([answer]) == [right]
            assert turn == 0 or answer.ticket.cached_tokens == len(prompt)
            assert server.prefixes.num_bytes <= budget
    assert disk.num_bytes > 2 * budget and disk._folder is not None
    folder = disk._folder
    assert sum(path.stat().st_size for path in folder.iterdir()) == disk.num_bytes and folder.stat().st_mode & 0o777 == 0o700
    assert {path.suffix for path in folder.iterdir()} == {".safetensors"}
    held, spilled = server.prefixes._order, server.prefixes._spilled
    assert all(node.memory is not None and node.file is None for node in held)
    assert all(node.memory is None and node.hidden is None and node.file is not None for node in spilled)
    assert sum(node.num_bytes for node in held) == server.prefixes.num_bytes and len(server.prefixes) == len(held) + len(
        spilled
    )
    del server, disk, held, spilled
    gc.collect()
    assert not folder.exists()


def test_the_disk_has_a_budget_too() -> None:
    prompts = [f"{n} {TEXT[:600]}" for n in range(12)]
    expected = found(ask(engine(HYBRID), *[request(p) for p in prompts]))
    server = engine(HYBRID, cache_bytes=250_000, disk_bytes=700_000)
    for prompt, right in zip(prompts * 2, expected * 2, strict=True):
        assert found(ask(server, request(prompt))) == [right]
        assert server.prefixes.num_bytes <= 250_000 and server.prefixes.disk.num_bytes <= 700_000
    assert server.prefixes.disk.num_bytes > 350_000
    cached = [ask(server, request(prompt))[0].ticket.cached_tokens for prompt in (*reversed(prompts[-3:]), prompts[0])]
    assert cached[:2] == [len(prompts[-1])] * 2 and cached[3] == 0


@pytest.mark.parametrize("damage", ["gone", "cut", "others"])
def test_a_damaged_file_is_forgotten_with_what_goes_on_from_it(damage: str) -> None:
    prompt = TEXT[: 3 * BLOCK + 5]
    expected = found(ask(engine(HYBRID), request(prompt)))
    server = engine(HYBRID, cache_bytes=1 << 26, disk_bytes=1 << 26)
    ask(server, request(prompt))
    server.prefixes.budget_bytes = 0  # everything leaves
    server.prefixes._shrink()
    server.prefixes.budget_bytes = 1 << 26
    node = next(node for node in server.prefixes._spilled if node.end == 2 * BLOCK)
    other = next(node for node in server.prefixes._spilled if node.end > 3 * BLOCK)
    assert node.file is not None and other.file is not None
    if damage == "gone":
        node.file.unlink()
    else:
        node.file.write_bytes(node.file.read_bytes()[:-9] if damage == "cut" else other.file.read_bytes())
    (answer,) = ask(server, request(prompt))
    assert found([answer]) == expected and answer.ticket.cached_tokens == BLOCK
    (again,) = ask(server, request(prompt))
    assert found([again]) == expected and again.ticket.cached_tokens == len(prompt)


def test_a_disk_that_takes_nothing_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("palimpsest.engine.spill.save_file", full)
    server = engine(HYBRID, cache_bytes=250_000, disk_bytes=1 << 26)
    prompts = [f"{n} {TEXT[:600]}" for n in range(4)]
    assert found(ask(server, *[request(p) for p in prompts])) == found(ask(engine(HYBRID), *[request(p) for p in prompts]))
    assert server.prefixes.disk.num_bytes == 0 and len(server.prefixes) > 0


# Guesses


class Oracle(PromptLookup):
    """Guesses what is right for a number of tokens and then wrong."""

    answer: list[int] = []
    right = 0

    def guess(self, ids: Sequence[int], room: int) -> list[int]:
        done = len(ids) - len(TEXT[:50])
        true = self.answer[done : done + 4]
        return [token if n < self.right else (token + 1) % 256 for n, token in enumerate(true)][:room]


@pytest.mark.parametrize("right", [0, 2, 4])
@pytest.mark.parametrize("preset", ["smollm2-tiny", "kda-tiny", "kimi-k3-tiny"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_wrong_guesses_leave_nothing_behind(
    preset: str, right: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R048: four guesses at a time, none, some or all of them right, in a batch with a row that guesses for itself."""
    config = sampling(max_new_tokens=40, temperature=temperature, seed=3)
    requests = [request(TEXT[:50], config), request("abcabcabcabc", config)]
    plain = ask(engine(preset), *requests)
    monkeypatch.setattr(Oracle, "answer", plain[0].row.token_ids)
    monkeypatch.setattr(Oracle, "right", right)
    server = engine(preset, guess_tokens=4, cache_bytes=1 << 24)
    tickets = [server.submit(each, lambda piece: None) for each in requests]
    tickets[0].answers[0].lookup = Oracle(4)
    rounds = 0
    while server.step():
        rounds += 1
    assert found([ticket.answers[0] for ticket in tickets]) == found(plain)
    # Where nothing is to be taken back, right guesses save rounds.
    assert server.counts["right_tokens"] >= {0: 0, 2: 12, 4: 30}[right]
    assert right < 4 or rounds < 41 or server.counts["right_tokens"] < 35


def test_guesses_come_from_the_text_itself() -> None:
    lookup = PromptLookup(8)
    assert lookup.guess([1, 2, 3, 4, 5, 9, 1, 2, 3], 8) == [4, 5, 9, 1]
    assert lookup.guess([1, 2, 3, 4, 5, 9, 1, 2, 3], 2) == [4, 5]
    lookup.learn(4, 4, 13)
    assert lookup.guess([1, 2, 3, 4, 5, 9, 1, 2, 3], 8) == [4, 5, 9, 1, 2, 3]
    lookup.learn(6, 0, 15)
    assert lookup.guess([1, 2, 3, 4, 5, 9, 1, 2, 3], 8) == []
    assert lookup.guess([1, 2, 3], 8) == [] == PromptLookup(0).guess([1, 2, 3, 4, 1, 2, 3], 8)


DRAFTS = [("smollm2-tiny", "kda-tiny"), ("kimi-k3-tiny", "gpt2-tiny"), *[(name, name) for name in ("smollm2-tiny", "kda-tiny")]]
DRAFTS += [(HYBRID, HYBRID)]


def drafted(preset: str, draft: str, **fields: Any) -> Engine:
    """A draft of one kind with the model has nearly its weights and often agrees; another is of two layers and hardly does."""
    guesser = make(draft, num_hidden_layers=2, mixers=make(draft).config.mixers[:2], mlps=make(draft).config.mlps[:2])
    if preset == draft:
        guesser = copy.deepcopy(make(draft))
        with torch.no_grad():
            for parameter in guesser.parameters():
                parameter += 0.002 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    return engine(preset, guess_tokens=4, draft=DraftModel(guesser, TOKENIZER), **fields)


@pytest.mark.parametrize(("preset", "draft"), DRAFTS)
def test_a_draft_model_changes_no_answer(preset: str, draft: str) -> None:
    """R048: greedy and sampled answers are those without a draft, token by token, in mixed batches, remembered or not; also
    where the draft's reading lags behind the answer's."""
    requests = [request(p, c) for p, c in zip(*mixture(), strict=True)]
    server = drafted(preset, draft, cache_bytes=1 << 26, read_tokens=150)
    assert found(ask(server, *requests)) == alone(preset)
    assert found(ask(server, *reversed(requests))) == alone(preset)[::-1]
    assert server.counts["guessed_tokens"] > server.counts["right_tokens"] >= (15 if preset == draft else 0)
    assert server.idle and server.held_bytes() == 0


@pytest.mark.parametrize("draft", ["smollm2-tiny", "kda-tiny"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_draft_that_is_the_model_is_always_right(draft: str, temperature: float) -> None:
    """Also when it samples: it draws with the answer's own random numbers. Its state is taken back to the last token that
    came true, or the guesses after that would be wrong."""
    config = sampling(max_new_tokens=41, temperature=temperature, seed=5, top_p=0.95)
    requests = [request(TEXT[n : n + 40 + n], config) for n in range(20)]
    plain = found(ask(engine(draft), *requests))
    long = [n for n, (_, reason) in enumerate(plain) if reason == "length"][:3]
    requests, plain = [requests[n] for n in long], [plain[n] for n in long]
    server = engine(draft, guess_tokens=4, draft=DraftModel(make(draft), TOKENIZER))
    tickets = [server.submit(each, lambda piece: None) for each in requests]
    rounds = 0
    while server.step():
        rounds += 1
    assert found([ticket.answers[0] for ticket in tickets]) == plain
    assert server.counts["right_tokens"] == server.counts["guessed_tokens"] == 3 * 32
    assert rounds == 1 + 8


@pytest.mark.parametrize("draft", ["kda-tiny", "smollm2-tiny"])
def test_a_draft_goes_back_to_the_last_guess_that_came_true(draft: str) -> None:
    """Of the states on the way each row gets the one that it asks for."""
    model = make(draft)
    ids = torch.randint(256, (3, 12), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        states = [model(ids[:, :8]).state]
        for n in range(8, 12):
            states.append(model(ids[:, n : n + 1], states[-1]).state)
        state = settled(states, [8, 10, 40])
        assert state.lengths == (8, 10, 12)
        following = model(torch.tensor([[7], [7], [7]]), state).logits
        for row, length in enumerate((8, 10, 12)):
            whole = torch.cat([ids[row, :length], torch.tensor([7])]).unsqueeze(0)
            torch.testing.assert_close(following[row, 0], model(whole).logits[0, -1], rtol=1e-4, atol=1e-5)


def test_sampling_with_a_draft_keeps_the_distribution() -> None:
    """Pairs of tokens over many seeds against the model's own probabilities, by a chi-square test."""
    top, answers = 4, 1600
    config = sampling(max_new_tokens=2 + 1, temperature=1.3, top_k=top, seed=1000)
    model = make("smollm2-tiny")
    prompt = torch.tensor([TOKENIZER.encode("To be")])

    def likeliest(ids: torch.Tensor) -> dict[int, float]:
        with torch.no_grad():
            best = model(ids).logits[0, -1, :257].double().topk(top)
        return dict(zip(best.indices.tolist(), torch.softmax(best.values / 1.3, 0).tolist(), strict=True))

    expected = {}
    for first, share in likeliest(prompt).items():
        for second, of_it in likeliest(torch.cat([prompt, torch.tensor([[first]])], 1)).items():
            expected[first, second] = share * of_it
    server = drafted("smollm2-tiny", "smollm2-tiny")
    drawn: Counter[tuple[int, ...]] = Counter()
    for start in range(0, answers, 64):
        many = request("To be", config.replace(seed=1000 + start), n=64)
        drawn.update(tuple(answer.row.token_ids[:2]) for answer in server.run([many])[0])
    assert 0 < server.counts["right_tokens"] < server.counts["guessed_tokens"]
    assert drawn.keys() <= expected.keys()
    total = drawn.total()
    square = sum((drawn[pair] - total * share) ** 2 / (total * share) for pair, share in expected.items())
    assert square < 37.7  # of 15 degrees of freedom; one in a thousand lies beyond


def test_a_draft_in_little_memory() -> None:
    """Its states count in the budget; an answer that gave way is read again by both."""
    config = sampling(max_new_tokens=110, temperature=0.5)
    requests = [request(TEXT[n : n + 20], config.replace(seed=n), logit_bias={256: -100.0}) for n in range(6)]
    cost = Cost(make("smollm2-tiny"), make("smollm2-tiny"), 4)
    server = drafted("smollm2-tiny", "smollm2-tiny", memory_bytes=cost.of([20 + HEADROOM] * 4))
    tickets = [server.submit(each, lambda piece: None) for each in requests]
    while server.step():
        assert 0 <= server.held_bytes() <= server.memory_bytes
    assert found([ticket.answers[0] for ticket in tickets]) == found(ask(engine("smollm2-tiny"), *requests))
    assert server.counts["preempted"] > 0 < server.counts["right_tokens"]


def test_a_draft_of_another_vocabulary_or_a_damaged_one() -> None:
    other = Tokenizer.train(["a b a b"], 258)
    with pytest.raises(InputError, match="draft: its tokenizer is another one"):
        Engine(make("kda-tiny"), TOKENIZER, draft=DraftModel(make("kda-tiny"), other))
    damaged = copy.deepcopy(make("kda-tiny"))
    with torch.no_grad():
        damaged.embed_tokens.weight[:] = float("nan")
    server = engine("kda-tiny", guess_tokens=4, draft=DraftModel(damaged, TOKENIZER))
    prompt = request(TEXT[:40])
    assert found(ask(server, prompt)) == found(ask(engine("kda-tiny"), prompt))
    # Where the draft's positions end it guesses no more.
    short = DraftModel(make("smollm2-tiny", max_position_embeddings=50), TOKENIZER)
    server = engine("smollm2-tiny", guess_tokens=4, draft=short)
    assert found(ask(server, prompt)) == found(ask(engine("smollm2-tiny"), prompt))
    assert server.counts["guessed_tokens"] <= 10


# Failing, leaving, refusing


@pytest.mark.parametrize("preset", ["qwen3-next-tiny", HYBRID])
def test_a_request_that_turns_nan_fails_alone(preset: str) -> None:
    """A token with a damaged embedding poisons its own request, in its prompt or its text, and nothing that comes after."""
    torch.manual_seed(3)
    config = pal.ModelConfig.preset(preset, vocab_size=257, initializer_range=0.2, tie_word_embeddings=False)
    model = pal.Model(config).eval()
    good = [request(TEXT[n : n + 100], sampling(max_new_tokens=30)) for n in range(4)]
    with torch.no_grad():
        model.embed_tokens.weight[1] = float("nan")
    expected = found(ask(Engine(model, TOKENIZER, 1 << 30), *good))
    bad = [Request((65, 1, 66), sampling()), Request((65, 66), sampling(), logit_bias={1: 100.0})]
    server = Engine(model, TOKENIZER, 1 << 30, cache_bytes=1 << 24)
    answers = ask(server, good[0], bad[0], good[1], bad[1], good[2], good[3])
    assert [answer.reason == "failed" for answer in answers] == [False, True, False, True, False, False]
    assert found([answers[n] for n in (0, 2, 4, 5)]) == expected
    assert found(ask(server, *good)) == expected
    start = Request((65, 66), sampling())
    assert found(ask(server, start)) == found(ask(Engine(model, TOKENIZER, 1 << 30), start))


def test_damage_that_has_passed_is_not_remembered() -> None:
    """A prompt read while something was wrong is read again when it is asked again."""
    model = copy.deepcopy(make(HYBRID))
    server = Engine(model, TOKENIZER, 1 << 30, cache_bytes=1 << 26)
    prompt = request(TEXT[: BLOCK + 20])
    whole = model.embed_tokens.weight.clone()
    with torch.no_grad():
        model.embed_tokens.weight[:] = float("nan")
        (bad,) = ask(server, prompt)
        model.embed_tokens.weight[:] = whole
    (good,) = ask(server, prompt)
    assert bad.reason == "failed" and good.ticket.cached_tokens == 0
    assert found([good]) == found(ask(engine(HYBRID), prompt))


@pytest.mark.parametrize("preset", ["smollm2-tiny", "kimi-k3-tiny"])
def test_leaving_frees_memory_and_disturbs_nobody(preset: str) -> None:
    """R104: sixteen requests in room for four, every third cancelled at some time; the others are as alone."""
    requests = [request(TEXT[n : n + 5 + 5 * n], sampling(max_new_tokens=8)) for n in range(16)]
    expected = [found(ask(engine(preset), each))[0] for each in requests]
    server = engine(preset, most_running=4, cache_bytes=1 << 22)
    tickets = [server.submit(each, lambda piece: None) for each in requests]
    rounds = 0
    while server.step():
        assert server.running <= 4
        if rounds % 4 == 2:
            server.cancel(tickets[rounds // 4 * 3 % 16])
        rounds += 1
    results = found([ticket.answers[0] for ticket in tickets])
    assert 1 <= sum(reason == "cancelled" for _, reason in results) <= 8
    assert all(result == right for result, right in zip(results, expected, strict=True) if result[1] != "cancelled")
    assert server.held_bytes() == 0 and not server._tickets


def test_a_cancelled_request_ends_within_a_round() -> None:
    server = engine(HYBRID)
    pieces: list[Piece] = []
    ticket = server.submit(request("abc", sampling(max_new_tokens=1000)), pieces.append)
    queued = server.submit(request("abc", sampling(max_new_tokens=1000)), lambda piece: None)
    for _ in range(5):
        server.step()
    server.cancel(ticket)
    server.cancel(queued)
    server.step()
    assert server.idle and pieces[-1].finish_reason == "cancelled" and queued.done


def test_refused() -> None:
    server = engine("gpt2-tiny")
    wrong = {
        "empty": Request((), sampling()),
        "holds token 257; this model's vocabulary is 0..256": Request((257,), sampling()),
        "2560 tokens and the context 2560": request(TEXT[:2560]),
        "n is 65": request("a", n=65),
        "logit_bias names token 300": request("a", logit_bias={300: 1.0}),
    }
    for text, each in wrong.items():
        with pytest.raises(InputError, match=text.replace(".", r"\.")):
            server.submit(each, lambda piece: None)
    assert server.idle
    with pytest.raises(InputError, match="memory"):
        engine("kda-tiny", memory_bytes=100)
    small = engine("smollm2-tiny", memory_bytes=300_000)
    assert small.context_tokens is not None and small.cost.of([small.context_tokens]) <= 300_000
    (answer,) = ask(small, request(TEXT[: small.context_tokens - 9], sampling(max_new_tokens=50)))
    assert answer.reason == "length" and len(answer.row.token_ids) == 9


def test_batches_hold_like_lengths() -> None:
    assert grouped([10, 2000, 500, 1100, 900], True) == [[1, 3], [4, 2], [0]]
    assert grouped([10, 2000, 500], False) == [[1, 2, 0]]
    cost = Cost(make("smollm2-tiny"))
    state = make("smollm2-tiny")(torch.zeros(3, 100, dtype=torch.long)).state
    assert state.num_bytes() < cost.of([100] * 3) < 1.4 * state.num_bytes()


# What is asked of one answer


def test_scores_penalties_and_bias_are_those_of_the_model() -> None:
    model = make(HYBRID)
    config = sampling(max_new_tokens=12)
    pieces: list[Piece] = []
    server = engine(HYBRID)
    bias = {101: -100.0, 32: 1.5}
    server.submit(
        request("To be", config, top_logprobs=3, frequency_penalty=0.7, presence_penalty=0.4, logit_bias=bias), pieces.append
    )
    while server.step():
        pass
    ids = TOKENIZER.encode("To be")
    scores = [score for piece in pieces for score in piece.scores]
    assert len(scores) == 12 and "".join(piece.text for piece in pieces)
    for score in scores:
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1, :257]
        expected = torch.log_softmax(logits, -1)
        assert abs(score.logprob - float(expected[score.token])) < 1e-4
        best = expected.topk(3)
        assert [token for token, _ in score.top] == best.indices.tolist()
        for token in range(257):
            count = ids[5:].count(token)
            logits[token] += bias.get(token, 0) - 0.7 * count - 0.4 * (count > 0)
        assert int(logits.argmax()) == score.token
        ids.append(score.token)


def test_scores_of_a_stop_text_do_not_leak() -> None:
    bias = {token: -100.0 for token in (*range(32), *range(127, 257))}
    (plain,) = ask(engine(HYBRID), request("To be", sampling(max_new_tokens=40, temperature=2.0, seed=1), logit_bias=bias))
    text = TOKENIZER.decode(plain.row.token_ids)
    start = next(n for n in range(5, 30) if text.index(text[n : n + 3]) == n)
    pieces: list[Piece] = []
    server = engine(HYBRID)
    config = sampling(max_new_tokens=40, temperature=2.0, seed=1, stop=(text[start : start + 3],))
    server.submit(request("To be", config, top_logprobs=0, logit_bias=bias), pieces.append)
    while server.step():
        pass
    assert "".join(piece.text for piece in pieces) == text[:start]
    tokens = [score.token for piece in pieces for score in piece.scores]
    assert TOKENIZER.decode(tokens) == text[:start]
    assert [piece.finish_reason for piece in pieces if piece.finish_reason] == ["stop"] == [pieces[-1].finish_reason]


# The thread


def test_a_worker_serves_other_threads_and_outlives_a_broken_round(monkeypatch: pytest.MonkeyPatch) -> None:
    server = engine(HYBRID)
    worker = Worker(server)

    def answer(prompt: str) -> list[Piece]:
        pieces: list[Piece] = []
        done = threading.Event()

        def deliver(piece: Piece) -> None:
            pieces.append(piece)
            if piece.finish_reason is not None:
                done.set()

        worker.submit(request(prompt), deliver)
        assert done.wait(20)
        return pieces

    expected = TOKENIZER.decode(ask(engine(HYBRID), request("To be"))[0].row.token_ids)
    assert "".join(piece.text for piece in answer("To be")).startswith(expected.rstrip("\N{REPLACEMENT CHARACTER}"))
    with monkeypatch.context() as patch:
        patch.setattr("traceback.print_exc", lambda: None)
        patch.setattr(server, "_read", lambda: 1 / 0)
        failed = answer("To be")
        assert failed[-1].finish_reason == "failed" and "division" in (failed[-1].error or "")
    assert answer("To be")[-1].finish_reason == "length"
    worker.close()


@pytest.mark.parametrize(
    "preset", ["kda-tiny", "gated-deltanet-tiny", "deltanet-tiny", "linear-attention-tiny", "kimi-k3-tiny"]
)
def test_gauges_are_what_the_memory_does_with_a_token(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Noted in a batch with others, compared with what the recurrence is given when the whole text is read at once."""
    from palimpsest.ops import reference

    server = engine(preset)
    server.submit(request("others are here", sampling(max_new_tokens=3)), lambda piece: None)
    ticket = server.submit(request("To be"), lambda piece: None)
    server.step()
    server.watched = ticket
    held = len(ticket.answers[0].ids)
    server.step()
    seen: list[tuple[Any, Any]] = []
    recurrence = reference.recurrence

    def note(q: Any, k: Any, v: Any, g: Any, beta: Any, *rest: Any) -> Any:
        seen.append((g, beta))
        return recurrence(q, k, v, g, beta, *rest)

    monkeypatch.setattr("palimpsest.ops.choose", lambda *_: ("reference", ""))
    monkeypatch.setattr("palimpsest.ops.recurrence", note)
    with torch.no_grad():
        make(preset)(torch.tensor([ticket.answers[0].ids[:held]]))
    found = [each for each in ticket.gauges if each["kept"] is not None]
    assert len(found) == len(seen) > 0 and server.watched is None
    for gauge, (g, beta) in zip(found, seen, strict=True):
        assert gauge["kept"] == pytest.approx(1.0 if g is None else float(g[0, -1].exp().mean()), rel=1e-4)
        assert gauge["written"] == pytest.approx(1.0 if beta is None else float(beta[0, -1].mean()), rel=1e-4)
    assert not any(block.mixer._forward_pre_hooks for block in make(preset).layers)  # type: ignore[union-attr]
