"""Models on disk: every tensor comes back bit for bit, and whatever is wrong with a folder is said in one line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import palimpsest as pal
from palimpsest import checkpoint
from palimpsest.tokenizer import Tokenizer
from tests.conftest import TINY, make_ids, make_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def small(preset: str = "kda-tiny", **fields: Any) -> pal.Model:
    return make_model(preset, num_hidden_layers=1, **fields)


@pytest.mark.parametrize(
    ("preset", "dtype"), [*((name, "float32") for name in TINY), ("kimi-k3-tiny", "bfloat16"), ("kda-tiny", "float64")]
)
def test_every_tensor_comes_back(tmp_path: Path, preset: str, dtype: str) -> None:
    model = make_model(preset, dtype=DTYPES[dtype])
    checkpoint.save(model, tmp_path / "model")
    torch.manual_seed(5)
    drawn = torch.rand(1)
    torch.manual_seed(5)
    loaded, tokenizer = checkpoint.load(tmp_path / "model")
    assert torch.equal(torch.rand(1), drawn), "loading draws from the global generator"
    assert tokenizer is None
    assert loaded.config == model.config
    ours, theirs = dict(model.named_parameters()), dict(loaded.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, parameter in ours.items():
        other = theirs[name]
        assert (other.dtype, other.requires_grad) == (parameter.dtype, parameter.requires_grad), name
        assert torch.equal(other, parameter), name
    ids = make_ids(model, 2, 9)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["config.json", "model", "model.safetensors"]


def test_decay_rates_are_float32_and_taken_as_they_are(tmp_path: Path) -> None:
    model = small(dtype=torch.bfloat16)
    with torch.no_grad():
        model.get_parameter("layers.0.mixer.A_log").fill_(-1.0)
    checkpoint.save(model, tmp_path / "model")
    loaded, _ = checkpoint.load(tmp_path / "model")
    rate = loaded.get_parameter("layers.0.mixer.A_log")
    assert rate.dtype == torch.float32 and rate.unique().tolist() == [-1.0]
    assert loaded.embed_tokens.weight.dtype == torch.bfloat16


def test_a_tied_head_is_saved_once_and_stays_tied(tmp_path: Path) -> None:
    checkpoint.save(small(tie_word_embeddings=True), tmp_path / "tied")
    assert "lm_head.weight" not in load_file(tmp_path / "tied" / "model.safetensors")
    loaded, _ = checkpoint.load(tmp_path / "tied")
    assert loaded.lm_head.weight is loaded.embed_tokens.weight
    checkpoint.save(small(tie_word_embeddings=False), tmp_path / "apart")
    loaded, _ = checkpoint.load(tmp_path / "apart")
    assert not torch.equal(loaded.lm_head.weight, loaded.embed_tokens.weight)


def test_the_tokenizer_comes_back_and_does_not_outlive_its_model(tmp_path: Path) -> None:
    model, tokenizer = small(), Tokenizer.bytes()
    checkpoint.save(model, tmp_path / "model", tokenizer=tokenizer)
    assert checkpoint.load(tmp_path / "model")[1] == tokenizer
    checkpoint.save(model, str(tmp_path / "model"))
    assert checkpoint.load(str(tmp_path / "model"))[1] is None


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


def cut_weights(share: float) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        data = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(data[: int(len(data) * share)])

    return edit


def put_nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors["layers.0.mixer.q_proj.weight"][1, 2] = float("nan")


NORM = "norm.weight"
DAMAGES: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "no config": (lambda f: (f / "config.json").unlink(), ["no config.json"]),
    "config not json": (lambda f: (f / "config.json").write_text("{"), ["config.json", "not valid JSON"]),
    "config a list": (lambda f: (f / "config.json").write_text("[]"), ["config.json", "expected a JSON object, found list"]),
    "other format": (edit_config(format="gguf"), ["config.json", "'gguf'", "'palimpsest'"]),
    "unknown key": (edit_config(hiden_size=3), ["config.json", "'hiden_size'", "did you mean 'hidden_size'"]),
    "wrong value": (edit_config(hidden_size="wide"), ["config.json", "hidden_size is 'wide'"]),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), ["model.safetensors", "cannot be read"]),
    "empty weights": (cut_weights(0), ["model.safetensors", "cut short"]),
    "cut weights": (cut_weights(0.99), ["model.safetensors", "cut short"]),
    "missing": (edit_tensors(lambda t: t.pop(NORM)), [f"'{NORM}' is missing", "expected 22 tensors, found 21"]),
    "surplus": (edit_tensors(lambda t: t.update(extra=torch.ones(1))), ["'extra' is unknown", "expected 22 tensors, found 23"]),
    "shape": (edit_tensors(lambda t: t.update({NORM: torch.ones(3)})), [f"'{NORM}' is F32 [3]", "expected F32 [64]"]),
    "config shape": (edit_config(vocab_size=300), ["'embed_tokens.weight' is F32 [257, 64]", "expected F32 [300, 64]"]),
    "integer": (edit_tensors(lambda t: t.update({NORM: t[NORM].int()})), [f"'{NORM}' is I32 [64]", "expected F32 [64]"]),
    "mixed": (edit_tensors(lambda t: t.update({NORM: t[NORM].half()})), [f"'{NORM}' is F16 [64]", "expected F32 [64]"]),
    "nan": (edit_tensors(put_nan), ["'layers.0.mixer.q_proj.weight' holds NaN", "1 of 2048 values", "expected finite"]),
    "tokenizer": (edit_config(vocab_size=256), ["'embed_tokens.weight'", "expected F32 [256, 64]"]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_refused_in_one_line(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "model"
    checkpoint.save(small(), folder, tokenizer=Tokenizer.bytes())
    edit, parts = DAMAGES[damage]
    edit(folder)
    before = contents(tmp_path)
    with pytest.raises(pal.InputError) as error:
        checkpoint.load(folder)
    text = str(error.value)
    assert "\n" not in text and str(folder) in text
    assert [part for part in parts if part not in text] == [], text
    assert contents(tmp_path) == before


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path: Path) -> None:
    checkpoint.save(small(vocab_size=256), tmp_path / "model")
    with pytest.raises(pal.InputError, match="ids reach 256; the model's vocabulary has 256 entries"):
        checkpoint.save(small(vocab_size=256), tmp_path / "other", tokenizer=Tokenizer.bytes())
    assert not (tmp_path / "other").exists()
    Tokenizer.bytes().save(tmp_path / "model")
    with pytest.raises(pal.InputError, match=r"tokenizer\.json: ids reach 256; the model's vocabulary has 256"):
        checkpoint.load(tmp_path / "model")


def test_paths_that_hold_no_model_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    for name, message in [("nowhere", "no such folder"), ("file", "it is a file"), ("run", "no complete checkpoint")]:
        with pytest.raises(pal.InputError, match=message):
            checkpoint.load(tmp_path / name)


def test_a_refused_or_failed_save_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    checkpoint.save(model, tmp_path / "model", tokenizer=Tokenizer.bytes())
    (tmp_path / "published").mkdir()
    (tmp_path / "published" / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "file").write_text("x")
    before = contents(tmp_path)
    for name, message in [("published", "not written by palimpsest"), ("file", "it is a file")]:
        with pytest.raises(pal.InputError, match=message):
            checkpoint.save(model, tmp_path / name)
    broken = small()
    with torch.no_grad():
        broken.norm.weight[0] = float("inf")  # type: ignore[index]
    for name in ("model", "new/model"):
        with pytest.raises(pal.InputError, match=r"tensor 'norm\.weight' holds NaN or infinity"):
            checkpoint.save(broken, tmp_path / name)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(pal.InputError, match="No space left on device"):
        checkpoint.save(model, tmp_path / "model")
    assert contents(tmp_path) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "model", "published"]


def test_pipes_devices_and_links_are_written_to(tmp_path: Path) -> None:
    """Renaming a new file over them would make a plain file of /dev/full, for everybody."""
    pipe, link, file = (tmp_path / name for name in ("pipe", "link", "file"))
    os.mkfifo(pipe)
    link.symlink_to(file)
    with ThreadPoolExecutor() as pool:
        text = pool.submit(pipe.read_text)
        checkpoint.write_text(pipe, "told")
    checkpoint.write_text(link, "told")
    assert (text.result(), file.read_text()) == ("told", "told")
    assert pipe.is_fifo() and link.is_symlink()
    device = Path("/dev/full")
    with pytest.raises(pal.InputError, match=r"/dev/full: cannot be written \(No space left on device\)"):
        checkpoint.write_text(device, "told")
    assert device.is_char_device()


def test_a_save_that_is_killed_never_shows_parts_of_two_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process dies before each of the renames in turn."""
    whole = os.replace
    old, new = small(seed=1), small(seed=2, rms_norm_eps=1e-3)
    for fatal in range(4):
        folder = tmp_path / str(fatal)
        checkpoint.save(old, folder, tokenizer=Tokenizer.bytes())
        calls = 0

        def dying(source: Path, target: Path, fatal: int = fatal, folder: Path = folder) -> None:
            nonlocal calls
            if Path(target).parent == folder:
                calls += 1
                if calls > fatal:
                    raise KeyboardInterrupt
            whole(source, target)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(os, "replace", dying)
            checkpoint.save(new, folder, tokenizer=Tokenizer.bytes())
        with pytest.raises(pal.InputError, match=r"no config\.json"):
            checkpoint.load(folder)
        checkpoint.save(new, folder)
        assert checkpoint.load(folder)[0].config == new.config


