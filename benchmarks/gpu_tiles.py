"""Which tiles each kernel of a forward and a backward pass should have: one call of a minute and a half on a machine with a GPU.

First every candidate is compiled and checked, in processes of their own since a fault leaves a process without its device: a
line with the errors of all gradients against float64. Then those that were right are timed, with the device to themselves: a
line with the median milliseconds of the kernel in a pass, its registers and spilled registers. Last, whole passes with the
usual and with the best tiles.

    python benchmarks/gpu_tiles.py [kernel ...]
"""

import collections
import concurrent.futures
import json
import os
import statistics
import subprocess
import sys
import time

BIG, LONG = (1, 8192, 96), (1, 65536, 16)
RIGHT = 0.02  # gradients in bfloat16 are within 0.005
PASSES = 20


def tiles(*names):
    return lambda *rows: [dict(zip(names, row, strict=True)) for row in rows]


PRODUCTS = tiles("BK", "BV", "num_warps", "num_stages")
CHANNELS = tiles("BK", "num_warps", "maxnreg")
SCANS = tiles("BV", "num_warps", "num_stages")
# Op, size, kernel, and what takes the place of its usual tiles.
CANDIDATES = [
    *(("kda", BIG, "states_back", tile) for tile in PRODUCTS((64, 64, 4, 2), (128, 64, 8, 2), (128, 32, 8, 3))),
    *(("kda", BIG, "chunk_back", tile) for tile in CHANNELS((64, 8, 128), (64, 4, 255), (64, 8, 255))),
    *(("kda", BIG, kernel, tile) for kernel in ("scan", "scan_back") for tile in SCANS((64, 4, 1), (64, 4, 2))),
    *(("gated_delta_rule", BIG, "chunk_back", tile) for tile in PRODUCTS((64, 64, 4, 2), (128, 64, 8, 2))),
    *(("kda", LONG, "scan", tile) for tile in SCANS((64, 4, 1), (64, 4, 2))),
]
KERNELS = ("running_sums", "prepare_vector", "prepare_scalar", "solve", "scan", "fold", "scan_back", "pairs_back", "states_back")
KERNELS += ("chunk_back_vector", "chunk_back_scalar")


def patched(choice):
    """The usual tiles but for those of `choice`, by kernel."""
    from palimpsest.ops.triton import autograd, launch

    usual = getattr(launch, "usual", launch.config)
    launch.usual = usual
    launch.config = autograd.config = lambda given, kernel, *rest: usual(given, kernel, *rest) | choice.get(kernel, {})


def leaves_of(given):
    import torch

    return {name: x.detach().requires_grad_() for name, x in given.items() if isinstance(x, torch.Tensor)}


def check(op, size, kernel, tile):
    """The largest error of a gradient at 208 tokens; the kernels that a long sequence needs are compiled on the way."""
    import torch

    from palimpsest import benchmark_gpu as b

    patched({kernel: tile})
    given = b.inputs(op, 1, 208, size[2])
    weight = torch.randn_like(given["v"])
    found = []
    for backend, dtype in (("triton", None), ("reference", torch.float64)):
        leaves = {name: x.to(dtype or x.dtype).detach().requires_grad_() for name, x in leaves_of(given).items()}
        o = b.call(op, given | leaves, backend=backend)[0]
        grads = torch.autograd.grad([o], list(leaves.values()), [weight.to(o.dtype)])
        found.append(dict(zip(leaves, grads, strict=True)))
    print(json.dumps({name: float(f"{b.relative(x, found[1][name]):.2g}") for name, x in found[0].items()}), flush=True)


class Clocked:
    """Stands for a kernel: puts events around its launches."""

    def __init__(self, kernel, name, seen):
        self.kernel, self.name, self.seen = kernel, name, seen

    def __getitem__(self, grid):
        import torch

        def launch(*args, **options):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            result = self.kernel[grid](*args, **options)
            end.record()
            self.seen.append((self.name, start, end, result))

        return launch


