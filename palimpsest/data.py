"""Text files to memory-mapped token files, and token files to batches.

    token_file = prepare([Path("books/")], Path("books.tokens"), Tokenizer.bytes())
    batches = Batches(token_file.tokens, batch_size=16, context_length=256, seed=0)
    ids = next(batches)  # int64 [B,T]

A token file is a header, the tokens, zeros up to a multiple of 8 bytes, and the index of each document's first token:

    bytes 0-7    magic b"PALTOKEN"        bytes 24-31  number of tokens
          8-11   format version, 1              32-39  UTF-8 bytes of the source text
         12-15   bytes per token, 2 or 4        40-47  number of documents
         16-23   vocabulary size                48-79  fingerprint of the tokenizer (SHA-256)

All numbers are unsigned and little-endian; document starts take 8 bytes each. Every document ends with the tokenizer's
end-of-text id, if it has one.
"""

from __future__ import annotations

import codecs
import json
import os
import re
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from palimpsest.config import InputError

if TYPE_CHECKING:
    from palimpsest.tokenizer import Tokenizer

SUFFIXES = (".txt", ".md", ".jsonl", ".parquet", ".py")  # what a folder is searched for
TEXT_COLUMN = re.compile(r"(large_)?(string|binary)(_view)?|dictionary<values=(large_)?string\b.*")  # pyarrow's names
MAGIC = b"PALTOKEN"
VERSION = 1
HEADER = struct.Struct("<8sIIQQQQ32s")
PIECE_BYTES = 1 << 20  # text is read, and encoded, in pieces of about this size
# Where a long text is cut. A single newline between two words is a token boundary in every byte-level BPE in use, and
# so, in GPT-2's, is the start of any whitespace: cutting there leaves the tokens unchanged.
CUT_TAIL_CHARS = 1 << 16
AFTER_NEWLINE = re.compile(r"(?<=\S)\n(?=[^\W_])")
BEFORE_SPACE = re.compile(r"(?<=\S)(?=[ \n])")

Errors = Literal["strict", "replace"]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class TokenFile:
    """A token file on disk, memory-mapped: opening it reads nothing but the header."""

    path: Path
    tokens: np.memmap  # uint16 or uint32 [num_tokens]
    document_starts: np.memmap  # uint64 [num_documents], the index of each document's first token
    vocab_size: int
    num_tokens: int
    num_bytes: int  # of the source text in UTF-8, without end-of-text tokens
    fingerprint: str  # Tokenizer.fingerprint of the tokenizer that made it

    @classmethod
    def open(cls, path: str | Path) -> TokenFile:
        """Map an existing token file. Raises `InputError` when it is absent, truncated or something else."""
        path = Path(path)
        remedy = "make it again with prepare"
        with _open(path) as file:
            header = file.read(HEADER.size)
            size = os.fstat(file.fileno()).st_size
        if header[: len(MAGIC)] != MAGIC or len(header) < HEADER.size:
            raise InputError(f"{path}: not a token file (it begins with {header[:8]!r}, {size} bytes); {remedy}")
        _, version, width, vocab_size, num_tokens, num_bytes, num_documents, fingerprint = HEADER.unpack(header)
        if version != VERSION:
            raise InputError(f"{path}: token file version {version}, this program reads {VERSION}; {remedy}")
        if width not in (2, 4) or not num_tokens or not num_documents:
            raise InputError(f"{path}: the header is damaged; {remedy}")
        tokens_end = HEADER.size + width * num_tokens
        starts_at = tokens_end + -tokens_end % 8
        if size != starts_at + 8 * num_documents:
            raise InputError(f"{path}: {size} bytes, the header asks for {starts_at + 8 * num_documents}; {remedy}")
        tokens = np.memmap(path, f"<u{width}", "r", HEADER.size, (num_tokens,))
        starts = np.memmap(path, "<u8", "r", starts_at, (num_documents,))
        return cls(path, tokens, starts, vocab_size, num_tokens, num_bytes, fingerprint.hex())

    def check_vocab(self, model_vocab_size: int) -> None:
        """Raise `InputError` when a model with this vocabulary size has no row for some of the file's ids."""
        if self.vocab_size > model_vocab_size:
            found = f"made with a vocabulary of {self.vocab_size}, the model's vocab_size is {model_vocab_size}"
            raise InputError(f"{self.path}: {found}; prepare the text with the model's own tokenizer")


