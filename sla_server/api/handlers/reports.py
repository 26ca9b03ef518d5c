"""Handlers about reports: of any period as it is known now, and those that were issued."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any, Final

from flask import Request, Response, g
from pydantic import ValidationError

from sla_server.api import responses
from sla_server.api.context import AppContext
from sla_server.api.errors import BadInput, NotFound
from sla_server.api.report_routes import CHAIN_PAGE, MOST_NUMBER
from sla_server.api.scope import LabelScope
from sla_server.reports.compute import compute_report
from sla_server.reports.customer import (
    content_for_customer,
    labels_of,
    report_for_customer,
    verification_for_customer,
)
from sla_server.reports.document import IssuedReport, ReportContent, plain
from sla_server.reports.errors import NoSuchPeriod, NothingToReport, PeriodTooLong
from sla_server.reports.inputs import LAST, read_inputs
from sla_server.reports.verify import taken_away, verify_chain, verify_report
from sla_server.rows import Row

MOST_BROKEN: Final = 100
"""Of a page of the chain; ``is_good`` counts all."""
MOST_NAMES: Final = 500
"""Agreements of one account that SQL is asked for by name."""
MOST_SLICES: Final = 150_000
"""Of a report that is computed within a request: some 120 MB for a second. A quarter has 132,480 minutes."""


def sla_report(context: AppContext, request: Request, name: str) -> Response:
    """What a report of a period says now."""
    return responses.as_json(plain(computed(context, name, request.args.get("period", LAST), g.scope)))


def computed(context: AppContext, name: str, period: str, scope: LabelScope | None) -> ReportContent:
    """The report of a period, from what is stored now; for an account with labels its copy.

    Raises:
        BadInput: the text names no period.
        NotFound: the agreement was never applied, or not in force in it, or is of others.
    """
    if scope is not None and not scope.has_agreement(name):
        raise _no_agreement(name)
    try:
        now_us = context.clock.unix_us()
        content = compute_report(read_inputs(context.source, name, period, now_us, MOST_SLICES))
    except (NoSuchPeriod, PeriodTooLong) as exc:
        raise BadInput("period", str(exc)) from exc
    except NothingToReport as exc:
        raise NotFound(str(exc), "") from exc
    if scope is None:
        return content
    if not scope.has_labels(content.agreement.labels):  # it was of others then
        raise _no_agreement(name)
    return content_for_customer(content)


def _no_agreement(name: str) -> NotFound:
    return NotFound(
        f"no agreement {name[:128]!r} has a report for this account", "'sla get slas' lists yours"
    )


def reports(context: AppContext, request: Request) -> Response:
    """Issued reports, newest first."""
    limit = responses.limit(request)
    before = responses.number(request, "before", 0, most=MOST_NUMBER) or None
    wanted = {key: request.args.get(key, "") for key in ("match", "period")}
    name = request.args.get("name") or None
    rows, following = listed_reports(context, limit, before, name, g.scope, **wanted)
    return responses.as_list(rows, following)


def listed_reports(
    context: AppContext,
    limit: int,
    before: int | None,
    name: str | None,
    scope: LabelScope | None,
    *,
    match: str = "",
    period: str = "",
) -> tuple[list[Row], str | None]:
    """A page of issued reports, newest first, and the number from which the next one goes on.

    An account with labels has those whose agreement had them when they were issued: also of an agreement that
    has ended, and not those that another customer's of the same name had before.
    """
    if scope is None:
        rows = context.source.reports.issued(limit, before, name, match=match, period=period)
        return rows, str(rows[-1]["number"]) if len(rows) == limit else None
    names = [name] if name is not None else _names_of(context, scope)

    def read(most: int, cursor: str | None) -> list[Row]:
        number = before if cursor is None else int(cursor)
        found = context.source.reports.issued(most, number, None, names, match=match, period=period)
        return _with_labels(context, found)

    return scope.page("reports", read, limit, None)


def _names_of(context: AppContext, scope: LabelScope) -> Collection[str] | None:
    """Agreements whose reports may be theirs; None: there are too many to ask for them alone."""
    ended = [
        row["name"]
        for row in context.source.reports.ended_agreements()
        if scope.has_labels(((row["spec"] or {}).get("metadata") or {}).get("labels") or {})
    ]
    names = {*scope.agreements, *ended}
    return names if len(names) <= MOST_NAMES else None


def _with_labels(context: AppContext, rows: list[Row]) -> list[Row]:
    """The rows with ``labels`` and, for the page of an account, ``cursor``."""
    older = [row["number"] for row in rows if labels_of(row) is None]
    bodies = context.source.reports.report_bodies(older) if older else {}
    return [
        {**row, "cursor": str(row["number"]), "labels": labels_of(row, _decoded(bodies.get(row["number"])))}
        for row in rows
    ]


def _decoded(body: str | None) -> Any:
    try:
        return json.loads(body or "null")
    except ValueError:
        return None


def report(context: AppContext, _request: Request, report_id: str) -> Response:
    """One issued report, with its digest; for an account with labels its copy, and the whole one's digest."""
    row = found_report(context, report_id, g.scope)
    if g.scope is not None:
        copy = plain(copy_of(row))
        return responses.as_json({"digest": row["digest"], "is_copy": True, "report": copy})
    return responses.as_json({"digest": row["digest"], "report": json.loads(row["body"])})


def copy_of(row: Row) -> IssuedReport:
    """The customer's copy of an issued report.

    Raises:
        NotFound: another release issued it, so what is about others in it is not known.
    """
    try:
        return report_for_customer(IssuedReport.model_validate_json(row["body"]))
    except ValidationError as exc:
        problem = f"{row['report_id']} was issued by another release, in a form unknown here"
        raise NotFound(problem, "Ask the provider for the document") from exc


def report_verification(context: AppContext, _request: Request, report_id: str) -> Response:
    """Check a report against the chain, what is stored and the raw counters."""
    row = found_report(context, report_id, g.scope)
    before = context.source.reports.issued_after(row["number"] - 2, 1) if row["number"] > 1 else []
    is_next = bool(before) and before[0]["number"] == row["number"] - 1
    found = verify_report(context.source, row, before[0] if is_next else None, MOST_SLICES).as_dict()
    return responses.as_json(found if g.scope is None else verification_for_customer(found))


def report_chain(context: AppContext, request: Request) -> Response:
    """Check digests of a page of reports; those in which something was found, and how many were checked."""
    limit = responses.number(request, "limit", CHAIN_PAGE, least=1, most=CHAIN_PAGE)
    after = responses.number(request, "after", 0, most=MOST_NUMBER)
    checked = list(verify_chain(context.source, after, limit))
    broken = [found.as_dict() for found in checked if found.findings]
    is_last = len(checked) < limit
    if is_last:
        broken += [found.as_dict() for found in taken_away(context.source)]
    last = None if is_last else str(checked[-1].number)
    return responses.as_list(broken[:MOST_BROKEN], last, count=len(checked), is_good=not broken)


def found_report(context: AppContext, report_id: str, scope: LabelScope | None) -> Row:
    """The row of a report.

    Raises:
        NotFound: none has this id or number, or it is of others.
    """
    row = context.source.reports.issued_report(report_id)
    if row is None or not (scope is None or scope.has_labels(labels_of(row, _decoded(row["body"])))):
        raise NotFound(f"no report {report_id[:200]!r} was issued", "'sla report list' lists those that were")
    return row
