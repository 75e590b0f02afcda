"""One call on a machine with a GPU: are the kernels right, how fast are they, and with which tiles.

Every group of rows runs in a process of its own, since a fault leaves a process without its device.
"""

import concurrent.futures
import json
import os
import subprocess
import sys
import time

CHECKS = ("gradients", "company", "rho", "raw", "decay", "accuracy")
BIG, SMALL, LONG = (1, 8192, 96), (1, 8192, 16), (1, 65536, 16)


def options(*names):
    return lambda *rows: [dict(zip(names, row, strict=True)) for row in rows]


TILES, WARPS = options("BV", "num_warps", "num_stages"), options("BK", "num_warps")
GROUPS = {
    "kernels": lambda b: b.kernels("kda", BIG),
    **{
        f"{kernel} {tile}": lambda b, kernel=kernel, tile=tile: b.tiles(kernel, "kda", BIG, tile)
        for kernel, tile in (
            ("prepare", {"BK": 32}),
            ("prepare", {"BK": 32, "maxnreg": 128}),
            ("prepare", {"num_warps": 8}),
            ("chunk_back", {"BK": 64, "num_warps": 8}),
            ("chunk_back", {"BV": 32}),
            ("chunk_back", {"BV": 128}),
            ("chunk_back", {"maxnreg": 128}),
            ("chunk_back", {"maxnreg": 168}),
            ("running_sums", {"num_warps": 1}),
            ("running_sums", {"num_warps": 4}),
            ("solve", {"maxnreg": 168}),
            ("solve", {"maxnreg": 128}),
        )
    },
    **{
        f"scan {size[2]} {tile}": lambda b, size=size, tile=tile: b.sweep("scan", "kda", size, TILES(tile))
        for size, tile in ((BIG, (64, 4, 1)), (BIG, (64, 4, 2)), (LONG, (64, 4, 1)), (LONG, (64, 4, 2)))
    },
    "training": lambda b: b.training((BIG, SMALL)),
    "forward": lambda b: b.forward((BIG, SMALL, (8, 2048, 16), LONG)),
    "step": lambda b: b.step_tiles(
        [
            {},
            {"BV": 16},
            {"BV": 64},
            {"num_warps": 2},
            {"num_warps": 8},
            {"BV": 128, "num_warps": 8},
            {"BV": 16, "num_warps": 2},
        ]
    ),
    **{
        f"gradients {op} {more}": lambda b, op=op, more=more: b.gradients(op, **more)
        for op, more in (
            ("kda", {}),
            ("gated_delta_rule", {"value_heads": 4}),
            ("delta_rule", {}),
            ("linear_attention", {}),
            ("kda", {"decay": -50.0}),
            ("kda", {"key_dim": 64, "value_dim": 32}),
            ("kda", {"key_dim": 256, "value_dim": 128}),
        )
    },
    "company": lambda b: b.company(),
    "rho": lambda b: b.accuracy("rho"),
    "raw": lambda b: b.accuracy("raw"),
    "decay": lambda b: b.accuracy("decay"),
}


def group(name):
    import torch

    from palimpsest import benchmark_gpu as b

    b.report(GROUPS[name](b), lambda text: print(text[:170], flush=True))
    torch.cuda.synchronize()


def run(name, seconds):
    command = [sys.executable, __file__, "--group", name]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=max(seconds, 1))
        return f"--- {name}\n" + result.stdout + (result.stderr[-400:] if result.returncode else "")
    except subprocess.TimeoutExpired as late:
        return f"--- {name}\n" + (late.stdout or b"").decode() + "took too long\n"


def main():
    """Clocked groups one after another, with the device to themselves; then the others together."""
    end, out = time.time() + 270, os.environ.get("OUT", ".")
    names = sys.argv[1:] or list(GROUPS)
    clocked = [name for name in names if not name.startswith(CHECKS)]
    texts = []
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for name in clocked:
            texts.append(run(name, min(60, end - 60 - time.time())))
            print(texts[-1], end="", flush=True)
        for text in pool.map(lambda name: run(name, end - time.time()), [name for name in names if name not in clocked]):
            texts.append(text)
            print(text, end="", flush=True)
    with open(f"{out}/gpu_first.json", "w") as file:
        json.dump(texts, file)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--group"]:
        group(sys.argv[2])
    else:
        main()
