"""Text to token ids and back.

    Tokenizer.bytes()                     one id per UTF-8 byte, and an end-of-text id
    Tokenizer.from_file("folder")         any Hugging Face tokenizer.json, or GPT-2's two files
    Tokenizer.train(texts, 4096)          a byte-level BPE learned from text

Byte-level tokenizers give every string back exactly. The text of a special token is ordinary text unless the caller
says otherwise, so that a document or a chat message cannot end itself or forge a turn.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palimpsest import ends
from palimpsest.config import InputError
from palimpsest.decoding import REPLACEMENT, DecodeStream

if TYPE_CHECKING:
    import tokenizers

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|im_end|>")  # unless a config names it
TEMPLATE = "chat_template.jinja"  # where newer folders have what older ones have in tokenizer_config.json
PIECE_CHARS = 1 << 16  # long texts are encoded in pieces of about this many characters, side by side
# GPT-2's pre-tokenizer always starts a new word where a space or newline follows something else, and looks neither back
# nor further ahead there: a text cut at such a place gives the same ids as the whole.
SAFE_CUT = re.compile(r"\S(?=[ \n])")
LONG_RUN = re.compile(r"\S{64}|\s{64}")


class Tokenizer:
    """Text to ids and back; made by `bytes`, `from_file`, `gpt2` or `train`.

    `definition` is the content of a tokenizer.json, `config` that of the tokenizer_config.json beside it. `vocab_size`
    is the largest id plus one, `eos_id` the end-of-text id, None where there is none; `special_tokens` has ids by text.
    """

    def __init__(self, definition: dict[str, Any], config: dict[str, Any] | None = None) -> None:
        self.definition = definition
        self.config = config or {}
        self._ids = _ids_of_tokens(definition)
        self.special_tokens = {token["content"]: token["id"] for token in definition["added_tokens"] if token["special"]}
        self.vocab_size: int = max(self._ids.values(), default=-1) + 1
        self.eos_id: int | None = self._find_eos()

    @classmethod
    def bytes(cls) -> Tokenizer:
        """Ids 0 to 255 are the bytes of UTF-8, 256 is end of text. Needs the tokenizers package for special tokens only."""
        return cls(_BYTES)

    @classmethod
    def from_file(cls, path: str | Path) -> Tokenizer:
        """Load a tokenizer.json, a folder that holds one, or one with GPT-2's two files under either of their names.

        A tokenizer_config.json beside it names the end-of-text token, a generation_config.json other ends. Truncation,
        padding and BPE dropout that the file may carry are left out: they would alter text silently. Raises `InputError`.
        """
        path = Path(path)
        if path.is_dir():
            folder, path = path, path / "tokenizer.json"
            if not path.is_file():
                vocabs = [folder / name for name in ("vocab.json", "encoder.json") if (folder / name).is_file()]
                merges = [folder / name for name in ("merges.txt", "vocab.bpe") if (folder / name).is_file()]
                if vocabs and merges:
                    return cls.gpt2(vocabs[0], merges[0])
                raise InputError(f"{folder}: no tokenizer here; it needs tokenizer.json, or vocab.json and merges.txt")
        definition = _read_json_object(path)
        config_path = path.with_name("tokenizer_config.json")
        config = _read_json_object(config_path) if config_path.is_file() else {}
        config |= ends.beside(path)
        if (template := path.with_name(TEMPLATE)).is_file():
            config["chat_template"] = _read(template)
        return cls(definition if definition == _BYTES else canonical(definition, path), config)

    @classmethod
    def gpt2(cls, encoder_json: str | Path, vocab_bpe: str | Path) -> Tokenizer:
        """Load GPT-2's two files: token to id, and the merges in order. Raises `InputError`."""
        encoder_json, vocab_bpe = Path(encoder_json), Path(vocab_bpe)
        vocab = _read_json_object(encoder_json)
        ids = list(vocab.values())
        if not all(type(i) is int and 0 <= i < 2**32 for i in ids) or len(set(ids)) != len(ids):
            raise InputError(f"{encoder_json}: not a table of tokens with one id each; use GPT-2's encoder.json")
        missing = [byte for byte, symbol in byte_symbols().items() if symbol not in vocab]
        if missing:
            lost = f"{len(missing)} of the 256 bytes have no token (first {missing[0]:#04x})"
            raise InputError(f"{encoder_json}: {lost}; text would be lost, so use a vocabulary such as GPT-2's")
        merges = []
        for number, line in enumerate(_read(vocab_bpe).split("\n"), 1):
            if not line.strip() or (number == 1 and line.startswith("#version")):
                continue
            pair = line.rstrip("\r").split(" ")
            if len(pair) != 2 or not all(part in vocab for part in (*pair, "".join(pair))):
                wrong = f"{line!r} is not a merge of two tokens of {encoder_json}"
                raise InputError(f"{vocab_bpe}, line {number}: {wrong}; use two files that belong together")
            merges.append(pair)
        definition = byte_level_definition(vocab, merges, vocab.get(END_OF_TEXT), use_regex=True)
        return cls(canonical(definition, encoder_json))

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> Tokenizer:
        """Learn a byte-level BPE; the same texts in the same order give the same tokenizer.

        `vocab_size` counts the 256 bytes and end of text, so it is at least 257; little text may yield fewer tokens.
        Raises `InputError`.
        """
        if vocab_size < 257:
            raise InputError(f"vocab_size is {vocab_size}; a byte-level BPE needs at least 257 (256 bytes, end of text)")
        from tokenizers import Tokenizer as Backend
        from tokenizers import decoders, models, pre_tokenizers, trainers

        backend = Backend(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=2,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=list(byte_symbols().values()),
            show_progress=False,
        )
        backend.train_from_iterator((run for text in texts for run in _short_runs(text)), trainer)
        return cls(json.loads(backend.to_str()))

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """The ids of `text`; no start or end token is added.

        Text that spells a special token is ordinary text unless `allow_special`. Raises `InputError` for half a surrogate pair.
        """
        if not allow_special:
            return self.encode_batch([text])[0]
        _check_unicode(text)
        return self._backend_special.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`[encode(text) for text in texts]`, faster: many texts, or the pieces of long ones, at the same time."""
        for text in texts:
            _check_unicode(text)
        if self.definition == _BYTES:
            return [list(text.encode()) for text in texts]
        pieces = [list(_pieces(text)) if self._splits_safely else [text] for text in texts]
        encodings = iter(self._backend.encode_batch_fast([p for ps in pieces for p in ps], add_special_tokens=False))
        results = [[i for _ in ps for i in next(encodings).ids] for ps in pieces]
        return [self._without_forgery(text, ids) for text, ids in zip(texts, results, strict=True)]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`. Special tokens appear as their text; invalid UTF-8 as U+FFFD.

        An id that the vocabulary lacks (models may have more rows) appears as U+FFFD in byte-level tokenizers; others omit it.
        """
        if (table := self._bytes_of_ids) is None:
            return self._backend.decode([int(i) for i in ids], skip_special_tokens=False)
        return b"".join([table.get(int(i), REPLACEMENT) for i in ids]).decode("utf-8", "replace")

    def decode_stream(self) -> DecodeStream:
        """A decoder that takes one id at a time and gives whole characters."""
        return DecodeStream(self)

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json and, for the end-of-text token, tokenizer_config.json; `from_file` reads both back."""
        folder = Path(folder)
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False} | self.config
        if self.eos_id is not None and "eos_token" not in config:
            config["eos_token"] = {i: token for token, i in self.special_tokens.items()}[self.eos_id]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, content in (("tokenizer.json", self.definition), ("tokenizer_config.json", config)):
                _write_whole(folder / name, json.dumps(content, ensure_ascii=False))
        except OSError as error:
            raise InputError(f"{folder}: cannot be written ({error.strerror}); give another folder") from None

    @cached_property
    def fingerprint(self) -> str:
        """64 hexadecimal digits of the vocabulary and merges: with equal fingerprints every id means the same text."""
        model = self.definition["model"]
        merges = [m.split(" ") if isinstance(m, str) else m for m in model.get("merges") or []]
        content = [sorted(self._ids.items()), merges, self._bytes_of_ids is not None]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """The tokens that end an answer: end of text, those that the folder names, and the end of a turn in a chat."""
        return ends.of(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tokenizer) and (self.eos_id, self.definition) == (other.eos_id, other.definition)

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        return f"Tokenizer(vocab_size={self.vocab_size}, eos_id={self.eos_id})"

    def _find_eos(self) -> int | None:
        named = self.config.get("eos_token")
        named = named.get("content") if isinstance(named, dict) else named
        if isinstance(named, str) and named in self._ids:
            return self._ids[named]
        return next((self.special_tokens[name] for name in END_OF_TEXT_NAMES if name in self.special_tokens), None)

    @cached_property
    def _backend(self) -> tokenizers.Tokenizer:
        """The tokenizers object that reads special tokens as ordinary text."""
        from tokenizers import Tokenizer as Backend

        backend = Backend.from_str(json.dumps(self.definition))
        backend.encode_special_tokens = True
        return backend

    @cached_property
    def _backend_special(self) -> tokenizers.Tokenizer:
        """The one that recognises them; a second object, since switching a shared one would race between threads."""
        from tokenizers import Tokenizer as Backend

        return Backend.from_str(json.dumps(self.definition))

    @cached_property
    def _bytes_of_ids(self) -> dict[int, Any] | None:
        """The bytes of each id, or None when the tokenizer is not byte-level."""
        decoder = self.definition["decoder"] or {}
        if decoder.get("type") == "Sequence" and len(decoder["decoders"]) == 1:
            decoder = decoder["decoders"][0]
        if decoder.get("type") != "ByteLevel":
            return None
        byte_of = {symbol: byte for byte, symbol in byte_symbols().items()}
        table = {}
        for token, i in self._ids.items():
            known = all(symbol in byte_of for symbol in token)
            table[i] = bytes(byte_of[symbol] for symbol in token) if known else token.encode()
        for token in self.definition["added_tokens"]:
            table[token["id"]] = token["content"].encode()
        return table

    @cached_property
    def _splits_safely(self) -> bool:
        """Whether `SAFE_CUT` holds: GPT-2's pre-tokenizer and nothing around it that looks across a cut."""
        before = self.definition["pre_tokenizer"] or {}
        return (
            before.get("type") == "ByteLevel"
            and before.get("use_regex", True)
            and not before["add_prefix_space"]
            and self.definition["normalizer"] is None
            and all(token["special"] for token in self.definition["added_tokens"])
        )

    def _without_forgery(self, text: str, ids: list[int]) -> list[int]:
        """`ids`, unless merges alone spelt a special token from its text; then anew with that text cut apart."""
        found = set(self.special_tokens.values()).intersection(ids)
        forged = [token for token, i in self.special_tokens.items() if i in found and len(token) > 1 and token in text]
        if not forged:
            return ids
        inside = re.compile("|".join(f"(?<={re.escape(token[0])})(?={re.escape(token[1:])})" for token in forged))
        parts = self._backend.encode_batch_fast(inside.split(text), add_special_tokens=False)
        return [i for part in parts for i in part.ids]