def clocked(op, size, both_ways=True):
    """By kernel: median milliseconds of all its launches in a pass, registers, spills."""
    import torch

    from palimpsest import benchmark_gpu as b
    from palimpsest.ops.triton import autograd, launch

    given = b.inputs(op, *size)
    leaves = leaves_of(given) if both_ways else {}
    weight = torch.randn_like(given["v"])

    def work():
        o = b.call(op, given | leaves, backend="triton")[0]
        if both_ways:
            torch.autograd.grad([o], list(leaves.values()), [weight])

    seen, usual, sums = [], {}, collections.defaultdict(list)
    for module in (launch, autograd):
        for name in KERNELS:
            if hasattr(module, name):
                usual[module, name] = getattr(module, name)
                setattr(module, name, Clocked(usual[module, name], name, seen))
    try:
        for number in range(PASSES + 2):
            seen.clear()
            torch.cuda._sleep(10_000_000)  # the host runs ahead: what it does between launches is not in the times
            work()
            torch.cuda.synchronize()
            row = collections.Counter()
            for name, start, end, _ in seen:
                row[name] += start.elapsed_time(end)
            for name, ms in row.items() if number > 1 else ():
                sums[name].append(ms)
    finally:
        for (module, name), kernel in usual.items():
            setattr(module, name, kernel)
    built = {name: result for name, _, _, result in seen}
    return {name: (statistics.median(ms), built[name].n_regs, built[name].n_spills) for name, ms in sums.items()}


def time_all(candidates):
    import torch

    from palimpsest import benchmark_gpu as b

    best = collections.defaultdict(dict)
    usual = {}
    for op, size, kernel, tile in candidates:
        both_ways = size != LONG
        if (op, size) not in usual:
            patched({})
            usual[op, size] = clocked(op, size, both_ways)
            for name, (ms, registers, spills) in sorted(usual[op, size].items(), key=lambda row: -row[1][0]):
                print(f"usual {op} {size} {name:<20} ms {ms:.3f}  registers {registers}  spills {spills}", flush=True)
        patched({kernel: tile})
        try:
            name, row = next((n, row) for n, row in clocked(op, size, both_ways).items() if n.removesuffix("_vector").removesuffix("_scalar") == kernel)
        except Exception as error:
            print(f"{op} {size} {kernel} {tile} failed: {' '.join(str(error).split())[:200]}", flush=True)
            continue
        print(f"{op} {size} {name:<20} {tile}  ms {row[0]:.3f}  registers {row[1]}  spills {row[2]}", flush=True)
        if both_ways and row[0] < best[op].get(kernel, (usual[op, size][name][0], None))[0]:
            best[op][kernel] = (row[0], tile)
    for op in dict.fromkeys(op for op, size, _, _ in candidates if size == BIG):
        for note, choice in (("usual", {}), ("best", {kernel: tile for kernel, (_, tile) in best[op].items()})):
            patched(choice)
            print(b.line({"work": f"{op} forward and backward {note} {BIG}"} | b._train(op, *BIG) | {"tiles": str(choice)}), flush=True)
            torch.cuda.empty_cache()


def child(*arguments, seconds):
    """What a process of this file with these arguments printed, or the end of its complaint."""
    try:
        done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return None, "took too long"
    return (None, done.stderr[-300:]) if done.returncode else (done.stdout, "")


def main(only):
    began = time.time()
    candidates = [row for row in CANDIDATES if not only or row[2] in only]
    firsts = list({row[0]: row for row in candidates}.values())  # one of every op compiles what the others share
    right = []
    with concurrent.futures.ThreadPoolExecutor(max(2, os.cpu_count() // 2)) as pool:
        for rows in (firsts, [row for row in candidates if row not in firsts]):
            checks = {pool.submit(child, "--check", json.dumps(row), seconds=80): row for row in rows}
            for done in concurrent.futures.as_completed(checks):
                text, complaint = done.result()
                errors = json.loads(text.splitlines()[-1]) if text else {}
                is_right = bool(errors) and all(error < RIGHT for error in errors.values())
                print(f"{time.time() - began:4.0f} s {'right' if is_right else 'WRONG'} {checks[done]} {errors or complaint}", flush=True)
                right += [checks[done]] if is_right else []
    ordered = [list(row) for row in candidates if row in right]
    subprocess.run([sys.executable, __file__, "--time", json.dumps(ordered)], check=False)
    print(f"{time.time() - began:4.0f} s in all", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--check"]:
        op, size, kernel, tile = json.loads(sys.argv[2])
        check(op, tuple(size), kernel, tile)
    elif sys.argv[1:2] == ["--time"]:
        time_all([(op, tuple(size), kernel, tile) for op, size, kernel, tile in json.loads(sys.argv[2])])
    else:
        main(sys.argv[1:])
