"""Published folders on disk: bit for bit there and back, and every fault is one line before a tensor is read."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import palimpsest as pal
from palimpsest import checkpoint, ops, shards
from palimpsest.cli import main
from palimpsest.convert import folder as folders
from palimpsest.tokenizer import Tokenizer
from tests.conftest import make_ids, make_model
from tests.test_convert import PRESETS, random_model


def write(folder: Path, preset: str = "smollm2-tiny", shards_of: int = 0, **fields: Any) -> pal.Model:
    """A published folder of a model with two layers; in several files when `shards_of` bytes are given."""
    whole = folders.FILE_BYTES
    try:
        folders.FILE_BYTES = shards_of or whole
        model = make_model(preset, num_hidden_layers=2, **fields)
        pal.save(model, folder, tokenizer=Tokenizer.bytes())
    finally:
        folders.FILE_BYTES = whole
    return model


def assert_same(model: pal.Model, other: pal.Model) -> None:
    assert other.config == model.config
    for (name, ours), (again, theirs) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert name == again and theirs.requires_grad == ours.requires_grad
        assert torch.equal(theirs.double(), ours.double()), name
    assert (other.lm_head.weight is other.embed_tokens.weight) == model.config.tie_word_embeddings


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("preset", PRESETS)
def test_there_and_back(tmp_path: Path, preset: str, dtype: torch.dtype) -> None:
    model = random_model(pal.ModelConfig.preset(preset)).to(dtype)
    pal.save(model, tmp_path / "model", tokenizer=Tokenizer.bytes())
    loaded, tokenizer = pal.load(str(tmp_path / "model"))
    assert tokenizer == Tokenizer.bytes()
    assert_same(model, loaded)
    ids = make_ids(model, 2, 9)
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    pal.save(loaded, tmp_path / "again")
    assert [path.name for path in (tmp_path / "again").iterdir() if "token" in path.name] == []
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "model" / name).read_bytes()


def test_several_files_with_an_index(tmp_path: Path) -> None:
    model = write(tmp_path / "model", shards_of=100_000)
    files = sorted(path.name for path in (tmp_path / "model").glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    index = json.loads((tmp_path / "model" / shards.INDEX).read_text())
    names = {name: file for file in files for name in load_file(tmp_path / "model" / file)}
    assert index["weight_map"] == names
    assert index["metadata"]["total_size"] == 4 * model.num_parameters()
    assert_same(model, pal.load(tmp_path / "model")[0])


def test_a_model_without_a_published_layout_goes_out_as_ours(tmp_path: Path) -> None:
    model = make_model("kimi-k3-tiny", residual="full_attention")
    pal.save(model, tmp_path / "model")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["format"] == "palimpsest"
    assert_same(model, pal.load(tmp_path / "model")[0])
    with pytest.raises(pal.InputError, match="residual is 'full_attention'"):
        pal.save(model, tmp_path / "other", dtype="bf16")


def test_dtypes_on_the_way_out(tmp_path: Path) -> None:
    model = make_model("kimi-linear-tiny")
    for dtype, expected in (("bf16", torch.bfloat16), ("f16", torch.float16)):
        pal.save(model, tmp_path / dtype, dtype=dtype)
        loaded, _ = pal.load(tmp_path / dtype)
        assert loaded.embed_tokens.weight.dtype == expected
        assert_same(make_model("kimi-linear-tiny").to(expected), loaded)
    with pytest.raises(pal.InputError, match="dtype is 'q4'"):
        pal.save(model, tmp_path / "other", dtype="q4")
    with pytest.raises(pal.InputError, match="'mxfp4', which is for experts"):
        pal.save(make_model("gpt2-tiny"), tmp_path / "other", dtype="mxfp4")
    with pytest.raises(pal.InputError, match="Qwen3-Next model has no packed"):
        pal.save(make_model("qwen3-next-tiny"), tmp_path / "other", dtype="mxfp4")
    assert not (tmp_path / "other").exists()


def test_packed_experts_go_out_and_come_back(tmp_path: Path) -> None:
    model = make_model("kimi-k3-tiny")
    pal.save(model, tmp_path / "packed", dtype="mxfp4")
    tensors = load_file(tmp_path / "packed" / "model.safetensors")
    expert = "language_model.model.layers.1.block_sparse_moe.experts.7.w1.weight"
    assert tensors[f"{expert}_packed"].shape == (32, 16) and tensors[f"{expert}_scale"].shape == (32, 1)
    assert f"{expert}" not in tensors
    text = json.loads((tmp_path / "packed" / "config.json").read_text())["text_config"]
    assert text["quantization_config"]["format"] == "mxfp4-pack-quantized"
    loaded, _ = pal.load(tmp_path / "packed")
    twin = make_model("kimi-k3-tiny").to(torch.bfloat16)
    twin.pack_experts()
    for name, weight in make_model("kimi-k3-tiny").named_parameters():  # packed from all digits, not from bfloat16
        if ".experts." in name:
            packed, scale = ops.mxfp4_encode(weight)
            assert torch.equal(loaded.get_parameter(f"{name}_packed"), packed)
            assert torch.equal(loaded.get_parameter(f"{name}_scale"), scale)
        else:
            assert torch.equal(loaded.get_parameter(name), twin.get_parameter(name)), name
    pal.save(loaded, tmp_path / "again")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "packed" / name).read_bytes()
    with pytest.raises(pal.InputError, match="packed in four bits"):
        pal.save(loaded, tmp_path / "other", dtype="bf16")


# ------------------------------------------------------------------------------------------------------------------ refusals


def edit_tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return edit


def edit_config(**fields: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        values = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**values, **fields}))

    return edit


def edit_header(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Changes the header's table and leaves the data where it is."""

    def edit(folder: Path) -> None:
        data = (folder / "model.safetensors").read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        text = change(header) or json.dumps(header)
        raw = text.encode()
        (folder / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + data[8 + size :])

    return edit


