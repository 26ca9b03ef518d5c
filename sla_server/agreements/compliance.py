"""Compliance of one objective: its judged slices, error budget, burn rate, and the alerts that are active.

An agreement may be edited within a period, and its slices may then have another length, another target or
another policy for missing data. What was judged stays judged: a period is the sum of its parts, each under
the ``Terms`` of the version that judged it, *by time*. A slice of five minutes weighs five times one of a
minute.

``JudgedTime`` keeps the judged slices, so that sums over any window are a few additions; ``PeriodSums`` are
such sums, from it or from rows of SQL; ``Budget`` and the burn-rate functions are arithmetic over them;
``standing`` puts them together for the live snapshot, ``past_period`` for any other period.
Pure: functions of the objective, its slices and the time (SLA-MODEL.md 2).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Final, Literal, get_args

import numpy as np
import numpy.typing as npt

from sla_server.agreements import periods
from sla_server.agreements.calendars import CalendarInForce
from sla_server.agreements.document import AgreementSpec, NoDataPolicy, Objective, Window
from sla_server.agreements.fields import parse_duration_s
from sla_server.agreements.periods import CalendarWindow, RollingWindow, Span
from sla_server.agreements.promise import InForce
from sla_server.agreements.slice_history import (
    BAD,
    DECIDED,
    EXCLUDED,
    GOOD,
    NO_DATA,
    NO_DATA_OURS,
    Counts,
    SliceHistory,
)

SECOND_US: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class ObjectiveStatus:
    """Figures of one objective over the period that ``now_us`` lies in.

    Attributes:
        counts: slices of the period, whatever their length
        compliance, coverage: shares of time, None while nothing was judged that counts
        burn_1h: over the last hour, 0 with fewer than 3 bad slices in it
        alerts: names of the burn-rate pairs that are active, and ``consecutive`` for 10 bad slices in a row
        judged_us: (good, bad) time judged since this process began, late revisions left out: it only grows
        shown: of an objective that control does not look at: its entry of ``slas``, from its newest slice
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
    target: float
    judged_us: tuple[int, int] = (0, 0)
    shown: Mapping[str, Any] | None = None

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
    item: InForce, objective: Objective, slices: JudgedTime, judged_to_us: int, now_us: int
) -> ObjectiveStatus:
    """Compute the figures.

    Args:
        item: the agreement's version in force.
        objective: one of its judged objectives.
        slices: its judged slices, those of earlier versions among them.
        judged_to_us: end of the newest judged slice; alerts look back from here.
        now_us: wall clock.
    """
    spec, terms = item.agreement.spec, terms_of(objective)
    bounds = periods.period_bounds(spec.window, now_us)
    sums = slices.sums(*bounds)
    judged_us = max(judged_to_us, bounds[0], item.applied_us)
    burn_1h, in_a_row, active = _burning(terms, slices, bounds[1] - bounds[0], judged_to_us)
    return ObjectiveStatus(
        name=item.name,
        objective=objective.name,
        period_start_us=bounds[0],
        period_end_us=bounds[1],
        counts=sums.counts,
        compliance=sums.compliance,
        coverage=sums.coverage,
        budget=period_budget(sums, spec, terms, bounds, judged_us, item.calendar),
        burn_1h=burn_1h,
        consecutive_bad=in_a_row,
        alerts=active,
        target=terms.target,
    )


@dataclass(frozen=True, slots=True)
class PastPeriod:
    """What became of an objective in one period, from its stored slices.

    Attributes:
        is_over: whether the period has ended; what is said of one that goes on is so far
        budget_remaining: share of the error budget that was left, negative if overspent; None before the end
            of a calendar period
    """

    from_us: int
    to_us: int
    is_over: bool
    sums: PeriodSums
    budget_remaining: float | None

    def as_dict(self) -> dict[str, Any]:
        """As the API answers."""
        sums = self.sums
        return {
            "from_us": self.from_us,
            "to_us": self.to_us,
            "is_over": self.is_over,
            "compliance": sums.compliance,
            "coverage": sums.coverage,
            "budget_remaining": self.budget_remaining,
            "slices": sums.counts.states(),
            "no_data_ours": sums.counts.no_data_ours,
            "inexact": sums.inexact,
            **sums.by_time(),
        }


