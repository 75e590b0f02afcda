"""GGUF files for llama.cpp: models of GPT-2, Llama, Kimi Linear and Kimi K3 type, with their tokenizer.

What its graphs expect beside other names: GPT-2 has q, k, v in one; Llama's rotating pairs stand side by side; of Kimi's
layers the latent's expansion comes in two parts, decay rates as -exp(A_log), a residual's norm and query as one product.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from palimpsest.checkpoint import flush
from palimpsest.config import InputError, ModelConfig
from palimpsest.convert import EMBEDDING, Layout, ggml, gguf, gguf_in
from palimpsest.convert.gguf import BOOL, FLOAT32, INT32, LIST, TEXT, UINT32
from palimpsest.model import Model
from palimpsest.ops import mxfp4_encode
from palimpsest.tokenizer import Tokenizer

Metadata = dict[str, tuple[int, Any]]
TARGETS = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "Q8_0", "mxfp4": "BF16"}  # of matrices; mxfp4: of the others
FILE_TYPES = {"f32": 0, "f16": 1, "q8_0": 7, "bf16": 32, "mxfp4": 38}
# Never in fewer digits: vectors, and what llama.cpp wants in float32.
FULL = re.compile(r"position_embd|ssm_conv1d|ffn_gate_inp|_norm\.weight|ssm_a$|\.bias$|res_score")
NAMES = {
    **{r"mixer\.(.)_conv1d": r"ssm_conv1d_\1", r"mixer\.([fg]_[ab])_proj": r"ssm_\1", r"mixer\.b_proj": "ssm_beta"},
    **{r"mixer\.A_log": "ssm_a", r"mixer\.dt_bias": "ssm_dt.bias", r"mixer\.o_norm": "ssm_norm"},
    **{r"mixer\.(q|kv)_a_layernorm": r"attn_\1_a_norm", r"mixer\.kv_a_proj_with_mqa": "attn_kv_a_mqa"},
    **{r"mixer\.q_([ab])_proj": r"attn_q_\1", r"mlp\.gate\.weight": "ffn_gate_inp.weight"},
    **{r"mlp\.gate\.e_score_correction_bias": "exp_probs_b.bias", r"mlp\.experts\.(\w+)_proj": r"ffn_\1_exps.weight"},
    **{r"mlp\.shared_experts\.(\w+)_proj": r"ffn_\1_shexp", r"mlp\.routed_expert_(\w+)_proj": r"ffn_routed_\1"},
    **{r"mlp\.routed_expert_norm": "ffn_routed_norm", "^embed_positions": "position_embd"},
    **{r"mixer_residual\.norm": "attn_res_score.weight", r"mlp_residual\.norm": "ffn_res_score.weight"},
    **{"^output_residual.norm": "output_res_score.weight", **gguf_in.NAMES},
}


def save(model: Model, path: Path, tokenizer: Tokenizer | None, dtype: str | None) -> None:
    """Writes a GGUF file under a temporary name, reads it back, compares, and gives it its name.

    `dtype` is one of TARGETS, None for the model's own. Raises InputError, with nothing written, for a model that
    llama.cpp has no graph for, a tokenizer that GGUF has no name for, and a path that is taken.
    """
    if path.exists():
        raise InputError(f"{path}: it is there already; give a name that is free")
    own = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
    dtype = dtype or own.get(model.embed_tokens.weight.dtype, "f32")
    if dtype not in TARGETS:
        raise InputError(f"dtype is {dtype!r}; a GGUF file can hold {', '.join(TARGETS)}")
    outgoing = Outgoing(model, dtype)
    metadata = {**outgoing.metadata(), **_vocabulary(tokenizer, model.config.vocab_size)}
    temporary = path.with_name(f".{path.name}.palimpsest-tmp")
    try:
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
        tensors = {name: (kind, shape) for name, kind, shape, _ in outgoing.tensors()}
        gguf.write_file(temporary, metadata, tensors, (data() for *_, data in outgoing.tensors()))
        _compare(temporary, outgoing)
        temporary.rename(path)
        flush(path.absolute().parent)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror}); give a path on a disk with room") from error
    finally:
        temporary.unlink(missing_ok=True)


def _compare(path: Path, outgoing: Outgoing) -> None:
    """Reads everything back."""
    file = gguf.open_file(path)
    for name, _, _, data in outgoing.tensors():
        if not torch.equal(file.raw(name).flatten(), data().flatten()):
            raise InputError(f"{path}: tensor {name!r} was written and reads back otherwise; check the disk")


class Outgoing:
    """A model's tensors as llama.cpp wants them, made one at a time."""

    def __init__(self, model: Model, dtype: str) -> None:
        self.config, self.dtype = model.config, dtype
        self.ours = dict(model.named_parameters())
        self.family = Layout.of(model.config, any(name.endswith("_packed") for name in self.ours)).family
        self.architecture = self._architecture()
        if dtype == "mxfp4" and "moe" not in model.config.mlps:
            raise InputError("dtype is 'mxfp4', which is for experts; this model has none")
        if any(name.endswith("_packed") for name in self.ours) and dtype != "mxfp4":
            raise InputError(f"dtype is {dtype!r}, but the experts are packed in four bits; only 'mxfp4' keeps them")

    def _architecture(self) -> str:
        """llama.cpp's name. Raises InputError for what it has no graph for."""
        config, family = self.config, self.family.model_type
        if family in ("gpt2", "llama"):
            return family
        if family != "kimi_linear":
            raise InputError(f"model: llama.cpp files of {self.family.name} models are not written; write a folder")
        is_k3 = self.family.is_k3(config)  # type: ignore[attr-defined]
        heads = config.num_attention_heads
        required = {"linear_num_value_heads": heads, "mla_use_nope": True, "moe_renormalize": True}
        if is_k3:
            situ = [mlp for mlp in config.mlps if mlp != "moe"] + [config.moe_hidden_act]
            required |= {"residual": "block_attention", "linear_output_gate_rank": None}
            if set(situ) != {"situ"}:
                raise InputError("model: llama.cpp's graph of Kimi K3 has SiTU in every MLP; this model has not")
        for field, value in required.items():
            if (have := getattr(config, field)) != value:
                raise InputError(f"model: {field} is {have!r}; llama.cpp's graph of Kimi needs {value!r}")
        if "moe" not in config.mlps or "mla" not in config.mixers or "kda" not in config.mixers:
            raise InputError("model: llama.cpp's graph of Kimi needs layers with KDA, with MLA and with experts")
        return "kimi-k3" if is_k3 else "kimi-linear"

    def tensors(self) -> Iterator[tuple[str, str, tuple[int, ...], Callable[[], Tensor]]]:
        """Name, type and shape of each tensor, and what makes its bytes."""
        for name, ours in self.ours.items():
            yield from self._experts(name) if ".experts." in name else self._tensor(name, ours)
        if self.config.tie_word_embeddings and self.architecture.startswith("kimi"):
            yield from self._plain("output.weight", self.ours[EMBEDDING].detach())  # its graph wants a head of its own

    def _tensor(self, name: str, ours: Tensor) -> Iterator[tuple[str, str, tuple[int, ...], Callable[[], Tensor]]]:
        """The tensor of ours called `name`: under another name, changed, joined with others, or in two."""
        stem, _, leaf = name.partition(".mixer.")
        part, _, kind = leaf.partition(".")
        tensor = ours.detach()
        if self.architecture == "gpt2" and part in ("q_proj", "k_proj", "v_proj"):
            if part == "q_proj":
                fused = torch.cat([self.ours[f"{stem}.mixer.{each}_proj.{kind}"].detach() for each in "qkv"])
                yield from self._plain(f"{_rename(stem)}.attn_qkv.{kind}", fused)
        elif self.architecture == "llama" and part in ("q_proj", "k_proj"):
            heads = self.config.num_attention_heads if part == "q_proj" else self.config.num_key_value_heads
            yield from self._plain(_rename(name), gguf_in.pairs(tensor, heads))
        elif part == "kv_b_proj":
            nope, values = self.config.qk_nope_head_dim, self.config.v_head_dim
            keys, values_up = tensor.unflatten(0, (self.config.num_attention_heads, -1)).split([nope, values], 1)
            yield from self._plain(f"{_rename(stem)}.attn_k_b.weight", keys.mT)
            yield from self._plain(f"{_rename(stem)}.attn_v_b.weight", values_up)
        elif leaf == "A_log":
            rates = -tensor.exp()
            yield from self._plain(_rename(name), rates if self.architecture == "kimi-k3" else rates.view(1, 1, -1, 1))
        elif part.endswith("_conv1d"):
            yield from self._plain(_rename(name), tensor.view(1, tensor.shape[0], 1, tensor.shape[1]))
        elif part == "g_proj":
            is_linear = self.config.mixers[int(stem.split(".")[1])] == "kda"
            yield from self._plain(f"{_rename(stem)}.{'ssm_g' if is_linear else 'attn_gate'}.weight", tensor)
        elif name.endswith("residual.norm"):
            query = self.ours[name.removesuffix("norm") + "proj"].detach()
            yield from self._plain(_rename(name), tensor.float().flatten() * query.float().flatten())
        elif not name.endswith("residual.proj"):
            yield from self._plain(_rename(name), tensor)

    def _plain(self, name: str, tensor: Tensor) -> Iterator[tuple[str, str, tuple[int, ...], Callable[[], Tensor]]]:
        kind = TARGETS[self.dtype]
        if tensor.dim() == 1 or FULL.search(name):
            kind = "F32"
        elif kind == "Q8_0" and tensor.shape[-1] % 32:
            kind = "F16"  # rows that blocks do not divide, as llama.cpp does it
        yield name, kind, tuple(tensor.shape), lambda: ggml.encode(tensor, kind)

    def _experts(self, name: str) -> Iterator[tuple[str, str, tuple[int, ...], Callable[[], Tensor]]]:
        matrix = re.sub("_(packed|scale)$", "", name)
        if name.endswith("_scale"):
            return
        if self.dtype != "mxfp4":
            yield from self._plain(_rename(name), self.ours[name].detach())
            return
        is_packed = name.endswith("_packed")
        packed = self.ours[name]
        shape = (*packed.shape[:-1], packed.shape[-1] * 2) if is_packed else tuple(packed.shape)
        if shape[-1] % 32:
            raise InputError(f"model: experts are {shape[-1]} wide; in MXFP4 that must be a multiple of 32")

        def blocks() -> Tensor:
            parts = (packed, self.ours[f"{matrix}_scale"]) if is_packed else mxfp4_encode(packed)
            return ggml.from_mxfp4(parts[0].detach(), parts[1].detach())

        yield _rename(matrix), "MXFP4", shape, blocks

    def metadata(self) -> Metadata:
        """What the graph is built from."""
        config, arch = self.config, self.architecture
        values: Metadata = {
            "block_count": (UINT32, config.num_hidden_layers),
            "embedding_length": (UINT32, config.hidden_size),
            "feed_forward_length": (UINT32, config.intermediate_size),
            "attention.head_count": (UINT32, config.num_attention_heads),
            "vocab_size": (UINT32, config.vocab_size),
        }
        length, epsilon = config.max_position_embeddings, config.rms_norm_eps
        values["context_length"] = (UINT32, 1 << 20 if arch.startswith("kimi") else length)
        values["attention.layer_norm_epsilon" if arch == "gpt2" else "attention.layer_norm_rms_epsilon"] = (FLOAT32, epsilon)
        if arch == "llama":
            values["attention.head_count_kv"] = (UINT32, config.num_key_value_heads)
            values["rope.freq_base"] = (FLOAT32, config.rope_theta)
            for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
                values[key] = (UINT32, config.head_dim)
        elif arch.startswith("kimi"):
            values |= _kimi(config, arch == "kimi-k3")
        general: Metadata = {
            "general.architecture": (TEXT, arch),
            "general.file_type": (UINT32, FILE_TYPES[self.dtype]),
            "general.quantization_version": (UINT32, 2),
        }
        return {**general, **{f"{arch}.{key}": value for key, value in values.items()}}


