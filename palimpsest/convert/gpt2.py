"""GPT-2: matrices stored [in,out]; q, k and v in one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from palimpsest.config import ModelConfig
from palimpsest.convert.family import Entry, Family, same


class GPT2(Family):
    name, model_type, architecture = "GPT-2", "gpt2", "GPT2LMHeadModel"
    prefix = "transformer."
    ignored = r"h\.\d+\.attn\.(bias|masked_bias)"
    fields = {
        **same("vocab_size initializer_range tie_word_embeddings"),
        **{"n_embd": "hidden_size", "n_inner": "intermediate_size", "n_positions": "max_position_embeddings"},
        **{"n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "layer_norm_epsilon": "rms_norm_eps"},
    }
    defaults = {"initializer_range": 0.02, "tie_word_embeddings": True, "layer_norm_epsilon": 1e-5}
    stated = {"activation_function": "gelu_new", "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}
    implied = {"add_cross_attention": False, "reorder_and_upcast_attn": False}
    others = """attn_pdrop embd_pdrop resid_pdrop n_ctx gradient_checkpointing summary_activation summary_first_dropout
        summary_proj_to_labels summary_type summary_use_proj"""
    fixed = {**Family.fixed, "norm": "layer", "use_bias": True}
    per_layer = {"attention": {"position": "learned", "attention_output_gate": False, "qk_norm": False}}
    renames = {
        **{"^layers": "h", "^embed_tokens": "wte", "^embed_positions": "wpe", "^norm": "ln_f", "mixer_norm": "ln_1"},
        **{"mlp_norm": "ln_2", r"mixer\.q_proj": "attn.c_attn", r"mixer\.o_proj": "attn.c_proj"},
        **{"up_proj": "c_fc", "down_proj": "c_proj"},
    }

    def read(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return super().read({**config, "n_inner": config.get("n_inner") or 4 * config["n_embd"]})

    def write_layers(self, config: ModelConfig) -> dict[str, Any]:
        return {"n_ctx": config.max_position_embeddings}  # n_positions again, as published; other engines ask for it

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
