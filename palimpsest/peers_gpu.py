"""Our GPU kernels beside flash-linear-attention's and torch's softmax attention: the same inputs, the same process, medians."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from palimpsest.benchmark_gpu import SIZES, Row, call, inputs, milliseconds, relative

Run = Callable[[], Any]
STEPS = ((32, 32), (128, 32), (1, 96))  # B, H


def tables() -> Iterator[Row]:
    """Forward, forward and backward, and one token, against what is installed; errors of both on keys that are alike."""
    for op in ("kda", "gated_delta_rule"):
        for batch, tokens, heads in SIZES:
            yield {"work": f"{op} forward, {batch}x{tokens}x{heads}", **_forward(op, batch, tokens, heads)}
            yield {"work": f"{op} forward and backward, {batch}x{tokens}x{heads}", **_both_ways(op, batch, tokens, heads)}
    for batch, heads in STEPS:
        yield {"work": f"kda step, {batch}x1x{heads}", **_step(batch, heads)}
    for correlation in (0.0, 0.95, 1.0):
        yield {"work": f"kda error, T 512, cosine of keys {correlation}", **_errors(correlation)}


def _clock(name: str, work: Run, repeats: int = 20) -> Row:
    """Milliseconds and the most memory in GiB beyond what is held; a peer that fails says so."""
    try:
        work()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        ms = milliseconds(work, repeats)
        return {f"{name}_ms": ms, f"{name}_gib": (torch.cuda.max_memory_allocated() - before) / 2**30}
    except Exception as error:  # any kind: the peer is not ours
        return {f"{name}_failed": f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"}


def _theirs(op: str, given: dict[str, Any]) -> Run:
    """flash-linear-attention's chunked form with gate, norms and sigmoid inside."""
    options: dict[str, Any] = {"output_final_state": True, "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True}
    options |= {"A_log": given["A_log"], "dt_bias": given["dt_bias"], "use_beta_sigmoid_in_kernel": True}
    if op == "kda":
        function = import_module("fla.ops.kda").chunk_kda
        options |= {"safe_gate": True, "lower_bound": given["lower_bound"]}
    else:
        function = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    return lambda: function(*(given[name] for name in ("q", "k", "v", "g", "beta")), **options)


def _softmax(batch: int, tokens: int, heads: int) -> tuple[list[Tensor], Run]:
    heads_first = [torch.randn(batch, heads, tokens, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    q, k, v = heads_first
    return heads_first, lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)


def has_fla() -> bool:
    return importlib.util.find_spec("fla") is not None


@torch.no_grad()
def _forward(op: str, batch: int, tokens: int, heads: int) -> Row:
    given = inputs(op, batch, tokens, heads)
    row = _clock("ours", lambda: call(op, given, backend="triton"))
    if has_fla():
        row |= _clock("fla", _theirs(op, given))
    return row | _clock("softmax", _softmax(batch, tokens, heads)[1])


def _both_ways(op: str, batch: int, tokens: int, heads: int) -> Row:
    given = inputs(op, batch, tokens, heads)
    leaves = [x.requires_grad_() for x in given.values() if isinstance(x, Tensor)]
    weight = torch.randn_like(given["v"])
    row = _clock("ours", lambda: torch.autograd.grad([call(op, given, backend="triton")[0]], leaves, [weight]), 10)
    if has_fla():
        theirs = _theirs(op, given)
        row |= _clock("fla", lambda: torch.autograd.grad([theirs()[0]], leaves, [weight]), 10)
    heads_first, softmax = _softmax(batch, tokens, heads)
    leaves = [x.requires_grad_() for x in heads_first]
    weight = torch.randn_like(heads_first[0])
    return row | _clock("softmax", lambda: torch.autograd.grad([softmax()], leaves, [weight]), 10)


@torch.no_grad()
def _step(batch: int, heads: int) -> Row:
    given = inputs("kda", batch, 1, heads)
    state = torch.randn(batch, heads, 128, 128, device="cuda")
    row = _clock("ours", _replayed(lambda: call("kda", given, state=state, backend="triton")))
    if not has_fla():
        return row
    function = import_module("fla.ops.kda").fused_recurrent_kda
    names = {name: given[name] for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "lower_bound")}
    options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    options |= {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    return row | _clock("fla", _replayed(lambda: function(**names, **options)))


def _replayed(work: Run) -> Run:
    """The work as a CUDA graph, so that a step is not its launches; captured when it first runs."""
    kept: list[torch.cuda.CUDAGraph] = []

    def run() -> None:
        if not kept:
            work()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                work()
            kept.append(graph)
        kept[0].replay()

    return run


@torch.no_grad()
def _errors(correlation: float) -> Row:
    """Relative errors against float64 with beta's logits around 4 and weak decay."""
    given = inputs("kda", 1, 512, 4, correlation=correlation, strength=4.0)
    wide = {name: x.double() if isinstance(x, Tensor) else x for name, x in given.items()}
    exact = call("kda", wide, backend="reference")[0]
    row: Row = {"ours": relative(call("kda", given, backend="triton")[0], exact)}
    if has_fla():
        try:
            row["fla"] = relative(_theirs("kda", given)()[0], exact)
        except Exception as error:  # any kind: the peer is not ours
            row["fla_failed"] = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    return row
