"""Compliance of one objective: its judged slices, error budget, burn rate, and the alerts that are active.

``SliceHistory`` keeps the judged slices, so that sums over any window are a few additions; ``Budget`` and the
burn-rate functions are arithmetic over such sums; ``standing`` puts them together for the live snapshot.
Pure: functions of the objective, its slices and the time (SLA-MODEL.md 2).
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from sla_server.agreements import periods
from sla_server.agreements.document import NoDataPolicy, Objective
from sla_server.agreements.periods import CalendarWindow
from sla_server.agreements.promise import InForce
from sla_server.agreements.slices import State


@dataclass(frozen=True, slots=True)
class ObjectiveStatus:
    """Figures of one objective over the period that ``now_us`` lies in.

    Attributes:
        burn_1h: over the last hour, 0 with fewer than 3 bad slices in it
        alerts: names of the burn-rate pairs that are active, and ``consecutive`` for 10 bad slices in a row
    """

    name: str
    objective: str
    period_start_us: int
    period_end_us: int
    counts: Counts
    compliance: float | None
    coverage: float | None
    budget: Budget
    burn_1h: float
    consecutive_bad: int
    alerts: frozenset[str]

    @property
    def key(self) -> tuple[str, str]:
        """(agreement, objective)."""
        return self.name, self.objective

    def snapshot(self) -> dict[str, Any]:
        """The keys this adds to an entry of ``slas`` (messages.md, "Live snapshot")."""
        return {
            "compliance": self.compliance,
            "coverage": self.coverage,
            "budget_remaining": self.budget.remaining_ratio,
            "budget_minutes_left": self.budget.minutes_left,
            "slices": self.counts.states(),
        }


def standing(
    item: InForce, objective: Objective, history: SliceHistory, judged_to_us: int, now_us: int
) -> ObjectiveStatus:
    """Compute the figures.

    Args:
        item: the agreement's version in force.
        objective: one of its judged objectives.
        history: its judged slices.
        judged_to_us: end of the newest judged slice; alerts look back from here.
        now_us: wall clock.
    """
    spec = item.agreement.spec
    start_us, end_us = periods.period_bounds(spec.window, now_us)
    counts = history.counts(start_us, end_us)
    good, bad = eligible(counts, objective.no_data)
    slice_us = history.length_us
    target = objective.budgeting.target
    if isinstance(spec.window, CalendarWindow):
        ahead_us = periods.service_us(
            spec.service_hours,
            max(judged_to_us, start_us, item.applied_us),
            end_us,
            spec.time_zone,
            item.calendar,
        )
        possible = good + bad + ahead_us / slice_us
    else:
        in_service_us = periods.service_us(
            spec.service_hours, start_us, end_us, spec.time_zone, item.calendar
        )
        measured_out = counts.not_applicable + counts.no_data + counts.good + counts.bad - good - bad
        possible = in_service_us / slice_us - measured_out
    burn_1h, in_a_row, active = _burning(objective, history, end_us - start_us, judged_to_us)
    return ObjectiveStatus(
        name=item.name,
        objective=objective.name,
        period_start_us=start_us,
        period_end_us=end_us,
        counts=counts,
        compliance=compliance_ratio(good, bad),
        coverage=coverage_ratio(counts),
        budget=error_budget(target, possible, bad, objective.budgeting.slice_s),
        burn_1h=burn_1h,
        consecutive_bad=in_a_row,
        alerts=active,
    )


def _burning(
    objective: Objective, history: SliceHistory, period_us: int, judged_to_us: int
) -> tuple[float, int, frozenset[str]]:
    """Burn rate over the last hour, bad slices in a row, and active alerts."""
    slice_us, target = history.length_us, objective.budgeting.target
    alerts = burn_alerts(period_us, slice_us, target)
    back_us = max(HOUR_US, LOOK_BACK_SLICES * slice_us, *(alert.long_us for alert in alerts))
    if history.is_clean_since(judged_to_us - back_us):
        return 0.0, 0, frozenset()  # nearly all, nearly always
    good, bad = eligible(history.counts(judged_to_us - HOUR_US, judged_to_us), objective.no_data)
    burn_1h = burn_rate(good, bad, target) if bad >= MIN_BAD_SLICES else 0.0
    in_a_row = consecutive_bad(history, judged_to_us, objective.no_data)
    active = {
        alert.name
        for alert in alerts
        if alert_is_active(alert, history, judged_to_us, target, objective.no_data)
    }
    if in_a_row >= CONSECUTIVE_BAD:
        active.add("consecutive")
    return burn_1h, in_a_row, frozenset(active)


# -- Compliance, error budget and burn rate
#
# Terms: *eligible* = good + bad, where a no_data slice is taken as good, bad or neither by the objective's
# policy.
#
# - compliance = good / eligible, between 0 and 1, or None while nothing is eligible.
# - coverage = (good + bad + not_applicable) / (all judged - excluded), by the states themselves.
# - budget: (1 - target) * the slices that may become eligible in the whole period. For a calendar period
#   these are the eligible ones so far and those still to come within service hours; for a rolling window all
#   of the window but those judged otherwise (time before the agreement existed counts as kept).
# - burn rate over w = (bad_w / eligible_w) / (1 - target): 1 spends exactly the budget by the period's end.
# - an alert needs both its windows above its factor, and 3 bad slices in the long one. A factor is the share
#   of the budget spent over the long window, divided by that window's share of the period (2 % in 1 h of 30 d
#   = 14.4); windows shrink and grow with the period, and a factor is capped at 0.9 / (1 - target), since a
#   burn rate cannot exceed 1 / (1 - target).


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


# -- The judged slices of one objective
#
# One code for each slice; index = (start - origin) / length; 0 = never judged. The newest 1,024 to 2,047 are
# kept as they are, a byte each. Older ones are *sealed*, 1,024 in a chunk: how many there are of each code,
# then the codes, compressed. A chunk of one code, which most are, is the same object in all histories, so a
# year of good minutes is 6 KB and not half a megabyte; of minutes that change at random a chunk is some 400
# bytes. A window is summed from the chunks' counts, only its ends are unpacked; a late revision unpacks one
# chunk and seals it again.
#
# Slices of an agreement whose slice length was edited keep their own start; a history has one length, and
# ``put`` refuses starts that are not on its grid (the caller drops judgements of another length).


UNJUDGED: Final = 0
GOOD: Final = 1
BAD: Final = 2
NO_DATA: Final = 3
NO_DATA_OURS: Final = 4
NOT_APPLICABLE: Final = 5
EXCLUDED: Final = 6
_CODES: Final[dict[str, int]] = {
    "good": GOOD,
    "bad": BAD,
    "no_data": NO_DATA,
    "not_applicable": NOT_APPLICABLE,
    "excluded": EXCLUDED,
}
_DOUBTFUL: Final = frozenset((BAD, NO_DATA, NO_DATA_OURS))
_CHUNK: Final = 1024  # 17 hours of minutes
_HEAD: Final = struct.Struct("<7H")  # how many slices of each code


def code_of(state: State | str, ours: bool) -> int:
    """The byte of a judged slice.

    Raises:
        KeyError: no such state.
    """
    code = _CODES[state]
    return NO_DATA_OURS if code == NO_DATA and ours else code


@dataclass(frozen=True, slots=True)
class Counts:
    """Slices by state within a range. ``no_data`` includes ``no_data_ours``."""

    good: int = 0
    bad: int = 0
    no_data: int = 0
    no_data_ours: int = 0
    not_applicable: int = 0
    excluded: int = 0
    unjudged: int = 0

    def states(self) -> dict[str, int]:
        """As in the live snapshot."""
        return {
            "good": self.good,
            "bad": self.bad,
            "no_data": self.no_data,
            "not_applicable": self.not_applicable,
            "excluded": self.excluded,
        }


def _seal(codes: bytes | bytearray) -> bytes:
    counts = np.bincount(np.frombuffer(codes, np.uint8), minlength=EXCLUDED + 1)
    sealed = _HEAD.pack(*counts.tolist()) + zlib.compress(codes, 1)
    return _COMMON.setdefault(sealed, sealed) if counts.max() == _CHUNK else sealed


def _unseal(sealed: bytes) -> bytes:
    return zlib.decompress(sealed[_HEAD.size :])


_COMMON: Final[dict[bytes, bytes]] = {}  # chunks of one code, at most seven


class SliceHistory:
    """Codes on a grid of slices. Belongs to one thread."""

    def __init__(self, length_us: int, origin_us: int) -> None:
        self.length_us = length_us
        self._origin = origin_us // length_us
        self._sealed: list[bytes] = []
        self._open = bytearray()
        self._doubtful = -1  # newest slice on the grid that was ever put as bad or without data

    def put(self, start_us: int, code: int) -> bool:
        """Set the slice that starts here; False if it is before the origin or off the grid."""
        index, rest = divmod(start_us, self.length_us)
        index -= self._origin
        if rest or index < 0:
            return False
        if code in _DOUBTFUL:
            self._doubtful = max(self._doubtful, start_us // self.length_us)
        chunk, at = divmod(index, _CHUNK)
        if chunk < len(self._sealed):
            codes = bytearray(_unseal(self._sealed[chunk]))
            codes[at] = code
            self._sealed[chunk] = _seal(codes)
            return True
        at = index - len(self._sealed) * _CHUNK
        self._open.extend(bytes(max(0, at + 1 - len(self._open))))
        self._open[at] = code
        while len(self._open) >= 2 * _CHUNK:
            self._sealed.append(_seal(bytes(self._open[:_CHUNK])))
            del self._open[:_CHUNK]
        return True

    def is_clean_since(self, from_us: int) -> bool:
        """Whether no slice that starts then or later was ever put as bad or without data."""
        return self._doubtful * self.length_us < from_us

    def get(self, start_us: int) -> int:
        """Code of the slice that starts here, UNJUDGED if there is none."""
        part = self.codes(start_us, start_us + self.length_us)
        return int(part[0]) if part.size else UNJUDGED

    def forget_before(self, start_us: int) -> None:
        """Drop what starts before, whole chunks only."""
        drop = max(0, min((start_us // self.length_us - self._origin) // _CHUNK, len(self._sealed)))
        del self._sealed[:drop]
        self._origin += drop * _CHUNK

    @property
    def size_bytes(self) -> int:
        """Memory of the codes, those shared with other histories left out."""
        own = sum(len(sealed) for sealed in self._sealed if sealed not in _COMMON)
        return own + len(self._open) + 8 * len(self._sealed)

    def codes(self, from_us: int, to_us: int) -> npt.NDArray[np.uint8]:
        """Codes of the slices that start in [from_us, to_us), oldest first.

        Shorter than the range before the origin and beyond the newest slice stored.
        """
        return np.frombuffer(self._between(*self._range(from_us, to_us)), np.uint8)

    def _range(self, from_us: int, to_us: int) -> tuple[int, int]:
        """First index, and the one behind the last."""
        low = max(-(-from_us // self.length_us) - self._origin, 0)
        high = max(-(-to_us // self.length_us) - self._origin, low)
        end = len(self._sealed) * _CHUNK + len(self._open)
        return min(low, end), min(high, end)

    def _between(self, low: int, high: int) -> bytes:
        border = len(self._sealed) * _CHUNK
        if low >= border:
            return bytes(self._open[low - border : high - border])
        first, last = low // _CHUNK, min(-(-high // _CHUNK), len(self._sealed))
        old = b"".join(map(_unseal, self._sealed[first:last]))
        return old[low - first * _CHUNK : high - first * _CHUNK] + self._open[: max(high - border, 0)]

    def counts(self, from_us: int, to_us: int) -> Counts:
        """Slices by state that start in [from_us, to_us)."""
        total = max(-(-to_us // self.length_us) + (from_us // -self.length_us), 0)
        low, high = self._range(from_us, to_us)
        first, last = -(-low // _CHUNK), min(high // _CHUNK, len(self._sealed))
        if first < last:
            ends = self._between(low, first * _CHUNK) + self._between(last * _CHUNK, high)
            whole = [_HEAD.unpack_from(sealed) for sealed in self._sealed[first:last]]
            found = [sum(column) + ends.count(code) for code, column in enumerate(zip(*whole, strict=True))]
        else:
            part = self._between(low, high)
            found = [part.count(code) for code in range(EXCLUDED + 1)]
        return Counts(
            good=found[GOOD],
            bad=found[BAD],
            no_data=found[NO_DATA] + found[NO_DATA_OURS],
            no_data_ours=found[NO_DATA_OURS],
            not_applicable=found[NOT_APPLICABLE],
            excluded=found[EXCLUDED],
            unjudged=total - sum(found[GOOD:]),
        )
