"""llama.cpp's parallel decoding, as `palimpsest benchmark serve` uses it, draws what it draws for each prompt alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from palimpsest import serving_rates
from palimpsest.llama_cpp import Llama
from palimpsest.published import save


@pytest.mark.parametrize("preset", ["smollm2-tiny", "kimi-linear-tiny"])
def test_sequences_do_not_see_one_another(preset: str, tmp_path: Path) -> None:
    model, tokenizer = serving_rates.preset(preset, vocab_size=257, initializer_range=0.2)
    save(model, tmp_path / "m.gguf", tokenizer, "f32")
    other = Llama(tmp_path / "m.gguf")
    prompts = [serving_rates.request(model, tokenizer, tokens, 8, tokens).prompt for tokens in (3, 64, 17, 30)]
    drawn, seconds = other.together(prompts, 8)
    assert [len(row) for row in drawn] == [8] * 4 and seconds > 0
    assert drawn == [other.together([prompt], 8)[0][0] for prompt in prompts]
    alone = [other.run(list(prompt), 8)[1] for prompt in prompts]
    assert sum(mine == theirs for mine, theirs in zip(drawn, alone, strict=True)) >= 3  # their keys are in half precision
