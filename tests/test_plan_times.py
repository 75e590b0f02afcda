"""Times follow from work and rates by hand-checkable sums; published claims stand where the papers put them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import palimpsest as pal
from palimpsest import calibration, validation
from palimpsest.plan import devices, times
from palimpsest.plan.claims import claims, depth_traffic
from palimpsest.plan.counts import weight_bytes
from palimpsest.plan.memory import state_bytes

ROOT = Path(__file__).parents[1]
H200 = devices.TABLE["h200"]
ONE = times.Cut(1, 1)


def rates(**changes: Any) -> dict[str, Any]:
    """A calibration in which everything but what is changed takes no time."""
    fast = 1e30
    kinds = ("linear_attention", "deltanet", "gated_deltanet", "kda")
    forms = [*kinds, "attention", "attention rope", "mla", "mla low-rank", "gelu", "swiglu", "situ", "moe", "moe latent"]
    found: dict[str, Any] = {key: [[1, fast], [1000, fast]] for key in devices.CURVES}
    found |= {key: dict.fromkeys(kinds, fast) for key in ("chunks", "chunks_training", "steps")}
    found |= {"cache": {"attention": fast, "mla": fast}, "fixed_s": dict.fromkeys([*forms, "norm rms", "norm layer"], 0.0)}
    found["fixed_s"] |= {"pass": 0.0, "source": 0.0}
    found |= dict.fromkeys(("attention", "attention_training", "head_training", "bytes_per_s"), fast)
    return {**found, "calibration": 1, "backend": "chunked", "dtype": "f32", "memory_bytes": 10**9, **changes}


def test_one_sequence_reads_its_weights_and_its_cache() -> None:
    """GPT-2 on one device is bound by bytes: all weights but the position table's other rows, and the cache."""
    config = pal.ModelConfig.preset("gpt2-124m")
    found = times.pass_seconds(config, "bf16", H200, ONE, 1, 1, 511, 1)
    moved = weight_bytes(config, "bf16") + state_bytes(config, 512, 1, "bf16")["kv"]
    assert found["total"] == pytest.approx(moved / (0.8 * 4.8e12))


def test_a_long_prefill_is_bound_by_arithmetic() -> None:
    config = pal.ModelConfig.preset("smollm2-135m")
    found = times.pass_seconds(config, "bf16", H200, ONE, 8, 8192, 0, 1)
    scores = 8 * 30 * 4 * 9 * 64 * 8192 * 8193 / 2
    assert found["attention"] == pytest.approx(scores / (0.6 * 989e12))


def test_few_tokens_read_few_experts() -> None:
    config = pal.ModelConfig.preset("kimi-linear-48b")
    assert times.touched(config, 1) == pytest.approx(8 / 256)
    one, many = (times.pass_seconds(config, "bf16", H200, ONE, batch, 1, 1000, 1)["experts"] for batch in (1, 10_000))
    experts = 26 * 256 * 3 * 1024 * 2304 * 2
    assert one == pytest.approx(experts / 32 / (0.8 * 4.8e12))
    assert many >= experts / (0.8 * 4.8e12) * 0.999


def test_devices_share_work_and_pay_for_links() -> None:
    config = pal.ModelConfig.preset("kimi-k3")
    cut = times.cut_over(H200, 64)
    assert (cut.tensor, cut.groups) == (8, 8)
    here = times.held(config, "mxfp4", cut)
    trunk = 2 * (2_779_484_476_000 - 2_722_740_830_208) / 8
    assert here.trunk == pytest.approx(trunk, rel=1e-3)
    assert here.experts == 1_446_456_066_048 / 64
    # 2 all-reduces of [1, D] in each of 93 layers over 8; 16 vectors of 3584 there and back in each of 92 layers over 64.
    reduced = 93 * 2 * 2 * 7 / 8 * 2 * 7168 / 450e9
    sent = 92 * 2 * 16 * 2 * 3584 / 8 * 63 / 64 / 50e9
    messages = (2 * 93 + 2 * 92) * times.MESSAGE_S
    assert times.communication(config, H200, cut, 1) == pytest.approx(reduced + sent + messages)
    assert times.communication(config, H200, ONE, 1) == 0


def test_the_largest_batch_is_the_last_that_fits() -> None:
    plan = pal.plan("kimi-linear-48b", context="128k", device="h200")
    room = times.USABLE * H200.memory_bytes
    here = times.held(plan.config, "bf16", ONE)
    batch, context = here.largest_batch(131072, room), here.largest_context(1, room)
    assert context is not None
    assert here.total(131072, batch) <= room < here.total(131072, batch + 1)
    assert here.total(context, 1) <= room < here.total(context + 1, 1)
    assert times.held(pal.ModelConfig.preset("kda-124m"), "bf16", ONE).largest_context(1, room) is None
    assert times.held(pal.ModelConfig.preset("kimi-k3"), "mxfp4", ONE).largest_batch(1024, room) == 0


# ----------------------------------------------------------------------------------------------------------------- calibrations


def test_rates_between_measured_rows() -> None:
    points = [[1, 10.0], [4, 40.0], [16, 40.0]]
    assert [devices.rate_of(points, rows) for rows in (0.5, 1, 2, 4, 8, 99)] == pytest.approx([10, 10, 20, 40, 40, 40])


@pytest.mark.parametrize(
    ("changes", "expected_s"),
    [
        ({"linear": [[1, 1e9], [2, 1e9]]}, 2 * 12 * 12 * 768**2 / 1e9),
        ({"head": [[1, 1e9], [2, 1e9]]}, 2 * 768 * 50257 / 1e9),
        ({"cache": {"attention": 1e9, "mla": 1}}, 100 * 2 * 12 * 768 * 4 / 1e9),
    ],
)
def test_a_measured_decode_step_is_the_sum_of_its_parts(changes: dict[str, Any], expected_s: float) -> None:
    config = pal.ModelConfig.preset("gpt2-124m")
    device = devices.calibrated(rates(**changes), "here")
    assert times.pass_seconds(config, "f32", device, ONE, 1, 1, 99, 1)["total"] == pytest.approx(expected_s, rel=1e-6)


