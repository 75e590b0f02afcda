"""Training: resumed runs equal unbroken ones bit for bit, all tokens count alike, and what cannot work is refused at once."""

from __future__ import annotations

import io
import itertools
import json
import math
import random
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import palimpsest as pal
from palimpsest import checkpoint, random_state
from palimpsest.tokenizer import Tokenizer
from palimpsest.train import Trainer, TrainingFailed, backward, split_documents
from tests.conftest import make_ids, make_model, relative

TOKENS = np.tile(np.arange(7, dtype=np.int64), 60)  # a pattern that a model learns in a few steps
TEXT = np.random.default_rng(0).integers(0, 257, 1000)


def small(preset: str = "gpt2-tiny", **fields: Any) -> pal.Model:
    torch.manual_seed(1)
    return pal.Model(pal.ModelConfig.preset(preset, num_hidden_layers=2, **fields))


def settings(**fields: Any) -> pal.TrainConfig:
    tiny = {"steps": 10, "batch_size": 2, "context_length": 8, "learning_rate": 3e-3, "warmup_steps": 2}
    often = {"log_every": 1, "eval_every": 0, "checkpoint_every": 0, "eval_tokens": 64}
    return pal.TrainConfig.from_dict(tiny | often | fields)


def noisy(model: pal.Model) -> pal.Model:
    """The model with dropout from torch's generator and a factor each from numpy's and Python's."""

    def hook(module: Any, inputs: Any, output: Tensor) -> Tensor:
        if not model.training:
            return output
        return F.dropout(output, 0.2) * float(1 + 0.1 * np.random.rand() + 0.1 * random.random())

    model.norm.register_forward_hook(hook)
    return model


def files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(records: list[dict[str, Any]]) -> list[float]:
    return [record["loss"] for record in records if "loss" in record]


def assert_same_run(one: Trainer, two: Trainer) -> None:
    assert one.steps_done == two.steps_done and one.batches.state_dict() == two.batches.state_dict()
    for (name, a), b in zip(one.model.named_parameters(), two.model.parameters(), strict=True):
        assert torch.equal(a, b), name
    left, right = one.optimizer.named_state(), two.optimizer.named_state()
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize(
    ("preset", "dtype"), [("gpt2-tiny", "float32"), ("kimi-k3-tiny", "float32"), ("gpt2-tiny", "bfloat16")]
)
def test_a_resumed_run_is_the_same_run(tmp_path: Path, preset: str, dtype: str) -> None:
    """10 steps against 5, another process' random states, and the other 5."""
    config = settings(accumulation=2, checkpoint_every=5, keep_checkpoints=1)

    def trainer(folder: str) -> Trainer:
        model = noisy(small(preset).to(torch.bfloat16 if dtype == "bfloat16" else torch.float32))
        return Trainer(model, config, TEXT, TEXT[:50], folder=tmp_path / folder, tokenizer=Tokenizer.bytes())

    def seed(value: int) -> None:
        torch.manual_seed(value)
        np.random.seed(value)
        random.seed(value)

    whole, first = trainer("whole"), trainer("pieces")
    seed(11)
    records = whole.run()
    states = random_state.current()

    def stop(record: dict[str, Any]) -> None:
        if record["step"] == 7:  # two steps beyond the checkpoint, which are lost
            raise SystemExit

    first.report = stop
    seed(11)
    with pytest.raises(SystemExit):
        first.run()
    seed(99)
    second = trainer("pieces")
    with torch.no_grad():
        for parameter in second.model.parameters():
            parameter.zero_()
    assert second.resume() == 5
    rest = second.run()
    assert losses(rest) == losses(records)[5:]
    assert losses(lines(tmp_path / "pieces")) == losses(records) == losses(lines(tmp_path / "whole"))
    assert [r["step"] for r in lines(tmp_path / "pieces")] == [*range(1, 11), 10]
    assert rest[-1]["val_nats_per_token"] == records[-1]["val_nats_per_token"]
    assert random_state.current() == states
    assert_same_run(whole, second)
    loaded, tokenizer = checkpoint.load(tmp_path / "pieces")
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), whole.model.parameters(), strict=True))
    assert tokenizer == Tokenizer.bytes()
    assert second.run() == []


