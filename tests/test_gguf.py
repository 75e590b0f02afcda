"""GGUF files: every block type against its definition, models and tokenizers there and back, and damaged files."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import palimpsest as pal
from palimpsest import ops
from palimpsest.cli import main
from palimpsest.convert import ggml, gguf
from palimpsest.tokenizer import Tokenizer
from tests.conftest import make_ids, make_model

TEXTS = ["to be or not to be, that is the question", "it's 2026, isn't it?\n", "naïve ☃ 12345"]


def draw(size: int, seed: int) -> list[int]:
    return torch.randint(256, (size,), generator=torch.Generator().manual_seed(seed)).tolist()


def half(value: float) -> list[int]:
    return list(struct.pack("<e", value))


# ------------------------------------------------------------------------------------------------------------------- blocks


def test_blocks_of_32() -> None:
    """Byte by byte, as the definitions say it."""
    nibbles, whole = draw(16, 1), draw(32, 2)
    low, high = [byte % 16 for byte in nibbles], [byte // 16 for byte in nibbles]
    signed = [byte - 256 if byte > 127 else byte for byte in whole]
    cases = {
        "Q8_0": (half(0.25) + whole, [0.25 * q for q in signed]),
        "Q4_0": (half(0.5) + nibbles, [0.5 * (q - 8) for q in low + high]),
        "Q4_1": (half(0.5) + half(-3.0) + nibbles, [0.5 * q - 3 for q in low + high]),
    }
    for kind, (data, meant) in cases.items():
        rows = torch.tensor([data * 3, data * 3], dtype=torch.uint8)
        assert ggml.decode(rows, kind).tolist() == [meant * 3, meant * 3], kind


def test_blocks_of_256() -> None:
    low, high, scales = draw(128, 3), draw(64, 4), draw(16, 5)
    signed = [byte - 256 if byte > 127 else byte for byte in scales]
    meant = [0.0] * 256
    for side in range(2):
        for at in range(32):
            top = high[32 * side + at]
            parts = [low[64 * side + at] % 16, low[64 * side + 32 + at] % 16]
            parts += [low[64 * side + at] // 16, low[64 * side + 32 + at] // 16]
            for run, part in enumerate(parts):
                q = part + 16 * (top >> 2 * run & 3) - 32
                meant[128 * side + 32 * run + at] = 0.125 * signed[8 * side + 2 * run + at // 16] * q
    data = torch.tensor(low + high + scales + half(0.125), dtype=torch.uint8)
    assert ggml.decode(torch.stack([data, data]), "Q6_K").tolist() == [meant, meant]


def test_eight_bits_are_nearest() -> None:
    torch.manual_seed(0)
    weights = torch.randn(6, 64) * torch.logspace(-3, 3, 6).unsqueeze(1)
    weights[5, :32] = 0
    found = ggml.decode(ggml.encode(weights, "Q8_0"), "Q8_0")
    step = weights.unflatten(1, (2, 32)).abs().amax(2, keepdim=True) / 127
    error = (found - weights).unflatten(1, (2, 32)).abs()
    assert (error <= step * (0.5 + 127 * 2**-11)).all()  # half a step, and the scale's own rounding
    assert not found[5, :32].any()
    for kind, dtype in ggml.PLAIN.items():
        assert torch.equal(ggml.decode(ggml.encode(weights, kind), kind), weights.to(dtype))


def test_mxfp4_blocks_hold_the_same_numbers_in_their_own_order() -> None:
    """R063: value j in the low half of byte j, value 16 + j in the high half, behind the scale."""
    packed, scale = ops.mxfp4_encode(torch.randn(3, 64))
    blocks = ggml.from_mxfp4(packed, scale).unflatten(1, (2, 17))
    assert torch.equal(blocks[..., 0], scale)
    codes = torch.cat([blocks[..., 1:] & 15, blocks[..., 1:] >> 4], -1).flatten(-2)
    again = codes[:, 0::2] | (codes[:, 1::2] << 4)
    assert torch.equal(again, packed)


# ------------------------------------------------------------------------------------------------------------------- models


def llama(**fields: Any) -> pal.Model:
    return make_model("smollm2-tiny", num_hidden_layers=2, **fields)


def trained() -> Tokenizer:
    return Tokenizer.train(TEXTS * 20, 300)


@pytest.mark.parametrize("fields", [{}, {"head_dim": 24, "num_key_value_heads": 1, "tie_word_embeddings": False}])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_llama_there_and_back(tmp_path: Path, dtype: str, fields: dict[str, Any]) -> None:
    tokenizer = trained()
    model = llama(vocab_size=tokenizer.vocab_size + 3, **fields)
    pal.save(model, tmp_path / "m.gguf", tokenizer=tokenizer, dtype=dtype)
    loaded, words = pal.load(tmp_path / "m.gguf")
    assert loaded.config == model.config.replace(initializer_range=0.02)
    plain = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[dtype]
    assert (loaded.lm_head.weight is loaded.embed_tokens.weight) == model.config.tie_word_embeddings
    for (name, ours), (again, theirs) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert name == again
        assert torch.equal(theirs, ours if ours.dim() == 1 else ours.to(plain)), name
    assert loaded(make_ids(model, 1, 9)).logits.isfinite().all()
    assert words is not None and (words.vocab_size, words.eos_id) == (tokenizer.vocab_size, tokenizer.eos_id)
    for text in TEXTS:
        assert words.encode(text) == tokenizer.encode(text) and words.decode(words.encode(text)) == text
    assert words.encode("<|endoftext|>", allow_special=True) == [tokenizer.eos_id]
    assert list(tmp_path.iterdir()) == [tmp_path / "m.gguf"]


def test_eight_bits_there_and_back(tmp_path: Path) -> None:
    model = llama(intermediate_size=80)  # down_proj's rows are no whole blocks: float16
    pal.save(model, tmp_path / "m.gguf", dtype="q8_0")
    kinds = {name: stored.kind for name, stored in gguf.open_file(tmp_path / "m.gguf").tensors.items()}
    assert (kinds["blk.1.ffn_up.weight"], kinds["blk.1.ffn_down.weight"], kinds["output_norm.weight"]) == ("Q8_0", "F16", "F32")
    loaded, tokenizer = pal.load(tmp_path / "m.gguf")
    assert tokenizer is None
    for (name, ours), (_, theirs) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert theirs.dtype == torch.float32 and (theirs - ours).abs().max() <= ours.abs().max() / 127, name
    # What was rounded once is not rounded again.
    pal.save(loaded, tmp_path / "again.gguf", dtype="q8_0")
    again = dict(pal.load(tmp_path / "again.gguf")[0].named_parameters())
    for name, ours in loaded.named_parameters():
        theirs = again[name]
        torch.testing.assert_close(theirs, ours, rtol=2e-3, atol=1e-6, msg=name)


def test_rotating_pairs_stand_side_by_side(tmp_path: Path) -> None:
    model = llama()
    pal.save(model, tmp_path / "m.gguf")
    stored = gguf.open_file(tmp_path / "m.gguf").read("blk.0.attn_k.weight")
    ours = model.get_parameter("layers.0.mixer.k_proj.weight")
    for head in range(2):
        for pair in range(8):
            assert torch.equal(stored[16 * head + 2 * pair], ours[16 * head + pair])
            assert torch.equal(stored[16 * head + 2 * pair + 1], ours[16 * head + 8 + pair])


def test_the_way_texts_are_split_is_kept(tmp_path: Path) -> None:
    """SmolLM's way lets every digit stand alone; another way has no name there and is refused."""
    plain = trained()
    before = {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, plain.definition["pre_tokenizer"]],
    }
    digits = Tokenizer({**plain.definition, "pre_tokenizer": before}, {"chat_template": "{{ messages }}"})
    model = llama(vocab_size=320)
    pal.save(model, tmp_path / "m.gguf", tokenizer=digits)
    words = pal.load(tmp_path / "m.gguf")[1]
    assert words is not None and words.config["chat_template"] == "{{ messages }}"
    assert words.encode("x 12345") == digits.encode("x 12345")
    pal.save(model, tmp_path / "bytes.gguf", tokenizer=Tokenizer.bytes())
    words = pal.load(tmp_path / "bytes.gguf")[1]
    assert words is not None and words.encode("naïve ☃") == list("naïve ☃".encode()) and words.eos_id == 256
    other = {**plain.definition, "pre_tokenizer": {"type": "Whitespace"}}
    with pytest.raises(pal.InputError, match="GGUF has no name"):
        pal.save(model, tmp_path / "other.gguf", tokenizer=Tokenizer(other))
    assert not (tmp_path / "other.gguf").exists()


