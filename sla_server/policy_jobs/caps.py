"""Caps by hour of the week: what is left of a backend's capacity, shared among those who give way.

**One hour.** A promise of priority P at capacity C holds while the load of its backend is at most C. Volumes
of priority P and above are protected: their p95 demand is set aside. What is left goes to the others, also to
those with promises of their own, in this order: floors, then what their own promises need (higher priorities
first), then weighted max-min (water-filling) up to their demand. A volume whose p95 demand fits its share has
no cap; but one whose bursts alone ask for more than its share and what is spare gets these together as its
cap: the demand of minutes does not show them. With several promises on a backend each gives shares, and the
smallest is the volume's: every capacity is respected. A cap is never 0, which would stop a volume, and, as
caps change by parts of themselves, in all hours of the week: a twentieth of C, divided by weight, is a floor
of all who give way.

**The week.** From one hour to the next a cap changes by at most 25 %, up or down. Caps are only ever lowered
for that: the largest caps within the shares that change so slowly are a lower envelope, so the hours before a
crowded one are lowered too, and none is above what the capacity allows. A promise comes before smoothness: no
cap is lowered below floor and own promise where these fitted. Hours without a cap have no influence and are
left alone: going from none to a cap is what caps are for.

Pure. Source: SLA-MODEL.md 3 (sharing) and 4 (point 4).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from sla_server.policy_jobs.transforms import HOURS_A_WEEK

Floats = npt.NDArray[np.float64]
MAX_CHANGE: Final = 0.25  # per hour, SLA-MODEL.md 4
LEAST_LEFT: Final = 0.05  # of a capacity, of all who give way; the loop leaves such small use alone, too
FITS: Final = 1 + 1e-9  # the level of water-filling is found by halving: a share may lack its last digits


@dataclass(frozen=True, slots=True)
class Demand:
    """One volume in one hour of the week; cost units a second.

    Attributes:
        weight: its priority, 8 gold to 1 best-effort.
        promised: of its p95 demand what a promise of its own covers; 0 without one.
        peak: its rate while it is at work, which p95 of minutes blurs; 0: not known.
    """

    volume: str
    p50: float
    p95: float
    weight: float
    floor: float
    promised: float = 0.0
    peak: float = 0.0


@dataclass(frozen=True, slots=True)
class LoadLimit:
    """What a promise of this priority needs: a load of its backend of at most this."""

    cost_per_s: float
    weight: float


@dataclass(frozen=True, slots=True)
class HourShare:
    """What a volume may use in an hour.

    Attributes:
        cost_per_s: its cap; None: no cap.
        least: floor, at least its part of ``LEAST_LEFT``, and what its own promise needs where that fits:
            never lowered below.
    """

    cost_per_s: float | None
    least: float


def water_fill(total: float, demand: Floats, floor: Floats, weight: Floats) -> Floats:
    """Weighted max-min shares with floors: ``min(demand, max(floor, weight * level))`` summing to ``total``.

    Shapes (n,). Where the floors alone exceed ``total`` they are returned: a floor is a promise.

    ``services.control.sharing.water_fill`` gives a volume its floor where its demand is below: it caps
    volumes as they are now, and one may begin to use its floor at any moment. Here demands are what is
    expected of an hour, and what a volume will not use is planned for the others; ``shares_of_hour`` gives no
    cap below a floor either.
    """
    lowest = np.minimum(demand, floor)
    if lowest.sum() >= total:
        return lowest
    if demand.sum() <= total:
        return demand.copy()
    low, high = 0.0, float((demand / weight).max())
    for _ in range(60):  # halves the interval each time: exact to 1e-15 of its width
        level = (low + high) / 2
        if np.minimum(demand, np.maximum(floor, weight * level)).sum() > total:
            high = level
        else:
            low = level
    return np.minimum(demand, np.maximum(floor, weight * low))


def shares_of_hour(limits: Sequence[LoadLimit], demands: Sequence[Demand]) -> dict[str, HourShare]:
    """What each volume of a backend may use that gives way to some promise; the others are not in it."""
    found: dict[str, HourShare] = {}
    for limit in limits:
        for volume, share in _shares(limit, demands).items():
            before = found.get(volume)
            found[volume] = share if before is None else _smaller(before, share)
    return found


def _smaller(a: HourShare, b: HourShare) -> HourShare:
    caps = [share.cost_per_s for share in (a, b) if share.cost_per_s is not None]
    return HourShare(min(caps, default=None), min(a.least, b.least))


def _shares(limit: LoadLimit, demands: Sequence[Demand]) -> dict[str, HourShare]:
    """What one promise leaves to those of lower priority."""
    others = [item for item in demands if item.weight < limit.weight]
    if not others:
        return {}
    protected = sum(item.p95 for item in demands if item.weight >= limit.weight)
    left = max(limit.cost_per_s - protected, 0.0)
    demand, floor, weight = (
        np.array([getattr(item, name) for item in others], dtype=np.float64)
        for name in ("p95", "floor", "weight")
    )
    floor = np.maximum(floor, LEAST_LEFT * limit.cost_per_s * weight / weight.sum())
    least = _with_promises(left, others, demand, floor, weight)
    shares = water_fill(left, demand, least, weight)
    spare = max(left - float(shares.sum()), 0.0)
    return {
        item.volume: HourShare(_cap(item, float(share), spare, float(low)), float(own))
        for item, share, own, low in zip(others, shares, least, floor, strict=True)
    }


def _cap(item: Demand, share: float, spare: float, floor: float) -> float | None:
    """None: what it asks for fits, also while it is at work."""
    if item.p95 > share * FITS:
        return max(share, floor)
    return max(share + spare, floor) if item.peak > (share + spare) * FITS else None


def _with_promises(
    left: float, others: Sequence[Demand], demand: Floats, floor: Floats, weight: Floats
) -> Floats:
    """Floors raised to what own promises need, as far as it fits: higher priorities first."""
    least = floor.copy()
    needs = np.minimum(demand, np.maximum(floor, [item.promised for item in others]))
    for priority in sorted(set(weight.tolist()), reverse=True):
        members = weight == priority
        rest = left - float(np.minimum(demand, least)[~members].sum())
        if needs[members].sum() > rest:
            least[members] = np.maximum(
                floor[members], water_fill(max(rest, 0.0), needs[members], floor[members], weight[members])
            )
            break  # what comes after has its floors: nothing is left to raise them with
        least[members] = np.maximum(floor[members], needs[members])
    return least


def limit_change(shares: Mapping[int, HourShare]) -> dict[int, float | None]:
    """The largest caps within the shares that change by at most 25 % an hour; the week is a ring."""
    caps = {hour: share.cost_per_s for hour, share in shares.items()}
    for step in (1, -1):
        hours = range(HOURS_A_WEEK) if step > 0 else range(HOURS_A_WEEK - 1, -1, -1)
        most = 1 + MAX_CHANGE if step > 0 else 1 / (1 - MAX_CHANGE)
        for hour in (*hours, *hours):  # the second round carries hour 167 over to hour 0
            before, now = caps.get((hour - step) % HOURS_A_WEEK), caps.get(hour)
            if before is not None and now is not None:
                caps[hour] = max(min(now, before * most), min(now, shares[hour].least))
    return caps