def past_period(
    spec: AgreementSpec,
    terms: Terms,
    bounds: Span,
    sums: PeriodSums,
    now_us: int,
    calendar: Sequence[CalendarInForce] = (),
) -> PastPeriod:
    """Compute the figures of a period.

    Args:
        spec: as agreed now: its window, and its service hours for time that no slice was judged of.
        terms: as agreed now.
        bounds: [start, end) of the period, us UTC.
        sums: newest revisions of the slices that start in it.
        now_us: wall clock.
        calendar: versions of the calendar that its service hours name.
    """
    is_rolling = isinstance(spec.window, RollingWindow)
    is_over = bounds[1] < now_us if is_rolling else bounds[1] <= now_us
    budget = period_budget(sums, spec, terms, bounds, bounds[1], calendar)
    remaining = budget.remaining_ratio if is_over or is_rolling else None
    return PastPeriod(*bounds, is_over=is_over, sums=sums, budget_remaining=remaining)


def agreed_periods(
    windows: Sequence[tuple[int, Window]], now_us: int, most: int, most_rolling: int = 1
) -> list[Span]:
    """As ``periods.periods_back``; where the window was edited, an ended period keeps the one it ended under.

    The first period of a new window begins where the last of the old one ended: no time is lost or counts
    twice. Under a rolling window nothing ends.

    Args:
        windows: (from when in force, window) of the versions, oldest first; at least one.
        now_us: wall clock.
        most: how many periods.
        most_rolling: how many of a rolling window.
    """
    edits = [each for i, each in enumerate(windows) if i == 0 or each[1] != windows[i - 1][1]]
    edits[0] = 0, edits[0][1]
    since_us, newest = edits[-1]
    is_rolling = isinstance(newest, RollingWindow)  # such a period is not cut
    spans = periods.periods_back(newest, now_us, most_rolling if is_rolling else most)
    found = [span for i, span in enumerate(spans) if i == 0 or span[1] > since_us]
    if len(edits) == 1 or (not is_rolling and found[-1][0] > since_us):
        return found
    for from_us, window in reversed(edits[:-1]):
        at_us, since_us = periods.period_bounds(window, since_us)[0], from_us
        is_rolling = is_rolling or isinstance(window, RollingWindow)
        if isinstance(window, RollingWindow) or at_us <= from_us:
            continue  # none ended under it
        if not is_rolling:
            found[-1] = (at_us, found[-1][1])
        is_rolling = False
        while at_us > from_us:
            if len(found) >= most:
                return found
            found.append(periods.period_bounds(window, at_us - 1))
            at_us = found[-1][0]
    return found


def _burning(
    terms: Terms, slices: JudgedTime, period_us: int, judged_to_us: int
) -> tuple[float, int, frozenset[str]]:
    """Burn rate over the last hour, bad slices in a row, and active alerts."""
    alerts = burn_alerts(period_us, terms.length_us, terms.target)
    back_us = max(HOUR_US, LOOK_BACK_SLICES * terms.length_us, *(alert.long_us for alert in alerts))
    if slices.is_clean_since(judged_to_us - back_us):
        return 0.0, 0, frozenset()  # nearly all, nearly always
    hour = slices.sums(judged_to_us - HOUR_US, judged_to_us)
    burn_1h = hour.burn_rate(terms.target) if hour.bad >= MIN_BAD_SLICES else 0.0
    in_a_row = consecutive_bad(slices, judged_to_us, LOOK_BACK_SLICES * terms.length_us)
    active = {alert.name for alert in alerts if alert_is_active(alert, slices, judged_to_us, terms.target)}
    if in_a_row >= CONSECUTIVE_BAD:
        active.add("consecutive")
    return burn_1h, in_a_row, frozenset(active)


# -- The terms of a version, and sums of slices by time
#
# *eligible* = good + bad, where a no_data slice is taken as good, bad or neither by the policy of the version
# that judged it.


@dataclass(frozen=True, slots=True)
class Terms:
    """How the slices of one version of an objective count."""

    length_us: int
    target: float
    no_data: NoDataPolicy


