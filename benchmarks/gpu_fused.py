"""Fused kernels of training on a GPU: right at a model's sizes, their times beside torch's, and whole steps of the recipes.

    python benchmarks/gpu_fused.py                  checks, old and new times, training steps of the five recipes
    python benchmarks/gpu_fused.py check            the kernels alone
    python benchmarks/gpu_fused.py steps kda        training steps of the recipes named (all if none)

"Old" is the way without these kernels. A kernel that waits for the device says so.
"""

import sys
import time

import torch

import palimpsest as pal
from palimpsest import mlps, ops
from palimpsest.benchmark_gpu import milliseconds, relative

GPU, BF16, RUNS = "cuda", torch.bfloat16, ops.triton_runs
COPY = 4.3e12  # bytes a second


def use(new):
    ops.triton_runs = RUNS if new else lambda *tensors: False


def draw(*shape, dtype=BF16):
    return torch.randn(*shape, device=GPU).to(dtype)


def cases():
    x, taps, zero = (
        draw(32, 1024, 2304),
        0.3 * draw(2304, 4, dtype=torch.float32),
        torch.zeros(32, 3, 2304, device=GPU, dtype=BF16),
    )
    yield "conv", lambda x, w, s: ops.short_conv(x, w, s)[0], [x, taps, zero], 2, 3
    bounds = torch.tensor([0, *sorted(torch.randint(1, 32768, (150,)).tolist()), 32768], device=GPU)
    old = draw(len(bounds) - 1, 3, 2304)
    yield "conv packed", lambda x, w, s: ops.short_conv(x, w, s, bounds)[0], [x.view(1, -1, 2304), taps, old], 2, 3
    stream, weight = draw(32, 1024, 768, dtype=torch.float32), 1 + 0.1 * draw(768, dtype=torch.float32)
    yield "norm 768 f32 -> bf16", lambda x, w: ops.rms_norm(x, w, 1e-5, BF16), [stream, weight], 1.5, 2.5
    o, gate, head = draw(32, 1024, 6, 128), draw(32, 1024, 6, 128), 1 + 0.1 * draw(128, dtype=torch.float32)
    yield "gated norm 128 sigmoid", lambda x, g, w: ops.gated_rms_norm(x, g, w, 1e-5, "sigmoid"), [o, gate, head], 3, 5
    yield "gated norm 128 silu", lambda x, g, w: ops.gated_rms_norm(x, g, w, 1e-5, "silu"), [o, gate, head], 3, 5
    a, b = draw(32, 1024, 1984), draw(32, 1024, 1984)
    yield "swiglu 1984", lambda g, u: mlps.swiglu(g, u), [a, b], 3, 5
    yield "situ 1984", lambda g, u: mlps.situ(g, u), [a, b], 3, 5


def run(function, inputs, flow):
    leaves = [x.detach().requires_grad_() for x in inputs]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, flow)]


def timed(function, inputs, flow):
    leaves = [x.detach().requires_grad_() for x in inputs]
    y = function(*leaves)
    back = milliseconds(lambda: torch.autograd.grad(y, leaves, flow, retain_graph=True))
    return milliseconds(lambda: function(*leaves)), back


def forget():
    """Tables of packed documents are made once for each packing: here again."""
    from palimpsest.ops import conv
    from palimpsest.ops.triton import conv as kernels

    conv._ends.cache_clear()
    kernels._places.cache_clear()


