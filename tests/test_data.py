import json
import math
import sys
import tempfile
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from palimpsest import data
from palimpsest.config import InputError
from palimpsest.data import Batches, TokenFile, prepare, read_text, split_text, unigram_bits_per_byte
from palimpsest.tokenizer import Tokenizer

BYTES = Tokenizer.bytes()
TRAINED = Tokenizer.train(["the cat sat on the mat. and that was that\n" * 9, "中文字,中文。\n" * 9], 320)


def write(folder: Path, files: dict[str, bytes | str]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def one_line(mistake) -> str:
    with pytest.raises(InputError) as caught:
        mistake()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def documents(token_file: TokenFile, tokenizer: Tokenizer) -> list[str]:
    ends = [*token_file.document_starts[1:].tolist(), token_file.num_tokens]
    parts = [token_file.tokens[int(a) : int(b)].tolist() for a, b in zip(token_file.document_starts, ends, strict=True)]
    assert all(part[-1] == tokenizer.eos_id for part in parts)
    return [tokenizer.decode(part[:-1]) for part in parts]


# Reading


def test_a_folder_gives_its_documents_in_sorted_order(tmp_path):
    write(
        tmp_path,
        {
            "b.txt": "two\r\n",
            "a.MD": "\ufeffone",
            "sub/c.jsonl": '{"text": "three", "id": 1}\n\n{"text": ""}\n{"text": "\\ud83d\\ude00"}',
            "sub/d.py": "four",
            "sub/.hidden/e.txt": "no",
            ".f.txt": "no",
            "g.bin": b"\xff",
            "empty.txt": "",
        },
    )
    found = [(Path(name).name, text) for name, text in read_text([tmp_path, tmp_path / "b.txt"])]
    assert found == [
        ("a.MD", "one"),
        ("b.txt", "two\r\n"),
        ("c.jsonl, line 1", "three"),
        ("c.jsonl, line 4", "\U0001f600"),
        ("d.py", "four"),
        ("b.txt", "two\r\n"),
    ]


def test_a_named_file_of_any_other_kind_is_text(tmp_path):
    write(tmp_path, {".notes.rst": "a"})
    assert list(read_text([tmp_path / ".notes.rst"])) == [(str(tmp_path / ".notes.rst"), "a")]


words = st.sampled_from(["the", "cat", "中文", "\U0001f600", "é,", "x.", "9", "that's"])
gaps = st.sampled_from([" ", "\n", "\n\n", "\r\n", " \n", "  "])


@settings(max_examples=50)
@given(pairs=st.lists(st.tuples(words, gaps), min_size=1, max_size=60), piece=st.integers(24, 64))
def test_a_long_file_is_read_in_pieces_without_changing_its_tokens(pairs, piece):
    text = "".join(word + gap for word, gap in pairs)
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = write(Path(name), {"long.txt": text})
        patch.setattr(data, "PIECE_BYTES", piece)
        pieces = [piece_text for _, piece_text in read_text([folder / "long.txt"])]
        token_file = prepare([folder / "long.txt"], folder / "out", TRAINED)
        tokens = np.array(token_file.tokens)
    assert "".join(pieces) == text
    assert all(len(part.encode()) < 2 * piece for part in pieces)
    assert tokens.tolist() == [*TRAINED.encode(text), TRAINED.eos_id]


def test_pieces_break_at_newlines(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "PIECE_BYTES", 32)
    write(tmp_path, {"a.txt": "twenty-one characters\nand more\nof it, to the end\n"})
    pieces = [text for _, text in read_text([tmp_path / "a.txt"])]
    assert pieces[0] == "twenty-one characters\nand more\n"
    write(tmp_path, {"b.txt": "中" * 50})
    assert "".join(text for _, text in read_text([tmp_path / "b.txt"])) == "中" * 50


@settings(max_examples=50)
@given(content=st.binary(min_size=1, max_size=80), piece=st.integers(8, 20))
def test_bytes_that_are_not_utf8_are_refused_at_their_place_or_replaced(content, piece):
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        path = write(Path(name), {"a.txt": content}) / "a.txt"
        patch.setattr(data, "PIECE_BYTES", piece)
        try:
            expected = content.decode()
        except UnicodeDecodeError as error:
            assert f"a.txt: not UTF-8 at byte {error.start};" in one_line(lambda: list(read_text([path])))
            expected = content.decode(errors="replace")
        replaced = "".join(text for _, text in read_text([path], errors="replace"))
    assert replaced == expected.removeprefix("\ufeff")


def test_jsonl_replaces_only_when_told(tmp_path):
    lines = b'{"text": "\xc3\xa9"}\n{"text": "\xff"}\n{"text": "\\ud800!"}\n'
    path = write(tmp_path, {"a.jsonl": lines}) / "a.jsonl"
    assert f"not UTF-8 at byte {lines.index(0xFF)}" in one_line(lambda: list(read_text([path])))
    assert [text for _, text in read_text([path], "replace")] == ["é", "\ufffd", "\ufffd!"]
    write(tmp_path, {"a.jsonl": '\ufeff{"text": "\\ud800"}'})
    assert "line 1" in one_line(lambda: list(read_text([path])))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('"text"', "found str"),
        ('{"body": "a"}', "found ['body']"),
        ('{"text": null}', "string"),
        ('{"text": 1}', "string"),
    ],
)
def test_malformed_jsonl_is_refused_with_its_line(tmp_path, line, words):
    path = write(tmp_path, {"a.jsonl": '{"text": "fine"}\n\n' + line}) / "a.jsonl"
    message = one_line(lambda: list(read_text([path])))
    assert "a.jsonl, line 3:" in message and words in message


