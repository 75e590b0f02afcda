"""Llama-type models from GGUF files: names, the order of rotary channels, and the tokenizer inside."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from palimpsest import ends
from palimpsest.checkpoint import fill
from palimpsest.config import InputError, ModelConfig
from palimpsest.convert import ggml, gguf
from palimpsest.model import Model
from palimpsest.progress import Transfer
from palimpsest.tokenizer import Tokenizer, byte_level_definition, canonical

NAMES = {  # ours -> GGUF's
    **{"^layers": "blk", "^embed_tokens": "token_embd", "^norm": "output_norm", "^lm_head": "output"},
    **{"mixer_norm": "attn_norm", "mlp_norm": "ffn_norm", r"mixer\.o_proj": "attn_output", r"mixer\.(.)_proj": r"attn_\1"},
    r"mlp\.(\w+)_proj": r"ffn_\1",
}
# How texts are split before merging, by GGUF's name for it: whether each digit stands alone.
SPLITS = {"gpt-2": False, "smollm": True}
DIGITS = {"type": "Digits", "individual_digits": True}
NORMAL, CONTROL, USER, UNUSED = 1, 3, 4, 5  # kinds of tokens
METADATA: dict[str, tuple[str, type]] = {  # our field -> key behind the architecture's name, kind
    **{"num_hidden_layers": ("block_count", int), "hidden_size": ("embedding_length", int)},
    **{"intermediate_size": ("feed_forward_length", int), "num_attention_heads": ("attention.head_count", int)},
    **{"rms_norm_eps": ("attention.layer_norm_rms_epsilon", float), "max_position_embeddings": ("context_length", int)},
}


def rename(name: str) -> str:
    for ours, theirs in NAMES.items():
        name = re.sub(ours, theirs, name)
    return name


def load(path: Path) -> tuple[Model, Tokenizer | None]:
    """The model and the tokenizer of a Llama-type GGUF file. Blocks are unpacked: such a model is in float32.

    Raises InputError, one line, for another architecture, a damaged file, and tensors that do not fit.
    """
    file = gguf.open_file(path)
    config = _config(file)
    with torch.device("meta"):
        model = Model(config)
    kinds = {stored.kind for stored in file.tensors.values() if len(stored.shape) > 1}
    model.to(ggml.PLAIN[kinds.pop()] if len(kinds) == 1 and kinds < ggml.PLAIN.keys() else torch.float32)
    parameters = dict(model.named_parameters())
    _check(file, parameters)
    tokenizer = read_tokenizer(file)
    progress = Transfer(f"reading {path.name}", sum(stored.num_bytes for stored in file.tensors.values()))
    tensors = {}
    for name, parameter in parameters.items():
        tensor = file.read(rename(name))
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        tensor = tensor if heads is None else halves(tensor, heads)
        tensors[name] = tensor if parameter.dim() == 1 else tensor.to(parameter.dtype)
        progress.add(file.tensors[rename(name)].num_bytes)
    fill(model, tensors)
    return model, tokenizer


def halves(weight: Tensor, heads: int) -> Tensor:
    """Rows of q or k [heads * D,in] from pairs that rotate together side by side to a half behind the other half."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def pairs(weight: Tensor, heads: int) -> Tensor:
    """The way back."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def _config(file: gguf.File) -> ModelConfig:
    """The configuration that the metadata describe."""
    meta, kind = file.metadata, file.metadata.get("general.architecture")
    if kind != "llama":
        raise InputError(f"{file.path}: general.architecture is {kind!r}; this version reads 'llama'")
    values: dict[str, Any] = {}
    value: Any
    for field, (key, wanted) in METADATA.items():
        value = meta.get(f"llama.{key}")
        if not isinstance(value, wanted):
            raise InputError(f"{file.path}: llama.{key} is {value!r}; expected a number")
        values[field] = _shortest(float(value)) if wanted is float else value
    for key, neutral in (("expert_count", 0), ("rope.scaling.type", "none"), ("attention.sliding_window", 0)):
        if meta.get(f"llama.{key}", neutral) != neutral:
            raise InputError(f"{file.path}: llama.{key} is {meta[f'llama.{key}']!r}; only {neutral!r} is supported")
    heads, layers = values["num_attention_heads"], values["num_hidden_layers"]
    head_dim = meta.get("llama.attention.key_length", values["hidden_size"] // max(heads, 1))
    if meta.get("llama.rope.dimension_count", head_dim) != head_dim:
        raise InputError(f"{file.path}: llama.rope.dimension_count is not the width of a head, {head_dim}")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise InputError(f"{file.path}: tensor 'token_embd.weight' is missing; the file holds no language model")
    values |= {"num_key_value_heads": meta.get("llama.attention.head_count_kv", heads), "head_dim": head_dim}
    values |= {"mixers": ("attention",) * layers, "mlps": ("swiglu",) * layers, "position": "rope"}
    values |= {"rope_theta": _shortest(float(meta.get("llama.rope.freq_base", 10000.0))), "vocab_size": embedding.shape[0]}
    return ModelConfig.from_dict({**values, "tie_word_embeddings": "output.weight" not in file.tensors}, str(file.path))


def _shortest(value: float) -> float:
    """The shortest decimal number that float32 stores as `value`: 1e-5 instead of 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _check(file: gguf.File, parameters: Mapping[str, Tensor]) -> None:
    """Names, shapes and types, before any tensor is read."""
    expected = {rename(name): tuple(parameter.shape) for name, parameter in parameters.items()}
    for problem, names in (("is missing", expected.keys() - file.tensors), ("has no place", file.tensors.keys() - expected)):
        if names:
            count = f"expected {len(expected)} tensors, found {len(file.tensors)}"
            raise InputError(f"{file.path}: tensor {min(names)!r} {problem} in this model; {count}")
    for name, shape in expected.items():
        stored = file.tensors[name]
        if stored.shape != shape:
            raise InputError(f"{file.path}: tensor {name!r} has shape {list(stored.shape)}; expected {list(shape)}")
        if stored.kind not in ggml.READ:
            raise InputError(f"{file.path}: tensor {name!r} is {stored}; this version reads {', '.join(ggml.READ)}")


