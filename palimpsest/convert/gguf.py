"""GGUF, one file with everything: metadata (numbers, texts, lists by name), a table of tensors, their data.

"GGUF", version, counts | metadata | name, axes (innermost first), type, offset of each tensor | data
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from palimpsest.config import InputError
from palimpsest.convert import ggml
from palimpsest.progress import Transfer

MAGIC = b"GGUF"
ALIGNMENT = 32
# Codes of metadata values and their struct formats; 8 is text, 9 a list.
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, LIST, UINT32, INT32, FLOAT32, BOOL = 8, 9, 4, 5, 6, 7


class Stored(NamedTuple):
    """A tensor in the file: its first byte, its type's name, its shape, outermost axis first."""

    offset: int
    kind: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        kind = ggml.KINDS[ggml.NUMBERS[self.kind]]
        return prod(self.shape) // kind.values * kind.bytes

    def __str__(self) -> str:
        return f"{self.kind} {list(self.shape)}"


@dataclass(frozen=True)
class File:
    """A GGUF file whose table was read; of its tensors none yet."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Stored]

    def listing(self) -> dict[str, Any]:
        """Tensors, bytes of tensors and of the file, and tensors and bytes of each type."""
        kinds: dict[str, dict[str, int]] = {}
        for stored in self.tensors.values():
            row = kinds.setdefault(stored.kind, {"tensors": 0, "bytes": 0})
            row["tensors"] += 1
            row["bytes"] += stored.num_bytes
        return {
            "family": self.metadata.get("general.architecture"),
            "tensors": len(self.tensors),
            "files": 1,
            "bytes": sum(row["bytes"] for row in kinds.values()),
            "file_bytes": self.path.stat().st_size,
            "dtypes": dict(sorted(kinds.items())),
        }

    def raw(self, name: str) -> Tensor:
        """A tensor's bytes, uint8 [...,bytes of a row]."""
        stored = self.tensors[name]
        data = torch.from_numpy(np.fromfile(self.path, np.uint8, stored.num_bytes, offset=stored.offset))
        return data.view(*stored.shape[:-1], -1)

    def read(self, name: str) -> Tensor:
        """A tensor, in float32 where the file has blocks. Raises InputError for NaN and infinity."""
        tensor = ggml.decode(self.raw(name), self.tensors[name].kind)
        if not bool(tensor.isfinite().all()):
            raise InputError(f"{self.path}: tensor {name!r} holds NaN or infinity; expected finite numbers; use another copy")
        return tensor


class _Cursor:
    """Reads the table from front to back."""

    def __init__(self, path: Path) -> None:
        self.path, self.at = path, 0
        self.data = memoryview(np.memmap(path, np.uint8, "r"))  # type: ignore[arg-type]

    def number(self, form: str) -> Any:
        size = struct.calcsize("<" + form)
        (value,) = struct.unpack("<" + form, self.bytes(size))
        return value

    def bytes(self, size: int) -> bytes:
        if self.at + size > len(self.data):
            raise _damaged(self.path, f"its table goes on at byte {self.at + size}, the file ends at {len(self.data)}")
        self.at += size
        return bytes(self.data[self.at - size : self.at])

    def text(self) -> str:
        try:
            return self.bytes(self.number("Q")).decode()
        except UnicodeDecodeError:
            raise _damaged(self.path, f"a text before byte {self.at} is not UTF-8") from None

    def value(self, code: int) -> Any:
        if code == TEXT:
            return self.text()
        if code == LIST:
            inner, count = self.number("I"), self.number("Q")
            if inner in NUMBERS:
                size = struct.calcsize("<" + NUMBERS[inner])
                return list(struct.unpack(f"<{count}{NUMBERS[inner]}", self.bytes(count * size)))
            return [self.value(inner) for _ in range(count)]
        if code not in NUMBERS:
            raise _damaged(self.path, f"a value before byte {self.at} has the unknown type {code}")
        return self.number(NUMBERS[code])


def _damaged(path: Path, what: str) -> InputError:
    return InputError(f"{path}: not a whole GGUF file ({what}); it was cut short or damaged: copy it again")