def test_missing_and_empty_inputs_are_refused(tmp_path):
    write(tmp_path, {"empty.txt": "", "blank.jsonl": "\n\n", "bin/a.bin": "x", "hollow/a.txt": "", "bom.txt": "\ufeff"})
    assert "at least one" in one_line(lambda: list(read_text([])))
    assert "absent.txt: no such" in one_line(lambda: list(read_text([tmp_path / "absent.txt"])))
    assert "bin: no text files" in one_line(lambda: list(read_text([tmp_path / "bin"])))
    for name in ("empty.txt", "blank.jsonl", "hollow", "bom.txt"):
        assert f"{name}: there is no text" in one_line(lambda n=name: list(read_text([tmp_path / n])))
    assert "errors is 'ignore'" in one_line(lambda: list(read_text([tmp_path], "ignore")))  # pyright: ignore[reportArgumentType]


def fake_pyarrow(monkeypatch, kind: str, rows: list[bytes | None]) -> None:
    """Stands in for pyarrow, which the tests do not install: one file with a column "text" in two batches."""

    def batch(values):
        return types.SimpleNamespace(column=lambda i: types.SimpleNamespace(cast=lambda kind: column(values)))

    def column(values):
        return types.SimpleNamespace(to_pylist=lambda: values)

    def open_file(path):
        batches = [batch(rows[:1]), batch(rows[1:])]
        schema = [types.SimpleNamespace(name="text", type=kind)]
        return types.SimpleNamespace(schema_arrow=schema, iter_batches=lambda **_: iter(batches))

    package = types.ModuleType("pyarrow")
    vars(package).update(large_binary=lambda: None, ArrowException=ArithmeticError)
    parquet = types.ModuleType("pyarrow.parquet")
    vars(parquet).update(ParquetFile=open_file)
    vars(package).update(parquet=parquet)
    monkeypatch.setitem(sys.modules, "pyarrow", package)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", parquet)


def test_parquet(tmp_path, monkeypatch):
    path = write(tmp_path, {"a.parquet": "PAR1"}) / "a.parquet"
    fake_pyarrow(monkeypatch, "string", [b"one", b"", "zwölf".encode()])
    assert list(read_text([path])) == [(f"{path}, row 1", "one"), (f"{path}, row 3", "zwölf")]
    fake_pyarrow(monkeypatch, "binary", [b"one", b"a\xff"])
    assert "row 2: not UTF-8 at byte 1" in one_line(lambda: list(read_text([path])))
    assert [text for _, text in read_text([path], "replace")] == ["one", "a\ufffd"]
    fake_pyarrow(monkeypatch, "string", [b"one", None])
    assert 'row 2: "text" is null' in one_line(lambda: list(read_text([path])))
    fake_pyarrow(monkeypatch, "list<item: string>", [])
    assert 'column "text" of strings' in one_line(lambda: list(read_text([path])))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pip install pyarrow" in one_line(lambda: list(read_text([path])))


# Token files


@settings(max_examples=40)
@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1), size=st.integers(8, 300))
@pytest.mark.parametrize("tokenizer", [BYTES, TRAINED], ids=["bytes", "trained"])
def test_documents_come_back(tokenizer, texts, size):
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        folder = write(Path(name), {"a.jsonl": lines})
        patch.setattr(data, "PIECE_BYTES", size)
        token_file = prepare([folder / "a.jsonl"], folder / "out" / "a.tokens", tokenizer)
        assert documents(token_file, tokenizer) == texts
        assert token_file.num_bytes == sum(len(text.encode()) for text in texts)
        assert (token_file.vocab_size, token_file.fingerprint) == (tokenizer.vocab_size, tokenizer.fingerprint)
        assert len(token_file.tokens) == token_file.num_tokens
        assert [path.name for path in (folder / "out").iterdir()] == ["a.tokens"]


