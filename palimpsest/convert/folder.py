"""Published model folders, in and out: config.json, tensors in safetensors files, tokenizer files. Nothing in them is run.

Everything that can be wrong with a folder is found from config.json and the files' headers, before a tensor is read.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from palimpsest import offload, shards
from palimpsest.checkpoint import CONFIG, fill, flush_all, read_json, staged
from palimpsest.config import InputError
from palimpsest.convert import EMBEDDING, HEAD, Layout, check_tied, tiktoken
from palimpsest.convert.family import Entry, wide
from palimpsest.model import FLOAT32, Model
from palimpsest.ops import mxfp4_encode
from palimpsest.progress import Transfer
from palimpsest.shards import CODES, DTYPES, SIZES, WEIGHTS, Stored
from palimpsest.tokenizer import Tokenizer

FLOATS = ("F64", "F32", "F16", "BF16")
# What the names of `--dtype` make of a matrix; mxfp4 is bfloat16 around packed experts.
TARGETS = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "mxfp4": torch.bfloat16}
FILE_BYTES = 5_000_000_000  # of tensors in one file; what exceeds it is cut into several with an index
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "encoder.json", tiktoken.FILE)


@dataclass(frozen=True)
class Opened:
    """A folder that was checked: its layout, and where each tensor of the model lies, by published name."""

    folder: Path
    layout: Layout
    stored: dict[str, Stored]
    everything: dict[str, Stored]  # with what lies outside the model, under full names

    def listing(self) -> dict[str, Any]:
        """Tensors, files, bytes of tensors and of files, and tensors and bytes of each dtype."""
        paths = {stored.file for stored in self.everything.values()}
        dtypes: dict[str, dict[str, int]] = {}
        for stored in self.everything.values():
            row = dtypes.setdefault(stored.dtype, {"tensors": 0, "bytes": 0})
            row["tensors"] += 1
            row["bytes"] += stored.num_bytes
        return {
            "family": self.layout.family.name,
            "tensors": len(self.everything),
            "tensors_of_the_model": len(self.stored),
            "files": len(paths),
            "bytes": sum(row["bytes"] for row in dtypes.values()),
            "file_bytes": sum(path.stat().st_size for path in paths),
            "dtypes": dict(sorted(dtypes.items())),
        }


def open_folder(folder: Path) -> Opened:
    """Checks a published folder from its config.json and headers. Raises InputError, one line with file and tensor."""
    document = read_json(folder / CONFIG)
    everything = shards.read_folder(folder)
    with _in(folder):
        layout = Layout.read(document, everything)
        found = dict(layout.select(everything))
    used = layout.check({name: (f"{stored.file}: ", stored.shape) for name, stored in found.items()}, f"{folder}: ")
    stored = {name: found[holder] for name, holder in used.items()}
    name = layout.rename(EMBEDDING)
    embedding = stored[name]
    if embedding.dtype not in FLOATS:
        raise InputError(f"{embedding.file}: tensor {name!r} is {embedding}; expected one of {', '.join(FLOATS)}")
    layout.model.to(DTYPES[embedding.dtype])
    for entry in layout.entries:
        _check_dtypes(layout, entry, stored, embedding.dtype)
    head = found.get(layout.rename(HEAD)) if layout.config.tie_word_embeddings else None
    if head is not None and head != embedding:
        if (head.dtype, head.shape) != (embedding.dtype, embedding.shape):
            raise InputError(f"{head.file}: tensor {HEAD!r} is {head}; expected {embedding}, as the embedding it is tied to")
        stored[HEAD] = head
    return Opened(folder, layout, stored, everything)


def _check_dtypes(layout: Layout, entry: Entry, stored: Mapping[str, Stored], dtype: str) -> None:
    """Tensors have the embedding's dtype; what we keep in float32 may come in any, weights of norms in float32."""
    ours = [layout.model.get_parameter(name) for name in entry.ours]
    allowed = [CODES[parameter.dtype] for parameter in ours]
    if all(name.endswith(FLOAT32) for name in entry.ours):
        allowed = ["F32", "BF16", "F16", dtype]
    elif layout.config.norm == "rms" and entry.ours[0].endswith("norm.weight"):
        allowed.append("F32")
    for name in entry.published:
        if stored[name].dtype not in allowed:
            expected = " or ".join(dict.fromkeys(allowed))
            raise InputError(
                f"{stored[name].file}: tensor {name!r} is {stored[name]}; expected {expected}, as the embedding is {dtype}"
            )