def test_what_a_killed_process_leaves_is_ignored_and_removed(tmp_path: Path) -> None:
    trainer = Trainer(small(), settings(steps=6, checkpoint_every=2, keep_checkpoints=2), TEXT, folder=tmp_path)
    trainer.run()
    folder = tmp_path / "checkpoints"
    assert [path.name for path in sorted(folder.iterdir())] == ["step-00000004", "step-00000006"]
    (folder / "step-00000006" / "train_state.json").rename(tmp_path / "elsewhere")
    half = folder / f".step-00000008{checkpoint.TEMPORARY}"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "lo')
    again = Trainer(small(), settings(steps=6, checkpoint_every=3), TEXT, folder=tmp_path)
    assert again.resume() == 4
    assert not half.exists()
    assert [record["step"] for record in lines(tmp_path)] == [1, 2, 3, 4]
    again.run()
    assert_same_run(trainer, again)


def test_a_run_without_a_checkpoint_begins_anew_when_resumed(tmp_path: Path) -> None:
    def fail(record: dict[str, Any]) -> None:
        raise SystemExit

    with pytest.raises(SystemExit):
        Trainer(small(), settings(), TEXT, folder=tmp_path, report=fail).run()
    again = Trainer(small(), settings(), TEXT, folder=tmp_path)
    assert again.resume() == 0
    again.run()
    fresh = Trainer(small(), settings(), TEXT)
    assert losses(fresh.run()) == losses(lines(tmp_path))


def test_accumulation_counts_tokens_not_micro_batches() -> None:
    """Micro-batches of 2, 8 and 0 predicted tokens, against one batch of all ten."""
    ids = make_ids(small(), 3, 9)
    labels = ids.clone()
    labels[0, 3:] = -100
    labels[2] = -100
    model, large = small(), small()
    pairs = [(ids[i : i + 1], labels[i : i + 1], None) for i in range(3)]
    loss = backward(model, pairs)
    expected = large(ids, labels=labels).loss
    expected.backward()
    assert loss == pytest.approx(float(expected.detach()), rel=1e-6)
    with torch.no_grad():
        parts = [float(model(*pair[:1], labels=pair[1]).loss) for pair in pairs]
    assert loss == pytest.approx((2 * parts[0] + 8 * parts[1]) / 10, rel=1e-6)
    assert abs(loss - (parts[0] + parts[1]) / 2) > 1e-3, "the example cannot tell the two means apart"
    gradients = [torch.cat([p.grad.flatten() for p in m.parameters() if p.grad is not None]) for m in (model, large)]
    assert relative(*gradients) < 1e-5
    assert backward(model, pairs[2:]) == 0.0


@pytest.mark.parametrize("preset", ["gpt2-tiny", "kimi-k3-tiny"])
def test_documents_apart_are_documents_alone(preset: str) -> None:
    """Cut at every end of text and row, in order: loss and gradients are those of each document by itself."""
    end = 256
    ids = torch.tensor([[1, 2, 3, end, 4, 5, end, end], [6, end, 7, 8, 9, 10, 11, 12]])
    packed, bounds = split_documents(ids, end)
    assert packed.shape == (1, 16) and bounds.tolist() == [0, 4, 7, 8, 10, 16]
    model, alone = small(preset).double(), small(preset).double()
    loss = backward(model, [(packed, packed, bounds)])
    pieces = [packed[:, a:b] for a, b in itertools.pairwise(bounds.tolist())]
    expected = backward(alone, [(piece, piece, None) for piece in pieces])
    assert loss == pytest.approx(expected, rel=1e-10)
    gradients = [torch.cat([p.grad.flatten() for p in m.parameters() if p.grad is not None]) for m in (model, alone)]
    assert relative(*gradients) < 1e-9
    tokens = ids.flatten().numpy()
    trainer = Trainer(small(preset), settings(separate_documents=True), tokens, tokens, tokenizer=Tokenizer.bytes())
    trainer.step()
    assert math.isfinite(trainer.evaluate())
    with pytest.raises(pal.InputError, match="separate_documents is true, but the tokenizer has no end-of-text token"):
        Trainer(small(preset), settings(separate_documents=True), TEXT)


