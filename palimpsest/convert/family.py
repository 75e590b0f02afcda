"""What a family of published models is: tables of names and the rules they cannot say. The tables here are Llama's."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from palimpsest.config import InputError, ModelConfig, suggestion

Published = tuple[dict[str, Any], dict[str, Tensor]]  # config.json, tensors by name

# Keys of a config.json that change nothing in the model: where it came from, token numbers, settings for sampling, training
# and output that transformers writes into every file.
IDLE = frozenset(
    """_name_or_path architectures auto_map model_type dtype torch_dtype transformers_version use_cache bos_token_id
    eos_token_id pad_token_id sep_token_id decoder_start_token_id add_cross_attention bad_words_ids begin_suppress_tokens
    chunk_size_feed_forward cross_attention_hidden_size diversity_penalty do_sample early_stopping
    encoder_no_repeat_ngram_size exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id
    id2label label2id is_decoder is_encoder_decoder length_penalty max_length min_length no_repeat_ngram_size
    num_beam_groups num_beams num_return_sequences output_attentions output_hidden_states output_scores prefix problem_type
    pruned_heads remove_invalid_values repetition_penalty return_dict return_dict_in_generate suppress_tokens
    task_specific_params temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torchscript typical_p
    use_bfloat16 attention_dropout rope_parameters rope_scaling""".split()  # noqa: SIM905
)


@dataclass(frozen=True)
class Entry:
    """Published tensors that hold the same numbers as some of ours, and the functions from one to the other."""

    published: Sequence[str]
    ours: Sequence[str]
    load: Callable[..., Sequence[Tensor]] = lambda *tensors: tensors
    dump: Callable[..., Sequence[Tensor]] = lambda *tensors: tensors


def stack(stack: str, published: str, count: int) -> Entry:
    """A stack over experts; published one by one, the expert's number at the `*`."""
    names = [published.replace("*", str(expert)) for expert in range(count)]
    return Entry(names, [stack], lambda *each: (torch.stack(each),), lambda whole: whole.unbind(0))


def grouped(published: str, mixer: str, parts: str, heads: int, sizes: list[int]) -> Entry:
    """Projections published in one, head after head; `sizes` are the rows of each part in one head."""

    def load(fused: Tensor) -> Sequence[Tensor]:
        return [part.flatten(0, 1) for part in fused.unflatten(0, (heads, -1)).split(sizes, 1)]

    def dump(*weights: Tensor) -> Sequence[Tensor]:
        return (torch.cat([weight.unflatten(0, (heads, -1)) for weight in weights], 1).flatten(0, 1),)

    return Entry([published], [f"{mixer}{part}_proj.weight" for part in parts], load, dump)


def taps(published: str, ours: Sequence[str], sizes: list[int]) -> Entry:
    """Taps of depthwise convolutions, published in one, [C,1,W] or [C,W], with `sizes` channels each."""

    def load(fused: Tensor) -> Sequence[Tensor]:
        return (fused.squeeze(1) if fused.dim() == 3 else fused).split(sizes)

    return Entry([published], ours, load, lambda *taps: (torch.cat(taps).unsqueeze(1),))


def refuse_unknown(config: Mapping[str, Any], known: set[str]) -> None:
    """A key that nothing here reads may change the model; null is absent."""
    unknown = [key for key, value in config.items() if value is not None and key not in known]
    if unknown:
        key = unknown[0]
        value = " ".join(f"{config[key]!r}".split())[:60]
        more = f" ({len(unknown) - 1} more)" if len(unknown) > 1 else ""
        close = suggestion(key, known)
        raise InputError(f"config.json: unknown key {key!r} = {value}{more}; it may change the model, so it is not read{close}")


def wide(weight: Tensor) -> Tensor:
    """At least float32."""
    return weight.to(torch.promote_types(weight.dtype, torch.float32))


def same(names: str) -> dict[str, str]:
    """Keys that are called as our fields."""
    return {name: name for name in names.split()}


