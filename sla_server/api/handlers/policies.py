"""Handlers about one version of a policy: its caps, its volumes, what differs; the list is in ``records``."""

from __future__ import annotations

import re
from typing import Final

from flask import Request, Response

from sla_server.api import responses
from sla_server.api.context import AppContext
from sla_server.api.errors import BadInput, NotFound
from sla_server.rows import Row

_CAP_CURSOR: Final = re.compile(r".+:[0-9]{1,3}")
_SEE: Final = "GET /api/v1/policies lists the versions"


def policy(context: AppContext, _request: Request, version: str) -> Response:
    """One version with its report."""
    return responses.as_json(found_policy(context, version))


def policy_caps(context: AppContext, request: Request, version: str) -> Response:
    """A page of the caps of one version."""
    number = _number(version)
    hour = responses.number(request, "hour", -1, least=0, most=167)
    limit, after = responses.long_limit(request), request.args.get("after") or None
    if after and not _CAP_CURSOR.fullmatch(after):
        raise BadInput("after", f"{after!r} is no cursor", "Use the `next` of the page before")
    rows = context.source.policy_caps(number, None if hour < 0 else hour, limit, after)
    if not rows and after is None:
        raise NotFound(f"policy version {version} has no caps", _SEE)
    last = rows[-1] if len(rows) == limit else None
    return responses.as_list(rows, f"{last['volume']}:{last['hour_of_week']}" if last else None)


def policy_volumes(context: AppContext, request: Request, version: str) -> Response:
    """A page of the volumes that one version says something of."""
    number = stored_policy(context, version)["version"]
    limit = responses.limit(request)
    part, after = request.args.get("match", ""), request.args.get("after", "")
    rows = context.source.pages.policy_volumes(number, part, after, limit)
    return responses.as_list(rows, rows[-1]["volume"] if len(rows) == limit else None)


def policy_volume(context: AppContext, _request: Request, version: str, volume: str) -> Response:
    """One volume in one version: its caps and demands by hour, and the capacity of its backend."""
    found = stored_policy(context, version)
    hours = context.source.policy_caps(found["version"], volume=volume)
    if not hours:
        problem = f"policy version {version} says nothing of volume {volume!r}"
        raise NotFound(problem, "It was computed before the volume did I/O, or there is no such volume")
    backend = context.source.backend_of(volume)
    reports = context.source.pages.policy_reports
    capacity = reports.report_of(found).capacity(backend) if backend else []
    tested = reports.back_tests([(found["version"], found["created_us"])])[found["version"]]
    keys = ("hour_of_week", "cost_per_s", "demand_p50", "demand_p95", "burst_s")
    answer = {
        "version": found["version"],
        "state": found["state"],
        "created_us": found["created_us"],
        "volume": volume,
        "backend": backend,
        "capacity": capacity,
        "back_test": tested.get("back_test"),
        "hours": [{key: row[key] for key in keys} for row in hours],
    }
    return responses.as_json(answer)


def policy_harms(context: AppContext, request: Request, version: str) -> Response:
    """Who hurt whom by one version's attribution, the largest share of each promise first."""
    return responses.as_list(harms_of(context, version)[: responses.limit(request)])


def harms_of(context: AppContext, version: str) -> list[Row]:
    """All of them.

    Raises:
        BadInput, NotFound: as ``found_policy``.
    """
    return context.source.pages.policy_reports.report_of(stored_policy(context, version)).harms()


def policy_diff(context: AppContext, request: Request, version: str, other: str) -> Response:
    """Volumes whose caps differ between two versions, a page."""
    before, after = (stored_policy(context, each)["version"] for each in (version, other))
    limit = responses.long_limit(request)
    place = request.args.get("after") or ""
    rows = context.source.policy_changes(before, after, limit, place)
    return responses.as_list(rows, rows[-1]["volume"] if len(rows) == limit else None)


def found_policy(context: AppContext, version: str) -> Row:
    """The version of a path, with all of its report.

    Raises:
        BadInput: it is no number.
        NotFound: there is no such version.
    """
    found = context.source.policy(_number(version))
    if found is None:
        raise _missing(version)
    return found


def stored_policy(context: AppContext, version: str) -> Row:
    """As ``found_policy``, without reading a report that is not asked for."""
    found: Row | None = context.source.pages.policy_reports.head(_number(version))
    if found is None:
        raise _missing(version)
    return found


def _missing(version: str) -> NotFound:
    return NotFound(f"there is no policy version {version}", _SEE)


def _number(version: str) -> int:
    if not version.isdecimal() or len(version) > 9:
        raise BadInput("version", f"{version!r} is not a policy version", _SEE)
    return int(version)
