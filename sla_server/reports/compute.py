"""The report of one agreement and one period, from stored rows: a pure function.

What is stored of a slice is taken as it was judged; nothing is judged again here (``verify`` does). Figures
are those of ``agreements.compliance`` and ``credits``, which the server itself shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, TypeVar

from sla_server.agreements import compliance as sums_from
from sla_server.agreements.compliance import Terms, period_budget, terms_by_version, terms_of
from sla_server.agreements.credits import PeriodCredit, period_credit
from sla_server.agreements.document import (
    AgreementSpec,
    AvailabilityObjective,
    IopsObjective,
    LatencyObjective,
    MeanLatencyObjective,
    Objective,
)
from sla_server.agreements.fields import clock_text, format_duration
from sla_server.agreements.periods import SECOND_US, RollingWindow, Span
from sla_server.agreements.promise import InForce
from sla_server.reports import accounts, findings
from sla_server.reports.accounts import ObjectiveSlices
from sla_server.reports.document import (
    MOST_LISTED,
    CreditedPeriod,
    ObjectiveCreditLine,
    ReportContent,
    ReportedAgreement,
    ReportedBudget,
    ReportedCredits,
    ReportedObjective,
    ReportedPeriod,
)
from sla_server.reports.inputs import MOST_EPISODES, MOST_THROTTLES, ReportInputs
from sla_server.reports.words import duration
from sla_server.services.judging.track import JUDGE_BACK_US

LATE_US: Final = 2 * 86_400 * SECOND_US
"""Late data may revise a slice for so long (``judging.track.OPEN_US``)."""
IN_FLIGHT_US: Final = 3600 * SECOND_US
"""Slices that were just young enough are recorded by then, also through a queue that is behind."""
Item = TypeVar("Item")


def compute_report(inputs: ReportInputs) -> ReportContent:
    """The whole content."""
    period = inputs.period
    every = {name: _slices(inputs, name) for name in inputs.slices}
    of_period = {name: _within(slices, period.bounds) for name, slices in every.items() if slices is not None}
    pending = {name: _unjudged(inputs, slices) for name, slices in of_period.items()}
    left_out: dict[str, int] = {}

    def listed(name: str, items: Sequence[Item]) -> list[Item]:
        if len(items) > MOST_LISTED:
            left_out[name] = len(items) - MOST_LISTED
        return list(items[:MOST_LISTED])

    bad = [(each.name, run) for each in of_period.values() for run in accounts.bad_runs(each)]
    missing = [
        span
        for name, slices in of_period.items()
        for span in accounts.missing_spans(slices, pending[name], _pending_us(inputs))
    ]
    inexact = [span for slices in of_period.values() for span in accounts.inexact_spans(slices)]
    because = _preliminary(inputs, of_period.values())
    notes = _notes(inputs, of_period.values())
    return ReportContent(
        agreement=_agreement(inputs, of_period.values()),
        period=ReportedPeriod(
            text=period.text, kind=period.kind, tz=period.tz, from_us=period.from_us, to_us=period.to_us
        ),
        as_of_us=inputs.as_of_us,
        is_preliminary=bool(because),
        preliminary_because=because,
        objectives=[_objective(inputs, slices, pending[name]) for name, slices in of_period.items()],
        credits=_credits(inputs, {name: each for name, each in every.items() if each is not None}),
        episodes=listed("episodes", findings.episodes_of(inputs, of_period)),
        bad=[accounts.bad_span(*each) for each in listed("bad", bad)],
        missing=listed("missing", missing),
        inexact=listed("inexact", inexact),
        maintenance=listed("maintenance", findings.maintenance_of(inputs, of_period.values())),
        throttling=findings.throttling_of(inputs),
        versions=findings.versions_in(inputs),
        notes=notes,
        left_out=left_out,
    )


def _slices(inputs: ReportInputs, name: str) -> ObjectiveSlices | None:
    """All that were read of an objective; None: no readable version says how they count."""
    terms = terms_by_version(inputs.rows, name)
    by_version = {
        item.version: (item, objective)
        for item in inputs.versions
        for objective in item.agreement.judged
        if objective.name == name
    }
    if not terms:
        return None
    return ObjectiveSlices(name, inputs.slices[name], terms, terms[max(terms)], by_version)


def _within(slices: ObjectiveSlices, bounds: Span) -> ObjectiveSlices:
    """Those that start within."""
    rows = accounts.starting_within(slices.rows, *bounds)
    return ObjectiveSlices(slices.name, rows, slices.terms, slices.last, slices.by_version)


def _unjudged(inputs: ReportInputs, slices: ObjectiveSlices) -> list[Span]:
    spans = accounts.promised_spans(slices, (inputs.period.from_us, inputs.end_us))
    return accounts.gaps(slices, spans)


def _pending_us(inputs: ReportInputs) -> int | None:
    """Where what is not judged yet ends; None: two days later, when all is judged that will ever be."""
    return inputs.end_us if inputs.as_of_us < inputs.period.to_us + LATE_US else None


# -- Objectives


def _objective(inputs: ReportInputs, slices: ObjectiveSlices, unjudged: Sequence[Span]) -> ReportedObjective:
    last = inputs.held_versions[-1]
    agreed = {objective.name: objective for objective in last.agreement.judged}
    is_agreed = slices.name in agreed
    objective = agreed.get(slices.name) or slices.by_version[max(slices.by_version)][1]
    sums = slices.sums
    without, _unknown = slices.without_exclusions
    return ReportedObjective(
        name=slices.name,
        is_agreed=is_agreed,
        metric=objective.indicator.metric,
        promise=promise_text(objective),
        target=objective.budgeting.target,
        promised=promised_ratio(sums),
        is_kept=None if sums.compliance is None else sums.bad_us <= sums.allowed_us + 0.5,
        compliance=sums.compliance,
        compliance_without_exclusions=without.compliance,
        coverage=sums.coverage,
        slices=accounts.counts_of(sums),
        slice_lengths_s=list(sums.lengths_s),
        due_s=(sums.good_us + sums.bad_us) // SECOND_US,
        time=accounts.time_account(slices, sums, unjudged),
        budget=_budget(inputs, slices, sums, terms_of(objective), last),
        reasons=accounts.reasons_of(slices),
        days=accounts.day_figures(slices, inputs.period, inputs.end_us),
    )


def promised_ratio(sums: sums_from.PeriodSums) -> float | None:
    """What all versions promised together of the time that counts."""
    due_us = sums.good_us + sums.bad_us
    return round(1.0 - sums.allowed_us / due_us, 9) if due_us else None


def _budget(
    inputs: ReportInputs,
    slices: ObjectiveSlices,
    sums: sums_from.PeriodSums,
    terms: Terms,
    last: InForce,
) -> ReportedBudget:
    """Of the report's own period; the rest of one that goes on counts by the terms agreed now."""
    bounds = inputs.period.bounds
    spec = last.agreement.spec.model_copy(update={"window": inputs.period.window})
    judged_us = bounds[1]
    if bounds[1] > inputs.as_of_us and last.ended_us is None:
        judged_us = max(*slices.reached_us[-1:], bounds[0], last.applied_us)
    budget = period_budget(sums, spec, terms, bounds, judged_us, last.calendar)
    return ReportedBudget(
        allowed_s=round(budget.total_minutes * 60, 3),
        spent_s=sums.bad_us // SECOND_US,
        left_s=round(budget.minutes_left * 60, 3),
        left_ratio=None if budget.remaining_ratio is None else round(budget.remaining_ratio, 9),
    )


