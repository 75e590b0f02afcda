"""The definition of the whole family, token by token. Every other backend must equal this loop.

Per value head, with state S [K, V], log decay g <= 0 and write strength beta:

    S <- Diag(exp(g_t)) S                 forget    (no gate: skipped)
    u  = beta_t (v_t - S^T k_t)           correct   (additive memory: u = v_t)
    S <- S + k_t u^T                      write
    o  = S^T q_t                          read, after the write

Linear attention has neither gate nor correction, DeltaNet no gate, Gated DeltaNet one g per head, KDA one per key channel.
"""

from __future__ import annotations

import torch
from torch import Tensor


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, state: Tensor, lengths: list[int] | None
) -> tuple[Tensor, Tensor]:
    """Runs the recurrence over every token in order.

    q, k [B,T,HV,K] (q already scaled), v [B,T,HV,V], g [B,T,HV,K or 1] or None, beta [B,T,HV] or None (additive),
    state [B,HV,K,V]. With `lengths` (N document lengths that sum to T) B is 1 and state is [N,HV,K,V].
    Returns o [B,T,HV,V] and the state after the last token, both new tensors of the inputs' dtype.
    """
    if lengths is None:
        outputs, state = _run(q, k, v, g, beta, state)
        return outputs, state
    pieces, states, start = [], [], 0
    for row, length in enumerate(lengths):
        window = slice(start, start + length)
        one = [None if x is None else x[:, window] for x in (q, k, v, g, beta)]
        piece, final = _run(*one, state[row : row + 1])  # type: ignore[arg-type]
        pieces.append(piece)
        states.append(final)
        start += length
    if not pieces:
        return torch.zeros_like(v), state.clone()
    return torch.cat(pieces, 1), torch.cat(states)


def _run(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
    outputs = []
    for t in range(q.shape[1]):
        if g is not None:
            state = state * g[:, t].exp().unsqueeze(-1)
        update = v[:, t]
        if beta is not None:
            retrieved = (k[:, t].unsqueeze(-2) @ state).squeeze(-2)
            update = beta[:, t].unsqueeze(-1) * (update - retrieved)
        state = state + k[:, t].unsqueeze(-1) * update.unsqueeze(-2)
        outputs.append((q[:, t].unsqueeze(-2) @ state).squeeze(-2))
    if not outputs:
        return torch.zeros_like(v), state.clone()
    return torch.stack(outputs, 1), state
