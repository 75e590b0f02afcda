"""Writes fla_models.json beside this file: what flash-linear-attention's own models answer, for tests/oracles/test_fla.py.

    TRITON_INTERPRET=1 python tests/golden/fla_models.py

in an environment of its own with torch 2.13.0, triton 3.9.0, fla-core and flash-linear-attention 0.6.0, transformers 5.24.0
and einops. Its kernels run on a CPU there, through Triton's interpreter.
"""

from __future__ import annotations

import builtins
import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch

COMMON: dict[str, Any] = {
    **{"hidden_size": 64, "num_hidden_layers": 2, "num_heads": 2, "vocab_size": 64, "attn_mode": "fused_recurrent"},
    **{"fuse_norm": False, "fuse_swiglu": False, "fuse_cross_entropy": False, "norm_eps": 1e-3},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "linear_attn": ("LinearAttention", {"expand_v": 0.5}),
    "linear_attn, relu": ("LinearAttention", {"feature_map": "relu", "tie_word_embeddings": True}),
    "delta_net": ("DeltaNet", {"allow_neg_eigval": True}),
    "gated_deltanet": ("GatedDeltaNet", {"head_dim": 16, "num_v_heads": 4, "intermediate_size": 96}),
    "kda": ("KDA", {"head_dim": 16, "expand_v": 1.0}),
    "kda, bounded": ("KDA", {"head_dim": 16, "lower_bound": -5.0, "safe_gate": True, "allow_neg_eigval": True}),
}
IDS = [37 * t % 64 for t in range(12)]


def draw(name: str, shape: list[int]) -> torch.Tensor:
    """Values of a tensor from its name alone: matrices of unit gain, norms in [0.5, 1.5]."""
    source = np.random.RandomState(crc32(name.encode()))
    if "norm" in name and len(shape) == 1:
        return torch.tensor(source.uniform(0.5, 1.5, shape), dtype=torch.float32)
    scale = 0.5 if "conv1d" in name else shape[-1] ** -0.5 if len(shape) > 1 else 1.0
    return torch.tensor(source.standard_normal(shape) * scale, dtype=torch.float32)


def _interpret() -> None:
    """Lets the kernels run without a device: one configuration each, and loop variables that can be cast."""
    tuner: Any = import_module("triton.runtime.autotuner").Autotuner
    init = tuner.__init__
    tuner.__init__ = lambda self, fn, names, configs, *a, **k: init(self, fn, names, configs[:1], *a, **k)
    import_module("fla.layers")
    import_module("fla.models")

    class Number(int):
        def to(self, *_: Any) -> int:
            return self

    def numbers(*bounds: Any) -> Iterator[int]:
        whole = [int(bound.handle.data.item()) if hasattr(bound, "handle") else int(bound) for bound in bounds]
        return (Number(x) for x in builtins.range(*whole))

    for name, module in list(sys.modules.items()):
        if name.startswith("fla.") and module is not None:
            module.__dict__["range"] = numbers


def main() -> None:
    _interpret()
    models: Any = import_module("fla.models")
    found = {}
    for case, (kind, fields) in CASES.items():
        config = getattr(models, f"{kind}Config")(**COMMON, **fields)
        model = getattr(models, f"{kind}ForCausalLM")(config).eval()
        shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(draw(name, shapes[name]))
            logits = model(torch.tensor([IDS]), use_cache=False).logits[0, -1]
        document = json.loads(config.to_json_string(use_diff=True))
        found[case] = {"config": document, "shapes": shapes, "logits": [round(x, 5) for x in logits.tolist()]}
    text = json.dumps(found, separators=(",", ":")).replace('},"', '},\n"')
    Path(__file__).with_name("fla_models.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