def promise_text(objective: Objective) -> str:
    """An objective in words."""
    match objective:
        case LatencyObjective() | MeanLatencyObjective():
            what = "mean latency"
            if isinstance(objective, LatencyObjective):
                what = f"latency at p{objective.indicator.percentile:g}"
            steps = (
                f"{step.value_ms:g} ms"
                + ("" if step.up_to_iops is None else f" up to {step.up_to_iops:g} I/Os a second")
                for step in objective.demand_curve
            )
            return f"{what} within {', '.join(steps)}"
        case IopsObjective():
            return f"{objective.promised_iops:g} I/Os a second when asked for"
        case AvailabilityObjective():
            return f"no outage of {format_duration(objective.outage)} or more"
    return f"{objective.promised_mbps:g} MB a second when asked for"


# -- Credits


def _credits(inputs: ReportInputs, slices: dict[str, ObjectiveSlices]) -> ReportedCredits:
    spec = inputs.held_versions[-1].agreement.spec
    note = "" if spec.penalties else "the agreement has no penalties"
    periods = []
    for bounds in inputs.credited:
        held = [item for item in inputs.versions if item.applied_us < min(bounds[1], inputs.end_us)]
        if held:
            periods.append(_credited(inputs, slices, bounds, held[-1]))
    is_over = any(period.is_over for period in periods)
    if spec.penalties and periods and not is_over and inputs.period.to_us <= inputs.as_of_us:
        note = "no period of the agreement ends in this one: its credit is in the report of its own period"
    return ReportedCredits(
        penalties=list(spec.penalties), credit_cap=spec.credit_cap, periods=periods, note=note
    )