def prepare(
    inputs: Sequence[Path], out: Path, tokenizer: Tokenizer, errors: Errors = "strict", progress: Progress | None = None
) -> TokenFile:
    """Encode the documents of `inputs` (see `read_text`) into the token file `out`; memory use does not grow with them.

    `progress` is called now and then with the bytes of text and the tokens so far. `out` appears once it is complete.
    Raises `InputError`.
    """
    out = Path(out)
    files = _files(inputs)
    if out.is_dir():
        raise InputError(f"{out}: the output is a folder; give a file name")
    if out.exists() and any(path.samefile(out) for _, paths in files for path in paths):
        raise InputError(f"{out}: the output is also an input; give another name")
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "wb") as file, tempfile.TemporaryFile(dir=out.parent) as starts:
                writer = _Writer(file, starts, tokenizer, progress)
                for _, text, is_first in _pieces(files, errors):
                    writer.add(text, is_first)
                writer.finish()
            os.replace(temporary, out)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"{out}: cannot be written ({error.strerror or error}); give another place") from None
    return TokenFile.open(out)


class _Writer:
    """Collects documents, encodes them many at a time and appends them to an open file."""

    def __init__(self, file: IO[bytes], starts: IO[bytes], tokenizer: Tokenizer, progress: Progress | None) -> None:
        self._file, self._starts, self._tokenizer, self._progress = file, starts, tokenizer, progress
        self._dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
        self._end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
        self._pending: list[tuple[str, bool]] = []
        self._pending_size = 0
        self.num_bytes = self.num_tokens = self._num_documents = 0
        file.write(bytes(HEADER.size))

    def add(self, text: str, is_first: bool) -> None:
        """Append a document, or a further piece of the last one."""
        self._pending.append((text, is_first))
        self._pending_size += len(text) + 64  # the 64 keeps many tiny documents from piling up
        if self._pending_size >= PIECE_BYTES:
            self._flush()

    def _flush(self, end: Sequence[int] = ()) -> None:
        ids: list[int] = []
        starts: list[int] = []
        encoded = self._tokenizer.encode_batch([text for text, _ in self._pending])
        for (text, is_first), tokens in zip(self._pending, encoded, strict=True):
            if is_first:
                if self._num_documents + len(starts):
                    ids += self._end
                starts.append(self.num_tokens + len(ids))
            ids += tokens
            self.num_bytes += len(text.encode())
        ids += end
        self._file.write(np.asarray(ids, self._dtype).tobytes())
        self.num_tokens += len(ids)
        self._starts.write(np.asarray(starts, "<u8").tobytes())
        self._num_documents += len(starts)
        self._pending, self._pending_size = [], 0
        if self._progress:
            self._progress(self.num_bytes, self.num_tokens)

    def finish(self) -> None:
        """Close the last document, copy the document starts behind the tokens, and fill in the header."""
        self._flush(self._end)
        self._file.write(bytes(-self._file.tell() % 8))
        self._starts.seek(0)
        while chunk := self._starts.read(PIECE_BYTES):
            self._file.write(chunk)
        counts = (self._tokenizer.vocab_size, self.num_tokens, self.num_bytes, self._num_documents)
        fingerprint = bytes.fromhex(self._tokenizer.fingerprint)
        self._file.seek(0)
        self._file.write(HEADER.pack(MAGIC, VERSION, self._dtype.itemsize, *counts, fingerprint))


def read_text(inputs: Sequence[Path], errors: Errors = "strict") -> Iterator[tuple[str, str]]:
    """The documents of `inputs` in order, as (name, text).

    A file ending in .jsonl holds one document a line in field "text", one ending in .parquet one a row in column
    "text"; any other file is one document. A folder stands for its .txt, .md, .jsonl, .parquet and .py files, at any
    depth, in sorted order, without hidden ones. Empty documents are left out, as is a byte order mark.

    A text file above `PIECE_BYTES` comes as several items of the same name that join to the whole. Bytes that are not
    UTF-8 become U+FFFD with `errors="replace"`. Raises `InputError` for them otherwise, for a missing file or package,
    malformed JSON, a folder without usable files, and an input without any text.
    """
    for name, text, _ in _pieces(_files(inputs), errors):
        yield name, text