def test_the_newest_complete_checkpoint_counts(tmp_path: Path) -> None:
    models = {step: small(seed=step) for step in (2, 99_999_999, 100_000_000)}
    for step, model in models.items():
        checkpoint.save_checkpoint(tmp_path, step, model, {"x.step": torch.ones(())}, {"step": step}, None, keep=2)
    kept = checkpoint.checkpoints(tmp_path)
    assert [path.name for path in kept] == ["step-99999999", "step-100000000"]
    assert torch.equal(checkpoint.load(tmp_path)[0].embed_tokens.weight, models[100_000_000].embed_tokens.weight)
    assert torch.equal(checkpoint.load(kept[0])[0].embed_tokens.weight, models[99_999_999].embed_tokens.weight)
    (kept[1] / "train_state.json").unlink()
    (tmp_path / "checkpoints" / "step-00000099").mkdir()
    half = tmp_path / "checkpoints" / f".step-00000200{checkpoint.TEMPORARY}"
    half.mkdir()
    assert checkpoint.checkpoints(tmp_path) == kept[:1]
    assert torch.equal(checkpoint.load(tmp_path)[0].embed_tokens.weight, models[99_999_999].embed_tokens.weight)
    checkpoint.clean(tmp_path)
    assert not half.exists()
    checkpoint.save_checkpoint(tmp_path, 99, models[2], {}, {"step": 99}, None, keep=2)  # over the incomplete one
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["step-00000099", "step-99999999"]
    assert sorted(p.name for p in kept[0].iterdir()) == [
        "config.json",
        "model.safetensors",
        "optimizer.safetensors",
        "train_state.json",
    ]
