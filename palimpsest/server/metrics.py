"""Counters and gauges in Prometheus's text form."""

from __future__ import annotations

import os
import threading
from bisect import bisect_left
from collections import Counter

from palimpsest.engine import Engine

BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
COUNTED = {
    "prompt_tokens": "Tokens of admitted prompts",
    "cached_tokens": "Tokens of admitted prompts that were remembered, not read",
    "completion_tokens": "Tokens drawn for ended answers",
    "guessed_tokens": "Tokens guessed",
    "right_tokens": "Guesses that came true",
    "preempted": "Times that a running request gave way to memory",
}


class Metrics:
    """What the server has seen; the engine counts its own."""

    def __init__(self) -> None:
        self.statuses: Counter[int] = Counter()
        self._lock = threading.Lock()
        self._first: list[int] = [0] * (len(BUCKETS_S) + 1)
        self._first_sum = 0.0

    def first_token(self, seconds: float) -> None:
        """From a request's arrival to the first piece of its answer."""
        with self._lock:
            self._first[bisect_left(BUCKETS_S, seconds)] += 1
            self._first_sum += seconds

    def text(self, engine: Engine) -> str:
        lines: list[str] = []

        def put(name: str, kind: str, meaning: str, values: dict[str, float]) -> None:
            lines.extend((f"# HELP palimpsest_{name} {meaning}.", f"# TYPE palimpsest_{name} {kind}"))
            lines.extend(f"palimpsest_{name}{labels} {value}" for labels, value in values.items())

        statuses = {f'{{status="{status}"}}': count for status, count in sorted(self.statuses.items())}
        put("http_requests_total", "counter", "HTTP requests by status", dict(statuses))
        reasons = ("stop", "length", "cancelled", "failed")
        ended = {f'{{reason="{reason}"}}': engine.counts[f"ended_{reason}"] for reason in reasons}
        put("answers_total", "counter", "Answers by the reason of their end", dict(ended))
        for name, meaning in COUNTED.items():
            put(f"{name}_total", "counter", meaning, {"": engine.counts[name]})
        put("running", "gauge", "Answers that hold memory", {"": engine.running})
        put("queued", "gauge", "Requests that wait for memory", {"": engine.queued})
        held = {f'{{kind="{kind}"}}': engine.held_bytes(kind) for kind in ("kv", "recurrent", "conv")}
        put("state_bytes", "gauge", "Bytes of running states", dict(held))
        put("state_budget_bytes", "gauge", "Bytes that running states may hold", {"": engine.memory_bytes})
        put("prefix_bytes", "gauge", "Bytes of remembered beginnings", {"": engine.prefixes.num_bytes})
        put("prefix_disk_bytes", "gauge", "Bytes of those that are on disk", {"": engine.prefixes.disk.num_bytes})
        put("prefix_nodes", "gauge", "Remembered beginnings", {"": len(engine.prefixes)})
        resident = resident_bytes()
        if resident is not None:
            put("process_bytes", "gauge", "Memory of the process", {"": resident})
        put("first_token_seconds", "histogram", "Arrival to first text", self._histogram())
        return "\n".join(lines) + "\n"

    def _histogram(self) -> dict[str, float]:
        with self._lock:
            total, rows = 0, {}
            for bound, count in zip((*BUCKETS_S, "+Inf"), self._first, strict=True):
                total += count
                rows[f'_bucket{{le="{bound}"}}'] = total
            return {**rows, "_sum": self._first_sum, "_count": total}


def resident_bytes() -> int | None:
    """Memory of this process now; None where the system does not tell."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None