def _credited(
    inputs: ReportInputs, slices: dict[str, ObjectiveSlices], bounds: Span, item: InForce
) -> CreditedPeriod:
    sums = {name: _within(each, bounds).sums for name, each in slices.items()}
    former = {name: each.last.target for name, each in slices.items()}
    found = period_credit(item.agreement, item.version, sums, bounds, inputs.as_of_us, former)
    is_rolling = isinstance(item.agreement.spec.window, RollingWindow)
    return CreditedPeriod(
        from_us=bounds[0],
        to_us=bounds[1],
        is_over=inputs.period.to_us <= inputs.as_of_us if is_rolling else bounds[1] <= inputs.end_us,
        version=item.version,
        objectives=_credit_lines(found),
        uncapped=found.uncapped,
        credit=found.credit,
    )


def _credit_lines(found: PeriodCredit) -> list[ObjectiveCreditLine]:
    return [
        ObjectiveCreditLine(
            objective=each.objective, target=each.target, compliance=each.compliance, credit=each.credit
        )
        for each in found.objectives
    ]


# -- Whose, and what is not known


def _agreement(inputs: ReportInputs, slices: Iterable[ObjectiveSlices]) -> ReportedAgreement:
    last = inputs.held_versions[-1]
    spec, parties = last.agreement.spec, last.agreement.spec.parties
    spans = [span for each in slices for span in accounts.promised_spans(each, inputs.period.bounds)]
    first_us = max(inputs.held_versions[0].applied_us, inputs.period.from_us)
    ended_us = last.ended_us if last.ended_us is not None else inputs.period.to_us
    return ReportedAgreement(
        name=inputs.name,
        version=last.version,
        priority=spec.priority,
        provider=parties.provider if parties else None,
        customer=parties.customer if parties else None,
        labels=dict(last.agreement.metadata.labels),
        volumes=list(last.volumes),
        clients=list(spec.scope.clients),
        io=spec.scope.io,
        window=window_text(spec),
        service_hours=service_text(spec),
        in_force_from_us=min((span[0] for span in spans), default=first_us),
        in_force_to_us=min(ended_us, inputs.period.to_us),
    )


def window_text(spec: AgreementSpec) -> str:
    """The window in words."""
    if isinstance(spec.window, RollingWindow):
        return f"rolling {format_duration(spec.window.duration)}"
    return f"calendar {spec.window.period} ({spec.window.tz})"


