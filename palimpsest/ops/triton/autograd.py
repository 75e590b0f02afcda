"""The kernels as one differentiable function. The backward pass recomputes: between the two only the inputs are kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from palimpsest.ops.triton.backward import pairs_back, scan_back
from palimpsest.ops.triton.chunk_back import chunk_back_scalar, chunk_back_vector, states_back
from palimpsest.ops.triton.launch import CHUNK, Inputs, Prepared, _stride, config, prepare, results, running, walk


class Recurrence(torch.autograd.Function):
    """`Inputs`, field by field -> o, final state."""

    @staticmethod
    def forward(ctx: Any, *fields: Any) -> tuple[Tensor, Tensor]:
        given = Inputs(*fields)
        ctx.save_for_backward(*given[:8])
        ctx.rest = given[8:]
        o, final = results(given)
        walk(given, prepare(given), o, final)
        return o, final

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        given = Inputs(*ctx.saved_tensors, *ctx.rest)
        return (*gradients(given, grads[0].contiguous(), grads[1].contiguous()), *(None for _ in ctx.rest))


def gradients(given: Inputs, d_o: Tensor, d_final: Tensor) -> list[Tensor | None]:
    """Gradients of the first eight fields of `given`."""
    q, k, v, _, beta = given[:5]
    slots, heads, key_dim, value_dim = given.slots, v.shape[2], q.shape[3], v.shape[3]
    ready = prepare(given)
    entering = q.new_empty(slots, heads, key_dim, value_dim, dtype=given.dtype)
    updates = q.new_empty(slots, heads, CHUNK, value_dim, dtype=given.dtype) if given.erase else None
    o, final = results(given)
    walk(given, ready, o, final, (entering, updates))
    leaving = torch.empty_like(entering)
    adjoint = q.new_empty(slots, heads, CHUNK, value_dim, dtype=given.dtype)
    d_initial = torch.empty_like(d_final)
    _scan_back(given, ready, d_o, d_final, d_initial, leaving, adjoint)
    rows, squares = ready.rows, (ready.reads, ready.solve)  # the pass over pairs writes its results where these were
    d_v = torch.empty_like(v, memory_format=torch.contiguous_format)
    d_beta = None if beta is None else torch.empty_like(beta, memory_format=torch.contiguous_format)
    along = q.new_empty(slots, heads, 3, CHUNK, dtype=torch.float32)
    total = running(given) if given.gate and not given.vector else None
    bounds, numbers, sizes = given.table()[0], (v.shape[1], given.chunks), given.sizes()
    pairs_back[(heads, slots)](
        k, v, o, d_o, updates, adjoint, rows, total, d_v, d_beta, *squares, along, bounds,
        *numbers, _stride(k), _stride(v), given.scale, HEADS=q.shape[2], VALUE_HEADS=heads, K=key_dim, V=value_dim,
        COLUMNS=rows.shape[2] * CHUNK, LOGIT=given.logit, NORM=given.norm, ERASE=given.erase,
        FADES=total is not None, PACKED=sizes["PACKED"], DT=sizes["DT"], **config(given, "pairs_back"),
    )  # fmt: skip
    del o
    if given.vector:
        options = config(given, "states_back")
        del sizes["HEADS"]
        states_back[(given.padded // options["BK"], heads, slots)](
            d_o, updates, adjoint, entering, leaving, rows, ready.q_down, ready.k_down, ready.k_up, ready.keep, bounds,
            *numbers, given.scale, **sizes, V=value_dim, **options,
        )  # fmt: skip
        del updates, adjoint, entering, leaving  # before as much is asked for again
        d_q, d_k, *gate = _vector(given, ready, along)
    else:
        d_q, d_k, *gate = _scalar(given, ready, total, (d_o, updates, adjoint, entering, leaving), along)
    repeat = heads // q.shape[2]
    if repeat > 1:
        d_q, d_k = (x.unflatten(2, (-1, repeat)).sum(3).to(like.dtype) for x, like in ((d_q, q), (d_k, k)))
    d_state = None if given.state is None else d_initial.to(given.state.dtype)
    return [d_q, d_k, d_v, gate[0], d_beta, d_state, *gate[1:]]


def _of_keys(given: Inputs) -> list[Tensor]:
    """Memory for the gradients of q and k, for every value head."""
    shape, shared = (*given.v.shape[:3], given.q.shape[3]), given.v.shape[2] > given.q.shape[2]
    return [given.v.new_empty(shape, dtype=torch.float32 if shared else x.dtype) for x in (given.q, given.k)]


def _vector(given: Inputs, ready: Prepared, along: Tensor) -> list[Tensor | None]:
    """Gradients of q, k, g, A_log and dt_bias from what `states_back` and `pairs_back` left in `ready`."""
    q, k, g, rate, bias = given.q, given.k, given.g, given.a_log, given.bias
    slots, heads, key_dim = given.slots, given.v.shape[2], q.shape[3]
    options, sizes, form = config(given, "chunk_back"), given.sizes(), given.form()
    blocks = given.padded // options["SPAN"]
    d_q, d_k = _of_keys(given)
    assert g is not None
    d_g = torch.empty_like(g, memory_format=torch.contiguous_format)
    d_bias = None if bias is None else g.new_empty(slots, heads, key_dim, dtype=torch.float32)
    d_rate = None if rate is None else g.new_empty(slots, heads, blocks, dtype=torch.float32)
    del form["LOGIT"]
    chunk_back_vector[(blocks, heads, slots)](
        q, k, g, rate, bias, ready.total, ready.q_down, ready.k_down, ready.k_up, ready.keep, ready.rows, ready.reads,
        ready.solve, along, d_q, d_k, d_g, d_bias, d_rate, given.sums(), given.table()[0],
        q.shape[1], given.chunks, _stride(q), _stride(k), _stride(g), given.bound or 0.0,
        **sizes, **form, MILD=given.mild, **options,
    )  # fmt: skip
    d_rate = None if rate is None or d_rate is None else d_rate.sum((0, 2)).to(rate.dtype)
    d_bias = None if bias is None or d_bias is None else d_bias.sum(0).flatten().to(bias.dtype)
    return [d_q, d_k, d_g, d_rate, d_bias]


def _scalar(
    given: Inputs, ready: Prepared, total: Tensor | None, through: tuple[Tensor | None, ...], along: Tensor
) -> list[Tensor | None]:
    """Gradients of q, k, g, A_log and dt_bias from what `pairs_back` left in `ready` and from d_o, U, Y, S and D."""
    q, k, v, g = given[:4]
    options = config(given, "chunk_back")
    blocks = given.padded // options["BK"]
    d_q, d_k = _of_keys(given)
    d_log = None if g is None else g.new_empty(blocks, *g.shape, dtype=torch.float32)
    chunk_back_scalar[(blocks, v.shape[2], given.slots)](
        q, k, v, total, *through, ready.rows, ready.reads, ready.solve, along, d_q, d_k, d_log, given.table()[0],
        q.shape[1], given.chunks, q.shape[0] * q.shape[1], _stride(q), _stride(k), _stride(v), given.scale,
        **given.sizes(), V=v.shape[3], GATED=g is not None, NORM=given.norm, ERASE=given.erase, **options,
    )  # fmt: skip
    return [d_q, d_k, *_gate(given, d_log)]


def _gate(given: Inputs, d_log: Tensor | None) -> list[Tensor | None]:
    """Gradients of a scalar gate's g, A_log and dt_bias from those of the log decay, in parts by blocks of channels."""
    if given.g is None or d_log is None:
        return [None, None, None]
    d_log = d_log.sum(0)
    if given.a_log is None:
        return [d_log.to(given.g.dtype), None, None]
    z, rate = given.g.float() + (0 if given.bias is None else given.bias.float()), given.a_log.float().exp()
    d_raw = -rate * z.sigmoid() * d_log
    d_rate = (-rate * F.softplus(z) * d_log).sum((0, 1)).to(given.a_log.dtype)
    d_bias = None if given.bias is None else d_raw.sum((0, 1)).to(given.bias.dtype)
    return [d_raw.to(given.g.dtype), d_rate, d_bias]


def _scan_back(
    given: Inputs, ready: Prepared, d_o: Tensor, d_final: Tensor, d_initial: Tensor, leaving: Tensor, adjoint: Tensor
) -> None:
    q, k, v = given.q, given.k, given.v
    options, value_dim = config(given, "scan_back"), v.shape[3]
    left, right = (ready.q_down, ready.k_down) if given.vector else (q, k)
    bounds, firsts, _ = given.table()
    scan_back[(-(-value_dim // options["BV"]), v.shape[2], given.sequences)](
        left, right, ready.k_up, ready.keep, ready.reads, ready.solve, ready.rows, d_o, d_final, d_initial, leaving, adjoint,
        bounds, firsts, v.shape[1], given.chunks, _stride(q), _stride(k),
        **given.sizes(), V=value_dim, VECTOR=given.vector, GATED=given.gate > 0, ERASE=given.erase, **options,
    )  # fmt: skip
