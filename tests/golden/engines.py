"""Writes engines.npz: logits of llama.cpp and mlx-lm for the checkpoints of tests/oracles/weights.py.

python tests/golden/engines.py LLAMA_CPP    # the vendor/llama.cpp folder of the llama-cpp-python 0.3.36 source package

Run in the environment of tests/oracles/outside with requests and sentencepiece beside it. The checkpoints are written by
`pal.save`, converted to GGUF by llama.cpp's own converter and run by its library in one batch and token by token.
"""

from __future__ import annotations

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
from tests.oracles.weights import CHECKPOINTS, IDS, model_of

FILE = Path(__file__).with_name("engines.npz")
PLACES = [0, 1, 4, 9, 10, 15, 20]  # the tokens whose logits are kept
CONVERTERS = {"kimi-k3-tiny": ("kimi_k3", "KimiK3Model"), "kimi-linear-tiny": ("kimi_linear", "KimiLinearModel")}


def to_gguf(folder: Path, out: Path, preset: str, llama_cpp: Path) -> None:
    sys.path[:0] = [str(llama_cpp), str(llama_cpp / "gguf-py")]
    import gguf

    module, name = CONVERTERS[preset]
    converter = getattr(importlib.import_module(f"conversion.{module}"), name)
    converter.set_vocab = lambda self: self.gguf_writer.add_tokenizer_model("none")
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


def mlx_logits(folder: Path, module: str) -> np.ndarray:
    import mlx.core as mx

    mx.set_default_device(mx.cpu)
    code: Any = importlib.import_module(f"mlx_lm.models.{module}")
    model = code.Model(code.ModelArgs.from_dict(json.loads((folder / "config.json").read_text())))
    weights: Any = dict(mx.load(str(folder / "model.safetensors")))  # type: ignore[arg-type]
    model.load_weights(list(model.sanitize(weights).items()), strict=True)
    return np.array(model(mx.array(IDS.numpy())).astype(mx.float32))


def main() -> None:
    found: dict[str, np.ndarray] = {"versions": np.array([f"{p} {version(p)}" for p in ("mlx-lm", "xllamacpp")])}
    for preset in CHECKPOINTS:
        with tempfile.TemporaryDirectory() as place:
            folder, gguf = Path(place) / "model", Path(place) / "model.gguf"
            model = model_of(preset)
            pal.save(model, folder)
            to_gguf(folder, gguf, preset, Path(sys.argv[1]))
            vocab = model.config.vocab_size
            whole, steps = (
                np.stack([llama_cpp_logits(gguf, row, pieces, vocab) for row in IDS.tolist()])
                for pieces in ([21], [9] + [1] * 12)
            )
            assert np.abs(whole - steps).max() < 1e-3
            found[f"{preset} llama.cpp"] = whole[:, PLACES]
            found[f"{preset} mlx-lm"] = mlx_logits(folder, CONVERTERS[preset][0])[:, PLACES]
            with torch.no_grad():
                ours = model(IDS).logits.numpy()[:, PLACES]
            for name in ("llama.cpp", "mlx-lm"):
                print(preset, name, np.abs(found[f"{preset} {name}"] - ours).max(), "of spread", ours.std())
    np.savez_compressed(FILE, **found)


if __name__ == "__main__":
    main()
