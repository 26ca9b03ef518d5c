"""Burst pairs: the rate and the bucket that let a volume's usual bursts pass.

A token bucket of rate r must hold the largest excess that ever piles up at r: b(r) = max over s < t of
arrivals(s, t) - r (t - s). It is found by Lindley's recursion over the slots; in gaps the excess drains. Any
(r, b(r)) lets everything pass, so one is chosen: the one with the least r * ``HORIZON_S`` + b(r). Bursts
shorter than the horizon then go into the bucket, and what lasts longer into the rate.

One wild day does not make a pair: b(r) is taken by day, and of the days the 95 % percentile, recent days
counting more.

A cap gets the bucket of its volume's pair as its burst (``burst_seconds``): after a quiet time so much passes
at once, then the rate of the cap holds. All buckets that may be emptied at once on a backend are together at
most what it can do within the limit of each promise (``room_of``): what comes at once makes the next I/O wait
until it is done, and would else break the promise that the caps are for.

Pure numpy. Source: SLA-MODEL.md 4, point 5; Le Boudec and Thiran, Network Calculus, 1.2 (arrival curves).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from pmdaemon.wire.rates import DEFAULT_BURST_S, MOST_BURST_S
from sla_server.policy_jobs.demand import recency_weights, weighted_percentile
from sla_server.policy_jobs.transforms import US_A_SECOND

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
HORIZON_S: Final = 300.0  # as long as people wait for a report; what lasts longer is a load, not a burst
MIN_SLOTS: Final = 30
DAY_US: Final = 86_400 * US_A_SECOND
OF_DAYS: Final = 0.95
RATES: Final = 33  # candidates, between the median and the highest demand
ROOM_S: Final = 0.25
"""Of a capacity, at most: at 80 % load the backend has worked it off within 1.25 s, 2 % of a minute."""


@dataclass(frozen=True, slots=True)
class BurstPair:
    """What lets a volume's usual bursts pass.

    Attributes:
        cost_per_s: the rate.
        burst_cost: the bucket, cost units.
        days: it was learned of.
    """

    cost_per_s: float
    burst_cost: float
    days: int


def excess(at_us: Ints, demand: Floats, slot_s: float, rates: Floats) -> Floats:
    """What has piled up at the end of each slot, at each rate; shape (rates, n).

    Args:
        at_us: begin of each slot, rising; shape (n,).
        demand: offered cost a second in it; shape (n,).
        slot_s: its length.
        rates: cost a second; shape (rates,).
    """
    gaps_s = np.diff(at_us, prepend=at_us[:1] - round(slot_s * US_A_SECOND)) / US_A_SECOND - slot_s
    idle = -np.maximum(gaps_s, 0.0)[None, :] * rates[:, None]
    busy = (demand[None, :] - rates[:, None]) * slot_s
    steps = np.stack([idle, busy], axis=2).reshape(len(rates), -1)
    total = np.cumsum(steps, axis=1)
    piled: Floats = total - np.minimum(np.minimum.accumulate(total, axis=1), 0.0)
    return piled[:, 1::2]


def burst_pair(
    at_us: Ints, demand: Floats, slot_s: float, now_us: int, half_life_days: float
) -> BurstPair | None:
    """The pair of one volume; None where too little was seen, or nothing was asked for.

    Args:
        at_us: begin of each slot; shape (n,), in any order.
        demand: offered cost a second in it; shape (n,).
        slot_s: its length.
        now_us: recency is counted from here.
        half_life_days: a day so long ago counts half.
    """
    if len(at_us) < MIN_SLOTS or demand.max() <= 0:
        return None
    order = np.argsort(at_us, kind="stable")
    at_us, demand = at_us[order], demand[order]
    rates = np.linspace(float(np.median(demand)), float(demand.max()), RATES)
    days, begins = np.unique(at_us // DAY_US, return_index=True)
    # A day begins without excess: what one wild day piled up would take others to drain.
    by_day = np.stack(
        [
            excess(at_us[first:last], demand[first:last], slot_s, rates).max(axis=1)
            for first, last in pairwise([*begins.tolist(), len(at_us)])
        ],
        axis=1,
    )
    weights = recency_weights(days * DAY_US, now_us, half_life_days)
    buckets = np.array([weighted_percentile(row, weights, OF_DAYS) for row in by_day])
    best = int(np.argmin(rates * HORIZON_S + buckets))
    return BurstPair(float(rates[best]), float(buckets[best]), len(days))


def room_of(cost_per_s: float, limit_us: float) -> float:
    """Cost units that may come at once where a promise with this limit has this capacity."""
    return cost_per_s * min(ROOM_S, limit_us / US_A_SECOND)


def burst_seconds(cap: Floats, bucket: Floats, group: Ints, room: Floats) -> Floats:
    """How many seconds of its rate each cap lets pass at once; nan: the default of gateways, or less.

    Args:
        cap: cost a second; shape (n,).
        bucket: cost units that the volume's usual bursts need; shape (n,).
        group: number of the backend and hour of each, whose buckets may be emptied together; shape (n,).
        room: cost units that these may be together; shape (groups,).
    """
    wanted = np.bincount(group, weights=bucket, minlength=len(room))
    part = np.minimum(1.0, np.divide(room, wanted, out=np.zeros(len(room)), where=wanted > 0))
    found: Floats = np.minimum(bucket * part[group] / cap, MOST_BURST_S)
    return np.where(found > DEFAULT_BURST_S, found, np.nan)