def test_the_file_is_as_documented(tmp_path):
    write(tmp_path, {"a.jsonl": '{"text": "ab"}\n{"text": "é"}\n'})
    prepare([tmp_path / "a.jsonl"], tmp_path / "a.tokens", BYTES)
    raw = (tmp_path / "a.tokens").read_bytes()
    numbers = [1, 2], [257, 6, 4, 2]
    header = b"PALTOKEN" + np.array(numbers[0], "<u4").tobytes() + np.array(numbers[1], "<u8").tobytes()
    tokens = np.array([97, 98, 256, 0xC3, 0xA9, 256], "<u2").tobytes()
    assert raw == header + bytes.fromhex(BYTES.fingerprint) + tokens + bytes(4) + np.array([0, 3], "<u8").tobytes()


@pytest.mark.parametrize(("vocab_size", "width"), [(65536, 2), (65537, 4)])
def test_ids_take_four_bytes_when_two_are_too_few(tmp_path, vocab_size, width):
    class Wide(Tokenizer):
        def encode_batch(self, texts):
            return [[self.vocab_size - 1 for _ in text] for text in texts]

    tokenizer = Wide(BYTES.definition)
    tokenizer.vocab_size, tokenizer.eos_id = vocab_size, None
    write(tmp_path, {"a.txt": "ab", "b.txt": "c"})
    token_file = prepare([tmp_path], tmp_path / "a.tokens", tokenizer)
    assert token_file.tokens.dtype.itemsize == width
    assert token_file.tokens.tolist() == [vocab_size - 1] * 3  # without an end-of-text id nothing stands between
    assert token_file.document_starts.tolist() == [0, 2]


def test_progress_ends_at_the_totals(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "PIECE_BYTES", 100)
    write(tmp_path, {"a.txt": "word " * 200})
    seen = []
    prepare([tmp_path / "a.txt"], tmp_path / "a.tokens", BYTES, progress=lambda *now: seen.append(now))
    assert len(seen) > 5 and seen == sorted(seen) and seen[-1] == (1000, 1001)


def test_a_failed_run_leaves_what_was_there(tmp_path):
    write(tmp_path, {"good.txt": "a", "bad.txt": b"fine, then \xff", "out/a.tokens": "older"})
    for inputs in ([tmp_path / "good.txt", tmp_path / "bad.txt"], [tmp_path / "absent.txt"]):
        one_line(lambda i=inputs: prepare(i, tmp_path / "out" / "a.tokens", BYTES))
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["a.tokens"]
        assert (tmp_path / "out" / "a.tokens").read_text() == "older"
    replaced = prepare([tmp_path / "bad.txt"], tmp_path / "out" / "a.tokens", BYTES, errors="replace")
    assert documents(replaced, BYTES) == ["fine, then \ufffd"]


def test_an_output_that_cannot_be_is_refused(tmp_path):
    write(tmp_path, {"a.txt": "text"})
    assert "also an input" in one_line(lambda: prepare([tmp_path], tmp_path / "a.txt", BYTES))
    assert "is a folder" in one_line(lambda: prepare([tmp_path], tmp_path, BYTES))
    assert "cannot be written" in one_line(lambda: prepare([tmp_path], tmp_path / "a.txt" / "b", BYTES))
    assert (tmp_path / "a.txt").read_text() == "text"


def test_foreign_and_damaged_token_files_are_refused(tmp_path):
    write(tmp_path, {"a.txt": "some text"})
    prepare([tmp_path / "a.txt"], tmp_path / "a.tokens", BYTES)
    raw = (tmp_path / "a.tokens").read_bytes()
    for length in range(len(raw)):
        write(tmp_path, {"cut": raw[:length]})
        one_line(lambda: TokenFile.open(tmp_path / "cut"))
    for wrong, words in (
        (raw + b"\0", "asks for"),
        (b"P" * 200, "not a token file"),
        (raw[:8] + b"\2" + raw[9:], "version 2"),
        (raw[:12] + b"\3" + raw[13:], "damaged"),
    ):
        write(tmp_path, {"wrong": wrong})
        assert words in one_line(lambda: TokenFile.open(tmp_path / "wrong"))
    assert "cannot be read" in one_line(lambda: TokenFile.open(tmp_path / "absent"))
    assert "cannot be read" in one_line(lambda: TokenFile.open(tmp_path))


