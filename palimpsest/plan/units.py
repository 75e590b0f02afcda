"""Amounts as people write them: 128k tokens, 24GiB, 1M."""

from __future__ import annotations

import re

from palimpsest.config import InputError

_TOKENS = {"": 1, "k": 1024, "m": 1024**2}
_BYTES = {
    **{"b": 1, "kib": 1024, "mib": 1024**2, "gib": 1024**3, "tib": 1024**4},
    **{"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12},
}


def tokens(field: str, value: str | int) -> int:
    """A count of tokens, at least 1: 8192, 8k (8,192), 1M (1,048,576). Raises InputError."""
    return _amount(field, value, _TOKENS, "a number of tokens such as 4096, 128k or 1M")


def num_bytes(field: str, value: str | int) -> int:
    """A number of bytes, at least 1: 24GiB, 80GB, 1500. Raises InputError."""
    return _amount(field, value, _BYTES, "a size such as 24GiB or 80GB")


def _amount(field: str, value: str | int, units: dict[str, int], wanted: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        amount = float(value)
    else:
        match = re.fullmatch(r"\s*(\d[\d_,]*(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(value))
        if match is None or match[2].lower() not in units:
            raise InputError(f"plan: {field} is {value!r}; it must be {wanted}")
        amount = float(re.sub("[_,]", "", match[1])) * units[match[2].lower()]
    if not 1 <= amount < 2**63 or amount != int(amount):
        raise InputError(f"plan: {field} is {value!r}; it must be {wanted}, whole and at least 1")
    return int(amount)


def span(field: str, value: str) -> list[int]:
    """`1k..1M` as 1k, 2k, 4k, ..., 1M: doubled from the first, and the last. Raises InputError."""
    first, dots, last = value.partition("..")
    if not dots:
        raise InputError(f"plan: {field} is {value!r}; write a range such as 1k..1M")
    low, high = tokens(field, first), tokens(field, last)
    if low >= high:
        raise InputError(f"plan: {field} is {value!r}; the first must be smaller than the last")
    found = []
    while low < high:
        found.append(low)
        low *= 2
    return [*found, high]


def tokens_text(value: float) -> str:
    """1048576 -> 1M, 131072 -> 128k, 1000 -> 1,000."""
    for unit, size in (("M", 1024**2), ("k", 1024)):
        if value >= size and value % size == 0:
            return f"{int(value // size)}{unit}"
    return f"{value:,.0f}"


def bytes_text(value: float) -> str:
    """434110464 -> 414 MiB."""
    for unit, power in (("TiB", 4), ("GiB", 3), ("MiB", 2), ("KiB", 1)):
        if abs(value) >= 1024**power:
            return f"{value / 1024**power:.4g} {unit}"
    return f"{value:,.0f} B"


def seconds_text(value: float) -> str:
    """0.00184 -> 1.84 ms."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= size:
            return f"{value / size:,.4g} {unit}"
    return f"{value * 1e9:.4g} ns"


def count_text(value: float) -> str:
    """2779484476000 -> 2.779 T; a billion is B."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.4g} {unit}"
    return f"{value:.4g}"
