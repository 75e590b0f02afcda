"""Generation: rows do not disturb one another, stop texts never leak, and every mistake is found before any work."""

import pickle
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import palimpsest as pal
from palimpsest.generate import Completion, StopText, draw, generate, stream
from palimpsest.tokenizer import Tokenizer

TOKENIZER = Tokenizer.bytes()
END = 256
PRESETS = ["gpt2-tiny", "kda-tiny", "kimi-k3-tiny"]


def sampling(**fields: Any) -> pal.SamplingConfig:
    return pal.SamplingConfig(**{"max_new_tokens": 16, "temperature": 0.0, **fields})


def make(preset: str, **fields: Any) -> pal.Model:
    """A model whose distribution is sharp enough that greedy tokens differ from one another."""
    torch.manual_seed(3)
    return pal.Model(pal.ModelConfig.preset(preset, vocab_size=257, **{"initializer_range": 0.2, **fields})).eval()


class Script:
    """Stands in for a model: the row whose prompt is the single byte b draws the tokens of `scripts[b]`, one by one."""

    def __init__(self, scripts: dict[str, Sequence[int]]) -> None:
        self.scripts = scripts
        self.config = SimpleNamespace(vocab_size=300, position="none", max_position_embeddings=4)
        self.embed_tokens = SimpleNamespace(weight=torch.zeros(1))
        self.rows_seen: list[int] = []

    def hidden(self, ids: torch.Tensor, state: Any = None, cu_seqlens: torch.Tensor | None = None) -> tuple[Any, Any]:
        if state is None:
            assert cu_seqlens is not None and ids.shape[0] == 1
            rest = [list(self.scripts[chr(int(ids[0, i]))]) for i in cu_seqlens[:-1]]
        else:
            assert ids.shape == (len(state.rest), 1)
            rest = [row[1:] for row in state.rest]
        self.rows_seen.append(len(rest))
        hidden = torch.tensor([row[0] for row in rest])
        hidden = hidden.unsqueeze(0) if state is None else hidden.unsqueeze(1)
        return hidden, SimpleNamespace(rest=rest, select=lambda rows: SimpleNamespace(rest=[rest[i] for i in rows]))

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(tokens, 300).float()


def scripted(scripts: dict[str, Sequence[int]], **fields: Any) -> tuple[list[Completion], Script]:
    model: Any = Script(scripts)
    completions = generate(model, TOKENIZER, list(scripts), sampling(**fields))
    for prompt, completion in zip(scripts, completions, strict=True):
        pieces = list(stream(Script(scripts), TOKENIZER, prompt, sampling(**fields)))  # type: ignore[arg-type]
        assert "" not in pieces and "".join(pieces) == completion
    return completions, model


def ids(text: str) -> list[int]:
    return list(text.encode())


# Rows among neighbours


@pytest.mark.parametrize("preset", PRESETS)
def test_greedy_is_the_argmax_of_the_whole_sequence_alone_or_in_a_batch(preset: str) -> None:
    model = make(preset)
    prompts = ["To be", "x", "not to be, that is the question", "To be"]
    together = generate(model, TOKENIZER, prompts, sampling(max_new_tokens=24))
    for prompt, completion in zip(prompts, together, strict=True):
        sequence = torch.tensor([ids(prompt) + list(completion.token_ids)])
        with torch.no_grad():
            greedy = model(sequence).logits[0, len(ids(prompt)) - 1 : -1].argmax(-1)
        assert list(completion.token_ids) == greedy.tolist()
        (alone,) = generate(model, TOKENIZER, [prompt], sampling(max_new_tokens=24))
        assert alone == completion and alone.token_ids == completion.token_ids
    assert len({completion.token_ids for completion in together}) == 3


@pytest.mark.parametrize("preset", PRESETS)
def test_a_seed_gives_the_same_text_whatever_the_neighbours(preset: str) -> None:
    model = make(preset)
    prompts = ["a", "bcd", "e f"]
    alone = {
        (seed, prompt): generate(model, TOKENIZER, [prompt], sampling(temperature=1.0, seed=seed))[0].token_ids
        for seed in range(1, 6)
        for prompt in prompts
    }
    assert len({alone[seed, "a"] for seed in range(1, 6)}) == 5
    for order in (prompts, prompts[::-1]):
        for seed in range(1, 6):
            mixed = generate(model, TOKENIZER, order, sampling(temperature=1.0, seed=seed))
            assert [completion.token_ids for completion in mixed] == [alone[seed, prompt] for prompt in order]


