"""What a training run shows while it works, and how Ctrl-C reaches it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch


def memory_bytes(device: torch.device) -> int | None:
    """The most memory used so far: of the device, or of this process on a CPU; None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Not getrusage where this can be had: its count begins with the memory of the process that started this one.
    with contextlib.suppress(OSError, IndexError):
        return 1024 * int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
    try:
        import resource
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def keep_memory() -> None:
    """Lets glibc keep what is freed: tensors of one size come and go at every step, and fresh pages cost more than the work.

    Without it a step that returns a new state of 64 MiB spends three quarters of its time on page faults.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        for setting, value in (
            (-3, 2**31 - 1),
            (-1, 2**31 - 1),
            (-2, 1 << 28),
        ):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_TOP_PAD
            ctypes.CDLL(None).mallopt(setting, value)


@contextlib.contextmanager
def interrupts() -> Iterator[threading.Event]:
    """The first Ctrl-C sets the event, so that no step is torn; the second raises KeyboardInterrupt at once."""
    requested = threading.Event()
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield requested
        return

    def note(number: int, frame: Any) -> None:
        if requested.is_set():
            raise KeyboardInterrupt
        requested.set()
        # Not print: the signal may have come in the middle of one.
        with contextlib.suppress(OSError):
            os.write(2, b"\nfinishing this step; Ctrl-C again stops at once\n")

    signal.signal(signal.SIGINT, note)
    try:
        yield requested
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class Display:
    """What the user sees on stderr: one line that is rewritten, or, outside a terminal, a line for every record."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.began: tuple[float, int] | None = None  # when this process began, and after which step
        self.shown = 0.0
        self.is_open = False  # a line without its newline is on the terminal

    def step(self, step: int, loss: float, tokens_per_s: float, memory: int | None, is_logged: bool) -> None:
        now = time.perf_counter()
        if self.began is None:
            self.began = (now, step)
        is_terminal = sys.stderr.isatty()
        if not (is_logged or (is_terminal and now - self.shown >= 0.1)):
            return
        self.shown = now
        parts = [f"step {step}/{self.steps}", f"loss {loss:.4f}", f"{tokens_per_s:,.0f} tokens/s"]
        if memory is not None:
            parts.append(f"{memory / 2**20:,.0f} MiB")
        if step > self.began[1]:
            left = int((now - self.began[0]) / (step - self.began[1]) * (self.steps - step))
            parts.append(f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02} left")
        line = "  ".join(parts)
        print(f"\r{line}\x1b[K" if is_terminal else line, end="" if is_terminal else "\n", file=sys.stderr, flush=True)
        self.is_open = is_terminal

    def validation(self, step: int, values: dict[str, Any]) -> None:
        self.close()
        bits = f"  {values['val_bits_per_byte']:.4f} bits per byte" if "val_bits_per_byte" in values else ""
        line = f"step {step}/{self.steps}  validation {values['val_nats_per_token']:.4f} nats per token{bits}"
        print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.is_open:
            print(file=sys.stderr, flush=True)
        self.is_open = False


class Transfer:
    """What a long reading or writing shows on stderr: bytes done and time left; nothing in the first two seconds."""

    def __init__(self, what: str, total_bytes: int) -> None:
        self.what, self.total, self.done = what, total_bytes, 0
        self.began = time.perf_counter()
        self.shown = self.began + 2 - self.pause

    @property
    def pause(self) -> float:
        """Seconds between two lines."""
        return 0.2 if sys.stderr.isatty() else 10.0

    def add(self, num_bytes: int) -> None:
        self.done += num_bytes
        now = time.perf_counter()
        is_last, is_quiet = self.done >= self.total, now - self.began < 2
        if is_quiet or (now - self.shown < self.pause and not is_last):
            return
        self.shown = now
        rate = self.done / (now - self.began)
        left = int((self.total - self.done) / rate)
        line = f"{self.what}: {self.done / 1e9:.2f} of {self.total / 1e9:.2f} GB, {rate / 1e6:,.0f} MB/s"
        line += f", {left // 60}:{left % 60:02} left"
        is_terminal = sys.stderr.isatty()
        end = "\n" if is_last or not is_terminal else ""
        print(f"\r{line}\x1b[K" if is_terminal else line, end=end, file=sys.stderr, flush=True)


class Tokens:
    """What a long pass over tokens shows on stderr: tokens done and time left; nothing in the first two seconds."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.began = time.perf_counter()
        self.shown = self.began

    def at(self, done: int, total: int) -> None:
        now, is_terminal, is_last = time.perf_counter(), sys.stderr.isatty(), done >= total
        was_shown = self.shown > self.began
        if not (is_last and was_shown) and (now - self.began < 2 or now - self.shown < (0.2 if is_terminal else 10)):
            return
        self.shown = now
        rate = done / (now - self.began)
        left = int((total - done) / rate)
        line = f"{self.what} {done:,} of {total:,} tokens, {rate:,.0f} tokens/s, {left // 60}:{left % 60:02} left"
        end = "\n" if is_last or not is_terminal else ""
        print(f"\r{line}\x1b[K" if is_terminal else line, end=end, file=sys.stderr, flush=True)
