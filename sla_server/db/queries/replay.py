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


def read_slots(config: DatabaseConfig, data_dir: Path, from_us: int, to_us: int) -> StoredSlots:
    """All rollups whose slot starts in [from_us, to_us).

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
            rows = sum(row.rows for found in listed for row in found)  # as the manifest says
            for _, table in kinds:
                if rows <= MOST_ROWS:
                    rows += count_rows(connection, table, from_us, to_us, MOST_ROWS - rows).rows
            if rows > MOST_ROWS:
                raise TooManyRows(rows)
            slots = _rows(connection, schema.rollups, (*_KEYS, *SUMS, *GAUGES), from_us, to_us)
            missed = _rows(
                connection, schema.rollup_missed, (*_MISSED_KEYS, "counted", "missed"), from_us, to_us
            )
            streams = _streams(connection)
    finally:
        engine.dispose()
    slots = _with_files(slots, files, listed[0], from_us, to_us)
    missed = _with_files(missed, files, listed[1], from_us, to_us)
    sums = [(name, "sum") for name in SUMS]
    return StoredSlots(
        int(slot_s or 60),
        _added_up(slots, _KEYS, [*sums, *((name, "max") for name in GAUGES)]),
        _added_up(missed, _MISSED_KEYS, [("counted", "sum"), ("missed", "sum")]),
        streams,
    )


def _rows(connection: Connection, table: Table, names: tuple[str, ...], from_us: int, to_us: int) -> pa.Table:
    slot = table.c.slot_us
    statement = select(*(table.c[name] for name in names)).where(slot >= from_us, slot < to_us)
    every = arrow_schema(table)
    kind = pa.schema([every.field(name) for name in names])
    return pa.Table.from_batches(list(batches(connection, statement, kind)), schema=kind)


def _with_files(
    found: pa.Table, files: FileStore, listed: list[FileRow], from_us: int, to_us: int
) -> pa.Table:
    parts = [found]
    for row in listed:
        with opened(files, row) as file:
            for part in tables_of(file, found.schema.names):
                slot = part["slot_us"]
                within = pc.and_(pc.greater_equal(slot, from_us), pc.less(slot, to_us))
                parts.append(part.select(found.schema.names).filter(within).cast(found.schema))
    return pa.concat_tables(parts)


def _added_up(found: pa.Table, keys: tuple[str, ...], sums: list[tuple[str, str]]) -> dict[str, Ints]:
    table = found.group_by(list(keys)).aggregate(sums).sort_by([(key, "ascending") for key in keys])
    columns = {name: table[name] for name in keys} | {name: table[f"{name}_{how}"] for name, how in sums}
    return {name: np.asarray(column.to_numpy(), dtype=np.int64) for name, column in columns.items()}


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
