"""Bytes and their display. Standard library only."""

from __future__ import annotations

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def display_bytes(size_bytes: float) -> str:
    """Bytes for people: `display_bytes(3 << 29)` is `'1.50 GiB'`."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(size_bytes) >= unit:
            return f"{size_bytes / unit:.2f} {name}"
    return f"{size_bytes:.0f} B"
