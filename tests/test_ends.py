"""What ends an answer: every token that a folder or a chat format says, by its id, and not a text that spells it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import palimpsest as pal
from palimpsest import chat
from palimpsest.config import InputError
from palimpsest.conversation import Conversation
from palimpsest.convert import tiktoken
from palimpsest.engine import Engine, Request
from palimpsest.tokenizer import Tokenizer
from tests.test_chat import TALK, TEMPLATE, chatml
from tests.test_tiktoken import ranks, write

LLAMA = """{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>

{{ m.content | trim }}<|eot_id|>{% endfor %}"""
NAMES = ("<s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>")


def special(template: Any, **config: Any) -> Tokenizer:
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_str(json.dumps(Tokenizer.train(["assistant user"] * 9, 280).definition))
    backend.add_special_tokens(list(NAMES))
    return Tokenizer(json.loads(backend.to_str()), {"bos_token": "<s>", "chat_template": template, **config})


def names(tokenizer: Tokenizer) -> set[str]:
    by_id = {i: token for token, i in tokenizer.special_tokens.items()}
    return {by_id[i] for i in tokenizer.end_ids}


def test_the_end_of_a_turn_is_what_stands_behind_an_answer(tmp_path: Path) -> None:
    assert names(special(TEMPLATE)) == {"<|endoftext|>", "<|im_end|>"}
    assert names(special(LLAMA)) == {"<|endoftext|>", "<|eot_id|>"}
    assert names(special("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")) == {"<|endoftext|>"}
    assert names(special("{{ raise_exception('no') }}")) == names(special(None)) == {"<|endoftext|>"}
    assert Tokenizer.bytes().end_ids == {256}
    write(tmp_path, ranks())
    assert "<|end_of_msg|>" in names(tiktoken.read(tmp_path))


def test_folders_name_ends(tmp_path: Path) -> None:
    tokenizer = special(None)
    ids = tokenizer.special_tokens
    tokenizer.save(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": ids["<|im_end|>"]}))
    assert names(Tokenizer.from_file(tmp_path)) == {"<|endoftext|>", "<|im_end|>"}
    # An ordinary token, or one that the vocabulary lacks, is a default of another model.
    listed = [ids["<|eot_id|>"], ids["<|eom_id|>"], 65, 50256]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": listed}))
    found = Tokenizer.from_file(tmp_path)
    assert names(found) == {"<|endoftext|>", "<|eot_id|>", "<|eom_id|>"}
    found.save(tmp_path / "again")
    assert names(Tokenizer.from_file(tmp_path / "again")) == names(found)
    (tmp_path / "kimi").mkdir()
    write(tmp_path / "kimi", ranks())
    (tmp_path / "kimi" / "generation_config.json").write_text(json.dumps({"eos_token_id": [len(ranks()) + 9]}))
    assert names(tiktoken.read(tmp_path / "kimi")) == {"[EOT]", "<|end_of_msg|>"}


@pytest.mark.parametrize("content", ['{"eos_token_id": "x"}', '{"eos_token_id": [1, true]}', "{"])
def test_a_damaged_file_is_named(content: str, tmp_path: Path) -> None:
    special(None).save(tmp_path)
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(InputError, match=r"generation_config\.json: (eos_token_id is|not valid JSON)"):
        Tokenizer.from_file(tmp_path)


def script(monkeypatch: pytest.MonkeyPatch, where: str, ids: Sequence[int]) -> None:
    drawn = iter(ids)
    monkeypatch.setattr(sys.modules[f"palimpsest.{where}"], "draw", lambda *_: next(drawn))


def test_an_end_is_neither_shown_nor_counted_wherever_text_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a text that merely spells it goes on."""
    tokenizer = chatml()
    torch.manual_seed(3)
    model = pal.Model(pal.ModelConfig.preset("kda-tiny", vocab_size=tokenizer.vocab_size)).eval()
    end = tokenizer.special_tokens["<|im_end|>"]
    spelled = tokenizer.encode("a<|im_end|>b")
    assert end not in spelled
    drawn = [*spelled, end, 0, 0, 0]
    sampling = pal.SamplingConfig(max_new_tokens=len(drawn))
    prompt = chat.encode(tokenizer, TALK)

    script(monkeypatch, "generate", drawn)
    (text,) = pal.generate(model, tokenizer, ["a"], sampling)
    assert (text, text.finish_reason, text.token_ids) == ("a<|im_end|>b", "stop", tuple(spelled))

    script(monkeypatch, "engine.request", drawn)
    pieces: list[Any] = []
    engine = Engine(model, tokenizer, 1 << 30)
    ticket = engine.submit(Request(tuple(prompt), sampling, top_logprobs=0), pieces.append)
    while engine.step():
        pass
    assert "".join(piece.text for piece in pieces) == "a<|im_end|>b" and pieces[-1].finish_reason == "stop"
    assert [score.token for piece in pieces for score in piece.scores] == spelled
    assert ticket.completion_tokens == len(spelled) and ticket.answers[0].ids == prompt + spelled

    script(monkeypatch, "conversation", drawn)
    conversation = Conversation(model, tokenizer)
    assert "".join(conversation.say("Hello", sampling)) == "a<|im_end|>b"
