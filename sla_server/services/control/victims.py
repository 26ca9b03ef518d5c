"""Victims: promises with streams on a backend, as its loop sees them.

Pure values; the inventory makes them from the windows of their rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from sla_server.agreements.promise import Priority
from sla_server.services.control.verdicts import Signal

Key = tuple[str, str]


class Need(StrEnum):
    """What a promise asks of the loop."""

    UNKNOWN = "unknown"  # no window yet under the caps in force
    AT_RISK = "at-risk"
    HOLD = "hold"  # neither at risk nor clear: the deadband
    CLEAR = "clear"
    IDLE = "idle"
    OUT_OF_CURVE = "out-of-curve"
    NOT_APPLICABLE = "not-applicable"  # its I/Os are not such as the promise is about
    EXCLUDED = "excluded"  # in maintenance, or outside service hours
    GONE = "gone"  # no statistics for a lease


TOLD_RATIO: Final = 0.1
"""Of the I/Os: below it, that the gateway's host was busy is not worth a word."""
ASKS_NOTHING: Final = frozenset((Need.IDLE, Need.OUT_OF_CURVE, Need.NOT_APPLICABLE, Need.EXCLUDED, Need.GONE))


@dataclass(frozen=True, slots=True)
class Victim:
    """One promise with streams on this backend, as the loop sees it.

    Attributes:
        fresh: it had statistics recently; what they said still holds.
    """

    key: Key
    priority: Priority
    urgency: float
    need: Need
    signal: Signal
    volumes: frozenset[str]
    fresh: bool = True

    @property
    def name(self) -> str:
        """agreement/objective."""
        return "/".join(self.key)


def rank_of(victim: Victim) -> tuple[int, float, float]:
    return int(victim.priority), victim.urgency, victim.signal.u


def figures_of(victim: Victim) -> str:
    signal = victim.signal
    limit_ms = (signal.threshold_us or 0) / 1000
    figures = f"{signal.u:.2f} times the misses allowed"
    if signal.excused_ratio >= TOLD_RATIO:
        # Its gateway wanted to run and was kept waiting: see ``signal``.
        figures += f", {signal.excused_ratio:.0%} of the I/Os left out: the gateway's own host was busy"
    return f"{victim.name} at {signal.latency_us / 1000:.1f} ms of {limit_ms:g} ms allowed ({figures})"
