"""Are the kernels right, what does each take of a pass, and which tiles should it have: one call of about three minutes on a
machine with a GPU. Every line is written as it comes.

1. Four ops at 144 tokens against float64 in processes of their own, since a fault leaves a process without its device: errors
   of o, the final state and all gradients, "right" or "WRONG". On the way everything is compiled.
2. With the device to itself: whole passes, and of those forward and backward every kernel's milliseconds, registers, spills.
3. Every candidate tile compiled and checked as in 1, those that were right timed as in 2.
4. Whole passes with the usual and with the best tiles.

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

BIG, SMALL, BATCH, LONG = (1, 8192, 96), (1, 8192, 16), (8, 2048, 16), (1, 65536, 16)
USUAL = {
    "kda": (BIG, SMALL, BATCH, LONG),
    "gated_delta_rule": (BIG, BATCH, LONG),
    "delta_rule": (BIG,),
    "linear_attention": (BIG,),
}
RIGHT = 0.02  # outputs and gradients in bfloat16 are within 0.005
PASSES = 12


def tiles(*names):
    return lambda *rows: [dict(zip(names, row, strict=True)) for row in rows]


PRODUCTS = tiles("BK", "BV", "num_warps", "num_stages")
BLOCKS = tiles("BK", "SPAN", "num_warps", "maxnreg")
SCANS = tiles("BV", "num_warps", "num_stages")
# Op, size, kernel, and what takes the place of its usual tiles. All are clean of the compiler's fault (notes-gpu.md).
CANDIDATES = [
    *(("kda", BIG, "chunk_back", tile) for tile in BLOCKS((16, 128, 4, 128), (16, 128, 4, 255), (16, 64, 4, 168))),
    *(("kda", BIG, "chunk_back", tile) for tile in BLOCKS((16, 128, 8, 128), (32, 128, 4, 255), (32, 64, 4, 168))),
    *(("kda", BIG, "states_back", tile) for tile in PRODUCTS((64, 64, 4, 1), (128, 64, 8, 2), (128, 32, 8, 3), (64, 32, 4, 3))),
    *(("kda", BIG, "pairs_back", tile) for tile in ({"num_warps": 8}, {"num_stages": 2}, {"maxnreg": 168})),
    *(("kda", BIG, "scan_back", tile) for tile in SCANS((64, 4, 2), (64, 8, 1), (32, 4, 2))),
    *(("kda", BIG, "scan", tile) for tile in SCANS((64, 4, 2), (64, 8, 1), (32, 4, 2))),
    *(("kda", BIG, "prepare", tile) for tile in ({"BK": 32}, {"BK": 32, "maxnreg": 168}, {"num_warps": 8})),
    *(("kda", BIG, "running_sums", tile) for tile in ({"num_warps": 2}, {"num_warps": 4})),
    *(("gated_delta_rule", BIG, "chunk_back", tile) for tile in PRODUCTS((64, 64, 8, 2), (32, 64, 4, 2), (32, 128, 4, 1))),
    *(("gated_delta_rule", BIG, "pairs_back", tile) for tile in ({"num_warps": 8},)),
    *(("kda", LONG, "scan", tile) for tile in SCANS((64, 4, 1), (64, 4, 2), (32, 4, 2))),
]
KERNELS = ("running_sums", "prepare_vector", "prepare_scalar", "solve", "scan", "fold", "scan_back", "pairs_back")
KERNELS += ("states_back", "chunk_back_vector", "chunk_back_scalar")


def patched(choice):
    """The usual tiles but for those of `choice`, by kernel."""
    from palimpsest.ops.triton import autograd, launch

    usual = getattr(launch, "usual", launch.config)
    launch.usual = usual
    launch.config = autograd.config = lambda given, kernel, *rest: usual(given, kernel, *rest) | choice.get(kernel, {})


def leaves_of(given):
    import torch

    return {name: x.detach().requires_grad_() for name, x in given.items() if isinstance(x, torch.Tensor)}


def grads_of(op, given, backend, dtype=None):
    """o, final state and the gradients of all inputs, of a sum of both with random weights."""
    import torch

    from palimpsest import benchmark_gpu as b

    leaves = {name: x.to(dtype or x.dtype).detach().requires_grad_() for name, x in leaves_of(given).items()}
    o, final = b.call(op, given | leaves, backend=backend)
    draw = torch.Generator(b.DEVICE).manual_seed(1)
    weights = [torch.randn(x.shape, generator=draw, device=b.DEVICE).bfloat16().to(x.dtype) for x in (o, final)]
    grads = torch.autograd.grad([o, final], list(leaves.values()), weights)
    return {"o": o, "final": final} | dict(zip(leaves, grads, strict=True))


def check(op, sizes, kernel, tile):
    """The error of every result at 144 tokens, as one line; then what the sizes need is compiled."""
    import torch

    from palimpsest import benchmark_gpu as b

    patched({kernel: tile})
    given = b.inputs(op, 1, 144, sizes[0][2])
    found, exact = (grads_of(op, given, *how) for how in (("triton",), ("reference", torch.float64)))
    print(json.dumps({name: float(f"{b.relative(x, exact[name]):.2g}") for name, x in found.items()}), flush=True)
    del found, exact
    torch.cuda.empty_cache()  # several of these processes share the device
    for size in sizes:
        given = b.inputs(op, *size)
        with torch.no_grad():
            b.call(op, given, backend="triton")
        grads_of(op, given, "triton")
        torch.cuda.synchronize()


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


def clocked(op, size):
    """By kernel: median milliseconds of all its launches in a pass, registers, spills."""
    import torch

    from palimpsest import benchmark_gpu as b
    from palimpsest.ops.triton import autograd, launch

    given = b.inputs(op, *size)
    leaves = leaves_of(given)
    weight = torch.randn_like(given["v"])

    def work():
        o = b.call(op, given | leaves, backend="triton")[0]
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


def print_kernels(op, size, measured):
    for name, (ms, registers, spills) in sorted(measured.items(), key=lambda row: -row[1][0]):
        print(f"  {op} {size} {name:<18} ms {ms:.3f}  registers {registers}  spills {spills}", flush=True)


def time_usual():
    """Forward, forward and backward, and every kernel of both, at all sizes."""
    import torch

    from palimpsest import benchmark_gpu as b

    for op, size in ((op, size) for op, sizes in USUAL.items() for size in sizes):
        try:
            row = {"work": f"{op} {size}", "forward_ms": b._time(op, *size)["ms"]}
            print(b.line(row | {f"both_{name}": x for name, x in b._train(op, *size).items()}), flush=True)
            print_kernels(op, size, clocked(op, size))
        except Exception as error:
            print(f"{op} {size} failed: {' '.join(str(error).split())[:200]}", flush=True)
        torch.cuda.empty_cache()


def time_tiles(candidates):
    """Each candidate's kernel inside a pass, then passes with the best of every kernel."""
    import torch

    from palimpsest import benchmark_gpu as b

    best, usual = collections.defaultdict(dict), {}
    for op, size, kernel, tile in candidates:
        try:
            if (op, size) not in usual:
                patched({})
                usual[op, size] = clocked(op, size)
                print_kernels(op, size, usual[op, size])
            name = next(name for name in usual[op, size] if name in (kernel, f"{kernel}_vector", f"{kernel}_scalar"))
            patched({kernel: tile})
            ms, registers, spills = clocked(op, size)[name]
        except Exception as error:
            print(f"{op} {size} {kernel} {tile} failed: {' '.join(str(error).split())[:200]}", flush=True)
            continue
        before = usual[op, size][name][0]
        row = f"ms {ms:.3f}  usual {before:.3f}  registers {registers}  spills {spills}"
        print(f"{op} {size} {name} {tile} {row}{'  FASTER' if ms < 0.98 * before else ''}", flush=True)
        if ms < best[op, size].get(kernel, (0.98 * before, None))[0]:
            best[op, size][kernel] = (ms, tile)
    for (op, size), chosen in best.items():
        for note, choice in (("usual", {}), ("best", {kernel: tile for kernel, (_, tile) in chosen.items()})):
            patched(choice)
            row = {"work": f"{op} {size} forward and backward, {note}"} | b._train(op, *size)
            print(b.line(row), json.dumps(choice), flush=True)
            torch.cuda.empty_cache()