def test_accumulated_steps_equal_steps_of_one_large_batch() -> None:
    runs = [
        Trainer(small("kda-tiny"), settings(steps=4, batch_size=batch, accumulation=4 // batch), TEXT).run()
        for batch in (1, 2, 4)
    ]
    for other in runs[1:]:
        assert losses(other) == pytest.approx(losses(runs[0]), rel=1e-4)
        assert [r["tokens"] for r in other] == [r["tokens"] for r in runs[0]] == [32, 64, 96, 128]


@pytest.mark.parametrize("preset", ["gpt2-tiny", "kda-tiny"])
def test_the_loss_falls_on_a_pattern_and_the_records_say_so(tmp_path: Path, preset: str) -> None:
    heard: list[dict[str, Any]] = []
    trainer = Trainer(
        small(preset),
        settings(steps=30, learning_rate=1e-2, log_every=10, eval_every=15),
        torch.from_numpy(TOKENS),
        TOKENS[:100],
        folder=tmp_path / "a" / "run",
        bytes_per_token=2.0,
        report=heard.append,
    )
    records = trainer.run()
    assert records == heard == lines(tmp_path / "a" / "run")
    steps = [r for r in records if "loss" in r]
    assert [r["step"] for r in steps] == [10, 20, 30]
    assert (
        steps[-1]["loss"]
        < 1.0
        < math.log(257) - 1
        < small(preset)(torch.zeros(1, 8).long(), labels=torch.zeros(1, 8).long()).loss
    )
    keys = {"step", "tokens", "repeats", "loss", "lr", "grad_norm", "tokens_per_s", "memory_bytes", "seconds"}
    lists = {"groups", "residual_rms", *(["gates"] if preset == "kda-tiny" else [])}
    assert set(steps[0]) == keys | lists and all(steps[0][key] > 0 for key in keys)
    assert trainer.optimizer.param_groups[-1]["lr"] == steps[-1]["lr"] == pytest.approx(1e-3)
    assert steps[-1]["tokens"] == 30 * 2 * 8 and steps[-1]["repeats"] == 30 * 2 * 8 / len(TOKENS)
    checks = [r for r in records if "val_nats_per_token" in r]
    assert [r["step"] for r in checks] == [15, 30]
    for check in checks:
        assert check["val_bits_per_byte"] == pytest.approx(check["val_nats_per_token"] / math.log(2) / 2)
    assert checks[-1]["val_nats_per_token"] == trainer.evaluate() < 1.0


def test_validation_weighs_every_token_alike_and_disturbs_nothing() -> None:
    model = make_model("gpt2-tiny").train()
    tokens = TEXT[:100].astype(np.uint16)
    trainer = Trainer(model, settings(batch_size=3, context_length=8, eval_tokens=85), TEXT, tokens)
    before = random_state.current()
    nats = trainer.evaluate()
    assert trainer.evaluate() == nats and random_state.current() == before and model.training
    total, count = 0.0, 0
    with torch.no_grad():
        for start in range(0, 85, 8):
            ids = torch.from_numpy(tokens[start : min(start + 8, 85)].astype(np.int64)).unsqueeze(0)
            logits = model(ids).logits[0, :-1].double()
            total += float(F.cross_entropy(logits, ids[0, 1:], reduction="sum"))
            count += ids.shape[1] - 1
    assert count == 10 * 7 + 4 and nats == pytest.approx(total / count, rel=1e-6)
    with pytest.raises(pal.InputError, match="validation_tokens: none were given"):
        Trainer(model, settings(), TEXT).evaluate()


def test_bfloat16_autocast_trains_float32_weights() -> None:
    runs = [Trainer(small(), settings(precision=precision), TOKENS, TOKENS[:64]) for precision in ("fp32", "bf16")]
    exact, rounded = (losses(trainer.run()) for trainer in runs)
    assert rounded != exact and rounded == pytest.approx(exact, rel=2e-2)
    assert runs[1].evaluate() == pytest.approx(runs[0].evaluate(), rel=2e-2)
    assert {p.dtype for p in runs[1].model.parameters()} == {torch.float32}


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "id beyond the vocabulary": (
        {"tokens": np.array([1] * 50 + [257])},
        r"train_tokens: holds the id 257; .*vocab_size is 257",
    ),
    "negative id": ({"tokens": np.array([1] * 50 + [-1])}, "train_tokens: holds the id -1"),
    "not integers": ({"tokens": np.ones(50)}, r"train_tokens: float64 with shape \[50\]"),
    "not one row": ({"tokens": TEXT.reshape(10, 100)}, r"train_tokens: int64 with shape \[10, 100\]"),
    "too few": ({"tokens": TEXT[:7]}, "tokens: there are 7"),
    "validation id": ({"validation": np.array([1, 300])}, "validation_tokens: holds the id 300"),
    "validation too short": ({"validation": np.array([1])}, "validation_tokens: 1 tokens"),
    "context of one": ({"config": settings(context_length=1)}, "context_length is 1"),
    "context beyond the positions": ({"model": small(max_position_embeddings=7)}, "context_length is 8; .* ends at 7"),
    "tokenizer": ({"model": small(vocab_size=256), "tokens": TOKENS}, "vocab_size is 256; the tokenizer has 257"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_does_not_fit_is_refused_and_nothing_is_written(tmp_path: Path, case: str) -> None:
    given, message = REFUSALS[case]
    with pytest.raises(pal.InputError, match=message) as error:
        Trainer(
            given.get("model") or small(),
            given.get("config", settings()),
            given.get("tokens", TEXT),
            given.get("validation"),
            folder=tmp_path / "run",
            tokenizer=Tokenizer.bytes(),
        )
    assert "\n" not in str(error.value)
    assert files(tmp_path) == []


def test_a_folder_that_holds_a_run_is_refused_without_resume(tmp_path: Path) -> None:
    Trainer(small(), settings(steps=2), TEXT, folder=tmp_path / "run").run()
    (tmp_path / "file").write_text("x")
    before = {name: (tmp_path / name).read_bytes() for name in files(tmp_path) if (tmp_path / name).is_file()}
    for name, message in [("run", "holds a run already; resume it"), ("file", "it is a file")]:
        with pytest.raises(pal.InputError, match=message):
            Trainer(small(), settings(steps=2), TEXT, folder=tmp_path / name).run()
    for folder in (None, tmp_path / "elsewhere"):
        with pytest.raises(pal.InputError, match="there is no run to resume"):
            Trainer(small(), settings(), TEXT, folder=folder).resume()
    assert {name: (tmp_path / name).read_bytes() for name in files(tmp_path) if (tmp_path / name).is_file()} == before


def test_resuming_with_anything_else_names_the_difference_and_both_values(tmp_path: Path) -> None:
    Trainer(small(), settings(steps=2), TEXT, TEXT[:50], folder=tmp_path, tokenizer=Tokenizer.bytes()).run()
    before = files(tmp_path)

    def resume(**given: Any) -> Trainer:
        config = settings(**{"steps": 2, **given.get("config", {})})
        model = given.get("model") or small()
        tokenizer = given.get("tokenizer", Tokenizer.bytes())
        trainer = Trainer(model, config, given.get("tokens", TEXT), TEXT[:50], folder=tmp_path, tokenizer=tokenizer)
        weights = [p.detach().clone() for p in model.parameters()]
        try:
            trainer.resume()
        except pal.InputError:
            assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
            raise
        return trainer

    changed = TEXT.copy()
    changed[500] = (changed[500] + 1) % 257
    for given, message in [
        ({"config": {"steps": 3, "beta1": 0.5}}, "train.steps was 2, is 3; train.beta1 was 0.9, is 0.5;"),
        ({"config": {"seed": 1, "learning_rate": 0.5}}, "train.learning_rate was 0.003, is 0.5; train.seed was 0, is 1;"),
        ({"model": small(rms_norm_eps=1e-3)}, "model.rms_norm_eps was 1e-05, is 0.001;"),
        ({"model": small(hidden_size=32)}, "model.hidden_size was 64, is 32;"),
        ({"tokens": changed}, r"train_tokens.digest was '[0-9a-f]+', is '[0-9a-f]+';"),
        ({"tokens": TEXT[:-1]}, "train_tokens.tokens was 1000, is 999;"),
        ({"tokenizer": None}, "tokenizer was '[0-9a-f]+', is None;"),
    ]:
        with pytest.raises(pal.InputError, match=f"the run there differs: {message}") as error:
            resume(**given)
        assert "\n" not in str(error.value)
    free = {"log_every": 2, "eval_every": 1, "checkpoint_every": 1, "keep_checkpoints": 1}
    assert resume(config=free, tokens=torch.from_numpy(TEXT)).steps_done == 2
    assert files(tmp_path) == before


def test_a_damaged_checkpoint_is_refused_before_anything_changes(tmp_path: Path) -> None:
    Trainer(small(), settings(steps=2), TEXT, folder=tmp_path).run()
    path = tmp_path / "checkpoints" / "step-00000002"
    whole = {name: (path / name).read_bytes() for name in files(path)}
    state = json.loads(whole["train_state.json"])
    del state["random"]
    for name, data, message in [
        ("model.safetensors", whole["model.safetensors"][:-9], "cut short"),
        ("optimizer.safetensors", whole["optimizer.safetensors"][:-9], "cut short"),
        ("optimizer.safetensors", whole["model.safetensors"], "belongs to no parameter; remove this folder"),
        ("train_state.json", json.dumps(state).encode(), "'random' is missing; remove this folder"),
        ("train_state.json", b"{", "not valid JSON"),
    ]:
        (path / name).write_bytes(data)
        model = small()
        with pytest.raises(pal.InputError, match=message) as error:
            Trainer(model, settings(steps=2), TEXT, folder=tmp_path).resume()
        assert "\n" not in str(error.value) and str(path) in str(error.value)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), small().parameters(), strict=True))
        (path / name).write_bytes(whole[name])
    assert Trainer(small(), settings(steps=2), TEXT, folder=tmp_path).resume() == 2