def cut(share: float) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        data = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(data[: int(len(data) * share)])

    return edit


def twice(header: dict[str, Any]) -> str:
    text = json.dumps(header)
    return f'{{"{NORM}": {json.dumps(header[NORM])}, {text[1:]}'


def long_header(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes((1 << 40).to_bytes(8, "little") + data[8:])


NORM = "model.norm.weight"
GATE = "model.layers.1.mlp.gate_proj.weight"
FILE = "model.safetensors"
DAMAGES: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "config not json": (lambda f: (f / "config.json").write_text("{"), ["config.json", "not valid JSON"]),
    "unknown key": (edit_config(hiden_act="silu"), ["config.json: unknown key 'hiden_act' = 'silu'", "mean 'hidden_act'"]),
    "key that changes the model": (edit_config(sliding_window=64), ["config.json: unknown key 'sliding_window' = 64"]),
    "wrong value": (edit_config(num_hidden_layers="two"), ["config.json", "num_hidden_layers is 'two'"]),
    "other type": (edit_config(model_type="bert"), ["config.json", "'bert'"]),
    "no weights": (lambda f: (f / FILE).unlink(), [FILE, "no such file", "the folder is incomplete"]),
    "pickle": (lambda f: (f / FILE).rename(f / "pytorch_model.bin"), ["pytorch_model.bin is a pickle", "not read"]),
    "empty": (cut(0), [FILE, "cut short"]),
    "cut": (cut(0.99), [FILE, "cut short", "the file at"]),
    "cut header": (cut(0.003), [FILE, "its header ends at byte"]),
    "long header": (long_header, [FILE, "its header ends at byte 1099511627784"]),
    "header no json": (edit_header(lambda h: "{" * 9), [FILE, "its header is not valid JSON"]),
    "header a list": (edit_header(lambda h: "[1]"), [FILE, "its header is a list"]),
    "duplicate": (edit_header(twice), [FILE, f"'{NORM}' occurs twice"]),
    "dtype unknown": (edit_header(lambda h: h[NORM].update(dtype="F12")), [FILE, f"'{NORM}'", "'F12'", "known dtype"]),
    "shape against bytes": (edit_header(lambda h: h[NORM].update(shape=[63])), [FILE, f"'{NORM}' is F32 [63] at bytes"]),
    "overlap": (edit_header(lambda h: h[NORM].update(data_offsets=[0, 256])), [FILE, "at bytes", "expected 256 to"]),
    "negative": (edit_header(lambda h: h[NORM].update(shape=[-64])), [FILE, f"'{NORM}' is described as"]),
    "missing": (
        edit_tensors(lambda t: t.pop(NORM)),
        [f"'{NORM}' is missing (1 in all); expected shape [64], found none"],
    ),
    "surplus": (edit_tensors(lambda t: t.update(extra=torch.ones(1))), [FILE, "'extra' has no place"]),
    "prefix twice": (edit_tensors(lambda t: t.update({f"model.{NORM}": t.pop(NORM)})), [f"'{NORM}' is missing"]),
    "shape": (edit_tensors(lambda t: t.update({NORM: torch.ones(3)})), [FILE, f"'{NORM}' has shape [3]; expected [64]"]),
    "config shape": (edit_config(vocab_size=300), [FILE, "embed_tokens.weight' has shape [257, 64]; expected [300, 64]"]),
    "integer": (edit_tensors(lambda t: t.update({GATE: t[GATE].int()})), [FILE, f"'{GATE}' is I32", "expected F32"]),
    "mixed": (edit_tensors(lambda t: t.update({GATE: t[GATE].half()})), [FILE, f"'{GATE}' is F16", "expected F32"]),
    "packed": (
        edit_tensors(lambda t: t.update({f"{GATE}_packed": t.pop(GATE).byte()})),
        ["config.json: tensors are packed; a published Llama model has none"],
    ),
    "nan": (edit_tensors(lambda t: t[GATE][1, 2].fill_(float("nan"))), [FILE, f"'{GATE}' holds NaN", "1 of 8192 values"]),
    "tied apart": (
        edit_tensors(lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1})),
        ["'lm_head.weight' differs from the embedding"],
    ),
    "tokenizer": (lambda f: (f / "tokenizer.json").write_text("[]"), ["tokenizer.json", "expected a JSON object"]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_refused_in_one_line(tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"
    write(folder)
    edit, parts = DAMAGES[damage]
    edit(folder)
    if damage not in ("nan", "tied apart"):  # the others are found before any tensor is read
        monkeypatch.delattr(shards, "read")
    with pytest.raises(pal.InputError) as error:
        pal.load(folder)
    text = str(error.value)
    assert "\n" not in text and str(folder) in text
    assert [part for part in parts if part not in text] == [], text


def edit_index(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        values = json.loads((folder / shards.INDEX).read_text())
        change(values["weight_map"])
        (folder / shards.INDEX).write_text(json.dumps(values))

    return edit


def copy_into_another(folder: Path) -> None:
    """The first tensor of the first file is also in a new last file."""
    first = sorted(folder.glob("*.safetensors"))[0]
    name, tensor = next(iter(load_file(first).items()))
    save_file({name: tensor, "new": tensor.clone()}, folder / "z.safetensors")
    edit_index(lambda m: m.update(new="z.safetensors"))(folder)


def delete_two(folder: Path) -> None:
    for path in sorted(folder.glob("*.safetensors"))[1:3]:
        path.unlink()


INDEX_DAMAGES: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "shards absent": (delete_two, [shards.INDEX, "model-00002-of-", "model-00003-of-", "files are here", "incomplete"]),
    "path escapes": (
        edit_index(lambda m: m.update({NORM: "../m.safetensors"})),
        [f"'{NORM}'", "'../m.safetensors'", "beside"],
    ),
    "absolute": (edit_index(lambda m: m.update({NORM: "/m.safetensors"})), [f"'{NORM}'", "'/m.safetensors'", "beside it"]),
    "not a name": (edit_index(lambda m: m.update({NORM: 7})), [f"'{NORM}'", "to be in 7"]),
    "other kind": (edit_index(lambda m: m.update({NORM: "model.bin"})), [f"'{NORM}'", "'model.bin'", ".safetensors file"]),
    "not listed": (edit_index(lambda m: m.pop(NORM)), [f"tensor '{NORM}' is here", "says nowhere"]),
    "not there": (edit_index(lambda m: m.update(ghost=m[NORM])), ["tensor 'ghost' is missing (1 in all)", shards.INDEX]),
    "elsewhere": (
        edit_index(lambda m: m.update({NORM: next(v for v in m.values() if v != m[NORM])})),
        [f"tensor '{NORM}' is here", "says in model-0"],
    ),
    "twice": (copy_into_another, ["is also in model-00001-of-", "expected it once"]),
    "no index": (lambda f: (f / shards.INDEX).unlink(), [f"need {shards.INDEX}"]),
    "index not json": (lambda f: (f / shards.INDEX).write_text("{"), [shards.INDEX, "not an index"]),
}


@pytest.mark.parametrize("damage", INDEX_DAMAGES)
def test_a_damaged_set_of_files_is_refused_in_one_line(tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """R061, and paths that lead out of the folder."""
    folder = tmp_path / "model"
    write(folder, shards_of=100_000)
    edit, parts = INDEX_DAMAGES[damage]
    edit(folder)
    monkeypatch.delattr(shards, "read")
    with pytest.raises(pal.InputError) as error:
        pal.load(folder)
    text = str(error.value)
    assert "\n" not in text and str(folder) in text
    assert [part for part in parts if part not in text] == [], text


def test_missing_files_are_counted(tmp_path: Path) -> None:
    write(tmp_path / "model", shards_of=100_000)
    paths = sorted((tmp_path / "model").glob("*.safetensors"))
    paths[1].unlink()
    with pytest.raises(pal.InputError, match=rf"{paths[1].name} not found; {len(paths) - 1} of {len(paths)} files are here"):
        pal.load(tmp_path / "model")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "nvfp4-pack-quantized"}, "quantization format is 'nvfp4-pack-quantized'; only 'mxfp4-pack-quantized'"),
        ({"quant_method": "gptq"}, "quantization quant_method is 'gptq'"),
        (None, "there is no quantization_config"),
    ],
)
def test_another_four_bit_format_is_refused(tmp_path: Path, change: dict[str, Any] | None, message: str) -> None:
    pal.save(make_model("kimi-k3-tiny"), tmp_path / "model", dtype="mxfp4")
    document = json.loads((tmp_path / "model" / "config.json").read_text())
    if change is None:
        del document["text_config"]["quantization_config"]
    else:
        document["text_config"]["quantization_config"] |= change
    (tmp_path / "model" / "config.json").write_text(json.dumps(document))
    with pytest.raises(pal.InputError, match=message):
        pal.load(tmp_path / "model")