def test_a_model_with_too_few_rows_is_refused(tmp_path):
    write(tmp_path, {"a.txt": "text"})
    token_file = prepare([tmp_path / "a.txt"], tmp_path / "a.tokens", BYTES)
    token_file.check_vocab(257)
    message = one_line(lambda: token_file.check_vocab(256))
    assert "a.tokens" in message and "257" in message and "256" in message


# Batches


@given(
    count=st.integers(1, 60),
    batch_size=st.integers(1, 7),
    length=st.integers(1, 9),
    seed=st.integers(0, 2**63 - 1),
    epochs=st.integers(1, 3),
)
def test_each_epoch_takes_every_window_once(count, batch_size, length, seed, epochs):
    count += length
    windows = count // length
    batches = Batches(np.arange(count, dtype=np.uint16), batch_size, length, seed)
    rows = torch.cat([next(batches) for _ in range(-(-epochs * windows // batch_size))])
    assert rows.dtype == torch.int64 and rows.shape[1] == length
    assert torch.equal(rows, rows[:, :1] + torch.arange(length))
    for epoch in range(epochs):
        firsts = rows[epoch * windows : (epoch + 1) * windows, 0]
        assert sorted(firsts.tolist()) == [length * window for window in range(windows)]


def test_order_depends_on_the_seed_and_the_epoch():
    tokens = torch.arange(400)

    def order(seed, epoch):
        batches = Batches(tokens, 100, 4, seed)
        return [next(batches)[:, 0].tolist() for _ in range(epoch + 1)][epoch]

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4


@given(taken=st.integers(0, 12), batch_size=st.integers(1, 8), seed=st.integers(0, 5))
def test_resumed_batches_are_the_same_batches(taken, batch_size, seed):
    tokens = np.arange(50, dtype=np.uint16)
    first = Batches(tokens, batch_size, 5, seed)
    for _ in range(taken):
        next(first)
    state = json.loads(json.dumps(first.state_dict()))
    second = Batches(tokens, batch_size, 5, seed)
    next(second)
    second.load_state_dict(state)
    for _ in range(5):
        assert torch.equal(next(first), next(second))
    assert first.state_dict() == second.state_dict()


def test_resuming_with_other_data_or_seed_is_refused():
    state = Batches(np.arange(50), 2, 5, 0).state_dict()
    assert "num_windows was 10" in one_line(lambda: Batches(np.arange(60), 2, 5, 0).load_state_dict(state))
    assert "seed was 0" in one_line(lambda: Batches(np.arange(50), 2, 5, 1).load_state_dict(state))


def test_batches_that_cannot_be_are_refused():
    assert "there are 4" in one_line(lambda: Batches(np.arange(4), 1, 5, 0))
    assert "batch_size is 0" in one_line(lambda: Batches(np.arange(4), 0, 2, 0))
    assert next(Batches(np.arange(5), 2, 5, 0)).tolist() == [[0, 1, 2, 3, 4]] * 2


# Texts


@given(text=st.text(st.sampled_from("ab\n中"), min_size=2), share=st.floats(0.01, 0.99))
def test_split_keeps_everything_and_cuts_after_a_newline_if_one_is_near(text, share):
    train, validation = split_text(text, share)
    assert train + validation == text and train and validation
    wanted = min(max(round(len(text) * (1 - share)), 1), len(text) - 1)
    distance = abs(len(train) - wanted)
    assert distance <= min(wanted, len(text) - wanted) // 2
    if not train.endswith("\n"):
        assert distance == 0
        reach = min(wanted, len(text) - wanted) // 2
        assert "\n" not in text[max(wanted - reach, 0) : min(wanted + reach, len(text) - 1)]


def test_split_takes_the_share():
    train, validation = split_text("ten chars\n" * 100)
    assert (len(train), len(validation)) == (900, 100)
    assert split_text("a" * 10, 0.3) == ("aaaaaaa", "aaa")
    for share in (0, 1, -0.5, math.nan):
        assert "validation_share" in one_line(lambda s=share: split_text("some text", s))
    assert "1 characters" in one_line(lambda: split_text("a"))


def test_unigram_entropy():
    assert unigram_bits_per_byte(b"aaaa") == 0
    assert unigram_bits_per_byte(bytes(range(256)) * 3) == pytest.approx(8)
    assert unigram_bits_per_byte(b"aab" + b"b" + b"cccc") == pytest.approx(1.5)
    assert "empty" in one_line(lambda: unigram_bits_per_byte(b""))