def _files(inputs: Sequence[Path]) -> list[tuple[Path, list[Path]]]:
    """(input, its files in reading order) for each input."""
    if not inputs:
        raise InputError("inputs: no file or folder given; name at least one")
    groups = []
    for given in map(Path, inputs):
        if given.is_dir():
            paths = [path for path in sorted(given.rglob("*")) if _is_usable(path, given)]
            if not paths:
                raise InputError(f"{given}: no text files in this folder; it needs some of {', '.join(SUFFIXES)}")
        elif given.is_file():
            paths = [given]
        else:
            raise InputError(f"{given}: no such file or folder; check the path")
        groups.append((given, paths))
    return groups


def _is_usable(path: Path, folder: Path) -> bool:
    is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
    return path.suffix.lower() in SUFFIXES and not is_hidden and path.is_file()


def _pieces(groups: list[tuple[Path, list[Path]]], errors: Errors) -> Iterator[tuple[str, str, bool]]:
    """(name, text, whether a document begins here) with non-empty text."""
    if errors not in ("strict", "replace"):
        raise InputError(f"errors is {errors!r}; it must be 'strict' or 'replace'")
    readers = {".jsonl": _jsonl_pieces, ".parquet": _parquet_pieces}
    for given, paths in groups:
        is_empty = True
        for path in paths:
            for piece in readers.get(path.suffix.lower(), _text_pieces)(path, errors):
                if piece[1]:
                    is_empty = False
                    yield piece
        if is_empty:
            raise InputError(f"{given}: there is no text in it; leave it out or fill it")


def _text_pieces(path: Path, errors: Errors) -> Iterator[tuple[str, str, bool]]:
    decoder = codecs.getincrementaldecoder("utf-8")(errors)
    offset, carried = 0, ""
    with _open(path) as file:
        while True:
            chunk = file.read(PIECE_BYTES)
            held_back = len(decoder.getstate()[0])
            try:
                text = decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                raise _not_utf8(path, offset - held_back + error.start) from None
            text = carried + (text.removeprefix("\ufeff") if offset == 0 else text)
            cut = _cut(text) if len(chunk) == PIECE_BYTES else len(text)
            yield str(path), text[:cut], offset == 0
            carried = text[cut:]
            offset += len(chunk)
            if not chunk:
                return


def _cut(text: str) -> int:
    """Where to cut a text that goes on, near its end and where possible between two tokens."""
    for pattern in (AFTER_NEWLINE, BEFORE_SPACE):
        ends = [match.end() for match in pattern.finditer(text, max(0, len(text) - CUT_TAIL_CHARS))]
        if ends:
            return ends[-1]
    return len(text)


def _jsonl_pieces(path: Path, errors: Errors) -> Iterator[tuple[str, str, bool]]:
    offset = 0
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            name = f"{path}, line {number}"
            try:
                content = line.decode("utf-8", errors).removeprefix("\ufeff")
            except UnicodeDecodeError as error:
                raise _not_utf8(path, offset + error.start) from None
            offset += len(line)
            if not content.strip():
                continue
            try:
                row = json.loads(content)
            except (ValueError, RecursionError) as error:
                raise InputError(f"{name}: not valid JSON ({error}); correct or remove the line") from None
            if not isinstance(row, dict) or not isinstance(row.get("text"), str):
                found = sorted(row)[:8] if isinstance(row, dict) else type(row).__name__
                raise InputError(f'{name}: needs an object with a string in "text", found {found}; correct the line')
            try:  # escapes in JSON can spell half a surrogate pair, which no UTF-8 text contains
                text = row["text"].encode("utf-16", "surrogatepass").decode("utf-16", errors)
            except UnicodeDecodeError:
                what = '"text" escapes half of a surrogate pair'
                raise InputError(f"{name}: {what}; correct it, or replace it (encoding_errors = 'replace')") from None
            yield name, text, True


