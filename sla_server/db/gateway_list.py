"""Publishes the table ``gateway_list`` for the PMDaemon, as ``<runtime_dir>/gateways.json``.

Operators, or whatever keeps the site's inventory, write the table; the PMDaemon dials the gateways in it. It
speaks no SQL and needs the newest list only, so it gets a file, written aside and renamed when its content
changes. A database that is away changes nothing: the last list stays.

Thread: dbmanager's main thread.

Source: P3 (discovery by database); DESIGN.md 5.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import structlog
from sqlalchemy import Engine

from pmdaemon.runtime.files import write_whole
from sla_server.db.errors import DatabaseUnavailable
from sla_server.db.queries.reader import SqlReader

FILE: Final = "gateways.json"
REFRESH_S: Final = 5.0
MAX_LISTED: Final = 10_000
log = structlog.get_logger("gateway-list")


class GatewayListFile:
    """See the module. State: what was written last."""

    def __init__(self, engine: Engine, runtime_dir: Path) -> None:
        self._reader = SqlReader(engine)
        self._path = runtime_dir / FILE
        self._written: str | None = None

    def refresh(self) -> bool:
        """Read the table and write the file if the list has changed; returns whether it was written."""
        try:
            rows = self._reader.gateway_list(MAX_LISTED)
        except DatabaseUnavailable:
            return False  # the writer reports it, and tries again
        text = json.dumps(
            [{"name": row["name"] or row["address"], "address": row["address"]} for row in rows]
        )
        if text == self._written or (self._written is None and not rows and not self._path.exists()):
            self._written = text
            return False
        try:
            write_whole(self._path, text + "\n")
        except OSError as exc:
            log.warning("list-not-written", path=str(self._path), error=exc.strerror)
            return False
        self._written = text
        log.info("list-written", gateways=len(rows))
        return True
