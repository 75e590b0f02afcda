"""Published checkpoints: their tensor names, prefixes, transposes, paddings and 1-based lists, in both directions.

    family        recognised by         what differs besides names
    GPT-2         n_embd                matrices stored [in,out]; q, k, v in one
    Qwen3-Next    linear_num_key_heads  q, k, v, z and b, a grouped by key head; query and gate by head; norms hold w - 1
    Kimi Linear   linear_attn_config    1-based layer lists; A_log [1,1,H,1]; experts w1 (gate), w3 (up), w2 (down)
    Kimi K3       the same, nested      as Kimi Linear, but A_log [128], and every name behind `language_model.`
    fla           feature_map, ...      no transposes; four kinds of layers, see fla.py
    Llama         none of these         nothing

Pure functions on dictionaries: nothing here opens a file, and nothing about published checkpoints is known elsewhere. A
family is tables (keys against fields of the configuration, names against names) and rules for what no table can say.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from palimpsest.config import InputError, ModelConfig
from palimpsest.convert import fla
from palimpsest.convert.family import Entry, Family, Published
from palimpsest.convert.gpt2 import GPT2
from palimpsest.convert.kimi import Kimi
from palimpsest.convert.qwen3_next import Qwen3Next
from palimpsest.model import Model

T = TypeVar("T")
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
FAMILIES: dict[str, Family] = {  # by a key that its config.json has and those below do not
    "n_embd": GPT2(),
    "linear_attn_config": Kimi(),
    "linear_num_key_heads": Qwen3Next(),
    "feature_map": fla.LinearAttn(),
    "qk_activation": fla.DeltaNet(),
    "use_gate": fla.GatedDeltaNet(),
    "expand_v": fla.KDA(),
    "hidden_size": Family(),
}


def from_published(config: dict[str, Any], tensors: Mapping[str, Tensor]) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The model that a published config.json and its tensors describe: its configuration, and a `state_dict` for it.

    Tensors keep their dtype, except that norms published as w - 1 come back in at least float32: bfloat16 would lose w. A
    tied head shares the embedding's tensor. Raises InputError for a config this version does not read, and for a missing,
    misshapen or surplus tensor.
    """
    layout = Layout.read(config, tensors)
    left = dict(layout.select(tensors))
    embedding, head = (left.get(layout.rename(name)) for name in (EMBEDDING, HEAD))
    if layout.config.tie_word_embeddings and embedding is not None and head is not None:
        check_tied(embedding, head)
    used = layout.check({name: ("", tuple(x.shape)) for name, x in left.items()})
    ours = {name: x for entry in layout.entries for name, x in layout.load(entry, [left[used[n]] for n in entry.published])}
    if layout.config.tie_word_embeddings:
        ours[HEAD] = ours[EMBEDDING]
    return layout.config, ours


def to_published(config: ModelConfig, tensors: Mapping[str, Tensor]) -> Published:
    """config.json and tensors as the model's family publishes them, from its `state_dict`. A tied head is left out.

    `from_published` gives all that the model uses of the configuration back, and the same tensors bit for bit; only a norm
    published as w - 1 is rounded when w lies outside [0.5, 2]. Raises InputError for a configuration that no published
    layout can hold, and for a missing, misshapen or surplus tensor.
    """
    layout = Layout.of(config, packed=any(name.endswith("_packed") for name in tensors))
    left = {name: x for name, x in tensors.items() if not (config.tie_word_embeddings and name == HEAD)}
    for name, expected in layout.ours.items():
        if name not in left:
            raise InputError(f"tensor {name!r} is missing; the set is incomplete or belongs to another configuration")
        if left[name].shape != expected.shape:
            shapes = f"{list(left[name].shape)}; expected {list(expected.shape)}"
            raise InputError(f"tensor {name!r} has shape {shapes}; it belongs to another configuration")
    _refuse_surplus(left.keys() - layout.ours.keys())
    dumped = (entry.dump(*(left[name] for name in entry.ours)) for entry in layout.entries)
    pairs = zip(layout.entries, dumped, strict=True)
    published = {name: x.contiguous() for entry, each in pairs for name, x in zip(entry.published, each, strict=True)}
    return layout.document(str(left[EMBEDDING].dtype)), {layout.prefix + name: tensor for name, tensor in published.items()}


