"""Untrained memories behave as their equations say, and losses by position are those of the model."""

import math

import pytest
import torch
from torch.nn import functional as F

import palimpsest as pal
from palimpsest import evaluate


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