def take(config: Mapping[str, Any], fields: Mapping[str, str]) -> dict[str, Any]:
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
    sizes = same("vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads rms_norm_eps rope_theta")
    sizes |= same("initializer_range tie_word_embeddings")
    fields: Mapping[str, str] = {**sizes, **same("num_key_value_heads head_dim max_position_embeddings")}
    defaults: Mapping[str, Any] = {"initializer_range": 0.02, "tie_word_embeddings": False}  # of absent keys
    implied: Mapping[str, Any] = {"rope_interleaved": False}  # as `stated`, of files that say it; not written
    # What config.json says of every model of the family, what holds for every one in our fields, and with such a layer.
    stated: Mapping[str, Any] = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    fixed: Mapping[str, Any] = {"norm": "rms", "residual": "sum", "use_bias": False, "position": "none"}
    per_layer: Mapping[str, Mapping[str, Any]] = {
        "attention": {"position": "rope", "partial_rotary_factor": 1.0, "attention_output_gate": False, "qk_norm": False}
    }
    unused: Sequence[str] = ()  # fields that `read` sets though no layer looks at them
    wide_norms = False  # whether norms, published as w - 1, would lose w in 16 bits
    quantization: Mapping[str, Any] = {}  # what config.json says where experts are packed
    # Keys of config.json that `read_layers` reads, or that change nothing in this family's models.
    others = "pretraining_tp is_llama_config transformers.js_config"
    renames: Mapping[str, str] = {
        **{r"^(?!lm_head)": "model.", r"\.mixer\.": ".self_attn."},
        **{"mixer_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    }

    def read(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of a ModelConfig, from a config.json. Null is absent; newer files keep rotary settings in a table."""
        refuse_unknown(config, {*IDLE, *self.fields, *self.defaults, *self.stated, *self.implied, *self.others.split()})
        newer = config.get("rope_parameters") or {}
        scaling = config.get("rope_scaling") or newer
        if scaling.get("rope_type", scaling.get("type", "default")) != "default":
            raise InputError(f"config.json: rope_scaling is {scaling!r}; only unscaled rotary positions are supported")
        given = {key: value for key, value in {**config, **newer}.items() if value is not None}
        heads, width = (given.get(key) for key in ("num_attention_heads", "hidden_size"))
        sizes: dict[str, Any] = {"num_key_value_heads": heads, "rope_theta": 10000.0}
        for key, value in (("num_attention_heads", heads), ("hidden_size", width)):
            if value is not None and type(value) is not int:
                raise InputError(f"config.json: {key} is {value!r}; it must be a whole number")
        if heads and width and heads > 0:
            sizes["head_dim"] = width // heads
        given = {**self.defaults, **sizes, **given}
        for key, value in {**self.stated, **self.implied}.items():
            if given.get(key, value) != value:
                raise InputError(f"config.json: {key} is {given[key]!r}; only {value!r} is supported")
        values = {**self.fixed, **take(given, self.fields)}
        for key, ours in self.fields.items():
            if ModelConfig.__annotations__[ours] == "int" and type(given[key]) is not int:
                raise InputError(f"config.json: {key} is {given[key]!r}; it must be a whole number")
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

    def wrap(self, config: ModelConfig, text: dict[str, Any]) -> dict[str, Any]:
        """The whole config.json around `write`'s part."""
        return text

    def written_prefix(self, config: ModelConfig) -> str:
        """What stands in front of every name that is written."""
        return ""

    def check_outer(self, outer: Mapping[str, Any]) -> None:
        """Refuses a config.json around `text_config` that this family does not have."""
        raise InputError(f"config.json: it has a text_config; a published {self.name} model has none")

    def check_quantization(self, settings: Any, packed: bool) -> None:
        """Refuses packed tensors, which only some families have."""
        if packed:
            raise InputError(f"config.json: tensors are packed; a published {self.name} model has none that are")

    def rename(self, name: str) -> str:
        for ours, published in self.renames.items():
            name = re.sub(ours, published, name)
        return name

    def entry(self, name: str, config: ModelConfig) -> Entry:
        """Where our tensor `name` stands."""
        return Entry([self.rename(name)], [name])
