"""Every kernel compiled for compute capability 9.0, without a GPU: it fits, and reads no register before it is written."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch

from tests.ops.machine_code import Recorder, compiled, disassembly, unwritten

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels are not compiled")
SHARED_BYTES = 232_448  # of one program on compute capability 9.0


def launches(
    op: str, key_dim: int, value_dim: int, heads: int, dtype: torch.dtype, monkeypatch: Any, bound: float | None = -5.0
) -> list[Any]:
    """What a forward and a backward pass launch, with arguments."""
    from palimpsest.ops.triton import autograd, launch

    found: list[Any] = []
    for module in (launch, autograd):
        for name in (
            "running_sums",
            "prepare_vector",
            "prepare_scalar",
            "solve",
            "scan",
            "step",
            "scan_back",
            "pairs_back",
            "states_back",
            "chunk_back_vector",
            "chunk_back_scalar",
        ):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, Recorder(getattr(module, name), found))
    q, v = torch.empty(1, 128, heads, key_dim, dtype=dtype), torch.empty(1, 128, heads, value_dim, dtype=dtype)
    gated, erases = op in ("kda", "gated_delta_rule"), op != "linear_attention"
    g = None if not gated else torch.empty_like(q) if op == "kda" else torch.empty_like(q[..., 0])
    gate = (torch.empty(heads), torch.empty(heads * (key_dim if op == "kda" else 1))) if gated else (None, None)
    fields = (q, q, v, g, torch.empty_like(q[..., 0]) if erases else None, torch.empty(1, heads, key_dim, value_dim), *gate)
    given = launch.Inputs(*fields, None, 0.1, bound if op == "kda" else None, erases, erases, 0)  # type: ignore
    launch.few(given, *launch.results(given))
    autograd.gradients(given, *launch.results(given))
    return found


@pytest.mark.parametrize("heads", [2, 64])
@pytest.mark.parametrize("op", ["linear_attention", "delta_rule", "gated_delta_rule", "kda"])
def test_half_precision(op: str, heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check(launches(op, 128, 128, heads, torch.bfloat16, monkeypatch))


@pytest.mark.parametrize(
    ("key_dim", "value_dim"),
    [(16, 16), (16, 64), (32, 32), (64, 32), (64, 64), (96, 64), (128, 32), (256, 32), (256, 256)],
)
def test_other_sizes(key_dim: int, value_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check(launches("kda", key_dim, value_dim, 256, torch.bfloat16, monkeypatch))


@pytest.mark.parametrize("size", [16, 32, 64, 128, 256])
def test_unbounded_decay(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check(launches("kda", size, size, 64, torch.bfloat16, monkeypatch, bound=None))


def test_single_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    check(launches("kda", 64, 64, 2, torch.float32, monkeypatch))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fused_kernels(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The short convolution, norms and gated activations with their gradients, at the widths of a model."""
    from palimpsest.ops.triton import conv, glu, norms

    found: list[Any] = []
    names = {conv: ("conv", "conv_slope", "conv_back"), norms: ("norm", "norm_back"), glu: ("glu", "glu_back")}
    for module, kernel in ((module, kernel) for module, kernels in names.items() for kernel in kernels):
        monkeypatch.setattr(module, kernel, Recorder(getattr(module, kernel), found))
    x, wide = torch.empty(1, 64, 2304, dtype=dtype), torch.empty(64, 768, requires_grad=True)
    heads = torch.empty(64, 6, 128, dtype=dtype, requires_grad=True)
    for lengths, state in ((None, torch.empty(1, 3, 2304, dtype=dtype)), ([40, 24], torch.empty(2, 3, 2304, dtype=dtype))):
        conv.short_conv(x, torch.empty(2304, 4, requires_grad=True), state, lengths).sum().backward()
    norms.rms_norm(wide, torch.empty(768, requires_grad=True), 1e-5, dtype).sum().backward()
    for kind in ("sigmoid", "silu"):
        norms.rms_norm(heads, torch.empty(128, requires_grad=True), 1e-5, dtype, heads, kind).sum().backward()
    for betas in (None, (4.0, 25.0)):
        glu.gated(heads, heads, betas).sum().backward()
    assert len(found) == 16
    for listing in check(found):  # no thread reads or writes bfloat16 numbers one by one
        assert not re.search(r"(LDG|STG)\.E\.[US]16", listing)


