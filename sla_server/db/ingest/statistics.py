"""A window's sums into the statistics tables: rollups, hours, missed counts, streams and coverage.

Counters are added by SQL (``x = x + excluded.x``). Histograms are blobs, so the stored ones are read, added
in numpy and set, inside the same transaction; whatever else changes them holds the cursor meanwhile.

Thread: the one that commits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from sqlalchemy import Connection, Table, bindparam, select, update

from sla_server.db import histogram_codec, schema
from sla_server.db.histogram_codec import Int64s
from sla_server.db.ingest.accumulator import GAUGES, HOUR_SUMS, ROLLUP_GAUGES, ROLLUP_SUMS, IngestWindow
from sla_server.db.ingest.ownership import store_left_out
from sla_server.db.ingest.planes import planes_text
from sla_server.db.queries.rows import IN_LIST
from sla_server.db.upsert import Columns, Params, upsert, upsert_columns

Decode = Callable[[list[bytes]], Int64s]
FETCH_ROWS: Final = 10_000  # blobs decoded at a time: 16 MB when dense


def store_statistics(connection: Connection, window: IngestWindow, now_us: int) -> None:
    """Add the window to every statistics table, and move the watermarks."""
    for slot_us, accumulator in sorted(window.slots.items()):
        rows, columns = window.slot_columns(slot_us)
        hist = accumulator.hist_of(rows)
        _add_stored(
            connection, schema.rollups, slot_us, columns["stream_id"], hist, histogram_codec.decode_many
        )
        values: Columns = {**columns, "hist": histogram_codec.encode_many(hist)}
        upsert_columns(
            connection, schema.rollups, values, add=ROLLUP_SUMS, maximum=ROLLUP_GAUGES, set_=("hist",)
        )
    for hour_us, accumulator in sorted(window.hours.items()):
        rows, columns = window.hour_columns(hour_us)
        hist, table = accumulator.hist_of(rows), schema.rollup_hours
        _add_stored(connection, table, hour_us, columns["stream_id"], hist, histogram_codec.decode_hours)
        values = {**columns, "hist": histogram_codec.encode_hours(hist)}
        upsert_columns(connection, table, values, add=HOUR_SUMS, maximum=GAUGES, set_=("hist",))
    missed = window.missed_columns()
    upsert_columns(connection, schema.rollup_missed, missed, add=schema.LATE_SUMS)
    _store_stream_sums(connection, window)
    _store_gateway_sums(connection, window)
    _store_planes(connection, window)
    store_left_out(connection, window.unowned, now_us)
    late: Params = [
        {"slot_us": slot_us, "gateway_id": gateway_id, "noted_us": now_us}
        for slot_us, gateway_id in sorted(window.late)
    ]
    upsert(connection, schema.late_cuts, late, set_=("noted_us",))
    _store_watermarks(connection, window, now_us)


def _add_stored(
    connection: Connection, table: Table, time_us: int, stream_ids: Int64s, hist: Int64s, decode: Decode
) -> None:
    """Add what is stored of a slot or hour to ``hist``, a row for each of the sorted ``stream_ids``."""
    time_column, stream_column = list(table.primary_key.columns)[:2]
    statement = select(stream_column, table.c.hist).where(time_column == time_us)
    if len(stream_ids) <= IN_LIST:
        statement = statement.where(stream_column.in_(stream_ids.tolist()))
    for chunk in connection.execute(statement).partitions(FETCH_ROWS):
        stored = np.array([row[0] for row in chunk], dtype=np.int64)
        place = np.minimum(np.searchsorted(stream_ids, stored), len(stream_ids) - 1)
        matches = np.flatnonzero(stream_ids[place] == stored)
        hist[place[matches]] += decode([chunk[index][1] for index in matches.tolist()])


def _store_stream_sums(connection: Connection, window: IngestWindow) -> None:
    """Lifetime sums; a stream never announced gets a row without names, which STREAMS_SEEN fills in."""
    rows, columns = window.stream_columns()
    names = window.streams.gateways
    values: Columns = {**columns, "gateway_id": [names[number] for number in rows.tolist()]}
    upsert_columns(connection, schema.streams, values, add=schema.STREAM_SUMS, maximum=("last_us",))


def _store_gateway_sums(connection: Connection, window: IngestWindow) -> None:
    """Coverage, progress and the gateways' newest cut: a row a gateway, not a row a stream."""
    names = ("covered_us", "cuts", "gap_cuts", "gap_ios")
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


def _store_planes(connection: Connection, window: IngestWindow) -> None:
    """Time in which planes were missing, and whose streams are whose; mostly nothing."""
    gaps = [
        {"slot_us": slot_us, "gateway_id": gateway_id, "plane": plane, "missing_us": missing_us}
        for (slot_us, gateway_id, plane), missing_us in window.plane_gaps.items()
    ]
    upsert(connection, schema.plane_gaps, gaps, add=("missing_us",))
    table = schema.streams
    changed = [
        {"of_stream": stream_id, "its_planes": planes_text(planes)}
        for stream_id, planes in window.stream_planes.items()
    ]
    if changed:  # all streams of a plane that has another name now
        is_stream = table.c.stream_id == bindparam("of_stream")
        connection.execute(update(table).where(is_stream).values(planes=bindparam("its_planes")), changed)


def _store_watermarks(connection: Connection, window: IngestWindow, now_us: int) -> None:
    rows: Params = [
        {"gateway_id": gateway_id, "epoch": str(epoch), "seq": seq, "updated_us": now_us}
        for (gateway_id, epoch), seq in window.marks.items()
    ]
    upsert(connection, schema.ingest_watermark, rows, set_=("updated_us",), maximum=("seq",))
