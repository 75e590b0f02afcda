import json
from itertools import pairwise

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from palimpsest import tokenizer as module
from palimpsest.config import InputError
from palimpsest.tokenizer import END_OF_TEXT, Tokenizer, byte_symbols

CORPUS = [
    "To be, or not to be, that is the question:\nWhether 'tis nobler in the mind to suffer\n" * 4,
    "白日依山尽,黄河入海流。\n欲穷千里目,更上一层楼。\n" * 4,
    "naïve café, 12 345 €; \U0001f469‍\U0001f680 e\u0301\r\n\x00 end\n\n  indented\n" * 4,
    "<|im_start|> stop!\x1c and go!\x1c <|im_end|>\n" * 4,
]
AWKWARD = ["", "\x00", "\r\n", "\u0301", "e\u0301", "中文", "\U0001f469‍\U0001f680", "\ufeffa", "\ufffd", " \n ", END_OF_TEXT]


def gpt2_files(folder, names=("encoder.json", "vocab.bpe")):
    """A vocabulary in GPT-2's two files: the bytes, ` t`, ` th`, ` the`, `he`, end of text."""
    vocab = {symbol: i for i, symbol in enumerate(byte_symbols().values())}
    vocab |= {"Ġt": 256, "Ġth": 257, "Ġthe": 258, "he": 259, END_OF_TEXT: 260}
    (folder / names[0]).write_text(json.dumps(vocab))
    (folder / names[1]).write_text("#version: 0.2\nĠ t\nĠt h\nĠth e\nh e\n")
    return folder / names[0], folder / names[1]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return {
        "bytes": Tokenizer.bytes(),
        "trained": Tokenizer.train(CORPUS, 400),
        "gpt2": Tokenizer.gpt2(*gpt2_files(tmp_path_factory.mktemp("gpt2"))),
    }


@pytest.fixture(params=["bytes", "trained", "gpt2"], scope="module")
def tokenizer(request, made):
    return made[request.param]


def forging(folder):
    """A tokenizer.json whose merges spell its special token, and that no pre-tokenizer keeps apart."""
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE({"<": 0, "/": 1, "s": 2, ">": 3, "</": 4, "s>": 5, "</s>": 6, "a": 7}, [])
    )
    content = json.loads(backend.to_str())
    content["model"]["merges"] = [["<", "/"], ["s", ">"], ["</", "s>"]]
    special = {"id": 6, "content": "</s>", "single_word": False, "lstrip": False, "rstrip": False}
    content["added_tokens"] = [special | {"normalized": False, "special": True}]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return Tokenizer.from_file(folder)


# Round trips


@given(text=st.text())
def test_every_string_comes_back(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", AWKWARD)
def test_awkward_strings_come_back(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < tokenizer.vocab_size and i != tokenizer.eos_id for i in ids)


def test_byte_ids_are_the_bytes():
    tokenizer = Tokenizer.bytes()
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (257, 256)
    assert tokenizer.encode("é\n中") == [*"é\n中".encode()]


def test_gpt2_ids_follow_the_merges(made):
    tokenizer = made["gpt2"]
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (261, 260)
    # "the" has no space before it, so only `he` merges; then the whole of " the"; then ` th` with "y" left over.
    assert tokenizer.encode("the the thy") == [ord("t"), 259, 258, 257, ord("y")]


def test_training_merges_what_is_frequent_and_keeps_to_the_size():
    tokenizer = Tokenizer.train(["the cat the hat the"] * 3, 300)
    assert len(tokenizer.encode(" the")) == 1
    assert 257 < tokenizer.vocab_size <= 300
    assert Tokenizer.train(CORPUS, 300).vocab_size == 300
    assert Tokenizer.train([], 300).vocab_size == 257


# Special tokens


@pytest.mark.parametrize("text", [f"a {END_OF_TEXT} b", END_OF_TEXT, END_OF_TEXT * 2, f"\n{END_OF_TEXT}\n"])
def test_special_text_is_plain_text_unless_allowed(tokenizer, text):
    plain, special = tokenizer.encode(text), tokenizer.encode(text, allow_special=True)
    assert tokenizer.eos_id not in plain
    assert special.count(tokenizer.eos_id) == text.count(END_OF_TEXT)
    assert tokenizer.decode(plain) == tokenizer.decode(special) == text
    assert tokenizer.encode(text) == plain  # the switch leaves no trace


def test_special_text_takes_the_ids_of_its_words(made):
    tokenizer = made["trained"]
    assert tokenizer.encode(END_OF_TEXT) == [i for word in ("<|", "endoftext", "|>") for i in tokenizer.encode(word)]
    assert len(tokenizer.encode("<|")) == 1


def test_merges_cannot_forge_a_special_token(tmp_path):
    tokenizer = forging(tmp_path)
    assert tokenizer._backend.encode("a</s>a").ids == [7, 6, 7]  # what the package itself does
    assert 6 not in tokenizer.encode("a</s>a</s>")
    assert tokenizer.encode("a</s>", allow_special=True) == [7, 6]


# Pieces


@given(
    text=st.lists(st.sampled_from([*"aZ9 \n\r\t中。'!_\x1c\x85\u3000\u0301\u200b", "'s", "  ", "\n\n", "!\x1c"])).map("".join)
)
def test_cutting_a_text_leaves_its_ids_unchanged(made, text):
    for name in ("trained", "gpt2"):
        whole = made[name]._backend.encode(text).ids
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "PIECE_CHARS", 1)
            assert made[name].encode(text) == whole


