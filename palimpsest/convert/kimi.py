"""Kimi Linear and Kimi K3: layer lists that start at 1, padded decay rates, experts one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from palimpsest.config import InputError, ModelConfig
from palimpsest.convert.family import IDLE, Entry, Family, refuse_unknown, same, stack, take, taps, wide

EXPERT_NAMES = (("gate", "w1"), ("up", "w3"), ("down", "w2"))


class Kimi(Family):
    """Kimi Linear; Kimi K3 where one of its own settings occurs."""

    name, model_type, architecture = "Kimi", "kimi_linear", "KimiLinearForCausalLM"
    prefix = "language_model."
    ignored = r"(vision_tower|mm_projector)\..*"
    unused = ("head_dim", "num_key_value_heads")
    fields = {
        **Family.sizes,
        **same("q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim mla_use_nope mla_use_output_gate"),
        **same("num_experts num_experts_per_token moe_intermediate_size moe_renormalize routed_scaling_factor"),
        **same("num_shared_experts routed_expert_hidden_size latent_moe_use_norm"),
        **same("activation_situ_beta activation_situ_linear_beta"),
    }
    defaults = {
        **{**Family.defaults, "q_lora_rank": None, "attn_res_block_size": None, "moe_layer_freq": 1},
        **{"mla_use_output_gate": False, "routed_expert_hidden_size": None},
    }
    stated = {
        **{"moe_router_activation_func": "sigmoid", "use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1},
        **{"num_nextn_predict_layers": 0},
    }
    implied: Mapping[str, Any] = {}
    others = """hidden_act first_k_dense_replace linear_attn_config model_max_length max_position_embeddings topk_method
        num_key_value_heads head_dim layer_types quantization_config"""
    fixed = {**Family.fixed, "moe_router_activation_func": "sigmoid", "shared_expert_gate": False}
    per_layer = {"kda": {"linear_output_gate": "sigmoid", "linear_output_gate_bias": False, "allow_neg_eigval": False}}
    renames = {
        **{**Family.renames, r"output_residual\.(\w+)": r"output_attn_res_\1.weight"},
        **{r"mixer_residual\.(\w+)": r"self_attention_res_\1.weight", r"mlp_residual\.(\w+)": r"mlp_res_\1.weight"},
        **{rf"\.experts\.{ours}_proj(|_packed|_scale)$": rf".experts.*.{theirs}.weight\1" for ours, theirs in EXPERT_NAMES},
    }

    # Experts alone are packed. The list of what is not is the published one; it leaves the latent maps out, so what is
    # packed is told by the tensors' names.
    quantization = {
        "quantization_config": {
            **{"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "quantization_status": "compressed"},
            **{"kv_cache_scheme": None, "global_compression_ratio": None},
            "config_groups": {
                "group_0": {
                    **{"targets": ["Linear"], "format": "mxfp4-pack-quantized"},
                    **{"input_activations": None, "output_activations": None},
                    "weights": {
                        **{"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True},
                        **{"dynamic": False, "scale_dtype": "torch.uint8", "zp_dtype": None, "actorder": None},
                        **{"block_structure": None, "observer": "minmax", "observer_kwargs": {}},
                    },
                }
            },
            "ignore": [
                *("re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*", "re:.*lm_head.*"),
                *("re:.*vision_tower.*", "re:.*mm_projector.*"),
            ],
        }
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
        act, first, every, linear, block = take(config, same(keys)).values()
        if act not in ("silu", "situ"):
            raise InputError(f"config.json: hidden_act is {act!r}; it must be 'silu' or 'situ'")
        activation = "situ" if act == "situ" else "swiglu"
        mlps = tuple("moe" if i >= first and i % every == 0 else activation for i in range(layers))
        values: dict[str, Any] = {"mixers": _from_one_based(linear, layers), "mlps": mlps}
        values |= {"head_dim": config["qk_nope_head_dim"], "num_key_value_heads": config["num_attention_heads"]}
        if "moe" in mlps:
            values["moe_hidden_act"] = activation
        if "kda" in values["mixers"]:
            heads, width, taps = take(linear, same("num_heads head_dim short_conv_kernel_size")).values()
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
        sizes = {"head_dim": config.hidden_size // config.num_attention_heads}  # no layer uses it; other engines ask for it
        return {**values, **sizes, "num_key_value_heads": config.num_attention_heads}

    def wrap(self, config: ModelConfig, text: dict[str, Any]) -> dict[str, Any]:
        if not self.is_k3(config):
            return text
        outer = {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "text_config": text}
        return {**outer, **{key: text[key] for key in ("dtype", "tie_word_embeddings")}}

    def written_prefix(self, config: ModelConfig) -> str:
        return self.prefix if self.is_k3(config) else ""

    def check_outer(self, outer: Mapping[str, Any]) -> None:
        own = "text_config vision_config tie_word_embeddings quantization_config ignore_index image_placeholder"
        refuse_unknown(outer, {*IDLE, *own.split(), "media_placeholder_token_id"})
        if outer.get("model_type", "kimi_k3") != "kimi_k3":
            raise InputError(f"config.json: model_type is {outer['model_type']!r}; with these settings it must be 'kimi_k3'")

    def check_quantization(self, settings: Any, packed: bool) -> None:
        if settings is None and not packed:
            return
        if settings is None:
            raise InputError("config.json: tensors are packed, but there is no quantization_config to say how")
        if not packed:
            raise InputError("config.json: it has a quantization_config, but no tensor is packed")
        expected = self.quantization["quantization_config"]
        for key in ("quant_method", "format"):
            if settings.get(key) != expected[key]:
                raise InputError(f"config.json: quantization {key} is {settings.get(key)!r}; only {expected[key]!r} is read")
        for group in settings.get("config_groups", {}).values():
            for key in ("num_bits", "type", "strategy", "group_size", "symmetric"):
                have, wanted = group["weights"].get(key), expected["config_groups"]["group_0"]["weights"][key]
                if have != wanted:
                    raise InputError(f"config.json: quantization {key} is {have!r}; only {wanted!r} is read")

    def entry(self, name: str, config: ModelConfig) -> Entry:
        theirs, k3 = self.rename(name), self.is_k3(config)
        if ".mlp." in name and config.mlps[int(name.split(".")[1])] == "moe":
            theirs = theirs.replace(".mlp.", ".block_sparse_moe.")
        if "*" in theirs:
            return stack(name, theirs, config.num_experts)
        if name.endswith("_conv1d.weight"):
            return taps(theirs, [name], [config.linear_num_value_heads * config.linear_value_head_dim])
        if name.endswith(".A_log"):
            # Kimi K3 keeps the rates of 96 heads in 128 places.
            dump = lambda rates: (F.pad(rates, (0, -len(rates) % 128)) if k3 else rates.view(1, 1, -1, 1),)  # noqa: E731
            return Entry([theirs], [name], partial(self.unpad, config.linear_num_value_heads), dump)
        if name.endswith(".o_norm.weight") and k3:
            return Entry([theirs], [name], dump=lambda weight: (wide(weight),))
        return Entry([theirs], [name])

    def unpad(self, heads: int, stored: Tensor) -> Sequence[Tensor]:
        rates, rest = stored.flatten().tensor_split([heads])
        if not rest.is_meta and rest.any():
            raise InputError(f"tensor 'A_log' has {stored.numel()} entries, which are not {heads} and zeros")
        return (rates,)


def _from_one_based(linear: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """Mixers from the two lists of layer numbers, which start at 1 and together name every layer once."""
    kda, full = (list(take(linear, {key: key})[key]) for key in ("kda_layers", "full_attn_layers"))
    if sorted(kda + full) != list(range(1, layers + 1)):
        raise InputError(f"config.json: kda_layers and full_attn_layers must name each of the layers 1..{layers} once")
    return tuple("kda" if number in kda else "mla" for number in range(1, layers + 1))
