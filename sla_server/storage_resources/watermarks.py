"""Levels of a pool: ``ok``, ``warn``, ``critical``, with hysteresis. Pure.

A level is entered at its mark and left ``hysteresis`` below it, so that a pool about a mark raises one event
and not one a minute.
"""

from __future__ import annotations

from typing import Final, NamedTuple

OK: Final = "ok"
WARN: Final = "warn"
CRITICAL: Final = "critical"
LEVELS: Final = (OK, WARN, CRITICAL)


class Marks(NamedTuple):
    """Ratios of a pool that are used."""

    warn: float
    critical: float
    hysteresis: float


def next_level(level: str, ratio: float, marks: Marks) -> str:
    """The level after a reading; ``level``: the one before, another text counts as ``ok``."""
    is_critical = level == CRITICAL and ratio > marks.critical - marks.hysteresis
    if ratio >= marks.critical or is_critical:
        return CRITICAL
    is_warned = level in (WARN, CRITICAL) and ratio > marks.warn - marks.hysteresis
    return WARN if ratio >= marks.warn or is_warned else OK