def test_no_seed_draws_anew_and_leaves_the_global_generator_alone() -> None:
    model = make("gpt2-tiny")
    before = torch.get_rng_state()
    first, second = generate(model, TOKENIZER, ["a", "a"], sampling(temperature=2.0, max_new_tokens=32))
    assert first.token_ids != second.token_ids
    assert torch.equal(before, torch.get_rng_state())


def test_finished_rows_leave_the_batch() -> None:
    long = ids("abcdef")
    (x, y, z), model = scripted({"x": [*ids("a"), END, 999], "y": [*long, END], "z": [END]})
    assert (x, y, z) == ("a", "abcdef", "")
    assert (x.token_ids, y.token_ids, z.token_ids) == ((97,), tuple(long), ())
    assert [x.finish_reason, y.finish_reason, z.finish_reason] == ["stop"] * 3
    assert model.rows_seen == [3, 2, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("preset", PRESETS)
def test_a_row_that_ends_does_not_disturb_the_others(preset: str) -> None:
    model = make(preset)
    prompts = ["alpha", "b", "gamma ray"]
    texts = generate(model, TOKENIZER, prompts, sampling(max_new_tokens=20))
    stop = bytes(texts[1].token_ids[2:4]).decode("latin-1")
    if not stop.isascii():
        stop = texts[1][1]
    expected = [generate(model, TOKENIZER, [p], sampling(max_new_tokens=20, stop=(stop,)))[0] for p in prompts]
    together = generate(model, TOKENIZER, prompts, sampling(max_new_tokens=20, stop=(stop,)))
    assert together == expected
    assert [c.token_ids for c in together] == [c.token_ids for c in expected]
    assert together[1].finish_reason == "stop" and len(together[1].token_ids) < 20


# The end of a text


def test_a_stop_text_is_found_across_tokens_and_never_shown() -> None:
    (text,), _ = scripted({"x": [*ids("One.\nAlice: two"), END]}, stop=("Alice:",), max_new_tokens=99)
    assert text == "One.\n" and text.finish_reason == "stop"
    assert bytes(text.token_ids) == b"One.\nAlice:"


@pytest.mark.parametrize("said", [" Alice! ", "Alice", "Al", "AAlice", "Alice Alice"])
def test_held_back_text_comes_exactly_once(said: str) -> None:
    (ended,), _ = scripted({"x": [*ids(said), END]}, stop=("Alice:",))
    assert ended == said and ended.finish_reason == "stop"
    (cut,), _ = scripted({"x": [*ids(said), 0]}, stop=("Alice:",), max_new_tokens=len(said))
    assert cut == said and cut.finish_reason == "length"


def test_a_stop_text_that_completes_with_the_last_token_is_a_stop() -> None:
    (text,), _ = scripted({"x": ids("ab##")}, stop=("##",), max_new_tokens=4)
    assert text == "ab" and text.finish_reason == "stop"


texts = st.text("abc", max_size=12)
stops = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3)


@settings(max_examples=300)
@given(texts, stops, st.lists(st.integers(0, 12), max_size=6))
def test_stop_texts_do_not_depend_on_the_pieces(text: str, stop: list[str], cuts: list[int]) -> None:
    # The definition: the shortest beginning of the text that ends with a stop text, without the longest such stop text.
    expected = text
    for end in range(len(text) + 1):
        found = [s for s in stop if text[:end].endswith(s)]
        if found:
            expected = text[: end - max(map(len, found))]
            break
    filter_ = StopText(tuple(stop))
    shown, bounds = "", sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    for start, end in zip(bounds, bounds[1:], strict=False):
        shown += filter_.push(text[start:end])
        if filter_.found:
            break
    shown += filter_.flush()
    assert shown == expected
    assert filter_.found == any(s in text for s in stop)


