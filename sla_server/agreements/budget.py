"""Compliance, error budget and burn rate: arithmetic over counts of judged slices (SLA-MODEL.md 2).

Terms: *eligible* = good + bad, where a no_data slice is taken as good, bad or neither by the objective's
policy.

- compliance = good / eligible, between 0 and 1, or None while nothing is eligible.
- coverage = (good + bad + not_applicable) / (all judged - excluded), by the states themselves.
- budget: (1 - target) * the slices that may become eligible in the whole period. For a calendar period
  these are the eligible ones so far and those still to come within service hours; for a rolling window all
  of the window but those judged otherwise (time before the agreement existed counts as kept).
- burn rate over w = (bad_w / eligible_w) / (1 - target): 1 spends exactly the budget by the period's end.
- an alert needs both its windows above its factor, and 3 bad slices in the long one. A factor is the share
  of the budget spent over the long window, divided by that window's share of the period (2 % in 1 h of 30 d
  = 14.4); windows shrink and grow with the period, and a factor is capped at 0.9 / (1 - target), since a
  burn rate cannot exceed 1 / (1 - target).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal

from sla_server.agreements.history import (
    BAD,
    GOOD,
    NO_DATA,
    NO_DATA_OURS,
    Counts,
    SliceHistory,
)
from sla_server.agreements.objectives import NoDataPolicy

HOUR_US: Final = 3_600_000_000
REFERENCE_PERIOD_US: Final = 30 * 24 * HOUR_US
MIN_BAD_SLICES: Final = 3  # one or two bad minutes of a quiet volume are no trend
CONSECUTIVE_BAD: Final = 10
LOOK_BACK_SLICES: Final = 1440  # for bad ones in a row: a day of minutes
MAX_BURN_SHARE: Final = 0.9


def eligible(counts: Counts, policy: NoDataPolicy) -> tuple[int, int]:
    """(good, bad) with no_data slices counted as the policy says."""
    if policy == "good":
        return counts.good + counts.no_data, counts.bad
    if policy == "bad":
        return counts.good, counts.bad + counts.no_data
    if policy == "bad_if_ours":
        return counts.good, counts.bad + counts.no_data_ours
    return counts.good, counts.bad


def compliance_ratio(good: int, bad: int) -> float | None:
    """Share of eligible slices that were good."""
    return good / (good + bad) if good + bad else None


def coverage_ratio(counts: Counts) -> float | None:
    """Share of judged slices, excluded ones apart, that were measured."""
    measured = counts.good + counts.bad + counts.not_applicable
    judged = measured + counts.no_data
    return measured / judged if judged else None


@dataclass(frozen=True, slots=True)
class Budget:
    """What may still go wrong in the period.

    Attributes:
        total_slices: bad slices that the whole period allows (not rounded)
        remaining_ratio: 1 untouched, 0 spent, negative overspent; None if the period allows nothing at all
        minutes_left: bad time left, never negative
    """

    total_slices: float
    remaining_ratio: float | None
    minutes_left: float


def error_budget(target_ratio: float, possible_slices: float, bad: int, slice_s: int) -> Budget:
    """Budget of a period in which ``possible_slices`` may become eligible (those that are included)."""
    total = (1.0 - target_ratio) * max(possible_slices, 0.0)
    remaining = 1.0 - bad / total if total > 0 else None
    return Budget(total, remaining, max(total - bad, 0.0) * slice_s / 60.0)


def burn_rate(good: int, bad: int, target_ratio: float) -> float:
    """How many times faster than allowed the budget is spent; 0 while nothing is eligible."""
    return bad / (good + bad) / (1.0 - target_ratio) if bad else 0.0


@dataclass(frozen=True, slots=True)
class BurnAlert:
    """One pair of windows; ``page`` wakes somebody, ``ticket`` waits until morning."""

    name: str
    urgency: Literal["page", "ticket"]
    long_us: int
    short_us: int
    factor: float


_PAIRS: Final[tuple[tuple[str, Literal["page", "ticket"], float, int, int], ...]] = (
    ("fast", "page", 0.02, HOUR_US, HOUR_US // 12),
    ("medium", "page", 0.05, 6 * HOUR_US, HOUR_US // 2),
    ("slow", "ticket", 0.10, 72 * HOUR_US, 6 * HOUR_US),
)


@lru_cache(maxsize=256)
def burn_alerts(period_us: int, slice_us: int, target_ratio: float) -> tuple[BurnAlert, ...]:
    """The three pairs for a period; at 30 days 14.4 over 1 h and 5 min, 6 over 6 h, 1 over 3 d.

    A long window holds at least the 3 slices that an alert needs, a short one at least one slice.
    """
    alerts = []
    for name, urgency, spent_ratio, long_us, short_us in _PAIRS:
        long_scaled = max(long_us * period_us // REFERENCE_PERIOD_US, MIN_BAD_SLICES * slice_us)
        short_scaled = max(short_us * period_us // REFERENCE_PERIOD_US, slice_us)
        factor = min(spent_ratio * period_us / long_scaled, MAX_BURN_SHARE / (1.0 - target_ratio))
        alerts.append(BurnAlert(name, urgency, long_scaled, short_scaled, factor))
    return tuple(alerts)


def alert_is_active(
    alert: BurnAlert, history: SliceHistory, now_us: int, target_ratio: float, policy: NoDataPolicy
) -> bool:
    """Whether both windows that end at ``now_us`` (end of the newest slice) burn faster than the factor."""
    good, bad = eligible(history.counts(now_us - alert.long_us, now_us), policy)
    if bad < MIN_BAD_SLICES or burn_rate(good, bad, target_ratio) < alert.factor:
        return False
    good, bad = eligible(history.counts(now_us - alert.short_us, now_us), policy)
    return burn_rate(good, bad, target_ratio) >= alert.factor


def consecutive_bad(history: SliceHistory, now_us: int, policy: NoDataPolicy) -> int:
    """Bad slices since the last good one, at most LOOK_BACK_SLICES back; others are stepped over."""
    good = {GOOD} | ({NO_DATA, NO_DATA_OURS} if policy == "good" else set())
    bad = {BAD}
    if policy == "bad":
        bad |= {NO_DATA, NO_DATA_OURS}
    elif policy == "bad_if_ours":
        bad.add(NO_DATA_OURS)
    found = 0
    for code in reversed(history.codes(now_us - LOOK_BACK_SLICES * history.length_us, now_us).tolist()):
        if code in good:
            break
        found += code in bad
    return found
