"""The model of a plan: a preset, a file with our fields, or a published config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from palimpsest.config import InputError, ModelConfig, suggestion
from palimpsest.convert import read_config
from palimpsest.plan.counts import is_published_k3
from palimpsest.presets import presets

# Published models whose configuration has settings that no field of ModelConfig holds.
UNHELD = {
    **dict.fromkeys(("deepseek_v3", "deepseek_v2"), "its choice of experts by groups and its scaled rotary positions"),
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
    if kind in UNHELD:
        raise InputError(f"{path}: model_type is {kind!r}; ModelConfig has no field for {UNHELD[kind]}, so it is not planned")
    try:
        _, config = read_config(document)
    except InputError as error:
        raise InputError(f"{path.parent / str(error)}") from None
    packed = document.get("text_config", document).get("quantization_config") is not None
    return name, config, "mxfp4" if packed else _dtype(config)


def _dtype(config: ModelConfig) -> str:
    return "mxfp4" if is_published_k3(config) else "bf16"


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path}: not valid JSON ({error}); give a config.json") from None
    if not isinstance(document, dict):
        raise InputError(f"{path}: it holds no table of fields; give a config.json")
    document.pop("format", None)  # of our model folders
    return document
