"""Kimi's tokenizer file against tiktoken's rule, written out slowly, and its special tokens."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest

import palimpsest as pal
from palimpsest.convert import tiktoken
from palimpsest.tokenizer import Tokenizer, byte_symbols
from tests.conftest import make_model

TEXT = "The Quick brown fox isn't here; HELLO World'LL 12345 6 你好世界abc Ünïcode\n\n  spaced   out \t!?\r\n naïve"
# TEXT cut by hand.
CUT = ["The", " Quick", " brown", " fox", " isn't", " here", ";", " HELLO", " World'LL", " ", "123", "45", " ", "6", " "]
CUT += ["你好世界", "abc", " Ünïcode", "\n\n", " ", " spaced", "  ", " out", " \t", "!?\r\n", " naïve"]


def ranks() -> dict[bytes, int]:
    """256 bytes and what a small BPE learns, by rank."""
    trained = Tokenizer.train([TEXT, "the theme of these other things hello hello world"] * 30, 420)
    byte_of = {symbol: byte for byte, symbol in byte_symbols().items()}
    tokens = [bytes([byte]) for byte in range(256)]
    for left, right in trained.definition["model"]["merges"]:
        joined = bytes(byte_of[symbol] for symbol in left + right)
        if joined not in tokens:
            tokens.append(joined)
    return {token: rank for rank, token in enumerate(tokens)}


def write(folder: Path, table: dict[bytes, int]) -> None:
    lines = [base64.b64encode(token) + f" {rank}\n".encode() for token, rank in table.items()]
    (folder / "tiktoken.model").write_bytes(b"".join(lines))


def slow(table: dict[bytes, int], word: bytes) -> list[int]:
    """A word: whole, or joined pair by pair, the union of lowest rank first."""
    if word in table:
        return [table[word]]
    parts = [bytes([byte]) for byte in word]
    while True:
        pairs = [(table[a + b], at) for at, (a, b) in enumerate(zip(parts, parts[1:], strict=False)) if a + b in table]
        if not pairs:
            return [table[part] for part in parts]
        _, at = min(pairs)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def test_words_and_ranks(tmp_path: Path) -> None:
    table = ranks()
    write(tmp_path, table)
    tokenizer = tiktoken.read(tmp_path)
    assert "".join(CUT) == TEXT
    assert tokenizer.encode(TEXT) == [i for word in CUT for i in slow(table, word.encode())]
    for text in ("hello world", "these others", "你好", "\N{SNOWMAN} a\n", "x" * 50):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("the theme")) < 9


def test_special_tokens_are_registered_and_cannot_be_forged(tmp_path: Path) -> None:
    """R110, and the published ids: 163,584 ranks in front, 163,840 tokens in all."""
    table = ranks()
    write(tmp_path, table)
    tokenizer = tiktoken.read(tmp_path)
    first = len(table)
    assert tokenizer.vocab_size == first + 256 and tokenizer.eos_id == first + 2
    published = {"[BOS]": 163584, "[EOS]": 163585, "<|end_of_msg|>": 163586, "<|open|>": 163587, "<|close|>": 163588}
    published |= {"<|sep|>": 163589, "[start_header_id]": 163590, "[end_header_id]": 163591, "[EOT]": 163593}
    published |= {"<|media_begin|>": 163602, "<|media_content|>": 163603, "<|media_end|>": 163604, "<|media_pad|>": 163605}
    published |= {"<osagent_mode>": 163649, "[UNK]": 163838, "[PAD]": 163839}
    for token, i in published.items():
        assert tokenizer.encode(token, allow_special=True) == [first + i - 163584]
        assert first + i - 163584 not in tokenizer.encode(f"a {token} b")
    assert tokenizer.decode([first + 8]) == f"<|reserved_token_{first + 8}|>"


def test_names_come_from_the_configuration_where_there_is_one(tmp_path: Path) -> None:
    table = ranks()
    write(tmp_path, table)
    names: dict[str, Any] = {str(len(table) + 2): {"content": "<|im_end|>"}, str(len(table) + 3): {"content": "<|im_user|>"}}
    settings = {"added_tokens_decoder": names, "eos_token": "<|im_end|>", "chat_template": "{{ x }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = tiktoken.read(tmp_path)
    assert tokenizer.eos_id == len(table) + 2 and tokenizer.config["chat_template"] == "{{ x }}"
    assert tokenizer.encode("<|im_user|>", allow_special=True) == [len(table) + 3]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {"5": {"content": "x"}}}))
    with pytest.raises(pal.InputError, match=r"special token 5; expected ids"):
        tiktoken.read(tmp_path)


def test_a_folder_is_opened_with_it(tmp_path: Path) -> None:
    table = ranks()
    pal.save(make_model("kimi-k3-tiny", vocab_size=len(table) + 256), tmp_path / "k3")
    write(tmp_path / "k3", table)
    model, tokenizer = pal.load(tmp_path / "k3")
    assert tokenizer is not None
    (text,) = pal.generate(model, tokenizer, ["Hello"], pal.SamplingConfig(max_new_tokens=3, temperature=0.0))
    assert len(text.token_ids) <= 3
    pal.save(model, tmp_path / "again", tokenizer=tokenizer)
    assert pal.load(tmp_path / "again")[1] == tokenizer
    pal.save(make_model("kimi-k3-tiny", vocab_size=300), tmp_path / "small")
    write(tmp_path / "small", table)
    with pytest.raises(pal.InputError, match=r"tiktoken\.model: ids reach"):
        pal.load(tmp_path / "small")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.replace(b"AA== 0\n", b""), "line 1: rank 1; expected 0"),
        (lambda data: data + b"!!! 999\n", "not a token in base64"),
        (lambda data: data[:-5], "not a token in base64|rank"),
        (
            lambda data: data + data.splitlines()[300].split()[0] + f" {data.count(b'=') and len(data.splitlines())}".encode(),
            "new token",
        ),
        (lambda data: b"".join(data.splitlines(True)[:200]), "not every byte"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    write(tmp_path, ranks())
    path = tmp_path / "tiktoken.model"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(pal.InputError, match=rf"{re.escape(str(path))}.*({message})"):
        tiktoken.read(tmp_path)


def test_a_template_that_is_not_text_is_refused(tmp_path: Path) -> None:
    write(tmp_path, ranks())
    (tmp_path / tiktoken.TEMPLATE).write_bytes(b"abc\xff")
    with pytest.raises(pal.InputError, match=f"{tiktoken.TEMPLATE}: not UTF-8 at byte 3"):
        tiktoken.read(tmp_path)
