"""States as tensors with names, for files of safetensors."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from palimpsest.state import KeyValue, LayerState, Recurrent, Rows, State


def named(state: State) -> dict[str, Tensor]:
    """Every tensor of a state as `layers.N.matrix`, `layers.N.conv` or `layers.N.rows.M`, on the CPU."""
    return {
        f"layers.{index}.{name}": tensor.cpu().contiguous()
        for index, layer in enumerate(state.layers)
        for name, tensor in _parts(layer).items()
    }


def filled(empty: State, tensors: Mapping[str, Tensor], tokens: int, rows: int | None = None) -> State:
    """The state of one sequence of `tokens` tokens from such tensors, on the device of `empty`, a state of the same model.

    Growing layers hold `rows` rows, those of all tokens if not given. Raises KeyError for a tensor that is missing, ValueError
    for one of another shape or dtype, and for values that are not finite.
    """
    count = tokens if rows is None else rows
    layers = [_layer(layer, tensors, f"layers.{index}.", count) for index, layer in enumerate(empty.layers)]
    return State(layers, (tokens,))


def _parts(layer: LayerState) -> dict[str, Tensor]:
    if isinstance(layer, Recurrent):
        return {"matrix": layer.matrix, "conv": layer.conv}
    return {f"rows.{number}": tensor for number, tensor in enumerate(layer.rows.tensors)}


def _layer(empty: LayerState, tensors: Mapping[str, Tensor], prefix: str, rows: int) -> LayerState:
    found = []
    for name, like in _parts(empty).items():
        tensor, shape = tensors[prefix + name], list(like.shape)
        if isinstance(empty, KeyValue):
            shape[1] = rows
        if list(tensor.shape) != shape or tensor.dtype != like.dtype:
            raise ValueError(f"{prefix}{name} is {tensor.dtype} {list(tensor.shape)}, not {like.dtype} {shape}")
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"{prefix}{name} holds values that are not finite")
        found.append(tensor.to(like.device))
    return Recurrent(*found) if isinstance(empty, Recurrent) else type(empty)(Rows(tuple(found), rows))
