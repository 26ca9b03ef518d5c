"""When a pool will be full: a robust line through its use by day, with an interval. Pure numpy.

The line is Theil-Sen's: its slope is the median of the slopes between all pairs of days, its level the median
of what is left; a fifth of the days may be outliers (a restore, a clean-up) without moving it. The day on
which it reaches the size of the pool is the forecast.

No day is named when that would be a guess: fewer than ``LEAST_DAYS`` days, use that does not grow, a line
that explains less than ``LEAST_R2`` of how use varies, or a day further away than ``MOST_AHEAD_DAYS``.

The interval is a bootstrap: blocks of ``BLOCK_DAYS`` residuals (use has a rhythm of a week, and what is above
the line today is so tomorrow) are drawn again and again onto the line, and each such history has its own line
and its own day. Its quantiles are those of ``COVER``; short histories know less than their residuals show,
so the spread is widened by the factor of small samples, n / (n - 2). Use that wanders (each day's growth is
drawn again, and is kept) spreads with the square root of time: its variance is added. The generator is
seeded: one history has one forecast.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
import numpy.typing as npt

DAY_US: Final = 86_400_000_000
LEAST_DAYS: Final = 7
LEAST_R2: Final = 0.3
MOST_DAYS: Final = 90  # of history: older growth says little, and pairs grow with the square
MOST_AHEAD_DAYS: Final = 730.0
FLAT_SHARE: Final = 1e-5  # of the size a day: below it a pool needs centuries
BLOCK_DAYS: Final = 7
SAMPLES: Final = 200
SAMPLE_PAIRS: Final = 800
COVER: Final = 0.98
SEED: Final = 20_170_101
NORMAL_MAD: Final = 1.4826  # standard deviation of what is normal, by its median distance from 0
SPIKE_FACTOR: Final = 5.0
SPIKE_SHARE: Final = 0.01  # of the size: smaller ones are of no importance
Floats = npt.NDArray[np.float64]
Pairs = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a history says of the future.

    Attributes:
        days: of history that it rests on.
        slope_bytes_per_day: None with fewer than two days.
        r2: share of the variance that the line explains; None if there is none.
        full_us: when the pool is expected to be full; None: ``reason`` says why no day is named.
        earliest_us, latest_us: the interval; None where it reaches beyond ``MOST_AHEAD_DAYS``.
        reason: "" with a day.
    """

    days: int
    slope_bytes_per_day: float | None
    r2: float | None
    full_us: int | None
    earliest_us: int | None
    latest_us: int | None
    reason: str

    def as_row(self, at_us: int) -> dict[str, Any]:
        """As it is stored, made at that time."""
        return {"at_us": at_us, **{each.name: getattr(self, each.name) for each in fields(self)}}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Forecast:
        """The reverse.

        Raises:
            KeyError: it is of another release.
        """
        return cls(**{each.name: row[each.name] for each in fields(cls)})


def theil_sen(days: Floats, used: Floats, chosen: Pairs | None = None) -> tuple[Floats, Floats]:
    """Slopes and levels (at day 0) of the lines through histories.

    Args:
        days: of shape (n,), rising.
        used: of shape (n,) or (histories, n).
        chosen: pairs of days whose slopes count; None: all.

    Returns:
        Two arrays of shape () or (histories,).
    """
    first, second = np.triu_indices(len(days), 1) if chosen is None else chosen
    slopes = np.median((used[..., second] - used[..., first]) / (days[second] - days[first]), axis=-1)
    levels = np.median(used - slopes[..., None] * days, axis=-1)
    return np.asarray(slopes), np.asarray(levels)


def explained(days: Floats, used: Floats, slope: float, level: float) -> float:
    """Share of the variance of use that a line explains; 0 for one that is worse than the mean."""
    total = float(np.sum((used - used.mean()) ** 2))
    left = float(np.sum((used - slope * days - level) ** 2))
    return max(0.0, 1.0 - left / total) if total > 0 else 0.0


def forecast(day_us: npt.NDArray[np.int64], used_bytes: Floats, size_bytes: int, now_us: int) -> Forecast:
    """The forecast of one pool.

    Args:
        day_us: begins of days, rising; use of a day is that at its end.
        used_bytes: of each.
        size_bytes: of the pool now.
        now_us: from when on days lie ahead.
    """
    day_us, used = day_us[-MOST_DAYS:], np.asarray(used_bytes, dtype=np.float64)[-MOST_DAYS:]
    count = len(day_us)
    if count < LEAST_DAYS:
        return _none(count, f"{count} days are known, {LEAST_DAYS} are needed")
    end_us = int(day_us[-1]) + DAY_US
    days = (day_us - day_us[-1]) / DAY_US  # the end of the newest day is day 0
    slopes, levels = theil_sen(days, used)
    slope, level = float(slopes), float(levels)
    r2 = explained(days, used, slope, level)
    if slope <= FLAT_SHARE * size_bytes:
        return _none(count, "it does not grow", slope, r2)
    if r2 < LEAST_R2:
        return _none(count, f"its use varies too much (the line explains {r2:.0%} of it)", slope, r2)
    wander, share = _wander(days, used, slope)
    moved = share * (float(used[-1]) - level)  # the newest day is day 0
    ahead = (size_bytes - level - moved) / slope
    if ahead > MOST_AHEAD_DAYS:
        return _none(count, f"it has room for more than {MOST_AHEAD_DAYS / 365:.0f} years", slope, r2)
    low, high = _interval(days, used, slope, level, size_bytes, wander, moved)

    def at(ahead_days: float) -> int:
        return max(end_us + round(ahead_days * DAY_US), now_us)

    latest_us = at(high) if high <= MOST_AHEAD_DAYS else None
    return Forecast(count, slope, r2, at(ahead), at(min(low, ahead)), latest_us, "")