def _kimi(config: ModelConfig, is_k3: bool) -> Metadata:
    """Keys of Kimi Linear and Kimi K3. The latent is served as one wide head of keys that all heads share."""
    counts = {
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "kda.head_dim": config.linear_value_head_dim,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": config.qk_rope_head_dim,
        "expert_count": config.num_experts,
        "expert_used_count": config.num_experts_per_token,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_count": config.num_shared_experts,
        "expert_gating_func": 2,  # sigmoid
        "leading_dense_block_count": config.mlps.index("moe"),
    }
    if config.q_lora_rank is not None:
        counts["attention.q_lora_rank"] = config.q_lora_rank
    values: Metadata = {key: (UINT32, count) for key, count in counts.items()}
    values["attention.head_count_kv"] = (LIST, (INT32, [int(mixer == "mla") for mixer in config.mixers]))
    values["expert_weights_scale"] = (FLOAT32, config.routed_scaling_factor)
    if not is_k3:
        return values
    values["attention.value_length"] = (UINT32, config.kv_lora_rank)
    values["expert_weights_norm"] = (BOOL, config.moe_renormalize)
    values["attn_res.block_size"] = (UINT32, config.attn_res_block_size)
    values["activation.situ_beta"] = (FLOAT32, config.activation_situ_beta)
    values["activation.situ_linear_beta"] = (FLOAT32, config.activation_situ_linear_beta)
    if config.routed_expert_hidden_size is not None:
        values["expert_latent_length"] = (UINT32, config.routed_expert_hidden_size)
    if config.gate_lower_bound is not None:
        values["kda.gate_lower_bound"] = (FLOAT32, config.gate_lower_bound)
    return values