@pytest.mark.parametrize(
    ("preset", "fields", "message"),
    [
        ("qwen3-next-tiny", {}, "Qwen3-Next models are not written"),
        ("linear-attention-tiny", {}, "linear_output_norm"),
        ("kimi-linear-tiny", {"linear_num_value_heads": 2, "linear_num_key_heads": 2}, "linear_num_value_heads is 2"),
        ("kimi-linear-tiny", {"mla_use_nope": False}, "mla_use_nope is False"),
        ("kda-340m", {}, "layers with KDA, with MLA and with experts"),
        ("hybrid-latent-moe-tiny", {}, "residual is 'sum'"),
        ("kimi-k3-tiny", {"moe_hidden_act": "swiglu"}, "situ|SiTU"),
    ],
)
def test_models_without_a_graph_are_refused(tmp_path: Path, preset: str, fields: dict[str, Any], message: str) -> None:
    with torch.device("meta"):
        model = pal.Model(pal.ModelConfig.preset(preset, **fields))
    with pytest.raises(pal.InputError, match=f"^model: .*({message})"):
        pal.save(model, tmp_path / "m.gguf")


def test_kimi_tensors(tmp_path: Path) -> None:
    """What changes on the way: -exp(A_log), the latent's two parts, a norm times its query, taps, experts in four bits."""
    model = make_model("kimi-k3-tiny")
    pal.save(model, tmp_path / "m.gguf")
    file = gguf.open_file(tmp_path / "m.gguf")
    ours = dict(model.named_parameters())
    assert torch.equal(file.read("blk.0.ssm_a"), -ours["layers.0.mixer.A_log"].exp())
    both = ours["layers.3.mixer.kv_b_proj.weight"].view(4, 32, 32)
    assert torch.equal(file.read("blk.3.attn_k_b.weight"), both[:, :16].mT)
    assert torch.equal(file.read("blk.3.attn_v_b.weight"), both[:, 16:])
    score = ours["layers.2.mlp_residual.norm"].flatten() * ours["layers.2.mlp_residual.proj"].flatten()
    assert torch.equal(file.read("blk.2.ffn_res_score.weight"), score)
    assert file.tensors["blk.0.ssm_conv1d_q.weight"].shape == (1, 64, 1, 4)
    assert torch.equal(file.read("blk.1.ffn_down_exps.weight"), ours["layers.1.mlp.experts.down_proj"])
    assert file.metadata["kimi-k3.attention.head_count_kv"] == [0, 0, 0, 1, 1]
    assert math.isclose(file.metadata["kimi-k3.kda.gate_lower_bound"], -5.0)
    pal.save(model, tmp_path / "f.gguf", dtype="mxfp4")
    model.pack_experts()
    pal.save(model, tmp_path / "p.gguf", dtype="mxfp4")
    first, second = (gguf.open_file(tmp_path / name) for name in ("f.gguf", "p.gguf"))
    assert first.tensors["blk.1.ffn_up_exps.weight"].kind == "MXFP4"
    assert first.tensors.keys() == second.tensors.keys() == file.tensors.keys()
    assert all(torch.equal(first.raw(name), second.raw(name)) for name in first.tensors)
    with pytest.raises(pal.InputError, match="packed in four bits"):
        pal.save(model, tmp_path / "o.gguf", dtype="f16")
    with pytest.raises(pal.InputError, match=r"general\.architecture is 'kimi-k3'; this version reads 'llama'"):
        pal.load(tmp_path / "p.gguf")