def _none(days: int, reason: str, slope: float | None = None, r2: float | None = None) -> Forecast:
    return Forecast(days, slope, r2, None, None, None, reason)


def _interval(
    days: Floats, used: Floats, slope: float, level: float, size: float, wander: float, moved: float
) -> tuple[float, float]:
    """Days ahead between which the pool is full; the second may be infinite."""
    rng = np.random.default_rng(SEED)
    count = len(days)
    left = used - slope * days - level
    left = left - left.mean()
    blocks = -(-count // BLOCK_DAYS)
    starts = rng.integers(0, count, size=(SAMPLES, blocks))
    chosen = (starts[..., None] + np.arange(BLOCK_DAYS)).reshape(SAMPLES, -1)[:, :count] % count
    widened = np.sqrt(count / (count - 2))
    slopes, levels = theil_sen(days, slope * days + level + widened * left[chosen], _some_pairs(count, rng))
    # A walk's steps that add up made the slope what it seems, and those to come move the day.
    slopes = slopes + wander / np.sqrt(days[-1] - days[0]) * rng.standard_t(count - 2, SAMPLES)
    with np.errstate(divide="ignore"):
        ahead = np.where(slopes > 0, (size - levels - moved) / np.where(slopes > 0, slopes, 1.0), np.inf)
    finite = np.where(np.isfinite(ahead), np.maximum(ahead, 0.0), 0.0)
    ahead = np.maximum(ahead + wander * np.sqrt(finite) / slope * rng.standard_normal(SAMPLES), 0.0)
    tail = (1 - COVER) / 2
    ordered = np.sort(ahead)
    return float(ordered[int(tail * SAMPLES)]), float(ordered[int((1 - tail) * SAMPLES)])


def _some_pairs(count: int, rng: np.random.Generator) -> Pairs:
    """So many of all pairs that their median is nearly that of all."""
    first, second = np.triu_indices(count, 1)
    if len(first) <= SAMPLE_PAIRS:
        return first, second
    some = rng.choice(len(first), SAMPLE_PAIRS, replace=False)
    return first[some], second[some]


def _wander(days: Floats, used: Floats, slope: float) -> tuple[float, float]:
    """Of a random walk that the history contains: its standard deviation (a square root of a day), its share.

    The variance of growth over k days is that of noise twice, at any k, and of a walk k times: what it gains
    from one day to a week is the walk's. The share is how much of the newest day's distance from the line is
    where the walk has come to (the gain of a Kalman filter), and not noise. Medians keep outliers out.
    """
    span = min(BLOCK_DAYS, len(days) // 2)
    near, far = (
        (NORMAL_MAD * float(np.median(np.abs(used[lag:] - used[:-lag] - slope * (days[lag:] - days[:-lag])))))
        ** 2
        for lag in (1, span)
    )
    walk = max((far - near) / (span - 1), 0.0)
    if walk == 0:
        return 0.0, 0.0
    noise = max((near - walk) / 2, 0.0)
    known = (walk + np.sqrt(walk * walk + 4 * walk * noise)) / 2
    return float(np.sqrt(walk)), float(known / (known + noise))


def growth_spike(day_us: npt.NDArray[np.int64], used_bytes: Floats, size_bytes: int) -> float | None:
    """How much the newest day has grown, if that is far more than the days before it; else None.

    What has grown while nothing was read is shared by the days of the gap.

    Far more: above their median by ``SPIKE_FACTOR`` times their spread (median absolute deviation), and by
    ``SPIKE_SHARE`` of the pool.
    """
    days = np.diff(day_us[-MOST_DAYS:]) / DAY_US
    grown = np.diff(np.asarray(used_bytes, dtype=np.float64)[-MOST_DAYS:]) / days
    if len(grown) < LEAST_DAYS:
        return None
    before, newest = grown[:-1], float(grown[-1])
    usual = float(np.median(before))
    spread = NORMAL_MAD * float(np.median(np.abs(before - usual)))
    limit = usual + max(SPIKE_FACTOR * spread, SPIKE_SHARE * size_bytes)
    return newest if newest > limit else None
