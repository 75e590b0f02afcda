"""What the host does for one decoding step, in microseconds: the device has 5 to do, and waits for the rest.

    python benchmarks/gpu_host.py

Without a GPU nothing is launched: what is left is the work before the launch.
"""

import statistics
import time

import torch

from palimpsest import ops
from palimpsest.ops import triton as kernels
from palimpsest.ops.triton import launch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CALLS = 200


def microseconds(work):
    """Median over rounds of calls that do not wait for the device."""
    times = []
    for _ in range(15):
        wait()
        start = time.perf_counter()
        for _ in range(CALLS):
            work()
        times.append((time.perf_counter() - start) / CALLS * 1e6)
    return statistics.median(times[3:])


def wait():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


class Nothing:
    """A kernel without a device, and what it is compiled to."""

    def __getitem__(self, grid):
        return lambda *args, **options: self


def main():
    def random(*shape, dtype=torch.bfloat16):
        return torch.randn(*shape, device=DEVICE, dtype=dtype)

    heads = 96
    q, k, v, g = (random(1, 1, heads, 128) for _ in range(4))
    beta, state = random(1, 1, heads), random(1, heads, 128, 128, dtype=torch.float32)
    rate, bias = random(heads, dtype=torch.float32), random(heads * 128, dtype=torch.float32)
    if DEVICE == "cpu":
        launch.step = Nothing()
    given = launch.Inputs(q, k, v, g, beta, state, rate, bias, None, 128**-0.5, -5.0, True, True, 8)
    o, final = launch.results(given)

    def compiled_anew():
        launch._built.clear()
        launch.few(given, o, final)

    def whole():
        ops.kda(q, k, v, g, beta, state=state, A_log=rate, dt_bias=bias, lower_bound=-5.0, qk_l2norm=True, beta_is_logit=True)

    rows = {
        "a launch by triton's own way": compiled_anew,
        "a launch as built": lambda: launch.few(given, o, final),
        "memory for o and the state": lambda: launch.results(given),
        "the kernels' wrapper": lambda: kernels.recurrence(
            q, k, v, g, beta, state, None, 128**-0.5, True, True, (rate, bias, -5.0)
        ),
    }
    if DEVICE == "cuda":
        rows["ops.kda, choice and checks included"] = whole
    with torch.no_grad():
        for name, work in rows.items():
            print(f"{name:<40}{microseconds(work):8.1f} us", flush=True)
        if DEVICE == "cuda":
            (built, across, form), strides = next(iter(launch._built.values())), [x.stride(1) for x in (q, k, v, g, beta)]
            tensors = (q, k, v, g, beta, rate, bias, state, o, final, None)
            alone = built[(across, heads, 1)]
            spent = microseconds(lambda: alone(*tensors, 1, *strides, 0.1, -5.0, *form))
            print(f"{'the launch alone':<40}{spent:8.1f} us", flush=True)


if __name__ == "__main__":
    main()
