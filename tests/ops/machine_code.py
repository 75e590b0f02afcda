"""Kernels compiled for a GPU that is not there: their shared memory, and registers that are read before they are written.

ptxas 12.8 moves additions to uniform registers before what they add to, in some kernels with narrow tiles; the result is a
wrong address of shared memory. `unwritten` follows the disassembly and finds such reads.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float16: "*fp16", torch.int32: "*i32", torch.float64: "*fp64"}
OPTIONS = ("num_warps", "num_stages", "maxnreg")
WRITES = ("U", "R2UR", "S2UR", "CS2UR", "VOTEU", "REDUX", "LDCU")


class Recorder:
    """Stands for a kernel: keeps what it is launched with."""

    def __init__(self, kernel: Any, launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **options: self.launches.append((self.kernel, args, options))


def compiled(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The kernel for compute capability 9.0, for arguments of these types."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    given = dict(zip((p.name for p in kernel.params), args, strict=False)) | options
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        value = given[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        is_tensor = isinstance(value, torch.Tensor)
        signature[parameter.name] = TYPES[value.dtype] if is_tensor else "fp32" if isinstance(value, float) else "i32"
        if is_tensor or (isinstance(value, int) and value % 16 == 0 and parameter.name not in (kernel.do_not_specialize or ())):
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={name: options[name] for name in OPTIONS if name in options}
    )


def disassembly(kernel: Any) -> str:
    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        return subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout


class Step(NamedTuple):
    text: str
    reads: list[int]
    writes: list[int]
    target: str | None
    ends: bool  # nothing follows it but its target


def _step(line: str) -> Step | None:
    found = re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?);", line)
    if not found:
        return None
    text = found.group(1).strip()
    name, _, rest = re.sub(r"^@!?U?P[T\d]+\s+", "", text).partition(" ")
    reads: list[int] = []
    writes: list[int] = []
    for place, operand in enumerate(part.strip() for part in rest.split(",")):
        for use in re.finditer(r"(g?desc\[)?\bUR(\d+)\b(\.64)?", operand):
            first, width = int(use.group(2)), 1
            if use.group(1) == "gdesc[":  # two addresses of two registers each; the first is unused if A is in registers
                first, width = (first, 4) if re.match(r"R\d+, gdesc", rest) else (first + 2, 2)
            elif use.group(1) or use.group(3) or (".64" in name and name.startswith("U")):
                width = 2
            is_result = place == 0 and name.startswith(WRITES) and operand.startswith("UR")
            (writes if is_result else reads).extend(range(first, first + (2 if is_result and "WIDE" in name else width)))
    target = re.search(r"`\((\.L_\w+)\)", rest)
    ends = name in ("BRA", "EXIT", "RET") and not text.startswith("@")
    return Step(text, reads, writes, target.group(1) if target else None, ends)


def unwritten(listing: str) -> list[str]:
    """Instructions that read a uniform register which nothing before them, on any way, has written."""
    blocks: list[list[Step]] = [[]]
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        label = re.match(r"(\.L_\w+):", line)
        if label:
            blocks.append([])
            labels[label.group(1)] = len(blocks) - 1
        step = _step(line)
        if step:
            blocks[-1].append(step)
            if step.target or step.ends:
                blocks.append([])
    entering: dict[int, set[int]] = {0: set()}
    waiting = [0]
    while waiting:
        at = waiting.pop()
        known = entering[at].union(*(step.writes for step in blocks[at]))
        last = blocks[at][-1] if blocks[at] else None
        after = [labels[last.target]] if last and last.target in labels else []
        after += [at + 1] if at + 1 < len(blocks) and not (last and last.ends) else []
        for block in after:
            if block not in entering or not known <= entering[block]:
                entering[block] = entering.get(block, set()) | known
                waiting.append(block)
    found = []
    for at, known in sorted(entering.items()):
        seen = set(known)
        for step in blocks[at]:
            found += [step.text] if any(register not in seen for register in step.reads) else []
            seen.update(step.writes)
    return found