def test_norms_with_more_digits_are_read_and_work(tmp_path: Path) -> None:
    write(tmp_path / "model")
    edit_tensors(lambda t: t.update({n: x.bfloat16() for n, x in t.items() if "norm" not in n}))(tmp_path / "model")
    model, _ = pal.load(tmp_path / "model")
    assert model.embed_tokens.weight.dtype == torch.bfloat16 and model.norm.weight.dtype == torch.float32
    assert model(make_ids(model, 1, 5)).logits.isfinite().all()


def test_nothing_in_the_folder_is_run_and_training_starts(tmp_path: Path) -> None:
    """R067: a config that points to code, code that fails when it is imported, and a step of training."""
    folder = tmp_path / "model"
    write(folder, "kimi-k3-tiny")
    edit_config(auto_map={"AutoModelForCausalLM": "modeling_kimi_k3.KimiK3ForConditionalGeneration"})(folder)
    (folder / "modeling_kimi_k3.py").write_text("raise SystemExit('this ran')\n")
    model, _ = pal.load(folder)
    ids = make_ids(model, 1, 9)
    loss = model.train()(ids, labels=ids).loss
    assert loss is not None
    loss.backward()
    assert model.embed_tokens.weight.grad is not None and "modeling_kimi_k3" not in sys.modules


