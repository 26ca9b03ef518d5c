"""The statistics part of the ingest transaction: cuts to rollups, hours, missed, streams, coverage, progress.

Counters are added by SQL (``x = x + excluded.x``). Histograms are blobs, so the stored ones are read, added
in numpy and set, inside the same transaction; there is one writer, so nobody changes them in between.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
from sqlalchemy import Connection, Table, select

from sla_server.db import histcodec, schema
from sla_server.db.batch import Batch
from sla_server.db.query import chunks
from sla_server.db.rollup import Int64s, Rollup, Sums, dense_hours, roll_up, sum_entries
from sla_server.db.upserts import Params, params, upsert
from sla_server.db.watermarks import spool_floors

_GAUGES = ("held_max", "inflight_max")


def store_statistics(connection: Connection, batch: Batch, slot_us: int, now_us: int) -> None:
    """Add the batch's cuts to every statistics table, and move the watermarks."""
    sums = roll_up(batch.cuts, slot_us)
    add = (*schema.COUNTERS, "covered_us")
    slots = _columns(sums.slots)
    slots["hist"] = _merged_sparse(connection, sums.slots)
    upsert(connection, schema.rollups, params(slots), add=add, maximum=_GAUGES, set_=("hist",))
    hours = _columns(sums.hours)
    hours["hist"] = _merged_hours(connection, sums.hours)
    upsert(
        connection, schema.rollup_hours, params(hours), add=(*add, "caps_us"), maximum=_GAUGES, set_=("hist",)
    )
    missed = params(_columns(sums.missed))
    upsert(connection, schema.rollup_missed, missed, add=("counted", "missed"))
    _store_stream_sums(connection, sums)
    _store_gateway_sums(connection, batch, slot_us)
    _store_watermarks(connection, batch, now_us)


def _columns(sums: Sums) -> dict[str, npt.NDArray[Any] | list[Any]]:
    return {**sums.keys, **sums.values}


def _stored_blobs(connection: Connection, table: Table, sums: Sums) -> dict[tuple[int, int], bytes]:
    """Histograms already stored for the keys: (slot or hour, stream_id) to blob."""
    time_column, stream_column = (table.c[name] for name in sums.keys)
    times, stream_ids = sums.keys.values()
    stored: dict[tuple[int, int], bytes] = {}
    for time_us in np.unique(times).tolist():
        for some in chunks(stream_ids[times == time_us].tolist()):
            statement = select(stream_column, table.c.hist).where(
                time_column == time_us, stream_column.in_(some)
            )
            stored |= {(time_us, stream_id): blob for stream_id, blob in connection.execute(statement)}
    return stored


def _merged_sparse(connection: Connection, sums: Sums) -> list[bytes]:
    """The new blobs of rollups: what is stored plus what came."""
    stored = _stored_blobs(connection, schema.rollups, sums)
    keys = list(zip(*(column.tolist() for column in sums.keys.values()), strict=True))
    row, bucket, count = histcodec.entries_of([stored.get(key, b"") for key in keys])
    row, bucket, count = sum_entries(
        np.concatenate((row, sums.hist_row)),
        np.concatenate((bucket, sums.hist_bucket)),
        np.concatenate((count, sums.hist_count)),
    )
    bounds = np.searchsorted(row, np.arange(len(keys) + 1)).tolist()
    return [
        histcodec.encode_sparse(bucket[low:high], count[low:high]) for low, high in itertools.pairwise(bounds)
    ]


def _merged_hours(connection: Connection, sums: Sums) -> list[bytes]:
    """The new blobs of hours."""
    stored = _stored_blobs(connection, schema.rollup_hours, sums)
    dense: Int64s = dense_hours(sums)
    keys = zip(*(column.tolist() for column in sums.keys.values()), strict=True)
    for index, key in enumerate(keys):
        if key in stored:
            dense[index] += histcodec.decode_hours([stored[key]])[0]
    return [histcodec.encode_hour(counts) for counts in dense]


def _store_stream_sums(connection: Connection, sums: Rollup) -> None:
    """Lifetime sums; a stream never announced gets a row without names, which STREAMS_SEEN fills in."""
    columns = _columns(sums.streams)
    columns["first_seen_us"] = sums.first_seen_us
    columns["gateway_id"] = sums.stream_gateway
    upsert(connection, schema.streams, params(columns), add=schema.STREAM_SUMS, maximum=("last_us",))


def _store_gateway_sums(connection: Connection, batch: Batch, slot_us: int) -> None:
    """Coverage, progress and the gateways' newest cut: a row a gateway, not a row a stream."""
    coverage: dict[tuple[int, str], dict[str, Any]] = {}
    newest: dict[str, dict[str, Any]] = {}
    for item in batch.cuts:
        gateway_id, slot = item.cut.gateway_id, item.start_us // slot_us * slot_us
        row = coverage.setdefault(
            (slot, gateway_id),
            {"slot_us": slot, "gateway_id": gateway_id, "covered_us": 0, "cuts": 0, "gap_cuts": 0},
        )
        row["covered_us"] += item.cut.duration_us
        row["cuts"] += 1
        row["gap_cuts"] += item.cut.gap
        last = newest.setdefault(gateway_id, {"gateway_id": gateway_id, "end_us": 0, "recv_us": 0})
        last["end_us"] = max(last["end_us"], item.end_us)
        last["recv_us"] = max(last["recv_us"], item.recv_us)
        last["offset_us"] = item.offset_us
    upsert(connection, schema.coverage, list(coverage.values()), add=("covered_us", "cuts", "gap_cuts"))
    progress = [{"gateway_id": row["gateway_id"], "corrected_us": row["end_us"]} for row in newest.values()]
    upsert(connection, schema.progress, progress, maximum=("corrected_us",))
    gateways: Params = [
        {
            "gateway_id": row["gateway_id"],
            "name": row["gateway_id"],
            "state": "up",
            "first_seen_us": row["recv_us"],
            "last_seen_us": row["recv_us"],
            "last_cut_us": row["end_us"],
            "clock_offset_us": row["offset_us"],
        }
        for row in newest.values()
    ]
    raised = ("last_seen_us", "last_cut_us")
    upsert(connection, schema.gateways, gateways, set_=("clock_offset_us",), maximum=raised)


def _store_watermarks(connection: Connection, batch: Batch, now_us: int) -> None:
    marks = dict(batch.marks)
    for header in batch.gateways:
        for gateway_id, epoch, seq in spool_floors(header):
            marks[gateway_id, epoch] = max(seq, marks.get((gateway_id, epoch), 0))
    rows: Params = [
        {"gateway_id": gateway_id, "epoch": str(epoch), "seq": seq, "updated_us": now_us}
        for (gateway_id, epoch), seq in marks.items()
    ]
    upsert(connection, schema.ingest_watermark, rows, set_=("updated_us",), maximum=("seq",))
