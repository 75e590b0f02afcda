"""Published checkpoints: their tensor names, prefixes, transposes, paddings and 1-based lists, in both directions.

    family        recognised by         what differs besides names
    GPT-2         n_embd                matrices stored [in,out]; q, k, v in one
    Qwen3-Next    linear_num_key_heads  q, k, v, z and b, a grouped by key head; query and gate by head; norms hold w - 1
    Kimi Linear   linear_attn_config    1-based layer lists; A_log [1,1,H,1]; experts w1 (gate), w3 (up), w2 (down)
    Kimi K3       the same, nested      as Kimi Linear, but A_log [128], and every name behind `language_model.`
    Llama         none of these         nothing

Pure functions on dictionaries: nothing here opens a file, and nothing about published checkpoints is known elsewhere. A
family is tables (keys against fields of the configuration, names against names) and rules for what no table can say.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from palimpsest.config import InputError, ModelConfig
from palimpsest.model import Model


def from_published(config: dict[str, Any], tensors: Mapping[str, Tensor]) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The model that a published config.json and its tensors describe: its configuration, and a `state_dict` for it.

    Tensors keep their dtype, except that norms published as w - 1 come back in at least float32: bfloat16 would lose w. A
    tied head shares the embedding's tensor. Raises InputError for a config this version does not read, and for a missing,
    misshapen or surplus tensor.
    """
    text = config.get("text_config", config)
    family = _recognise(text)
    model = ModelConfig.from_dict(family.read(text), "config.json")
    left = {name.removeprefix(family.prefix): tensor for name, tensor in tensors.items()}
    left = {name: tensor for name, tensor in left.items() if not re.fullmatch(family.ignored, name)}
    if model.tie_word_embeddings and "lm_head.weight" in left:
        head = left.pop("lm_head.weight")
        embedding = left.setdefault(family.rename("embed_tokens.weight"), head)
        if not (embedding is head or head.is_meta or torch.equal(embedding, head)):
            raise InputError("tensor 'lm_head.weight' differs from the embedding, but config.json ties them")
    ours = _convert(family, model, left, loading=True)
    if model.tie_word_embeddings:
        ours["lm_head.weight"] = ours["embed_tokens.weight"]
    return model, ours


Published = tuple[dict[str, Any], dict[str, Tensor]]  # config.json, tensors by name


def to_published(config: ModelConfig, tensors: Mapping[str, Tensor]) -> Published:
    """config.json and tensors as the model's family publishes them, from its `state_dict`. A tied head is left out.

    `from_published` gives all that the model uses of the configuration back, and the same tensors bit for bit; only a norm
    published as w - 1 is rounded when w lies outside [0.5, 2]. Raises InputError for a configuration that no published
    layout can hold, and for a missing, misshapen or surplus tensor.
    """
    family = _family(config)
    text = family.write(config)
    for field, value in family.read(text).items():
        have = getattr(config, field)
        if have != value and field not in family.unused:
            raise InputError(f"model: {field} is {have!r}; a published {family.name} model can only hold {value!r}")
    left = {name: x for name, x in tensors.items() if not (config.tie_word_embeddings and name == "lm_head.weight")}
    published = _convert(family, config, left, loading=False)
    text["dtype"] = str(published[family.rename("embed_tokens.weight")].dtype).removeprefix("torch.")
    return family.wrap(config, text, published)


@dataclass(frozen=True)
class Entry:
    """Published tensors that hold the same numbers as some of ours, and the functions from one to the other."""

    published: Sequence[str]
    ours: Sequence[str]
    load: Callable[..., Sequence[Tensor]] = lambda *tensors: tensors
    dump: Callable[..., Sequence[Tensor]] = lambda *tensors: tensors


def _convert(family: Family, config: ModelConfig, left: dict[str, Tensor], loading: bool) -> dict[str, Tensor]:
    """Takes every tensor out of `left` and through the family's entries, one way or the other."""
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in Model(config).state_dict().items()}
    moved: dict[str, Tensor] = {}
    done = {"lm_head.weight"} if config.tie_word_embeddings else set()
    for each in shapes:
        if each in done:
            continue
        entry = family.entry(each, config)
        done.update(entry.ours)
        names, targets = (entry.published, entry.ours) if loading else (entry.ours, entry.published)
        for name in names:
            if name not in left:
                raise InputError(f"tensor {name!r} is missing; the set is incomplete or belongs to another configuration")
        sources = {name: left.pop(name) for name in names}
        try:
            changed = (entry.load if loading else entry.dump)(*sources.values())
            results = dict(zip(targets, (tensor.contiguous() for tensor in changed), strict=True))
        except RuntimeError:
            results = {}
        held = results if loading else sources
        if not results or any(held[name].shape != shapes[name] for name in entry.ours):
            shape = list(sources[names[0]].shape)
            raise InputError(f"tensor {names[0]!r} has shape {shape}, which belongs to another configuration")
        moved |= results
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        raise InputError(f"tensor {next(iter(left))!r}{more} has no place in this model; another configuration may fit")
    return moved