def test_ctrl_c_finishes_the_step_saves_and_raises(tmp_path: Path) -> None:
    def press(record: dict[str, Any]) -> None:
        if record["step"] == 3:
            signal.raise_signal(signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        Trainer(small(), settings(), TEXT, folder=tmp_path, report=press).run()
    assert signal.getsignal(signal.SIGINT) is handler
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["step-00000003"]
    resumed = Trainer(small(), settings(), TEXT, folder=tmp_path)
    assert resumed.resume() == 3
    assert losses(resumed.run()) == losses(Trainer(small(), settings(), TEXT).run())[3:]
    with pytest.raises(KeyboardInterrupt):
        Trainer(small(), settings(), TEXT, report=press).run()


def test_an_interrupt_inside_a_step_saves_nothing_torn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = Trainer(small(), settings(checkpoint_every=2), TEXT, folder=tmp_path)
    update, calls = trainer.optimizer.step, 0

    def torn() -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        update()

    trainer.optimizer.step = torn  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["step-00000002"]
    assert "stopped after step 3; the last checkpoint is" in capsys.readouterr().err


def test_a_loss_that_is_not_finite_ends_the_run_in_one_line(tmp_path: Path) -> None:
    def poison(record: dict[str, Any]) -> None:
        if record["step"] == 4:
            with torch.no_grad():
                trainer.model.norm.weight[0] = float("nan")  # type: ignore[index]

    trainer = Trainer(small(), settings(checkpoint_every=3), TEXT, folder=tmp_path / "run", report=poison)
    with pytest.raises(TrainingFailed) as error:
        trainer.run()
    text = str(error.value)
    assert text.startswith("step 5: the loss is nan; lower learning_rate") and "\n" not in text
    assert f"the last checkpoint is {tmp_path / 'run' / 'checkpoints' / 'step-00000003'}" in text
    assert [path.name for path in checkpoint.checkpoints(tmp_path / "run")] == ["step-00000003"]
    assert all(bool(p.isfinite().all()) for p in checkpoint.load(tmp_path / "run")[0].parameters())
    assert losses(lines(tmp_path / "run")) == losses(Trainer(small(), settings(steps=10), TEXT).run())[:4]
    trainer = Trainer(small(), settings(), TEXT)
    with torch.no_grad():
        trainer.model.norm.weight[0] = float("nan")  # type: ignore[index]
    with pytest.raises(TrainingFailed, match=r"^step 1: the loss is nan; .* \(there is no checkpoint yet\)$"):
        trainer.step()


def test_gradients_that_are_not_finite_leave_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(small(), settings(), TEXT)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.model.norm.weight.register_hook(lambda gradient: gradient * float("inf"))  # type: ignore[union-attr]
    with pytest.raises(TrainingFailed, match=r"^step 1: the gradient norm is (nan|inf); .*no checkpoint yet"):
        trainer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


def test_progress_is_a_line_per_record_and_one_moving_line_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Trainer(small(), settings(steps=6, log_every=3), TEXT, TEXT[:50], bytes_per_token=1.0).run()
    printed = capsys.readouterr()
    assert printed.out == ""
    three, six, validation = printed.err.splitlines()
    assert three.startswith("step 3/6  loss ") and "tokens/s" in three and "MiB" in three and three.endswith(" left")
    assert six.startswith("step 6/6  loss ") and six.endswith("0:00:00 left")
    assert validation.startswith("step 6/6  validation ") and validation.endswith(" bits per byte")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    Trainer(small(), settings(steps=6, log_every=3), TEXT).run()
    text = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert text.startswith("\rstep 1/6") and text.count("\n") == 1 and text.endswith("0:00:00 left\x1b[K\n")
