"""Handlers about gateways: those that were ever seen, as they are now, and those that the server dials."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any, Final

from flask import Request, Response

from sla_server.api import responses
from sla_server.api.context import AppContext
from sla_server.api.filters import GATEWAY_STATES, chosen
from sla_server.api.handlers.read import paged, snapshot_now, sorted_as_asked, with_live
from sla_server.api.metrics import FRESH_S
from sla_server.rows import Row

CONFIGURATION: Final = "configuration"
DIALLED_FILE: Final = "dialled.json"
_WORST: Final = {state: rank for rank, state in enumerate(("lost", "refused", "stalled", "detached", "up"))}
ORDERS: Final[dict[str, Callable[[Row], Any] | None]] = {
    "name": None,
    "trouble": lambda row: _WORST.get(row["state"], len(_WORST)),
    "oldest": lambda row: row.get("last_cut_us") or inf,
    "waited": lambda row: -(row.get("io_waited_ratio") or 0.0),
    "lost": lambda row: -(row.get("dropped_cuts") or 0),
}
"""What rows are sorted by, as they are now; None: as they come, by name. Equal ones stay so."""


def gateways(context: AppContext, request: Request) -> Response:
    """Rows of SQL with the live counts of exports and streams; all, or a page of those that are asked for.

    They are filtered and sorted by what the live view says, where it knows a gateway: lists show that.
    """
    part, states = request.args.get("match", "").lower(), chosen(request, "state", GATEWAY_STATES)
    live = {row.get("gateway_id"): row for row in snapshot_now(context)["gateways"]}
    known = [
        (row, {**row, **live.get(row["gateway_id"], {})})
        for row in context.source.gateways()
        if part in str(row["name"]).lower()
    ]
    wanted = [(row, now) for row, now in known if not states or now["state"] in states]
    rows = sorted_as_asked(request, wanted, ORDERS)
    return paged(context, request, rows, lambda page: with_live(context, page, "gateways", "gateway_id"))


def gateway_list(context: AppContext, _request: Request) -> Response:
    """Gateways to dial, from both lists."""
    return responses.as_list(listed_gateways(context))


def listed_gateways(context: AppContext) -> list[Row]:
    """The gateways that the PMDaemon dials, by address.

    Three sources are joined by address: the table ``gateway_list``, the file in which the PMDaemon reports
    its dialling (``pmdaemon.poller.dialler``), and the gateways ever seen, whose address says which one
    answered there.

    Returns:
        Rows ``{address, name, source: "list" | "configuration", state, reason, answers_as: name or null}``.
        ``state`` is the daemon's (connected, dialling, waiting, not-dialled), or ``pending`` while the daemon
        has not taken the entry over yet (some seconds), or ``unknown`` while its file is old or missing.
    """
    reported = _reported_gateways(context.metrics.folder)
    state = "unknown" if reported is None else "pending"
    rows = {
        row["address"]: {**row, "source": "list", "state": state, "reason": ""}
        for row in context.source.gateway_list()
    }
    for row in reported or ():
        if row["address"] in rows or row["source"] == CONFIGURATION:  # else it was removed just now
            rows[row["address"]] = row
    names = {row.get("address"): row["name"] for row in context.source.gateways()}
    for row in rows.values():
        row["answers_as"] = names.get(row["address"]) if row["state"] == "connected" else None
    return [rows[address] for address in sorted(rows)]


def _reported_gateways(folder: Path | None) -> list[Row] | None:
    """Rows of the daemon's file; None without a fresh and readable one."""
    if folder is None:
        return None
    path = folder / DIALLED_FILE
    try:
        if time.time() - path.stat().st_mtime > FRESH_S:
            return None
        rows: list[Row] = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return rows