def _stack(stack: str, published: str, count: int) -> Entry:
    """A stack over experts; published one by one, the expert's number at the `*`."""
    names = [published.replace("*", str(expert)) for expert in range(count)]
    return Entry(names, [stack], lambda *each: (torch.stack(each),), lambda whole: whole.unbind(0))


def _grouped(published: str, mixer: str, parts: str, heads: int, sizes: list[int]) -> Entry:
    """Projections published in one, head after head; `sizes` are the rows of each part in one head."""

    def load(fused: Tensor) -> Sequence[Tensor]:
        return [part.flatten(0, 1) for part in fused.unflatten(0, (heads, -1)).split(sizes, 1)]

    def dump(*weights: Tensor) -> Sequence[Tensor]:
        return (torch.cat([weight.unflatten(0, (heads, -1)) for weight in weights], 1).flatten(0, 1),)

    return Entry([published], [f"{mixer}{part}_proj.weight" for part in parts], load, dump)


def _taps(published: str, ours: Sequence[str], sizes: list[int]) -> Entry:
    """Taps of depthwise convolutions, published in one, [C,1,W] or [C,W], with `sizes` channels each."""

    def load(fused: Tensor) -> Sequence[Tensor]:
        return (fused.squeeze(1) if fused.dim() == 3 else fused).split(sizes)

    return Entry([published], ours, load, lambda *taps: (torch.cat(taps).unsqueeze(1),))


def _wide(weight: Tensor) -> Tensor:
    """At least float32."""
    return weight.to(torch.promote_types(weight.dtype, torch.float32))


def _same(names: str) -> dict[str, str]:
    """Keys that are called as our fields."""
    return {name: name for name in names.split()}


def _take(config: Mapping[str, Any], fields: Mapping[str, str]) -> dict[str, Any]:
    """Our fields and their values, from config.json."""
    for key in fields:
        if key not in config:
            raise InputError(f"config.json: field {key!r} is missing")
    return {ours: config[key] for key, ours in fields.items()}


