"""The short causal convolution in front of every recurrent memory.

    y[t,c] = SiLU( sum_j weight[c,j] x[t-W+1+j, c] )

The last tap multiplies the current token. Left of a sequence stands its state (the last W-1 inputs), zeros at the start.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional as F


def short_conv(
    x: Tensor, weight: Tensor, state: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """x [B,T,C], weight [C,W], state [B or N,W-1,C] -> y [B,T,C] in x's dtype, and the last W-1 inputs as a new state.

    The sum runs in float32 (float64 when x is). Raises ValueError for shapes that do not fit.
    """
    from palimpsest.ops import cpu_conv, document_lengths, triton_runs

    batch, tokens, channels = x.shape
    if weight.dim() != 2 or weight.shape[0] != channels:
        raise ValueError(f"weight has shape {list(weight.shape)}; expected [{channels}, W]")
    past = weight.shape[1] - 1
    lengths = None if cu_seqlens is None else document_lengths(cu_seqlens, batch, tokens)
    sequences = batch if lengths is None else len(lengths)
    if state is None:
        state = x.new_zeros(sequences, past, channels)
    elif tuple(state.shape) != (sequences, past, channels):
        raise ValueError(f"state has shape {list(state.shape)}; expected {[sequences, past, channels]}")
    state = state.to(x.dtype)
    if x.numel() and triton_runs(x, weight, state):
        from palimpsest.ops.triton import conv

        return conv.short_conv(x, weight, state, lengths), _last(x, state, lengths)
    if x.numel() and cpu_conv.takes(x, weight, state):
        return cpu_conv.short_conv(x, weight, state, lengths), _last(x, state, lengths)
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    taps = weight.to(dtype).unbind(1)
    if lengths is None:
        padded = torch.cat([state, x], 1)
        total = sum(padded[:, j : j + tokens].to(dtype) * tap for j, tap in enumerate(taps))
        return F.silu(total).to(x.dtype), padded[:, tokens:]  # type: ignore[arg-type]
    return _packed(x, taps, state, lengths, dtype)


def _packed(
    x: Tensor, taps: tuple[Tensor, ...], state: Tensor, lengths: list[int], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """All documents in one row: their states go in front of them, and the taps skip what belongs to another document."""
    past = len(taps) - 1
    starts, at = [], 0
    for length in lengths:
        starts.append(at)
        at += length
    pieces = [part for row, length in enumerate(lengths) for part in (state[row], x[0, starts[row] : starts[row] + length])]
    padded = torch.cat(pieces) if pieces else x[0]
    # Token t of document n stands at t + (n + 1) past in `padded`, right behind its own W - 1 predecessors.
    offset = torch.repeat_interleave(
        torch.arange(len(lengths), device=x.device) * past,
        torch.tensor(lengths, dtype=torch.long, device=x.device),
        output_size=at,
    )
    first = torch.arange(at, device=x.device) + offset
    total = x.new_zeros(at, x.shape[2], dtype=dtype)
    for j, tap in enumerate(taps):
        total = total + padded[first + j].to(dtype) * tap
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    rows = torch.tensor(ends, dtype=torch.long, device=x.device) + torch.arange(len(lengths), device=x.device) * past
    window = rows.unsqueeze(1) + torch.arange(past, device=x.device)
    return F.silu(total).to(x.dtype).unsqueeze(0), padded[window]


def _last(x: Tensor, state: Tensor, lengths: list[int] | None) -> Tensor:
    """The last W-1 inputs of every sequence, those of the state included."""
    past = state.shape[1]
    if lengths is None:
        return torch.cat([state, x], 1)[:, x.shape[1] :] if x.shape[1] < past else x[:, x.shape[1] - past :].clone()
    if past == 0:
        return state.clone()
    new, old, is_new = _ends(tuple(lengths), past, x.device)
    return torch.where(is_new, x[0, new], state.flatten(0, 1)[old])


@functools.lru_cache(maxsize=16)
def _ends(lengths: tuple[int, ...], past: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Where the last inputs of every document stand: token, row of all states, and which of the two [N,W-1,1]."""
    count = torch.tensor(lengths, dtype=torch.long).unsqueeze(1)
    position = count + torch.arange(-past, 0)  # below 0: in the state, which ends in front of position 0
    token = count.cumsum(0) - count + position
    row = torch.arange(len(lengths)).unsqueeze(1) * past + past + position
    found = token.clamp(min=0), row.clamp(max=len(lengths) * past - 1), (position >= 0).unsqueeze(2)
    return tuple(each.to(device, non_blocking=True) for each in found)  # type: ignore[return-value]
