"""How long things take: medians over repeated runs on this machine, in this process."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from palimpsest import ops
from palimpsest.model import Model
from palimpsest.state import State


def median_seconds(work: Callable[[], Any], repeats: int = 7) -> float:
    """The median wall time of `work` over `repeats` runs, after one that is not counted."""
    wait = torch.cuda.synchronize if torch.cuda.is_initialized() else lambda: None
    work()
    times = []
    for _ in range(repeats):
        wait()
        start = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def machine(device: torch.device | None = None) -> dict[str, Any]:
    """What the figures of this process were measured on; of a GPU its name and memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    on_gpu = device is not None and device.type == "cuda"
    return {
        "processor": torch.cuda.get_device_name(device) if on_gpu else _processor(),
        "threads": torch.get_num_threads(),
        "memory_bytes": torch.cuda.get_device_properties(device).total_memory if on_gpu else memory,
        "platform": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


@torch.inference_mode()
def decode(model: Model, contexts: list[int], repeats: int = 9) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Bytes carried and milliseconds for the next token after each number of context tokens, for one sequence.

    The bytes come from the state object that the model returned: (bytes by kind, decode times).
    """
    was_training = model.training
    model.eval()
    generator = torch.Generator().manual_seed(0)
    held, times = [], []
    state, seen = model.new_state(1), 0
    for context in contexts:
        ids = torch.randint(0, model.config.vocab_size, (1, context - seen), generator=generator)
        _, state = model.hidden(ids, state)
        seen = context
        held.append({"context": context, "bytes": state.num_bytes(), **_kinds(state)})
        token = ids[:, -1:]
        seconds = median_seconds(lambda now=state, new=token: model(new, now), repeats)
        times.append({"context": context, "ms": seconds * 1e3})
    model.train(was_training)
    return held, times


def _kinds(state: State) -> dict[str, int]:
    return {kind: state.num_bytes(kind) for kind in ("kv", "recurrent", "conv")}  # type: ignore[arg-type]


def chunk_flops(chunk: int, key_dim: int, value_dim: int) -> int:
    """Floating-point operations per token and head of the chunked delta rule with dense C x C matrices.

    Six products with the state, five with C x C matrices, and the triangular inverse:
    6 K V + C (6 K + 4 V) + C^2 / 3 (one multiply-add counts two).
    """
    return round(6 * key_dim * value_dim + chunk * (6 * key_dim + 4 * value_dim) + chunk**2 / 3)


@torch.inference_mode()
def chunk_sweep(chunks: list[int], tokens: int = 2048, heads: int = 4, dim: int = 64, repeats: int = 7) -> dict[str, Any]:
    """Wall time and operations of the chunked KDA forward pass, by chunk size. float32, mild decay, one sequence."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, z = (torch.randn(1, tokens, heads, dim, generator=generator) for _ in range(4))
    g, beta = -0.1 * z.sigmoid(), torch.rand(1, tokens, heads, generator=generator)
    k = ops.l2norm(k)
    rows = []
    for chunk in chunks:
        seconds = median_seconds(lambda c=chunk: ops.kda(q, k, v, g, beta, chunk_size=c, backend="chunked"), repeats)
        flops = chunk_flops(chunk, dim, dim)
        rows.append(
            {
                "chunk": chunk,
                "flops_per_token_per_head": flops,
                "ms": seconds * 1e3,
                "tokens_per_second": tokens / seconds,
            }
        )
    return {"tokens": tokens, "heads": heads, "key_dim": dim, "value_dim": dim, "rows": rows}
