"""What a published Kimi K3 holds, from its config.json alone: every tensor with its file, dtype and shape.

file 1 .. L       a layer each
file L + 1        embedding, head, last norm and residual
file L + 2, L + 3 projector, vision tower
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from palimpsest.config import InputError
from palimpsest.convert import Layout
from palimpsest.convert.kimi import Kimi
from palimpsest.shards import CODES

Shape = tuple[int, ...]


class Expected(NamedTuple):
    """A tensor that a checkpoint has: the name of its file, its dtype's code, its shape."""

    file: str
    dtype: str
    shape: Shape


def inventory(document: Mapping[str, Any]) -> dict[str, Expected]:
    """Every tensor of the published Kimi K3 that `document`, its config.json, describes; no weights are needed.

    Raises InputError for a config.json of another family or one that is not understood.
    """
    packed = document.get("text_config", {}).get("quantization_config") is not None
    layout = Layout.read(dict(document), ["experts.weight_packed"] if packed else [])
    if not isinstance(layout.family, Kimi) or not layout.family.is_k3(layout.config):
        raise InputError(f"config.json: it describes a {layout.family.name} model; the inventory is of Kimi K3")
    layout.model.to(torch.bfloat16)
    layers = layout.config.num_hidden_layers
    vision = document.get("vision_config")
    files = layers + (3 if vision else 1)
    found = {}
    for entry in layout.entries:
        dumped = entry.dump(*(layout.model.get_parameter(name) for name in entry.ours))
        for name, tensor in zip(entry.published, dumped, strict=True):
            layer = re.match(r"model\.layers\.(\d+)\.", name)
            number = layers + 1 if layer is None else int(layer[1]) + 1
            found[layout.prefix + name] = Expected(_file(number, files), CODES[tensor.dtype], tuple(tensor.shape))
    if vision:
        found |= {name: Expected(_file(layers + 2, files), "BF16", shape) for name, shape in _projector(vision)}
        found |= {name: Expected(_file(layers + 3, files), "BF16", shape) for name, shape in _tower(vision)}
    return found


def _file(number: int, files: int) -> str:
    return f"model-{number:05}-of-{files:06}.safetensors"


def _projector(vision: Mapping[str, Any]) -> Iterator[tuple[str, Shape]]:
    width = vision["mm_hidden_size"] * vision["merge_kernel_size"][0] * vision["merge_kernel_size"][1]
    yield "mm_projector.proj.0.weight", (width, width)
    yield "mm_projector.proj.2.weight", (vision["text_hidden_size"], width)
    yield "mm_projector.post_norm.weight", (vision["text_hidden_size"],)


def _tower(vision: Mapping[str, Any]) -> Iterator[tuple[str, Shape]]:
    width, inner, heads = vision["vt_hidden_size"], vision["vt_intermediate_size"], vision["qkv_hidden_size"]
    for block in range(vision["vt_num_hidden_layers"]):
        at = f"vision_tower.encoder.blocks.{block}."
        yield f"{at}wqkv.weight", (3 * heads, width)
        yield f"{at}wo.weight", (width, heads)
        yield f"{at}mlp.fc0.weight", (inner, width)
        yield f"{at}mlp.fc1.weight", (width, inner)
        yield f"{at}norm0.weight", (width,)
        yield f"{at}norm1.weight", (width,)
    yield "vision_tower.encoder.final_layernorm.weight", (width,)
    yield "vision_tower.patch_embed.pos_emb.weight", (vision["init_pos_emb_height"], vision["init_pos_emb_width"], width)
    yield "vision_tower.patch_embed.proj.weight", (width, 3, vision["patch_size"], vision["patch_size"])
