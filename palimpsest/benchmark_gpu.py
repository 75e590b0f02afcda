"""GPU kernels put to the test and to the clock on the device at hand: errors against float64, medians, floors.

A case that fails is a row that says so; the others still run.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from palimpsest import ops

Row = dict[str, Any]
Say = Callable[[str], None]
SIZES = ((1, 8192, 96), (1, 8192, 64), (1, 8192, 16), (8, 2048, 16), (1, 65536, 16))  # B, T, H; K = V = 128
DEVICE = "cuda"
GATED = ("kda", "gated_delta_rule")


def milliseconds(work: Callable[[], Any], repeats: int = 20) -> float:
    """The median time of `work` between device events, after warming up."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in events:
        start.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


def relative(x: Tensor, y: Tensor) -> float:
    """|x - y| / |y|; NaN where x has one."""
    return float((x.double() - y.double()).norm() / y.double().norm())


def inputs(
    op: str,
    batch: int,
    tokens: int,
    heads: int,
    key_dim: int = 128,
    value_dim: int = 128,
    *,
    value_heads: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    correlation: float = 0.0,
    decay: float | None = None,
    strength: float = 0.0,
    seed: int = 0,
) -> dict[str, Any]:
    """Arguments of an op with gate, norms and sigmoid inside. `decay`: a ready g around it instead of a raw gate.

    Keys have the expected cosine `correlation`; the logits of beta are normal around `strength`.
    """
    draw = torch.Generator(DEVICE).manual_seed(seed)
    many = heads if value_heads is None else value_heads

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, device=DEVICE)

    k = correlation**0.5 * normal(1, 1, heads, key_dim) + (1 - correlation) ** 0.5 * normal(batch, tokens, heads, key_dim)
    given: dict[str, Any] = {"q": normal(batch, tokens, heads, key_dim), "k": k, "v": normal(batch, tokens, many, value_dim)}
    if op in GATED:
        shape = (batch, tokens, many, key_dim) if op == "kda" else (batch, tokens, many)
        given["g"] = normal(*shape) if decay is None else decay * torch.rand(*shape, generator=draw, device=DEVICE)
    if op != "linear_attention":
        given["beta"] = normal(batch, tokens, many) + strength
    given = {name: x.to(dtype) for name, x in given.items()}
    if op in GATED and decay is None:
        given["A_log"] = 0.5 * normal(many)
        given["dt_bias"] = normal(many * (key_dim if op == "kda" else 1)) - 3
    if op == "kda" and decay is None:
        given["lower_bound"] = -5.0
    if op != "linear_attention":
        given |= {"qk_l2norm": True, "beta_is_logit": True}
    else:
        given["k"] = ops.l2norm(given["k"]).to(dtype)
    return given


def call(op: str, given: dict[str, Any], **options: Any) -> tuple[Tensor, Tensor]:
    named = dict(given) | options
    ordered = [named.pop(name) for name in ("q", "k", "v", "g", "beta") if name in named]
    return getattr(ops, op)(*ordered, **named)


def exact(op: str, given: dict[str, Any], **options: Any) -> tuple[Tensor, Tensor]:
    """The definition in float64 on the same (rounded) inputs."""
    wide = {name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in given.items()}
    return call(op, wide, backend="reference", **options)


def accuracy(only: str = "") -> Iterator[Row]:
    """Errors of outputs and states, relative to the float64 definition, of cases with `only` in their name."""
    cases: list[tuple[str, str, dict[str, Any]]] = []
    for rho in (0.0, 0.95, 1.0):
        for op in ("kda", "gated_delta_rule", "delta_rule"):
            cases.append((op, f"rho {rho}", {"correlation": rho, "strength": 4.0, "decay": -0.01 if op in GATED else None}))
    for op in ("kda", "gated_delta_rule", "delta_rule", "linear_attention"):
        cases.append((op, "float32", {"dtype": torch.float32}))
        cases.append((op, "raw gate", {}))
    for rate in (-5.0, -50.0):
        cases += [(op, f"decay {rate}", {"decay": rate}) for op in GATED]
    for key_dim, value_dim in ((32, 64), (64, 32), (96, 256), (256, 96), (128, 64), (20, 33)):
        for dtype in (torch.bfloat16, torch.float32):
            note = f"K {key_dim} V {value_dim} {str(dtype)[6:]}"
            cases.append(("kda", note, {"key_dim": key_dim, "value_dim": value_dim, "dtype": dtype, "value_heads": 4}))
    for op, note, options in cases:
        if only in note:
            yield _attempt({"work": f"{op} {note}"}, lambda op=op, options=options: _errors(op, options))


