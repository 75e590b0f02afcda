"""Tensors in safetensors files: one file, or several with an index. Headers are read and checked before any tensor.

A file is a header's length (8 bytes, little-endian), the header (JSON: name -> dtype, shape, first and last byte), the data.
The files of a folder are `model.safetensors`, or those that `model.safetensors.index.json` names for each tensor.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from palimpsest.config import InputError
from palimpsest.progress import Transfer

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "U8": torch.uint8},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "BOOL": torch.bool},
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
SIZES = {code: dtype.itemsize for code, dtype in DTYPES.items()}
SIZES |= {"U16": 2, "U32": 4, "U64": 8, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}  # known, not read
HEADER_LIMIT = 100_000_000  # bytes; the format's own


class Stored(NamedTuple):
    """Where a tensor lies: its file, its first byte there, its dtype's code and its shape."""

    file: Path
    offset: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return SIZES[self.dtype] * prod(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors of one file, none of them read. Raises InputError for a file that is not whole or contradicts itself."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = 8 + int.from_bytes(file.read(8), "little")
            if size < 8 or start > size or start > HEADER_LIMIT:
                raise _damaged(path, f"its header ends at byte {start}, the file has {size}")
            entries = json.loads(file.read(start - 8), object_pairs_hook=_distinct)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); the folder is incomplete") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise _damaged(path, f"its header is not valid JSON: {error}") from None
    if not isinstance(entries, dict):
        raise _damaged(path, f"its header is a {type(entries).__name__}, not a table of tensors")
    entries.pop("__metadata__", None)
    found, end = {}, 0
    for name, (first, last, dtype, shape) in sorted(((n, _entry(path, n, e)) for n, e in entries.items()), key=_place):
        found[name] = stored = Stored(path, start + first, dtype, shape)
        if first != end or last - first != stored.num_bytes:
            wanted = f"expected {end} to {end + stored.num_bytes}"
            raise _damaged(path, f"tensor {name!r} is {stored} at bytes {first} to {last}; {wanted}")
        end = last
    if start + end != size:
        raise _damaged(path, f"the tensors end at byte {start + end}, the file at {size}")
    return found


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} occurs twice")
    return values


def _entry(path: Path, name: str, entry: Any) -> tuple[int, int, str, tuple[int, ...]]:
    """(first byte, last byte, dtype, shape) of a header's entry."""
    try:
        (first, last), dtype, shape = entry["data_offsets"], entry["dtype"], tuple(entry["shape"])
        if all(type(number) is int and number >= 0 for number in (first, last, *shape)) and dtype in SIZES:
            return first, last, dtype, shape
    except (KeyError, TypeError, ValueError):
        pass
    raise _damaged(path, f"tensor {name!r} is described as {str(entry)[:100]}; expected a known dtype, a shape and two offsets")


def _place(item: tuple[str, tuple[int, int, str, tuple[int, ...]]]) -> tuple[int, int]:
    return item[1][:2]


def _damaged(path: Path, what: str) -> InputError:
    return InputError(f"{path}: not a whole safetensors file ({what}); it was cut short or damaged: copy it again")


def read_folder(folder: Path) -> dict[str, Stored]:
    """The tensors of every file of a folder, none of them read.

    Raises InputError for files that are missing or damaged, for a path that leads out of the folder, and for a tensor that
    is in no file, in two, or in another than the index says.
    """
    if not (folder / INDEX).exists():
        if not (folder / WEIGHTS).exists():
            raise InputError(f"{folder / WEIGHTS}: cannot be read (no such file); {_instead(folder)}")
        return read_header(folder / WEIGHTS)
    weight_map = _weight_map(folder / INDEX)
    files = sorted(set(weight_map.values()))
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        names = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise InputError(
            f"{folder / INDEX}: {names} not found; {len(files) - len(missing)} of {len(files)} files are here; "
            "the download is incomplete"
        )
    found: dict[str, Stored] = {}
    for file in files:
        for name, stored in read_header(folder / file).items():
            if name in found:
                raise InputError(f"{folder / file}: tensor {name!r} is also in {found[name].file.name}; expected it once")
            if weight_map.get(name) != file:
                where = f"in {weight_map[name]}" if name in weight_map else "nowhere"
                raise InputError(f"{folder / file}: tensor {name!r} is here; {INDEX} says {where}")
            found[name] = stored
    lost = weight_map.keys() - found.keys()
    if lost:
        name = min(lost)
        where = f"{folder / weight_map[name]}: tensor {name!r}"
        raise InputError(f"{where} is missing ({len(lost)} in all); {INDEX} says it is here")
    return found


def _weight_map(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_distinct)["weight_map"]
        weight_map = dict(weight_map)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{path}: not an index of tensors ({error}); copy it again") from None
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file.endswith(".safetensors") or Path(file).name != file or "\\" in file:
            wanted = "expected the name of a .safetensors file beside it"
            raise InputError(f"{path}: tensor {name!r} is said to be in {file!r}; {wanted}")
    return weight_map


