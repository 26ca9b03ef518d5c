"""Handlers of the records that people list: the audit log, runs of jobs, versions of policies."""

from __future__ import annotations

from typing import Any, Final

from flask import Request, Response

from sla_server.api import responses
from sla_server.api.context import AppContext
from sla_server.api.errors import BadInput
from sla_server.api.filters import JOB_KINDS, JOB_STATES, POLICY_STATES, chosen
from sla_server.db.queries import records
from sla_server.db.queries.records import RecordList, Wanted
from sla_server.events.documents import without_secrets
from sla_server.rows import Row

MOST_VALUES: Final = 50
KNOWN: Final = {
    (records.JOBS.key, "kind"): JOB_KINDS,
    (records.JOBS.key, "state"): JOB_STATES,
    (records.POLICIES.key, "state"): POLICY_STATES,
}
"""Values of filters that are a closed set."""


def audit(context: AppContext, request: Request) -> Response:
    """A page of the audit log; addresses in it show no secret that an earlier release took."""
    rows, following = _page(context, request, records.AUDIT)
    return responses.as_list(without_secrets(rows), following)


def jobs(context: AppContext, request: Request) -> Response:
    """A page of the runs of jobs."""
    return responses.as_list(*_page(context, request, records.JOBS))


def policies(context: AppContext, request: Request) -> Response:
    """A page of policy versions: of their reports, which are as large as the fleet, the back-test alone."""
    rows, following = _page(context, request, records.POLICIES)
    made = [(row["version"], row["created_us"]) for row in rows]
    tested = context.source.pages.policy_reports.back_tests(made)
    return responses.as_list([{**row, "report": tested[row["version"]]} for row in rows], following)


def _page(context: AppContext, request: Request, listed: RecordList) -> tuple[list[Row], str | None]:
    """The rows that the query wants, and where the next page begins.

    Raises:
        BadInput: there is no such order, the cursor is none, or too many values are asked for.
    """
    limit = responses.limit(request)
    sort = request.args.get("sort", records.NEWEST)
    if sort not in listed.order_names:
        raise BadInput("sort", f"{sort[:40]!r} is no order", f"Use {', '.join(listed.order_names)}")
    wanted = Wanted(
        limit,
        responses.cursor(request),
        request.args.get("match", ""),
        {name: _values(request, name, listed) for name in listed.filters},
        _time(request, "from_us"),
        _time(request, "to_us"),
        sort,
    )
    try:
        rows: list[Row] = context.source.pages.records(listed, wanted)
    except ValueError as exc:
        raise BadInput("before", str(exc), "Use the `next` of the page before") from exc
    return rows, rows[-1]["cursor"] if len(rows) == limit else None


def _values(request: Request, name: str, listed: RecordList) -> list[str]:
    values = [part for part in request.args.get(name, "").split(",") if part]
    if len(values) > MOST_VALUES:
        raise BadInput(
            name, f"has {len(values)} values, at most {MOST_VALUES} are taken", "Use * for several"
        )
    known = KNOWN.get((listed.key, name))
    return values if known is None else chosen(request, name, known, patterns=True)


def _time(request: Request, name: str) -> int | None:
    found: Any = responses.number(request, name, -1)
    return None if found < 0 else found
