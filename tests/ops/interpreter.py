"""What triton 3.6's interpreter lacks: bfloat16 operands of products (it multiplies their bits as integers), and rounding to
the nearest bfloat16 (it cuts digits off)."""

from __future__ import annotations

from typing import Any


def mend() -> None:
    """Gives this process's interpreter both. Only the tests need it: on a GPU the hardware does as said."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    builder: Any = interpreter.InterpreterBuilder
    if getattr(builder, "mended", False):
        return
    handle: Any = interpreter.TensorHandle
    product, cast = builder.create_dot, builder.cast_impl

    def wide(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return handle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return product(self, wide(a), wide(b), *rest)

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        if target.scalar != tl.bfloat16 or source.dtype.scalar != tl.float32:
            return cast(self, source, target)
        values = np.ascontiguousarray(source.data, dtype=np.float32)
        bits = values.view(np.uint32).astype(np.uint64)
        nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return handle(np.where(np.isnan(values), np.uint16(0x7FC0), nearest), tl.bfloat16)

    def create_fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        return cast_impl(self, source, target)

    builder.create_dot, builder.cast_impl, builder.mended = create_dot, cast_impl, True
    builder.create_fp_to_fp = create_fp_to_fp