def open_file(path: Path) -> File:
    """Reads metadata and the table of tensors. Raises InputError for a file that is not whole or contradicts itself."""
    try:
        if path.stat().st_size < 24:
            raise _damaged(path, f"it has {path.stat().st_size} bytes")
        cursor = _Cursor(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check the path") from None
    magic, version = cursor.bytes(4), cursor.number("I")
    if magic != MAGIC or version not in (2, 3):
        raise InputError(f"{path}: begins with {magic!r}, version {version}; expected {MAGIC!r}, version 2 or 3")
    tensors, entries = cursor.number("Q"), cursor.number("Q")
    metadata: dict[str, Any] = {}
    for _ in range(entries):
        key = cursor.text()
        if key in metadata:
            raise _damaged(path, f"{key!r} occurs twice")
        metadata[key] = cursor.value(cursor.number("I"))
    table = list(_table(cursor, tensors))
    start = -(-cursor.at // metadata.get("general.alignment", ALIGNMENT)) * metadata.get("general.alignment", ALIGNMENT)
    found, end = {}, start
    for name, stored in sorted(table, key=lambda item: item[1].offset):
        stored = stored._replace(offset=start + stored.offset)
        if name in found:
            raise _damaged(path, f"tensor {name!r} occurs twice")
        if stored.offset < end or stored.offset + stored.num_bytes > len(cursor.data):
            last = stored.offset + stored.num_bytes
            raise _damaged(path, f"tensor {name!r} is {stored} at bytes {stored.offset} to {last} of {len(cursor.data)}")
        found[name], end = stored, stored.offset + stored.num_bytes
    return File(path, metadata, found)


def _table(cursor: _Cursor, count: int) -> Iterator[tuple[str, Stored]]:
    for _ in range(count):
        name = cursor.text()
        shape = tuple(cursor.number("Q") for _ in range(cursor.number("I")))[::-1]
        kind = ggml.KINDS.get(number := cursor.number("I"))
        if kind is None or not shape or shape[-1] % kind.values:
            known = ", ".join(kind.name for kind in ggml.KINDS.values())
            what = f"type {number}" if kind is None else f"{kind.name} {list(shape)}"
            raise InputError(f"{cursor.path}: tensor {name!r} has {what}; expected whole blocks of one of {known}")
        yield name, Stored(cursor.number("Q"), kind.name, shape)


def write_file(
    path: Path,
    metadata: Mapping[str, tuple[int, Any]],
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    data: Iterator[Tensor],
) -> None:
    """Writes a file: metadata as (code, value), a list's value as (code, values); (type, shape) of each tensor, its bytes."""
    head = bytearray(MAGIC + struct.pack("<IQQ", 3, len(tensors), len(metadata)))
    for key, (code, value) in metadata.items():
        head += _text(key) + struct.pack("<I", code) + _value(code, value)
    offset = 0
    sizes = [Stored(0, kind, shape).num_bytes for kind, shape in tensors.values()]
    for (name, (kind, shape)), size in zip(tensors.items(), sizes, strict=True):
        axes = struct.pack(f"<{len(shape)}Q", *reversed(shape))
        head += _text(name) + struct.pack("<I", len(shape)) + axes + struct.pack("<IQ", ggml.NUMBERS[kind], offset)
        offset += size + -size % ALIGNMENT
    progress = Transfer("writing", sum(sizes))
    with path.open("wb") as file:
        file.write(head + bytes(-len(head) % ALIGNMENT))
        for size, each in zip(sizes, data, strict=True):
            assert each.numel() == size
            file.write(each.contiguous().flatten().numpy().data)
            file.write(bytes(-size % ALIGNMENT))
            progress.add(size)
        file.flush()
        os.fsync(file.fileno())


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(code: int, value: Any) -> bytes:
    if code == TEXT:
        return _text(value)
    if code == LIST:
        inner, values = value
        return struct.pack("<IQ", inner, len(values)) + b"".join(_value(inner, each) for each in values)
    return struct.pack("<" + NUMBERS[code], value)
