"""Sharing an allowed rate: weighted max-min with floors, and the split of a cap over gateways.

Pour the allowance C over volumes as water over a floor of steps: each volume v gets
``x_v = min(d_v, max(f_v, w_v * level))`` and the level is such that the sum is C. Whoever wants less than its
share gets what it wants, and what it leaves rises the level for the others (work conservation).

    rate
     |        ____
     |  level ~~~~|~~~~~~~~~~~~~~   d: wants less than the level, gets all of it
     |  ____      |          ____   f: a floor above the level is kept
     | | d  |     |         | f  |
     +-+----+-----+---------+----+-> volumes (width = weight)

Pure functions. Source: SLA-MODEL.md 3 "Sharing C".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Claim:
    """What one volume brings to the sharing; rates in cost units a second.

    Attributes:
        demand: what it would use, infinite while it is queueing at a cap that hides its demand.
        floor: never gets less, even when the floors together exceed what is shared.
        weight: 8 gold, 4 silver, 2 bronze, 1 best-effort.
    """

    demand: float
    floor: float
    weight: float


def water_fill(allowed: float, claims: Mapping[str, Claim]) -> dict[str, float]:
    """Share ``allowed`` among the claims.

    Returns:
        A rate for each name: never below its floor; the sum is at most max(allowed, sum of floors), and equal
        to ``allowed`` when demands can use it.

    The level is found exactly: the sum is piecewise linear and rising in the level, with corners at f/w and
    d/w.
    """
    if not claims:
        return {}
    # A demand below its floor is still entitled to the floor: it may start to use it at any moment.
    wants = {name: max(claim.demand, claim.floor) for name, claim in claims.items()}

    def poured(level: float) -> float:
        return sum(min(wants[name], max(c.floor, c.weight * level)) for name, c in claims.items())

    corners = sorted(
        {c.floor / c.weight for c in claims.values()}
        | {wants[name] / c.weight for name, c in claims.items() if math.isfinite(wants[name])}
        | {0.0}
    )
    low = 0.0
    for corner in corners:
        if poured(corner) >= allowed:
            # Between two corners the sum is a straight line.
            rise = poured(corner) - poured(low)
            level = low + (corner - low) * (max(allowed - poured(low), 0.0) / rise if rise > 0 else 0.0)
            break
        low = corner
    else:
        # Beyond the last corner only those without a limit still rise.
        slope = sum(c.weight for name, c in claims.items() if math.isinf(wants[name]))
        level = low + ((allowed - poured(low)) / slope if slope else 0.0)
    return {name: min(wants[name], max(c.floor, c.weight * level)) for name, c in claims.items()}


def spread(allowed: float, shares: Mapping[str, float], claims: Mapping[str, Claim]) -> dict[str, float]:
    """Hand out by weight what nobody claimed: a cap is no reservation. The sum stays within ``allowed``."""
    rest = max(allowed - sum(shares.values()), 0.0)
    weights = sum(claims[name].weight for name in shares)
    return {name: share + rest * claims[name].weight / weights for name, share in shares.items()}


def split(rate: float, recent: Mapping[str, float], recent_ratio: float) -> dict[str, float]:
    """Split a volume's cap over its gateways: ``recent_ratio`` by recent use, the rest equally.

    Args:
        rate: the volume's cap.
        recent: gateway_id to its recent rate of this volume; must not be empty.
        recent_ratio: 0..1.
    """
    total = sum(recent.values())
    equal = 1.0 / len(recent)
    return {
        gateway: rate * ((recent_ratio * use / total + (1 - recent_ratio) * equal) if total > 0 else equal)
        for gateway, use in recent.items()
    }
