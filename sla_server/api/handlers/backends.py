"""Handlers about backends: what they carry now and carried, and what they can take."""

from __future__ import annotations

from flask import Request, Response

from sla_server.api import responses
from sla_server.api.context import AppContext
from sla_server.api.handlers.live import feed_state
from sla_server.api.handlers.read import HOUR_US, paged, row_of, snapshot_now, span_of, with_live
from sla_server.rows import Row


def backends(context: AppContext, request: Request) -> Response:
    """Capacity by the newest policy with the live cost rates; all, or a page of those that are asked for."""
    part = request.args.get("match", "").lower()
    least = _least_of(next(iter(context.source.policies(1)), None))
    rows = [
        {**row, "capacity_cost_per_s": least.get(row["backend"])}
        for row in context.source.backends()
        if part in row["backend"].lower()
    ]
    return paged(context, request, rows, lambda page: with_live(context, page, "backends", "backend"))


def _least_of(policy: Row | None) -> dict[str, float]:
    """Backend to the least load at which some promise on it is still kept, where the policy job knows one."""
    least: dict[str, float] = {}
    for one in ((policy or {}).get("report") or {}).get("capacity") or ():
        if (cost := one.get("cost_per_s")) is not None:
            least[one["backend"]] = min(cost, least.get(one["backend"], cost))
    return least


def backend(context: AppContext, _request: Request, backend: str) -> Response:
    """One backend: its live values, how many volumes are on it, and what loads each promise on it bears."""
    row = row_of(context.source.backends(), "backend", backend)
    policy = next(iter(context.source.policies(1)), None)
    report = (policy or {}).get("report") or {}
    row = {**row, "capacity_cost_per_s": _least_of(policy).get(backend)}
    shown = {
        **with_live(context, [row], "backends", "backend")[0],
        "volume_count": list(context.source.pages.volume_names().values()).count(backend),
        "mode": snapshot_now(context).get("backend_modes", {}).get(backend),
        "policy_version": policy["version"] if policy else None,
        "capacity": [one for one in report.get("capacity") or () if one.get("backend") == backend],
        "curves": [one for one in report.get("curves") or () if one.get("backend") == backend],
        "server": feed_state(context),
    }
    return responses.as_json(shown)


def backend_history(context: AppContext, request: Request, backend: str) -> Response:
    """The load of one backend over time, and whose it was."""
    row_of(context.source.backends(), "backend", backend)
    from_us, to_us = span_of(context, request, HOUR_US)
    load = context.source.loads.of_backend(backend, from_us, to_us, context.clock.unix_us())
    return responses.as_list(
        load.items,
        from_us=from_us,
        to_us=to_us,
        volumes=load.volumes,
        others=load.others,
        read_every=load.read_every,
    )
