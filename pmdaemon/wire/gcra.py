r"""GCRA, the generic cell rate algorithm: a token bucket kept in one number.

``tat`` (theoretical arrival time) is when the rate would be exactly used up by what was admitted so far.
Each admission moves it right by amount / rate; time moves ``now`` right by itself. An I/O may pass while
``tat`` is at most ``tau`` (the burst depth) ahead of now:

          now            now + tau
    ───────┼────────────────┼───────────────► time
        ▲  │        ▲       │     ▲
        │  │        │       │     └ tat here: hold; it may pass at tat - tau
        │  │        └ tat here: pass, and tat += amount / rate
        └ tat in the past: the bucket is full; pass, and tat = now + amount / rate

The debt has no bound: an I/O that is large against the rate passes at once and is paid for afterwards,
however long that takes. A bound would be a way round the rate (ADR 15).

Properties: no timer and no refill step; the average never exceeds rate by more than tau * rate (plus one
I/O, whose size does not matter for *whether* it passes); wake-ups that come late by less than tau cost no
throughput, because the debt is counted from tat and not from the wake-up.

Sources: ITU-T I.371 Annex A; measured with a prototype (error <= 0.5 % at 500 to 5,000 IOPS with tau 20 ms).
"""

from __future__ import annotations


class Gcra:
    """One rate.

    Args:
        rate_per_s: units a second, above 0.
        tau_ns: burst depth.

    Invariant: ``tat_ns`` never moves back, except through ``set_rate``, which keeps the debt in units.
    """

    __slots__ = ("_ns_per_unit", "rate_per_s", "tat_ns", "tau_ns")

    def __init__(self, rate_per_s: float, tau_ns: int) -> None:
        if not rate_per_s > 0:
            raise ValueError(f"a rate must be above 0, not {rate_per_s}")
        self.rate_per_s = rate_per_s
        self.tau_ns = tau_ns
        self.tat_ns = 0
        self._ns_per_unit = 1e9 / rate_per_s

    def ready_ns(self) -> int:
        """From this moment an I/O of any size may pass."""
        return self.tat_ns - self.tau_ns

    def charge(self, now_ns: int, amount: float) -> None:
        """Admit ``amount`` units now, whether ready or not."""
        start_ns = self.tat_ns if self.tat_ns > now_ns else now_ns
        self.tat_ns = start_ns + int(amount * self._ns_per_unit)

    def set_rate(self, rate_per_s: float, now_ns: int) -> None:
        """Change the rate while running; what is owed stays the same number of units."""
        if not rate_per_s > 0:
            raise ValueError(f"a rate must be above 0, not {rate_per_s}")
        debt_ns = self.tat_ns - now_ns
        if debt_ns > 0:
            self.tat_ns = now_ns + int(debt_ns * self.rate_per_s / rate_per_s)
        self.rate_per_s = rate_per_s
        self._ns_per_unit = 1e9 / rate_per_s
