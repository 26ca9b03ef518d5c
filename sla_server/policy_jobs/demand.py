"""Demand by hour of the week: local hours, holidays, recency, and percentiles of weighted values.

**Hours.** People work by their clock: an hour of the week is local, and a holiday counts as a Sunday, when
demand is learned and when it is expected. Caps are stored by hours of UTC; ``expected`` says which
learned hour each hour of UTC of a coming week is like, daylight saving time and holidays included. Time zones
differ from UTC by quarters of an hour at least, so what is learned is kept apart by quarters: ``hours_of``
gives each its hour. An hour of UTC is expected to be like the local hour its middle lies in.

**Recency.** What was seen ``half_life`` ago counts half. Weights are whole numbers: Spark's
``percentile(value, share, frequency)`` takes such, and ``weighted_percentile`` gives exactly what it gives.

Pure. Source: SLA-MODEL.md 4, point 3.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from datetime import UTC, date, datetime, timedelta
from typing import Any, Final
from zoneinfo import ZoneInfo

import numpy as np
import numpy.typing as npt

from sla_server.policy_jobs.transforms import HOURS_A_WEEK, US_A_SECOND, US_AN_HOUR

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
QUARTER_US: Final = US_AN_HOUR // 4
WEIGHT_SCALE: Final = 1_000_000  # of what is seen now; a sum of 2^63 / 10^6 values has room
SUNDAY: Final = 6


def local_hour(at_us: int, zone: ZoneInfo, holidays: Collection[date] = frozenset()) -> int:
    """0 (Monday 00:00 local) to 167; of a holiday the hour of a Sunday."""
    local = datetime.fromtimestamp(at_us // US_A_SECOND, zone)
    day = SUNDAY if local.date() in holidays else local.weekday()
    return day * 24 + local.hour


def hours_of(
    from_us: int, to_us: int, zone: ZoneInfo, holidays: Collection[date] = frozenset()
) -> list[tuple[int, int]]:
    """(begin in us UTC, hour of the week) of each quarter of an hour that touches [from_us, to_us).

    A table to join statistics with: 2,688 rows for four weeks, whatever the number of volumes.
    """
    first = from_us // QUARTER_US * QUARTER_US
    return [(at_us, local_hour(at_us, zone, holidays)) for at_us in range(first, to_us, QUARTER_US)]


def expected(now_us: int, zone: ZoneInfo, holidays: Collection[date] = frozenset()) -> Ints:
    """The learned hour that each hour of UTC in the 7 days from ``now_us`` is like; shape (168,)."""
    now = datetime.fromtimestamp(now_us // US_A_SECOND, UTC).replace(minute=30, second=0, microsecond=0)
    found = np.empty(HOURS_A_WEEK, dtype=np.int64)
    for ahead in range(HOURS_A_WEEK):
        middle = now + timedelta(hours=ahead)
        found[middle.weekday() * 24 + middle.hour] = local_hour(
            int(middle.timestamp()) * US_A_SECOND, zone, holidays
        )
    return found


def expected_rows(
    rows: Iterable[Mapping[str, Any]], hours: Mapping[str, Ints], default: Ints
) -> list[dict[str, Any]]:
    """Demand by hours of UTC, from rows of demand by learned hour of the week.

    Args:
        rows: of ``transforms.hourly_demand``: backend, volume, hour_of_week and what is known of it.
        hours: of backends, what ``expected`` found; ``default`` for the others.
        default: as of one backend.
    """
    by_backend: dict[str, dict[int, list[int]]] = {}
    found = []
    for row in rows:
        backend = row["backend"]
        if backend not in by_backend:
            like = by_backend[backend] = {}
            for hour, learned in enumerate(hours.get(backend, default).tolist()):
                like.setdefault(learned, []).append(hour)
        for hour in by_backend[backend].get(row["hour_of_week"], ()):
            found.append({**row, "hour_of_week": hour})
    return found


def recency_weights(at_us: Ints, now_us: int, half_life_days: float) -> Ints:
    """How often what was seen then counts, in millionths of what is seen now; at least once. Shapes (n,)."""
    age_days = np.maximum(now_us - at_us, 0) / (86_400.0 * US_A_SECOND)
    weight = np.round(WEIGHT_SCALE * 0.5 ** (age_days / half_life_days)).astype(np.int64)
    return np.maximum(weight, 1)


def weighted_percentile(values: Floats, weights: Ints, share: float) -> float:
    """The percentile of the values, each repeated ``weights`` times, without repeating them.

    Between two ranks it is interpolated, as Spark's ``percentile`` and numpy's do; exact.

    Args:
        values: shape (n,), at least one with a weight.
        weights: shape (n,), not below 0.
        share: 0..1.
    """
    order = np.argsort(values, kind="stable")
    values, reached = values[order], np.cumsum(weights[order])
    total = int(reached[-1])
    if total <= 0:
        raise ValueError("no value has a weight")
    position = share * (total - 1)
    lower = int(position)
    low, high = (
        float(values[np.searchsorted(reached, rank, side="right")])
        for rank in (lower, min(lower + 1, total - 1))
    )
    return low + (high - low) * (position - lower)
