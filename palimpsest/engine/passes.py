"""One pass of a model over new tokens of several sequences."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from palimpsest.model import Model
from palimpsest.state import State


def forward(model: Model, pieces: Sequence[Sequence[int]], state: State) -> tuple[Tensor, State]:
    """New tokens of every row of `state`, none for some -> hidden [tokens,D] in the same order, and the state behind them."""
    device = model.embed_tokens.weight.device
    if all(len(piece) == 1 for piece in pieces):
        hidden, after = model.hidden(torch.tensor(pieces, device=device), state)
        return hidden[:, 0], after
    bounds = torch.tensor([0, *accumulate(map(len, pieces))], device=device)
    hidden, after = model.hidden(torch.tensor([[token for piece in pieces for token in piece]], device=device), state, bounds)
    return hidden[0], after
