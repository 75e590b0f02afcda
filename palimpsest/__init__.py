"""Palimpsest: every model on the road from GPT-2 to Kimi K3, in one readable package.

import palimpsest as pal
model = pal.Model(pal.ModelConfig.preset("kimi-k3-tiny"))
out = model(ids)  # out.logits, out.state
"""

from palimpsest.config import InputError, ModelConfig, SamplingConfig, TrainConfig
from palimpsest.generate import Completion, generate
from palimpsest.model import Model, Output
from palimpsest.plan import Plan, plan
from palimpsest.presets import presets
from palimpsest.published import load, save
from palimpsest.state import State

__version__ = "0.1.0"

__all__ = [
    "Completion",
    "InputError",
    "Model",
    "ModelConfig",
    "Output",
    "Plan",
    "SamplingConfig",
    "State",
    "TrainConfig",
    "generate",
    "load",
    "plan",
    "presets",
    "save",
]
