"""Handlers about backends: what they carry now and carried, and what they can take."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any, Final

from flask import Request, Response

from sla_server.api import responses
from sla_server.api.context import AppContext
from sla_server.api.handlers.live import feed_state
from sla_server.api.handlers.read import (
    HOUR_US,
    NOTHING_YET,
    paged,
    row_of,
    snapshot_now,
    sorted_as_asked,
    span_of,
    with_live,
)
from sla_server.rows import Row

_PHASES: Final = ("decrease", "hold", "increase")


def _trouble(row: Row) -> int:
    """Storage that does not answer first, then where neighbours are held back."""
    phase = row.get("phase")
    return -1 if row.get("fault") else _PHASES.index(phase) if phase in _PHASES else len(_PHASES)


def _full(row: Row) -> float:
    load, capacity = row.get("cost_per_s"), row.get("capacity_cost_per_s")
    return -load / capacity if load is not None and capacity else inf


ORDERS: Final[dict[str, Callable[[Row], Any] | None]] = {
    "name": None,
    "trouble": _trouble,
    "busiest": lambda row: -(row.get("cost_per_s") or 0.0),
    "fullest": _full,
    "held": lambda row: row.get("cap_cost_per_s") or inf,
}
"""What rows are sorted by, as they are now; None: as they come, by name. Equal ones stay so."""


def backends(context: AppContext, request: Request) -> Response:
    """Capacity by the newest policy with the live cost rates; all, or a page of those that are asked for."""
    part = request.args.get("match", "").lower()
    newest = context.source.pages.policy_reports.newest()
    least = newest.least if newest else {}
    rows = [
        {**row, "capacity_cost_per_s": least.get(row["backend"])}
        for row in known_backends(context)
        if part in row["backend"].lower()
    ]
    live = {row.get("backend"): row for row in snapshot_now(context)["backends"]}
    rows = sorted_as_asked(request, [(row, {**row, **live.get(row["backend"], {})}) for row in rows], ORDERS)
    return paged(context, request, rows, lambda page: with_live(context, page, "backends", "backend"))


def known_backends(context: AppContext) -> list[Row]:
    """Rows of SQL, and those of which nothing is stored yet but that the live view has; by name."""
    rows = context.source.backends()
    stored = {row["backend"] for row in rows}
    live = (str(entry.get("backend") or "") for entry in snapshot_now(context)["backends"])
    fresh: list[Row] = [{"backend": name} for name in sorted({*live} - stored) if name]
    return sorted([*rows, *fresh], key=lambda row: str(row["backend"])) if fresh else rows


def backend(context: AppContext, _request: Request, backend: str) -> Response:
    """One backend: its live values, how many volumes are on it, and what loads each promise on it bears."""
    row = row_of(known_backends(context), "backend", backend)
    newest = context.source.pages.policy_reports.newest()
    row = {**row, "capacity_cost_per_s": newest.least.get(backend) if newest else None}
    shown = {
        **with_live(context, [row], "backends", "backend")[0],
        "volume_count": list(context.source.pages.volume_names().values()).count(backend),
        "mode": snapshot_now(context).get("backend_modes", {}).get(backend),
        "policy_version": newest.version if newest else None,
        "capacity": newest.capacity(backend) if newest else [],
        "curves": newest.curves(backend) if newest else [],
        "server": feed_state(context),
    }
    return responses.as_json(shown)


def backend_history(context: AppContext, request: Request, backend: str) -> Response:
    """The load of one backend over time, and whose it was."""
    row = row_of(known_backends(context), "backend", backend)
    from_us, to_us = span_of(context, request, HOUR_US)
    load = context.source.loads.of_backend(backend, from_us, to_us, context.clock.unix_us())
    return responses.as_list(
        load.items,
        from_us=from_us,
        to_us=to_us,
        volumes=load.volumes,
        others=load.others,
        read_every=load.read_every,
        note=None if load.items or "first_seen_us" in row else NOTHING_YET,
    )
