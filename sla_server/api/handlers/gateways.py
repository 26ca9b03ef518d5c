"""The gateways that the PMDaemon dials: who is listed, and how it goes with each.

Three sources are joined by address: the table ``gateway_list``, what the PMDaemon writes about its dialling
(``pmdaemon.poller.dialler``), and the gateways ever seen, whose address says who answered there. A row:

    {address, name, source: "list" | "configuration", state, reason, answers_as: name or null}

``state`` is the daemon's (connected, dialling, waiting, not-dialled), or ``pending`` while the daemon has not
taken the entry over yet (some seconds), or ``unknown`` while its file is old or missing.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Final

from sla_server.api.context import AppContext
from sla_server.api.metrics import FRESH_S

CONFIGURATION: Final = "configuration"
FILE: Final = "dialled.json"
Row = dict[str, Any]


def listed(parts: AppContext) -> list[Row]:
    """All that are listed, by address."""
    told = told_by(parts.meters.folder)
    state = "unknown" if told is None else "pending"
    rows = {
        row["address"]: {**row, "source": "list", "state": state, "reason": ""}
        for row in parts.source.gateway_list()
    }
    for row in told or ():
        if row["address"] in rows or row["source"] == CONFIGURATION:  # else it was removed just now
            rows[row["address"]] = row
    names = {row.get("address"): row["name"] for row in parts.source.gateways()}
    for row in rows.values():
        row["answers_as"] = names.get(row["address"]) if row["state"] == "connected" else None
    return [rows[address] for address in sorted(rows)]


def told_by(folder: Path | None) -> list[Row] | None:
    """What the daemon says; None if it says nothing now."""
    if folder is None:
        return None
    path = folder / FILE
    try:
        if time.time() - path.stat().st_mtime > FRESH_S:
            return None
        rows: list[Row] = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return rows
