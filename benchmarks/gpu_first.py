"""One call on a machine with a GPU: are the kernels right, how fast are they, and with which tiles.

Every group of rows runs in a process of its own, since a fault leaves a process without its device.
"""

import json
import os
import subprocess
import sys
import time

BIG, SMALL = (1, 8192, 96), (1, 8192, 16)


def options(*names):
    return lambda *rows: [dict(zip(names, row, strict=True)) for row in rows]


TILES, WARPS = options("BV", "num_warps", "num_stages"), options("BK", "num_warps")
GROUPS = {
    "forward": lambda b: b.forward((BIG, SMALL, (8, 2048, 16), (1, 65536, 16))),
    "stages": lambda b: (
        {"work": f"{op} {size}"} | b.stages(op, b.inputs(op, *size))
        for op in ("kda", "gated_delta_rule")
        for size in (BIG, SMALL)
    ),
    "prepare": lambda b: b.sweep("prepare", "kda", BIG, WARPS((64, 4), (32, 4), (128, 8), (32, 2), (64, 8))),
    "solve": lambda b: b.sweep("solve", "kda", BIG, [{}, {"maxnreg": 128}, {"maxnreg": 96}, {"num_warps": 8}]),
    "step": lambda b: b.decode(),
    "accuracy": lambda b: b.accuracy(),
    **{
        f"scan {size[2]} {tile}": lambda b, size=size, tile=tile: b.sweep("scan", "kda", size, TILES(tile))
        for size, tiles in (
            (BIG, ((64, 4, 1), (64, 4, 2), (128, 8, 2), (128, 8, 1), (64, 8, 2), (32, 4, 1))),
            (SMALL, ((32, 4, 2), (16, 4, 2), (64, 8, 2))),
        )
        for tile in tiles
    },
}


def group(name):
    import torch

    from palimpsest import benchmark_gpu as b

    b.report(GROUPS[name](b), lambda row: print(b.line(row)[:150], flush=True))
    torch.cuda.synchronize()


def main():
    began, out = time.time(), os.environ.get("OUT", ".")
    names = sys.argv[1:] or list(GROUPS)
    waiting, lines = list(names), []
    for name in waiting:
        left = 280 - (time.time() - began)
        if left < 5:
            print("left out, no time:", name)
            continue
        print(f"--- {name} at {time.time() - began:.0f} s", flush=True)
        command = [sys.executable, __file__, "--group", name]
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=min(left, 90))
            text = result.stdout + (result.stderr[-400:] if result.returncode else "")
        except subprocess.TimeoutExpired as late:
            text = (late.stdout or b"").decode() + "took too long\n"
        print(text, end="", flush=True)
        lines += text.splitlines()
    json.dump(lines, open(f"{out}/gpu_first.json", "w"))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--group"]:
        group(sys.argv[2])
    else:
        main()
