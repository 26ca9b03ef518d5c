"""Handlers about reports: of any period as it is known now, and those that were issued."""

from __future__ import annotations

import json
from typing import Final

from flask import Request, Response

from sla_server.api import responses
from sla_server.api.context import AppContext
from sla_server.api.errors import BadInput, NotFound
from sla_server.api.report_routes import CHAIN_PAGE, MOST_NUMBER
from sla_server.reports.compute import compute_report, plain
from sla_server.reports.document import ReportContent
from sla_server.reports.errors import NoSuchPeriod, NothingToReport, PeriodTooLong
from sla_server.reports.inputs import LAST, read_inputs
from sla_server.reports.verify import taken_away, verify_chain, verify_report
from sla_server.rows import Row

MOST_BROKEN: Final = 100
"""Of a page of the chain; ``is_good`` counts all."""
MOST_SLICES: Final = 150_000
"""Of a report that is computed within a request: some 120 MB for a second. A quarter has 132,480 minutes."""


def sla_report(context: AppContext, request: Request, name: str) -> Response:
    """What a report of a period says now."""
    return responses.as_json(plain(computed(context, name, request.args.get("period", LAST))))


def computed(context: AppContext, name: str, period: str) -> ReportContent:
    """The report of a period, from what is stored now.

    Raises:
        BadInput: the text names no period.
        NotFound: the agreement was never applied, or not in force in it.
    """
    try:
        now_us = context.clock.unix_us()
        return compute_report(read_inputs(context.source, name, period, now_us, MOST_SLICES))
    except (NoSuchPeriod, PeriodTooLong) as exc:
        raise BadInput("period", str(exc)) from exc
    except NothingToReport as exc:
        raise NotFound(str(exc), "") from exc


def reports(context: AppContext, request: Request) -> Response:
    """Issued reports, newest first."""
    limit = responses.limit(request)
    before = responses.number(request, "before", 0, most=MOST_NUMBER) or None
    rows = context.source.reports.issued(limit, before, request.args.get("name") or None)
    return responses.as_list(rows, str(rows[-1]["number"]) if len(rows) == limit else None)


def report(context: AppContext, _request: Request, report_id: str) -> Response:
    """One issued report, with its digest."""
    row = found_report(context, report_id)
    return responses.as_json({"digest": row["digest"], "report": json.loads(row["body"])})


def report_verification(context: AppContext, _request: Request, report_id: str) -> Response:
    """Check a report against the chain, what is stored and the raw counters."""
    row = found_report(context, report_id)
    before = context.source.reports.issued_after(row["number"] - 2, 1) if row["number"] > 1 else []
    is_next = bool(before) and before[0]["number"] == row["number"] - 1
    found = verify_report(context.source, row, before[0] if is_next else None, MOST_SLICES)
    return responses.as_json(found.as_dict())


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


def found_report(context: AppContext, report_id: str) -> Row:
    """The row of a report.

    Raises:
        NotFound: none has this id or number.
    """
    row = context.source.reports.issued_report(report_id)
    if row is None:
        raise NotFound(f"no report {report_id[:200]!r} was issued", "'sla report list' lists those that were")
    return row
