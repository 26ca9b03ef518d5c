"""What was stored of a time, slot by slot: for ``sla simulate --stored``.

Rollups are in SQL for two days and in Parquet files for weeks. Both are read as of one moment and added up,
as a (slot, stream) may have rows in each. Files that were merged meanwhile stay for their grace time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from sqlalchemy import Connection, Table, select

from sla_server.db import schema
from sla_server.db.archive import manifest
from sla_server.db.archive.files import opened, tables_of
from sla_server.db.archive.manifest import FileRow
from sla_server.db.archive.store import FileStore, open_files
from sla_server.db.arrow import arrow_schema, batches
from sla_server.db.config import DatabaseConfig
from sla_server.db.counting import count_rows
from sla_server.db.engine import check_made, make_engine, translated
from sla_server.db.errors import DbError
from sla_server.rows import Row

Ints = npt.NDArray[np.int64]
MOST_ROWS: Final = 4_000_000  # some 16 columns of 8 bytes: half a gigabyte
MOST_READ: Final = 16_000_000  # of which a sample is kept: an hour of 64,000 streams, some minutes
SUMS: Final = (
    "arrived", "reads", "writes", "read_bytes", "write_bytes", "lat_sum_us", "svc_sum_us", "delay_sum_us",
)  # fmt: skip
GAUGES: Final = ("held_max", "inflight_max")
_KEYS: Final = ("slot_us", "stream_id")
_MISSED_KEYS: Final = (*_KEYS, "io", "threshold_us")


class TooManyRows(DbError):
    """More rows than fit in memory."""

    exit_status = 65

    def __init__(self, rows: int) -> None:
        super().__init__(
            f"At least {rows:,} rows are stored of that time, and at most {MOST_ROWS:,} can be replayed. "
            "Choose a shorter time"
        )


@dataclass(frozen=True)
class StreamSample:
    """Which streams are read by themselves, and which are added up.

    Attributes:
        instead: stream_id to the one that it counts for: itself, or a negative number, that of all that are
            added up there. Streams that are not in it are left out.
        added_up: names of the negative ones.
    """

    instead: Mapping[int, int]
    added_up: Mapping[int, Row]


@dataclass(frozen=True)
class StoredSlots:
    """Rollups of a time.

    Attributes:
        slot_s: length of a slot.
        slots: column to int64 array of shape (rows,): slot_us, stream_id, ``SUMS`` and ``GAUGES``.
        missed: the same of slot_us, stream_id, io, threshold_us, counted, missed.
        streams: stream_id to its volume, client, backend and gateway's name.
    """

    slot_s: int
    slots: Mapping[str, Ints]
    missed: Mapping[str, Ints]
    streams: Mapping[int, Row]


def read_slots(
    config: DatabaseConfig, data_dir: Path, from_us: int, to_us: int, sample: StreamSample | None = None
) -> StoredSlots:
    """All rollups whose slot starts in [from_us, to_us); with a sample those of its streams.

    A sample is read in small steps, so that ``MOST_READ`` rows are the limit and not ``MOST_ROWS``.

    Raises:
        TooManyRows: choose a shorter time.
        FileDamaged, FilesUnavailable: a Parquet file cannot be read.
        DatabaseUnavailable: retryable.
    """
    check_made(config, data_dir)
    engine = make_engine(config, data_dir, read_only=True)
    files = open_files(config, data_dir)
    try:
        with translated(engine), engine.connect() as connection:
            if connection.dialect.name == "postgresql":
                connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            slot_s = connection.scalar(select(schema.meta.c.value).where(schema.meta.c.key == "rollup_s"))
            kinds = (manifest.ROLLUPS, schema.rollups), (manifest.MISSED, schema.rollup_missed)
            listed = [manifest.snapshot(connection, kind, from_us, to_us) for kind, _ in kinds]
            most = MOST_ROWS if sample is None else MOST_READ
            rows = sum(row.rows for found in listed for row in found)  # as the manifest says
            for _, table in kinds:
                if rows <= most:
                    rows += count_rows(connection, table, from_us, to_us, most - rows).rows
            if rows > most:
                raise TooManyRows(rows)
            slot_us = int(slot_s or 60) * 1_000_000
            spans = [(from_us, to_us)]
            if sample is not None:  # a slot at a time
                spans = [(start, min(start + slot_us, to_us)) for start in range(from_us, to_us, slot_us)]
            slots = _Gathered(_KEYS, sample)
            missed = _Gathered(_MISSED_KEYS, sample)
            for span in spans:
                slots.add(_rows(connection, schema.rollups, (*_KEYS, *SUMS, *GAUGES), *span))
                missed.add(
                    _rows(connection, schema.rollup_missed, (*_MISSED_KEYS, "counted", "missed"), *span)
                )
            streams = _streams(connection)
    finally:
        engine.dispose()
    _add_files(slots, files, listed[0], from_us, to_us)
    _add_files(missed, files, listed[1], from_us, to_us)
    if sample is not None:
        own = {number: names for number, names in streams.items() if sample.instead.get(number) == number}
        streams = {**own, **sample.added_up}
    return StoredSlots(int(slot_s or 60), slots.columns(), missed.columns(), streams)


def read_streams(config: DatabaseConfig, data_dir: Path) -> dict[int, Row]:
    """Names of all streams, as ``StoredSlots`` has them.

    Raises:
        DatabaseUnavailable: retryable.
    """
    check_made(config, data_dir)
    engine = make_engine(config, data_dir, read_only=True)
    try:
        with translated(engine), engine.connect() as connection:
            return _streams(connection)
    finally:
        engine.dispose()


class _Gathered:
    """Rows of one kind, of which those that a sample adds up are added up as they come."""

    def __init__(self, keys: tuple[str, ...], sample: StreamSample | None) -> None:
        self._keys = keys
        self._own: list[pa.Table] = []
        self._others: list[pa.Table] = []
        self.schema: pa.Schema | None = None
        self._ids: Ints | None = None
        if sample is not None:
            pairs = np.array(sorted(sample.instead.items()), np.int64).reshape(-1, 2)
            self._ids, self._instead = pairs[:, 0], pairs[:, 1]

    def add(self, found: pa.Table) -> None:
        """Rows of SQL or of a part of a file."""
        self.schema = found.schema
        if self._ids is None:
            self._own.append(found)
            return
        ids = found["stream_id"].to_numpy()
        place = np.minimum(np.searchsorted(self._ids, ids), max(len(self._ids) - 1, 0))
        is_known = self._ids[place] == ids if len(self._ids) else np.zeros(len(ids), bool)
        instead = self._instead[place] if len(self._ids) else ids
        self._own.append(found.filter(pa.array(is_known & (instead >= 0))))
        where = found.schema.get_field_index("stream_id")
        column = pa.array(instead, found.schema.field(where).type)
        others = found.set_column(where, "stream_id", column).filter(pa.array(is_known & (instead < 0)))
        if len(others):
            self._others.append(_summed(others, self._keys))

    def columns(self) -> dict[str, Ints]:
        """All rows, added up, by key."""
        own = _added_up(pa.concat_tables(self._own), self._keys)
        if self._others:
            own = pa.concat_tables([own, _summed(pa.concat_tables(self._others), self._keys)])
        own = own.sort_by([(key, "ascending") for key in self._keys])
        return {name: np.asarray(own[name].to_numpy(), dtype=np.int64) for name in own.column_names}


def _rows(connection: Connection, table: Table, names: tuple[str, ...], from_us: int, to_us: int) -> pa.Table:
    slot = table.c.slot_us
    statement = select(*(table.c[name] for name in names)).where(slot >= from_us, slot < to_us)
    every = arrow_schema(table)
    kind = pa.schema([every.field(name) for name in names])
    return pa.Table.from_batches(list(batches(connection, statement, kind)), schema=kind)


def _add_files(
    gathered: _Gathered, files: FileStore, listed: list[FileRow], from_us: int, to_us: int
) -> None:
    kind = gathered.schema
    assert kind is not None  # rows of SQL come first, if only none of them
    for row in listed:
        with opened(files, row) as file:
            for part in tables_of(file, kind.names):
                slot = part["slot_us"]
                within = pc.and_(pc.greater_equal(slot, from_us), pc.less(slot, to_us))
                gathered.add(part.select(kind.names).filter(within).cast(kind))


def _added_up(found: pa.Table, keys: tuple[str, ...]) -> pa.Table:
    """One row a key; a stream may have some in SQL and some in files."""
    rest = [name for name in found.column_names if name not in keys]
    return _grouped(found, keys, [(name, "max" if name in GAUGES else "sum") for name in rest])


def _summed(found: pa.Table, keys: tuple[str, ...]) -> pa.Table:
    """One row a key, of many streams: what they have under way adds up, too."""
    return _grouped(found, keys, [(name, "sum") for name in found.column_names if name not in keys])


def _grouped(found: pa.Table, keys: tuple[str, ...], how: list[tuple[str, str]]) -> pa.Table:
    table = found.group_by(list(keys)).aggregate(how)
    columns = {name: table[name] for name in keys} | {name: table[f"{name}_{each}"] for name, each in how}
    return pa.table({name: column.cast(pa.int64()) for name, column in columns.items()})


def _streams(connection: Connection) -> dict[int, Row]:
    table, gateways = schema.streams, schema.gateways
    names: dict[Any, str] = {
        row.gateway_id: row.name for row in connection.execute(select(gateways.c.gateway_id, gateways.c.name))
    }
    statement = select(table.c.stream_id, table.c.gateway_id, table.c.volume, table.c.client, table.c.backend)
    return {
        row.stream_id: {
            "volume": row.volume,
            "client": row.client,
            "backend": row.backend,
            "gateway": names.get(row.gateway_id) or row.gateway_id,
        }
        for row in connection.execute(statement)
    }