def check(found: list[Any]) -> list[str]:
    """Machine code of all launches."""
    assert len(found) >= 6
    listings = []
    for kernel, args, options in found:
        result = compiled(kernel, args, options)
        listing = disassembly(result)
        assert result.metadata.shared <= SHARED_BYTES, kernel.__name__
        assert unwritten(listing) == [], kernel.__name__
        listings.append(listing)
    return listings


def test_the_check_can_fail() -> None:
    listing = """
        /*0000*/                   UMOV UR4, 0x400 ;
        /*0010*/                   UIADD3 UR5, UR4, 0x40, URZ ;
        /*0020*/              @P0 BRA `(.L_x_1) ;
        /*0030*/                   UIADD3 UR6, UP1, UR6, 0x40, URZ ;
.L_x_1:
        /*0040*/                   HGMMA.64x32x16.F32.BF16 R24, R4, gdesc[UR8], R24 ;
        /*0050*/                   EXIT ;
"""
    assert unwritten(listing) == [
        "UIADD3 UR6, UP1, UR6, 0x40, URZ",
        "HGMMA.64x32x16.F32.BF16 R24, R4, gdesc[UR8], R24",
    ]


def test_a_step_like_the_last_is_launched_as_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same arguments; anything that the kernel was compiled for goes back to the compiler when it changes."""
    from palimpsest.ops.triton import launch

    compilations: list[Any] = []
    launched: list[Any] = []

    class Kernel:
        def __getitem__(self, grid: Any) -> Any:
            def compile_and_launch(*args: Any, **options: Any) -> Any:
                compilations.append((grid, args))
                return Built()

            return compile_and_launch

    class Built:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *args: launched.append((grid, args))

    def run(**changes: Any) -> int:
        before = len(compilations)
        x = torch.empty(2, 1, 4, 32, dtype=torch.bfloat16)
        fields: dict[str, Any] = {"q": x, "k": x, "v": x, "g": x, "beta": x[..., 0], "a_log": torch.empty(4), "bias": None}
        fields |= {"state": torch.empty(2, 4, 32, 32), "lengths": None, "scale": 0.1, "bound": -5.0}
        fields |= {"norm": True, "logit": True, "few": 8}
        given = launch.Inputs(**(fields | changes))
        launch.few(given, *launch.results(given))
        return len(compilations) - before

    monkeypatch.setattr(launch, "_built", {})
    monkeypatch.setattr(launch, "step", Kernel())
    x, memory = torch.empty(2, 1, 4, 32, dtype=torch.bfloat16), torch.empty(2 * 128 + 8, dtype=torch.bfloat16)
    assert run() == 1 and run() == 0
    grid, args = launched.pop()
    assert grid == compilations[0][0] and len(args) == len(compilations[0][1])
    assert args[11:] == compilations[0][1][11:]
    assert run(scale=0.2) == 0 and launched.pop()[1][17] == 0.2
    assert run(state=torch.empty(2, 4, 32, 32)) == 0
    for changes in (
        {"g": None, "a_log": None, "bound": None},
        {"g": x[..., 0]},
        {"beta": None},
        {"state": None},
        {"a_log": None, "bound": None},
        {"bias": torch.empty(128)},
        {"lengths": (1, 1)},
        {"bound": None},
        {"norm": False},
        {"logit": False},
        {"few": 4},
        {"k": x.float()},
        {"q": memory[1:257].view(2, 1, 4, 32)},
        {"q": x.new_empty(2, 1, 8, 32)[:, :, :4]},
        {"q": x[:, :, :2], "k": x[:, :, :2]},
        {"v": x[..., :16], "state": torch.empty(2, 4, 32, 16)},
    ):
        assert run(**changes) == 1 and run(**changes) == 0, changes
