"""Many stacks at once (Kimi Linear, arXiv 2510.26692): what comes off a stack is what was put on it last.

    PUSH 3 a   PUSH 7 b   PUSH 3 c   POP 3 c   POP 7 b   POP 3 a

Three ids an operation: PUSH (0) or POP (1), the stack, the element. Elements that are popped are scored. A memory must
overwrite and restore: after `POP 3 c` the top of stack 3 is `a` again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from palimpsest.tasks.task import IGNORED, Task, uniform

PUSH, POP = 0, 1


@dataclass(frozen=True)
class Stack(Task):
    """`num_ops` operations on `num_stacks` stacks of `num_elements` kinds of elements.

    A coin decides between a push onto any stack and a pop from one of those that hold something; the first is a push.
    """

    name: ClassVar[str] = "stack"
    num_ops: int = 85
    num_stacks: int = 64
    num_elements: int = 64

    def __post_init__(self) -> None:
        self.require(self.num_ops >= 2, "num_ops", self.num_ops, "a push and a pop need at least 2")
        self.require(self.num_stacks >= 1, "num_stacks", self.num_stacks, "it must be at least 1")
        self.require(self.num_elements >= 2, "num_elements", self.num_elements, "it must be at least 2")

    @property
    def vocab_size(self) -> int:
        return 2 + self.num_stacks + self.num_elements

    @property
    def length(self) -> int:
        return 3 * self.num_ops

    @property
    def most_scored(self) -> int:
        return self.num_ops // 2

    @property
    def chance(self) -> float:
        return 1 / self.num_elements

    def draw(self, batch_size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        device, shape = generator.device, (batch_size, self.num_ops)
        elements = uniform(0, self.num_elements, shape, generator)
        pushed_to = uniform(0, self.num_stacks, shape, generator)
        wants_pop = torch.rand(shape, generator=generator, device=device) < 0.5
        # A stack is a chain: the operation on its top, and for every push the operation below it. -1 is the bottom.
        top = torch.full((batch_size, self.num_stacks), -1, device=device)
        below = torch.full(shape, -1, device=device)
        stacks, pops = torch.empty_like(elements), torch.empty_like(wants_pop)
        for op in range(self.num_ops):
            order = torch.rand(batch_size, self.num_stacks, generator=generator, device=device)
            held = (order * (top >= 0)).argmax(-1, keepdim=True)  # any stack that holds something
            pop = wants_pop[:, op : op + 1] & (top >= 0).any(-1, keepdim=True)
            stack = torch.where(pop, held, pushed_to[:, op : op + 1])
            last = top.gather(1, stack)
            taken = last.clamp(min=0)  # without a pop it is not read
            elements[:, op : op + 1] = torch.where(pop, elements.gather(1, taken), elements[:, op : op + 1])
            below[:, op : op + 1] = last
            top.scatter_(1, stack, torch.where(pop, below.gather(1, taken), op))
            stacks[:, op : op + 1], pops[:, op : op + 1] = stack, pop
        ids = torch.stack([pops.long(), 2 + stacks, 2 + self.num_stacks + elements], -1).flatten(1)
        labels = torch.full_like(ids, IGNORED)
        labels[:, 2::3] = torch.where(pops, ids[:, 2::3], IGNORED)
        return ids, labels

    def answer(self, row: list[int], position: int) -> int:
        stacks: dict[int, list[int]] = {}
        for at in range(0, position - 2, 3):
            if row[at] == PUSH:
                stacks.setdefault(row[at + 1], []).append(row[at + 2])
            else:
                stacks[row[at + 1]].pop()
        return stacks[row[-1]][-1]

    def at_length(self, length: int) -> Self:
        return replace(self, num_ops=length // 3)
