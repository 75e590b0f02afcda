"""The command `plan` answers in a hundred columns, JSON and one HTML file, or refuses in one line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import palimpsest as pal
from palimpsest.cli import main
from palimpsest.convert import Layout
from palimpsest.convert.kimi import Kimi
from palimpsest.plan import units
from tests.conftest import TINY

K3 = ["plan", "kimi-k3", "--context", "1M", "--batch", "64", "--device", "h200", "--devices", "64"]


def answer(argv: list[str], capsys: pytest.CaptureFixture[str], folder: Path) -> tuple[str, dict[str, Any]]:
    """What a command prints and writes, both checked for their form."""
    out = folder / "numbers.json"
    assert main([*argv, "--json", str(out)]) == 0
    shown, err = capsys.readouterr()
    assert err == "" and max(map(len, shown.splitlines())) <= 100
    return shown, json.loads(out.read_text(encoding="utf-8"))


def test_the_question_of_the_guide(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown, found = answer(K3, capsys, tmp_path)
    for part in (
        "2,779,484,476,000",
        "104,189,612,640",
        "27,648 B a token",
        "1,560,860,324,864",
        "434,110,464 B",
        "5,461",
        "5,653",
    ):
        assert part in shown
    (plan,) = found["plans"]
    assert plan == pal.plan("kimi-k3", context=1_048_576, batch=64, device="h200", num_devices=64).as_dict()
    assert plan["checkpoint_bytes"]["mxfp4"] == 1_560_860_324_864 and plan["dtype"] == "mxfp4"
    assert plan["device"]["source"] and plan["device"]["efficiency"] == 0.6
    assert plan["crossover_tokens"]["recurrent"] == pytest.approx(5461.33, abs=0.01)


def test_models_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", "kimi-linear-48b", "--compare", "smollm2-135m,kda-340m", "--context", "32k"]
    shown, found = answer(argv, capsys, tmp_path)
    assert [row.split()[0] for row in shown.splitlines()[1:]] == ["kimi-linear-48b", "smollm2-135m", "kda-340m"]
    assert [plan["context"] for plan in found["plans"]] == [32768] * 3


def test_a_sweep_shows_where_the_hybrid_holds_less(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = pal.ModelConfig.preset("kimi-linear-48b")
    other = config.replace(mixers=("mla",) * 27, linear_output_gate="none").to_dict()
    (tmp_path / "all-mla.json").write_text(json.dumps(other), encoding="utf-8")
    argv = ["plan", "kimi-linear-48b", "--compare", str(tmp_path / "all-mla.json"), "--sweep", "context=1k..4k"]
    _, found = answer(argv, capsys, tmp_path)
    held = {(row["model"], row["context"]): row["state_bytes"] for row in found["sweep"]}
    less = [held["kimi-linear-48b", context] < held["all-mla", context] for context in (1024, 2048, 4096)]
    assert less == [False, True, True]


def test_what_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", "smollm2-135m", "--context", "32k", "--fit", "24GiB"]
    _, found = answer(argv, capsys, tmp_path)
    (fit,) = found["fit"]
    room = 24 * 1024**3
    assert fit["bytes"] == room and fit["largest_preset"] == "kda-340m"

    def total(**how: Any) -> float:
        return pal.plan("smollm2-135m", **how).memory()["device_bytes"]

    assert total(context="32k", batch=fit["largest_batch"]) <= room < total(context="32k", batch=fit["largest_batch"] + 1)
    assert total(context=fit["largest_context"]) <= room < total(context=fit["largest_context"] + 1)


def test_a_page_that_needs_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "plan.html"
    answer(["plan", "kimi-linear-48b", "--compare", "smollm2-135m", "--claims", "--html", str(page)], capsys, tmp_path)
    text = page.read_text(encoding="utf-8")
    assert text.count('<svg class="plot"') == 3 and "prefers-color-scheme: dark" in text
    assert not re.search(r"""(src|href)=["'](?!#)|<script|@import|url\((?!#)""", text)
    idents = re.findall(r'id="([^"]+)"', text)
    assert len(idents) == len(set(idents))
    for part in ("49,122,681,728", "from 1,884 tokens on", "not borne out", "within the bound", "NVIDIA H200 data sheet"):
        assert part in text


def test_settings_of_training_reach_the_answer() -> None:
    plain, again, cut = (
        pal.plan("kda-124m", context="2k", batch=8, num_devices=8, recompute=recompute, sharding=sharding).training()
        for recompute, sharding in ((False, "none"), (True, "none"), (True, "weights"))
    )
    assert again["activations"] < plain["activations"] / 5 and cut["weights"] < again["weights"] / 4


