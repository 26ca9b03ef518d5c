"""Sizes in words."""

from __future__ import annotations

from typing import Final

UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def shown_bytes(value: float) -> str:
    """A size for people: 512 B, 20.0 GiB."""
    power = 0
    while abs(value) >= 1024 and power < len(UNITS) - 1:
        value, power = value / 1024, power + 1
    return f"{value:.0f} B" if power == 0 else f"{value:.1f} {UNITS[power]}"
