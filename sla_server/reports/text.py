"""A report as lines of text for a terminal, and as CSV for a spreadsheet."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import Final

from sla_server.explanation.words import plural
from sla_server.reports import words
from sla_server.reports.document import IssuedReport, ReportContent, ReportedObjective
from sla_server.reports.words import duration, moment, percent, span

MOST_LINES: Final = 20
"""Of a list in the text; the other forms have all."""
COLUMNS: Final = (
    "agreement",
    "period",
    "objective",
    "scope",
    "from",
    "to",
    "target",
    "compliance",
    "compliance_without_exclusions",
    "coverage",
    "good",
    "bad",
    "no_data",
    "not_applicable",
    "excluded",
    "inexact",
    "due_s",
    "unplanned_s",
    "planned_s",
    "outside_service_s",
    "unjudged_s",
    "budget_allowed_s",
    "budget_left_s",
    "credit",
)
"""``scope`` is ``period`` in one line for each objective, ``day`` in one for each of its days."""


def as_csv(content: ReportContent) -> str:
    """Figures by period and by day; what a figure is not known of is empty."""
    written = io.StringIO()
    table = csv.writer(written, lineterminator="\r\n")  # RFC 4180
    table.writerow(COLUMNS)
    tz = content.period.tz
    for one in content.objectives:
        head = (content.agreement.name, content.period.text, one.name)
        bounds = (_iso(content.period.from_us, tz), _iso(content.period.to_us, tz))
        table.writerow(
            _safe(
                *head, "period", *bounds, one.target, one.compliance, one.compliance_without_exclusions,
                one.coverage, *_states(one), one.due_s, one.time.unplanned_s, one.time.planned_s,
                one.time.outside_service_s, one.time.unjudged_s, one.budget.allowed_s, one.budget.left_s,
                _credit_of(content, one.name),
            )
        )  # fmt: skip
        for day in one.days:
            bounds = (_iso(day.from_us, tz), _iso(day.to_us, tz))
            states = day.slices
            table.writerow(
                _safe(
                    *head, "day", *bounds, one.target, day.compliance, None, day.coverage, states.good,
                    states.bad, states.no_data, states.not_applicable, states.excluded, states.inexact,
                    day.due_s, day.bad_s, None, None, None, None, None, None,
                )
            )  # fmt: skip
    return written.getvalue()


def _states(one: ReportedObjective) -> tuple[int, ...]:
    states = one.slices
    return (
        states.good,
        states.bad,
        states.no_data,
        states.not_applicable,
        states.excluded,
        states.inexact,
    )


def _credit_of(content: ReportContent, objective: str) -> float | None:
    """Of the agreement's own period, where it is the report's."""
    bounds = content.period.from_us, content.period.to_us
    for period in content.credits.periods:
        if (period.from_us, period.to_us) == bounds and content.credits.penalties:
            return next((line.credit for line in period.objectives if line.objective == objective), None)
    return None


def _safe(*values: object) -> list[object]:
    """Names that a spreadsheet would read as a formula get an apostrophe."""
    return [
        f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t") else value
        for value in values
    ]


def _iso(at_us: int, tz: str) -> str:
    return moment(at_us, tz).replace(" ", "T")


# -- Text


def as_text(
    content: ReportContent, issued: IssuedReport | None = None, digest: str = "", *, is_copy: bool = False
) -> str:
    """For a terminal of 80 columns and more; ``is_copy``: names of others are left out."""
    return "\n".join(_lines(content, issued, digest, is_copy=is_copy)) + "\n"


def _lines(
    content: ReportContent, issued: IssuedReport | None, digest: str, *, is_copy: bool
) -> Iterator[str]:
    agreement, period, tz = content.agreement, content.period, content.period.tz
    yield f"{agreement.name}, {period.text}: {span(period.from_us, period.to_us, tz)} ({tz})"
    if agreement.customer:
        yield f"for {agreement.customer} by {agreement.provider}; {agreement.priority}, {agreement.window}"
    if issued is not None:
        yield f"report {issued.report_id}, number {issued.number}, issued {moment(issued.issued_us, tz)}"
        yield f"SHA-256 {digest}" + (" of the whole report; this is a copy" if is_copy else "")
        if is_copy:
            yield "without the names of neighbours and of people of the provider"
        if issued.revises:
            yield f"it takes the place of {issued.revises}:"
            yield from (f"  {each.field}: {each.before} -> {each.after}" for each in issued.revised)
    if content.is_preliminary:
        yield f"PRELIMINARY: {'; '.join(content.preliminary_because)}"
    for one in content.objectives:
        yield ""
        yield from _objective(one)
    yield from _credits(content)
    yield from _episodes(content)
    for title, spans in (("no data", content.missing), ("inexact", content.inexact)):
        lines = [
            f"{each.objective} {span(each.from_us, each.to_us, tz)}: {each.text or each.reason}"
            for each in spans
        ]
        yield from _listed(title, lines)
    lines = [
        f"{span(each.from_us, each.to_us, tz)}: {each.reason}"
        + (f", announced {moment(each.announced_us, tz)}" if each.announced_us is not None else "")
        + (", with less notice than agreed" if each.had_notice is False else "")
        + (": not excused" if each.had_notice is False and not each.slices else "")
        for each in content.maintenance
    ]
    yield from _listed("maintenance", lines)
    yield from _throttling(content)
    yield from _versions(content)
    yield from _listed("notes", content.notes)


def _objective(one: ReportedObjective) -> Iterator[str]:
    verdict = {True: "KEPT", False: "NOT KEPT", None: "nothing to judge"}[one.is_kept]
    until = "" if one.is_agreed else " (no longer agreed)"
    yield f"{one.name}{until}: {one.promise}"
    yield f"  {verdict}: {percent(one.compliance)} of {percent(one.promised or one.target)} promised"
    if edited := words.edited(one):
        yield f"   {edited}"
    if one.compliance_without_exclusions != one.compliance:
        yield f"  without exclusions {percent(one.compliance_without_exclusions)}"
    yield f"  coverage {percent(one.coverage)}; {_slices(one)}"
    budget = one.budget
    over_s = words.overspent(budget)
    left = f"left {duration(budget.left_s)} ({percent(budget.left_ratio, 1)})"
    rest = f"{duration(over_s)} more than allowed" if over_s else left
    yield f"  budget {duration(budget.allowed_s)}, spent {duration(budget.spent_s)}, {rest}"
    time = one.time
    yield (
        f"  unplanned {duration(time.unplanned_s)}, planned {duration(time.planned_s)}, "
        f"no data {duration(time.no_data_s)}, not judged {duration(time.unjudged_s)}"
    )
    yield from (
        f"  {each.state.replace('_', ' ')} {duration(each.time_s)}: {each.text or each.reason or 'no reason'}"
        for each in one.reasons
    )


def _slices(one: ReportedObjective) -> str:
    states = one.slices
    parts = [
        f"{words.count(getattr(states, name))} {name.replace('_', ' ')}"
        for name in ("good", "bad", "no_data", "not_applicable", "excluded")
        if getattr(states, name)
    ]
    return f"slices: {', '.join(parts) or 'none'}"


def _credits(content: ReportContent) -> Iterator[str]:
    tz, credits = content.period.tz, content.credits
    lines = []
    for each in credits.periods if credits.penalties else ():
        so_far = "" if each.is_over else " so far"
        capped = f" ({percent(each.uncapped)} without the cap)" if each.uncapped > each.credit else ""
        lines.append(f"{span(each.from_us, each.to_us, tz)}{so_far}: {percent(each.credit)}{capped}")
    if credits.note:
        lines.append(credits.note)
    yield from _listed("credit", lines)


def _episodes(content: ReportContent) -> Iterator[str]:
    tz = content.period.tz
    lines = [
        f"{each.objective} {span(each.opened_us, each.closed_us, tz)}, "
        f"{duration(each.in_period_s)}: {each.cause_text}"
        for each in content.episodes
    ]
    yield from _listed("violations", lines)


def _throttling(content: ReportContent) -> Iterator[str]:
    found = content.throttling
    for title, volumes in (
        ("slowed down for it", found.others),
        ("its own, slowed down for others or by hand", found.own),
    ):
        lines = [
            f"{each.volume}: {duration(each.throttled_s)} in {plural(each.throttles, 'throttle')}"
            + (f", I/Os held back for {duration(each.delayed_s)}" if each.delayed_s is not None else "")
            for each in volumes
        ]
        yield from _listed(title, lines)


def _versions(content: ReportContent) -> Iterator[str]:
    tz, lines = content.period.tz, []
    for each in content.versions if len(content.versions) > 1 else ():
        lines.append(f"version {each.version} {span(each.from_us, each.to_us, tz)} by {each.applied_by}")
        lines += [f"  {one.field}: {one.before} -> {one.after}" for one in each.changes]
    yield from _listed("versions", lines)


def _listed(title: str, lines: list[str]) -> Iterator[str]:
    if not lines:
        return
    yield ""
    yield f"{title}:"
    yield from (f"  {line}" for line in lines[:MOST_LINES])
    if len(lines) > MOST_LINES:
        yield f"  and {len(lines) - MOST_LINES} more: -o json has all"
