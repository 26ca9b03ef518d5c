"""Routes of reports."""

from __future__ import annotations

from typing import Final

from sla_server.api.route import ANY, LIMIT, ApiRoute, Query

CHAIN_PAGE: Final = 200
"""Reports that one request hashes: some 4 MB."""
MOST_NUMBER: Final = (1 << 31) - 1
REPORT_ROUTES: Final = (
    ApiRoute(
        "GET",
        "/slas/{name}/report",
        "sla_report",
        "What a report of one period says, as of now; issued ones are under /reports.",
        (
            Query(
                "period",
                "string",
                "2026-10, 2026-W40, 2026-10-03, 2026-Q4, 2026, last (default: that ended last) or this.",
            ),
        ),
        schema="Report",
        scope="report",
    ),
    ApiRoute(
        "GET",
        "/reports",
        "reports",
        "Issued reports, newest first.",
        (
            Query("name", "string", "Only those of this agreement."),
            Query("match", "string", "Only those whose agreement has this in its name, whatever the case."),
            Query("period", "string", "Only those of this period, or of one that begins so: 2026-10, 2026."),
            LIMIT,
            Query("before", "integer", "The `next` of the page before.", least=1, most=MOST_NUMBER),
        ),
        items="reports",
        scope="reports",
    ),
    ApiRoute(
        "GET",
        "/reports/{report_id}",
        "report",
        "One issued report, by its id or number, as it was issued, with its digest; accounts with labels get "
        "a copy without names of others (`is_copy`).",
        schema="IssuedReport",
        scope="report",
    ),
    ApiRoute(
        "GET",
        "/reports/{report_id}/verification",
        "report_verification",
        "Whether a report is what was issued, adds up, and is what stored slices and raw counters give.",
        schema="Verification",
        scope="report",
    ),
    ApiRoute(
        "GET",
        "/report-chain",
        "report_chain",
        "Whether each report names the digest of the one before it; those of a page, oldest first, in which "
        "something was found, and how many were checked.",
        (
            Query("after", "integer", "The `next` of the page before.", least=0, most=MOST_NUMBER),
            Query("limit", "integer", "Reports to check; default 200.", least=1, most=CHAIN_PAGE),
        ),
        items=ANY,
    ),
)