def company() -> Iterator[Row]:
    """Whether a sequence gives the same bits packed, in a batch, alone and again."""
    yield _attempt({"work": "kda packed, alone, twice"}, _company)


def _errors(op: str, options: dict[str, Any]) -> Row:
    given = inputs(op, 1, 512 if "correlation" in options else 200, 2, **options)
    o, final = call(op, given, backend="triton")
    right, last = exact(op, given)
    return {"o": relative(o, right), "state": relative(final, last)}


def gradients(op: str, **options: Any) -> Iterator[Row]:
    """Errors of every gradient, relative to those of the float64 definition."""
    yield _attempt({"work": f"{op} gradients {options}"}, lambda: _gradients(op, options))


def _gradients(op: str, options: dict[str, Any]) -> Row:
    given = inputs(op, 1, 200, 2, **options)
    given["state"] = torch.randn(1, given["v"].shape[2], given["q"].shape[3], given["v"].shape[3], device=DEVICE)
    weight_o, weight_s = torch.randn_like(given["v"]), torch.randn_like(given["state"])
    found: list[dict[str, Tensor]] = []
    for backend in ("triton", "reference"):
        dtype = torch.float64 if backend == "reference" else None
        leaves = {n: x.detach().to(dtype or x.dtype).requires_grad_() for n, x in given.items() if isinstance(x, Tensor)}
        o, final = call(op, given | leaves, backend=backend)
        grads = torch.autograd.grad([o, final], list(leaves.values()), [weight_o.to(o.dtype), weight_s.to(final.dtype)])
        found.append(dict(zip(leaves, grads, strict=True)))
    return {name: relative(x, found[1][name]) for name, x in found[0].items()}


def _company() -> Row:
    """Packed documents against each alone, rows of a batch against each alone, and a second run: differing elements."""
    lengths = [0, 1, 63, 64, 65, 200, 307]
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)
    given = inputs("kda", 1, sum(lengths), 4)
    o, final = call("kda", given, cu_seqlens=bounds, backend="triton")
    again, _ = call("kda", given, cu_seqlens=bounds, backend="triton")
    differing = int((o != again).sum())
    at = 0
    for row, length in enumerate(lengths):
        part = {n: x[:, at : at + length] if n in ("q", "k", "v", "g", "beta") else x for n, x in given.items()}
        one, last = call("kda", part, backend="triton")
        differing += int((one != o[:, at : at + length]).sum()) + int((last[0] != final[row]).sum())
        at += length
    batch = inputs("kda", 16, 130, 8)
    o, final = call("kda", batch, backend="triton")
    part = {n: x[3:4] if n in ("q", "k", "v", "g", "beta") else x for n, x in batch.items()}
    one, last = call("kda", part, backend="triton")
    differing += int((one != o[3:4]).sum()) + int((last[0] != final[3]).sum())
    right, _ = exact("kda", given, cu_seqlens=bounds)
    return {"o": relative(call("kda", given, cu_seqlens=bounds, backend="triton")[0], right), "differing": differing}


def _attempt(row: Row, work: Callable[[], Row]) -> Row:
    try:
        return row | work()
    except Exception as error:  # a kernel that does not compile is a finding, not an end
        return row | {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}


def floor_ms(op: str, batch: int, tokens: int, heads: int, rate: float, dim: int = 128) -> float:
    """Milliseconds to read every bfloat16 input once and write every output once at `rate` bytes per second."""
    channels = {"kda": 5 * dim + 1, "gated_delta_rule": 4 * dim + 2, "delta_rule": 4 * dim + 1, "linear_attention": 4 * dim}
    return (2 * batch * tokens * heads * channels[op] + 4 * batch * heads * dim * dim) / rate * 1e3


