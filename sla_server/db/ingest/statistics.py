"""A window's sums into the statistics tables: rollups, hours, missed counts, streams and coverage.

Counters are added by SQL (``x = x + excluded.x``). Histograms are blobs, so the stored ones are read, added
in numpy and set, inside the same transaction; whatever else changes them holds the cursor meanwhile. Those of
the open slot and hour are remembered from transaction to transaction (``StoredHistograms``).

Thread: the one that commits.
"""

from __future__ import annotations

from collections import Counter
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
_DECODE: Final[dict[str, Decode]] = {
    schema.rollups.name: histogram_codec.decode_many,
    schema.rollup_hours.name: histogram_codec.decode_hours,
}
FETCH_ROWS: Final = 10_000  # blobs decoded at a time: 16 MB when dense
REMEMBERED_BYTES: Final = 128 << 20  # two slots and an hour of 64,000 streams take 80 MB
REMEMBERED_TIMES: Final = 2  # of a table: the open one, and the one before while its last cuts come in
BLOB_BYTES: Final = 150  # a blob, its stream's number and their place in a dict, beside its contents


class StoredHistograms:
    """Histograms as SQL has them, of the newest slots and hours: they need not be read to be added to.

    Invariant: what is remembered of (table, time, stream) is the blob that SQL has, as of the state of the
    database that ``begin`` and ``commit`` name. Of streams that are not remembered nothing is known: they are
    read. A state is whatever moves with every change of these tables but retention's (``forget``): the
    cursors ``sql`` of all queues, and how far rollups have moved to files. It is empty after a start, after a
    transaction that failed (perhaps it was committed all the same), and for a state that it does not know (a
    database that was restored, rollups that were moved).

    Thread: one at a time, the one that commits.
    """

    def __init__(self) -> None:
        self._blobs: dict[tuple[str, int], dict[int, bytes]] = {}
        self._used: dict[tuple[str, int], int] = {}
        self._commits = 0
        self._state: object = None

    def begin(self, state: object) -> None:
        """A transaction has begun in this state; until ``commit`` says the next one, none is known."""
        if state != self._state:
            self.forget()
        self._state = None

    def commit(self, state: object, moved_until_us: int) -> None:
        """The transaction was committed, which led to this state.

        Args:
            state: see the class.
            moved_until_us: late rollups of slots before it move to files again, which changes no state.
        """
        self._commits += 1
        self._state = state
        self._trim(moved_until_us)

    def forget(self) -> None:
        """What SQL has may have changed."""
        self._blobs, self._used, self._state = {}, {}, None

    def add_to(
        self, hist: Int64s, connection: Connection, table: Table, time_us: int, stream_ids: Int64s
    ) -> None:
        """Add what SQL has of a slot or hour to ``hist``, a row for each of the sorted ``stream_ids``."""
        decode = _DECODE[table.name]
        known = self._blobs.get((table.name, time_us), {})
        blobs = list(map(known.get, stream_ids.tolist())) if known else [None] * len(stream_ids)
        for first in range(0, len(blobs), FETCH_ROWS):
            chunk = blobs[first : first + FETCH_ROWS]
            found = [blob for blob in chunk if blob is not None]
            if len(found) == len(chunk):
                hist[first : first + FETCH_ROWS] += decode(found)
            elif found:
                places = [place for place, blob in enumerate(chunk, first) if blob is not None]
                hist[places] += decode(found)
        unknown = np.array([place for place, blob in enumerate(blobs) if blob is None], dtype=np.int64)
        if not len(unknown):
            return
        asked, (time_column, stream_column) = stream_ids[unknown], list(table.primary_key.columns)[:2]
        statement = select(stream_column, table.c.hist).where(time_column == time_us)
        if len(asked) <= IN_LIST:
            statement = statement.where(stream_column.in_(asked.tolist()))
        for rows in connection.execute(statement).partitions(FETCH_ROWS):
            stored = np.array([row[0] for row in rows], dtype=np.int64)
            place = np.minimum(np.searchsorted(asked, stored), len(asked) - 1)
            matches = np.flatnonzero(asked[place] == stored)
            hist[unknown[place[matches]]] += decode([rows[index][1] for index in matches.tolist()])

    def add(self, table: Table, time_us: int, stream_ids: Int64s, blobs: list[bytes]) -> None:
        """SQL has these from now on, if the transaction is committed."""
        key = table.name, time_us
        self._blobs.setdefault(key, {}).update(zip(stream_ids.tolist(), blobs, strict=True))
        self._used[key] = self._commits

    def _trim(self, moved_until_us: int) -> None:
        """Keep what was used last, of that the most streams, of that the newest; within the limits."""
        kept: dict[tuple[str, int], dict[int, bytes]] = {}
        times, left_bytes = Counter[str](), REMEMBERED_BYTES
        for key in sorted(self._blobs, key=self._worth, reverse=True):
            known = self._blobs[key]
            if key[0] == schema.rollups.name and key[1] < moved_until_us:
                continue
            size_bytes = len(known) * BLOB_BYTES + sum(map(len, known.values()))
            if times[key[0]] < REMEMBERED_TIMES and size_bytes <= left_bytes:
                kept[key] = known
                times[key[0]] += 1
                left_bytes -= size_bytes
        self._blobs, self._used = kept, {key: self._used[key] for key in kept}

    def _worth(self, key: tuple[str, int]) -> tuple[int, int, int]:
        return self._used[key], len(self._blobs[key]), key[1]


def store_statistics(
    connection: Connection, window: IngestWindow, now_us: int, stored: StoredHistograms, fence: int = 0
) -> None:
    """Add the window to every statistics table, and move the watermarks."""
    for slot_us, accumulator in sorted(window.slots.items()):
        rows, columns = window.slot_columns(slot_us)
        hist = accumulator.hist_of(rows)
        stored.add_to(hist, connection, schema.rollups, slot_us, columns["stream_id"])
        blobs = histogram_codec.encode_many(hist)
        values: Columns = {**columns, "hist": blobs}
        upsert_columns(
            connection, schema.rollups, values, add=ROLLUP_SUMS, maximum=ROLLUP_GAUGES, set_=("hist",)
        )
        stored.add(schema.rollups, slot_us, columns["stream_id"], blobs)
    for hour_us, accumulator in sorted(window.hours.items()):
        rows, columns = window.hour_columns(hour_us)
        hist, table = accumulator.hist_of(rows), schema.rollup_hours
        stored.add_to(hist, connection, table, hour_us, columns["stream_id"])
        blobs = histogram_codec.encode_hours(hist)
        values = {**columns, "hist": blobs}
        upsert_columns(connection, table, values, add=HOUR_SUMS, maximum=GAUGES, set_=("hist",))
        stored.add(table, hour_us, columns["stream_id"], blobs)
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
    _store_watermarks(connection, window, now_us, fence)


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


def _store_watermarks(connection: Connection, window: IngestWindow, now_us: int, fence: int) -> None:
    rows: Params = [
        {"gateway_id": gateway_id, "epoch": str(epoch), "seq": seq, "updated_us": now_us, "fence": fence}
        for (gateway_id, epoch), seq in window.marks.items()
    ]
    upsert(connection, schema.ingest_watermark, rows, set_=("updated_us",), maximum=("seq", "fence"))
