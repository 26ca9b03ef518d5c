"""Demand by hour of the week: local hours, holidays, recency, and percentiles of weighted values.

**Hours.** People work by their clock: an hour of the week is local, and a holiday counts as a Sunday, when
demand is learned and when it is expected. Caps are stored by hours of UTC; ``expected`` says which learned
hour each hour of UTC of a coming week is like, daylight saving time and holidays included. Time zones differ
from UTC by quarters of an hour at least, so what is learned is kept apart by quarters: ``learned_of`` gives
each its hour. An hour of UTC is expected to be like the local hour its middle lies in.

**Recency.** What was seen ``half_life`` ago counts half. Weights are whole numbers: Spark's
``percentile(value, share, frequency)`` takes such, and ``weighted_percentile`` gives exactly what it gives.

Pure. Source: SLA-MODEL.md 4, point 3.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Final
from zoneinfo import ZoneInfo

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sla_server.policy_jobs.transforms import HOURS_A_WEEK, QUARTER_US, US_A_SECOND

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
WEIGHT_SCALE: Final = 1_000_000  # of what is seen now; a sum of 2^63 / 10^6 values has room
SUNDAY: Final = 6


def local_hour(at_us: int, zone: ZoneInfo, holidays: Collection[date] = frozenset()) -> int:
    """0 (Monday 00:00 local) to 167; of a holiday the hour of a Sunday."""
    local = datetime.fromtimestamp(at_us // US_A_SECOND, zone)
    day = SUNDAY if local.date() in holidays else local.weekday()
    return day * 24 + local.hour


def learned_of(
    from_us: int, to_us: int, zone: ZoneInfo, holidays: Collection[date] = frozenset()
) -> list[tuple[int, int]]:
    """(begin in us UTC, hour of the week) of each quarter of an hour that touches [from_us, to_us)."""
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


@dataclass(frozen=True, slots=True)
class HourTables:
    """Small tables to join statistics with: thousands of rows a time zone, whatever the number of volumes.

    Attributes:
        zones: backend, zone.
        learned: zone, begin_us (of a quarter of an hour), hour_of_week, weight.
        coming: zone, hour_of_week (UTC), like_hour (learned).
        end_us: of the window; recency is counted from it.
        half_life_days: what was seen so long before counts half.
        holidays: local days that count as Sundays, in order.
    """

    zones: pa.Table
    learned: pa.Table
    coming: pa.Table
    end_us: int
    half_life_days: float
    holidays: tuple[date, ...] = ()


LEARNED: Final = pa.schema(
    [("zone", pa.string()), ("begin_us", pa.int64()), ("hour_of_week", pa.int32()), ("weight", pa.int64())]
)
COMING: Final = pa.schema([("zone", pa.string()), ("hour_of_week", pa.int32()), ("like_hour", pa.int32())])
ZONES: Final = pa.schema([("backend", pa.string()), ("zone", pa.string())])


def hour_tables(
    zones: Mapping[str, str],
    window_us: tuple[int, int],
    half_life_days: float,
    holidays: Collection[date] = frozenset(),
) -> HourTables:
    """The tables for a window of statistics; the coming week and recency are counted from its end.

    Args:
        zones: of every backend.
        window_us: us UTC.
        half_life_days: what was seen so long ago counts half.
        holidays: local days.
    """
    learned: list[tuple[str, int, int, int]] = []
    coming: list[tuple[str, int, int]] = []
    for name in sorted(set(zones.values())):
        rows = learned_of(*window_us, ZoneInfo(name), holidays)
        weights = recency_weights(np.array([row[0] for row in rows]), window_us[1], half_life_days)
        learned += [(name, *row, weight) for row, weight in zip(rows, weights.tolist(), strict=True)]
        hours = expected(window_us[1], ZoneInfo(name), holidays).tolist()
        coming += [(name, hour, like) for hour, like in enumerate(hours)]
    return HourTables(
        zones=_table(sorted(zones.items()), ZONES),
        learned=_table(learned, LEARNED),
        coming=_table(coming, COMING),
        end_us=window_us[1],
        half_life_days=half_life_days,
        holidays=tuple(sorted(holidays)),
    )


def _table(
    rows: list[tuple[str, str]] | list[tuple[str, int, int]] | list[tuple[str, int, int, int]],
    kind: pa.Schema,
) -> pa.Table:
    return pa.Table.from_pylist([dict(zip(kind.names, row, strict=True)) for row in rows], schema=kind)