def test_calls_are_counted_by_form() -> None:
    found = times.forms(pal.ModelConfig.preset("kimi-k3-tiny"))
    layers = {"kda": 3, "mla low-rank": 2, "situ": 1, "moe latent": 4}
    # Ten sites mix: four of two sources, four of three, two of four.
    assert found == {"pass": 1, "norm rms": 11, "source": 28, **layers}
    assert times.forms(pal.ModelConfig.preset("smollm2-tiny"))["attention rope"] == 4


def test_a_state_is_moved_once_a_token_and_memory_costs_calls() -> None:
    config = pal.ModelConfig.preset("kda-124m")
    measured = rates(steps=dict.fromkeys(("linear_attention", "deltanet", "gated_deltanet", "kda"), 1e9))
    device = devices.calibrated(measured, "here")
    found = times.pass_seconds(config, "f32", device, ONE, 3, 1, 99, 1)
    assert found["total"] == pytest.approx(3 * state_bytes(config, 1, 1, "f32")["recurrent"] / 1e9, rel=1e-6)


@pytest.mark.slow
def test_this_machine_can_be_calibrated_and_planned(tmp_path: Path) -> None:
    found = calibration.calibrate(torch.device("cpu"))
    (tmp_path / "here.json").write_text(json.dumps(found), encoding="utf-8")
    for name in pal.presets():
        planned = pal.plan(name, context=256, device=str(tmp_path / "here.json"))
        assert planned.dtype == "f32" and all(value > 0 for value in planned.times().values() if isinstance(value, float))
    with pytest.raises(pal.InputError, match="num_devices is 2; a calibration is of one machine"):
        pal.plan("kda-tiny", device=str(tmp_path / "here.json"), num_devices=2)


def test_a_validation_says_what_was_predicted_and_measured() -> None:
    runs = tuple(validation.Run(work, "kda-tiny", 16, 2) for work in ("decode", "prefill", "training"))
    result = validation.validate(rates(), torch.device("cpu"), runs, repeats=1)
    for row in result["rows"]:
        assert row["measured_s"] > 0 and row["error"] == row["predicted_s"] / row["measured_s"] - 1
    assert result["median_error"] == sorted(abs(row["error"]) for row in result["rows"])[1]
    assert len(list(validation.lines(result))) == len(runs) + 2


@pytest.mark.parametrize("name", ["plan-cpu.json", "plan-h200.json"])
def test_the_recorded_validations_hold(name: str) -> None:
    """What this machine or another measured, written by `palimpsest benchmark validate`."""
    result = json.loads((ROOT / "benchmarks" / name).read_text(encoding="utf-8"))
    assert len(result["rows"]) >= 12 and result["median_error"] <= 0.15
    assert {row["work"] for row in result["rows"]} == {"decode", "prefill", "training"}
    assert result["commit"] and "benchmark validate" in result["command"]
    device = devices.calibrated(result["calibration"], "recorded")
    for row in result["rows"]:
        run = validation.Run(row["work"], row["preset"], row["context"], row["batch"])
        again = validation.predict(pal.ModelConfig.preset(run.preset), run, device, result["calibration"]["dtype"])
        assert again == pytest.approx(row["predicted_s"], rel=1e-9), "times changed: measure again"


# ----------------------------------------------------------------------------------------------------------------------- claims


def test_claims_stand_as_published() -> None:
    rows = {row["claim"]: row for row in claims()}
    assert len(rows) == len(claims()) and all(row["why"] and row["source"] for row in rows.values())

    def verdict(part: str) -> tuple[float, str]:
        (row,) = [row for claim, row in rows.items() if part in claim]
        return row["predicted"], row["verdict"]

    assert verdict("kimi-linear-48b: share of the cache saved by") == (pytest.approx(0.7407, abs=1e-4), "borne out")
    assert verdict("kimi-k3: share of the cache saved by") == (pytest.approx(0.7419, abs=1e-4), "borne out")
    assert verdict("kimi-k3: share of the cache saved, as")[1] == "not borne out"  # 75 %
    assert verdict("11.48 ms over 1.84 ms") == (pytest.approx(6.239, abs=1e-3), "not borne out")  # printed as 6.3
    assert verdict("at 1M, each at its largest batch") == (pytest.approx(3.837, abs=1e-3), "not borne out")
    assert verdict("at 1M, batch 1")[1] == "within the bound"
    assert verdict("prefill at 1M")[1] == "within the bound"
    assert verdict("Kimi K3 over GPT-2") == (pytest.approx(22_336, abs=1), "not borne out")
    assert verdict("from rounded sizes")[1] == "borne out"
    assert [verdict(f"residual traffic{part}")[1] for part in (" of a sublayer, sum", ", block", ", full")] == [
        "borne out",
        "within the bound",
        "within the bound",
    ]


def test_residual_traffic_by_listing_every_read() -> None:
    """Phase one reads each sealed source once a block; phase two writes and reads a part, and moves the running sum."""
    blocks, size = 8, 16
    block = sum(sealed + 5 * size for sealed in range(1, blocks + 1)) / (blocks * size)
    assert depth_traffic(blocks, size)["block"] == pytest.approx(block) and block < 5.5
    full = sum(done + place + 5 for done in range(blocks) for place in range(size)) / (blocks * size)
    assert depth_traffic(blocks, size)["full"] == pytest.approx(full) and full < 24
