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
from operator import add, itemgetter
from typing import Final

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
_KIND_OF: Final = itemgetter(*GROUP)
_LENGTH: Final = itemgetter("length_us")
_LENGTH_OF: Final = itemgetter("state", "reason", "length_us")


@dataclass(frozen=True)
class ObjectiveSlices:
    """One objective's slices in the period.

    Attributes:
        rows: newest revisions, oldest first.
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
    def notable(self) -> list[Row]:
        """Those that are more than good: nearly none, nearly always, and lists are made of them alone."""
        return [row for row in self.rows if row["state"] != "good" or row["inexact"]]

    @cached_property
    def lengths_us(self) -> Counter[tuple[str, str, int]]:
        """(state, reason, length) to how many slices have them."""
        return Counter(map(_LENGTH_OF, self.rows))

    @cached_property
    def without_exclusions(self) -> tuple[PeriodSums, int]:
        """The sums as if no maintenance had excused anything, and how many slices are not known then."""
        rows, unknown = [], 0
        if not any(row["state"] == "excluded" for row in self.notable):
            return self.sums, 0
        for row in self.rows:
            if row["state"] == "excluded" and row["reason"] != OUTSIDE:
                state = unexcused_state(row, self.by_version.get(row["version"]))
                if state is None:
                    unknown += 1
                    continue
                row = {**row, "state": state}
            rows.append(row)
        return self.sums_of(rows), unknown


def grouped(rows: Iterable[Row]) -> list[Row]:
    """As ``SqlReader.slice_sums`` gives them: how many slices there are of each kind."""
    counts = Counter(map(_KIND_OF, rows))  # in C: a month has 43,200 rows, and they are counted seven times
    return [dict(zip((*GROUP, "n"), (*key, count), strict=True)) for key, count in counts.items()]


def counts_of(sums: PeriodSums) -> SliceCounts:
    """As a report has them."""
    states = sums.counts.states()
    return SliceCounts(**states, no_data_ours=sums.counts.no_data_ours, inexact=sums.inexact)


def day_figures(slices: ObjectiveSlices, period: ReportPeriod, end_us: int) -> list[DayFigures]:
    """Each day until now."""
    days = [day for day in period.days() if day[1] < end_us]
    firsts = [bisect_left(slices.rows, day[1], key=_START) for day in days]
    found = []
    for (day, from_us, to_us), first, end in zip(days, firsts, [*firsts[1:], len(slices.rows)], strict=True):
        sums = slices.sums_of(slices.rows[first:end])
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
    # Lists of numbers: 43,200 pairs would set the garbage collector off, which takes longer than all else.
    starts = list(map(_START, slices.rows))
    reaches = list(accumulate(map(add, starts, map(_LENGTH, slices.rows)), max))
    begins, ends = [_BEFORE_ALL_US, *reaches], [*starts, _AFTER_ALL_US]
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


def runs(
    rows: Iterable[Row],
    wanted: Callable[[Row], bool],
    key: Callable[[Row], object] = lambda row: row["reason"],
) -> list[list[Row]]:
    """Wanted slices one after the other with equal keys."""
    found: list[list[Row]] = []
    for row in rows:
        if not wanted(row):
            continue
        last = found[-1][-1] if found else None
        follows = last is not None and last["start_us"] + last["length_us"] == row["start_us"]
        if follows and last is not None and key(last) == key(row):
            found[-1].append(row)
        else:
            found.append([row])
    return found


def _head(objective: str, run: Sequence[Row]) -> dict[str, object]:
    reason = run[0]["reason"]
    return {
        "objective": objective,
        "from_us": run[0]["start_us"],
        "to_us": run[-1]["start_us"] + run[-1]["length_us"],
        "slices": len(run),
        "reason": reason,
        "text": REASONS.get(reason, ""),
        "is_ours": bool(run[0]["ours"]),
    }


def bad_runs(slices: ObjectiveSlices) -> list[list[Row]]:
    """Bad slices in a row; a month may have thousands, of which a report lists some."""
    return runs(slices.notable, lambda row: row["state"] == "bad")


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
        for run in runs(
            slices.notable,
            lambda row: row["state"] == "no_data",
            lambda row: (row["reason"], row["ours"]),
        )
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
    return [
        ReportedSpan.model_validate({**_head(slices.name, run), "reason": "inexact", "text": text})
        for run in runs(
            slices.notable,
            lambda row: bool(row["inexact"]) and row["state"] in ("good", "bad"),
            lambda row: row["state"],
        )
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