@lru_cache(maxsize=4096)
def _terms(length_us: int, target: float, no_data: NoDataPolicy) -> Terms:
    """One object for all objectives alike: a fleet has tens of thousands."""
    return Terms(length_us, target, no_data)


def terms_of(objective: Objective) -> Terms:
    """Those of an objective as it was agreed."""
    budgeting = objective.budgeting
    return _terms(budgeting.slice_s * SECOND_US, budgeting.target, objective.no_data)


def terms_by_version(rows: Iterable[Mapping[str, Any]], objective: str) -> dict[int, Terms]:
    """Version to terms of one objective, from rows of ``agreements`` with ``spec`` decoded.

    Versions without the objective are left out, and those that another release stored in a form of its own.
    """
    found: dict[int, Terms] = {}
    for row in rows:
        for one in agreed_objectives(row):
            if one.get("name") != objective:
                continue
            try:
                budgeting, no_data = one["budgeting"], one["no_data"]
                length_us = parse_duration_s(budgeting["slice"]) * SECOND_US
                if no_data in get_args(NoDataPolicy):
                    found[row["version"]] = _terms(length_us, float(budgeting["target"]), no_data)
            except (KeyError, TypeError, ValueError):
                continue
    return found


def agreed_objectives(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The objectives of a row of ``agreements``, as its document has them."""
    objectives = ((row.get("spec") or {}).get("spec") or {}).get("objectives")
    return [one for one in objectives or [] if isinstance(one, dict)]


@dataclass(frozen=True, slots=True)
class PeriodSums:
    """Judged slices of a span, all its parts together.

    Attributes:
        counts: slices by state, whatever their length
        good, bad: eligible slices, no_data counted as each version says
        good_us, bad_us: their time
        measured_us: time that was measured: good, bad and not applicable
        judged_us: the same and that without data; excluded slices are left out
        allowed_us: time that was allowed to be bad so far: of each part (1 - target) of what was eligible
        lengths_s: of the slices, shortest first
        inexact: slices that were judged good or bad on an upper bound
    """

    counts: Counts = field(default_factory=Counts)
    good: int = 0
    bad: int = 0
    good_us: int = 0
    bad_us: int = 0
    measured_us: int = 0
    judged_us: int = 0
    allowed_us: float = 0.0
    lengths_s: tuple[int, ...] = ()
    inexact: int = 0

    @property
    def compliance(self) -> float | None:
        """Share of eligible time that was good; None while nothing is eligible."""
        return self.good_us / (self.good_us + self.bad_us) if self.good_us + self.bad_us else None

    @property
    def coverage(self) -> float | None:
        """Share of judged time, excluded slices apart, that was measured."""
        return self.measured_us / self.judged_us if self.judged_us else None

    def burn_rate(self, target_ratio: float) -> float:
        """How many times faster than allowed the budget is spent; 0 while nothing is eligible."""
        if not self.bad_us:
            return 0.0
        return self.bad_us / (self.good_us + self.bad_us) / (1.0 - target_ratio)

    def by_time(self) -> dict[str, Any]:
        """What the ratios rest on, as the API answers: seconds, and the lengths of the slices."""
        due_us = self.good_us + self.bad_us
        return {
            "bad_s": self.bad_us // SECOND_US,
            "due_s": due_us // SECOND_US,
            "slice_lengths_s": list(self.lengths_s),
        }


def add_up(parts: Iterable[tuple[Terms, Counts]], inexact: int = 0) -> PeriodSums:
    """The sums of a span from its parts; two of the same terms are two parts."""
    good = bad = good_us = bad_us = measured_us = judged_us = 0
    allowed_us, lengths = 0.0, set[int]()
    states = [0] * len(_STATES)
    for terms, counts in parts:
        length_us = terms.length_us
        more_good, more_bad = eligible(counts, terms.no_data)
        measured = counts.good + counts.bad + counts.not_applicable
        good, bad = good + more_good, bad + more_bad
        good_us, bad_us = good_us + more_good * length_us, bad_us + more_bad * length_us
        measured_us += measured * length_us
        judged_us += (measured + counts.no_data) * length_us
        allowed_us += (1.0 - terms.target) * (more_good + more_bad) * length_us
        if measured + counts.no_data + counts.excluded:
            lengths.add(length_us // SECOND_US)
        states = [count + getattr(counts, name) for count, name in zip(states, _STATES, strict=True)]
    counts = Counts(**dict(zip(_STATES, states, strict=True)))
    return PeriodSums(
        counts,
        good,
        bad,
        good_us,
        bad_us,
        measured_us,
        judged_us,
        allowed_us,
        tuple(sorted(lengths)),
        inexact,
    )


_STATES: Final = ("good", "bad", "no_data", "no_data_ours", "not_applicable", "excluded")


def sums_of_rows(
    rows: Iterable[Mapping[str, Any]], versions: Mapping[int, Terms], otherwise: Terms
) -> PeriodSums:
    """The sums of a span from rows of ``SqlReader.slice_sums``.

    Args:
        rows: version, state, ours, inexact, length_us and n.
        versions: terms by version (``terms_by_version``).
        otherwise: of a version whose terms are not known; slices have the length of their row.
    """
    parts: dict[Terms, dict[str, int]] = {}
    inexact = 0
    for row in rows:
        terms = terms_for(row, versions, otherwise)
        states = parts.setdefault(terms, dict.fromkeys(_STATES, 0))
        states[row["state"]] += row["n"]
        states["no_data_ours"] += row["n"] if row["state"] == "no_data" and row["ours"] else 0
        inexact += row["n"] if row["inexact"] and row["state"] in DECIDED else 0
    return add_up(((terms, Counts(**states)) for terms, states in parts.items()), inexact)


def terms_for(row: Mapping[str, Any], versions: Mapping[int, Terms], otherwise: Terms) -> Terms:
    """By which terms a stored slice counts: those of its version, else others of its length."""
    terms = versions.get(row["version"], otherwise)
    return terms if terms.length_us == row["length_us"] else replace(terms, length_us=row["length_us"])


class JudgedTime:
    """The judged slices of one objective over all its versions: a history for each terms.

    Belongs to one thread.
    """

    def __init__(self) -> None:
        self._parts: list[tuple[Terms, SliceHistory]] = []

    def put(self, terms: Terms, start_us: int, code: int) -> bool:
        """Set a slice; False if it is off the grid, or before the first one of these terms."""
        history = next((history for known, history in self._parts if known == terms), None)
        if history is None:
            history = SliceHistory(terms.length_us, start_us)
            self._parts.append((terms, history))
        return history.put(start_us, code)

    def sums(self, from_us: int, to_us: int) -> PeriodSums:
        """Of the slices that start in [from_us, to_us)."""
        return add_up((terms, history.counts(from_us, to_us)) for terms, history in self._parts)

    def is_clean_since(self, from_us: int) -> bool:
        """Whether no slice that starts then or later was ever put as one that counts as bad."""
        return all(history.is_free_of(_BAD_CODES[terms.no_data], from_us) for terms, history in self._parts)

    def forget_before(self, start_us: int) -> None:
        """Drop what starts before; some of it may stay."""
        self._parts = [part for part in self._parts if part[1].end_us > start_us]
        for _, history in self._parts:
            history.forget_before(start_us)

    def marks(self, from_us: int, to_us: int) -> npt.NDArray[np.int8]:
        """1 good, -1 bad, 0 neither, of the judged slices that start in [from_us, to_us), oldest first."""
        starts, marks = [], []
        for terms, history in self._parts:
            codes = history.codes(from_us, to_us)
            starts.append(history.starts(from_us, to_us))
            marks.append(_MARKS[terms.no_data][codes])
        if not starts:
            return np.zeros(0, np.int8)
        order = np.argsort(np.concatenate(starts), kind="stable")
        found: npt.NDArray[np.int8] = np.concatenate(marks)[order]
        return found


def mark_of(terms: Terms, code: int) -> int:
    """1 for a slice that counts as good, -1 for one that counts as bad, 0 for one that does not count."""
    return int(_MARKS[terms.no_data][code])


def _marks_of(policy: NoDataPolicy) -> npt.NDArray[np.int8]:
    marks = np.zeros(EXCLUDED + 1, np.int8)
    marks[GOOD], marks[BAD] = 1, -1
    if policy == "good":
        marks[[NO_DATA, NO_DATA_OURS]] = 1
    elif policy == "bad":
        marks[[NO_DATA, NO_DATA_OURS]] = -1
    elif policy == "bad_if_ours":
        marks[NO_DATA_OURS] = -1
    return marks


_MARKS: Final = {policy: _marks_of(policy) for policy in get_args(NoDataPolicy)}
_BAD_CODES: Final = {policy: np.flatnonzero(marks < 0).tolist() for policy, marks in _MARKS.items()}


# -- Error budget, burn rate and alerts
#
# - compliance = good / eligible, between 0 and 1, or None while nothing is eligible; all by time.
# - coverage = (good + bad + not_applicable) / (all judged - excluded), by the states themselves.
# - budget: of each part (1 - its target) of what was eligible, and (1 - the target agreed now) of the rest.
#   The rest of a calendar period is its service hours still to come; of a rolling window, its service hours
#   of which no slice was judged (time before the agreement existed counts as kept).
# - burn rate over w = (bad_w / eligible_w) / (1 - target): 1 spends exactly the budget by the period's end.
# - an alert needs both its windows above its factor, and 3 bad slices in the long one. A factor is the share
#   of the budget spent over the long window, divided by that window's share of the period (2 % in 1 h of 30 d
#   = 14.4); windows shrink and grow with the period, and a factor is capped at 0.9 / (1 - target), since a
#   burn rate cannot exceed 1 / (1 - target). Target and slice length are those agreed now.


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


@dataclass(frozen=True, slots=True)
class Budget:
    """What may still go wrong in the period.

    Attributes:
        total_minutes: bad time that the whole period allows
        remaining_ratio: 1 untouched, 0 spent, negative overspent; None if the period allows nothing at all
        minutes_left: bad time left, never negative
    """

    total_minutes: float
    remaining_ratio: float | None
    minutes_left: float


def error_budget(allowed_us: float, bad_us: float) -> Budget:
    """Budget of a period that allows so much bad time, of which so much was spent."""
    total = max(allowed_us, 0.0)
    remaining = 1.0 - bad_us / total if total > 0 else None
    return Budget(total / MINUTE_US, remaining, max(total - bad_us, 0.0) / MINUTE_US)


MINUTE_US: Final = 60 * SECOND_US


def period_budget(
    sums: PeriodSums,
    spec: AgreementSpec,
    terms: Terms,
    bounds: Span,
    judged_us: int,
    calendar: Sequence[CalendarInForce] = (),
) -> Budget:
    """The budget of a period: of its parts, and of the rest by the terms agreed now.

    Args:
        sums: of the slices judged in it.
        spec: as agreed now: window, service hours.
        terms: as agreed now.
        bounds: [start, end) of the period, us UTC.
        judged_us: until when it is judged; what comes after it in a calendar period is still to come.
        calendar: versions of the calendar that the service hours name.
    """
    hours, zone = spec.service_hours, spec.time_zone
    if isinstance(spec.window, CalendarWindow):
        rest_us = periods.service_us(hours, judged_us, bounds[1], zone, calendar)
    else:
        rest_us = periods.service_us(hours, *bounds, zone, calendar) - sums.judged_us
    return error_budget(sums.allowed_us + (1.0 - terms.target) * max(rest_us, 0), sums.bad_us)


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


def alert_is_active(alert: BurnAlert, slices: JudgedTime, now_us: int, target_ratio: float) -> bool:
    """Whether both windows that end at ``now_us`` (end of the newest slice) burn faster than the factor."""
    sums = slices.sums(now_us - alert.long_us, now_us)
    if sums.bad < MIN_BAD_SLICES or sums.burn_rate(target_ratio) < alert.factor:
        return False
    return slices.sums(now_us - alert.short_us, now_us).burn_rate(target_ratio) >= alert.factor


def consecutive_bad(slices: JudgedTime, now_us: int, back_us: int) -> int:
    """Bad slices since the last good one, at most ``back_us`` back; others are stepped over."""
    found = 0
    for mark in slices.marks(now_us - back_us, now_us)[::-1].tolist():
        if mark > 0:
            break
        found -= mark
    return found
