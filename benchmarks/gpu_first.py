"""One call on a machine with a GPU: are the kernels right, how fast are they, and with which tiles."""

import json, os, sys, time
import torch
from palimpsest import benchmark_gpu as b

began = time.time()
out = os.environ.get("OUT", ".")
rows = []


def run(name, source):
    if time.time() - began > 270:
        print(name, "left out: no time")
        return
    print(f"--- {name} at {time.time() - began:.0f} s", flush=True)
    rows.extend(b.report(source, lambda text: print(text, flush=True)))
    json.dump(rows, open(f"{out}/gpu_first.json", "w"))


print(torch.__version__, torch.cuda.get_device_name())
big, small = (1, 8192, 96), (1, 8192, 16)
run("forward", b.forward(((1, 8192, 96), (1, 8192, 16), (8, 2048, 16), (1, 65536, 16))))
run(
    "stages",
    iter([{"work": f"{op} {s}"} | b.stages(op, b.inputs(op, *s)) for op in ("kda", "gated_delta_rule") for s in (big, small)]),
)
run(
    "prepare",
    b.sweep("prepare", "kda", big, [{"BK": k, "num_warps": w} for k, w in ((64, 4), (64, 8), (32, 4), (32, 8), (128, 8))]),
)
run(
    "scan",
    b.sweep(
        "scan",
        "kda",
        big,
        [
            {"BV": v, "num_warps": w, "num_stages": s}
            for v, w, s in ((64, 4, 1), (64, 4, 2), (32, 4, 1), (32, 4, 2), (128, 8, 1), (128, 8, 2), (128, 4, 2), (64, 8, 2))
        ],
    ),
)
run(
    "scan",
    b.sweep(
        "scan",
        "kda",
        small,
        [
            {"BV": v, "num_warps": w, "num_stages": s}
            for v, w, s in ((32, 4, 1), (32, 4, 2), (32, 4, 3), (16, 4, 2), (64, 4, 2))
        ],
    ),
)
run("accuracy", b.accuracy())
print("=== table")
for row in rows:
    print(b.line(row)[:150])