def load(folder: Path, cache_bytes: int | None = None) -> tuple[Model, Tokenizer | None]:
    """The model and the tokenizer of a published folder. Weights keep the dtype of the file; packed experts stay packed.

    With `cache_bytes` the routed experts stay on disk (offload.py), that many bytes of them in memory.
    """
    opened = open_folder(folder)
    layout, stored = opened.layout, opened.stored
    tokenizer = read_tokenizer(folder, layout.config.vocab_size)
    progress = Transfer(f"reading {folder.name}", sum(each.num_bytes for each in stored.values()))
    tensors: dict[str, Tensor] = {}
    on_disk = {} if cache_bytes is None else offload.place(layout.model, layout.config, cache_bytes)
    for entry in layout.entries:
        module, _, part = entry.ours[0].rpartition(".")
        if module in on_disk:
            on_disk[module].add_source(part, entry.published, stored)
            continue
        parts = [shards.read(name, stored[name]) for name in entry.published]
        with _in(folder):
            for name, tensor in layout.load(entry, parts):
                kept = name.endswith(FLOAT32) and tensor.dtype in (torch.float16, torch.bfloat16)
                tensors[name] = tensor.float() if kept else tensor
        progress.add(sum(stored[name].num_bytes for name in entry.published))
    if layout.config.tie_word_embeddings and HEAD in stored:
        with _in(folder):
            check_tied(tensors[EMBEDDING], shards.read(HEAD, stored[HEAD]))
    fill(layout.model, tensors)
    return layout.model, tokenizer


def read_tokenizer(folder: Path, vocab_size: int) -> Tokenizer | None:
    """The tokenizer beside a model, None where there is none. Raises InputError for one larger than the vocabulary."""
    source = next((name for name in TOKENIZER_FILES if (folder / name).is_file()), None)
    if source is None:
        return None
    tokenizer = tiktoken.read(folder) if source == tiktoken.FILE else Tokenizer.from_file(folder)
    if tokenizer.vocab_size > vocab_size:
        raise InputError(
            f"{folder / source}: ids reach {tokenizer.vocab_size - 1}; the model's vocabulary has "
            f"{vocab_size} entries; use the tokenizer it was trained with"
        )
    return tokenizer


@contextlib.contextmanager
def _in(folder: Path) -> Iterator[None]:
    """Puts the folder in front of errors that speak of config.json or of a tensor only."""
    try:
        yield
    except InputError as error:
        text = str(error)
        raise InputError(f"{folder / text}" if text.startswith(CONFIG) else f"{folder}: {text}") from None


# ------------------------------------------------------------------------------------------------------------------ writing


def save(model: Model, folder: Path, tokenizer: Tokenizer | None = None, dtype: str | None = None) -> None:
    """Writes a published folder under a temporary name, reads it back, compares, and gives it its name.

    `dtype` is one of TARGETS, None for the model's own; what the model keeps in float32 stays there. Raises InputError,
    with nothing written, for a model that no published layout holds, a folder that is not empty, and other mistakes.
    """
    folder = folder.absolute()
    check_absent(folder)
    tensors = Outgoing(model, dtype)
    with staged(folder) as staging:
        tensors.write(staging)
        text = json.dumps(tensors.document(), indent=2, ensure_ascii=False, allow_nan=False)
        (staging / CONFIG).write_text(text + "\n", encoding="utf-8")
        if tokenizer is not None:
            tokenizer.save(staging)
        flush_all(staging)
        tensors.compare(staging)
        if folder.exists():
            folder.rmdir()
        staging.rename(folder)


def check_absent(target: Path) -> None:
    """Refuses a target that is there, unless it is an empty folder."""
    inside = next((parent for parent in target.absolute().parents if parent.is_file()), None)
    if inside is not None or target.is_file() or (target.exists() and any(target.iterdir())):
        raise InputError(f"{inside or target}: it is there already; give a name that is free")


