"""What a sequence carries to its next token.

Three kinds of memory: keys and values (one row per token, softmax attention), latents (one short row per token, MLA), and
recurrent matrices with the last inputs of a convolution (fixed size). A state is a value: a forward pass returns a new one
and the old one still holds what it held.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Self, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from palimpsest.context import Part

Value = TypeVar("Value")
Kind = Literal["kv", "recurrent", "conv"]


@dataclass(frozen=True)
class Segments:
    """Which tokens of a forward pass belong to which sequence.

    Dense: ids [B,T], every sequence brings T tokens. Packed: ids [1,total], sequence n brings `new[n]` tokens, and
    `cu_seqlens` int64 [N+1] holds the boundaries.
    """

    past: tuple[int, ...]  # tokens each sequence has consumed before
    new: tuple[int, ...]  # tokens each sequence brings now
    cu_seqlens: Tensor | None
    device: torch.device
    context: Part | None = None  # with tokens spread over processes: these are of one stretch of them

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence after this pass."""
        return tuple(before + now for before, now in zip(self.past, self.new, strict=True))

    @property
    def is_uniform(self) -> bool:
        """Every sequence has the same past and brings the same number of tokens."""
        return len(set(self.past)) <= 1 and len(set(self.new)) <= 1

    @property
    def rows(self) -> Tensor:
        """The sequence of every token, [B,T] or [1,total]."""
        return self.once("_rows", self._make_rows)

    @property
    def positions(self) -> Tensor:
        """The position of every token in its sequence, [B,T] or [1,total]."""
        return self.once("_positions", self._make_positions)

    def once(self, name: str, make: Callable[[], Value]) -> Value:
        """What `make` gave the first time. Not a cached_property: torch.compile cannot look into its lock."""
        if torch.compiler.is_compiling():
            return make()
        if name not in self.__dict__:
            self.__dict__[name] = make()
        return self.__dict__[name]

    def _make_rows(self) -> Tensor:
        index = torch.arange(len(self.new), device=self.device)
        if self.cu_seqlens is None:
            return index.unsqueeze(1).expand(-1, self.new[0] if self.new else 0)
        counts = torch.tensor(self.new, device=self.device)
        return torch.repeat_interleave(index, counts, output_size=sum(self.new)).unsqueeze(0)

    def _make_positions(self) -> Tensor:
        if any(self.past):
            past = torch.tensor(self.past, dtype=torch.long, device=self.device)
        else:  # made on the device: a graph that is being recorded must not wait for the host
            past = torch.zeros(len(self.past), dtype=torch.long, device=self.device)
        if self.cu_seqlens is None:
            return past.unsqueeze(1) + torch.arange(self.new[0] if self.new else 0, device=self.device)
        offset = past - self.cu_seqlens[:-1].to(past)
        return torch.arange(sum(self.new), device=self.device).unsqueeze(0) + offset[self.rows]


