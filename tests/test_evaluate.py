"""Untrained memories behave as their equations say, and losses by position are those of the model."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import palimpsest as pal
from palimpsest import evaluate
from palimpsest.cli import main
from palimpsest.config import InputError
from palimpsest.tokenizer import Tokenizer
from tests.conftest import make_ids, make_model


def test_one_pair_is_read_back_exactly_by_every_memory():
    row = evaluate.readout([1])["random"][0]
    assert row["pairs"] == 1
    assert all(row[memory] < 1e-12 for memory in evaluate.MEMORIES)


def test_random_keys_blur_additive_memory_like_the_square_root_of_the_load():
    rows = {row["pairs"]: row for row in evaluate.readout([17, 65], key_dim=64, trials=32)["random"]}
    assert rows[17]["additive"] == pytest.approx(math.sqrt(16 / 64), rel=0.1)
    assert rows[65]["additive"] == pytest.approx(1.0, rel=0.1)


def test_the_delta_rule_is_ahead_of_adding_for_correlated_keys_and_after_overwriting():
    result = evaluate.readout([8, 32, 64])
    assert all(row["delta"] < row["additive"] for row in result["correlated"])
    overwritten = {row["memory"]: row for row in result["overwrite"]}
    assert overwritten["delta"]["error_new"] < 1e-9 < overwritten["additive"]["error_new"]
    assert overwritten["additive"]["error_new"] > 0.5


def test_losses_by_position_average_to_the_loss_of_the_model():
    torch.manual_seed(0)
    model = pal.Model(pal.ModelConfig.preset("kda-tiny"))
    tokens = torch.randint(0, 257, (5 * 32 + 3,))
    losses = evaluate.loss_by_position(model, tokens.numpy(), 32, windows=100)
    windows = tokens[: 5 * 32].view(5, 32)
    expected = model(windows, labels=windows).loss
    assert losses.shape == (31,)
    assert float(losses.mean()) == pytest.approx(float(expected.detach()), rel=1e-5)
    logits = model(windows).logits
    third = F.cross_entropy(logits[:, 2], windows[:, 3])
    assert float(losses[2]) == pytest.approx(float(third.detach()), rel=1e-5)
    assert model.training


def test_too_few_tokens_for_a_window_are_refused():
    model = pal.Model(pal.ModelConfig.preset("gpt2-tiny"))
    with pytest.raises(ValueError, match="fewer than one window"):
        evaluate.loss_by_position(model, torch.zeros(31), 32, 1)


def test_buckets_cover_every_position_once_and_keep_the_mean():
    losses = torch.arange(1, 101, dtype=torch.float64)
    buckets = evaluate.position_buckets(losses, bytes_per_token=2.0)
    covered = [position for bucket in buckets for position in range(int(bucket["start"]), int(bucket["end"]) + 1)]
    assert covered == list(range(1, 101))
    first = buckets[0]
    assert first["bits_per_byte"] == pytest.approx(2.5 / math.log(2) / 2)


def test_bits_per_byte_of_a_fair_coin_per_byte_is_one():
    assert evaluate.bits_per_byte(math.log(2), 1.0) == pytest.approx(1.0)
    assert evaluate.bits_per_byte(math.log(2) * 3, 3.0) == pytest.approx(1.0)


# ------------------------------------------------------------------------------------------------------------------- texts

HYBRID = "kimi-k3-tiny"  # has every kind of memory


def long_pass(model: pal.Model, ids: torch.Tensor) -> torch.Tensor:
    """The loss of every token but the first given all before it, from the logits of one pass over all."""
    with torch.no_grad():
        return F.cross_entropy(model(ids.unsqueeze(0)).logits[0, :-1], ids[1:], reduction="none").double()


@pytest.mark.parametrize("window", [1, 7, 16, 64, 1000])
@pytest.mark.parametrize("preset", ["gpt2-tiny", "gated-deltanet-tiny", HYBRID])
def test_stateful_windows_are_one_long_pass(preset: str, window: int) -> None:
    model = make_model(preset).double()
    ids = make_ids(model, 1, 50)[0]
    found = evaluate.stateful(model, ids, window)
    torch.testing.assert_close(found.nats, long_pass(model, ids), rtol=1e-9, atol=1e-9)
    assert found.seen.tolist() == list(range(1, 50))


@pytest.mark.parametrize(("window", "stride"), [(16, 15), (16, 4), (7, 1), (2, 1), (50, 20), (64, 32), (49, 3)])
@pytest.mark.parametrize("preset", ["gpt2-tiny", HYBRID])
def test_sliding_windows_are_the_loop_of_their_definition(preset: str, window: int, stride: int) -> None:
    """Token t counts in the first window [a, a + window), a = 0, stride, ..., that holds it behind a."""
    model = make_model(preset).double()
    ids = make_ids(model, 1, 50)[0]
    found = evaluate.sliding(model, ids, window, stride, batch_size=3)
    nats, seen = [], []
    for t in range(1, 50):
        start = next(a for a in range(0, 50, stride) if a < t < a + window)
        nats.append(long_pass(model, ids[start : t + 1])[-1])
        seen.append(t - start)
    torch.testing.assert_close(found.nats, torch.stack(nats), rtol=1e-9, atol=1e-9)
    assert found.seen.tolist() == seen
    assert min(seen[window:], default=window) >= window - stride


def test_losses_do_not_depend_on_how_many_logits_are_formed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("kda-tiny")
    ids = make_ids(model, 1, 40)[0]
    whole = evaluate.stateful(model, ids).nats
    monkeypatch.setattr(evaluate, "BLOCK", 3 * model.config.vocab_size)
    torch.testing.assert_close(evaluate.stateful(model, ids).nats, whole, rtol=1e-6, atol=1e-6)  # of logits in float32


def test_a_pair_counts_as_seen_only_inside_what_the_token_was_predicted_from() -> None:
    ids = [5, 6, 7, 5, 6, 6, 6, 7, 5]
    everything = list(range(1, 9))
    #                 6  7  5  6     6  6     7     5
    assert evaluate.completes_pair(ids, everything).tolist() == [False, False, False, True, False, True, True, True]
    assert evaluate.completes_pair(ids, [1, 2, 3, 3, 3, 3, 3, 3]).tolist() == [False] * 5 + [True, False, False]
    # The pair 5 6 at 0 and 1 is inside the four tokens before the one at 4.
    assert evaluate.completes_pair(ids, [1, 2, 3, 4, 3, 3, 3, 3])[3]


def test_pairs_are_those_of_a_search_by_hand() -> None:
    draw = torch.Generator().manual_seed(3)
    ids = torch.randint(6, (200,), generator=draw).tolist()
    seen = [int(torch.randint(1, t + 1, (), generator=draw)) for t in range(1, 200)]
    expected = []
    for t in range(1, 200):
        context = ids[t - seen[t - 1] : t]
        expected.append(any(context[i : i + 2] == [ids[t - 1], ids[t]] for i in range(len(context) - 1)))
    assert evaluate.completes_pair(ids, seen).tolist() == expected
    assert 20 < sum(expected) < 180


def test_texts_are_counted_whole_and_apart() -> None:
    model, tokenizer = make_model("kda-tiny", vocab_size=257), Tokenizer.bytes()
    words = [("a", "to be or not to be"), ("b", "Größe"), ("c", "")]
    facts = evaluate.texts(model, tokenizer, words, window=5)
    assert [row["bytes"] for row in facts["texts"]] == [18, 7, 0] and facts["total"]["tokens"] == 25
    assert facts["texts"][2]["nats_per_token"] is None
    total = 0.0
    for (_, text), row in zip(words[:2], facts["texts"], strict=False):
        nats = long_pass(model, torch.tensor([256, *text.encode()]))
        assert row["nats_per_token"] == pytest.approx(float(nats.mean()), rel=1e-5)
        assert row["bits_per_byte"] == pytest.approx(float(nats.sum()) / math.log(2) / row["bytes"], rel=1e-5)
        total += float(nats.sum())
    assert facts["total"]["nats_per_token"] == pytest.approx(total / 25, rel=1e-5)
    parts = [*facts["by_tokens_seen"]], [*facts["recall"].values()]
    for rows in parts:
        assert sum(row["tokens"] for row in rows) == 25
        assert sum(row["tokens"] * (row["nats_per_token"] or 0) for row in rows) == pytest.approx(total, rel=1e-5)
    assert [(row["start"], row["end"]) for row in facts["by_tokens_seen"]] == [(1, 4), (5, 8), (9, 16), (17, 18)]
    assert [row["tokens"] for row in facts["by_tokens_seen"]] == [8, 7, 8, 2]
    # `to be` comes again, `be or` and `ot to` do not: t o _ b e after ot.
    hits = evaluate.completes_pair([256, *b"to be or not to be"], range(1, 19))
    assert facts["recall"]["completes_a_pair"]["tokens"] == int(hits.sum()) >= 4


def test_a_tokenizer_without_a_beginning_leaves_out_the_first_token() -> None:
    tokenizer = Tokenizer({**Tokenizer.bytes().definition, "added_tokens": []})
    assert evaluate.beginning(tokenizer) is None
    model = make_model("kda-tiny", vocab_size=256)
    facts = evaluate.texts(model, tokenizer, [("a", "abcd")])
    assert facts["total"]["tokens"] == 3 and facts["total"]["bytes"] == 3
    with pytest.raises(InputError, match="no token in it to predict"):
        evaluate.texts(model, tokenizer, [("a", "b")])


def test_what_cannot_be_read_is_refused_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = make_model("gpt2-tiny", vocab_size=257), Tokenizer.bytes()
    limit = model.config.max_position_embeddings
    monkeypatch.setattr(model, "hidden", lambda *_: pytest.fail("work was begun"))
    for options, words in (
        ({"window": 1}, "window is 1; give 2 tokens or more"),
        ({"window": limit + 1}, f"window is {limit + 1}.*here up to {limit}"),
        ({"window": 8, "stride": 8}, "stride is 8; windows of 8 tokens may begin 1 to 7 apart"),
        ({"window": 8, "stride": -1}, "stride is -1"),
        ({}, f"long: {limit + 2} tokens; this model's position table ends at {limit}: give a stride"),
    ):
        with pytest.raises(InputError, match=words):
            evaluate.texts(model, tokenizer, [("long", "x" * (limit + 1))], **options)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="use|save"):
        evaluate.texts(make_model("gpt2-tiny", vocab_size=100), tokenizer, [("a", "abc")])


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, tokenizer = make_model(HYBRID, vocab_size=257), Tokenizer.bytes()
    pal.save(model, tmp_path / "model", tokenizer=tokenizer)
    (tmp_path / "a.txt").write_text("to be or not to be", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n', encoding="utf-8")
    arguments = ["evaluate", str(tmp_path / "model"), str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")]
    assert main([*arguments, "--json", str(tmp_path / "facts.json")]) == 0
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert [row["bytes"] for row in facts["texts"]] == [18, 3, 3] and facts["total"]["bytes"] == 24
    out = capsys.readouterr().out
    assert f"{facts['total']['nats_per_token']:.4f}" in out and "completes a pair seen before" in out
    assert main([*arguments, "--window", "8", "--stride", "4", "--json", str(tmp_path / "s.json")]) == 0
    sliding = json.loads((tmp_path / "s.json").read_text())
    assert sliding["stride"] == 4 and sliding["total"]["nats_per_token"] != facts["total"]["nats_per_token"]
    capsys.readouterr()
    for extra, words in (
        (["--stride", "2000"], "stride is 2000"),
        ([str(tmp_path / "absent.txt")], "no such file"),
        (["--stide", "3"], "--stide"),
    ):
        assert main([*arguments, *extra]) == 2
        assert words in capsys.readouterr().err