class Outgoing:
    """A model's tensors as they will be published, made one entry at a time."""

    def __init__(self, model: Model, dtype: str | None) -> None:
        if dtype is not None and dtype not in TARGETS:
            raise InputError(f"dtype is {dtype!r}; a folder can hold {', '.join(TARGETS)}")
        self.source = dict(model.named_parameters())
        self.dtype = None if dtype is None else TARGETS[dtype]
        is_packed = any(name.endswith("_packed") for name in self.source)
        if dtype == "mxfp4" and "moe" not in model.config.mlps:
            raise InputError("dtype is 'mxfp4', which is for experts; this model has none")
        if is_packed and dtype not in (None, "mxfp4"):
            raise InputError(f"dtype is {dtype!r}, but the experts are packed in four bits; only 'mxfp4' keeps them")
        self.layout = Layout.of(model.config, is_packed or dtype == "mxfp4")
        if dtype == "mxfp4" and not self.layout.family.quantization:
            raise InputError(f"dtype is 'mxfp4'; a published {self.layout.family.name} model has no packed experts")
        self.checks: dict[str, int] = {}  # CRC-32 of what was written
        self._packed: dict[str, Sequence[Tensor]] = {}

    def document(self) -> dict[str, Any]:
        """config.json."""
        return self.layout.document(str(self.target(EMBEDDING)))

    def target(self, name: str) -> torch.dtype:
        """The dtype that our tensor `name` goes out with."""
        if name not in self.source:
            return torch.uint8  # a part of a matrix that is packed on its way
        dtype = self.source[name].dtype
        exact = name.endswith(FLOAT32) or not dtype.is_floating_point
        return dtype if self.dtype is None or exact else self.dtype

    def ours(self, name: str) -> Tensor:
        """Our tensor `name`, in that dtype."""
        if name in self.source:
            return self.source[name].detach().to(self.target(name))
        matrix, _, part = name.rpartition("_")
        if matrix not in self._packed:  # its two parts are asked for one after the other
            self._packed = {matrix: mxfp4_encode(self.source[matrix].detach())}
        return self._packed[matrix][("packed", "scale").index(part)]

    def norm(self, name: str, entry: Entry) -> Tensor:
        """A norm published as w - 1: in the embedding's dtype where that is exact, else with the digits it needs."""
        (offset,) = entry.dump(wide(self.source[name].detach()))
        narrow = offset.to(self.target(EMBEDDING))
        return narrow if torch.equal(narrow.to(offset.dtype), offset) else offset

    def published(self, real: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Every tensor under its published name; or, not `real`, on the meta device. Raises InputError for NaN and infinity."""
        for entry in self.layout.entries:
            first = entry.ours[0]
            dumped: Sequence[Tensor]
            if self.layout.family.wide_norms and first.endswith("norm.weight") and ".o_norm." not in first:
                dumped = (self.norm(first, entry),)
            elif real:
                dumped = entry.dump(*(self.ours(name) for name in entry.ours))
            else:
                dumped = entry.dump(*(self.layout.ours[name].to(self.target(name)) for name in entry.ours))
            for name, tensor in zip(entry.published, dumped, strict=True):
                if not tensor.is_meta:
                    shards.check_finite("model", name, tensor)
                yield self.layout.prefix + name, tensor

    def write(self, folder: Path) -> None:
        """Writes the safetensors files, and an index where there are several."""
        shapes = {name: (CODES[x.dtype], tuple(x.shape)) for name, x in self.published(real=False)}
        tensors = self.published()
        sizes = {name: SIZES[dtype] * prod(shape) for name, (dtype, shape) in shapes.items()}
        progress = Transfer("writing", sum(sizes.values()))
        parts = list(shards.batches(sizes, FILE_BYTES))
        count = len(parts)
        files = [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)] if count > 1 else [WEIGHTS]
        for file, names in zip(files, parts, strict=True):
            chosen = islice(tensors, len(names))
            self.checks |= shards.write_file(folder / file, chosen, {name: shapes[name] for name in names}, progress)
        if count > 1:
            weight_map = {name: file for file, names in zip(files, parts, strict=True) for name in names}
            index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
            (folder / shards.INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def compare(self, folder: Path) -> None:
        """Reads everything back and compares it with what was written."""
        opened = open_folder(folder)
        progress = Transfer("reading back", sum(stored.num_bytes for stored in opened.everything.values()))
        for name, stored in opened.everything.items():
            if crc32(shards.raw(name, stored).data) != self.checks[name]:
                raise InputError(f"{stored.file}: tensor {name!r} was written and reads back otherwise; check the disk")
            progress.add(stored.num_bytes)