class Layout:
    """A model's tensors in its family's layout: the entries that lead from one side to the other, and all shapes.

    `ours` and `published` are tensors on the meta device by name (published ones without prefix); `model` is there too.
    """

    def __init__(self, family: Family, config: ModelConfig, packed: bool) -> None:
        self.family, self.config = family, config
        with torch.device("meta"):
            self.model = Model(config)
            if packed:
                self.model.pack_experts()
        self.ours = dict(self.model.named_parameters())  # a tied tensor once, as the embedding
        self.entries, done = [], set()
        for name in self.ours:
            if name not in done:
                entry = family.entry(name, config)
                self.entries.append(entry)
                done.update(entry.ours)
        self.published: dict[str, Tensor] = {}
        for entry in self.entries:
            dumped = entry.dump(*(self.ours[name] for name in entry.ours))
            self.published |= zip(entry.published, dumped, strict=True)

    @classmethod
    def read(cls, config: dict[str, Any], names: Iterable[str]) -> Self:
        """The layout that a config.json describes; `names` of tensors say whether experts are packed."""
        family, model = read_config(config)
        text = config.get("text_config", config)
        packed = any(name.endswith(".weight_packed") for name in names)
        family.check_quantization(text.get("quantization_config"), packed)
        return cls(family, model, packed)

    @classmethod
    def of(cls, config: ModelConfig, packed: bool = False) -> Self:
        """The published layout that can hold a configuration. Raises InputError where there is none."""
        family = _family(config)
        for field, value in family.read(family.write(config)).items():
            have = getattr(config, field)
            if have != value and field not in family.unused:
                raise InputError(f"model: {field} is {have!r}; a published {family.name} model can only hold {value!r}")
        return cls(family, config, packed)

    @property
    def prefix(self) -> str:
        """What stands in front of every name that is written."""
        return self.family.written_prefix(self.config)

    def rename(self, name: str) -> str:
        return self.family.rename(name)

    def document(self, dtype: str) -> dict[str, Any]:
        """config.json."""
        text = {**self.family.write(self.config), "dtype": dtype.removeprefix("torch.")}
        packed = any(name.endswith("_packed") for name in self.ours)
        return self.family.wrap(self.config, {**text, **self.family.quantization} if packed else text)

    def select(self, tensors: Mapping[str, T]) -> Iterator[tuple[str, T]]:
        """(name without prefix, value) of what belongs to the model. Raises InputError for two of one name."""
        seen = set()
        for full, value in tensors.items():
            name = full.removeprefix(self.family.prefix)
            if name in seen:
                raise InputError(f"tensor {full!r} is there with and without {self.family.prefix!r}; expected it once")
            seen.add(name)
            if not re.fullmatch(self.family.ignored, name):
                yield name, value

    def check(self, found: Mapping[str, tuple[str, tuple[int, ...]]], where: str = "") -> dict[str, str]:
        """Raises InputError unless `found` are the tensors of this model: by name what opens an error line, and the shape.

        `where` opens the line about a tensor that is nowhere. Returns for every published name the one that holds it: its
        own, or where the head is tied perhaps the head's.
        """
        used = {name: name for name in self.published}
        embedding, head = self.rename(EMBEDDING), self.rename(HEAD)
        if self.config.tie_word_embeddings and embedding not in found:
            used[embedding] = head
        missing = [name for name, stored in used.items() if stored not in found]
        if missing:
            shape = list(self.published[missing[0]].shape)
            raise InputError(
                f"{where}tensor {missing[0]!r} is missing ({len(missing)} in all); expected shape {shape}, found none; "
                "the set is incomplete or belongs to another configuration"
            )
        surplus = found.keys() - used.values() - ({head} if self.config.tie_word_embeddings else set())
        _refuse_surplus(surplus, found[min(surplus)][0] if surplus else "")
        for entry in self.entries:
            shapes = {name: found[used[name]][1] for name in entry.published}
            if any(shapes[name] != self.published[name].shape for name in shapes) and not self._fits(entry, shapes):
                name = next(name for name in shapes if shapes[name] != self.published[name].shape)
                raise InputError(
                    f"{found[used[name]][0]}tensor {name!r} has shape {list(shapes[name])}; "
                    f"expected {list(self.published[name].shape)}; it belongs to another configuration"
                )
        return used

    def _fits(self, entry: Entry, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Whether shapes other than ours are another spelling that the entry reads (a convolution without middle axis)."""
        try:
            loaded = entry.load(*(torch.empty(shape, device="meta") for shape in shapes.values()))
        except RuntimeError:
            return False
        return [tensor.shape for tensor in loaded] == [self.ours[name].shape for name in entry.ours]

    def load(self, entry: Entry, tensors: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Our names and tensors, from an entry's published ones."""
        return zip(entry.ours, (tensor.contiguous() for tensor in entry.load(*tensors)), strict=True)


def check_tied(embedding: Tensor, head: Tensor) -> None:
    if not (embedding is head or head.is_meta or torch.equal(embedding, head)):
        raise InputError("tensor 'lm_head.weight' differs from the embedding, but config.json ties them")


def _refuse_surplus(names: Set[str], where: str = "") -> None:
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise InputError(f"{where}tensor {min(names)!r}{more} has no place in this model; another configuration may fit")


def read_config(config: dict[str, Any]) -> tuple[Family, ModelConfig]:
    """The family and the configuration that a config.json describes, tensors apart. Raises InputError where it is not read."""
    text = config.get("text_config", config)
    family = _recognise(text)
    if text is not config:
        family.check_outer(config)
    try:
        fields = family.read(text)
    except (TypeError, AttributeError, LookupError, ArithmeticError) as error:
        raise InputError(f"config.json: a value is not of the kind that its key wants ({error})") from None
    return family, ModelConfig.from_dict(fields, "config.json")


def _recognise(text: Mapping[str, Any]) -> Family:
    """The family of a config.json: by its keys, since Kimi Linear and Kimi K3 carry one name, and then by that name."""
    family = next((family for key, family in FAMILIES.items() if key in text), None)
    if family is None or text.get("model_type", family.model_type) != family.model_type:
        kind = text.get("model_type")
        wanted = [key for key, each in FAMILIES.items() if each.model_type == kind and key not in text]
        if wanted:
            raise InputError(f"config.json: model_type is {kind!r}, but {' or '.join(map(repr, wanted))} is missing")
        known = ", ".join(sorted({each.model_type for each in FAMILIES.values()}))
        raise InputError(f"config.json: model_type is {kind!r}; this version reads {known}")
    return family


def _family(config: ModelConfig) -> Family:
    """The family whose layout may hold a configuration; `to_published` checks that it does."""
    mixers = set(config.mixers)
    alone = {"linear_attention": "feature_map", "deltanet": "qk_activation"}
    if config.linear_output_gate_bias:
        alone["kda"] = "expand_v"
    for mixer, key in alone.items():
        if mixers == {mixer}:
            return FAMILIES[key]
    if mixers <= {"kda", "mla"}:
        return FAMILIES["linear_attn_config"]
    if mixers <= {"gated_deltanet", "attention"} and (config.attention_output_gate or "gated_deltanet" in mixers):
        return FAMILIES["linear_num_key_heads"]
    if mixers == {"attention"}:
        return FAMILIES["n_embd" if config.norm == "layer" else "hidden_size"]
    raise InputError(f"model: mixers are {sorted(mixers)}; no published layout has these together")
