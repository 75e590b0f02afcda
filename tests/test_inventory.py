"""The published Kimi K3: its inventory from the config alone, and a complete checkpoint of holes that opens and is checked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import pytest

import palimpsest as pal
from palimpsest.convert.inventory import Expected, inventory
from palimpsest.convert.kimi import Kimi
from palimpsest.shards import INDEX, SIZES, header
from tests.test_convert import k3_inventory, kimi_k3

VISION: dict[str, Any] = {
    **{"_attn_implementation": "flash_attention_2", "activation_func": "gelu_pytorch_tanh", "attn_bias": False},
    **{"init_pos_emb_height": 64, "init_pos_emb_width": 64, "init_pos_emb_time": 4, "pos_emb_type": "divided_fixed"},
    **{"patch_size": 14, "merge_kernel_size": [2, 2], "merge_type": "sd2_tpool", "mlp_type": "mlp2", "norm_type": "rmsnorm"},
    **{"vt_hidden_size": 1024, "vt_intermediate_size": 4096, "vt_num_attention_heads": 12, "vt_num_hidden_layers": 27},
    **{"qkv_hidden_size": 1536, "mm_hidden_size": 1024, "text_hidden_size": 7168},
}
# What the published files also say, without effect on the text model.
OUTER: dict[str, Any] = {
    **{"auto_map": {"AutoConfig": "configuration_kimi_k3.KimiK3Config"}, "dtype": "bfloat16", "bos_token_id": 163584},
    **{"eos_token_id": 163586, "pad_token_id": 163839, "ignore_index": -100, "tie_word_embeddings": False},
    **{"image_placeholder": "<|kimi_image_placeholder|>", "media_placeholder_token_id": 163605},
}
IDLE: dict[str, Any] = {
    **{"_name_or_path": "", "add_cross_attention": False, "bad_words_ids": None, "chunk_size_feed_forward": 0},
    **{"diversity_penalty": 0.0, "do_sample": False, "early_stopping": False, "id2label": {"0": "LABEL_0"}, "max_length": 20},
    **{"is_decoder": False, "num_beams": 1, "pruned_heads": {}, "temperature": 1.0, "top_k": 50, "use_bfloat16": False},
    **{"transformers_version": "4.56.2", "use_cache": True, "bos_token_id": 163584, "tokenizer_class": None},
}


def published_config() -> dict[str, Any]:
    document = kimi_k3()
    text = {**document["text_config"], **IDLE, **Kimi.quantization}
    return {**document, **OUTER, "text_config": text, "vision_config": VISION}


@pytest.fixture(scope="module")
def expected() -> dict[str, Expected]:
    return inventory(published_config())


@pytest.mark.slow
def test_the_published_inventory(expected: dict[str, Expected]) -> None:
    """Tensors, files, bytes and values of each dtype as the published index and model page have them."""
    assert len(expected) == 497_220
    assert len({entry.file for entry in expected.values()}) == 96
    assert sum(SIZES[entry.dtype] * prod(entry.shape) for entry in expected.values()) == 1_560_860_324_864
    values: Counter[str] = Counter()
    for name, entry in expected.items():
        values["packed" if name.endswith("_packed") else entry.dtype] += prod(entry.shape)
    assert (values["F32"], values["BF16"], 2 * values["packed"]) == (11_122_432, 57_179_884_544, 2_722_740_830_208)
    experts = [name for name in expected if ".block_sparse_moe.experts." in name]
    others = [name for name in expected if not name.startswith("language_model.")]
    assert (len(experts), len(others)) == (494_592, 165 + 3)
    one = "language_model.model.layers.92.block_sparse_moe.experts.895."
    assert expected[f"{one}w1.weight_packed"] == ("model-00093-of-000096.safetensors", "U8", (3072, 1792))
    assert expected[f"{one}w2.weight_scale"] == ("model-00093-of-000096.safetensors", "U8", (3584, 96))
    assert expected["language_model.lm_head.weight"].file == "model-00094-of-000096.safetensors"
    dtypes = {"BF16": "bfloat16", "F32": "float32"}
    for name, (shape, dtype) in k3_inventory().items():
        if ".experts." not in name:
            assert (list(expected[name].shape), dtypes[expected[name].dtype]) == (shape, dtype), name


def test_the_inventory_of_another_family_is_refused() -> None:
    with pytest.raises(pal.InputError, match="the inventory is of Kimi K3"):
        inventory({"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 4, "vocab_size": 9})


def write_holes(folder: Path, expected: dict[str, Expected]) -> None:
    """The whole checkpoint with true headers and no data: files with holes, which take no room."""
    files: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
    for name, entry in expected.items():
        files.setdefault(entry.file, {})[name] = (entry.dtype, entry.shape)
    for file, shapes in files.items():
        start = header(shapes)
        with (folder / file).open("wb") as out:
            out.write(start)
            out.truncate(len(start) + sum(SIZES[dtype] * prod(shape) for dtype, shape in shapes.values()))
    weight_map = {name: entry.file for name, entry in expected.items()}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1_560_860_324_864}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(published_config()))


@pytest.mark.slow
def test_the_complete_checkpoint_opens_and_is_checked(tmp_path: Path, expected: dict[str, Expected]) -> None:
    """In less than 60 s and 2 GB; without one of 497,220 tensors, or with one of another shape, it does not."""
    write_holes(tmp_path, expected)
    code = """
import json, sys, time
from palimpsest.cli import main
from palimpsest.progress import memory_bytes
import torch
began = time.process_time()
status = main(["convert", sys.argv[1], "--json", sys.argv[2]])
print(json.dumps([status, time.process_time() - began, memory_bytes(torch.device("cpu"))]), file=sys.stderr)
"""
    found = tmp_path / "found.json"
    command = [sys.executable, "-c", code, str(tmp_path), str(found)]
    ran = subprocess.run(command, capture_output=True, text=True, env={**os.environ})
    status, seconds, memory = json.loads(ran.stderr.splitlines()[-1])
    assert status == 0, ran.stderr
    assert seconds < 60 and memory < 2e9
    numbers = json.loads(found.read_text())
    assert (numbers["tensors"], numbers["files"], numbers["bytes"]) == (497_220, 96, 1_560_860_324_864)
    assert numbers["tensors_of_the_model"] == 497_220 - 168
    assert numbers["dtypes"]["F32"]["bytes"] == 4 * 11_122_432
    print(f"{seconds:.1f} s, {memory / 1e9:.2f} GB")

    file = expected["language_model.lm_head.weight"].file
    whole = {name: (entry.dtype, entry.shape) for name, entry in expected.items() if entry.file == file}
    norm = "language_model.model.norm.weight"
    for change, message in (
        ({norm: ("BF16", (7167,))}, r"norm\.weight' has shape \[7167\]; expected \[7168\]"),
        ({norm: ("U8", (7168,))}, r"norm\.weight' is U8 \[7168\]; expected BF16"),
    ):
        shapes = {**whole, **change}
        start = header(shapes)
        (tmp_path / file).unlink()
        with (tmp_path / file).open("wb") as out:
            out.write(start)
            out.truncate(len(start) + sum(SIZES[dtype] * prod(shape) for dtype, shape in shapes.values()))
        with pytest.raises(pal.InputError, match=rf"{file}: tensor 'model\.{message}"):
            pal.load(tmp_path)