def test_larger_chunks_cost_more_operations() -> None:
    work = [pal.plan("kda-124m", context="4k", chunk=chunk).flops()["prefill"]["recurrence"] for chunk in (16, 64, 256)]
    # lineage specification 7 at d = 64, without the solve: 6 d^2 + 10 C d a token and head.
    assert work == [12 * 12 * 4096 * (6 * 64 * 64 + 10 * chunk * 64) for chunk in (16, 64, 256)]


# ------------------------------------------------------------------------------------------------------ models from their files


@pytest.mark.parametrize("name", ["gpt2-124m", "smollm2-135m", "qwen3-next-tiny", "kimi-linear-48b", "kimi-k3"])
def test_a_published_config_is_planned_as_its_preset(name: str, tmp_path: Path) -> None:
    config = pal.ModelConfig.preset(name)
    document = Layout.of(config).document("torch.bfloat16")
    if name == "kimi-k3":
        document["text_config"] |= Kimi.quantization
    (tmp_path / "config.json").write_text(json.dumps(document), encoding="utf-8")
    for source in (tmp_path, tmp_path / "config.json"):
        from_file, from_name = (pal.plan(str(model), context=512).as_dict() for model in (source, name))
        assert from_file.pop("model") == tmp_path.name and from_name.pop("model") == name
        assert from_file == from_name


@pytest.mark.parametrize("name", TINY)
def test_our_own_folders(name: str, tmp_path: Path) -> None:
    from palimpsest import checkpoint

    checkpoint.save(pal.Model(pal.ModelConfig.preset(name)), tmp_path / "saved")
    planned = pal.plan(str(tmp_path / "saved"), context=64, dtype="f32")
    assert planned.name == "saved" and planned.config == pal.ModelConfig.preset(name)


def test_deepseek(tmp_path: Path) -> None:
    """The published sizes: 671,026,419,200 values with the routers' biases; a small one as transformers builds it."""
    import torch
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    published: dict[str, Any] = {
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
    }
    published |= {"num_hidden_layers": 61, "num_attention_heads": 128, "n_routed_experts": 256, "q_lora_rank": 1536}
    small: dict[str, Any] = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 80, "moe_intermediate_size": 24}
    small |= {"num_hidden_layers": 5, "num_attention_heads": 4, "n_routed_experts": 16, "q_lora_rank": None}
    for sizes in (published, small):
        config = DeepseekV3Config(**sizes, num_key_value_heads=sizes["num_attention_heads"])
        config.save_pretrained(tmp_path)
        with torch.device("meta"):
            theirs = DeepseekV3ForCausalLM(config)
        biases = sum(x.numel() for name, x in theirs.named_buffers() if name.endswith("e_score_correction_bias"))
        planned = pal.plan(str(tmp_path), context=64)
        assert planned.as_dict()["parameters"]["total"] == theirs.num_parameters() + biases
        assert planned.as_dict()["memory"]["kv_bytes_per_token"] == 2 * sizes["num_hidden_layers"] * (512 + 64)
        if sizes is published:
            assert planned.as_dict()["parameters"]["total"] == 671_026_419_200