def service_text(spec: AgreementSpec) -> str:
    """Service hours in words."""
    hours = spec.service_hours
    if hours is None or hours.calendar == "always":
        return "always"
    if hours.is_named:
        return f"calendar {hours.calendar}"
    days = ", ".join(hours.days or ("mon", "tue", "wed", "thu", "fri"))
    zone = hours.tz or spec.time_zone
    return f"{days} {clock_text(hours.from_time)} to {clock_text(hours.to_time)} ({zone})"


def _preliminary(inputs: ReportInputs, slices: Iterable[ObjectiveSlices]) -> list[str]:
    """Why the figures may still change; empty: they are final."""
    found = []
    period, now_us = inputs.period, inputs.as_of_us
    ended_us = inputs.held_versions[-1].ended_us
    end_us = period.to_us if ended_us is None else min(ended_us, period.to_us)
    if now_us < end_us:
        found.append("the period has not ended")
    elif now_us < end_us + LATE_US:
        found.append("statistics that arrive late may revise slices until 48 h after the end")
    if now_us >= end_us:
        for each in slices:
            spans = accounts.promised_spans(each, (period.from_us, end_us))
            if spans and not _is_judged(inputs, each.name, spans[-1][1]):
                found.append(f"the last slices of {each.name} are not judged yet")
    if found and any(row["closed_us"] is None for row in inputs.episodes):
        found.append("a violation goes on")
    return found


def _is_judged(inputs: ReportInputs, name: str, end_us: int) -> bool:
    """Whether judging has passed this time, so that nothing until then is still to come.

    The time of asking alone does not say so: the server may have been away, and catch up just now.
    Where no slice of the objective is stored, there may never be one: the other ones say how far judging is,
    as they do where the server was away for so long that the last slices stay unjudged. Where none is judged
    at all (no volume was seen, the agreements have ended), the server's own mark that it was up says it: the
    judge has the same clock, and leaves alone what is older than ``JUDGE_BACK_US``. A clock that is ahead by
    more than that while it is up ends this wait, too.
    """
    if min(inputs.alive_us, inputs.as_of_us) >= end_us + JUDGE_BACK_US + IN_FLIGHT_US:
        return True
    own_us = inputs.judged.get(name, 0)
    if own_us:
        return own_us >= end_us or inputs.judged_us >= end_us + JUDGE_BACK_US
    return inputs.judged_us >= end_us


def _notes(inputs: ReportInputs, slices: Iterable[ObjectiveSlices]) -> list[str]:
    notes = []
    unread = len(inputs.rows) - len(inputs.versions)
    if unread:
        notes.append(f"versions of the agreement that this release cannot read: {unread}")
    for name in inputs.slices:
        if not any(each.name == name for each in slices):
            notes.append(f"slices of {name} are stored, and no readable version has that objective")
    unknown = {each.name: each.without_exclusions[1] for each in slices}
    notes += [
        f"slices of {name} in maintenance that would be neither good nor bad by what is stored: {count}"
        for name, count in unknown.items()
        if count
    ]
    if any(row["closed_us"] is None for row in inputs.episodes):
        notes.append("a violation went on when this was computed: its end is not known")
    since_us = inputs.decisions_from_us
    if inputs.episodes and (since_us is None or since_us > inputs.episodes[0]["opened_us"]):
        notes.append(
            "decisions about the oldest violations are no longer stored: their causes may be unknown"
        )
    if len(inputs.episodes) >= MOST_EPISODES:
        notes.append(f"there were more violations than the {MOST_EPISODES} that were read")
    if len(inputs.throttles) >= MOST_THROTTLES:
        notes.append(f"there were more throttles than the {MOST_THROTTLES} that were read")
    if any(row["volume"] == "" for row in inputs.throttles):
        notes.append("I/Os and delays of throttled groups are not known by volume")
    down_s = (
        findings.union_us(
            (max(row["from_us"], inputs.period.from_us), min(row["to_us"], inputs.end_us))
            for row in inputs.outages
        )
        // SECOND_US
    )
    if down_s:
        notes.append(f"the server itself was down for {duration(down_s)} of the period")
    return notes
