"""Reading statistics: what slices are judged from, history for charts, hours for policies.

All ranges are half-open, [from_us, to_us), by the slot's or hour's start.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from sqlalchemy import select

from pmdaemon.wire.histogram import BUCKETS
from sla_server.db import histogram_codec, schema
from sla_server.db.engine import translated
from sla_server.db.queries.history import read_history
from sla_server.db.queries.query import IN_LIST, Queries, Row, chunks, one_of

ARRAY_ITEMS: Final = 4096
_JUDGED: Final = (
    "slot_us",
    "stream_id",
    "arrived",
    "reads",
    "writes",
    "read_bytes",
    "write_bytes",
    "hist",
)


@dataclass(frozen=True, slots=True)
class SliceInputs:
    """What a promise is judged from.

    Attributes:
        rows: a dict a (slot, stream): slot_us, stream_id, arrived, reads, writes, read_bytes, write_bytes,
            and hist_read, hist_write (int64, shape (99,)).
        missed: a dict a (slot, stream, io, threshold): slot_us, stream_id, io, threshold_us, counted, missed.
        coverage: a dict a (slot, gateway): slot_us, gateway_id, covered_us, cuts, gap_cuts (cuts the agent
            had to drop). Covers gateways whose streams were idle, too: an idle stream has no row.
    """

    rows: list[Row]
    missed: list[Row]
    coverage: list[Row]


class StatisticsReads(Queries):
    """Questions about rollups."""

    def slice_inputs(
        self, stream_ids: Collection[int], gateway_ids: Collection[str], from_us: int, to_us: int
    ) -> SliceInputs:
        """Rollups, missed counts and coverage, all as of one moment (one transaction).

        Args:
            stream_ids: streams in scope.
            gateway_ids: gateways in scope, for coverage.
            from_us: start of the first slot, us UTC.
            to_us: end of the last slot, us UTC.
        """
        rows: list[Row] = []
        missed: list[Row] = []
        coverage: list[Row] = []
        rollups, misses, covers = schema.rollups, schema.rollup_missed, schema.coverage
        with translated(self._engine), self._engine.connect() as connection:
            if connection.dialect.name == "postgresql":
                connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            most = ARRAY_ITEMS if connection.dialect.name == "postgresql" else IN_LIST
            asked = [(rollups, [rollups.c[name] for name in _JUDGED], rows), (misses, list(misses.c), missed)]
            for some in chunks(sorted(stream_ids), most):
                for table, columns, into in asked:
                    statement = select(*columns).where(
                        table.c.slot_us >= from_us,
                        table.c.slot_us < to_us,
                        one_of(connection, table.c.stream_id, some),
                    )
                    into += self._fetch(connection, statement)
            for names in chunks(sorted(gateway_ids), most):
                statement = select(covers).where(
                    covers.c.slot_us >= from_us,
                    covers.c.slot_us < to_us,
                    one_of(connection, covers.c.gateway_id, names),
                )
                coverage += self._fetch(connection, statement)
        _decode_hist(rows)
        return SliceInputs(rows, missed, coverage)

    def missed(
        self, stream_ids: Collection[int], from_us: int, to_us: int
    ) -> dict[tuple[int, int], tuple[int, int]]:
        """(io, threshold_us) to (counted, missed), summed over streams and slots."""
        table = schema.rollup_missed
        sums: dict[tuple[int, int], tuple[int, int]] = {}
        for some in chunks(sorted(stream_ids)):
            statement = select(table).where(
                table.c.slot_us >= from_us, table.c.slot_us < to_us, table.c.stream_id.in_(some)
            )
            for row in self._rows(statement):
                key = (row["io"], row["threshold_us"])
                counted, missed = sums.get(key, (0, 0))
                sums[key] = (counted + row["counted"], missed + row["missed"])
        return sums

    def rollup_history(self, volume: str, from_us: int, to_us: int) -> list[Row]:
        """One row a slot, summed over the volume's streams, oldest first.

        Long ranges, and those whose single rollups have moved to files, come by the hour (``history``). Each
        row has slot_us (its start), length_us, the counters, held_max, inflight_max, iops, bytes_per_s and
        p50_us, p95_us, p99_us (upper bucket edges of reads and writes together; None without I/O).
        """
        streams = schema.streams
        statement = select(streams.c.stream_id).where(streams.c.volume == volume)
        with translated(self._engine), self._engine.connect() as connection:
            stream_ids = sorted(connection.execute(statement).scalars())
            return read_history(connection, stream_ids, from_us, to_us)

    def hours(self, from_us: int, to_us: int) -> list[Row]:
        """Hourly rollups with their stream's names; ``hist`` is int64 of shape (50,)."""
        hours, streams = schema.rollup_hours, schema.streams
        statement = (
            select(hours, streams.c.volume, streams.c.client, streams.c.backend, streams.c.gateway_id)
            .join(streams, streams.c.stream_id == hours.c.stream_id)
            .where(hours.c.hour_us >= from_us, hours.c.hour_us < to_us)
            .order_by(hours.c.hour_us, hours.c.stream_id)
        )
        rows = self._rows(statement)
        dense = histogram_codec.decode_hours([row["hist"] for row in rows])
        for row, hist in zip(rows, dense, strict=True):
            row["hist"] = hist
        return rows


def _decode_hist(rows: list[Row]) -> None:
    dense = histogram_codec.decode_many([row.pop("hist") for row in rows])
    for row, counts in zip(rows, dense, strict=True):
        row["hist_read"], row["hist_write"] = counts[:BUCKETS], counts[BUCKETS:]
