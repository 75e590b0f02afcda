"""The linear_attn, delta_net, gated_deltanet and kda models of flash-linear-attention: one layout, four kinds of layers.

kind            key heads K   value heads V                  of its own
linear_attn     both widths are shares of the hidden size    a learned product as feature map; no convolution
delta_net       the same
gated_deltanet  head_dim      head_dim * expand_v            output gate of full rank
kda             the same                                     low-rank gates, `f_proj` and `g_proj`, the latter with a bias
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from palimpsest.config import InputError, ModelConfig
from palimpsest.convert.family import Entry, Family, same, taps

IDLE = """attn_mode max_position_embeddings hidden_ratio intermediate_size fuse_norm fuse_swiglu fuse_cross_entropy
    fuse_linear_cross_entropy use_l2warp num_heads expand_v"""


class FLA(Family):
    """What the four share; `mixer` is the layer's name here."""

    mixer = ""
    fields = {
        **same("vocab_size hidden_size num_hidden_layers initializer_range tie_word_embeddings"),
        "norm_eps": "rms_norm_eps",
    }
    defaults = {"initializer_range": 0.02, "tie_word_embeddings": False}
    stated: Mapping[str, Any] = {"hidden_act": "swish"}
    implied: Mapping[str, Any] = {}
    fixed = {**Family.fixed, "linear_output_gate": "none", "linear_output_gate_rank": None, "gate_lower_bound": None}
    others = IDLE
    per_layer: Mapping[str, Mapping[str, Any]] = {}
    renames: Mapping[str, str] = {
        **{r"^(?!lm_head)": "model.", "embed_tokens": "embeddings", r"\.mixer\.": ".attn.", "mixer_norm": "attn_norm"},
    }

    def read_layers(self, config: dict[str, Any], layers: int) -> dict[str, Any]:
        width, heads = config["hidden_size"], config["num_heads"]
        inner = config.get("intermediate_size")
        if inner is None:
            inner = -(-int(width * config.get("hidden_ratio", 4) * 2 / 3) // 256) * 256
        values = {"mixers": (self.mixer,) * layers, "mlps": ("swiglu",) * layers, "intermediate_size": inner}
        sizes = {"linear_num_key_heads": heads, "linear_num_value_heads": config.get("num_v_heads") or heads}
        has_taps = config.get("use_short_conv", self.mixer != "linear_attention")
        sizes["linear_conv_kernel_dim"] = config.get("conv_size", 4) if has_taps else 0
        if self.mixer != "linear_attention" and not has_taps:
            raise InputError("config.json: use_short_conv is False; only models with a short convolution are read")
        return {**values, **sizes, **self.read_heads(config, width, heads)}

    def read_heads(self, config: dict[str, Any], width: int, heads: int) -> dict[str, Any]:
        """Widths of a head from `head_dim`; what else is of the kind."""
        keys = config["head_dim"]
        values = {"linear_key_head_dim": keys, "linear_value_head_dim": int(keys * config["expand_v"])}
        return {**values, "allow_neg_eigval": config.get("allow_neg_eigval", False)}

    def write_layers(self, config: ModelConfig) -> dict[str, Any]:
        values = {"num_heads": config.linear_num_key_heads, "intermediate_size": config.intermediate_size}
        values |= {"num_v_heads": config.linear_num_value_heads, "head_dim": config.linear_key_head_dim}
        values |= {"expand_v": config.linear_value_head_dim / config.linear_key_head_dim}
        values |= {"use_short_conv": True, "conv_size": config.linear_conv_kernel_dim, "attn_mode": "chunk"}
        return {**values, "allow_neg_eigval": config.allow_neg_eigval}

    def entry(self, name: str, config: ModelConfig) -> Entry:
        if name.endswith("_conv1d.weight"):
            keys = config.linear_num_key_heads * config.linear_key_head_dim
            values = config.linear_num_value_heads * config.linear_value_head_dim
            return taps(self.rename(name), [name], [values if ".v_conv1d" in name else keys])
        return super().entry(name, config)


class Shares(FLA):
    """The kinds whose key and value widths are shares of the hidden size."""

    others = f"{IDLE} expand_k"

    def read_heads(self, config: dict[str, Any], width: int, heads: int) -> dict[str, Any]:
        keys, values = (round(width * config[key]) // heads for key in ("expand_k", "expand_v"))
        return {"linear_key_head_dim": keys, "linear_value_head_dim": values}

    def write_layers(self, config: ModelConfig) -> dict[str, Any]:
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        values = config.linear_num_value_heads * config.linear_value_head_dim
        shares = {"expand_k": keys / config.hidden_size, "expand_v": values / config.hidden_size, "attn_mode": "chunk"}
        return {**shares, "num_heads": config.linear_num_key_heads, "intermediate_size": config.intermediate_size}


class LinearAttn(Shares):
    name, model_type, architecture, mixer = "linear_attn", "linear_attn", "LinearAttentionForCausalLM", "linear_attention"
    fixed = {**FLA.fixed, "linear_output_norm": True}
    implied = {"elementwise_affine": True, "norm_q": False, "norm_k": False, "norm_feature_map": False}
    implied |= {"tie_feature_map_qk": False}
    others = f"{Shares.others} feature_map num_kv_heads"
    renames = {**FLA.renames, r"attn\.o_norm": "attn.norm"}
    maps = {"elementwise_product": "product", "elu": "elu", "relu": "relu", "identity": "identity"}

    def read_heads(self, config: dict[str, Any], width: int, heads: int) -> dict[str, Any]:
        if config.get("num_kv_heads", heads) != heads:
            raise InputError(f"config.json: num_kv_heads is {config['num_kv_heads']}; only {heads}, as num_heads, is read")
        kind = config.get("feature_map", "elementwise_product")
        if kind not in self.maps:
            raise InputError(f"config.json: feature_map is {kind!r}; only {', '.join(self.maps)} are read")
        return {**super().read_heads(config, width, heads), "linear_feature_map": self.maps[kind]}

    def write_layers(self, config: ModelConfig) -> dict[str, Any]:
        kinds = {ours: theirs for theirs, ours in self.maps.items()}
        return {**super().write_layers(config), "feature_map": kinds[config.linear_feature_map]}


class DeltaNet(Shares):
    name, model_type, architecture, mixer = "delta_net", "delta_net", "DeltaNetForCausalLM", "deltanet"
    stated = {**FLA.stated, "use_beta": True, "use_gate": False, "qk_norm": "l2", "qk_activation": "silu"}
    stated |= {"use_output_norm": True}
    others = f"{Shares.others} use_short_conv conv_size allow_neg_eigval"

    def read_heads(self, config: dict[str, Any], width: int, heads: int) -> dict[str, Any]:
        strength = {"allow_neg_eigval": config.get("allow_neg_eigval", False)}
        return {**super().read_heads(config, width, heads), **strength}

    def write_layers(self, config: ModelConfig) -> dict[str, Any]:
        values = {"use_short_conv": True, "conv_size": config.linear_conv_kernel_dim}
        return {**super().write_layers(config), **values, "allow_neg_eigval": config.allow_neg_eigval}


class GatedDeltaNet(FLA):
    name, model_type, architecture = "gated_deltanet", "gated_deltanet", "GatedDeltaNetForCausalLM"
    mixer = "gated_deltanet"
    others = f"{IDLE} num_v_heads head_dim use_short_conv conv_size allow_neg_eigval use_gate output_gate_activation"

    def read_heads(self, config: dict[str, Any], width: int, heads: int) -> dict[str, Any]:
        kind = config.get("output_gate_activation", "swish")
        gate = {"swish": "silu", "silu": "silu", "sigmoid": "sigmoid"}.get(kind)
        if gate is None:
            raise InputError(f"config.json: output_gate_activation is {kind!r}; only 'swish' and 'sigmoid' are read")
        values = super().read_heads(config, width, heads)
        return {**values, "linear_output_gate": gate if config.get("use_gate", True) else "none"}

    def write_layers(self, config: ModelConfig) -> dict[str, Any]:
        gate = config.linear_output_gate
        values = {"use_gate": gate != "none", "output_gate_activation": "sigmoid" if gate == "sigmoid" else "swish"}
        return {**super().write_layers(config), **values}


class KDA(FLA):
    name, model_type, architecture, mixer = "kda", "kda", "KDAForCausalLM", "kda"
    fixed = {**FLA.fixed, "linear_output_gate": "sigmoid", "linear_output_gate_bias": True}
    others = f"{IDLE} num_v_heads head_dim use_short_conv conv_size allow_neg_eigval safe_gate lower_bound"
    renames = {**FLA.renames, r"\.([fg])_a_proj": r".\1_proj.0", r"\.([fg])_b_proj": r".\1_proj.1"}

    def read_heads(self, config: dict[str, Any], width: int, heads: int) -> dict[str, Any]:
        values = super().read_heads(config, width, heads)
        gate = {"linear_output_gate_rank": values["linear_value_head_dim"], "gate_lower_bound": config.get("lower_bound")}
        return {**values, **gate}

    def write_layers(self, config: ModelConfig) -> dict[str, Any]:
        bound = config.gate_lower_bound
        return {**super().write_layers(config), "lower_bound": bound, "safe_gate": bound is not None}