def test_long_text_is_cut(made):
    pieces = list(module._pieces("word " * 50_000))
    assert len(pieces) > 2 and max(map(len, pieces)) < 2 * module.PIECE_CHARS
    assert "".join(pieces) == "word " * 50_000


def test_batch_equals_one_by_one(tokenizer):
    assert tokenizer.encode_batch([*CORPUS, "", "x"]) == [tokenizer.encode(text) for text in [*CORPUS, "", "x"]]


# Decoding


def stream(tokenizer, ids):
    decoder = tokenizer.decode_stream()
    return [*(decoder.push(i) for i in ids), decoder.flush()]


@given(data=st.data())
def test_streamed_text_is_the_decoded_text(tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 1)))
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


def test_stream_gives_whole_characters():
    ids = Tokenizer.bytes().encode("a中\U0001f600")
    assert stream(Tokenizer.bytes(), ids) == ["a", "", "", "中", "", "", "", "\U0001f600", ""]
    assert stream(Tokenizer.bytes(), ids[:3]) == ["a", "", "", "\ufffd"]
    assert stream(Tokenizer.bytes(), [0xE4, ord("x")]) == ["", "\ufffdx", ""]


@given(data=st.data())
def test_decoding_agrees_with_the_tokenizers_package(made, data):
    ids = data.draw(st.lists(st.integers(0, made["trained"].vocab_size - 1)))
    assert made["trained"].decode(ids) == made["trained"]._backend.decode(ids, skip_special_tokens=False)


def test_ids_beyond_the_vocabulary_show_as_replacement_characters(tokenizer):
    assert tokenizer.decode([tokenizer.vocab_size, *tokenizer.encode("a"), -1]) == "\ufffda\ufffd"


# Files


def test_save_and_load(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "new" / "folder")
    for path in (tmp_path / "new" / "folder", tmp_path / "new" / "folder" / "tokenizer.json"):
        loaded = Tokenizer.from_file(path)
        assert loaded == tokenizer and hash(loaded) == hash(tokenizer)
        assert (loaded.eos_id, loaded.vocab_size, loaded.fingerprint) == (
            tokenizer.eos_id,
            tokenizer.vocab_size,
            tokenizer.fingerprint,
        )
        assert loaded.encode(CORPUS[2]) == tokenizer.encode(CORPUS[2])
    written = sorted(path.name for path in (tmp_path / "new" / "folder").iterdir())
    assert written == ["tokenizer.json", "tokenizer_config.json"]


