"""Qwen3-Next: q, k, v, z and b, a grouped by key head; query and gate by head; norms hold w - 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from palimpsest.config import InputError, ModelConfig
from palimpsest.convert.family import Entry, Family, grouped, same, stack, taps, wide


class Qwen3Next(Family):
    name, model_type, architecture = "Qwen3-Next", "qwen3_next", "Qwen3NextForCausalLM"
    ignored = r"mtp\..*"  # the layers that predict further tokens
    fields = {
        **Family.fields,
        **same("partial_rotary_factor linear_num_key_heads linear_num_value_heads linear_key_head_dim"),
        **same("linear_value_head_dim linear_conv_kernel_dim num_experts moe_intermediate_size"),
        **{"num_experts_per_tok": "num_experts_per_token", "norm_topk_prob": "moe_renormalize"},
    }
    defaults = {**Family.defaults, "partial_rotary_factor": 0.25, "norm_topk_prob": True}
    stated = {"hidden_act": "silu", "attention_bias": False, "decoder_sparse_step": 1}
    wide_norms = True
    implied = {"use_sliding_window": False}
    others = """layer_types full_attention_interval mlp_only_layers shared_expert_intermediate_size output_router_logits
        router_aux_loss_coef max_window_layers"""
    per_layer = {
        "attention": {"position": "rope", "attention_output_gate": True, "qk_norm": True},
        "gated_deltanet": {
            **{"linear_output_gate": "silu", "linear_output_gate_rank": None, "linear_output_gate_bias": False},
            "allow_neg_eigval": False,
        },
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
        values = {"layer_types": kinds, "mlp_only_layers": dense, "shared_expert_intermediate_size": shared}
        every = [*kinds, "full_attention"].index("full_attention") + 1
        if all((kind == "full_attention") == (i % every == 0) for i, kind in enumerate(kinds, 1)):
            values["full_attention_interval"] = every  # engines that read no `layer_types` would take 4
        return values

    def entry(self, name: str, config: ModelConfig) -> Entry:
        layer, _, leaf = name.partition(".mixer.")
        theirs, mixer = self.rename(name), f"{layer}.mixer."
        if leaf and config.mixers[int(name.split(".")[1])] == "gated_deltanet":
            return self.linear_attention(mixer, leaf, config)
        if leaf == "q_proj.weight":
            return grouped(theirs, mixer, "qg", config.num_attention_heads, [config.head_dim] * 2)
        if "norm." in name:
            return Entry([theirs], [name], lambda offset: (1 + wide(offset),), lambda weight: (weight - 1,))
        if ".mlp.experts." in name:
            return stack(name, theirs.replace("experts.", "experts.*.") + ".weight", config.num_experts)
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
            return grouped(f"{there}in_proj_qkvz.weight", mixer, "qkvg", heads, [keys, keys, values, values])
        if leaf == "b_proj.weight":
            return grouped(f"{there}in_proj_ba.weight", mixer, "ba", heads, [served, served])
        if leaf == "q_conv1d.weight":
            ours = [f"{mixer}{part}_conv1d.weight" for part in "qkv"]
            return taps(f"{there}conv1d.weight", ours, [heads * keys, heads * keys, heads * values])
        theirs = {"o_norm.weight": "norm.weight", "o_proj.weight": "out_proj.weight"}.get(leaf, leaf)
        return Entry([there + theirs], [mixer + leaf])

    def drop_bias(self, weight: Tensor, bias: Tensor) -> Sequence[Tensor]:
        if not bias.is_meta and bias.any():
            raise InputError("tensor 'e_score_correction_bias' is not zero; Qwen3-Next routers have no selection bias")
        return (weight,)
