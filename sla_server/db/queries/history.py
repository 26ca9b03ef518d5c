"""A volume's past for charts: one row a slot, or one an hour where slots are too many or gone.

Theory of operation. Rollups are keyed by (slot, stream), in the order in which they are written. A range of
slots would make the database read the rows of *all* streams in it; but slots are known in advance, so the
query names each one: some thousand look-ups by the whole key, no second index to keep up at ingest. Sums are
made by the database. Histograms are blobs; joined end to end they are still a histogram (entries of one
bucket add up, hours have a fixed length), so the database joins them and numpy counts.

Rows are by the hour when the range has more than ``SLOTS_MAX`` slots or begins where single rollups have
moved to files. The newest row is not complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Table,
    cast,
    func,
    literal,
    select,
)

from pmdaemon.wire.histogram import BUCKETS, COARSE_BUCKETS, edges_for
from sla_server.db import histogram_codec, schema
from sla_server.db.archive.manifest import MOVED_KEY
from sla_server.db.partitions import SPANS
from sla_server.db.queries.rows import fetched, one_of
from sla_server.db.schema import HOUR_US
from sla_server.rows import Row

SLOTS_MAX: Final = 3_000  # 50 hours of minutes: more points than any screen has, and all that SQL keeps
PERCENTILES: Final = (50, 95, 99)
_GAUGES: Final = ("held_max", "inflight_max")


def read_history(connection: Connection, stream_ids: Sequence[int], from_us: int, to_us: int) -> list[Row]:
    """Rows of some streams together, oldest first; see ``SqlReader.rollup_history`` for what they hold."""
    slot_us, moved_us = read_settings(connection)
    is_fine = from_us >= moved_us and (to_us - from_us) // slot_us <= SLOTS_MAX
    table = schema.rollups if is_fine else schema.rollup_hours
    step_us = slot_us if is_fine else HOUR_US
    first_us, last_us = extent(connection, table, from_us // step_us * step_us, to_us)
    if not stream_ids or last_us < first_us:
        return []
    rows: list[Row] = []
    for times in by_partition(range(first_us, last_us + 1, step_us), SPANS[table.name]):
        result = connection.execute(sums(connection, table, times, stream_ids))
        names = list(result.keys())
        rows += [dict(zip(names, row, strict=True)) for row in result]
    return _finished(connection, rows, step_us, BUCKETS if is_fine else COARSE_BUCKETS)


def read_settings(connection: Connection) -> tuple[int, int]:
    """(length of a slot, since when single rollups are in SQL), both us."""
    table = schema.meta
    statement = select(table.c.key, table.c.value).where(table.c.key.in_(("rollup_s", MOVED_KEY)))
    values = {key: int(value) for key, value in connection.execute(statement)}
    return values.get("rollup_s", 60) * 1_000_000, values.get(MOVED_KEY, 0)


def extent(connection: Connection, table: Table, from_us: int, to_us: int) -> tuple[int, int]:
    """The oldest and the newest time with rows in [from_us, to_us); (0, -1) without any."""
    time = table.primary_key.columns[0]
    within = time >= from_us, time < to_us
    # Two statements: each is one step into the index; MIN and MAX together may become a scan.
    oldest = connection.execute(select(func.min(time)).where(*within)).scalar()
    newest = connection.execute(select(func.max(time)).where(*within)).scalar()
    return (0, -1) if oldest is None or newest is None else (int(oldest), int(newest))


def by_partition(times: range, span_us: int) -> Iterator[range]:
    """The times of one partition at a time: PostgreSQL would look for every time in each of them."""
    start_us = times.start
    while start_us < times.stop:
        end_us = min((start_us // span_us + 1) * span_us, times.stop)
        yield range(start_us, end_us, times.step)
        start_us += -(-(end_us - start_us) // times.step) * times.step


def sums(
    connection: Connection,
    table: Table,
    times: Sequence[int],
    stream_ids: Sequence[int],
    *,
    by: str = "slot_us",
) -> Any:
    """Counters and joined histograms of some streams at some times, ``by`` slot_us or by stream_id.

    ``newest_us`` is the newest time of those that are together in a row.
    """
    time, stream = table.primary_key.columns
    key = time if by == "slot_us" else stream
    is_postgresql = connection.dialect.name == "postgresql"
    return (
        select(
            key.label(by),
            *(() if key is time else (func.max(time).label("newest_us"),)),
            *(cast(func.sum(table.c[name]), BigInteger).label(name) for name in schema.COUNTERS),
            *(func.max(table.c[name]).label(name) for name in _GAUGES),
            _joined(table.c.hist, is_postgresql).label("hist"),
        )
        # The bounds say nothing new; they show PostgreSQL which partitions to leave out.
        .where(time >= times[0], time <= times[-1])
        .where(one_of(connection, time, times), one_of(connection, stream, stream_ids))
        .group_by(key)
        .order_by(key)
    )


def _joined(column: ColumnElement[bytes], is_postgresql: bool) -> ColumnElement[Any]:
    """All blobs of a group end to end; SQLite has that for text only."""
    if is_postgresql:
        return func.string_agg(column, literal(b""))
    return func.group_concat(func.hex(column), "")


def _finished(connection: Connection, rows: list[Row], length_us: int, buckets: int) -> list[Row]:
    """Joined histograms become percentiles, counts become rates."""
    add_percentiles(connection, rows, buckets)
    for row in rows:
        row["length_us"] = length_us
        row["iops"] = (row["reads"] + row["writes"]) * 1e6 / length_us
        row["bytes_per_s"] = (row["read_bytes"] + row["write_bytes"]) * 1e6 / length_us
    return rows


def add_percentiles(connection: Connection, rows: list[Row], buckets: int) -> None:
    """The joined histogram of each row becomes its percentiles, in place."""
    joined = [row.pop("hist") for row in rows]
    blobs = joined if connection.dialect.name == "postgresql" else [bytes.fromhex(text) for text in joined]
    counts = _fine_counts(blobs) if buckets == BUCKETS else _coarse_counts(blobs)
    columns = [percentiles_upper_us(counts, percentile) for percentile in PERCENTILES]
    for row, values in zip(rows, zip(*columns, strict=True), strict=True):
        row |= {f"p{name}_us": value for name, value in zip(PERCENTILES, values, strict=True)}


def _fine_counts(blobs: list[bytes]) -> npt.NDArray[np.int64]:
    """Shape (rows, 99), reads and writes together."""
    index, bucket, count = histogram_codec.entries_of(blobs)
    # Summed as float64, which is exact up to 2**53 I/Os in a slot.
    flat = np.bincount(index * BUCKETS + bucket % BUCKETS, weights=count, minlength=len(blobs) * BUCKETS)
    return flat.astype(np.int64).reshape(len(blobs), BUCKETS)


def _coarse_counts(blobs: list[bytes]) -> npt.NDArray[np.int64]:
    """Shape (rows, 50)."""
    if not blobs:
        return np.zeros((0, COARSE_BUCKETS), dtype=np.int64)
    lengths = np.array([len(blob) for blob in blobs]) // (8 * COARSE_BUCKETS)
    first = np.cumsum(lengths) - lengths
    sums: npt.NDArray[np.int64] = np.add.reduceat(histogram_codec.decode_hours(blobs), first, axis=0)
    return sums


def read_hours(connection: Connection, from_us: int, to_us: int) -> list[Row]:
    """See ``SqlReader.hours``."""
    hours, streams = schema.rollup_hours, schema.streams
    statement = (
        select(hours, streams.c.volume, streams.c.client, streams.c.backend, streams.c.gateway_id)
        .join(streams, streams.c.stream_id == hours.c.stream_id)
        .where(hours.c.hour_us >= from_us, hours.c.hour_us < to_us)
        .order_by(hours.c.hour_us, hours.c.stream_id)
    )
    rows = fetched(connection, statement)
    dense = histogram_codec.decode_hours([row["hist"] for row in rows])
    for row, hist in zip(rows, dense, strict=True):
        row["hist"] = hist
    return rows


def percentiles_upper_us(counts: npt.NDArray[np.int64], percentile: float) -> list[float | None]:
    """``histogram.percentile_upper_us`` of many histograms.

    Args:
        counts: shape (n, 99) or (n, 50).
        percentile: 0 to 100.

    Returns:
        n upper edges in microseconds; None for no I/O.
    """
    cumulative = np.cumsum(counts, axis=1)
    totals = cumulative[:, -1]
    bucket = (cumulative < (percentile / 100 * totals)[:, None]).sum(axis=1)
    edges = (edges_for(counts.shape[1])[np.minimum(bucket, counts.shape[1] - 1) + 1] / 1000).tolist()
    return [edge if total else None for edge, total in zip(edges, totals.tolist(), strict=True)]