# ------------------------------------------------------------------------------------------------------------------ writing


def test_a_refused_or_failed_save_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("smollm2-tiny", num_hidden_layers=1)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note").write_text("mine")
    for name in ("full", "full/note"):
        with pytest.raises(pal.InputError, match="there already"):
            pal.save(model, tmp_path / name)
    with pytest.raises(pal.InputError, match="ids reach 256"):
        pal.save(make_model("smollm2-tiny", vocab_size=99), tmp_path / "out", tokenizer=Tokenizer.bytes())
    raw = shards.raw
    with monkeypatch.context() as patch, pytest.raises(pal.InputError, match="reads back otherwise"):
        patch.setattr(shards, "raw", lambda *where: raw(*where) ^ 1)
        pal.save(model, tmp_path / "out")
    with torch.no_grad():
        model.norm.weight[0] = float("inf")  # type: ignore[index]
    with pytest.raises(pal.InputError, match=r"'model\.norm\.weight' holds NaN or infinity"):
        pal.save(model, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full"]
    (tmp_path / "empty").mkdir()
    pal.save(make_model("smollm2-tiny", num_hidden_layers=1), tmp_path / "empty")
    assert (tmp_path / "empty" / "config.json").exists()


def test_an_interrupted_conversion_leaves_nothing(tmp_path: Path) -> None:
    """Ctrl-C in the middle of writing: status 130, no target and no remains of it."""
    write(tmp_path / "model")
    code = """
import sys, time
from palimpsest import checkpoint, ops, shards
from palimpsest.cli import main
whole = shards.batches
class Slow:
    def add(self, num_bytes): print("writing", flush=True); time.sleep(0.2)
from palimpsest.convert import folder
folder.Transfer = lambda *_: Slow() if _[0] == "writing" else type("Quiet", (), {"add": lambda *_: None})()
sys.exit(main(["convert", *sys.argv[1:]]))
"""
    command = [sys.executable, "-c", code, str(tmp_path / "model"), str(tmp_path / "out")]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ})
    assert running.stdout is not None and running.stdout.readline() == "writing\n"
    time.sleep(0.1)
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate()
    assert running.returncode == 130, errors
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_the_command_converts_checks_and_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_model("kimi-linear-tiny")
    checkpoint.save(model, tmp_path / "run", tokenizer=Tokenizer.bytes())
    assert (
        main(["convert", str(tmp_path / "run"), str(tmp_path / "out"), "--dtype", "bf16", "--json", str(tmp_path / "n")]) == 0
    )
    assert "tensors" in capsys.readouterr().out
    numbers = json.loads((tmp_path / "n").read_text())
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert numbers["tensors"] == len(tensors) and numbers["files"] == 1 and numbers["family"] == "Kimi"
    assert numbers["bytes"] == sum(x.numel() * x.element_size() for x in tensors.values())
    assert sum(row["tensors"] for row in numbers["dtypes"].values()) == len(tensors)
    assert main(["convert", str(tmp_path / "out")]) == 0
    assert f"total {len(tensors):>9,} tensors" in capsys.readouterr().out
    assert main(["generate", str(tmp_path / "out"), "a", "--max-new-tokens", "2"]) == 0
    capsys.readouterr()
    for arguments in (
        ["run"],
        ["out", "out"],
        ["nowhere", "other"],
        ["out", "other", "--dtype", "f33"],
        ["out", "--dtype", "f32"],
    ):
        given = [str(tmp_path / x) if not x.startswith(("-", "f3")) else x for x in arguments]
        assert main(["convert", *given]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
    assert not (tmp_path / "other").exists()