def copy_rate() -> float:
    """Bytes per second of a large device-to-device copy, read and written."""
    source = torch.randn(1 << 30, device=DEVICE, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    return 2 * source.nbytes / milliseconds(lambda: target.copy_(source), 10) * 1e3


def forward(sizes: tuple[tuple[int, int, int], ...] = SIZES) -> Iterator[Row]:
    rate = copy_rate()
    for op in ("kda", "gated_delta_rule", "delta_rule", "linear_attention"):
        for batch, tokens, heads in sizes:
            row = {"work": f"{op} forward {batch}x{tokens}x{heads}", "floor_ms": floor_ms(op, batch, tokens, heads, rate)}
            yield _attempt(row, lambda op=op, size=(batch, tokens, heads): _time(op, *size))


def _time(op: str, batch: int, tokens: int, heads: int) -> Row:
    given = inputs(op, batch, tokens, heads)
    with torch.no_grad():
        return {"ms": milliseconds(lambda: call(op, given, backend="triton"))}


def decode(sizes: tuple[tuple[int, int], ...] = ((32, 32), (128, 32), (1, 96), (1, 32))) -> Iterator[Row]:
    """One token of B sequences with H heads, launched one by one and as a replayed graph; the floor reads and writes states."""
    rate = copy_rate()
    for batch, heads in sizes:
        row = {"work": f"kda step {batch}x1x{heads}", "floor_us": 2 * batch * heads * 4 * 128 * 128 / rate * 1e6}
        yield _attempt(row, lambda size=(batch, heads): _step(*size))


def _step(batch: int, heads: int) -> Row:
    given = inputs("kda", batch, 1, heads)
    state = torch.randn(batch, heads, 128, 128, device=DEVICE)

    def work() -> None:
        call("kda", given, state=state, backend="triton")

    with torch.no_grad():
        alone = milliseconds(work) * 1e3
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(10):
                work()
        return {"us": alone, "graph_us": milliseconds(graph.replay) * 100}


def training(sizes: tuple[tuple[int, int, int], ...] = SIZES) -> Iterator[Row]:
    """Forward and backward: milliseconds, and the most memory allocated in GiB."""
    for op in ("kda", "gated_delta_rule"):
        for batch, tokens, heads in sizes:
            row = {"work": f"{op} forward and backward {batch}x{tokens}x{heads}"}
            yield _attempt(row, lambda op=op, size=(batch, tokens, heads): _train(op, *size))


def _train(op: str, batch: int, tokens: int, heads: int) -> Row:
    given = inputs(op, batch, tokens, heads)
    leaves = {n: x.requires_grad_() for n, x in given.items() if isinstance(x, Tensor)}
    weight = torch.randn_like(given["v"])

    def work() -> None:
        torch.autograd.grad([call(op, given, backend="triton")[0]], list(leaves.values()), [weight])

    work()
    torch.cuda.reset_peak_memory_stats()
    ms = milliseconds(work, 10)
    return {"ms": ms, "peak_gib": torch.cuda.max_memory_allocated() / 2**30}


def tiles(kernel: str, op: str, size: tuple[int, int, int], option: dict[str, int]) -> Iterator[Row]:
    """Milliseconds of one kernel of a forward and a backward pass with other tiles, warps or depth."""
    from palimpsest.ops.triton import autograd, launch

    usual = launch.config
    launch.config = autograd.config = lambda x, name, *rest: usual(x, name, *rest) | (option if name == kernel else {})
    try:
        for row in kernels(op, size):
            if kernel in row["work"]:
                yield row | {"option": str(option)}
    finally:
        launch.config = autograd.config = usual


def kernels(op: str, size: tuple[int, int, int]) -> Iterator[Row]:
    """Milliseconds of every kernel of a forward and a backward pass."""
    given = inputs(op, *size)
    leaves = {n: x.requires_grad_() for n, x in given.items() if isinstance(x, Tensor)}
    weight = torch.randn_like(given["v"])
    runs = 4
    for _ in range(2):
        torch.autograd.grad([call(op, given, backend="triton")[0]], list(leaves.values()), [weight])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(runs):
            torch.autograd.grad([call(op, given, backend="triton")[0]], list(leaves.values()), [weight])
        torch.cuda.synchronize()
    for event in sorted(seen.key_averages(), key=lambda event: -event.self_device_time_total)[:12]:
        ms = event.self_device_time_total / 1e3 / event.count
        yield {"work": f"{op} {size[0]}x{size[1]}x{size[2]} {event.key[:40]}", "ms": ms, "calls": event.count // runs}


def step_tiles(options: list[dict[str, int]], batch: int = 32, heads: int = 32) -> Iterator[Row]:
    """A decoding step with other tiles and warps."""
    from palimpsest.ops.triton import launch

    usual = launch.config
    for option in options:
        launch.config = lambda x, name, *rest, option=option: usual(x, name, *rest) | option
        launch._built.clear()
        try:
            yield _attempt({"work": f"kda step {batch}x1x{heads} {option}"}, lambda: _step(batch, heads))
        finally:
            launch.config = usual
            launch._built.clear()


def sweep(
    kernel: str, op: str, size: tuple[int, int, int], options: list[dict[str, int]], dtype: torch.dtype = torch.bfloat16
) -> Iterator[Row]:
    """Times of one kernel for each of several tile widths, warps and depths."""
    from palimpsest.ops.triton import launch

    given = inputs(op, *size, dtype=dtype)
    usual = launch.config
    for option in options:
        launch.config = lambda x, name, *rest, option=option: usual(x, name, *rest) | (option if name == kernel else {})
        row = {"work": f"{kernel} {op} {size[0]}x{size[1]}x{size[2]} {option}"}
        try:
            yield _attempt(row, lambda: stages(op, given, kernel))
        finally:
            launch.config = usual


def stages(op: str, given: dict[str, Any], only: str | None = None) -> Row:
    """Milliseconds of each kernel of a forward pass by itself."""
    from palimpsest.ops.triton import launch

    gate = (given["A_log"], given["dt_bias"], given.get("lower_bound")) if "A_log" in given else (None, None, None)
    args = (given["q"], given["k"], given["v"], given.get("g"), given.get("beta"), None, *gate[:2], None)
    whole = launch.Inputs(*args, given["q"].shape[3] ** -0.5, gate[2], op != "linear_attention", op != "linear_attention", 0)  # type: ignore
    found: Row = {}
    with torch.no_grad():
        ready, o, final = launch.prepare(whole), *launch.results(whole)
        for name, work in {
            "prepare": lambda: launch.prepare(whole),
            "scan": lambda: launch.walk(whole, ready, o, final),
        }.items():
            if only in (None, name):
                found[f"{name}_ms"] = milliseconds(work)
    return found


def line(row: Row) -> str:
    """One row for a terminal."""
    rest = "  ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items() if key != "work"
    )
    return f"{row['work']:<60} {rest}"


def report(rows: Iterator[Row], say: Say = print) -> list[Row]:
    found = []
    for row in rows:
        found.append(row)
        say(line(row))
    return found


def available() -> bool:
    return torch.cuda.is_available()


def device() -> dict[str, Any]:
    """The GPU, its memory, and what a large copy moves on it."""
    facts = torch.cuda.get_device_properties(0)
    return {"name": facts.name, "memory_bytes": facts.total_memory, "copy_bytes_per_s": copy_rate()}


def timings() -> Iterator[Row]:
    """Our own: passes, training and steps."""
    return itertools.chain(forward(), training(), decode())


def checks() -> Iterator[Row]:
    """Errors against float64, and that nothing depends on who else is there."""
    kinds = ("kda", "gated_delta_rule", "delta_rule", "linear_attention")
    return itertools.chain(accuracy(), company(), *(gradients(op) for op in kinds))