def read_tokenizer(file: gguf.File) -> Tokenizer | None:
    """The tokenizer inside, None where there is none. Raises InputError for one of another kind than byte-level BPE."""
    meta = {key.removeprefix("tokenizer.ggml."): value for key, value in file.metadata.items()}
    kind, split = meta.get("model", "none"), meta.get("pre", "gpt-2")
    if kind == "none":
        return None
    if kind != "gpt2" or split not in SPLITS:
        known = f"'gpt2' split as {' or '.join(repr(name) for name in SPLITS)}"
        raise InputError(f"{file.path}: the tokenizer is {kind!r}, split as {split!r}; this version reads {known}")
    tokens, kinds = meta["tokens"], meta.get("token_type", [NORMAL] * len(meta["tokens"]))
    vocab = {token: i for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind != UNUSED}
    if len(vocab) != len(tokens) - kinds.count(UNUSED):
        raise InputError(f"{file.path}: the tokenizer has two tokens of one text; copy the file again")
    merges = [merge.split(" ") for merge in meta.get("merges", [])]
    definition = byte_level_definition(vocab, merges, None, use_regex=True)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    definition["added_tokens"] = [
        {"id": i, "content": tokens[i], **flags, "special": kind == CONTROL}
        for i, kind in enumerate(kinds)
        if kind in (CONTROL, USER)
    ]
    if SPLITS[split]:
        both = [DIGITS, definition["pre_tokenizer"]]
        definition["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": both}
    config: dict[str, Any] = {
        f"{role}_token": tokens[meta[f"{role}_token_id"]] for role in ("bos", "eos") if f"{role}_token_id" in meta
    }
    config[ends.KEY] = [meta[name] for name in ("eot_token_id", "eom_token_id") if name in meta]  # of a turn, of a message
    if "tokenizer.chat_template" in file.metadata:
        config["chat_template"] = file.metadata["tokenizer.chat_template"]
    return Tokenizer(canonical(definition, file.path), config)
