"""The three rates of one volume: operations, bytes, cost. All must pass; each is optional.

Cost of an I/O = base (read or write, from the export) + bytes / 65,536. Pure: time comes as an argument.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

from pmdaemon.wire.gcra import Gcra

LEAST_RATE: Final = 0.001  # one in a thousand seconds; times of far smaller rates exceed what a float holds
MOST_RATE: Final = 1e15
COST_BYTES: Final = 65_536
"""Bytes that cost as much as one base unit (docs/formats/messages.md)."""


@dataclass(frozen=True, slots=True)
class Caps:
    """Caps of one volume; None is no cap."""

    ops_per_s: float | None = None
    bytes_per_s: float | None = None
    cost_per_s: float | None = None

    def tighter(self, other: Caps) -> Caps:
        """The smaller of both in each rate."""
        return Caps(
            *(_smaller(getattr(self, field.name), getattr(other, field.name)) for field in fields(Caps))
        )

    @property
    def is_open(self) -> bool:
        """Whether nothing is capped."""
        return self.ops_per_s is None and self.bytes_per_s is None and self.cost_per_s is None


NO_CAPS: Final = Caps()


def _smaller(one: float | None, two: float | None) -> float | None:
    if one is None or two is None:
        return two if one is None else one
    return min(one, two)


class RateSet:
    """The rates of one volume in force.

    Args:
        tau_ns: burst depth of each.

    Invariant: a rate is present exactly when ``caps`` names it; ``is_open`` is then False.
    """

    def __init__(self, tau_ns: int) -> None:
        self.caps = NO_CAPS
        self.is_open = True
        self._tau_ns = tau_ns
        self._ops: Gcra | None = None
        self._bytes: Gcra | None = None
        self._cost: Gcra | None = None
        self._present: tuple[Gcra, ...] = ()

    def set_caps(self, caps: Caps, now_ns: int) -> bool:
        """Put ``caps`` in force; a rate that stays keeps its debt. Returns whether anything changed."""
        if caps == self.caps:
            return False
        self._ops = self._changed(self._ops, caps.ops_per_s, now_ns)
        self._bytes = self._changed(self._bytes, caps.bytes_per_s, now_ns)
        self._cost = self._changed(self._cost, caps.cost_per_s, now_ns)
        self._present = tuple(rate for rate in (self._ops, self._bytes, self._cost) if rate is not None)
        self.caps, self.is_open = caps, caps.is_open
        return True

    def _changed(self, rate: Gcra | None, rate_per_s: float | None, now_ns: int) -> Gcra | None:
        if rate_per_s is None:
            return None
        if rate is None:
            return Gcra(rate_per_s, self._tau_ns)
        rate.set_rate(rate_per_s, now_ns)
        return rate

    def ready_ns(self) -> int:
        """From this moment the next I/O passes all three."""
        return max((rate.ready_ns() for rate in self._present), default=0)

    def charge(self, now_ns: int, transfer_bytes: int, base_cost: float) -> None:
        """Admit one I/O now: one operation, its bytes, its cost."""
        if self._ops is not None:
            self._ops.charge(now_ns, 1.0)
        if self._bytes is not None:
            self._bytes.charge(now_ns, transfer_bytes)
        if self._cost is not None:
            self._cost.charge(now_ns, base_cost + transfer_bytes / COST_BYTES)
