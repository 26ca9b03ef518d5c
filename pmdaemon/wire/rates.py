r"""Rates of a volume, of a client or of a group of volumes, the cost unit, and GCRA, which holds them.

Three rates: operations, bytes, cost. All must pass; each is optional. Cost of an I/O (``io_cost``) = base +
bytes / bytes of a unit; the export has both. The burst is how much may pass at once, in seconds of the rate.
Pure: time comes as an argument.

GCRA, the generic cell rate algorithm: a token bucket kept in one number.

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

import math
from dataclasses import dataclass
from typing import Any, Final

LEAST_RATE: Final = 0.001  # one in a thousand seconds; times of far smaller rates exceed what a float holds
MOST_RATE: Final = 1e15
_SAME_RATIO: Final = 1e-13  # 0.8 of 40 and 0.2 of it may be 39.999999999999996
COST_BYTES: Final = 65_536
"""Bytes that cost as much as one base unit, where an export has no other number."""
DEFAULT_BURST_S: Final = 0.02
"""Of a rate that says no other: late wake-ups cost no throughput, and no second is far above the rate."""
LEAST_BURST_S: Final = 0.001
_ANY_BYTES: Final = 1 << 62
_LEAST_FORMER: Final = 64  # so many rates of before are kept without a look whether they must be
MOST_BURST_S: Final = 300.0


def whole_rate(rate: float) -> int:
    """For what takes whole numbers a second: the next one below. What was 40 until it was divided is 40."""
    return math.floor(rate * (1 + _SAME_RATIO))


def io_cost(base: float, transfer_bytes: float, unit_bytes: float = COST_BYTES) -> float:
    """Cost of an I/O, or of several: ``base`` is then that of all, and so are the bytes."""
    return base + transfer_bytes / unit_bytes


def at_once_s(length_s: float, ops_per_s: float, peak_ops_per_s: float) -> float:
    """``Rates.burst_s`` of bursts that last ``length_s`` at their peak, which is above the rate."""
    return min(max(length_s * (peak_ops_per_s / ops_per_s - 1), DEFAULT_BURST_S), MOST_RATE)


@dataclass(frozen=True, slots=True)
class Rates:
    """Up to three rates a second; None is no limit.

    ``burst_s``: of each so many seconds' worth may pass at once; None is ``DEFAULT_BURST_S``.
    ``peak_ops_per_s``: how fast a burst of operations may be; None is as fast as it can.
    """

    ops_per_s: float | None = None
    bytes_per_s: float | None = None
    cost_per_s: float | None = None
    burst_s: float | None = None
    peak_ops_per_s: float | None = None

    def tighter(self, other: Rates) -> Rates:
        """The smaller of both in each rate; of two that limit something, the smaller burst."""
        return Rates(
            _smaller(self.ops_per_s, other.ops_per_s),
            _smaller(self.bytes_per_s, other.bytes_per_s),
            _smaller(self.cost_per_s, other.cost_per_s),
            self._common_burst_s(other),
            _smaller(self.peak_ops_per_s, other.peak_ops_per_s),
        )

    def _common_burst_s(self, other: Rates) -> float | None:
        if self.is_open or other.is_open:
            return other.burst_s if self.is_open else self.burst_s
        if self.burst_s == other.burst_s:
            return self.burst_s
        return min(each.burst_s or DEFAULT_BURST_S for each in (self, other))

    def at_least(self, least: Rates) -> Rates:
        """Rates that are set, raised to ``least``."""
        return Rates(
            _raised(self.ops_per_s, least.ops_per_s),
            _raised(self.bytes_per_s, least.bytes_per_s),
            _raised(self.cost_per_s, least.cost_per_s),
            self._raised_burst_s(least),
            _raised(self.peak_ops_per_s, least.ops_per_s),
        )

    def _raised_burst_s(self, least: Rates) -> float | None:
        """A burst with a peak is no longer for a rate that was raised; one of cost keeps its size.

        A policy sets bursts that all volumes of a backend may use at once (``policy_jobs.bursts``): where a
        floor raises its cap tenfold, as many seconds of it would be ten times that.
        """
        cost, least_cost = self.cost_per_s, least.cost_per_s
        if self.burst_s is not None and cost is not None and least_cost is not None and cost < least_cost:
            return min(self.burst_s, max(self.burst_s * cost / least_cost, DEFAULT_BURST_S))
        ops, peak, floor = self.ops_per_s, self.peak_ops_per_s, least.ops_per_s
        if self.burst_s is None or ops is None or peak is None or floor is None or not ops < min(floor, peak):
            return self.burst_s
        return at_once_s(self.burst_s / (peak / ops - 1), floor, max(peak, floor))

    def scaled(self, ratio: float) -> Rates:
        """Each rate times ``ratio``."""
        parts = (self.ops_per_s, self.bytes_per_s, self.cost_per_s, self.peak_ops_per_s)
        ops, size, cost, peak = (None if rate is None else rate * ratio for rate in parts)
        return Rates(ops, size, cost, self.burst_s, peak)

    def without_burst(self) -> Rates:
        """The same for those who cannot hold a burst to its peak."""
        return Rates(self.ops_per_s, self.bytes_per_s, self.cost_per_s)

    def differs(self, other: Rates, ratio: float) -> bool:
        """Whether a rate or the burst appears, goes, or differs by more than ``ratio`` of itself."""
        pairs = (
            (self.ops_per_s, other.ops_per_s),
            (self.bytes_per_s, other.bytes_per_s),
            (self.cost_per_s, other.cost_per_s),
            (self.peak_ops_per_s, other.peak_ops_per_s),
            (self.burst_s, other.burst_s),
        )
        return any(
            (a is None) != (b is None) or (a is not None and b is not None and abs(a - b) > ratio * b)
            for a, b in pairs
        )

    @property
    def is_open(self) -> bool:
        """Whether nothing is limited."""
        return self.ops_per_s is None and self.bytes_per_s is None and self.cost_per_s is None

    def limits(self) -> dict[str, Any]:
        """Keys of an entry of message CAPS that say what is limited; an agent of before skips ``burst_s``."""
        return {
            "ops_per_s": self.ops_per_s,
            "bytes_per_s": self.bytes_per_s,
            "cost_per_s": self.cost_per_s,
            **({"burst_s": self.burst_s} if self.burst_s is not None else {}),
            **({"peak_ops_per_s": self.peak_ops_per_s} if self.peak_ops_per_s is not None else {}),
        }

    def entry(self, volume: str, client: str = "") -> dict[str, Any]:
        """One entry of message CAPS: of a volume, or of one client of it."""
        return {"volume": volume, **({"client": client} if client else {}), **self.limits()}


NO_CAPS: Final = Rates()


def _smaller(one: float | None, two: float | None) -> float | None:
    if one is None or two is None:
        return two if one is None else one
    return min(one, two)


def _raised(rate: float | None, least: float | None) -> float | None:
    return rate if rate is None or least is None else max(rate, least)


class Gcra:
    """One rate.

    Args:
        rate_per_s: units a second, above 0.
        tau_ns: burst depth.

    Invariant: ``tat_ns`` never moves back, except through ``change`` and ``released``.
    """

    __slots__ = ("ns_per_unit", "rate_per_s", "tat_ns", "tau_ns")

    def __init__(self, rate_per_s: float, tau_ns: int) -> None:
        if not rate_per_s > 0:
            raise ValueError(f"a rate must be above 0, not {rate_per_s}")
        self.rate_per_s = rate_per_s
        self.tau_ns = tau_ns
        self.tat_ns = 0
        self.ns_per_unit = 1e9 / rate_per_s

    def ready_ns(self) -> int:
        """From this moment an I/O of any size may pass."""
        return self.tat_ns - self.tau_ns

    def left(self, now_ns: int) -> float:
        """An I/O may pass while at most so many units have passed before it, now; below 0: none may."""
        return (min(now_ns - self.tat_ns, 0) + self.tau_ns) * self.rate_per_s / 1e9

    def charge(self, now_ns: int, amount: float) -> None:
        """Admit ``amount`` units now, whether ready or not."""
        start_ns = self.tat_ns if self.tat_ns > now_ns else now_ns
        self.tat_ns = start_ns + int(amount * self.ns_per_unit)

    def change(self, rate_per_s: float, tau_ns: int, now_ns: int) -> None:
        """Change rate and burst while running.

        What is owed beyond the burst stays the same number of units, and so does what is left of it, at most
        the new burst: whoever has used a long one is not held for that by a smaller rate or burst, and no
        change gives it back.
        """
        if not rate_per_s > 0:
            raise ValueError(f"a rate must be above 0, not {rate_per_s}")
        left_ns = int(min(now_ns - self.ready_ns(), self.tau_ns) * self.rate_per_s / rate_per_s)
        self.rate_per_s, self.tau_ns = rate_per_s, tau_ns
        self.tat_ns, self.ns_per_unit = now_ns + tau_ns - min(left_ns, tau_ns), 1e9 / rate_per_s

    def released(self, now_ns: int) -> None:
        """It holds no more: what is owed beyond the burst is forgiven, a burst that was used is not."""
        self.tat_ns = min(self.tat_ns, now_ns + self.tau_ns)


class Allowance:
    """What several rates let pass now, and what of it has passed: for a batch of I/Os, charged together.

    The next I/O may pass while each figure of ``passed`` is at most that of ``most``: as with ``Gcra`` this
    depends on what passed before it, not on its own size. Whoever lets one pass adds it to ``passed``.

    Attributes:
        largest_bytes: only I/Os up to this size are for a batch.
        oldest_ns: only those that arrived later are.
        most: operations, bytes, cost; infinite without a rate, below 0 where none may pass.
        passed: the same. The cost is only counted while ``most`` limits it.
    """

    __slots__ = ("largest_bytes", "most", "oldest_ns", "passed")

    def __init__(self, largest_bytes: int, oldest_ns: int) -> None:
        self.largest_bytes, self.oldest_ns = largest_bytes, oldest_ns
        self.most = math.inf, math.inf, math.inf
        self.passed = 0, 0, 0.0

    @property
    def ops(self) -> int:
        """How many I/Os have passed."""
        return self.passed[0]


class RateSet:
    """The rates of one volume, of one client of it or of a group, in force.

    Args:
        tau_ns: burst depth of each, unless the caps say another.
        since_ns: bursts are empty at this time, monotonic, because what was used before is not known; None:
            none was used.

    The peak of a burst is a rate of its own, whose burst is ``tau_ns``. A rate that goes and returns has of
    its burst what was left, and what time has brought since: caps that come and go give no bursts.

    Invariant: a rate is present exactly when ``caps`` names it; ``is_open`` is then False.
    """

    def __init__(self, tau_ns: int, since_ns: int | None = None) -> None:
        self.caps = NO_CAPS
        self.is_open = True
        self.tau_ns = tau_ns
        self.since_ns = since_ns
        self._ops: Gcra | None = None
        self._bytes: Gcra | None = None
        self._cost: Gcra | None = None
        self._peak: Gcra | None = None
        self._present: tuple[Gcra, ...] = ()
        self._former: dict[str, Gcra] = {}  # by name, those that went

    def set_caps(self, caps: Rates, now_ns: int) -> bool:
        """Put ``caps`` in force; a rate that stays keeps its debt. Returns whether anything changed."""
        if caps == self.caps:
            return False
        tau_ns = self.tau_ns if caps.burst_s is None else int(caps.burst_s * 1e9)
        self._ops = self._changed("ops", self._ops, caps.ops_per_s, tau_ns, now_ns)
        self._bytes = self._changed("bytes", self._bytes, caps.bytes_per_s, tau_ns, now_ns)
        self._cost = self._changed("cost", self._cost, caps.cost_per_s, tau_ns, now_ns)
        peak = caps.peak_ops_per_s if caps.ops_per_s is not None else None
        self._peak = self._changed("peak", self._peak, peak, self.tau_ns, now_ns)
        found = (self._ops, self._bytes, self._cost, self._peak)
        self._present = tuple(rate for rate in found if rate is not None)
        self.caps, self.is_open = caps, caps.is_open
        return True

    def _changed(
        self, name: str, rate: Gcra | None, rate_per_s: float | None, tau_ns: int, now_ns: int
    ) -> Gcra | None:
        if rate_per_s is None:
            if rate is not None:
                rate.released(now_ns)
                self._former[name] = rate
            return None
        if rate is None:
            rate = self._former.pop(name, None)
        if rate is None or (rate not in self._present and rate.tat_ns <= now_ns):
            made = Gcra(rate_per_s, tau_ns)
            made.tat_ns = self.since_ns + tau_ns if self.since_ns is not None else 0
            return made
        rate.change(rate_per_s, tau_ns, now_ns)
        return rate

    def is_rested(self, now_ns: int) -> bool:
        """Whether what went has its whole burst again; then it need not be remembered."""
        return all(rate.tat_ns <= now_ns for rate in (*self._present, *self._former.values()))

    def ready_ns(self) -> int:
        """From this moment the next I/O passes all of them."""
        found: int | None = None
        for rate in self._present:
            ready_ns = rate.tat_ns - rate.tau_ns
            if found is None or ready_ns > found:
                found = ready_ns
        return found or 0

    def narrow(self, allowance: Allowance, now_ns: int) -> None:
        """Allow no more than these rates do."""
        ops, size, cost = allowance.most
        if self._ops is not None:
            ops = min(ops, self._ops.left(now_ns))
        if self._peak is not None:
            ops = min(ops, self._peak.left(now_ns))
        if self._bytes is not None:
            size = min(size, self._bytes.left(now_ns))
        if self._cost is not None:
            cost = min(cost, self._cost.left(now_ns))
        allowance.most = ops, size, cost

    def charge_batch(self, now_ns: int, allowance: Allowance) -> float:
        """Admit now what has passed of an allowance; returns how long it uses the rates in full, in ns."""
        ops, size, cost = allowance.passed
        if self._ops is not None:
            self._ops.charge(now_ns, ops)
        if self._bytes is not None:
            self._bytes.charge(now_ns, size)
        if self._cost is not None:
            self._cost.charge(now_ns, cost)
        if self._peak is not None:
            self._peak.charge(now_ns, ops)
        return max(ops * self._ops.ns_per_unit if self._ops is not None else 0.0, self.size_ns(size, cost))

    def bytes_within(self, most_ns: float) -> int:
        """The largest I/O that its size does not make longer than ``most_ns``; 0 where a cost is limited."""
        if self._cost is not None:
            return 0
        return int(most_ns / self._bytes.ns_per_unit) if self._bytes is not None else _ANY_BYTES

    def charge(self, now_ns: int, transfer_bytes: int, cost: float, part: float = 1.0) -> None:
        """Admit one I/O now: one operation, its bytes, its cost; or only this part of it."""
        if self._ops is not None:
            self._ops.charge(now_ns, part)
        if self._bytes is not None:
            self._bytes.charge(now_ns, transfer_bytes * part)
        if self._cost is not None:
            self._cost.charge(now_ns, cost * part)
        if self._peak is not None:
            self._peak.charge(now_ns, part)

    def duration_ns(self, transfer_bytes: int, cost: float) -> float:
        """How long the rates are used in full by one I/O; 0 without a rate."""
        found = self._ops.ns_per_unit if self._ops is not None else 0.0
        if self._bytes is not None:
            found = max(found, transfer_bytes * self._bytes.ns_per_unit)
        if self._cost is not None:
            found = max(found, cost * self._cost.ns_per_unit)
        return found

    def size_ns(self, transfer_bytes: int, cost: float) -> float:
        """The same without the rate of operations: what a smaller I/O would take less of."""
        found = transfer_bytes * self._bytes.ns_per_unit if self._bytes is not None else 0.0
        return found if self._cost is None else max(found, cost * self._cost.ns_per_unit)


class FormerRates:
    """Rates of entries that are gone, by name, until their bursts would be whole again.

    Args:
        tau_ns: burst depth of those that were never there; ``since_ns``: see ``RateSet``.
    """

    def __init__(self, tau_ns: int, since_ns: int | None = None) -> None:
        self._tau_ns, self._since_ns = tau_ns, since_ns
        self._by_name: dict[str, RateSet] = {}
        self._most = _LEAST_FORMER

    def keep(self, name: str, rates: RateSet, now_ns: int) -> None:
        """An entry has gone. When those kept have doubled, those that have rested are forgotten."""
        rates.set_caps(NO_CAPS, now_ns)
        if rates.is_rested(now_ns):
            return
        if len(self._by_name) >= self._most:  # not each time: all clients of a volume may go at once
            self._by_name = {
                other: kept for other, kept in self._by_name.items() if not kept.is_rested(now_ns)
            }
            self._most = max(2 * len(self._by_name), _LEAST_FORMER)
        self._by_name[name] = rates

    def take(self, name: str) -> RateSet:
        """For an entry that comes: the rates it had, or new ones."""
        return self._by_name.pop(name, None) or RateSet(self._tau_ns, self._since_ns)
