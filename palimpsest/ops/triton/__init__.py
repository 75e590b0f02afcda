"""The recurrence family as GPU kernels: gate, norms and sigmoid inside, matrix products by chunks of 64 tokens.

`prepare` works on all chunks at once and needs no state; `scan` walks the chunks of a head in order with the state on chip.
The order of every sum depends on one sequence alone, so a result does not depend on its company, and two runs give the same
bits. Nothing waits for the device. Imported only where triton is installed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from palimpsest.ops.triton.autograd import Recurrence
from palimpsest.ops.triton.launch import Inputs, by_token, few, prepare, results, walk

__all__ = ["recurrence"]

FEW = 8  # tokens that go one by one: the state moves once, and there is no chunk to fill


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor | None,
    lengths: list[int] | None,
    scale: float,
    normalise: bool = False,
    beta_is_logit: bool = False,
    gate: tuple[Tensor, Tensor | None, float | None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Arguments as of `ops.kda`; g [B,T,HV,K] or [B,T,HV], raw with `gate`. Returns o in v's dtype and the float32 state."""
    if q.is_cuda and q.device.index != torch.cuda.current_device():
        with torch.cuda.device(q.device):  # kernels are launched on the current device
            return recurrence(q, k, v, g, beta, state, lengths, scale, normalise, beta_is_logit, gate)
    rate, bias, bound = gate or (None, None, None)
    parts = [None if x is None else by_token(x) for x in (q, k, v, g, beta)]
    whole = [None if x is None else x.contiguous() for x in (state, rate, bias)]
    documents = None if lengths is None else tuple(lengths)
    needs_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*parts, *whole))
    # Fields in the order of `Inputs`. Only whole chunks have a backward pass.
    fields = (*parts, *whole, documents, scale, bound, normalise, beta_is_logit, 0 if needs_grad else FEW)
    return Recurrence.apply(*fields) if needs_grad else forward(Inputs(*fields))  # type: ignore[return-value,arg-type]


def forward(given: Inputs) -> tuple[Tensor, Tensor]:
    """o and the final state. Which kernels work on a sequence depends on its own length only."""
    lengths = (given.q.shape[1],) if given.lengths is None else given.lengths
    o, final = results(given)
    if any(length <= given.few for length in lengths):
        few(given, o, final)
    if any(length > given.few for length in lengths):
        walk(given, prepare(given), o, final)
    return o, final
