"""Models with weights in eight bits, and models loaded in another dtype."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

import palimpsest as pal
from palimpsest.cli import main
from palimpsest.linear import Linear8, pack
from palimpsest.tokenizer import Tokenizer
from tests.conftest import make_ids, make_model

PRESETS = ["gpt2-tiny", "smollm2-tiny", "kda-tiny", "qwen3-next-tiny", "kimi-linear-tiny", "kimi-k3-tiny"]


@pytest.mark.parametrize("preset", PRESETS)
def test_eight_bits_run_as_the_weights_they_stand_for(preset: str) -> None:
    """The packed model against the plain one with the same rounded weights: whole, a step, the loss, and what is counted."""
    model = make_model(preset)
    ids, plain = make_ids(model, 2, 30), copy.deepcopy(model)
    count, state_bytes = model.num_parameters(), model.new_state(1).num_bytes()
    pack(model)
    packed = {name: module for name, module in model.named_modules() if isinstance(module, Linear8)}
    assert len(packed) > 2 * model.config.num_hidden_layers
    for name, module in packed.items():
        map_ = plain.get_submodule(name)
        assert isinstance(map_, torch.nn.Linear)
        assert 0 < (map_.weight - module.weight).abs().max() < 0.01 * map_.weight.abs().max()
        map_.weight = torch.nn.Parameter(module.weight)
    with torch.no_grad():
        out, expected = model(ids, labels=ids), plain(ids, labels=ids)
        step = model(ids[:, 20:21], model(ids[:, :20]).state)
    # What float32 leaves of kimi-k3-tiny's logits: its kernels for eight bits sum in another order.
    torch.testing.assert_close(out.logits, expected.logits, rtol=3e-4, atol=3e-4)
    torch.testing.assert_close(out.loss, expected.loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(step.logits[:, 0], expected.logits[:, 20], rtol=3e-4, atol=3e-4)
    assert (model.num_parameters(), model.new_state(1).num_bytes()) == (count, state_bytes)
    with torch.no_grad():
        assert bool(model.to(torch.bfloat16)(ids).logits.isfinite().all())


def test_what_is_packed_is_a_third_of_the_bytes() -> None:
    model = make_model("smollm2-tiny")
    maps = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    before = sum(module.weight.nbytes for module in maps)
    pack(model)
    packed = [module for module in model.modules() if isinstance(module, Linear8)]
    assert len(packed) == len(maps)
    assert sum(module.code.nbytes + module.scale.nbytes for module in packed) * 64 == before * 17


def test_loading_in_another_dtype(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_model("smollm2-tiny")
    pal.save(model, tmp_path / "m", tokenizer=Tokenizer.bytes())
    for dtype, expected in (("f32", torch.float32), ("bf16", torch.bfloat16), ("f16", torch.float16)):
        assert pal.load(tmp_path / "m", dtype=dtype)[0].lm_head.weight.dtype is expected
    packed, tokenizer = pal.load(tmp_path / "m", dtype="q8_0")
    assert isinstance(packed.lm_head, Linear8) and tokenizer is not None
    with pytest.raises(pal.InputError, match="its weights are in eight bits, so it is not saved"):
        pal.save(packed, tmp_path / "n")
    with pytest.raises(pal.InputError, match="dtype is 'q8'; weights can be f32, bf16, f16, q8_0.*did you mean 'q8_0'"):
        pal.load(tmp_path / "m", dtype="q8")
    argv = ["generate", str(tmp_path / "m"), "To be", "--max-new-tokens", "5", "--temperature", "0"]
    for dtype in ("f32", "bf16", "q8_0"):
        assert main([*argv, "--dtype", dtype]) == 0
        assert capsys.readouterr().out.startswith("To be")