def child(*arguments, seconds):
    """What a process of this file with these arguments printed, or the end of its complaint."""
    try:
        done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return None, "took too long"
    return (None, done.stderr[-300:]) if done.returncode else (done.stdout, "")


def alone(*arguments, seconds):
    """Runs this file with these arguments, with the device to itself; what it prints is seen as it comes."""
    try:
        subprocess.run([sys.executable, __file__, *arguments], check=False, timeout=seconds)
    except subprocess.TimeoutExpired:
        print(f"{arguments[0]} was stopped after {seconds} s", flush=True)


def checked(rows, began, seconds):
    """Those of the rows (op, sizes, kernel, tile) that are right, each checked in a process of its own."""
    right = []
    with concurrent.futures.ThreadPoolExecutor(max(2, os.cpu_count() // 2)) as pool:
        checks = {pool.submit(child, "--check", json.dumps(row), seconds=seconds): row for row in rows}
        for done in concurrent.futures.as_completed(checks):
            row, (text, complaint) = checks[done], done.result()
            errors = json.loads(text.splitlines()[-1]) if text else {}
            good = bool(errors) and all(error < RIGHT for error in errors.values())
            print(f"{time.time() - began:4.0f} s {'right' if good else 'WRONG'} {row} {errors or complaint}", flush=True)
            right += [row] if good else []
    return right


def main(only):
    began = time.time()
    checked([(op, (size,), "", {}) for op, sizes in USUAL.items() for size in sizes], began, 110)
    alone("--usual", seconds=90)
    print(f"{time.time() - began:4.0f} s usual tiles timed", flush=True)
    rows = [(op, (size,), kernel, tile) for op, size, kernel, tile in CANDIDATES if not only or kernel in only]
    right = checked(rows, began, 60)
    ordered = [(op, sizes[0], kernel, tile) for op, sizes, kernel, tile in rows if (op, sizes, kernel, tile) in right]
    alone("--tiles", json.dumps(ordered), seconds=120)
    print(f"{time.time() - began:4.0f} s in all", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--check"]:
        op, sizes, kernel, tile = json.loads(sys.argv[2])
        check(op, sizes, kernel, tile)
    elif sys.argv[1:2] == ["--usual"]:
        time_usual()
    elif sys.argv[1:2] == ["--tiles"]:
        time_tiles([(op, tuple(size), kernel, tile) for op, size, kernel, tile in json.loads(sys.argv[2])])
    else:
        main(sys.argv[1:])