def test_characters_are_whole() -> None:
    said = "在夜里é"
    pieces = list(stream(Script({"x": [*ids(said), END]}), TOKENIZER, "x", sampling()))  # type: ignore[arg-type]
    assert pieces == list(said)
    (cut,), _ = scripted({"x": ids(said)}, max_new_tokens=4)
    assert cut == "在" and cut.finish_reason == "length" and len(cut.token_ids) == 4
    (ended,), _ = scripted({"x": [*ids("在")[:2], END]})
    assert ended == ""


def test_tokens_beyond_the_tokenizer_are_never_drawn() -> None:
    model = make("gpt2-tiny").requires_grad_(False)
    wide = pal.Model(model.config.replace(vocab_size=300)).eval()
    wide.embed_tokens.weight.data.mul_(10)
    (text,) = generate(wide, TOKENIZER, ["a"], sampling(temperature=1.0, seed=0, max_new_tokens=200))
    assert max(text.token_ids) < 256


# Prompts


def test_the_position_table_bounds_prompt_and_text() -> None:
    model = make("gpt2-tiny", max_position_embeddings=16)
    ten, full = generate(model, TOKENIZER, ["x" * 10, "x" * 16], sampling(max_new_tokens=10))
    assert len(ten.token_ids) == 6 and ten.finish_reason == "length"
    assert full == "" and full.finish_reason == "length"
    assert list(stream(model, TOKENIZER, "x" * 16, sampling())) == []
    model.hidden = None  # type: ignore[assignment,method-assign]  # any work would fail with another error
    for ask in (generate, lambda m, t, p, c: stream(m, t, p[1], c)):
        with pytest.raises(pal.InputError, match="prompt has 20 tokens and the model's position table 16"):
            ask(model, TOKENIZER, ["x", "x" * 20], sampling())


def test_models_without_a_position_table_go_on() -> None:
    model = make("kda-tiny", max_position_embeddings=4)
    (text,) = generate(model, TOKENIZER, ["longer than four"], sampling(max_new_tokens=12))
    assert len(text.token_ids) == 12


def test_an_empty_prompt_starts_from_the_end_token_or_is_refused() -> None:
    model = make("gpt2-tiny")
    (text,) = generate(model, TOKENIZER, [""], sampling(max_new_tokens=1))
    with torch.no_grad():
        assert text.token_ids == (int(model(torch.tensor([[END]])).logits[0, 0, :256].argmax()),)
    without = Tokenizer.bytes()
    without.eos_id = None
    with pytest.raises(pal.InputError, match="prompt is empty and the tokenizer has no end token"):
        generate(model, without, ["fine", ""], sampling())
    assert generate(model, TOKENIZER, [], sampling()) == []
    with pytest.raises(pal.InputError, match="prompts is the text 'hello'"):
        generate(model, TOKENIZER, "hello", sampling())


def test_a_tokenizer_of_another_vocabulary_is_refused() -> None:
    model = pal.Model(pal.ModelConfig.preset("gpt2-tiny", vocab_size=200))
    with pytest.raises(pal.InputError, match="tokenizer has 257 tokens and the model's vocab_size is 200"):
        generate(model, TOKENIZER, ["a"], sampling())


def test_broken_weights_are_named() -> None:
    model = make("gpt2-tiny")
    torch.nn.init.constant_(model.get_parameter("norm.weight"), float("nan"))
    for temperature in (0.0, 1.0):
        with pytest.raises(pal.InputError, match="logits reach nan"):
            generate(model, TOKENIZER, ["a"], sampling(temperature=temperature))


# One draw


def draws(logits: list[float], count: int = 400, **fields: Any) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    config = sampling(**{"temperature": 1.0, **fields})
    return [draw(torch.tensor(logits), config, generator) for _ in range(count)]


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([0.5, 0.2, 0.3]).log().tolist()
    shares = torch.tensor(draws(logits, 4000)).bincount() / 4000
    assert torch.allclose(shares, torch.tensor([0.5, 0.2, 0.3]), atol=0.03)
    cooler = torch.tensor(draws(logits, 4000, temperature=0.5)).bincount() / 4000
    assert torch.allclose(cooler, torch.tensor([0.25, 0.04, 0.09]) / 0.38, atol=0.03)


