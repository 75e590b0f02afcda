"""Functions run on several processes at once, for tests: gloo on a CPU, all of one start."""

from __future__ import annotations

import multiprocessing
import os
import queue
import socket
import traceback
import warnings
from collections.abc import Callable
from typing import Any


def run(count: int, work: Callable[..., Any], *arguments: Any, timeout_s: float = 120) -> list[Any]:
    """What `work(rank, *arguments)` returns on each of `count` processes that share a process group."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.processes_preload"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results: Any = context.Queue()
    workers = [context.Process(target=_begin, args=(rank, count, port, results, work, arguments)) for rank in range(count)]
    for worker in workers:
        worker.start()
    found: dict[int, Any] = {}
    try:
        while len(found) < count:
            rank, error, value = results.get(timeout=timeout_s)
            if error:
                raise AssertionError(f"process {rank}: {error}")
            found[rank] = value
    except queue.Empty:
        raise AssertionError(f"processes {set(range(count)) - found.keys()} did not finish in {timeout_s} s") from None
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()
    return [found[rank] for rank in range(count)]


def _begin(rank: int, count: int, port: int, results: Any, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(count), LOCAL_RANK="0")
    try:
        dist.init_process_group("gloo", rank=rank, world_size=count)
        results.put((rank, "", work(rank, *arguments)))
    except BaseException:
        results.put((rank, traceback.format_exc(), None))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
