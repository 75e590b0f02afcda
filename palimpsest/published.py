"""Models in and out, whatever their form: `load` and `save`, and the command `convert`.

in     a model, checkpoint or run folder of ours; a published folder (config.json and safetensors);
           a GGUF file of Llama type
out    a published folder where the model's family has one, else a model folder of ours;
           a GGUF file
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from palimpsest import checkpoint
from palimpsest.config import InputError, suggestion
from palimpsest.convert import Layout, folder, gguf, gguf_in, gguf_out
from palimpsest.linear import Linear8, pack
from palimpsest.model import Model
from palimpsest.offload import DiskExperts
from palimpsest.tokenizer import Tokenizer

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "q8_0": None}


def load(
    path: str | Path, offload: str | None = None, cache_bytes: int = 1_000_000_000, dtype: str | None = None
) -> tuple[Model, Tokenizer | None]:
    """The model and the tokenizer of a folder or a GGUF file; of a run folder its newest checkpoint.

    Weights keep the dtype of the file, or get `dtype`: 'f32', 'bf16', 'f16', or 'q8_0', eight bits in the linear maps and the
    rest as it was, for a model that is run and not trained. Experts packed in four bits stay packed. Nothing that lies in the
    folder is run, and no pickle is read. With `offload="disk"` the routed experts of a published folder stay on disk: those$
    tokens choose are read, and `cache_bytes` of them are kept (offload.py; `model.layers[i].mlp.experts.cache.hit_rate`).

    Raises InputError, one line with the file, the tensor, what was expected and what was found, before any tensor is read;
    for NaN or infinity, when it is met.
    """
    path = Path(path)
    if dtype is not None and dtype not in DTYPES:
        raise InputError(f"dtype is {dtype!r}; weights can be {', '.join(DTYPES)}{suggestion(dtype, DTYPES)}")
    model, tokenizer = _load(path, offload, cache_bytes)
    if dtype == "q8_0":
        pack(model)
    elif dtype is not None:
        model.to(DTYPES[dtype])
    return model, tokenizer


def _load(path: Path, offload: str | None, cache_bytes: int) -> tuple[Model, Tokenizer | None]:
    if offload is not None:
        if offload != "disk" or not is_published(path):
            raise InputError(f"{path}: offload is {offload!r}; only 'disk' is possible, and only for published folders")
        return folder.load(path, cache_bytes)
    if path.is_file() and path.suffix == ".gguf":
        return gguf_in.load(path)
    return folder.load(path) if is_published(path) else checkpoint.load(path)


def save(model: Model, path: str | Path, tokenizer: Tokenizer | None = None, dtype: str | None = None) -> None:
    """Writes a folder that `load` and other libraries open; where no published layout holds the model, one of ours.

    A path that ends in .gguf becomes a file for llama.cpp. `dtype` is 'f32', 'bf16', 'f16', in GGUF also 'q8_0', and for
    experts of Kimi K3 'mxfp4'; None keeps the model's. What is written is read back
    and compared, and has its name only then. Raises InputError, with nothing written, for a folder that is not empty, a
    tokenizer larger than the vocabulary, and a weight that is not finite.
    """
    check_tokenizer(model, tokenizer)
    if any(isinstance(module, DiskExperts) for module in model.modules()):
        raise InputError("model: its experts are on disk, so it is not saved; load it without offload, or copy its folder")
    if any(isinstance(module, Linear8) for module in model.modules()):
        raise InputError("model: its weights are in eight bits, so it is not saved; load it without dtype='q8_0', or copy it")
    if Path(path).suffix == ".gguf":
        gguf_out.save(model, Path(path), tokenizer, dtype)
        return
    try:
        Layout.of(model.config)
    except InputError:
        if dtype is not None:
            raise
        checkpoint.save(model, path, tokenizer)
        return
    folder.save(model, Path(path), tokenizer, dtype)


def inspect(path: Path) -> dict[str, Any]:
    """What a published folder or a GGUF file holds, checked from headers; no tensor is read."""
    if path.is_file() and path.suffix == ".gguf":
        return gguf.open_file(path).listing()
    if not path.exists():
        raise InputError(f"{path}: no such file or folder; check the path")
    if not is_published(path):
        raise InputError(f"{path}: neither a published folder nor a .gguf file; name a place to write it to as one")
    return folder.open_folder(path).listing()


def convert(source: Path, out: Path, to: str, dtype: str | None) -> dict[str, Any]:
    """Writes the model of `source` to `out`, in form `to` ('hf' or 'gguf'); returns what `inspect` says. Errors as `save`."""
    folder.check_absent(out)
    if (to == "gguf") != (out.suffix == ".gguf"):
        raise InputError(f"{out}: with --to {to} the name must {'end' if to == 'gguf' else 'not end'} in .gguf")
    model, tokenizer = load(source)
    check_tokenizer(model, tokenizer)
    if to == "gguf":
        gguf_out.save(model, out, tokenizer, dtype)
    else:
        folder.save(model, out, tokenizer, dtype)
    return inspect(out)


def check_tokenizer(model: Model, tokenizer: Tokenizer | None) -> None:
    """Refuses a tokenizer with more tokens than the model's vocabulary."""
    if tokenizer is not None and tokenizer.vocab_size > model.config.vocab_size:
        raise InputError(
            f"tokenizer: ids reach {tokenizer.vocab_size - 1}; the model's vocabulary has {model.config.vocab_size} entries; "
            "save it with the tokenizer it was trained with"
        )


def is_published(path: Path) -> bool:
    """Whether a path is a folder that another library may have written."""
    config = path / checkpoint.CONFIG
    return config.is_file() and "format" not in checkpoint.read_json(config)
