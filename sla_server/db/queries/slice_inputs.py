"""What slices are judged from: rollups, counts against limits, coverage; read as columns, as of one moment.

A judge of tens of thousands of objectives reads as many rows a minute: rows of dicts would cost it more than
the judging. So rows become arrays at once, and histograms stay sparse entries.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from sqlalchemy import ColumnElement, Connection, Executable, Table, select

from pmdaemon.wire.cut import OUTSTANDING_COLUMNS
from pmdaemon.wire.histogram import BUCKETS
from sla_server.db import histogram_codec, schema
from sla_server.db.queries.rows import IN_LIST, chunks, fetched, one_of
from sla_server.rows import Row

Ints = npt.NDArray[np.int64]
ARRAY_ITEMS: Final = 4096
SLOT_NAMES: Final = (
    "slot_us",
    "stream_id",
    "arrived",
    "reads",
    "writes",
    "read_bytes",
    "write_bytes",
    "errors",
    "lat_sum_us",
    "covered_us",
    "held_max",
    "inflight_max",
    *schema.FAILED,
    *OUTSTANDING_COLUMNS,
    "spread_us",
    "told_us",
)
LIMIT_NAMES: Final = ("slot_us", "stream_id", "io", "threshold_us", *schema.LATE_SUMS)


@dataclass(frozen=True, slots=True)
class SliceInputs:
    """What a promise is judged from.

    Attributes:
        slots: a column for each of SLOT_NAMES, of one row a (slot, stream).
        hist: (row, bucket, count) of the histograms, ordered by row; buckets 0..98 reads, 99..197 writes.
        limits: a column for each of LIMIT_NAMES, of one row a (slot, stream, io, threshold).
        coverage: a dict a (slot, gateway): slot_us, gateway_id, covered_us, cuts, gap_cuts (cuts the agent
            had to drop), gap_ios (I/Os that no cut counts). Covers gateways whose streams were idle, too: an
            idle stream has no row.
        plane_gaps: a dict a (slot, gateway, plane): time of ``covered_us`` in which that plane was missing.
        planes: ``streams.planes`` of the streams, if there are plane gaps; "" is left out.
    """

    slots: Mapping[str, Ints]
    hist: tuple[Ints, Ints, Ints]
    limits: Mapping[str, Ints]
    coverage: list[Row]
    plane_gaps: list[Row] = field(default_factory=list)
    planes: Mapping[int, str] = field(default_factory=dict)

    @property
    def rows(self) -> list[Row]:
        """``slots`` as dicts, each with hist_read and hist_write (int64, shape (99,)); of a few."""
        rows = _dicts(self.slots)
        dense = np.zeros((len(rows), histogram_codec.TOTAL_BUCKETS), dtype=np.int64)
        at, bucket, count = self.hist
        np.add.at(dense, (at, bucket), count)
        for row, counts in zip(rows, dense, strict=True):
            row["hist_read"], row["hist_write"] = counts[:BUCKETS], counts[BUCKETS:]
        return rows

    @property
    def missed(self) -> list[Row]:
        """``limits`` as dicts."""
        return _dicts(self.limits)


def _dicts(columns: Mapping[str, Ints]) -> list[Row]:
    lists = zip(*(column.tolist() for column in columns.values()), strict=True)
    return [dict(zip(columns, values, strict=True)) for values in lists]


def read_slice_inputs(
    connection: Connection,
    stream_ids: Collection[int],
    gateway_ids: Collection[str],
    from_us: int,
    to_us: int,
) -> SliceInputs:
    """All of it, in one transaction; see ``SqlReader.slice_inputs``."""
    is_postgresql = connection.dialect.name == "postgresql"
    if is_postgresql:
        connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    most = ARRAY_ITEMS if is_postgresql else IN_LIST
    slots: list[Sequence[Any]] = []
    limits: list[Sequence[Any]] = []
    asked = ((schema.rollups, (*SLOT_NAMES, "hist"), slots), (schema.rollup_missed, LIMIT_NAMES, limits))
    for chunk in chunks(sorted(stream_ids), most):
        for table, names, into in asked:
            wanted = one_of(connection, table.c.stream_id, chunk)
            into += connection.execute(_between(table, names, wanted, from_us, to_us)).all()
    coverage: list[Row] = []
    gaps: list[Row] = []
    for gateways in chunks(sorted(gateway_ids), most):
        for table, found in ((schema.coverage, coverage), (schema.plane_gaps, gaps)):
            wanted = one_of(connection, table.c.gateway_id, gateways)
            found += fetched(connection, _between(table, tuple(table.c.keys()), wanted, from_us, to_us))
    planes: dict[int, str] = {}
    for chunk in chunks(sorted(stream_ids), most) if gaps else ():
        table = schema.streams
        known = one_of(connection, table.c.stream_id, chunk), table.c.planes != ""
        planes |= {
            row[0]: row[1]
            for row in connection.execute(select(table.c.stream_id, table.c.planes).where(*known))
        }
    hist = histogram_codec.entries_of([row[-1] for row in slots])
    return SliceInputs(
        _columns(SLOT_NAMES, slots), hist, _columns(LIMIT_NAMES, limits), coverage, gaps, planes
    )


def _between(
    table: Table, names: Iterable[str], wanted: ColumnElement[bool], from_us: int, to_us: int
) -> Executable:
    time = table.c.slot_us
    return select(*(table.c[name] for name in names)).where(time >= from_us, time < to_us, wanted)


def _columns(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> dict[str, Ints]:
    """The first columns of the rows, by name."""
    columns = list(zip(*rows, strict=True)) or [()] * len(names)
    return {name: np.array(column, dtype=np.int64) for name, column in zip(names, columns, strict=False)}