# ------------------------------------------------------------------------------------------------------------------ refusals


def rewrite(path: Path, change: Callable[[dict[str, Any], dict[str, Any]], Any]) -> None:
    """The file again with changed metadata (code, value) or tensors (type, shape, bytes)."""
    file = gguf.open_file(path)
    codes = {bool: gguf.BOOL, int: gguf.UINT32, float: gguf.FLOAT32, str: gguf.TEXT}
    metadata: dict[str, Any] = {k: (codes[type(v)], v) for k, v in file.metadata.items() if type(v) in codes}
    tensors: dict[str, Any] = {name: [s.kind, s.shape, file.raw(name)] for name, s in file.tensors.items()}
    change(metadata, tensors)
    shapes = {name: (kind, shape) for name, (kind, shape, _) in tensors.items()}
    gguf.write_file(path, metadata, shapes, (data for *_, data in tensors.values()))


def set_meta(**values: tuple[int, Any]) -> Callable[[Path], None]:
    return lambda path: rewrite(path, lambda meta, _: meta.update({k.replace("__", "."): v for k, v in values.items()}))


def set_tensor(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    return lambda path: rewrite(path, lambda _, tensors: change(tensors))


def cut(share: float) -> Callable[[Path], Any]:
    return lambda path: path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


NORM = "blk.1.attn_norm.weight"
NAN = torch.full((64,), math.nan).view(torch.uint8)
DAMAGES: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "empty": (cut(0), ["it has 0 bytes"]),
    "cut table": (cut(0.002), ["its table goes on at byte"]),
    "cut data": (cut(0.99), ["of", "cut short"]),
    "magic": (lambda p: p.write_bytes(b"GGML" + p.read_bytes()[4:]), ["begins with b'GGML'", "expected b'GGUF'"]),
    "version": (lambda p: p.write_bytes(b"GGUF\x09" + p.read_bytes()[5:]), ["version 9", "version 2 or 3"]),
    "architecture": (set_meta(general__architecture=(8, "gemma3")), ["'gemma3'", "reads 'llama'"]),
    "no layers": (set_meta(llama__block_count=(8, "two")), ["llama.block_count is 'two'; expected a number"]),
    "experts": (set_meta(llama__expert_count=(4, 8)), ["llama.expert_count is 8; only 0"]),
    "scaled": (set_meta(llama__rope__scaling__type=(8, "yarn")), ["llama.rope.scaling.type is 'yarn'; only 'none'"]),
    "rotary": (set_meta(llama__rope__dimension_count=(4, 8)), ["llama.rope.dimension_count is not the width of a head, 16"]),
    "missing": (set_tensor(lambda t: t.pop(NORM)), [f"'{NORM}' is missing", "expected 20 tensors, found 19"]),
    "surplus": (set_tensor(lambda t: t.update(extra=t[NORM])), ["'extra' has no place", "found 21"]),
    "no embedding": (set_tensor(lambda t: t.pop("token_embd.weight")), ["'token_embd.weight' is missing"]),
    "shape": (set_tensor(lambda t: t.update({NORM: ["F32", (32,), t[NORM][2][:128]]})), [f"'{NORM}' has shape [32]"]),
    "type": (set_tensor(lambda t: t.update({NORM: ["MXFP4", (64,), torch.zeros(34)]})), [f"'{NORM}' is MXFP4", "reads F32"]),
    "nan": (set_tensor(lambda t: t.update({NORM: ["F32", (64,), NAN]})), [f"'{NORM}' holds NaN"]),
    "tokenizer": (set_meta(tokenizer__ggml__model=(8, "llama")), ["the tokenizer is 'llama'", "reads 'gpt2'"]),
    "split": (set_meta(tokenizer__ggml__model=(8, "gpt2"), tokenizer__ggml__pre=(8, "qwen2")), ["split as 'qwen2'"]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "m.gguf"
    pal.save(llama(), path)
    edit, parts = DAMAGES[damage]
    edit(path)
    with pytest.raises(pal.InputError) as error:
        pal.load(path)
    text = str(error.value)
    assert "\n" not in text and str(path) in text
    assert [part for part in parts if part not in text] == [], text


def test_the_command_writes_and_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pal.save(llama(), tmp_path / "model", tokenizer=Tokenizer.bytes())
    source, out, found = str(tmp_path / "model"), str(tmp_path / "m.gguf"), tmp_path / "n.json"
    assert main(["convert", source, out, "--to", "gguf", "--dtype", "q8_0", "--json", str(found)]) == 0
    numbers = json.loads(found.read_text())
    assert numbers["tensors"] == 20 and numbers["family"] == "llama" and numbers["dtypes"]["Q8_0"]["tensors"] == 15
    assert main(["convert", out]) == 0
    assert "in 1 files: llama" in capsys.readouterr().out
    back = str(tmp_path / "back")
    assert main(["convert", out, back, "--dtype", "bf16"]) == 0
    assert pal.load(back)[0].embed_tokens.weight.dtype == torch.bfloat16
    assert main(["generate", out, "a", "--max-new-tokens", "2"]) == 0
    capsys.readouterr()
    wrong = str(tmp_path / "other")
    for given in ([source, wrong, "--to", "gguf"], [source, f"{wrong}.gguf"], [source, out, "--to", "gguf"]):
        assert main(["convert", *given]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
    assert main(["convert", source, wrong, "--dtype", "q8_0"]) == 2
    assert "a folder can hold" in capsys.readouterr().err
    assert not Path(wrong).exists()
