"""A model larger than memory: a synthetic Kimi K3 checkpoint of a given size, its experts read from disk while it decodes."""

from __future__ import annotations

import json
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from palimpsest import shards
from palimpsest.checkpoint import CONFIG
from palimpsest.config import InputError, ModelConfig
from palimpsest.convert import Layout
from palimpsest.model import Model
from palimpsest.offload import DiskExperts
from palimpsest.progress import Transfer
from palimpsest.published import load
from palimpsest.shards import CODES, DTYPES, SIZES

LATENT, WIDTH, CHOSEN = 1792, 1536, 8
EXPERT_BYTES = 3 * LATENT * WIDTH * 17 // 32  # four bits a weight and a byte for 32
TWIN_LAYERS, TWIN_EXPERTS = 5, 24
PIECE_BYTES = 16 << 20
Shapes = dict[str, tuple[str, tuple[int, ...]]]


def config_of(layers: int, experts: int) -> ModelConfig:
    """Kimi K3's parts, small ones around experts of 1792 x 1536."""
    shape = {"routed_expert_hidden_size": LATENT, "moe_intermediate_size": WIDTH, "num_experts_per_token": CHOSEN}
    return ModelConfig.preset("kimi-k3-124m", vocab_size=4096, num_hidden_layers=layers, num_experts=experts, **shape)