def test_top_k_and_top_p_keep_the_smallest_set() -> None:
    logits = torch.tensor([0.1, 0.5, 0.15, 0.25]).log().tolist()
    assert set(draws(logits, top_k=1)) == {1}
    assert set(draws(logits, top_k=2)) == {1, 3}
    assert set(draws(logits, top_p=0.01)) == {1}
    assert set(draws(logits, top_p=0.7)) == {1, 3}
    assert set(draws(logits, top_p=0.8)) == {1, 2, 3}
    assert set(draws(logits, top_k=3, top_p=0.75)) == {1, 3}  # of the three that are left, these reach 0.83
    assert set(draws([0.0] * 8, top_k=3)) == {0, 1, 2}
    assert set(draws(logits, top_k=100)) == {0, 1, 2, 3}


def by_sorting(logits: torch.Tensor, config: pal.SamplingConfig, generator: torch.Generator) -> int:
    """The definition: sort everything, equal ones by token; cut; draw."""
    weights = ((logits.double() - logits.max()) / config.temperature).exp()
    total = weights.sum()
    weights, order = weights.sort(descending=True, stable=True)
    if config.top_k:
        weights = weights[: config.top_k]
        total = weights.sum()
    mass, kept = weights.cumsum(0), 1
    while kept < len(weights) and mass[kept - 1] < config.top_p * total:
        kept += 1
    mass = mass[:kept]
    point = torch.rand((), dtype=torch.float64, generator=generator) * mass[-1]
    return int(order[min(int(torch.searchsorted(mass, point, right=True)), int(weights[:kept].nonzero()[-1]))])


@pytest.mark.parametrize("vocab", [1, 2, 1023, 1024, 1025, 5000])
@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0, 30.0])
@pytest.mark.parametrize("cut", [{"top_p": 0.5}, {"top_p": 0.97}, {"top_k": 7, "top_p": 0.9}, {"top_k": 1500}, {"top_p": 1e-9}])
def test_a_draw_sorts_little_and_is_the_one_that_sorting_gives(vocab: int, spread: float, cut: dict[str, Any]) -> None:
    """The same token for the same random number, at full and at half precision, where many weights are equal."""
    config = sampling(temperature=0.8, **cut)
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * spread
    for each in (logits, logits.bfloat16().float(), logits.round()):
        mine, theirs = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
        drawn = [draw(each, config, mine) for _ in range(5)]
        assert drawn == [by_sorting(each, config, theirs) for _ in range(5)]
        assert torch.equal(mine.get_state(), theirs.get_state())


def test_a_sharp_distribution_is_not_sorted_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    sort = torch.Tensor.sort
    monkeypatch.setattr(torch.Tensor, "sort", lambda self, **how: sizes.append(len(self)) or sort(self, **how))
    sharp = (torch.arange(50_000.0) / 1000).tolist()
    draws(sharp, 1, top_p=0.5)
    draws([0.0] * 3000, 1, top_p=0.9)
    draws(sharp, 1, top_k=40)
    assert sizes == [1024, 3000, 40]


def test_temperature_zero_takes_the_first_of_equals() -> None:
    assert set(draws([0.0, 7.0, 7.0, 1.0], 3, temperature=0.0)) == {1}
    assert set(draws([0.0, 7.0, 6.0, 1.0], 50, temperature=1e-9)) == {1}


@given(st.lists(st.floats(-1e4, 1e4), min_size=1, max_size=20), st.floats(1e-300, 100), st.floats(1e-6, 1))
def test_a_draw_is_always_a_token_of_some_weight(logits: list[float], temperature: float, top_p: float) -> None:
    (token,) = draws(logits, 1, temperature=temperature, top_p=top_p)
    scores = torch.tensor(logits).double()
    assert ((scores[token] - scores.max()) / temperature).exp() > 0


def test_a_completion_is_a_text() -> None:
    completion = Completion("hé", [104], "length")
    assert completion == "hé" and completion.text == "hé" and type(completion.text) is str
    again = pickle.loads(pickle.dumps(completion))
    assert again == completion and again.token_ids == (104,) and again.finish_reason == "length"
