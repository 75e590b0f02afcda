"""Compiles the CPU backend at installation, if there is a compiler: once per instruction set, chosen when it is loaded.

Nothing needs it: without a compiler the package works on torch's operations, and `palimpsest doctor` says so.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = Path(__file__).parent / "palimpsest" / "ops"
TARGETS = {"cpu_base.so": ""}
if platform.machine() in ("x86_64", "AMD64"):
    TARGETS = {"cpu_base.so": "-march=x86-64", "cpu_avx2.so": "-march=x86-64-v3", "cpu_avx512.so": "-march=x86-64-v4"}
# The OpenMP runtime is left open: loading binds it to torch's own, so that both share one pool of threads.
FLAGS = ["-O3", "-std=c++17", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-Wno-psabi"]


class CpuBackend(BuildHookInterface):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
        built = [name for name, march in TARGETS.items() if compiler and compiles(compiler, march, name)]
        if not built:
            print("palimpsest: no C++ compiler with OpenMP found; the compiled CPU backend is left out", file=sys.stderr)
            return
        build_data["artifacts"] += [f"palimpsest/ops/{name}" for name in built]
        build_data["pure_python"], build_data["infer_tag"] = False, True


def compiles(compiler: str, march: str, name: str) -> bool:
    """Builds one library under a temporary name; False when the compiler refuses."""
    out = FOLDER / name
    temporary = out.with_suffix(".tmp")
    compiled = out.with_suffix(".o")
    flags = [*FLAGS, *([march] if march else [])]
    commands = (
        [compiler, *flags, "-fopenmp", "-c", str(FOLDER / "cpu.cpp"), "-o", str(compiled)],
        [compiler, *flags, "-shared", str(compiled), "-o", str(temporary)],
    )
    done = all(subprocess.run(command, capture_output=True).returncode == 0 for command in commands)
    compiled.unlink(missing_ok=True)
    if done:
        os.replace(temporary, out)
    temporary.unlink(missing_ok=True)
    return done
