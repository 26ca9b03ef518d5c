"""Handlers that read: SQL for what is kept, the live view for what is now.

Counts of I/Os come from SQL only (exact sums over everything ingested); rates and percentiles from the live
view only. Each handler has the form ``(parts, request, **path parameters) -> Response``.
"""

from __future__ import annotations

import re
from typing import Any, Final

from flask import Request, Response

from sla_server.api import responses
from sla_server.api.context import AppContext
from sla_server.api.errors import BadInput, NotFound
from sla_server.api.handlers import gateways as dialled
from sla_server.db.queries.reader import STREAM_SUMS

HOUR_US: Final = 3_600_000_000
SPAN_MAX_US: Final = 31 * 24 * HOUR_US
_CAP_CURSOR: Final = re.compile(r".+:[0-9]{1,3}")


def gateways(parts: AppContext, _request: Request) -> Response:
    """Rows of SQL with the live counts of exports and streams."""
    return responses.as_list(_with_live(parts, parts.source.gateways(), "gateways", "gateway_id"))


def gateway_list(parts: AppContext, _request: Request) -> Response:
    """Gateways to dial, from both lists."""
    return responses.as_list(dialled.listed(parts))


def volumes(parts: AppContext, _request: Request) -> Response:
    """Exact counts with the live view; volumes of which nothing is stored yet come last, with counts of 0."""
    return responses.as_list(_volumes(parts))


def _volumes(parts: AppContext) -> list[dict[str, Any]]:
    rows = parts.source.volumes()
    known = {row["volume"] for row in rows}
    stored_nothing = dict.fromkeys((*STREAM_SUMS, "streams"), 0) | {"last_us": None}
    fresh = [
        {"volume": row.get("volume"), "backend": row.get("backend"), **stored_nothing, "live": row}
        for row in parts.live.newest().snapshot["volumes"]
        if row.get("volume") not in known
    ]
    return _with_live(parts, rows, "volumes", "volume") + fresh


def volume(parts: AppContext, _request: Request, volume: str) -> Response:
    """One volume with its streams; stream ids as text, since they exceed what JSON readers hold exactly."""
    row = _find(_volumes(parts), "volume", volume)
    streams = [{**stream, "stream_id": str(stream["stream_id"])} for stream in parts.source.streams(volume)]
    return responses.as_json({**row, "by_stream": streams})


def history(parts: AppContext, request: Request, volume: str) -> Response:
    """Rollups of one volume; long or old ones by the hour."""
    from_us, to_us = _span(parts, request, HOUR_US)
    return responses.as_list(
        parts.source.rollup_history(volume, from_us, to_us), from_us=from_us, to_us=to_us
    )


def totals(parts: AppContext, _request: Request) -> Response:
    """Lifetime sums over everything."""
    return responses.as_json(parts.source.totals())


def backends(parts: AppContext, _request: Request) -> Response:
    """Capacity with the live cost rates."""
    return responses.as_list(_with_live(parts, parts.source.backends(), "backends", "backend"))


def slas(parts: AppContext, _request: Request) -> Response:
    """Agreements in force without their documents.

    ``objectives`` is what was agreed ({name, metric}, may be empty), ``live`` those that are judged now.
    """
    rows = []
    for row in parts.source.agreements(True):
        plain = {key: value for key, value in row.items() if key not in ("document", "spec")}
        agreed = [
            {"name": one.get("name"), "metric": (one.get("indicator") or {}).get("metric")}
            for one in _agreed(row)
        ]
        rows.append({**plain, "objectives": agreed, "live": _objectives(parts, row["name"])})
    return responses.as_list(rows)


def sla(parts: AppContext, _request: Request, name: str) -> Response:
    """One agreement whole."""
    return responses.as_json({**_agreement(parts, name), "live": _objectives(parts, name)})


def slices(parts: AppContext, request: Request, name: str) -> Response:
    """A page of judged slices, and the counts by state of the whole span."""
    limit = responses.long_limit(request)
    objective = request.args.get("objective") or _first_objective(_agreement(parts, name))
    from_us, to_us = _span(parts, request, 24 * HOUR_US)
    rows = parts.source.slices(name, objective, from_us, to_us, limit + 1)
    return responses.as_list(
        rows[:limit],
        str(rows[limit]["start_us"]) if len(rows) > limit else None,
        objective=objective,
        counts=parts.source.slice_counts(name, objective, from_us, to_us),
        from_us=from_us,
        to_us=to_us,
    )


