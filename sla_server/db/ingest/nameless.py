"""How many streams without names a gateway may have: rows that cuts make for ids which were never announced.

Names may come after the first cut, or never, if an agent was restarted before it reached the server: its
statistics count all the same. But ids are an agent's to choose. So a gateway has ``MAX_NAMELESS`` such rows
at most; of more, the statistics stay out of SQL, and an event a day says so.

Ids that were looked up once are remembered, so a window of known streams costs one search in memory. Not
thread-safe: belongs to whoever commits. The database is asked about the others only.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

import numpy as np
import structlog
from sqlalchemy import Connection, func, select

from pmdaemon.wire.cut import MAX_ROWS
from sla_server.db import schema
from sla_server.db.ingest.accumulator import Int64s
from sla_server.db.ingest.inventory import event_row
from sla_server.db.ingest.window import IngestWindow
from sla_server.db.queries.query import chunks
from sla_server.db.upserts import upsert

MAX_NAMELESS: Final = MAX_ROWS
_DAY_US: Final = 86_400_000_000
log = structlog.get_logger("dbmanager")


class Nameless:
    """Remembers which streams have a row.

    Attributes:
        left_out: streams of windows that were left out, since the start.
    """

    def __init__(self) -> None:
        self._known: Int64s = np.zeros(0, dtype=np.int64)  # sorted
        self.left_out = 0

    def screen(self, connection: Connection, window: IngestWindow, now_us: int) -> None:
        """Leave those streams out of a window that are too many without a name."""
        ids, gateways = window.streams.ids, window.streams.gateways
        unknown = np.flatnonzero(~np.isin(ids, self._known, assume_unique=True))
        if not len(unknown):
            return
        stored = _stored(connection, ids[unknown])
        new = unknown[~np.isin(ids[unknown], stored)]
        counts = _counted(connection) if len(new) else Counter()
        excess, over = [], Counter[str]()
        for number in new.tolist():
            counts[gateways[number]] += 1
            if counts[gateways[number]] > MAX_NAMELESS:
                excess.append(number)
                over[gateways[number]] += 1
        window.left_out = np.array(excess, dtype=np.int64)
        self._known = np.union1d(self._known, ids[np.setdiff1d(unknown, window.left_out)])
        self.left_out += len(excess)
        upsert(connection, schema.events, [_event(name, count, now_us) for name, count in over.items()])


def _stored(connection: Connection, ids: Int64s) -> Int64s:
    column = schema.streams.c.stream_id
    found: list[int] = []
    for some in chunks(ids.tolist()):
        found += connection.scalars(select(column).where(column.in_(some)))
    return np.array(found, dtype=np.int64)


def _counted(connection: Connection) -> Counter[str]:
    """Rows without names, by gateway_id."""
    table = schema.streams
    statement = select(table.c.gateway_id, func.count()).where(table.c.volume == "")
    rows = connection.execute(statement.group_by(table.c.gateway_id))
    return Counter({row[0]: row[1] for row in rows})


def _event(gateway_id: str, count: int, now_us: int) -> dict[str, object]:
    text = (
        f"gateway {gateway_id} sends statistics of streams that it never announced: {count} beyond the "
        f"{MAX_NAMELESS} that are kept were left out. Look at its agent"
    )
    log.warning("streams-left-out", gateway_id=gateway_id, count=count)
    return event_row(
        (gateway_id, "streams", now_us // _DAY_US), now_us, "gateway-over-limit", "warning",
        element="gateway", subject=gateway_id, text=text,
        details={"gateway_id": gateway_id, "what": "streams without names", "refused": count},
    )  # fmt: skip