def check():
    heads = ("kernel", "fwd ms old", "new", "floor", "bwd old", "new", "floor")
    print("{:<24}{:>11}{:>8}{:>8}{:>9}{:>8}{:>8}  errors new (old): y, gradients".format(*heads))
    for name, function, inputs, moved, moved_back in cases():
        use(False)
        flow = torch.randn_like(function(*inputs))
        exact = run(function, [x.double() for x in inputs], flow.double())
        old, old_times = run(function, inputs, flow), timed(function, inputs, flow)
        errors_old = [relative(x, y) for x, y in zip(old, exact, strict=True)]
        del old
        use(True)
        new = run(function, inputs, flow)
        torch.cuda.synchronize()
        forget()
        torch.cuda.set_sync_debug_mode("error")  # whoever waits for the device now raises
        try:
            again, waits = run(function, inputs, flow), ""
        except RuntimeError as error:
            torch.cuda.set_sync_debug_mode("default")
            again, waits = run(function, inputs, flow), f"  WAITS FOR THE DEVICE: {str(error)[:100]}"
        torch.cuda.set_sync_debug_mode("default")
        same = all(torch.equal(x, y) for x, y in zip(new, again, strict=True))
        errors = [relative(x, y) for x, y in zip(new, exact, strict=True)]
        del exact, again, new
        new_times = timed(function, inputs, flow)
        size = inputs[0].nbytes
        floors = [1e3 * n * size / COPY for n in (moved, moved_back)]
        figures = (old_times[0], new_times[0], floors[0], old_times[1], new_times[1], floors[1])
        print("{:<24}{:11.3f}{:8.3f}{:8.3f}{:9.3f}{:8.3f}{:8.3f}".format(name, *figures), end="")
        print("  " + " ".join(f"{a:.1e}({b:.1e})" for a, b in zip(errors, errors_old, strict=True)), end="")
        print("" if same else "  DIFFERENT BITS AGAIN", "" if max(errors) < 1e-2 else "  WRONG", waits, flush=True)
        torch.cuda.empty_cache()


def steps(names):
    """Whole training steps of the recipes (forward, backward, clipping, AdamW) on drawn tokens; old is the unfused way."""
    from pathlib import Path

    from palimpsest.optim import clip_gradients, make_optimizer
    from palimpsest.recipe import Recipe

    if not Path("examples/recipes").is_dir():
        print("no examples/recipes here: run it in the root of the project", flush=True)
        return
    for path in sorted(Path("examples/recipes").glob("*.toml")):
        if names and path.stem not in names:
            continue
        try:
            recipe = Recipe.from_file(path)
            config = pal.ModelConfig.preset(recipe.preset, **{"vocab_size": 16384, **recipe.overrides})
            one_recipe(path.stem, config, recipe.train, make_optimizer, clip_gradients)
        except Exception as error:  # the others still run
            print(f"{path.stem}: FAILED {type(error).__name__}: {str(error)[:300]}", flush=True)
        torch.cuda.empty_cache()


def one_recipe(name, config, train, make_optimizer, clip_gradients):
    rows, length = train.batch_size, train.context_length
    torch.manual_seed(0)
    ids = torch.randint(config.vocab_size, (rows, length), device=GPU)
    reference = {}
    for kind, new, low in (("old", False, False), ("old+bf16 norms", False, True), ("new", True, True)):
        use(new)
        torch.manual_seed(0)
        model = pal.Model(config).to(GPU)
        for module in model.modules():
            if getattr(module, "feeds_maps", False):
                module.feeds_maps = low
        optimizer = make_optimizer(model, train)
        for group in optimizer.param_groups:
            group["lr"] = 1e-4

        def gradients(model=model):
            model.zero_grad()
            with torch.autocast(GPU, BF16):
                loss = model.loss(ids, ids)
            loss.backward()
            return loss

        def once(gradients=gradients, model=model, optimizer=optimizer):
            loss = gradients()
            clip_gradients(model, train.grad_clip)
            optimizer.step()
            return loss

        loss = gradients().item()
        grads = {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}
        again = gradients().item()
        repeats = loss == again and all(torch.equal(p.grad, grads[k]) for k, p in model.named_parameters() if k in grads)
        reference = reference or grads
        far = max((relative(grads[k], g), k) for k, g in reference.items() if float(g.norm()) > 0)
        del grads
        once()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        spent = milliseconds(once, 8)
        peak = torch.cuda.max_memory_allocated() / 2**30
        if kind == "new":
            reference = None
        print(f"{name:<15} {kind:<15} {spent:7.1f} ms  {rows * length / spent * 1e3:9.0f} tokens/s", end="")
        print(f"  peak {peak:5.1f} GiB  loss {loss:.6f}  furthest gradient {far[0]:.1e} {far[1]}", end="")
        print("" if repeats else "  DIFFERENT BITS", flush=True)
        model = optimizer = gradients = once = None
        torch.cuda.empty_cache()


if __name__ == "__main__":
    begin = time.perf_counter()
    command = sys.argv[1:2]
    if command in ([], ["check"]):
        check()
        print(f"{time.perf_counter() - begin:.0f} s", flush=True)
    if command in ([], ["steps"]):
        steps(sys.argv[2:])
    print(f"{time.perf_counter() - begin:.0f} s", flush=True)