def throttles(parts: AppContext, request: Request) -> Response:
    """Throttles as recorded, with the live view of those in force."""
    in_force, limit = responses.flag(request, "in_force"), responses.limit(request)
    rows = parts.source.throttles(in_force, limit)
    return responses.as_list(_with_live(parts, rows, "throttles", "throttle_id"))


def events(parts: AppContext, request: Request) -> Response:
    """A page of events."""
    return _page(parts.source.events, request)


def audit(parts: AppContext, request: Request) -> Response:
    """A page of the audit log."""
    return _page(parts.source.audit, request)


def policies(parts: AppContext, request: Request) -> Response:
    """Policy versions."""
    return responses.as_list(parts.source.policies(responses.limit(request)))


def policy_caps(parts: AppContext, request: Request, version: str) -> Response:
    """A page of the caps of one version."""
    if not version.isdecimal() or len(version) > 9:
        raise BadInput("version", f"{version!r} is not a policy version", "GET /api/v1/policies lists them")
    hour = responses.number(request, "hour", -1, least=0, most=167)
    limit, after = responses.long_limit(request), request.args.get("after") or None
    if after and not _CAP_CURSOR.fullmatch(after):
        raise BadInput("after", f"{after!r} is no cursor", "Use the `next` of the page before")
    rows = parts.source.policy_caps(int(version), None if hour < 0 else hour, limit, after)
    if not rows and after is None:
        raise NotFound(f"policy version {version} has no caps", "GET /api/v1/policies lists the versions")
    last = rows[-1] if len(rows) == limit else None
    return responses.as_list(rows, f"{last['volume']}:{last['hour_of_week']}" if last else None)


def processes(parts: AppContext, _request: Request) -> Response:
    """The server's own processes."""
    return responses.as_list(parts.source.processes())


def _page(read: Any, request: Request) -> Response:
    limit = responses.limit(request)
    rows = read(limit, responses.cursor(request))
    return responses.as_list(rows, rows[-1]["cursor"] if len(rows) == limit else None)


def _with_live(parts: AppContext, rows: list[dict[str, Any]], table: str, key: str) -> list[dict[str, Any]]:
    """Each row with ``live``: the entry of the snapshot with the same key, or null."""
    now = {entry.get(key): entry for entry in parts.live.newest().snapshot[table]}
    return [{**row, "live": now.get(row[key])} for row in rows]


def _objectives(parts: AppContext, name: str) -> list[dict[str, Any]]:
    return [entry for entry in parts.live.newest().snapshot["slas"] if entry.get("name") == name]


def _agreement(parts: AppContext, name: str) -> dict[str, Any]:
    row = parts.source.agreement(name)
    if row is None:
        raise NotFound(f"no agreement {name!r}", "'sla get slas' lists those in force")
    return row


def _agreed(agreement: dict[str, Any]) -> list[dict[str, Any]]:
    """The objectives of an agreement's row, as its document has them."""
    objectives: list[dict[str, Any]] = ((agreement.get("spec") or {}).get("spec") or {}).get(
        "objectives"
    ) or []
    return objectives


def _first_objective(agreement: dict[str, Any]) -> str:
    objectives = _agreed(agreement) or [{}]
    return str(objectives[0].get("name", "latency"))


def _find(rows: list[dict[str, Any]], key: str, value: str) -> dict[str, Any]:
    for row in rows:
        if row[key] == value:
            return row
    raise NotFound(f"no {key} {value!r}", f"GET /api/v1/{key}s lists them")


def _span(parts: AppContext, request: Request, default_us: int) -> tuple[int, int]:
    """(from_us, to_us) of the query.

    Raises:
        BadInput: empty, backwards or longer than 31 days.
    """
    to_us = responses.number(request, "to_us", parts.clock.unix_us())
    from_us = responses.number(request, "from_us", max(0, to_us - default_us))
    if not 0 < to_us - from_us <= SPAN_MAX_US:
        raise BadInput("from_us", "must lie before to_us, by 31 days at most")
    return from_us, to_us
