"""The kernels as one differentiable function. The backward pass recomputes: between the two only the inputs are kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from palimpsest.ops.triton.backward import chunk_back, pairs_back, scan_back
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
    q, k, v, g, beta = given[:5]
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
    total = running(given) if given.gate and not given.vector else ready.total
    rows, squares = ready.rows, (ready.reads, ready.solve)  # the pass over pairs writes its results where these were
    del ready
    d_v = torch.empty_like(v, memory_format=torch.contiguous_format)
    d_beta = None if beta is None else torch.empty_like(beta, memory_format=torch.contiguous_format)
    along = q.new_empty(slots, heads, 2, CHUNK, dtype=torch.float32) if given.norm else None
    bounds, numbers, sizes = given.table()[0], (v.shape[1], given.chunks), given.sizes()
    shared = {"ERASE": given.erase, "NORM": given.norm, "COLUMNS": rows.shape[2] * CHUNK, "V": value_dim}
    pairs_back[(heads, slots)](
        v, o, d_o, updates, adjoint, rows, d_v, d_beta, *squares, along, bounds, *numbers, _stride(v),
        VALUE_HEADS=heads, PACKED=sizes["PACKED"], DT=sizes["DT"], LOGIT=given.logit, **shared, **config(given, "pairs_back"),
    )  # fmt: skip
    del o
    options = config(given, "chunk_back")
    blocks, repeat = given.padded // options["BK"], heads // q.shape[2]
    d_q, d_k = (v.new_empty((*v.shape[:3], key_dim), dtype=x.dtype if repeat == 1 else torch.float32) for x in (q, k))
    d_g = d_bias = d_rate = None
    if g is not None:
        d_g = torch.empty_like(g, memory_format=torch.contiguous_format)
        if not given.vector:
            d_g = g.new_empty(blocks, *g.shape, dtype=torch.float32)
        d_bias = None if given.bias is None else v.new_empty(slots, heads, key_dim, dtype=torch.float32)
        d_rate = None if given.a_log is None else v.new_empty(slots, heads, blocks, dtype=torch.float32)
    form = given.form()
    del form["LOGIT"], form["NORM"]
    chunk_back[(heads, slots, blocks)](
        q, k, v, g, given.a_log, given.bias, total, d_o, updates, adjoint, entering, leaving, rows, *squares, along,
        d_q, d_k, d_g, d_bias, d_rate, given.sums(), bounds,
        *numbers, v.shape[0] * v.shape[1], _stride(q), _stride(k), _stride(v), _stride(g), given.scale, given.bound or 0.0,
        **sizes, **form, **shared, VECTOR=given.vector, **options,
    )  # fmt: skip
    if repeat > 1:
        d_q, d_k = (x.unflatten(2, (-1, repeat)).sum(3).to(like.dtype) for x, like in ((d_q, q), (d_k, k)))
    gates = _gate(given, d_g, d_rate, d_bias)
    d_state = None if given.state is None else d_initial.to(given.state.dtype)
    return [d_q, d_k, d_v, gates[0], d_beta, d_state, *gates[1:]]


def _gate(given: Inputs, d_g: Any, d_rate: Any, d_bias: Any) -> list[Tensor | None]:
    """Gradients of g, A_log and dt_bias from what `chunk_back` left."""
    if given.g is None or d_g is None:
        return [None, None, None]
    if given.vector:
        d_rate = None if given.a_log is None else d_rate.sum((0, 2)).to(given.a_log.dtype)
        return [d_g, d_rate, None if given.bias is None else d_bias.sum(0).flatten().to(given.bias.dtype)]
    d_log = d_g.sum(0)
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
