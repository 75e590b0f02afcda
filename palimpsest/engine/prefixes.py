"""Memories of beginnings: a prompt that starts as an earlier one did is read from where they part.

A tree. A node holds the keys, values or latents of its own stretch of tokens, and the recurrent memory as it was at the
stretch's end: a place from which every kind of layer can go on. Nodes end every `BLOCK` tokens, where a prompt ended and
where an answer ended. What was used longest ago leaves first, a node never before its children: to disk where there is room
(spill.py), else it is forgotten.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from palimpsest.engine.spill import Spill
from palimpsest.state import KeyValue, LayerState, Recurrent, Rows, State

BLOCK = 512  # tokens


@dataclass(eq=False)
class Node:
    """Tokens `parent.end .. end` of a text. `hidden` [D] is what the model's head saw at the last of them. Both it and the
    memory are in `file` when they are not here."""

    parent: Node | None
    tokens: bytes
    end: int
    memory: State | None = None
    hidden: Tensor | None = None
    num_bytes: int = 0
    file: Path | None = None
    file_bytes: int = 0
    children: dict[bytes, Node] = field(default_factory=dict)
    kept: bool = True


class PrefixCache:
    """Nodes within a budget of bytes in memory and another one on disk. `empty` is a new state of the model."""

    def __init__(self, budget_bytes: int, empty: State, disk_bytes: int = 0) -> None:
        self.budget_bytes, self._empty = budget_bytes, empty
        self.disk = Spill(disk_bytes)
        self.num_bytes = 0
        self.root = Node(None, b"", 0)
        self._order: OrderedDict[Node, None] = OrderedDict()  # in memory, used longest ago first
        self._spilled: OrderedDict[Node, None] = OrderedDict()  # on disk, left longest ago first

    def __len__(self) -> int:
        return len(self._order) + len(self._spilled)

    def recall(self, ids: Sequence[int]) -> tuple[Node, State | None, Tensor | None]:
        """The longest remembered beginning of `ids`, its memory, and what the head saw at its end: the root and None twice
        when there is none."""
        node = self.find(ids)
        while (lost := next((each for each in _chain(node) if not self._bring_back(each)), None)) is not None:
            assert lost.parent is not None
            node = lost.parent
            self._forget(lost)
        self._touch(node)
        found = node, self.state(node), node.hidden
        self._shrink()
        return found

    def find(self, ids: Sequence[int]) -> Node:
        """The node that covers most of the beginning of `ids`; the root when there is none."""
        text = _packed(ids)
        best, open_nodes = self.root, [self.root]
        while open_nodes:
            node = open_nodes.pop()
            best = max(best, node, key=lambda each: each.end)
            start = node.end * _ITEM
            open_nodes += [child for tokens, child in node.children.items() if text.startswith(tokens, start)]
        return best

    def state(self, node: Node) -> State | None:
        """The memory of one sequence after the node's tokens, None for the root. All its parts are in memory."""
        chain = _chain(node)
        memories = [each.memory for each in chain if each.memory is not None]
        if not memories:
            return None
        layers = [_spliced(parts, node.end) for parts in zip(*(memory.layers for memory in memories), strict=True)]
        return State(layers, (node.end,))

    def add(self, node: Node, ids: Sequence[int], state: State, row: int, hidden: Tensor) -> Node:
        """Remembers sequence `row` of a state, of which `ids` are all tokens; `node` is where its text is known up to.

        Returns the new node, or the nearest one that is kept when the budget is too small for it.
        """
        while not node.kept and node.parent is not None:
            node = node.parent
        end = state.lengths[row]
        tokens = _packed(ids[node.end : end])
        known = node.children.get(tokens)
        if known is not None or not tokens:
            self._touch(known or node)
            return known or node
        size = _cut_bytes(state, end - node.end) + len(tokens) + hidden.nbytes
        if size > self.budget_bytes:
            return node
        memory = State([_cut(layer, row, node.end, end) for layer in state.layers], (end,))
        fresh = Node(node, tokens, end, memory, hidden.clone(), size)
        node.children[tokens] = fresh
        self.num_bytes += size
        self._touch(fresh)
        self._shrink()
        return fresh if fresh.kept else node

    def _touch(self, node: Node) -> None:
        for each in reversed(_chain(node)):
            if each.memory is not None:
                self._order[each] = None
                self._order.move_to_end(each)

    def _shrink(self) -> None:
        while self.num_bytes > self.budget_bytes:
            self._leave(next(iter(self._order)))
        while self.disk.num_bytes > self.disk.budget_bytes:
            oldest = next((node for node in self._spilled if not node.children), next(iter(self._spilled)))
            self._forget(oldest)

    def _leave(self, node: Node) -> None:
        """From memory to disk; forgotten where the disk does not take it."""
        if node.num_bytes <= self.disk.budget_bytes and node.memory is not None and node.hidden is not None:
            node.file = self.disk.write(node.memory, node.hidden)
        if node.file is None:
            self._forget(node)
            return
        node.file_bytes = node.file.stat().st_size
        node.memory, node.hidden = None, None
        self.num_bytes -= node.num_bytes
        del self._order[node]
        self._spilled[node] = None

    def _bring_back(self, node: Node) -> bool:
        """Whether a node is in memory now; the caller makes room."""
        if node.file is None or node.parent is None:
            return True
        found = self.disk.read(node.file, self._empty, node.end, node.end - node.parent.end)
        if found is None:
            return False
        node.memory, node.hidden = found
        self._leave_disk(node)
        self.num_bytes += node.num_bytes
        return True

    def _leave_disk(self, node: Node) -> None:
        assert node.file is not None
        self.disk.drop(node.file, node.file_bytes)
        node.file = None
        del self._spilled[node]

    def _forget(self, node: Node) -> None:
        """A node and what goes on from it."""
        for child in list(node.children.values()):
            self._forget(child)
        if node.file is not None:
            self._leave_disk(node)
        else:
            self._order.pop(node, None)
            self.num_bytes -= node.num_bytes
        assert node.parent is not None
        del node.parent.children[node.tokens]
        node.kept, node.memory, node.hidden = False, None, None


_ITEM = array("i").itemsize


def _packed(ids: Sequence[int]) -> bytes:
    return array("i", ids).tobytes()


def _chain(node: Node) -> list[Node]:
    """From the first node below the root to this one."""
    chain = []
    while node.parent is not None:
        chain.append(node)
        node = node.parent
    return chain[::-1]


def _cut(layer: LayerState, row: int, start: int, end: int) -> LayerState:
    if isinstance(layer, Recurrent):
        return Recurrent(layer.matrix[row : row + 1].clone(), layer.conv[row : row + 1].clone())
    rows = Rows(tuple(tensor[row : row + 1, start:end].clone() for tensor in layer.rows.tensors), end - start)
    return type(layer)(rows)


def _cut_bytes(state: State, tokens: int) -> int:
    fixed = (state.num_bytes("recurrent") + state.num_bytes("conv")) // state.batch_size
    return fixed + tokens * state.bytes_per_token()


def _spliced(parts: tuple[LayerState, ...], end: int) -> LayerState:
    last = parts[-1]
    if isinstance(last, Recurrent):
        return last
    stretches = [part.rows.tensors for part in parts if isinstance(part, KeyValue)]
    buffers = []
    for tensors in zip(*stretches, strict=True):
        room = tensors[0].new_zeros(1, end + max(end // 4, 32), *tensors[0].shape[2:])
        torch.cat(tensors, 1, out=room[:, :end])
        buffers.append(room)
    return type(last)(Rows(tuple(buffers), end))
