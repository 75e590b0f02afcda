"""The model of a plan: a preset, a file with our fields, or a published config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from palimpsest.config import InputError, ModelConfig, suggestion
from palimpsest.convert import read_config
from palimpsest.convert.family import same, take
from palimpsest.plan.counts import is_published_k3
from palimpsest.presets import presets

# DeepSeek-V3's keys against our fields. Its choice of experts by groups and its scaled rotary positions have no field: they
# change which weights a token uses and by how much it turns, and none of what a plan counts.
DEEPSEEK = {
    **same("vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads rms_norm_eps tie_word_embeddings"),
    **same("q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim moe_intermediate_size routed_scaling_factor"),
    **{"n_routed_experts": "num_experts", "num_experts_per_tok": "num_experts_per_token"},
    **{"n_shared_experts": "num_shared_experts", "norm_topk_prob": "moe_renormalize"},
}


def model_of(source: str | ModelConfig) -> tuple[str, ModelConfig, str]:
    """(name, configuration, dtype that its weights are published in) of a preset, file, folder or configuration.

    Raises InputError, one line, for a name that is none of these and for a file that describes no model we can hold.
    """
    if isinstance(source, ModelConfig):
        return "model", source, _dtype(source)
    if source in presets():
        config = ModelConfig.preset(source)
        return source, config, _dtype(config)
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        hint = suggestion(source, presets())
        raise InputError(f"plan: model is {source!r}; give a preset (`palimpsest presets`) or a config.json{hint}")
    document = _read(path)
    name = path.parent.name if path.name == "config.json" and path.parent.name else path.stem
    if "mixers" in document:
        config = ModelConfig.from_dict(document, str(path))
        return name, config, _dtype(config)
    kind = document.get("model_type")
    try:
        config = deepseek(document) if kind in ("deepseek_v3", "kimi_k2") else read_config(document)[1]
    except InputError as error:
        raise InputError(f"{path}: {str(error).removeprefix('config.json: ')}") from None
    packed = document.get("text_config", document).get("quantization_config") is not None
    return name, config, "mxfp4" if packed else _dtype(config)


def deepseek(document: dict[str, Any]) -> ModelConfig:
    """The sizes of a DeepSeek-V3; without the layers that predict further tokens (`num_nextn_predict_layers`)."""
    given = {"tie_word_embeddings": False, "q_lora_rank": None, "first_k_dense_replace": 0, "moe_layer_freq": 1, **document}
    values, layers = take(given, DEEPSEEK), given["num_hidden_layers"]
    for key in ("num_hidden_layers", "first_k_dense_replace", "moe_layer_freq"):
        if type(given[key]) is not int or given[key] < 0:
            raise InputError(f"config.json: {key} is {given[key]!r}; it must be a whole number")
    experts = (i >= given["first_k_dense_replace"] and i % max(given["moe_layer_freq"], 1) == 0 for i in range(layers))
    mlps: Any = tuple("moe" if chosen else "swiglu" for chosen in experts)
    heads = {"num_key_value_heads": values["num_attention_heads"], "head_dim": values["qk_nope_head_dim"]}
    return ModelConfig(mixers=("mla",) * layers, mlps=mlps, mla_use_nope=False, **heads, **values)


def _dtype(config: ModelConfig) -> str:
    return "mxfp4" if is_published_k3(config) else "bf16"


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid JSON ({error}); give a config.json") from None
    if not isinstance(document, dict):
        raise InputError(f"{path}: it holds no table of fields; give a config.json")
    document.pop("format", None)  # of our model folders
    return document
