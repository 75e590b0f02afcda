"""The recurrences and the experts' products as single nodes of a graph that torch.compile makes.

How they cut their work depends on what the numbers are (spans of decay, rows of an expert), which a traced graph cannot ask.
So a graph sees one operation with the shapes of its results; in it the same code runs as outside, and its backward pass runs
the forward pass again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# Inside an operation torch has autograd switched off below the level of enable_grad; this is how it stands outside.
_OUTSIDE = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
_functions: dict[str, Callable[..., Any]] = {}


def register(recurrence: Callable[..., tuple[Tensor, Tensor]], product: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    """Says what runs: (backend, q, k, v, g, beta, state, lengths, chunk_size) -> (o, state), and the experts' product."""
    _functions.update(recurrence=recurrence, grouped=product)


def recurrence(
    backend: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    lengths: list[int] | None,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """The backend of that name; the empty name is chosen when it runs."""
    return torch.ops.palimpsest.recurrence(backend, q, k, v, g, beta, state, lengths, chunk_size)


def grouped(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """As `ops.grouped_matmul`."""
    return torch.ops.palimpsest.grouped(x, weight, counts)


def _gradients(function: Callable[..., Any], inputs: Sequence[Tensor | None], grads: Sequence[Tensor]) -> list[Tensor]:
    """Of the inputs that there are, in their order."""
    with torch._C._ForceDispatchKeyGuard(*_OUTSIDE), torch.enable_grad():
        leaves = [None if x is None else x.detach().requires_grad_() for x in inputs]
        out = function(*leaves)
        wanted = [leaf for leaf in leaves if leaf is not None]
        found = torch.autograd.grad(out, wanted, grads, allow_unused=True, materialize_grads=True)
        return [x.detach().contiguous() for x in found]


def _empty(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op(
    "palimpsest::recurrence",
    mutates_args=(),
    schema="(str backend, Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor state, int[]? lengths, int chunk_size)"
    " -> (Tensor, Tensor)",
)
def _recurrence(backend: str, *arguments: Any) -> tuple[Tensor, Tensor]:
    o, final = _functions["recurrence"](backend, *arguments)
    return o.contiguous(), final.contiguous()


@_recurrence.register_fake
def _(backend: str, q: Tensor, k: Tensor, v: Tensor, g: Any, beta: Any, state: Tensor, lengths: Any, chunk_size: int) -> Any:
    return _empty(v), _empty(state)


@torch.library.custom_op(
    "palimpsest::recurrence_backward",
    mutates_args=(),
    schema="(str backend, Tensor d_o, Tensor d_state, Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor state,"
    " int[]? lengths, int chunk_size) -> Tensor[]",
)
def _recurrence_backward(backend: str, d_o: Tensor, d_state: Tensor, *arguments: Any) -> list[Tensor]:
    *inputs, lengths, chunk_size = arguments
    return _gradients(lambda *x: _functions["recurrence"](backend, *x, lengths, chunk_size), inputs, (d_o, d_state))


@_recurrence_backward.register_fake
def _(backend: str, d_o: Tensor, d_state: Tensor, *arguments: Any) -> list[Tensor]:
    return [_empty(x) for x in arguments[:-2] if x is not None]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.backend, *tensors, ctx.lengths, ctx.chunk_size = inputs
    ctx.save_for_backward(*tensors)


def _flow(ctx: Any, d_o: Tensor, d_state: Tensor) -> Any:
    tensors = ctx.saved_tensors
    grads = d_o.contiguous(), d_state.contiguous()
    found = iter(torch.ops.palimpsest.recurrence_backward(ctx.backend, *grads, *tensors, ctx.lengths, ctx.chunk_size))
    return None, *(None if x is None else next(found) for x in tensors), None, None


_recurrence.register_autograd(_flow, setup_context=_keep)


@torch.library.custom_op("palimpsest::grouped", mutates_args=(), schema="(Tensor x, Tensor weight, Tensor counts) -> Tensor")
def _grouped(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return _functions["grouped"](x, weight, counts).contiguous()


@_grouped.register_fake
def _(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@torch.library.custom_op(
    "palimpsest::grouped_backward",
    mutates_args=(),
    schema="(Tensor d_y, Tensor x, Tensor weight, Tensor counts) -> Tensor[]",
)
def _grouped_backward(d_y: Tensor, x: Tensor, weight: Tensor, counts: Tensor) -> list[Tensor]:
    return _gradients(lambda *parts: _functions["grouped"](*parts, counts), (x, weight), (d_y,))


@_grouped_backward.register_fake
def _(d_y: Tensor, x: Tensor, weight: Tensor, counts: Tensor) -> list[Tensor]:
    return [_empty(part) for part in (x, weight)]


def _keep_grouped(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _flow_grouped(ctx: Any, d_y: Tensor) -> Any:
    return *torch.ops.palimpsest.grouped_backward(d_y.contiguous(), *ctx.saved_tensors), None


_grouped.register_autograd(_flow_grouped, setup_context=_keep_grouped)
