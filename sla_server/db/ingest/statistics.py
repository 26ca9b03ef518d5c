"""The statistics part of the ingest transaction: a window to rollups, hours, missed, streams, coverage, ...

Counters are added by SQL (``x = x + excluded.x``). Histograms are blobs, so the stored ones are read, added
in numpy and set, inside the same transaction; whoever else changes them holds the cursor meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from sqlalchemy import Connection, Table, func, select, update

from sla_server.db import histogram_codec, schema
from sla_server.db.bulk import Columns, upsert_columns
from sla_server.db.ingest.accumulator import Int64s
from sla_server.db.ingest.window import GAUGES, HOUR_SUMS, ROLLUP_SUMS, IngestWindow
from sla_server.db.queries.query import IN_LIST
from sla_server.db.upserts import Params, upsert

Decode = Callable[[list[bytes]], Int64s]
DAY_US: Final = 86_400_000_000
"""A gateway that got no further is still in scope of what is judged now."""
AHEAD_US: Final = 60_000_000
"""More than clocks in order, and ways, can make of a time."""
FETCH_ROWS: Final = 10_000  # blobs decoded at a time: 16 MB when dense


def store_statistics(connection: Connection, window: IngestWindow, now_us: int) -> None:
    """Add the window to every statistics table, and move the watermarks."""
    for slot_us, sheet in sorted(window.slots.items()):
        rows, columns = window.slot_columns(slot_us)
        hist = sheet.hist_of(rows)
        _add_stored(
            connection, schema.rollups, slot_us, columns["stream_id"], hist, histogram_codec.decode_many
        )
        values: Columns = {**columns, "hist": histogram_codec.encode_many(hist)}
        upsert_columns(connection, schema.rollups, values, add=ROLLUP_SUMS, maximum=GAUGES, set_=("hist",))
    for hour_us, sheet in sorted(window.hours.items()):
        rows, columns = window.hour_columns(hour_us)
        hist, table = sheet.hist_of(rows), schema.rollup_hours
        _add_stored(connection, table, hour_us, columns["stream_id"], hist, histogram_codec.decode_hours)
        values = {**columns, "hist": histogram_codec.encode_hours(hist)}
        upsert_columns(connection, table, values, add=HOUR_SUMS, maximum=GAUGES, set_=("hist",))
    missed = window.missed_columns()
    upsert_columns(connection, schema.rollup_missed, missed, add=("counted", "missed"))
    _store_stream_sums(connection, window)
    _store_gateway_sums(connection, window)
    _store_watermarks(connection, window, now_us)


def forget_future(connection: Connection, now_us: int) -> int:
    """Take back what only a clock that was ahead can have written; returns by how many microseconds it was.

    Progress and last-seen times never fall by themselves, so they would say nothing until that time has come.
    How far such a gateway really got is not known; its next cut says it.
    """
    limit_us, ahead_us = now_us + AHEAD_US, 0
    for column, value_us in (
        (schema.progress.c.corrected_us, now_us - DAY_US),
        (schema.gateways.c.last_cut_us, now_us),
        (schema.gateways.c.last_seen_us, now_us),
        (schema.streams.c.first_seen_us, now_us),
        (schema.streams.c.last_us, now_us),
    ):
        newest_us = connection.execute(select(func.max(column))).scalar_one() or 0
        if newest_us > limit_us:
            ahead_us = max(ahead_us, newest_us - now_us)
            connection.execute(update(column.table).where(column > limit_us).values({column: value_us}))
    return ahead_us


def _add_stored(
    connection: Connection, table: Table, time_us: int, stream_ids: Int64s, hist: Int64s, decode: Decode
) -> None:
    """Add what is stored of a slot or hour to ``hist``, a row for each of the sorted ``stream_ids``."""
    time_column, stream_column = list(table.primary_key.columns)[:2]
    statement = select(stream_column, table.c.hist).where(time_column == time_us)
    if len(stream_ids) <= IN_LIST:
        statement = statement.where(stream_column.in_(stream_ids.tolist()))
    for some in connection.execute(statement).partitions(FETCH_ROWS):
        stored = np.array([row[0] for row in some], dtype=np.int64)
        place = np.minimum(np.searchsorted(stream_ids, stored), len(stream_ids) - 1)
        mine = np.flatnonzero(stream_ids[place] == stored)
        hist[place[mine]] += decode([some[index][1] for index in mine.tolist()])


def _store_stream_sums(connection: Connection, window: IngestWindow) -> None:
    """Lifetime sums; a stream never announced gets a row without names, which STREAMS_SEEN fills in."""
    rows, columns = window.stream_columns()
    names = window.streams.gateways
    values: Columns = {**columns, "gateway_id": [names[number] for number in rows.tolist()]}
    upsert_columns(connection, schema.streams, values, add=schema.STREAM_SUMS, maximum=("last_us",))


def _store_gateway_sums(connection: Connection, window: IngestWindow) -> None:
    """Coverage, progress and the gateways' newest cut: a row a gateway, not a row a stream."""
    names = ("covered_us", "cuts", "gap_cuts")
    coverage = [
        {"slot_us": slot_us, "gateway_id": gateway_id, **dict(zip(names, sums, strict=True))}
        for (slot_us, gateway_id), sums in window.coverage.items()
    ]
    upsert(connection, schema.coverage, coverage, add=names)
    progress = [{"gateway_id": name, "corrected_us": last[0]} for name, last in window.newest.items()]
    upsert(connection, schema.progress, progress, maximum=("corrected_us",))
    gateways: Params = [
        {
            "gateway_id": gateway_id,
            "name": gateway_id,
            "state": "up",
            "first_seen_us": recv_us,
            "last_seen_us": recv_us,
            "last_cut_us": end_us,
            "clock_offset_us": offset_us,
        }
        for gateway_id, (end_us, recv_us, offset_us) in window.newest.items()
    ]
    raised = ("last_seen_us", "last_cut_us")
    upsert(connection, schema.gateways, gateways, set_=("clock_offset_us",), maximum=raised)


def _store_watermarks(connection: Connection, window: IngestWindow, now_us: int) -> None:
    rows: Params = [
        {"gateway_id": gateway_id, "epoch": str(epoch), "seq": seq, "updated_us": now_us}
        for (gateway_id, epoch), seq in window.marks.items()
    ]
    upsert(connection, schema.ingest_watermark, rows, set_=("updated_us",), maximum=("seq",))