class Family:
    """One family's way of publishing; the tables and rules here are Llama's."""

    name, model_type, architecture = "Llama", "llama", "LlamaForCausalLM"
    prefix = ""  # in front of the names, in some files
    ignored = r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"  # buffers, and parts outside the model
    sizes = _same("vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads rms_norm_eps rope_theta")
    sizes |= _same("initializer_range tie_word_embeddings")
    fields: Mapping[str, str] = {**sizes, **_same("num_key_value_heads head_dim max_position_embeddings")}
    defaults: Mapping[str, Any] = {"initializer_range": 0.02, "tie_word_embeddings": False}  # of absent keys
    # What config.json says of every model of the family, what holds for every one in our fields, and with such a layer.
    stated: Mapping[str, Any] = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    fixed: Mapping[str, Any] = {"norm": "rms", "residual": "sum", "use_bias": False, "position": "none"}
    per_layer: Mapping[str, Mapping[str, Any]] = {
        "attention": {"position": "rope", "partial_rotary_factor": 1.0, "attention_output_gate": False, "qk_norm": False}
    }
    unused: Sequence[str] = ()  # fields that `read` sets though no layer looks at them
    renames: Mapping[str, str] = {
        **{r"^(?!lm_head)": "model.", r"\.mixer\.": ".self_attn."},
        **{"mixer_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    }

    def read(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of a ModelConfig, from a config.json. Null is absent; newer files keep rotary settings in a table."""
        newer = config.get("rope_parameters") or {}
        scaling = config.get("rope_scaling") or newer
        if scaling.get("rope_type", scaling.get("type", "default")) != "default":
            raise InputError(f"config.json: rope_scaling is {scaling!r}; only unscaled rotary positions are supported")
        given = {key: value for key, value in {**config, **newer}.items() if value is not None}
        heads = given.get("num_attention_heads") or 1
        sizes = {"num_key_value_heads": heads, "head_dim": given.get("hidden_size", 0) // heads, "rope_theta": 10000.0}
        given = {**self.defaults, **sizes, **given}
        for key, value in self.stated.items():
            if given.get(key, value) != value:
                raise InputError(f"config.json: {key} is {given[key]!r}; only {value!r} is supported")
        values = {**self.fixed, **_take(given, self.fields)}
        values |= self.read_layers(given, values["num_hidden_layers"])
        for kind in {*values["mixers"], *values["mlps"]}:
            values |= self.per_layer.get(kind, {})
        return values

    def read_layers(self, config: dict[str, Any], layers: int) -> dict[str, Any]:
        """The fields that no table can translate."""
        return {"mixers": ("attention",) * layers, "mlps": ("swiglu",) * layers}

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """A config.json that says of the configuration what it can; `to_published` compares."""
        values = {"architectures": [self.architecture], "model_type": self.model_type, **self.stated}
        # Token numbers are the tokenizer's affair; left out, transformers would take those of the published vocabulary.
        values |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        return {**values, **{key: getattr(config, ours) for key, ours in self.fields.items()}, **self.write_layers(config)}

    def write_layers(self, config: ModelConfig) -> dict[str, Any]:
        return {}

    def wrap(self, config: ModelConfig, text: dict[str, Any], tensors: dict[str, Tensor]) -> Published:
        """The whole config.json around `write`'s part, and the tensors under their full names."""
        return text, tensors

    def rename(self, name: str) -> str:
        for ours, published in self.renames.items():
            name = re.sub(ours, published, name)
        return name

    def entry(self, name: str, config: ModelConfig) -> Entry:
        """Where our tensor `name` stands."""
        return Entry([self.rename(name)], [name])


class GPT2(Family):
    name, model_type, architecture = "GPT-2", "gpt2", "GPT2LMHeadModel"
    prefix = "transformer."
    ignored = r"h\.\d+\.attn\.(bias|masked_bias)"
    fields = {
        **_same("vocab_size initializer_range tie_word_embeddings"),
        **{"n_embd": "hidden_size", "n_inner": "intermediate_size", "n_positions": "max_position_embeddings"},
        **{"n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "layer_norm_epsilon": "rms_norm_eps"},
    }
    defaults = {"initializer_range": 0.02, "tie_word_embeddings": True, "layer_norm_epsilon": 1e-5}
    stated = {"activation_function": "gelu_new", "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}
    fixed = {**Family.fixed, "norm": "layer", "use_bias": True}
    per_layer = {"attention": {"position": "learned", "attention_output_gate": False, "qk_norm": False}}
    renames = {
        **{"^layers": "h", "^embed_tokens": "wte", "^embed_positions": "wpe", "^norm": "ln_f", "mixer_norm": "ln_1"},
        **{"mlp_norm": "ln_2", r"mixer\.q_proj": "attn.c_attn", r"mixer\.o_proj": "attn.c_proj"},
        **{"up_proj": "c_fc", "down_proj": "c_proj"},
    }

    def read(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return super().read({**config, "n_inner": config.get("n_inner") or 4 * config["n_embd"]})

    def read_layers(self, config: dict[str, Any], layers: int) -> dict[str, Any]:
        heads = {"num_key_value_heads": config["n_head"], "head_dim": config["n_embd"] // config["n_head"]}
        return {"mixers": ("attention",) * layers, "mlps": ("gelu",) * layers, **heads}

    def entry(self, name: str, config: ModelConfig) -> Entry:
        theirs, turned = [self.rename(name)], name.endswith("_proj.weight")
        if ".mixer.q_proj." in name:
            ours = [name.replace("q_proj", each) for each in ("q_proj", "k_proj", "v_proj")]
            if turned:
                return Entry(theirs, ours, lambda fused: fused.mT.chunk(3), lambda *parts: (torch.cat(parts).mT,))
            return Entry(theirs, ours, lambda fused: fused.chunk(3), lambda *parts: (torch.cat(parts),))
        if turned:
            return Entry(theirs, [name], lambda stored: (stored.mT,), lambda weight: (weight.mT,))
        return Entry(theirs, [name])


class Qwen3Next(Family):
    name, model_type, architecture = "Qwen3-Next", "qwen3_next", "Qwen3NextForCausalLM"
    ignored = r"mtp\..*"  # the layers that predict further tokens
    fields = {
        **Family.fields,
        **_same("partial_rotary_factor linear_num_key_heads linear_num_value_heads linear_key_head_dim"),
        **_same("linear_value_head_dim linear_conv_kernel_dim num_experts moe_intermediate_size"),
        **{"num_experts_per_tok": "num_experts_per_token", "norm_topk_prob": "moe_renormalize"},
    }
    defaults = {**Family.defaults, "partial_rotary_factor": 0.25, "norm_topk_prob": True}
    stated = {"hidden_act": "silu", "attention_bias": False, "decoder_sparse_step": 1}
    per_layer = {
        "attention": {"position": "rope", "attention_output_gate": True, "qk_norm": True},
        "gated_deltanet": {"linear_output_gate": "silu", "linear_output_gate_rank": None, "allow_neg_eigval": False},
        "moe": {
            **{"moe_hidden_act": "swiglu", "moe_router_activation_func": "softmax", "routed_scaling_factor": 1.0},
            **{"routed_expert_hidden_size": None, "shared_expert_gate": True},
        },
    }
    renames = {**Family.renames, "shared_experts": "shared_expert"}
    kinds = {"linear_attention": "gated_deltanet", "full_attention": "attention"}

    def read_layers(self, config: dict[str, Any], layers: int) -> dict[str, Any]:
        every, dense = config.get("full_attention_interval", 4), config.get("mlp_only_layers", [])
        default = ["linear_attention" if i % every else "full_attention" for i in range(1, layers + 1)]
        mixers = tuple(self.kinds.get(kind, kind) for kind in config.get("layer_types", default))
        mlps = tuple("swiglu" if i in dense else "moe" for i in range(layers))
        shared = config.get("shared_expert_intermediate_size", 0) // config["moe_intermediate_size"]
        return {"mixers": mixers, "mlps": mlps, "num_shared_experts": shared}

    def write_layers(self, config: ModelConfig) -> dict[str, Any]:
        kinds = ["full_attention" if mixer == "attention" else "linear_attention" for mixer in config.mixers]
        dense = [i for i, mlp in enumerate(config.mlps) if mlp != "moe"]
        shared = config.num_shared_experts * config.moe_intermediate_size
        return {"layer_types": kinds, "mlp_only_layers": dense, "shared_expert_intermediate_size": shared}

    def entry(self, name: str, config: ModelConfig) -> Entry:
        layer, _, leaf = name.partition(".mixer.")
        theirs, mixer = self.rename(name), f"{layer}.mixer."
        if leaf and config.mixers[int(name.split(".")[1])] == "gated_deltanet":
            return self.linear_attention(mixer, leaf, config)
        if leaf == "q_proj.weight":
            return _grouped(theirs, mixer, "qg", config.num_attention_heads, [config.head_dim] * 2)
        if "norm." in name:
            return Entry([theirs], [name], lambda offset: (1 + _wide(offset),), lambda weight: (weight - 1,))
        if ".mlp.experts." in name:
            return _stack(name, theirs.replace("experts.", "experts.*.") + ".weight", config.num_experts)
        if name.endswith(".mlp.gate.weight"):
            bias = name.replace("weight", "e_score_correction_bias")
            add_bias = lambda weight: (weight, weight.new_zeros(len(weight), dtype=torch.float32))  # noqa: E731
            return Entry([theirs], [name, bias], add_bias, self.drop_bias)
        return super().entry(name, config)

    def linear_attention(self, mixer: str, leaf: str, config: ModelConfig) -> Entry:
        there = "model." + mixer.replace(".mixer.", ".linear_attn.")
        heads, keys = config.linear_num_key_heads, config.linear_key_head_dim
        served = config.linear_num_value_heads // heads  # value heads of one key head
        values = served * config.linear_value_head_dim
        if leaf == "q_proj.weight":
            return _grouped(f"{there}in_proj_qkvz.weight", mixer, "qkvg", heads, [keys, keys, values, values])
        if leaf == "b_proj.weight":
            return _grouped(f"{there}in_proj_ba.weight", mixer, "ba", heads, [served, served])
        if leaf == "q_conv1d.weight":
            ours = [f"{mixer}{part}_conv1d.weight" for part in "qkv"]
            return _taps(f"{there}conv1d.weight", ours, [heads * keys, heads * keys, heads * values])
        theirs = {"o_norm.weight": "norm.weight", "o_proj.weight": "out_proj.weight"}.get(leaf, leaf)
        return Entry([there + theirs], [mixer + leaf])

    def drop_bias(self, weight: Tensor, bias: Tensor) -> Sequence[Tensor]:
        if not bias.is_meta and bias.any():
            raise InputError("tensor 'e_score_correction_bias' is not zero; Qwen3-Next routers have no selection bias")
        return (weight,)


class Kimi(Family):
    """Kimi Linear; Kimi K3 where one of its own settings occurs."""

    name, model_type, architecture = "Kimi", "kimi_linear", "KimiLinearForCausalLM"
    prefix = "language_model."
    ignored = r"(vision_tower|mm_projector)\..*"
    unused = ("head_dim", "num_key_value_heads")
    fields = {
        **Family.sizes,
        **_same("q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim mla_use_nope mla_use_output_gate"),
        **_same("num_experts num_experts_per_token moe_intermediate_size moe_renormalize routed_scaling_factor"),
        **_same("num_shared_experts routed_expert_hidden_size latent_moe_use_norm"),
        **_same("activation_situ_beta activation_situ_linear_beta"),
    }
    defaults = {
        **{**Family.defaults, "q_lora_rank": None, "attn_res_block_size": None, "moe_layer_freq": 1},
        **{"mla_use_output_gate": False, "routed_expert_hidden_size": None},
    }
    stated = {
        **{"moe_router_activation_func": "sigmoid", "use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1},
        **{"num_nextn_predict_layers": 0},
    }
    fixed = {**Family.fixed, "moe_router_activation_func": "sigmoid", "shared_expert_gate": False}
    per_layer = {"kda": {"linear_output_gate": "sigmoid", "allow_neg_eigval": False}}
    renames = {
        **{**Family.renames, r"output_residual\.(\w+)": r"output_attn_res_\1.weight"},
        **{r"mixer_residual\.(\w+)": r"self_attention_res_\1.weight", r"mlp_residual\.(\w+)": r"mlp_res_\1.weight"},
        **{r"experts\.gate_proj$": "experts.*.w1.weight", r"experts\.up_proj$": "experts.*.w3.weight"},
        r"experts\.down_proj$": "experts.*.w2.weight",
    }

    def is_k3(self, config: ModelConfig) -> bool:
        settings = (config.q_lora_rank, config.gate_lower_bound, config.routed_expert_hidden_size)
        full_rank = "kda" in config.mixers and config.linear_output_gate_rank is None
        others = config.mla_use_output_gate or config.residual != "sum" or "situ" in (config.moe_hidden_act, *config.mlps)
        return any(setting is not None for setting in settings) or full_rank or others

    def read(self, config: Mapping[str, Any]) -> dict[str, Any]:
        idle = {} if config.get("hidden_act") == "situ" else {"activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0}
        idle["latent_moe_use_norm"] = config.get("routed_expert_hidden_size") is None
        return super().read({**idle, **config})

    def read_layers(self, config: dict[str, Any], layers: int) -> dict[str, Any]:
        keys = "hidden_act first_k_dense_replace moe_layer_freq linear_attn_config attn_res_block_size"
        act, first, every, linear, block = _take(config, _same(keys)).values()
        if act not in ("silu", "situ"):
            raise InputError(f"config.json: hidden_act is {act!r}; it must be 'silu' or 'situ'")
        activation = "situ" if act == "situ" else "swiglu"
        mlps = tuple("moe" if i >= first and i % every == 0 else activation for i in range(layers))
        values: dict[str, Any] = {"mixers": _from_one_based(linear, layers), "mlps": mlps}
        values |= {"head_dim": config["qk_nope_head_dim"], "num_key_value_heads": config["num_attention_heads"]}
        if "moe" in mlps:
            values["moe_hidden_act"] = activation
        if "kda" in values["mixers"]:
            heads, width, taps = _take(linear, _same("num_heads head_dim short_conv_kernel_size")).values()
            values |= {"linear_num_key_heads": heads, "linear_num_value_heads": heads, "linear_conv_kernel_dim": taps}
            values |= {"linear_key_head_dim": width, "linear_value_head_dim": width}
            values["linear_output_gate_rank"] = None if linear.get("use_full_rank_gate") else width
            values["gate_lower_bound"] = linear.get("gate_lower_bound")
        blocks = {} if block is None else {"residual": "block_attention", "attn_res_block_size": block}
        return {**values, **blocks}

    def write_layers(self, config: ModelConfig) -> dict[str, Any]:
        situ = "situ" in ([config.moe_hidden_act] if "moe" in config.mlps else config.mlps)
        linear: dict[str, Any] = {
            "kda_layers": [i for i, mixer in enumerate(config.mixers, 1) if mixer == "kda"],
            "full_attn_layers": [i for i, mixer in enumerate(config.mixers, 1) if mixer == "mla"],
        }
        linear |= {"num_heads": config.linear_num_value_heads, "head_dim": config.linear_value_head_dim}
        linear["short_conv_kernel_size"] = config.linear_conv_kernel_dim
        values = {"linear_attn_config": linear, "hidden_act": "situ" if situ else "silu", "moe_layer_freq": 1}
        values |= {"first_k_dense_replace": [*config.mlps, "moe"].index("moe")}
        # Nothing in these models ends at a position; other engines want a number, so they get the published one.
        values |= {"max_position_embeddings": 1048576, "model_max_length": 1048576}
        if self.is_k3(config):
            linear["gate_lower_bound"] = config.gate_lower_bound
            linear["use_full_rank_gate"] = config.linear_output_gate_rank is None
            values["attn_res_block_size"] = config.attn_res_block_size if config.residual != "sum" else None
        return {**values, "num_key_value_heads": config.num_attention_heads}

    def wrap(self, config: ModelConfig, text: dict[str, Any], tensors: dict[str, Tensor]) -> Published:
        if not self.is_k3(config):
            return text, tensors
        outer = {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "text_config": text}
        outer |= {key: text[key] for key in ("dtype", "tie_word_embeddings")}
        return outer, {self.prefix + name: tensor for name, tensor in tensors.items()}

    def entry(self, name: str, config: ModelConfig) -> Entry:
        theirs, k3 = self.rename(name), self.is_k3(config)
        if ".mlp." in name and config.mlps[int(name.split(".")[1])] == "moe":
            theirs = theirs.replace(".mlp.", ".block_sparse_moe.")
        if "*" in theirs:
            return _stack(name, theirs, config.num_experts)
        if name.endswith("_conv1d.weight"):
            return _taps(theirs, [name], [config.linear_num_value_heads * config.linear_value_head_dim])
        if name.endswith(".A_log"):
            # Kimi K3 keeps the rates of 96 heads in 128 places.
            dump = lambda rates: (F.pad(rates, (0, -len(rates) % 128)) if k3 else rates.view(1, 1, -1, 1),)  # noqa: E731
            return Entry([theirs], [name], partial(self.unpad, config.linear_num_value_heads), dump)
        if name.endswith(".o_norm.weight") and k3:
            return Entry([theirs], [name], dump=lambda weight: (_wide(weight),))
        return Entry([theirs], [name])

    def unpad(self, heads: int, stored: Tensor) -> Sequence[Tensor]:
        rates, rest = stored.flatten().tensor_split([heads])
        if not rest.is_meta and rest.any():
            raise InputError(f"tensor 'A_log' has {stored.numel()} entries, which are not {heads} and zeros")
        return (rates,)


FAMILIES: dict[str, Family] = {  # by a key that its config.json has and those below do not
    "n_embd": GPT2(),
    "linear_attn_config": Kimi(),
    "linear_num_key_heads": Qwen3Next(),
    "hidden_size": Family(),
}


def _recognise(text: Mapping[str, Any]) -> Family:
    """The family of a config.json: by its keys, since Kimi Linear and Kimi K3 carry one name, and then by that name."""
    family = next((family for key, family in FAMILIES.items() if key in text), None)
    if family is None or text.get("model_type", family.model_type) != family.model_type:
        raise InputError(f"config.json: model_type is {text.get('model_type')!r}; this version reads gpt2, llama, ...")
    return family


def _family(config: ModelConfig) -> Family:
    """The family whose layout may hold a configuration; `to_published` checks that it does."""
    mixers = set(config.mixers)
    if mixers <= {"kda", "mla"}:
        return FAMILIES["linear_attn_config"]
    if mixers <= {"gated_deltanet", "attention"} and (config.attention_output_gate or "gated_deltanet" in mixers):
        return FAMILIES["linear_num_key_heads"]
    if mixers == {"attention"}:
        return FAMILIES["n_embd" if config.norm == "layer" else "hidden_size"]
    raise InputError(f"model: mixers are {sorted(mixers)}; no published layout has these together")


def _from_one_based(linear: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """Mixers from the two lists of layer numbers, which start at 1 and together name every layer once."""
    kda, full = (list(_take(linear, {key: key})[key]) for key in ("kda_layers", "full_attn_layers"))
    if sorted(kda + full) != list(range(1, layers + 1)):
        raise InputError(f"config.json: kda_layers and full_attn_layers must name each of the layers 1..{layers} once")
    return tuple("kda" if number in kda else "mla" for number in range(1, layers + 1))
