"""Issuing: from a content to a link of the chain; which reports are due.

A report is due once: when its period has ended for so long that late data revise nothing any more. A later
one of the same period is a revision: a document of its own, which says what it changes. Where nothing has
changed there is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, Literal

from pydantic import ValidationError

from sla_server.agreements.difference import differences
from sla_server.reports.compute import LATE_US, compute_report
from sla_server.reports.document import (
    IssuedReport,
    ReportContent,
    RevisedField,
    canonical,
    digest_of,
    plain,
)
from sla_server.reports.errors import NothingToReport, NotYetFinal
from sla_server.reports.inputs import read_inputs, versions_of
from sla_server.reports.period import PeriodKind, ReportPeriod, period_at, usual_kind
from sla_server.rows import Row

if TYPE_CHECKING:  # rows come in and go out; how is the caller's affair
    from sla_server.db.queries.reader import SqlReader
    from sla_server.db.reports import ChainEnd, ReportStore
    from sla_server.reports.sums import SumsCheck

MOST_REVISED: Final = 200
OTHER_RELEASE: Final = "all: the one before it was issued by another release"
PERIODS_BACK: Final = 2
"""The newest periods that are over: the one before the last is made up for, if the server was away then."""
DueKind = Literal["own"] | PeriodKind


def issue(
    store: ReportStore,
    name: str,
    period: str,
    who: str,
    now_us: int,
    *,
    may_be_preliminary: bool = False,
    only_first: bool = False,
    sums: SumsCheck | None = None,
) -> Row | None:
    """Issue the report of a period; its row, or None if one is there that says the same.

    Args:
        store: reads and appends.
        name: of the agreement.
        period: its text.
        who: issues it.
        now_us: wall clock.
        may_be_preliminary: also while figures may change.
        only_first: no revision of a final report.
        sums: a final report is compared with these.

    Raises:
        NotYetFinal: figures may still change.
        SumsDiffer: they are not those of the slices that are stored.
        NothingToReport, NoSuchPeriod: there is none.
        DatabaseUnavailable: retryable.
    """
    inputs = read_inputs(store.reader, name, period, now_us)
    content = compute_report(inputs)
    if content.is_preliminary and not may_be_preliminary:
        raise NotYetFinal(name, content.period.text, content.preliminary_because)
    if sums is not None and not content.is_preliminary:
        sums.check(inputs, store.reader)

    def make(end: ChainEnd) -> dict[str, Any] | None:
        if only_first and end.latest is not None and not end.latest["is_preliminary"]:
            return None
        return _row(content, end, who, now_us)

    return store.append(name, content.period.text, make)


def _row(content: ReportContent, end: ChainEnd, who: str, now_us: int) -> dict[str, Any] | None:
    revision, revises, revised = 0, None, list[RevisedField]()
    name, period = content.agreement.name, content.period
    if end.latest is not None:
        revised = _revised(end.latest, content)
        if not revised:
            return None
        revision, revises = end.latest["revision"] + 1, end.latest["report_id"]
    report_id = f"{name}-{period.text}" + (f"-r{revision}" if revision else "")
    report = IssuedReport(
        number=end.number,
        report_id=report_id,
        revision=revision,
        revises=revises,
        revised=revised,
        issued_us=now_us,
        issued_by=who,
        previous=end.previous,
        content=content,
    )
    body = canonical(report)
    return {
        "number": report.number,
        "report_id": report_id,
        "name": name,
        "period": period.text,
        "revises": revises or "",
        "revision": revision,
        "from_us": period.from_us,
        "to_us": period.to_us,
        "issued_us": now_us,
        "issued_by": who,
        "is_preliminary": content.is_preliminary,
        "digest": digest_of(body),
        "previous": end.previous,
        "summary": summary_of(content),
        "body": body.decode(),
    }


def _revised(latest: Row, content: ReportContent) -> list[RevisedField]:
    """What a revision of the newest report of the period would change; nothing: there is no need of one.

    Raises:
        NothingToReport: slices have left since, or what is final is of another release.
    """
    try:
        before = IssuedReport.model_validate_json(latest["body"])
    except ValidationError as exc:
        if not latest["is_preliminary"]:
            problem = (
                f"{latest['report_id']} was issued by another release, so nothing says what would change"
            )
            raise NothingToReport(f"{problem}: it stays as it is") from exc
        return [RevisedField(field=OTHER_RELEASE, before=None, after=None)]
    _check_still_stored(before, content)
    return changed_fields(before.content, content)


def _check_still_stored(before: IssuedReport, content: ReportContent) -> None:
    """Whether a revision would rest on all that the report before it rests on.

    Raises:
        NothingToReport: slices have left since; what was issued stays as it is.
    """
    if before.content.is_preliminary:
        return  # slices were still to come
    unjudged_s = {one.name: one.time.unjudged_s for one in content.objectives}
    for one in before.content.objectives:
        if unjudged_s.get(one.name, one.time.all_s) > one.time.unjudged_s:
            text = f"slices of {one.name} that {before.report_id} rests on are no longer stored"
            raise NothingToReport(f"{text}: it stays as it is")


def summary_of(content: ReportContent) -> dict[str, Any]:
    """What lists and the event about it show, and whose it is."""
    own = content.period.from_us, content.period.to_us
    credit = next(
        (each.credit for each in content.credits.periods if (each.from_us, each.to_us) == own), None
    )
    return {
        "objectives": [
            {
                "name": each.name,
                "compliance": each.compliance,
                "target": each.target,
                "promised": each.promised,
                "is_kept": each.is_kept,
            }
            for each in content.objectives
        ],
        "credit": credit if content.credits.penalties else None,
        "episodes": len(content.episodes),
        "customer": content.agreement.customer,
        "labels": content.agreement.labels,
    }


def changed_fields(before: ReportContent, after: ReportContent) -> list[RevisedField]:
    """Figures that differ, at most ``MOST_REVISED``, and one entry that counts the others."""
    old, new = plain(before), plain(after)
    for each in (old, new):
        del each["as_of_us"]
    found = differences(old, new)
    fields = [RevisedField(field=one.field, before=one.before, after=one.after) for one in found]
    if len(fields) <= MOST_REVISED:
        return fields
    rest = len(fields) - MOST_REVISED
    return [*fields[:MOST_REVISED], RevisedField(field=f"and {rest} more fields", before=None, after=None)]


def due_periods(reader: SqlReader, kind: DueKind, now_us: int) -> Iterator[tuple[str, str]]:
    """(agreement, period) of reports that are due and have no final one, the oldest of each first."""
    rows: list[Row] = []
    for row in reader.all_agreements():
        if rows and rows[-1]["name"] != row["name"]:
            yield from _due_of(reader, rows, kind, now_us)
            rows = []
        rows.append(row)
    if rows:
        yield from _due_of(reader, rows, kind, now_us)


def _due_of(reader: SqlReader, rows: list[Row], kind: DueKind, now_us: int) -> Iterator[tuple[str, str]]:
    """``rows``: all versions of one agreement, oldest first."""
    name, ended_us = rows[-1]["name"], rows[-1]["ended_us"]
    versions = versions_of(rows, (), now_us)
    if not versions or not any(item.agreement.judged for item in versions):
        return
    newest = versions[-1].agreement.spec
    wanted = usual_kind(newest.window) if kind == "own" else kind
    period = period_at(wanted, newest.time_zone, now_us - LATE_US)
    found: list[ReportPeriod] = []
    for _ in range(PERIODS_BACK):
        period = period_at(wanted, newest.time_zone, period.from_us - 1)
        if rows[0]["applied_us"] < period.to_us and (ended_us is None or ended_us > period.from_us):
            found.append(period)
    if found:
        issued = reader.reports.issued_periods(name)
        yield from ((name, each.text) for each in reversed(found) if each.text not in issued)
