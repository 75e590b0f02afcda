"""Memories of beginnings: a prompt that starts as an earlier one did is read from where they part.

A tree. A node holds the keys, values or latents of its own stretch of tokens, and the recurrent memory as it was at the
stretch's end: a place from which every kind of layer can go on. Nodes end every `BLOCK` tokens, where a prompt ended and
where an answer ended. What was used longest ago is forgotten first, a node never before its children.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from palimpsest.state import KeyValue, LayerState, Recurrent, Rows, State

BLOCK = 512  # tokens


@dataclass(eq=False)
class Node:
    """Tokens `parent.end .. end` of a text. `hidden` [D] is what the model's head saw at the last of them."""

    parent: Node | None
    tokens: bytes
    end: int
    memory: State | None = None
    hidden: Tensor | None = None
    num_bytes: int = 0
    children: dict[bytes, Node] = field(default_factory=dict)
    kept: bool = True


class PrefixCache:
    """Nodes within a budget of bytes."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.num_bytes = 0
        self.root = Node(None, b"", 0)
        self._order: OrderedDict[Node, None] = OrderedDict()  # used longest ago first

    def __len__(self) -> int:
        return len(self._order)

    def find(self, ids: Sequence[int]) -> Node:
        """The node that covers most of the beginning of `ids`; the root when there is none."""
        text = _packed(ids)
        best, open_nodes = self.root, [self.root]
        while open_nodes:
            node = open_nodes.pop()
            best = max(best, node, key=lambda each: each.end)
            start = node.end * _ITEM
            open_nodes += [child for tokens, child in node.children.items() if text.startswith(tokens, start)]
        self._touch(best)
        return best

    def state(self, node: Node) -> State | None:
        """The memory of one sequence after the node's tokens, None for the root."""
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
        while self.num_bytes > self.budget_bytes:
            self._forget(next(iter(self._order)))
        return fresh if fresh.kept else node

    def _touch(self, node: Node) -> None:
        for each in reversed(_chain(node)):
            self._order[each] = None
            self._order.move_to_end(each)

    def _forget(self, node: Node) -> None:
        del self._order[node]
        assert node.parent is not None and not node.children
        del node.parent.children[node.tokens]
        node.kept, node.memory, node.hidden = False, None, None
        self.num_bytes -= node.num_bytes


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