class Rows:
    """Growing rows, left-aligned: tensors [B,S,...] of which sequence b uses the first lengths[b] rows.

    Appending under no_grad writes into spare room behind the rows that earlier values see, so decoding does not copy the
    past at every token. Only the newest value of a buffer may do so; any other copies first and starts its own buffer.
    """

    def __init__(self, buffers: tuple[Tensor, ...], size: int, newest: list[int] | None = None) -> None:
        self._buffers = buffers
        self.size = size  # S
        self._newest = newest if newest is not None else [0]
        self._ticket = self._newest[0]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The rows themselves, [B,S,...]; views."""
        return tuple(buffer[:, : self.size] for buffer in self._buffers)

    def append(self, new: tuple[Tensor, ...], segments: Segments) -> Rows:
        """Rows with each sequence's new tokens behind its old ones; `new` are [B,T,...] or packed [1,total,...]."""
        size = max(segments.lengths, default=0)
        fresh = max(segments.past, default=0) == 0
        if fresh and segments.cu_seqlens is None:
            return Rows(new, size)
        buffers, newest = self._room(new, size)
        dense = segments.cu_seqlens is None and segments.is_uniform
        for buffer, tensor in zip(buffers, new, strict=True):
            if dense:
                buffer[:, segments.past[0] : size] = tensor
            else:
                buffer[segments.rows, segments.positions] = tensor.to(buffer.dtype)
        return Rows(buffers, size, newest)

    def extend(self, segments: Segments) -> Rows:
        """As `append`, with the new rows still to be written into `tensors`. At least one sequence is not empty."""
        size = max(segments.lengths)
        buffers, newest = self._room(self._buffers, size)
        return Rows(buffers, size, newest)

    def _room(self, new: tuple[Tensor, ...], size: int) -> tuple[tuple[Tensor, ...], list[int]]:
        frozen = any(b.is_inference() for b in self._buffers) and not torch.is_inference_mode_enabled()
        if not torch.is_grad_enabled() and not frozen and self._ticket == self._newest[0] and self._buffers[0].shape[1] >= size:
            self._newest[0] += 1
            return self._buffers, self._newest
        spare = 0 if torch.is_grad_enabled() or self.size == 0 else max(size // 4, 32)
        grown = []
        for buffer, tensor in zip(self._buffers, new, strict=True):
            larger = tensor.new_zeros(buffer.shape[0], size + spare, *buffer.shape[2:])
            kept = min(self.size, size)
            larger[:, :kept] = buffer[:, :kept]
            grown.append(larger)
        return tuple(grown), [0]

    def select(self, rows: Tensor, size: int) -> Rows:
        """The given sequences, none of which is longer than `size`."""
        return Rows(tuple(buffer[rows, :size] for buffer in self._buffers), size)

    @staticmethod
    def join(parts: Sequence[Rows]) -> Rows:
        """The sequences of all parts, in order, with spare room behind the longest."""
        size, count = max(part.size for part in parts), sum(len(part._buffers[0]) for part in parts)
        joined = []
        for tensors in zip(*(part.tensors for part in parts), strict=True):
            room = size + max(size // 4, 32) if size else 0
            buffer, row = tensors[0].new_zeros(count, room, *tensors[0].shape[2:]), 0
            for tensor in tensors:
                buffer[row : row + len(tensor), : tensor.shape[1]] = tensor
                row += len(tensor)
            joined.append(buffer)
        return Rows(tuple(joined), size)

    def crop(self, size: int) -> Rows:
        return Rows(tuple(tensor[:, :size].clone() for tensor in self.tensors), size)

    def shorten(self, size: int) -> Rows:
        """The first `size` rows of the same buffer; what comes next may overwrite the others."""
        return Rows(self._buffers, size, self._newest) if self._ticket == self._newest[0] else Rows(self.tensors, size)

    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    def bytes_per_token(self) -> int:
        """What one more token of one sequence adds."""
        return sum(buffer.shape[2:].numel() * buffer.element_size() for buffer in self._buffers)


@dataclass(frozen=True)
class KeyValue:
    """Softmax attention: keys [B,S,Hkv,D] and values [B,S,Hkv,D]; grows with every token."""

    rows: Rows

    @property
    def form(self) -> tuple[object, ...]:
        """Kind and sizes: equal for two states that the same layer can take."""
        return type(self), *(tensor.shape[2:] for tensor in self.rows.tensors)

    def num_bytes(self, kind: Kind) -> int:
        return self.rows.num_bytes() if kind == "kv" else 0

    def select(self, rows: Tensor, size: int) -> Self:
        return replace(self, rows=self.rows.select(rows, size))

    def join(self, others: Sequence[Self]) -> Self:
        return replace(self, rows=Rows.join([self.rows, *(other.rows for other in others)]))


@dataclass(frozen=True)
class Latent(KeyValue):
    """MLA: rows [B,S,R+r], a normed latent and behind it the shared positional key; grows with every token."""


@dataclass(frozen=True)
class Recurrent:
    """Linear memories: matrix [B,HV,K,V] in float32, and the last W-1 convolution inputs [B,W-1,C]; fixed size."""

    matrix: Tensor
    conv: Tensor

    @property
    def form(self) -> tuple[object, ...]:
        """Kind and sizes: equal for two states that the same layer can take."""
        return type(self), self.matrix.shape[1:], self.conv.shape[1:]

    def num_bytes(self, kind: Kind) -> int:
        held = {"recurrent": self.matrix, "conv": self.conv}.get(kind)
        return 0 if held is None else held.numel() * held.element_size()

    def select(self, rows: Tensor, size: int) -> Self:
        return replace(self, matrix=self.matrix[rows], conv=self.conv[rows])

    def join(self, others: Sequence[Self]) -> Self:
        matrices, convs = [self.matrix, *(o.matrix for o in others)], [self.conv, *(o.conv for o in others)]
        return replace(self, matrix=torch.cat(matrices), conv=torch.cat(convs))


LayerState = KeyValue | Latent | Recurrent


class State:
    """The memory of a batch of sequences: one entry per layer, and the number of tokens each sequence has consumed."""

    def __init__(self, layers: Sequence[LayerState], lengths: tuple[int, ...]) -> None:
        self.layers = tuple(layers)
        self.lengths = lengths

    @property
    def batch_size(self) -> int:
        return len(self.lengths)

    def num_bytes(self, kind: Kind | None = None) -> int:
        """Bytes carried, in all or of one kind. Rows of unequal sequences count at the longest's length."""
        kinds: tuple[Kind, ...] = ("kv", "recurrent", "conv")
        if kind is not None and kind not in kinds:
            raise ValueError(f"kind is {kind!r}; it must be one of {', '.join(kinds)} or None")
        return sum(layer.num_bytes(each) for layer in self.layers for each in kinds if kind in (None, each))

    def bytes_per_token(self) -> int:
        """Bytes that one more token of one sequence adds; 0 when every layer's memory has a fixed size."""
        return sum(layer.rows.bytes_per_token() for layer in self.layers if isinstance(layer, KeyValue))

    def snapshot(self) -> State:
        """The same memory as a value of its own, for `restore`."""
        return State(self.layers, self.lengths)

    def restore(self, snapshot: State) -> Self:
        """Goes back to a snapshot, in place."""
        self.layers, self.lengths = snapshot.layers, snapshot.lengths
        return self

    def select(self, rows: Sequence[int] | Tensor) -> State:
        """A new state with the given sequences, in the given order; a sequence may be taken more than once."""
        chosen = [int(row) for row in rows]
        for row in chosen:
            if not -self.batch_size <= row < self.batch_size:
                raise ValueError(f"row {row} is outside the state's {self.batch_size} sequences")
        device = _device(self.layers)
        index = torch.tensor(chosen, dtype=torch.long, device=device)
        lengths = tuple(self.lengths[row] for row in chosen)
        longest = max(lengths, default=0)
        return State([layer.select(index, longest) for layer in self.layers], lengths)

    @staticmethod
    def join(states: Sequence[State]) -> State:
        """The sequences of several states of one model, in order."""
        if len(states) == 1:
            return states[0]
        layers = [first.join(others) for first, *others in zip(*(state.layers for state in states), strict=True)]  # type: ignore[arg-type]
        return State(layers, tuple(length for state in states for length in state.lengths))

    def rewind(self, earlier: State, lengths: Sequence[int]) -> State:
        """Every sequence as it was at `lengths[b]` tokens; `earlier` is the state that this one followed from.

        Growing rows go back to any length. Recurrent memory knows two: what `earlier` held and what this state holds.
        """
        back = [length < now for length, now in zip(lengths, self.lengths, strict=True)]
        if not any(back):
            return self
        layers: list[LayerState] = []
        for now, then in zip(self.layers, earlier.layers, strict=True):
            if isinstance(now, Recurrent) and isinstance(then, Recurrent):
                for row, length in enumerate(lengths):
                    if length not in (self.lengths[row], earlier.lengths[row]):
                        raise ValueError(f"cannot go back to {length} tokens in row {row}: recurrent memory was overwritten")
                rows = torch.tensor(back, device=now.matrix.device)
                matrix = torch.where(rows.view(-1, 1, 1, 1), then.matrix, now.matrix)
                layers.append(Recurrent(matrix, torch.where(rows.view(-1, 1, 1), then.conv, now.conv)))
            elif isinstance(now, KeyValue):
                layers.append(replace(now, rows=now.rows.shorten(max(lengths))))
        return State(layers, tuple(lengths))

    def crop(self, tokens: int) -> Self:
        """Forgets all but the first `tokens` tokens of every sequence, in place.

        Raises ValueError when a sequence is shorter, or when a layer's memory is recurrent: what was overwritten is gone.
        """
        if tokens < 0 or any(tokens > length for length in self.lengths):
            raise ValueError(f"cannot crop to {tokens} tokens: the sequences hold {list(self.lengths)}")
        if all(tokens == length for length in self.lengths):
            return self
        layers = []
        for number, layer in enumerate(self.layers):
            if not isinstance(layer, KeyValue):
                raise ValueError(f"cannot crop: layer {number} has a recurrent memory; restore a snapshot instead")
            layers.append(replace(layer, rows=layer.rows.crop(tokens)))
        self.layers, self.lengths = tuple(layers), (tokens,) * self.batch_size
        return self


def _device(layers: Sequence[LayerState]) -> torch.device:
    first = layers[0]
    return first.matrix.device if isinstance(first, Recurrent) else first.rows.tensors[0].device