def test_saved_files_read_the_same_in_the_tokenizers_package(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    other = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert other.encode(CORPUS[2]).ids == tokenizer.encode(CORPUS[2])
    assert other.token_to_id(END_OF_TEXT) == tokenizer.eos_id


def test_different_tokenizers_differ(made):
    assert all(a != b and a.fingerprint != b.fingerprint for a, b in pairwise([*made.values(), made["bytes"]]))
    assert made["bytes"] != "bytes"


def test_training_is_deterministic(made):
    assert all(Tokenizer.train(iter(CORPUS), 400) == made["trained"] for _ in range(5))
    assert Tokenizer.train(CORPUS[:2], 400) != made["trained"]


@pytest.mark.parametrize("names", [("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt")])
def test_folder_with_gpt2_files(made, tmp_path, names):
    gpt2_files(tmp_path, names)
    assert Tokenizer.from_file(tmp_path) == made["gpt2"]


def test_config_names_the_end_of_text_token_and_survives_saving(tmp_path):
    Tokenizer.train(CORPUS, 300).save(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["added_tokens"].append(content["added_tokens"][0] | {"id": 300, "content": "<|im_end|>"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    config = {"eos_token": {"content": "<|im_end|>"}, "chat_template": "{{ messages }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = Tokenizer.from_file(tmp_path)
    assert (loaded.eos_id, loaded.vocab_size) == (300, 301)
    loaded.save(tmp_path / "again")
    assert Tokenizer.from_file(tmp_path / "again").eos_id == 300
    assert json.loads((tmp_path / "again" / "tokenizer_config.json").read_text())["chat_template"] == "{{ messages }}"


def test_truncation_padding_and_dropout_of_a_file_do_not_alter_text(made, tmp_path):
    made["trained"].save(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(2)
    backend.enable_padding(length=500)
    backend.model.dropout = 0.5
    backend.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.from_file(tmp_path).encode(CORPUS[0]) == made["trained"].encode(CORPUS[0])


def test_a_tokenizer_without_bytes(tmp_path):
    """A word-piece tokenizer loads, streams, and has no end-of-text id."""
    vocab = {"[UNK]": 0, "un": 1, "##like": 2, "##ly": 3, "word": 4}
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.decoder = tokenizers.decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_file(tmp_path / "tokenizer.json")
    assert tokenizer.encode("unlikely word") == [1, 2, 3, 4]
    assert tokenizer.eos_id is None
    assert stream(tokenizer, [1, 2, 3, 4]) == ["un", "like", "ly", " word", ""]
    tokenizer.save(tmp_path / "again")
    assert Tokenizer.from_file(tmp_path / "again") == tokenizer


# Mistakes


def write(folder, **files):
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_bytes(content)
    return folder


def one_line(mistake):
    with pytest.raises(InputError) as caught:
        mistake()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_files_that_are_no_tokenizer_are_refused(tmp_path):
    assert "tokenizer.json" in one_line(lambda: Tokenizer.from_file(tmp_path))
    assert "absent.json: cannot be read" in one_line(lambda: Tokenizer.from_file(tmp_path / "absent.json"))
    for content, words in ((b"{", "not valid JSON"), (b"[]", "JSON object"), (b"\xff", "byte 0"), (b"{}", "not a tok")):
        write(tmp_path, tokenizer__json=content)
        assert words in one_line(lambda: Tokenizer.from_file(tmp_path))


def test_gpt2_files_that_do_not_fit_are_refused(tmp_path):
    vocab, merges = gpt2_files(tmp_path)
    good = json.loads(vocab.read_text())
    write(tmp_path, **{"vocab.bpe": b"#version: 0.2\nh e\nq q\n"})
    assert "vocab.bpe, line 3: 'q q'" in one_line(lambda: Tokenizer.gpt2(vocab, merges))
    for wrong, words in (({"a": 1}, "255 of the 256"), (good | {"he": 258}, "one id"), (good | {"he": "x"}, "one id")):
        vocab.write_text(json.dumps(wrong))
        assert words in one_line(lambda: Tokenizer.gpt2(vocab, merges))


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    write(tmp_path, file=b"")
    assert "file: cannot be written" in one_line(lambda: Tokenizer.bytes().save(tmp_path / "file"))


def test_a_vocabulary_below_the_bytes_is_refused():
    assert "vocab_size is 256" in one_line(lambda: Tokenizer.train(CORPUS, 256))


def test_half_a_surrogate_pair(tokenizer):
    for allow_special in (False, True):
        assert "character 1 is half" in one_line(lambda a=allow_special: tokenizer.encode("a\ud800", a))
    assert Tokenizer.train(["\ud800 x"] * 3, 300).decode([]) == ""