def _instead(folder: Path) -> str:
    """What to do about a folder without tensors that can be read."""
    pickled = next((path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern)), None)
    if pickled is not None:
        return f"{pickled} is a pickle, which can run code and is not read: have it saved as safetensors"
    if any(folder.glob("*.safetensors")):
        return f"the files here need {INDEX}, which says what is in which"
    return "the folder is incomplete"


def raw(name: str, stored: Stored) -> np.ndarray:
    """A tensor's bytes."""
    try:
        data = np.fromfile(stored.file, np.uint8, stored.num_bytes, offset=stored.offset)
    except OSError as error:
        raise InputError(f"{stored.file}: cannot be read ({error.strerror})") from None
    if len(data) < stored.num_bytes:
        raise _damaged(stored.file, f"tensor {name!r} ends early")
    return data


def read(name: str, stored: Stored) -> Tensor:
    """A tensor's values. Raises InputError for NaN, infinity, and a dtype that is not read."""
    return values(name, stored, raw)


def values(name: str, stored: Stored, raw: Callable[[str, Stored], np.ndarray]) -> Tensor:
    """`read`, the bytes from `raw`."""
    if stored.dtype not in DTYPES:
        raise InputError(f"{stored.file}: tensor {name!r} is {stored}; expected one of {', '.join(DTYPES)}")
    tensor = torch.from_numpy(raw(name, stored)).view(DTYPES[stored.dtype]).view(stored.shape)
    check_finite(str(stored.file), name, tensor)
    return tensor


class Scattered:
    """Tensors read here and there in files that stay open, without the system's reading ahead of them."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}
        self._can_advise = hasattr(os, "posix_fadvise")
        weakref.finalize(self, _close, self._open)

    def expect(self, stored: Stored) -> None:
        """Lets the system begin to fetch a tensor's bytes."""
        if self._can_advise:
            os.posix_fadvise(self._descriptor(stored.file), stored.offset, stored.num_bytes, os.POSIX_FADV_WILLNEED)

    def raw(self, name: str, stored: Stored) -> np.ndarray:
        """A tensor's bytes."""
        descriptor = self._descriptor(stored.file)
        if not self._can_advise:
            return raw(name, stored)
        data = np.empty(stored.num_bytes, np.uint8)
        done = 0
        while done < len(data):
            count = os.preadv(descriptor, [data.data[done:]], stored.offset + done)
            if not count:
                raise _damaged(stored.file, f"tensor {name!r} ends early")
            done += count
        return data

    def _descriptor(self, path: Path) -> int:
        if path not in self._open:
            try:
                self._open[path] = os.open(path, os.O_RDONLY)
            except OSError as error:
                raise InputError(f"{path}: cannot be read ({error.strerror})") from None
            if self._can_advise:
                os.posix_fadvise(self._open[path], 0, 0, os.POSIX_FADV_RANDOM)
        return self._open[path]


def _close(descriptors: dict[Path, int]) -> None:
    for descriptor in descriptors.values():
        os.close(descriptor)


def check_finite(where: str, name: str, tensor: Tensor) -> None:
    """Raises InputError for NaN and infinity. Of the scales of MXFP4, 255 is NaN."""
    if tensor.is_floating_point():
        bad = tensor.numel() - int(tensor.isfinite().sum())
    else:
        bad = int((tensor == 255).sum()) if name.endswith(".weight_scale") else 0
    if bad:
        raise InputError(
            f"{where}: tensor {name!r} holds NaN or infinity, {bad} of {tensor.numel()} values; expected finite numbers; "
            "use another copy or an earlier checkpoint"
        )


def write_file(
    path: Path, tensors: Iterable[tuple[str, Tensor]], shapes: Mapping[str, tuple[str, tuple[int, ...]]], progress: Transfer
) -> dict[str, int]:
    """Writes a safetensors file, one tensor at a time; returns the CRC-32 of each.

    `shapes` has (dtype code, shape) of each, in the order of `tensors`.
    """
    checks = {}
    with path.open("wb") as file:
        file.write(header(shapes))
        for name, tensor in tensors:
            assert (CODES[tensor.dtype], tuple(tensor.shape)) == shapes[name], name
            data = tensor.cpu().contiguous().flatten().view(torch.uint8).numpy()
            checks[name] = crc32(data.data)
            file.write(data.data)
            progress.add(data.nbytes)
    return checks


def header(shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> bytes:
    """What stands in front of the data of tensors with these dtype codes and shapes."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in shapes.items():
        start, end = end, end + SIZES[dtype] * prod(shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def batches(sizes: Mapping[str, int], limit: int) -> Iterator[list[str]]:
    """The names in order, cut where their bytes would exceed `limit`; a tensor larger than that stands alone."""
    names: list[str] = []
    total = 0
    for name, size in sizes.items():
        if names and total + size > limit:
            yield names
            names, total = [], 0
        names.append(name)
        total += size
    yield names
