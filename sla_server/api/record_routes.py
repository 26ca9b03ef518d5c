"""Routes of the records that people list: the audit log, runs of jobs, versions of policies."""

from __future__ import annotations

from typing import Final

from sla_server.api.route import LIMIT, ApiRoute, Query

MOST_US: Final = 1 << 62
BEFORE: Final = Query("before", "string", "The `next` of the page before.")
SINCE: Final = Query(
    "from_us", "integer", "Only what began then or later, microseconds UTC.", least=0, most=MOST_US
)
UNTIL: Final = Query("to_us", "integer", "Only what began earlier, microseconds UTC.", least=0, most=MOST_US)


def _several(name: str, what: str) -> Query:
    return Query(name, "string", f"Only {what}; several with commas between, * matches anything.")


RECORD_ROUTES: Final = (
    ApiRoute(
        "GET",
        "/audit",
        "audit",
        "Who changed what, newest first.",
        (
            Query("match", "string", "Only those with this in person, action or subject, whatever the case."),
            _several("action", "these actions"),
            _several("who", "what these did"),
            Query("sort", "string", "newest (default), oldest, who, action or subject."),
            SINCE,
            UNTIL,
            LIMIT,
            BEFORE,
        ),
        items="audit",
    ),
    ApiRoute(
        "GET",
        "/policies",
        "policies",
        "Policy versions, newest first.",
        (
            Query("match", "string", "Only those with this in version or publisher, whatever the case."),
            _several("state", "those in these states"),
            Query("sort", "string", "newest (default), oldest or state."),
            SINCE,
            UNTIL,
            LIMIT,
            BEFORE,
        ),
        items="policies",
    ),
    ApiRoute(
        "GET",
        "/jobs",
        "jobs",
        "Runs of jobs, newest first.",
        (
            Query("match", "string", "Only those with this in kind, person or result, whatever the case."),
            _several("kind", "these kinds"),
            _several("state", "those in these states"),
            Query("sort", "string", "newest (default), oldest, kind, state, longest or rows."),
            SINCE,
            UNTIL,
            LIMIT,
            BEFORE,
        ),
        items="jobs",
    ),
)
