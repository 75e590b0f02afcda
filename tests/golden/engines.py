"""Writes engines.npz: logits of llama.cpp and mlx-lm for the checkpoints of tests/oracles/weights.py.

python tests/golden/engines.py LLAMA_CPP    # the vendor/llama.cpp folder of the llama-cpp-python 0.3.36 source package

Run in the environment of tests/oracles/outside with requests and sentencepiece beside it. The checkpoints are written by
`pal.save`, converted to GGUF by llama.cpp's own converter and run by its library, whole and as a prefill and single steps.
"""

from __future__ import annotations

import copy
import importlib
import json
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

import palimpsest as pal
from tests.oracles.weights import IDS, model_of

FILE = Path(__file__).with_name("engines.npz")
PLACES = [0, 1, 4, 9, 10, 15, 20]  # the tokens whose logits are kept
# Beside what the checkpoints say. The low-rank norms and the key norm have epsilon 1e-6, whatever the model's; llama.cpp has
# the model's there too, so it is compared where they are one.
ENGINES: dict[str, dict[str, Any]] = {"llama.cpp": {"rms_norm_eps": 1e-6}, "mlx-lm": {}}
CONVERTERS = {
    "kimi-k3-tiny": ("kimi_k3", "KimiK3Model"),
    "kimi-linear-tiny": ("kimi_linear", "KimiLinearModel"),
    "gpt2-tiny": ("gpt2", "GPT2Model"),
}


def to_gguf(folder: Path, out: Path, preset: str, llama_cpp: Path) -> None:
    sys.path[:0] = [str(llama_cpp), str(llama_cpp / "gguf-py")]
    import gguf

    module, name = CONVERTERS[preset]
    converter = getattr(importlib.import_module(f"conversion.{module}"), name)

    def set_vocab(self: Any) -> None:
        self.gguf_writer.add_tokenizer_model("none")
        self.gguf_writer.add_vocab_size(self.hparams["vocab_size"])

    converter.set_vocab = set_vocab
    converter(folder, gguf.LlamaFileType.ALL_F32, out).write()


def llama_cpp_logits(path: Path, ids: list[int], pieces: list[int], vocab: int) -> np.ndarray:
    """Logits [T,vocab] of one sequence read in pieces."""
    import xllamacpp
    from llama_cpp_py_sync import _cffi_bindings

    ffi: Any = _cffi_bindings.get_ffi()
    lib: Any = ffi.dlopen(os.path.join(os.path.dirname(xllamacpp.__file__), "xllamacpp.abi3.so"))
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
    options = lib.llama_context_default_params()
    options.n_ctx, options.n_threads, options.n_threads_batch = 512, 2, 2
    options.type_k = options.type_v = options.flash_attn_type = 0
    context = lib.llama_init_from_model(model, options)
    rows, at = [], 0
    for count in pieces:
        batch = lib.llama_batch_init(count, 0, 1)
        batch.n_tokens = count
        for i in range(count):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = ids[at + i], at + i, 1, 1
            batch.seq_id[i][0] = 0
        assert lib.llama_decode(context, batch) == 0
        for i in range(count):
            row = ffi.buffer(lib.llama_get_logits_ith(context, i), 4 * vocab)
            rows.append(np.frombuffer(row, np.float32).copy())
        at += count
    lib.llama_free(context)
    lib.llama_model_free(model)
    return np.stack(rows)


def mlx_logits(folder: Path, module: str, pieces: list[int]) -> np.ndarray:
    """Logits [B,T,vocab] of IDS read in pieces."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    mx.set_default_device(mx.cpu)
    code: Any = importlib.import_module(f"mlx_lm.models.{module}")
    model = code.Model(code.ModelArgs.from_dict(json.loads((folder / "config.json").read_text())))
    weights: Any = dict(mx.load(str(folder / "model.safetensors")))  # type: ignore[arg-type]
    model.load_weights(list(model.sanitize(weights).items()), strict=True)
    cache, parts = make_prompt_cache(model), mx.split(mx.array(IDS.numpy()), np.cumsum(pieces)[:-1].tolist(), axis=1)
    return np.concatenate([np.array(model(part, cache=cache).astype(mx.float32)) for part in parts], 1)


def logits(preset: str, engine: str, model: pal.Model, pieces: list[int]) -> np.ndarray:
    """Of IDS, [B,T,vocab], from a folder that `pal.save` writes."""
    with tempfile.TemporaryDirectory() as place:
        folder, gguf = Path(place) / "model", Path(place) / "model.gguf"
        pal.save(model, folder)
        if engine == "mlx-lm":
            return mlx_logits(folder, CONVERTERS[preset][0], pieces)
        to_gguf(folder, gguf, preset, Path(sys.argv[1]))
        return np.stack([llama_cpp_logits(gguf, row, pieces, model.config.vocab_size) for row in IDS.tolist()])


def main() -> None:
    found: dict[str, np.ndarray] = {"versions": np.array([f"{p} {version(p)}" for p in ("mlx-lm", "xllamacpp")])}
    for preset in CONVERTERS:
        for engine, fields in ENGINES.items():
            model = model_of(preset, **fields)
            with torch.no_grad():
                ours = copy.deepcopy(model).double()(IDS).logits.numpy()[:, PLACES]
            for measure, pieces in (("output", [21]), ("decode", [9] + [1] * 12)):
                kept = logits(preset, engine, model, pieces)[:, PLACES]
                found[f"{preset} {engine} {measure}"] = kept
                print(preset, engine, measure, np.abs(kept - ours).max(), "of spread", ours.std())
    np.savez_compressed(FILE, **found)


if __name__ == "__main__":
    main()
