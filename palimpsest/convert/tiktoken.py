"""Kimi's tokenizer from the `tiktoken.model` in its folder: a line for each token, its bytes in base64 and its rank.

Behind the ranks come 256 special tokens. tokenizer_config.json (`added_tokens_decoder`) names some of them; where it is absent
those of Kimi K3 are taken. A text is split into words, and in a word the pair whose union has the lowest rank is joined first.
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import Any

from palimpsest import ends
from palimpsest.checkpoint import read_json
from palimpsest.config import InputError
from palimpsest.tokenizer import TEMPLATE, Tokenizer, byte_symbols, canonical

FILE = "tiktoken.model"
SPECIAL = 256
# By distance from the first special token.
K3_SPECIAL = {
    **{0: "[BOS]", 1: "[EOS]", 2: "<|end_of_msg|>", 3: "<|open|>", 4: "<|close|>", 5: "<|sep|>", 6: "[start_header_id]"},
    **{7: "[end_header_id]", 9: "[EOT]", 18: "<|media_begin|>", 19: "<|media_content|>", 20: "<|media_end|>"},
    **{21: "<|media_pad|>", 65: "<osagent_mode>", 254: "[UNK]", 255: "[PAD]"},
}
K3_END = "<|end_of_msg|>"
# Words: runs of Han; letters of other scripts after one other character, with an English contraction behind, once for words
# with a small end and once for those without; up to three digits; marks with the line ends behind; line ends; spaces.
_UPPER, _LOWER = (rf"[\p{{{kind}}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for kind in (r"Lu}\p{Lt", "Ll"))
_BEFORE, _CONTRACTION = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
WORDS = "|".join(
    [
        r"[\p{Han}]+",
        f"{_BEFORE}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        f"{_BEFORE}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        *(r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"),
    ]
)


def read(folder: Path) -> Tokenizer:
    """The tokenizer of a Kimi folder. Raises InputError for a damaged file and for names that are not its special tokens'."""
    path, settings = folder / FILE, folder / "tokenizer_config.json"
    ranks = _ranks(path)
    symbols = byte_symbols()
    vocab = {"".join(symbols[byte] for byte in token): rank for token, rank in ranks.items()}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None}
    model |= {"end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": True}
    config = read_json(settings) if settings.is_file() else {}
    definition = {
        **{"version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None},
        "added_tokens": _special(len(ranks), config, settings),
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": WORDS}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        },
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {**model, "vocab": vocab, "merges": _merges(vocab)},
    }
    kept = {key: config[key] for key in ("eos_token", "bos_token", "chat_template") if key in config} | ends.beside(path)
    if (template := folder / TEMPLATE).is_file():
        try:
            kept["chat_template"] = template.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"{template}: not UTF-8 at byte {error.start}; copy the file again") from None
    return Tokenizer(canonical(definition, path), {"eos_token": K3_END, **kept} if not config else kept)


def _ranks(path: Path) -> dict[bytes, int]:
    """Tokens and their ranks, which must count up from 0 and include every byte."""
    ranks: dict[bytes, int] = {}
    number = 0
    try:
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            token, _, rank = line.partition(b" ")
            raw = base64.b64decode(token, validate=True)
            if int(rank) != len(ranks) or not raw or raw in ranks:
                raise InputError(f"{path}, line {number}: rank {rank.decode()}; expected {len(ranks)} and a new token")
            ranks[raw] = len(ranks)
    except (binascii.Error, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}, line {number}: not a token in base64 and a rank; copy the file again") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    if any(bytes([byte]) not in ranks for byte in range(256)):
        raise InputError(f"{path}: not every byte has a token; text would be lost; copy the file again")
    return ranks


def _merges(vocab: dict[str, int]) -> list[list[str]]:
    """Every way to join two tokens to one, by the rank of what comes out."""
    found = []
    for token, rank in vocab.items():
        for at in range(1, len(token)):
            left, right = token[:at], token[at:]
            if left in vocab and right in vocab:
                found.append((rank, vocab[left], vocab[right], [left, right]))
    return [pair for *_, pair in sorted(found)]


def _special(first: int, config: dict[str, Any], path: Path) -> list[dict[str, Any]]:
    """The special tokens, `first` and up; those without a name get one that says so."""
    names = {first + distance: name for distance, name in K3_SPECIAL.items()}
    if "added_tokens_decoder" in config:
        try:
            names = {int(i): str(token["content"]) for i, token in config["added_tokens_decoder"].items()}
        except (AttributeError, KeyError, TypeError, ValueError):
            raise InputError(f"{path}: added_tokens_decoder is not a table of tokens by id; copy the file again") from None
        outside = [i for i in names if not first <= i < first + SPECIAL]
        if outside:
            raise InputError(f"{path}: special token {outside[0]}; expected ids {first} to {first + SPECIAL - 1}")
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    ids = range(first, first + SPECIAL)
    return [{"id": i, "content": names.get(i, f"<|reserved_token_{i}|>"), **flags, "special": True} for i in ids]