def _parquet_pieces(path: Path, errors: Errors) -> Iterator[tuple[str, str, bool]]:
    try:
        import pyarrow as pa  # pyright: ignore[reportMissingImports]
        import pyarrow.parquet as pq  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise InputError(f"{path}: reading parquet needs the package pyarrow; pip install pyarrow") from None
    number = 0
    try:
        file = pq.ParquetFile(path)
        columns = {field.name: str(field.type) for field in file.schema_arrow}
        if not TEXT_COLUMN.fullmatch(columns.get("text", "")):
            raise InputError(f'{path}: needs a column "text" of strings, found {columns}; rename the column')
        for batch in file.iter_batches(batch_size=256, columns=["text"]):
            for value in batch.column(0).cast(pa.large_binary()).to_pylist():  # pyarrow itself does not check UTF-8
                number += 1
                if value is None:
                    raise InputError(f'{path}, row {number}: "text" is null; remove the row')
                yield f"{path}, row {number}", value.decode("utf-8", errors), True
    except UnicodeDecodeError as error:
        raise _not_utf8(f"{path}, row {number}", error.start) from None
    except (pa.ArrowException, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(f"{path}: cannot be read as parquet ({reason}); check the file") from None


def _open(path: Path) -> IO[bytes]:
    try:
        return open(path, "rb")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check the path") from None


def _not_utf8(where: Path | str, offset: int) -> InputError:
    return InputError(f"{where}: not UTF-8 at byte {offset}; convert it, or replace such bytes (encoding_errors = 'replace')")


class Batches:
    """Endless batches of windows of `context_length` tokens, int64 [B,T]; labels are the ids themselves.

    Windows do not overlap; a shorter rest at the end is left out. Each epoch takes every window once, in an order drawn
    from the seed and the epoch; a batch at the end of an epoch is filled from the next one.
    """

    def __init__(self, tokens: np.ndarray | Tensor, batch_size: int, context_length: int, seed: int) -> None:
        if batch_size < 1 or context_length < 1:
            raise InputError(f"batch_size is {batch_size}, context_length {context_length}; each must be at least 1")
        if len(tokens) < context_length:
            remedy = f"give more text or a context_length below {context_length}"
            raise InputError(f"tokens: there are {len(tokens)}, fewer than one window; {remedy}")
        self._tokens = tokens.numpy() if isinstance(tokens, Tensor) else tokens
        self._batch_size, self._context_length, self._seed = batch_size, context_length, seed
        self.num_windows = len(tokens) // context_length  # per epoch
        self._start(0, 0)

    def _start(self, epoch: int, position: int) -> None:
        self._epoch, self._position = epoch, position
        self._order = np.random.default_rng([self._seed, epoch]).permutation(self.num_windows)

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Tensor:
        ids = np.empty((self._batch_size, self._context_length), np.int64)
        for row in ids:
            if self._position == self.num_windows:
                self._start(self._epoch + 1, 0)
            first = int(self._order[self._position]) * self._context_length
            row[:] = self._tokens[first : first + self._context_length]
            self._position += 1
        return torch.from_numpy(ids)

    def state_dict(self) -> dict[str, int]:
        """The place in the data: the epoch, the windows taken in it, and what they were drawn from."""
        place = {"epoch": self._epoch, "position": self._position}
        return place | {"num_windows": self.num_windows, "seed": self._seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue exactly where `state` was taken. Raises `InputError` when that was with other data or another seed."""
        for name, own in (("num_windows", self.num_windows), ("seed", self._seed)):
            if state.get(name) != own:
                was = f"{name} was {state.get(name)} when saved and is {own} now"
                raise InputError(f"batches: {was}; resume with the same data, context_length and seed")
        self._start(state["epoch"], state["position"])


def split_text(text: str, validation_share: float = 0.1) -> tuple[str, str]:
    """The first part of `text` for training and the last `validation_share` of its characters for validation.

    They join to `text`, neither is empty, and the cut follows the newline nearest to the wanted place, or lies at that
    place itself when no newline is within half the validation part. Raises `InputError`.
    """
    if not 0 < validation_share < 1:
        raise InputError(f"validation_share is {validation_share}; it must be between 0 and 1")
    if len(text) < 2:
        raise InputError(f"text: {len(text)} characters cannot be split; give more text")
    wanted = min(max(round(len(text) * (1 - validation_share)), 1), len(text) - 1)
    reach = min(wanted, len(text) - wanted) // 2
    before = text.rfind("\n", wanted - reach, wanted) + 1
    after = text.find("\n", wanted, wanted + reach) + 1
    cut = min((place for place in (before, after) if place), key=lambda place: abs(place - wanted), default=wanted)
    return text[:cut], text[cut:]


def unigram_bits_per_byte(data: bytes) -> float:
    """Entropy of the single bytes of `data`, in bits per byte from 0 to 8: what a model without context reaches."""
    if not data:
        raise InputError("data: it is empty; give some bytes")
    share = np.bincount(np.frombuffer(data, np.uint8), minlength=256) / len(data)
    share = share[share > 0]
    return float(-(share * np.log2(share)).sum()) + 0.0
