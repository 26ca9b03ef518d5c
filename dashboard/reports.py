"""The pages of reports: the list of those that were issued, and one of them, or one that is computed now.

An account with labels has those of its own agreements, as copies without names of others (``g.scope``).

A report's page is the same self-contained document that ``sla report -o html`` writes. It has one inline
style, which its Content-Security-Policy names by its digest; nothing else of the policy is loosened.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final
from urllib.parse import urlencode

from flask import Blueprint, Response, abort, g, render_template, request
from pydantic import ValidationError

from dashboard.views import navigation
from sla_server.api.context import AppContext
from sla_server.api.errors import ApiError
from sla_server.api.handlers.reports import computed, copy_of, found_report, listed_reports
from sla_server.api.security import HEADERS
from sla_server.reports.document import IssuedReport, canonical
from sla_server.reports.html import STYLE_SOURCE, as_html
from sla_server.reports.text import as_csv
from sla_server.reports.words import percent

PAGE_ROWS: Final = 100
MOST_NUMBER: Final = 1 << 31
FORMS: Final = {"html": "text/html", "csv": "text/csv", "json": "application/json"}
POLICY: Final = "Content-Security-Policy"
OTHER_RELEASE: Final = (
    "{0} was issued by another release, in a form unknown here. As issued: /reports/{0}.json"
)


def make_reports(context: AppContext) -> Blueprint:
    """The routes; without a script, so that they print and work in any browser."""
    pages = Blueprint("reports", __name__, template_folder="templates")
    pages.add_url_rule("/reports", "listed", _listed(context))
    pages.add_url_rule("/reports/<report_id>", "one", _one(context))
    pages.add_url_rule("/reports/now", "computed", _computed(context))
    return pages


def _listed(context: AppContext) -> Callable[[], str]:
    def listed() -> str:
        """Newest first, a page at a time; of one agreement, if one is asked for."""
        name = request.args.get("name", "")[:200]
        wanted = {key: request.args.get(key, "").strip()[:200] for key in ("match", "period")}
        before = request.args.get("before", "")
        number = int(before) if before.isdecimal() and len(before) < 10 else None
        sees_own = g.scope is not None
        rows, following = listed_reports(context, PAGE_ROWS, number, name or None, g.scope, **wanted)
        filters = {key: value for key, value in {"name": name, **wanted}.items() if value}
        return render_template(
            "reports.html",
            views=navigation(sees_own=sees_own),
            sees_own=sees_own,
            rows=rows,
            name=name,
            filters=filters,
            older=f"/reports?{urlencode({**filters, 'before': following})}" if following else "",
            is_first=number is None,
            day=_day,
            percent=percent,
        )

    return listed


def _one(context: AppContext) -> Callable[[str], Response]:
    def one(report_id: str) -> Response:
        """An issued report as it was issued; ``.csv`` and ``.json`` behind its id for programs."""
        name, form = _form_of(report_id)
        try:
            row = found_report(context, name, g.scope)
            if g.scope is not None:
                return _copy(copy_of(row), form, row["digest"])
        except ApiError as exc:
            abort(exc.status, exc.detail)
        if form == "json":
            return _file(row["body"], form, row["report_id"])
        try:
            issued = IssuedReport.model_validate_json(row["body"])
        except ValidationError:
            abort(406, OTHER_RELEASE.format(row["report_id"]))
        if form == "csv":
            return _file(as_csv(issued.content), form, row["report_id"])
        return _page(as_html(issued.content, issued, row["digest"], is_on_page=True))

    return one


def _copy(issued: IssuedReport, form: str, digest: str) -> Response:
    """What an account with labels gets of an issued report."""
    if form == "html":
        return _page(as_html(issued.content, issued, digest, is_copy=True, is_on_page=True))
    text = as_csv(issued.content) if form == "csv" else canonical(issued).decode()
    return _file(text, form, f"{issued.report_id}-copy")


def _computed(context: AppContext) -> Callable[[], Response]:
    def of_period() -> Response:
        """A report of a period as it is known now."""
        try:
            content = computed(
                context, request.args.get("name", ""), request.args.get("period") or "last", g.scope
            )
        except ApiError as exc:
            abort(exc.status, exc.detail)
        return _page(as_html(content, is_on_page=True))

    return of_period


def _form_of(report_id: str) -> tuple[str, str]:
    name, _, form = report_id.rpartition(".")
    return (name, form) if name and form in FORMS else (report_id, "html")


def _page(text: str) -> Response:
    response = Response(text, mimetype="text/html")
    response.headers[POLICY] = HEADERS[POLICY].replace("style-src 'self'", f"style-src {STYLE_SOURCE}")
    return response


def _file(text: str, form: str, report_id: str) -> Response:
    headers = {"Content-Disposition": f'attachment; filename="{report_id}.{form}"'}
    return Response(text, mimetype=FORMS[form], headers=headers)


def _day(at_us: int) -> str:
    return f"{datetime.fromtimestamp(at_us / 1e6, UTC):%Y-%m-%d %H:%M} UTC"
