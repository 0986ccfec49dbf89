"""Formatting of sizes."""

from __future__ import annotations

_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def format_bytes(num_bytes: int) -> str:
    """Format a size in binary units, such as "1.25 GiB"."""
    for unit, size in _UNITS:
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} bytes"