def _rename(name: str) -> str:
    for ours, theirs in NAMES.items():
        name = re.sub(ours, theirs, name)
    return name


def _vocabulary(tokenizer: Tokenizer | None, size: int) -> Metadata:
    """The tokenizer's tokens, up to the model's vocabulary. Raises InputError for one that is not byte-level BPE."""
    if tokenizer is None:
        return {"tokenizer.ggml.model": (TEXT, "none")}
    definition, merges, split = tokenizer.definition, [], None
    model, before = definition["model"], definition["pre_tokenizer"] or {}
    steps: Sequence[dict[str, Any]] = before["pretokenizers"] if before.get("type") == "Sequence" else [before]
    if steps[-1].get("type") == "ByteLevel" and not steps[-1]["add_prefix_space"] and definition["normalizer"] is None:
        digits = [step for step in steps[:-1] if step == gguf_in.DIGITS]
        split = {(0, 1): "gpt-2", (1, 2): "smollm"}.get((len(digits), len(steps)))
        merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges") or []]
        if not steps[-1].get("use_regex", True) and merges:
            split = None  # merges across words
    if model["type"] != "BPE" or split is None:
        raise InputError("tokenizer: GGUF has no name for how it splits text; only GPT-2's and SmolLM's ways are written")
    tokens, kinds = [f"[PAD{i}]" for i in range(size)], [gguf_in.UNUSED] * size
    for token, i in model["vocab"].items():
        tokens[i], kinds[i] = token, gguf_in.NORMAL
    for token in definition["added_tokens"]:
        tokens[token["id"]], kinds[token["id"]] = token["content"], gguf_in.CONTROL if token["special"] else gguf_in.USER
    found: Metadata = {
        "tokenizer.ggml.model": (TEXT, "gpt2"),
        "tokenizer.ggml.pre": (TEXT, split),
        "tokenizer.ggml.tokens": (LIST, (TEXT, tokens)),
        "tokenizer.ggml.token_type": (LIST, (INT32, kinds)),
        "tokenizer.ggml.merges": (LIST, (TEXT, merges)),
        "tokenizer.ggml.add_bos_token": (BOOL, False),
    }
    if tokenizer.eos_id is not None:
        found["tokenizer.ggml.eos_token_id"] = (UINT32, tokenizer.eos_id)
    template = tokenizer.config.get("chat_template")
    return {**found, "tokenizer.chat_template": (TEXT, template)} if isinstance(template, str) else found
