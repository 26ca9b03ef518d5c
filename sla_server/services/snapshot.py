"""The live snapshot: the brain's view, completed with what SQL and the judge know (messages.md)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from pmdaemon.errors import FrameTooLarge
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from sla_server.agreements.history import Counts
from sla_server.agreements.standing import Standing
from sla_server.services.looker import SHOWN_EVENTS
from sla_server.services.rows import Row

_NOT_JUDGED: Final[Row] = {
    "compliance": None,
    "coverage": None,
    "budget_remaining": None,
    "budget_minutes_left": None,
    "slices": Counts().states(),
}


class Shown:
    """The newest events, whoever raised them, and the processes. Belongs to the main loop."""

    def __init__(self, events: Iterable[Row]) -> None:
        self.processes: list[Row] = []
        self._events: dict[str, Row] = {}
        self.add(events)

    def add(self, events: Iterable[Row]) -> None:
        """Events of ours at once, and all again as SQL has them; the same one counts once."""
        for row in events:
            self._events.setdefault(row["event_id"], row)
        self._events = {row["event_id"]: row for row in self.events()}

    def events(self) -> list[Row]:
        """Newest first."""
        newest = sorted(self._events.values(), key=lambda row: (row["at_us"], row["event_id"]), reverse=True)
        return newest[:SHOWN_EVENTS]

    def compose(
        self,
        view: Mapping[str, Any],
        mode: str,
        standings: Mapping[tuple[str, str], Standing],
        policy: Row | None,
        now_us: int,
        database: str = "",
    ) -> Row:
        """The whole snapshot; ``database``: why SQL cannot be read, "" if it can."""
        slas = []
        for row in view["slas"]:
            standing = standings.get((row["name"], row["objective"]))
            slas.append({**row, **(standing.snapshot() if standing is not None else _NOT_JUDGED)})
        keys = ("name", "state", "restarts", "since_us")
        return {
            **view,
            "at_us": now_us,
            "mode": mode,
            "slas": slas,
            "processes": [{key: row.get(key) for key in keys} for row in self.processes],
            "events": self.events(),
            "policy": policy,
            "database": database,
        }


def snapshot_frame(header: Row) -> bytes:
    """SNAPSHOT; one that exceeds a frame header goes as JSON in the blob, and its header says ``json: true``.

    Raises:
        FrameTooLarge: more than 1 MiB, which the largest ``live_rows`` do not reach.
    """
    try:
        return frame.encode(Kind.SNAPSHOT, header)
    except FrameTooLarge:
        text = json.dumps(header, separators=(",", ":"), allow_nan=False).encode()
        return frame.encode(Kind.SNAPSHOT, {"at_us": header["at_us"], "json": True, "bytes": len(text)}, text)
