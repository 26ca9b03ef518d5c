"""Sums over the slices of one objective in one period: states, time, days, spans. Pure.

A slice counts by the terms of the version that judged it (``agreements.compliance``), and belongs to the day
and the period of its start.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import add, itemgetter, mul
from typing import Any, Final

from sla_server.agreements import periods
from sla_server.agreements.compliance import PeriodSums, Terms, sums_of_rows
from sla_server.agreements.document import Objective
from sla_server.agreements.periods import SECOND_US, Span
from sla_server.agreements.promise import InForce, Promise, promise_of
from sla_server.agreements.slices import REASONS, exceeds
from sla_server.agreements.verdicts import DELIVERED_RATIO, MIN_COVERAGE_RATIO
from sla_server.reports.document import (
    DayFigures,
    ReasonTotal,
    ReportedSpan,
    SliceCounts,
    TimeAccount,
    WorstSpan,
)
from sla_server.reports.period import ReportPeriod
from sla_server.rows import Row

OUTSIDE: Final = "outside service hours"
NOT_JUDGED: Final = "not-judged"
NOT_JUDGED_TEXT: Final = (
    "no slice is stored: nothing was known of the volumes yet, or the server was down for longer than a week"
)
NOT_YET_TEXT: Final = "not judged yet"
GROUP: Final = ("version", "state", "ours", "inexact", "length_us")
"""What slices have in common that count alike."""
_BEFORE_ALL_US: Final = -(1 << 62)
_AFTER_ALL_US: Final = 1 << 62
_START: Final = itemgetter("start_us")
_KIND_OF: Final = itemgetter(*GROUP, "slices")
_LENGTH: Final = itemgetter("length_us")
_SLICES: Final = itemgetter("slices")
_LENGTH_OF: Final = itemgetter("state", "reason", "length_us", "slices")


@dataclass(frozen=True)
class ObjectiveSlices:
    """One objective's slices in the period.

    Attributes:
        rows: newest revisions, oldest first; like ones that follow each other may be one row, with
            ``slices`` of them.
        terms: by version; ``last``: of the newest version that has the objective.
        by_version: version to the objective as it was agreed, with its version.
    """

    name: str
    rows: Sequence[Row]
    terms: Mapping[int, Terms]
    last: Terms
    by_version: Mapping[int, tuple[InForce, Objective]]

    @cached_property
    def sums(self) -> PeriodSums:
        """Of all."""
        return self.sums_of(self.rows)

    def sums_of(self, rows: Iterable[Row]) -> PeriodSums:
        """Of some."""
        return sums_of_rows(grouped(rows), self.terms, self.last)

    @cached_property
    def by_state(self) -> Mapping[str, list[Row]]:
        """Rows by state: lists are made of those that are not good, nearly none of them, nearly always."""
        found: dict[str, list[Row]] = {}
        for row in self.rows:
            found.setdefault(row["state"], []).append(row)
        return found

    @cached_property
    def reached_us(self) -> list[int]:
        """Of each row, until when it and those before it reach."""
        lengths_us = map(mul, map(_LENGTH, self.rows), map(_SLICES, self.rows))
        return list(accumulate(map(add, map(_START, self.rows), lengths_us), max))

    @cached_property
    def lengths_us(self) -> Counter[tuple[str, str, int]]:
        """(state, reason, length) to how many slices have them."""
        return weighted(Counter(map(_LENGTH_OF, self.rows)))

    @cached_property
    def without_exclusions(self) -> tuple[PeriodSums, int]:
        """The sums as if no maintenance had excused anything, and how many slices are not known then."""
        rows, unknown = [], 0
        if "excluded" not in self.by_state:
            return self.sums, 0
        for row in self.rows:
            if row["state"] == "excluded" and row["reason"] != OUTSIDE:
                state = unexcused_state(row, self.by_version.get(row["version"]))
                if state is None:
                    unknown += row["slices"]
                    continue
                row = {**row, "state": state}
            rows.append(row)
        return self.sums_of(rows), unknown


def grouped(rows: Iterable[Row]) -> list[Row]:
    """As ``SqlReader.slice_sums`` gives them: how many slices there are of each kind."""
    counts = weighted(Counter(map(_KIND_OF, rows)))  # in C: rows are many, and are counted seven times
    return [dict(zip((*GROUP, "n"), (*key, count), strict=True)) for key, count in counts.items()]


def weighted(rows: Counter[Any]) -> Counter[Any]:
    """How many slices there are of each key; rows are counted by (*key, slices of a row)."""
    found: Counter[Any] = Counter()
    for (*key, slices), count in rows.items():
        found[tuple(key)] += slices * count
    return found


def end_us_of(row: Row) -> int:
    """Where the last slice of a row ends."""
    end_us: int = row["start_us"] + row["length_us"] * row["slices"]
    return end_us


def starting_within(rows: Sequence[Row], from_us: int, to_us: int) -> list[Row]:
    """Slices that start in [from_us, to_us); rows at the bounds are divided. Oldest first, as ``rows``."""
    first, end = (bisect_left(rows, us, key=_START) for us in (from_us, to_us))
    found = list(rows[first:end])
    if first and (rest := _divided(rows[first - 1], from_us)[1]):
        found.insert(0, rest)
    if found:
        head = _divided(found[-1], to_us)[0]
        found[-1:] = [head] if head else []
    return found


def _divided(row: Row, at_us: int) -> tuple[Row | None, Row | None]:
    """A row as its slices that start before a time, and those that do not."""
    before = -(-(at_us - row["start_us"]) // row["length_us"])
    if before <= 0:
        return None, row
    if before >= row["slices"]:
        return row, None
    start_us = row["start_us"] + before * row["length_us"]
    rest = {**row, "start_us": start_us, "slices": row["slices"] - before}
    return {**row, "slices": before}, rest


def counts_of(sums: PeriodSums) -> SliceCounts:
    """As a report has them."""
    states = sums.counts.states()
    return SliceCounts(**states, no_data_ours=sums.counts.no_data_ours, inexact=sums.inexact)


def day_figures(slices: ObjectiveSlices, period: ReportPeriod, end_us: int) -> list[DayFigures]:
    """Each day until now."""
    days = [day for day in period.days() if day[1] < end_us]
    # Slices of the last day end it, should the period have some behind it.
    ends_us = [*(day[1] for day in days[1:]), _AFTER_ALL_US]
    found = []
    for (day, from_us, to_us), before_us in zip(days, ends_us, strict=True):
        sums = slices.sums_of(starting_within(slices.rows, from_us, before_us))
        found.append(
            DayFigures(
                day=day,
                from_us=from_us,
                to_us=to_us,
                slices=counts_of(sums),
                bad_s=sums.bad_us // SECOND_US,
                due_s=(sums.good_us + sums.bad_us) // SECOND_US,
                compliance=sums.compliance,
                coverage=sums.coverage,
            )
        )
    return found


def gaps(slices: ObjectiveSlices, spans: Iterable[Span]) -> list[Span]:
    """Parts of ``spans`` that no stored slice covers, at least a slice long, in order.

    Rows are in order of their starts.
    """
    # Lists of numbers: pairs would set the garbage collector off, which takes longer than all else.
    begins, ends = [_BEFORE_ALL_US, *slices.reached_us], [*map(_START, slices.rows), _AFTER_ALL_US]
    holes = [(begin, end) for begin, end in zip(begins, ends, strict=True) if begin < end]
    return [
        (max(hole[0], from_us), min(hole[1], to_us))
        for from_us, to_us in spans
        for hole in holes[bisect_right(holes, from_us, key=itemgetter(1)) :]
        if max(hole[0], from_us) < min(hole[1], to_us)
    ]


def promised_spans(slices: ObjectiveSlices, bounds: Span) -> list[Span]:
    """When the objective was agreed within ``bounds``, from its first whole slice on, in whole slices."""
    found: list[Span] = []
    for item, objective in slices.by_version.values():
        length_us = objective.budgeting.slice_s * SECOND_US
        from_us = -(-max(item.applied_us, bounds[0]) // length_us) * length_us
        until_us = bounds[1] if item.ended_us is None else min(item.ended_us, bounds[1])
        to_us = -(-until_us // length_us) * length_us if item.ended_us == until_us else until_us
        if found and found[-1][1] > from_us:
            from_us = found[-1][1]  # the last slice of a version runs to its end
        if from_us < to_us:
            found.append((from_us, min(to_us, max(bounds[1], from_us))))
    return [span for span in found if span[0] < span[1]]


def service_s(slices: ObjectiveSlices, spans: Iterable[Span]) -> tuple[int, int]:
    """(within, outside) service hours of spans, seconds; by the version that held then."""
    inside_us = all_us = 0
    for from_us, to_us in spans:
        all_us += to_us - from_us
        for item, _ in slices.by_version.values():
            begin_us = max(from_us, item.applied_us)
            end_us = to_us if item.ended_us is None else min(to_us, item.ended_us)
            if begin_us >= end_us:
                continue
            spec = item.agreement.spec
            inside_us += periods.service_us(
                spec.service_hours, begin_us, end_us, spec.time_zone, item.calendar
            )
    inside_us = min(inside_us, all_us)
    return inside_us // SECOND_US, (all_us - inside_us) // SECOND_US


def time_account(slices: ObjectiveSlices, sums: PeriodSums, unjudged: Sequence[Span]) -> TimeAccount:
    """Where the time went."""
    of_state = dict.fromkeys(("good", "bad", "no_data", "not_applicable", "planned", "outside"), 0)
    for (state, reason, length_us), count in slices.lengths_us.items():
        if state == "excluded":
            state = "outside" if reason == OUTSIDE else "planned"
        of_state[state] += length_us * count
    seconds = {state: us // SECOND_US for state, us in of_state.items()}
    inside_s, outside_s = service_s(slices, unjudged)
    outside_s += seconds["outside"]
    return TimeAccount(
        all_s=sum(seconds.values()) - seconds["outside"] + inside_s + outside_s,
        good_s=seconds["good"],
        bad_s=seconds["bad"],
        not_applicable_s=seconds["not_applicable"],
        no_data_s=seconds["no_data"],
        planned_s=seconds["planned"],
        outside_service_s=outside_s,
        unjudged_s=inside_s,
        unplanned_s=sums.bad_us // SECOND_US,
    )


def reasons_of(slices: ObjectiveSlices) -> list[ReasonTotal]:
    """Slices that are not good, by state and reason, the longest first."""
    found: dict[tuple[str, str], list[int]] = {}
    for (state, reason, length_us), count in slices.lengths_us.items():
        if state in ("bad", "no_data", "not_applicable"):
            total = found.setdefault((state, reason), [0, 0])
            total[0] += count
            total[1] += length_us * count
    ordered = sorted(found.items(), key=lambda each: (-each[1][1], each[0]))
    return [
        ReasonTotal(
            state=state,  # type: ignore[arg-type]
            reason=reason,
            text=REASONS.get(reason, ""),
            slices=count,
            time_s=us // SECOND_US,
        )
        for (state, reason), (count, us) in ordered
    ]


def runs(rows: Iterable[Row], key: Callable[[Row], object] = lambda row: row["reason"]) -> list[list[Row]]:
    """Slices one after the other with equal keys."""
    found: list[list[Row]] = []
    last_key, reached_us = None, None
    for row in rows:
        row_key = key(row)
        if row["start_us"] == reached_us and row_key == last_key:
            found[-1].append(row)
        else:
            found.append([row])
        last_key, reached_us = row_key, end_us_of(row)
    return found


def _head(objective: str, run: Sequence[Row]) -> dict[str, object]:
    reason = run[0]["reason"]
    return {
        "objective": objective,
        "from_us": run[0]["start_us"],
        "to_us": end_us_of(run[-1]),
        "slices": sum(row["slices"] for row in run),
        "reason": reason,
        "text": REASONS.get(reason, ""),
        "is_ours": bool(run[0]["ours"]),
    }


def bad_runs(slices: ObjectiveSlices) -> list[list[Row]]:
    """Bad slices in a row; a month may have thousands, of which a report lists some."""
    return runs(slices.by_state.get("bad", ()))


def bad_span(objective: str, run: Sequence[Row]) -> WorstSpan:
    """One of ``bad_runs``, with the worst slice of it."""
    worst = max(run, key=lambda row: (row["missed"] / max(row["n"], 1), row["measured"] or 0.0))
    figures = {name: worst[name] for name in ("n", "missed", "threshold_us", "measured")}
    return WorstSpan.model_validate({**_head(objective, run), **figures})


def missing_spans(
    slices: ObjectiveSlices, unjudged: Sequence[Span], pending_us: int | None = None
) -> list[ReportedSpan]:
    """Slices without data in a row, and time in service hours that was not judged.

    Args:
        slices: of the period.
        unjudged: spans that no slice covers.
        pending_us: the last of them, if it ends here, is not judged yet.
    """
    found = [
        ReportedSpan.model_validate(_head(slices.name, run))
        for run in runs(slices.by_state.get("no_data", ()), lambda row: (row["reason"], row["ours"]))
    ]
    for span in unjudged:
        inside_s, _ = service_s(slices, [span])
        if inside_s:
            found.append(
                ReportedSpan(
                    objective=slices.name,
                    from_us=span[0],
                    to_us=span[1],
                    slices=0,
                    reason=NOT_JUDGED,
                    text=NOT_YET_TEXT if span[1] == pending_us else NOT_JUDGED_TEXT,
                )
            )
    return sorted(found, key=lambda span: span.from_us)


def inexact_spans(slices: ObjectiveSlices) -> list[ReportedSpan]:
    """Slices in a row that were judged on an upper bound."""
    text = "judged on an upper bound: the limit was not counted, or the figures were shared out by time"
    decided = (row for state in ("good", "bad") for row in slices.by_state.get(state, ()))
    inexact = sorted((row for row in decided if row["inexact"]), key=_START)
    return [
        ReportedSpan.model_validate({**_head(slices.name, run), "reason": "inexact", "text": text})
        for run in runs(inexact, lambda row: row["state"])
    ]


def unexcused_state(row: Row, agreed: tuple[InForce, Objective] | None) -> str | None:
    """How an excluded slice would have been judged by the figures that are stored of it; None: not known.

    As in ``agreements.verdicts``, but for hangs of single I/Os and the clauses on sizes and reads.
    """
    if (row["coverage_ratio"] or 0.0) < MIN_COVERAGE_RATIO:
        return "no_data"
    if agreed is None:
        return None
    item, objective = agreed
    promise = promise_of(item, objective)
    is_bad = _is_bad(row, promise)
    if is_bad is None:
        return None
    if is_bad and promise.metric == "availability":
        return "bad"  # an outage is bad however little was asked for
    if row["n"] < objective.applicability.min_ios_per_slice:
        return "not_applicable"
    if row["threshold_us"] is None and promise.metric in ("latency", "mean_latency"):
        return "not_applicable"  # above the demand curve
    return "bad" if is_bad else "good"


def _is_bad(row: Row, promise: Promise) -> bool | None:
    measured = row["measured"]
    if promise.metric == "latency":
        return row["threshold_us"] is not None and exceeds(row["missed"], row["n"], promise.percentile)
    if exceeds(row["missed"], row["n"], promise.percentile):
        return True  # of the others ``missed`` are failed I/Os
    if promise.metric == "throughput":
        if measured is not None and measured >= DELIVERED_RATIO * promise.promised:
            return False
        return None if row["n"] else False  # how much was asked for is not stored
    if promise.metric == "iops":
        wanted = min(promise.promised, row["offered_iops"] or 0.0)
        return measured is not None and measured < DELIVERED_RATIO * wanted
    if promise.metric == "availability":
        return measured is not None and measured >= promise.outage_us
    return measured is not None and row["threshold_us"] is not None and measured > row["threshold_us"]