def write(folder: Path, config: ModelConfig) -> int:
    """A published folder with packed experts and random weights, a file for each layer; returns its bytes.

    What is written leaves the page cache, so that reading it asks the disk.
    """
    layout = Layout.of(config, packed=True)
    layout.model.to(torch.bfloat16)
    files: dict[str, Shapes] = {}
    for entry in layout.entries:
        dumped = entry.dump(*(layout.model.get_parameter(name) for name in entry.ours))
        for name, tensor in zip(entry.published, dumped, strict=True):
            layer = name.split(".")[2] if ".layers." in name else "rest"
            shape = (CODES[tensor.dtype], tuple(tensor.shape))
            files.setdefault(f"model-{layer}.safetensors", {})[layout.prefix + name] = shape
    total = sum(SIZES[dtype] * prod(shape) for shapes in files.values() for dtype, shape in shapes.values())
    progress = Transfer("writing", total)
    draw = torch.Generator().manual_seed(0)
    for file, shapes in files.items():
        shards.write_file(folder / file, ((name, _random(name, *shapes[name], draw)) for name in shapes), shapes, progress)
        forget(folder / file)
    weight_map = {name: file for file, shapes in files.items() for name in shapes}
    (folder / shards.INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    (folder / CONFIG).write_text(json.dumps(layout.document("bfloat16")))
    return total


def _random(name: str, dtype: str, shape: tuple[int, ...], draw: torch.Generator) -> Tensor:
    if name.endswith("_scale"):
        return torch.full(shape, 120, dtype=torch.uint8)  # times four-bit values it makes weights of about 0.02
    if dtype == "U8":
        words = torch.randint(-(2**62), 2**62, (-(-prod(shape) // 7),), generator=draw)
        return words.view(torch.uint8).view(-1, 8)[:, :7].reshape(-1)[: prod(shape)].view(shape)  # the last byte is not even
    if name.endswith("A_log"):
        return torch.zeros(shape, dtype=DTYPES[dtype])  # published ones are padded with zeros
    if "norm" in name and len(shape) == 1:
        return torch.ones(shape, dtype=DTYPES[dtype])
    return (0.02 * torch.randn(shape, generator=draw)).to(DTYPES[dtype])


def forget(path: Path) -> None:
    """Lets the system write a file out and drop it from its page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def disk_bandwidth(paths: list[Path], limit: int = 2 << 30) -> float | None:
    """Bytes a second of large reads past the page cache; None where the file system does not allow them."""
    buffer = mmap.mmap(-1, PIECE_BYTES)  # page-aligned, as such reads need
    done, began = 0, time.perf_counter()
    try:
        for path in paths:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
            try:
                while done < limit and (count := os.readv(descriptor, [buffer])) == PIECE_BYTES:
                    done += count
            finally:
                os.close(descriptor)
    except OSError:
        return None
    return done / (time.perf_counter() - began)


@contextmanager
def anonymous_memory(pause: float = 0.02) -> Iterator[list[int]]:
    """A list that receives this process's anonymous resident bytes, from Linux's account of it, every `pause` seconds."""
    seen: list[int] = []
    done = threading.Event()

    def watch() -> None:
        while True:
            seen.append(1024 * int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]))
            if done.wait(pause):
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield seen
    finally:
        done.set()
        watcher.join()


def _from_disk() -> int:
    """Bytes that this process had fetched from a disk."""
    with suppress(OSError):
        return int(Path("/proc/self/io").read_text().split("\nread_bytes:")[1].split()[0])
    return 0


@torch.inference_mode()
def greedy(model: Model, prompt: list[int], count: int, before: Callable[[], object] = lambda: None) -> tuple[list[int], float]:
    """`count` tokens behind a prompt, `before` called at each, and the seconds of the model's work on them."""
    model.eval()
    out = model(torch.tensor([prompt]))
    tokens, seconds = [], 0.0
    for _ in range(count):
        tokens.append(int(out.logits[0, -1].argmax()))
        before()
        began = time.perf_counter()
        out = model(torch.tensor([tokens[-1:]]), out.state)
        seconds += time.perf_counter() - began
    return tokens, seconds


def measure(num_bytes: int, cache_bytes: int, tokens: int, folder: Path | None = None) -> dict[str, Any]:
    """Writes the twin and the large checkpoint, decodes from both, and removes them.

    Raises InputError where there is no room, or no Linux to account for memory.
    """
    if not Path("/proc/self/status").exists():
        raise InputError("benchmark offload: needs Linux, which tells anonymous memory from page cache")
    layers = 9
    experts = max(-(-num_bytes // (EXPERT_BYTES * (layers - 1))), CHOSEN)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        status = os.statvfs(temporary)
        if status.f_bavail * status.f_frsize < num_bytes * 1.2:
            raise InputError(
                f"{temporary}: {status.f_bavail * status.f_frsize / 1e9:.1f} GB free; {num_bytes * 1.2 / 1e9:.1f} wanted"
            )
        equal = _twin(Path(temporary, "twin"), tokens)
        large = Path(temporary, "large")
        large.mkdir()
        written = write(large, config_of(layers, experts))
        return {"twin_tokens_equal": equal, "checkpoint_bytes": written, **_decode(large, cache_bytes, tokens)}


def _twin(folder: Path, tokens: int) -> bool:
    """Whether a smaller checkpoint of the same shape gives the same tokens from disk as from memory."""
    folder.mkdir()
    write(folder, config_of(TWIN_LAYERS, TWIN_EXPERTS))
    found = []
    for how in ({}, {"offload": "disk", "cache_bytes": 10 * EXPERT_BYTES}):
        model, _ = load(folder, **how)
        found.append(greedy(model, [1, 2, 3, 4], tokens)[0])
    return found[0] == found[1]


def _decode(folder: Path, cache_bytes: int, tokens: int) -> dict[str, Any]:
    """Memory and speeds, once with the page cache dropped before every token and once with it left alone."""
    files = sorted(folder.glob("*.safetensors"))
    bandwidth = disk_bandwidth(files)
    runs = {}
    with anonymous_memory() as memory:
        model, _ = load(folder, offload="disk", cache_bytes=cache_bytes)
        cache = next(module.cache for module in model.modules() if isinstance(module, DiskExperts))
        greedy(model, [1, 2, 3, 4], 8)  # fills the cache
        for name, before in (
            ("page_cache_dropped", lambda: [forget(path) for path in files]),
            ("page_cache_left", lambda: None),
        ):
            cache.hits = cache.misses = cache.bytes_read = 0
            fetched = _from_disk()
            _, seconds = greedy(model, [5], tokens, before)
            passes = tokens + 1  # the prompt's one token
            runs[name] = {
                "tokens_per_s": tokens / seconds,
                "hit_rate": cache.hit_rate,
                "wanted_bytes_per_token": (cache.hits + cache.misses) * EXPERT_BYTES / passes,
                "read_bytes_per_token": cache.bytes_read / passes,
                "from_disk_bytes_per_token": (_from_disk() - fetched) / passes,
            }
    sizes = {"cache_bytes": cache_bytes, "anonymous_bytes": max(memory), "tokens": tokens}
    return {**sizes, "disk_bytes_per_s": bandwidth, **runs}


def lines(result: dict[str, Any]) -> Iterator[str]:
    """The figures as text."""
    gigabytes = {key: result[key] / 1e9 for key in ("checkpoint_bytes", "cache_bytes", "anonymous_bytes")}
    yield "{checkpoint_bytes:.2f} GB in files, {cache_bytes:.2f} GB of experts kept, {anonymous_bytes:.2f} GB anonymous".format(
        **gigabytes
    )
    yield f"a smaller twin gives the same tokens from disk as from memory: {'yes' if result['twin_tokens_equal'] else 'NO'}"
    if result["disk_bytes_per_s"] is not None:
        yield f"the disk gives {result['disk_bytes_per_s'] / 1e9:.2f} GB/s"
    for name in ("page_cache_dropped", "page_cache_left"):
        run = result[name]
        read, disk = run["read_bytes_per_token"] / 1e6, run["from_disk_bytes_per_token"] / 1e6
        yield (
            f"{name.replace('_', ' ')}: {run['tokens_per_s']:.2f} tokens/s, {read:,.0f} MB a token read, {disk:,.0f} MB from "
            f"the disk, {100 * run['hit_rate']:.0f} % of experts in the cache"
        )