def byte_symbols() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte: the byte's own Latin-1 character where that is visible."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    stand_ins = {byte: chr(byte) for byte in visible} | {byte: chr(256 + n) for n, byte in enumerate(hidden)}
    return dict(sorted(stand_ins.items()))


def byte_level_definition(vocab: dict[str, int], merges: list[list[str]], eos_id: int | None, use_regex: bool) -> dict:
    """The content of a tokenizer.json for byte-level BPE."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    specials = [] if eos_id is None else [{"id": eos_id, "content": END_OF_TEXT, **flags, "special": True}]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}
    unset = dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"))
    switches = dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False)
    return {
        "version": "1.0",
        **dict.fromkeys(("truncation", "padding", "normalizer", "post_processor")),
        "added_tokens": specials,
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", **unset, **switches, "vocab": vocab, "merges": merges},
    }


_BYTES = byte_level_definition({symbol: byte for byte, symbol in byte_symbols().items()}, [], 256, use_regex=False)


def canonical(definition: dict[str, Any], path: Path) -> dict[str, Any]:
    """The definition as the tokenizers package writes it, without what alters text: truncation, padding, dropout."""
    from tokenizers import Tokenizer as Backend

    try:
        backend = Backend.from_str(json.dumps(definition))
    except Exception as error:  # the package raises a bare Exception
        raise InputError(f"{path}: not a tokenizer.json ({' '.join(str(error).split())}); check the file") from None
    backend.no_truncation()
    backend.no_padding()
    canonical = json.loads(backend.to_str())
    if "dropout" in canonical["model"]:
        canonical["model"]["dropout"] = None
    return canonical


def _ids_of_tokens(definition: dict[str, Any]) -> dict[str, int]:
    vocab = definition["model"]["vocab"]
    ids = {entry[0]: i for i, entry in enumerate(vocab)} if isinstance(vocab, list) else dict(vocab)
    return ids | {token["content"]: token["id"] for token in definition["added_tokens"]}


def _pieces(text: str) -> Iterator[str]:
    """`text` cut at `SAFE_CUT` places, about `PIECE_CHARS` apart."""
    start = 0
    while len(text) - start > PIECE_CHARS and (match := SAFE_CUT.search(text, start + PIECE_CHARS)):
        yield text[start : match.end()]
        start = match.end()
    yield text[start:]


def _short_runs(text: str) -> Iterator[str]:
    """`text` in order, cut inside runs that the trainer, quadratic in the length of a word, would take minutes for."""
    # Half a surrogate pair has no UTF-8 form; for counting, the replacement character stands in.
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    start = 0
    for match in LONG_RUN.finditer(text):
        yield text[start : match.end()]
        start = match.end()
    yield text[start:]


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"text: character {error.start} is half of a surrogate pair; replace it") from None


def _write_whole(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(text.encode())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 at byte {error.start}; give a text file") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check the path") from None


def _read_json_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(_read(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"{path}: not valid JSON ({error}); check the file") from None
    if not isinstance(content, dict):
        raise InputError(f"{path}: expected a JSON object, found {type(content).__name__}; check the file")
    return content