DEEPSEEK = {"model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "n_group": 8, "topk_group": 4}
FILES = {
    "deepseek.json": json.dumps(DEEPSEEK),
    "broken.json": "{",
    "list.json": "[]",
    "deep.json": 9999 * "[",
    "unlike.json": json.dumps({"model_type": "kimi_linear", "hidden_size": 8}),
    "other.json": json.dumps({"model_type": "mamba", "hidden_size": 8}),
    "old.json": json.dumps({"calibration": 2, "linear": []}),
    "older.json": json.dumps({"calibration": 1, "linear": []}),
}
NONSENSE: list[tuple[list[str], str]] = [
    ([], "no model was given"),
    (["kimi-k4"], "model is 'kimi-k4'.*kimi-k3"),
    (["no.json"], "model is 'no.json'; give a preset"),
    (["broken.json"], "broken.json: not valid JSON"),
    (["list.json"], "list.json: it holds no table"),
    (["deep.json"], "deep.json: not valid JSON"),
    (["unlike.json"], "unlike.json: model_type is 'kimi_linear', but 'linear_attn_config' is missing"),
    (["other.json"], "model_type is 'mamba'"),
    (["deepseek.json"], "deepseek.json: field 'vocab_size' is missing"),
    (["kimi-k3", "--context", "many"], "context is 'many'; it must be a number of tokens such as"),
    (["kimi-k3", "--context", "0"], "context is '0'"),
    (["kimi-k3", "--context", "1.0001k"], "context is '1.0001k'.*whole"),
    (["kimi-k3", "--context", "1GiB"], "context is '1GiB'"),
    (["gpt2-124m", "--context", "2k"], "context is 2048; gpt2-124m's position table ends at 1024"),
    (["gpt2-124m", "--sweep", "context=512..2k"], "2048"),
    (["kimi-k3", "--batch", "0"], "batch is 0"),
    (["kimi-k3", "--devices", "-1"], "num_devices is -1"),
    (["kimi-k3", "--device", "h2000"], "device is 'h2000'.*did you mean 'h200'"),
    (["kimi-k3", "--device", "list.json"], "list.json: not a calibration"),
    (["kimi-k3", "--device", "broken.json"], "broken.json: not a calibration"),
    (["kimi-k3", "--device", "older.json"], "older.json: not a calibration of format 2; write one with"),
    (["kimi-k3", "--device", "old.json"], "old.json: field 'linear_training' is missing"),
    (["kimi-k3", "--dtype", "fp8"], "dtype is 'fp8'; it must be one of f32"),
    (["gpt2-124m", "--dtype", "mxfp4"], "dtype is 'mxfp4'.*choose bf16"),
    (["kimi-k3", "--optimizer", "adam"], "optimizer is 'adam'.*did you mean 'adamw'"),
    (["kimi-k3", "--sharding", "all"], "sharding is 'all'; it must be one of none, optimizer"),
    (["kimi-k3", "--accumulation", "0"], "accumulation is 0"),
    (["kimi-k3", "--chunk", "300"], "chunk is 300; it must be a whole number in 1..256"),
    (["kimi-k3", "--fit", "24"], "fit is '24'.*24GiB"),
    (["kimi-k3", "--fit", "24 parsecs"], "fit is '24 parsecs'"),
    (["kimi-k3", "--sweep", "1k..1M"], "sweep is '1k..1M'; write context=1k..1M"),
    (["kimi-k3", "--sweep", "context=1M..1k"], "first must be smaller"),
    (["kimi-k3", "--sweep", "context=1k"], "write a range"),
    (["kimi-k3", "--compare", "gpt2-124m,"], "compare is 'gpt2-124m,'"),
    (["kimi-k3", "--html", "no/where.html"], "--html no/where.html"),
    (["kimi-k3", "--json", "no/where.json"], "--json no/where.json"),
    (["kimi-k3", "--contxt", "1k"], "--contxt"),
]


@pytest.mark.parametrize(("argv", "line"), NONSENSE, ids=[" ".join(case[0]) or "nothing" for case in NONSENSE])
def test_nonsense(
    argv: list[str], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert main(["plan", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.strip().splitlines()) == 1 and re.search(line, err), err
    assert {path.name for path in tmp_path.iterdir()} == FILES.keys(), "something was left behind"


# ------------------------------------------------------------------------------------------------------------------------ units


@pytest.mark.parametrize(
    ("text", "amount"),
    [("8192", 8192), ("8k", 8192), ("128K", 131072), ("1M", 1_048_576), ("1_000", 1000), ("1.5k", 1536), ("10,000", 10_000)],
)
def test_tokens_as_people_write_them(text: str, amount: int) -> None:
    assert units.tokens("context", text) == amount


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("24GiB", 24 << 30),
        ("80GB", 80 * 10**9),
        ("1.5 TiB", 3 << 39),
        ("512mib", 512 << 20),
        ("2TB", 2 * 10**12),
        ("4096B", 4096),
    ],
)
def test_sizes_as_people_write_them(text: str, amount: int) -> None:
    assert units.num_bytes("fit", text) == amount


def test_numbers_for_people() -> None:
    assert [units.tokens_text(n) for n in (1_048_576, 131_072, 1000, 1536)] == ["1M", "128k", "1,000", "1,536"]
    assert [units.bytes_text(n) for n in (12, 434_110_464, 24 << 30)] == ["12 B", "414 MiB", "24 GiB"]
    assert [units.seconds_text(s) for s in (2.5, 0.00184, 3e-6)] == ["2.5 s", "1.84 ms", "3 us"]
    assert units.count_text(2_779_484_476_000) == "2.779 T"
    assert units.span("sweep", "1k..6k") == [1024, 2048, 4096, 6144]
