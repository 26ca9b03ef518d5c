"""The statistics part of the ingest transaction: a window to rollups, hours, missed, streams, coverage, ...

Counters are added by SQL (``x = x + excluded.x``). Histograms are blobs: those already stored are read once
for each (slot, stream), added in the window, and set.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from sqlalchemy import Connection, Table, select

from sla_server.db import histcodec, schema
from sla_server.db.bulk import Columns, upsert_columns
from sla_server.db.query import IN_LIST, chunks
from sla_server.db.sheets import Int64s, Sheet
from sla_server.db.upserts import Params, upsert
from sla_server.db.window import GAUGES, HOUR_SUMS, ROLLUP_SUMS, Window

Decode = Callable[[list[bytes]], Int64s]


def store_statistics(connection: Connection, window: Window, now_us: int) -> None:
    """Add the window to every statistics table, and move the watermarks."""
    for slot_us, sheet in sorted(window.slots.items()):
        rows, columns = window.slot_columns(slot_us)
        _load(connection, schema.rollups, slot_us, sheet, rows, columns["stream_id"], histcodec.decode_many)
        blobs = histcodec.encode_many(sheet.hist_of(rows))
        values: Columns = {**columns, "hist": blobs}
        upsert_columns(connection, schema.rollups, values, add=ROLLUP_SUMS, maximum=GAUGES, set_=("hist",))
    for hour_us, sheet in sorted(window.hours.items()):
        rows, columns = window.hour_columns(hour_us)
        table = schema.rollup_hours
        _load(connection, table, hour_us, sheet, rows, columns["stream_id"], histcodec.decode_hours)
        blobs = histcodec.encode_hours(sheet.hist_of(rows))
        values = {**columns, "hist": blobs}
        upsert_columns(connection, table, values, add=HOUR_SUMS, maximum=GAUGES, set_=("hist",))
    missed = window.missed_columns()
    upsert_columns(connection, schema.rollup_missed, missed, add=("counted", "missed"))
    _store_stream_sums(connection, window)
    _store_gateway_sums(connection, window)
    _store_watermarks(connection, window, now_us)


def _load(
    connection: Connection,
    table: Table,
    time_us: int,
    sheet: Sheet,
    rows: Int64s,
    stream_ids: Int64s,
    decode: Decode,
) -> None:
    """Add the stored histograms of the rows that were not looked up before."""
    is_new = ~sheet.is_loaded[rows]
    if not is_new.any():
        return
    wanted = dict(zip(stream_ids[is_new].tolist(), rows[is_new].tolist(), strict=True))
    time_column, stream_column = list(table.primary_key.columns)[:2]
    statement = select(stream_column, table.c.hist).where(time_column == time_us)
    found: list[Any] = []
    if len(wanted) <= IN_LIST:
        found += connection.execute(statement.where(stream_column.in_(list(wanted)))).all()
    else:  # a new slot, or a restart: then most of the slot is wanted
        found += [row for row in connection.execute(statement) if row[0] in wanted]
    for some in chunks(found, 10_000):
        number = np.array([wanted[row[0]] for row in some], dtype=np.int64)
        sheet.hist.reshape(-1, sheet.width)[number] += decode([row[1] for row in some])
    sheet.is_loaded[rows] = True


def _store_stream_sums(connection: Connection, window: Window) -> None:
    """Lifetime sums; a stream never announced gets a row without names, which STREAMS_SEEN fills in."""
    rows, columns = window.stream_columns()
    names = window.streams.gateways
    values: Columns = {**columns, "gateway_id": [names[number] for number in rows.tolist()]}
    upsert_columns(connection, schema.streams, values, add=schema.STREAM_SUMS, maximum=("last_us",))


def _store_gateway_sums(connection: Connection, window: Window) -> None:
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


def _store_watermarks(connection: Connection, window: Window, now_us: int) -> None:
    rows: Params = [
        {"gateway_id": gateway_id, "epoch": str(epoch), "seq": seq, "updated_us": now_us}
        for (gateway_id, epoch), seq in window.marks.items()
    ]
    upsert(connection, schema.ingest_watermark, rows, set_=("updated_us",), maximum=("seq",))
