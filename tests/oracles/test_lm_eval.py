"""Our adapter for lm-eval against its own `hf`, on one tiny model in a published format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import palimpsest as pal
from palimpsest.config import InputError
from palimpsest.tokenizer import Tokenizer
from tests.oracles.weights import model_of

pytest.importorskip("lm_eval", reason="lm-eval is not installed (palimpsest-lm[eval]); it brings 60 packages along")
pytestmark = pytest.mark.filterwarnings("default")  # lm-eval and what it imports warn of their own affairs

WORDS = "the cat sat on the mat and the dog lay by the door while rain fell on the roof of the old house "
LIMIT = 48


@pytest.fixture(scope="module", params=["gpt2-tiny", "smollm2-tiny"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """(ours, theirs): both harnesses on the same folder."""
    from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]

    from palimpsest.harness import Harness

    tokenizer = Tokenizer.train([WORDS * 20], 300)
    model = model_of(request.param, vocab_size=tokenizer.vocab_size, max_position_embeddings=LIMIT)
    learn(model, tokenizer.encode(WORDS * 20))  # noise would not decode to text
    folder = tmp_path_factory.mktemp(request.param) / "model"
    pal.save(model, folder, tokenizer=tokenizer)
    theirs = HFLM(pretrained=str(folder), device="cpu", batch_size=3, dtype="float32", max_length=LIMIT)
    return Harness(*pal.load(folder), batch_size=3, max_length=LIMIT), theirs


def learn(model: pal.Model, ids: list[int]) -> None:
    rows = torch.tensor(ids[: len(ids) // 37 * 37]).view(-1, 37)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(40):
        model.loss(rows, rows).backward()
        optimizer.step()
        optimizer.zero_grad()


def asked(kind: str, *arguments: tuple[Any, ...]) -> list[Any]:
    from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]

    return [Instance(request_type=kind, doc={}, arguments=each, idx=i) for i, each in enumerate(arguments)]


PAIRS = [
    ("the cat", " sat on the mat"),
    ("the cat ", "sat"),
    ("", "the dog"),
    ("", "<|endoftext|>the dog"),
    (WORDS, "the cat"),  # longer than the context: its end counts
    (WORDS + " ", WORDS[:90]),
    ("a<|endoftext|>b", " lay<|endoftext|>"),
    ("rain", " fell" * 9),
]


def test_loglikelihood(both: tuple[Any, Any]) -> None:
    ours, theirs = (each.loglikelihood(asked("loglikelihood", *PAIRS)) for each in both)
    # One more, of what the model would say itself, so that both answers of `is_greedy` come up.
    text = both[0].generate_until(asked("generate_until", ("the dog", {"max_gen_toks": 3})))[0]
    more = [each.loglikelihood(asked("loglikelihood", ("the dog", text))) for each in both]
    assert [greedy for _, greedy in (*ours, *more[0])] == [greedy for _, greedy in (*theirs, *more[1])]
    assert more[0][0][1] and not ours[-2][1]
    assert [x for x, _ in ours] == pytest.approx([x for x, _ in theirs], rel=1e-4)
    assert len({round(x, 3) for x, _ in ours}) == len(PAIRS) - 1  # two say the same


def test_loglikelihood_rolling(both: tuple[Any, Any]) -> None:
    texts = [("the cat",), (WORDS,), (WORDS * 5,), ("x" * LIMIT,), ("xy" * LIMIT,)]
    ours, theirs = (each.loglikelihood_rolling(asked("loglikelihood_rolling", *texts)) for each in both)
    assert ours == pytest.approx(theirs, rel=1e-4)
    assert len(both[0].tokenizer.encode(WORDS * 5)) > 2 * LIMIT


def test_generate_until(both: tuple[Any, Any]) -> None:
    words = ["the cat sat", "rain", WORDS, "by the door while"]
    plain = {"until": [], "max_gen_toks": 20}
    first = both[1].generate_until(asked("generate_until", *((text, plain) for text in words)))
    stops = [first[0][3:5], first[1][5:6], "zzz"]
    options = [plain, {"until": stops, "max_gen_toks": 20, "do_sample": False}, {"until": stops[0], "max_gen_toks": 9}]
    ours: list[str] = []
    for each in options:
        requests = asked("generate_until", *((text, dict(each)) for text in words))
        ours, theirs = (harness.generate_until(requests) for harness in both)
        assert ours == theirs
    assert len(first[0]) > 20 and ours[0] == first[0].split(stops[0])[0]


def test_a_task_of_the_harness(both: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole evaluation over a data set in a file, with the same result in every metric."""
    import lm_eval  # pyright: ignore[reportMissingImports]

    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    rows = [
        {"q": f"the {a} sat on the", "choices": ["mat", "roof", "dog"], "gold": i % 3} for i, a in enumerate(("cat", "dog"))
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    task = {
        "task": "made_here",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{q}}",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    found = [lm_eval.simple_evaluate(each, tasks=[task], bootstrap_iters=0, verbosity="ERROR") for each in both]
    ours, theirs = ({k: v for k, v in each["results"]["made_here"].items() if "acc" in k} for each in found)
    assert ours == theirs and len(ours) >= 2
    logs = [[sample["filtered_resps"] for sample in each["samples"]["made_here"]] for each in found]
    assert [x[0] for row in logs[0] for x in row] == pytest.approx([x[0] for row in logs[1] for x in row], rel=1e-4)


def test_recurrent_models_read_any_length_whole() -> None:
    from palimpsest.harness import Harness

    tokenizer = Tokenizer.bytes()
    model = model_of("kimi-linear-tiny", vocab_size=257)
    harness = Harness(model, tokenizer)
    text = WORDS * 4
    ids = torch.tensor([[256, *text.encode()]])
    with torch.no_grad():
        expected = -float(model(ids, labels=ids).loss) * (ids.shape[1] - 1)  # type: ignore[arg-type]
    assert harness.loglikelihood_rolling(asked("loglikelihood_rolling", (text,))) == pytest.approx([expected], rel=1e-4)
    assert harness.loglikelihood_rolling(asked("loglikelihood_rolling", ("",), ("ab",)))[0] == 0


def test_what_it_cannot_do_is_said(both: tuple[Any, Any]) -> None:
    from palimpsest.harness import Harness

    ours = both[0]
    for options, words in (({"num_beams": 3}, "num_beams is 3"), ({"max_gen_toks": LIMIT}, "leave no room")):
        with pytest.raises(InputError, match=words):
            ours.generate_until(asked("generate_until", ("a", options)))
    with pytest.raises(InputError, match=f"max_length is {LIMIT}"):
        ours.loglikelihood(asked("loglikelihood", ("the", WORDS * 5)))
    with pytest.raises(InputError, match="no tokenizer"):
        Harness(ours.model, None)
    with pytest.raises(InputError, match="no token that begins"):
        Harness(ours.model, Tokenizer({**Tokenizer.bytes().definition, "added_tokens": []}))
