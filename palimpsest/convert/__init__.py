"""Published checkpoints: their tensor names, prefixes, transposes, paddings and 1-based lists, in both directions.

    family        recognised by         what differs besides names
    GPT-2         n_embd                matrices stored [in,out]; q, k, v in one
    Qwen3-Next    linear_num_key_heads  q, k, v, z and b, a grouped by key head; query and gate by head; norms hold w - 1
    Kimi Linear   linear_attn_config    1-based layer lists; A_log [1,1,H,1]; experts w1 (gate), w3 (up), w2 (down)
    Kimi K3       the same, nested      as Kimi Linear, but A_log [128], and every name behind `language_model.`
    Llama         none of these         nothing

Pure functions on dictionaries: nothing here opens a file, and nothing about published checkpoints is known elsewhere. A
family is tables (keys against fields of the configuration, names against names) and rules for what no table can say.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from palimpsest.config import InputError, ModelConfig
from palimpsest.convert.family import Family, Published
from palimpsest.convert.gpt2 import GPT2
from palimpsest.convert.kimi import Kimi
from palimpsest.convert.qwen3_next import Qwen3Next
from palimpsest.model import Model

FAMILIES: dict[str, Family] = {  # by a key that its config.json has and those below do not
    "n_embd": GPT2(),
    "linear_attn_config": Kimi(),
    "linear_num_key_heads": Qwen3Next(),
    "hidden_size": Family(),
}


def from_published(config: dict[str, Any], tensors: Mapping[str, Tensor]) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The model that a published config.json and its tensors describe: its configuration, and a `state_dict` for it.

    Tensors keep their dtype, except that norms published as w - 1 come back in at least float32: bfloat16 would lose w. A
    tied head shares the embedding's tensor. Raises InputError for a config this version does not read, and for a missing,
    misshapen or surplus tensor.
    """
    text = config.get("text_config", config)
    family = _recognise(text)
    model = ModelConfig.from_dict(family.read(text), "config.json")
    left = {name.removeprefix(family.prefix): tensor for name, tensor in tensors.items()}
    left = {name: tensor for name, tensor in left.items() if not re.fullmatch(family.ignored, name)}
    if model.tie_word_embeddings and "lm_head.weight" in left:
        head = left.pop("lm_head.weight")
        embedding = left.setdefault(family.rename("embed_tokens.weight"), head)
        if not (embedding is head or head.is_meta or torch.equal(embedding, head)):
            raise InputError("tensor 'lm_head.weight' differs from the embedding, but config.json ties them")
    ours = _convert(family, model, left, loading=True)
    if model.tie_word_embeddings:
        ours["lm_head.weight"] = ours["embed_tokens.weight"]
    return model, ours


def to_published(config: ModelConfig, tensors: Mapping[str, Tensor]) -> Published:
    """config.json and tensors as the model's family publishes them, from its `state_dict`. A tied head is left out.

    `from_published` gives all that the model uses of the configuration back, and the same tensors bit for bit; only a norm
    published as w - 1 is rounded when w lies outside [0.5, 2]. Raises InputError for a configuration that no published
    layout can hold, and for a missing, misshapen or surplus tensor.
    """
    family = _family(config)
    text = family.write(config)
    for field, value in family.read(text).items():
        have = getattr(config, field)
        if have != value and field not in family.unused:
            raise InputError(f"model: {field} is {have!r}; a published {family.name} model can only hold {value!r}")
    left = {name: x for name, x in tensors.items() if not (config.tie_word_embeddings and name == "lm_head.weight")}
    published = _convert(family, config, left, loading=False)
    text["dtype"] = str(published[family.rename("embed_tokens.weight")].dtype).removeprefix("torch.")
    return family.wrap(config, text, published)


def _convert(family: Family, config: ModelConfig, left: dict[str, Tensor], loading: bool) -> dict[str, Tensor]:
    """Takes every tensor out of `left` and through the family's entries, one way or the other."""
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in Model(config).state_dict().items()}
    moved: dict[str, Tensor] = {}
    done = {"lm_head.weight"} if config.tie_word_embeddings else set()
    for each in shapes:
        if each in done:
            continue
        entry = family.entry(each, config)
        done.update(entry.ours)
        names, targets = (entry.published, entry.ours) if loading else (entry.ours, entry.published)
        for name in names:
            if name not in left:
                raise InputError(f"tensor {name!r} is missing; the set is incomplete or belongs to another configuration")
        sources = {name: left.pop(name) for name in names}
        try:
            changed = (entry.load if loading else entry.dump)(*sources.values())
            results = dict(zip(targets, (tensor.contiguous() for tensor in changed), strict=True))
        except RuntimeError:
            results = {}
        held = results if loading else sources
        if not results or any(held[name].shape != shapes[name] for name in entry.ours):
            shape = list(sources[names[0]].shape)
            raise InputError(f"tensor {names[0]!r} has shape {shape}, which belongs to another configuration")
        moved |= results
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        raise InputError(f"tensor {next(iter(left))!r}{more} has no place in this model; another configuration may fit")
    return moved


def _recognise(text: Mapping[str, Any]) -> Family:
    """The family of a config.json: by its keys, since Kimi Linear and Kimi K3 carry one name, and then by that name."""
    family = next((family for key, family in FAMILIES.items() if key in text), None)
    if family is None or text.get("model_type", family.model_type) != family.model_type:
        raise InputError(f"config.json: model_type is {text.get('model_type')!r}; this version reads gpt2, llama, ...")
    return family


def _family(config: ModelConfig) -> Family:
    """The family whose layout may hold a configuration; `to_published` checks that it does."""
    mixers = set(config.mixers)
    if mixers <= {"kda", "mla"}:
        return FAMILIES["linear_attn_config"]
    if mixers <= {"gated_deltanet", "attention"} and (config.attention_output_gate or "gated_deltanet" in mixers):
        return FAMILIES["linear_num_key_heads"]
    if mixers == {"attention"}:
        return FAMILIES["n_embd" if config.norm == "layer" else "hidden_size"]
    raise InputError(f"model: mixers are {sorted(mixers)}; no published layout has these together")
