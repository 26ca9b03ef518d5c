"""Reading what exists: gateways, volumes, streams, backends, files, processes, and their lifetime sums."""

from __future__ import annotations

from sqlalchemy import BigInteger, ColumnElement, cast, func, select

from sla_server.db import schema
from sla_server.db.queries.query import Queries, Row

_SUMS = schema.STREAM_SUMS


class InventoryReads(Queries):
    """Questions about what exists."""

    def gateways(self) -> list[Row]:
        """All gateways ever seen, by name."""
        table = schema.gateways
        return self._rows(select(table).order_by(table.c.name, table.c.gateway_id))

    def gateway_list(self) -> list[Row]:
        """Gateways to dial, by address."""
        table = schema.gateway_list
        statement = select(table.c.address, table.c.name).where(table.c.is_enabled)
        return self._rows(statement.order_by(table.c.address))

    def backends(self) -> list[Row]:
        """All backends, by name."""
        return self._rows(select(schema.backends).order_by(schema.backends.c.backend))

    def streams(self, volume: str | None = None) -> list[Row]:
        """Streams with their names and exact lifetime sums, of one volume or all."""
        table = schema.streams
        statement = select(table).order_by(table.c.volume, table.c.client, table.c.stream_id)
        return self._rows(statement if volume is None else statement.where(table.c.volume == volume))

    def stream_count(self) -> int:
        """How many streams there are."""
        (row,) = self._rows(select(func.count().label("streams")).select_from(schema.streams))
        return int(row["streams"])

    def volumes(self) -> list[Row]:
        """Volumes with exact sums over their streams; ``last_us``: end of the newest cut with a row."""
        table, streams = schema.volumes, schema.streams
        sums = (
            select(
                streams.c.volume,
                *(_total(streams.c[name]).label(name) for name in _SUMS),
                func.max(streams.c.last_us).label("last_us"),
                func.count().label("streams"),
            )
            .group_by(streams.c.volume)
            .subquery()
        )
        statement = (
            select(
                table,
                *(func.coalesce(sums.c[name], 0).label(name) for name in (*_SUMS, "streams")),
                sums.c.last_us,
            )
            .select_from(table.outerjoin(sums, sums.c.volume == table.c.volume))
            .order_by(table.c.volume)
        )
        return self._rows(statement)

    def totals(self) -> Row:
        """Lifetime sums over everything, and how many gateways, volumes and streams there are."""
        streams = schema.streams
        statement = select(
            *(func.coalesce(_total(streams.c[name]), 0).label(name) for name in _SUMS),
            func.count().label("streams"),
            select(func.count()).select_from(schema.gateways).scalar_subquery().label("gateways"),
            select(func.count()).select_from(schema.volumes).scalar_subquery().label("volumes"),
            func.max(streams.c.last_us).label("last_us"),
        )
        row = self._one(statement)
        if row is None:  # cannot happen: an aggregate without GROUP BY has one row
            raise AssertionError("no totals")
        return row

    def progress(self) -> dict[str, int]:
        """gateway_id to the corrected end (us UTC) of the newest cut ingested."""
        return {row["gateway_id"]: row["corrected_us"] for row in self._rows(select(schema.progress))}

    def watermarks(self) -> list[tuple[str, int, int]]:
        """(gateway_id, epoch, highest seq ingested)."""
        table = schema.ingest_watermark
        return [(row["gateway_id"], int(row["epoch"]), row["seq"]) for row in self._rows(select(table))]

    def processes(self) -> list[Row]:
        """State of the server's own processes, by name."""
        return self._rows(select(schema.processes).order_by(schema.processes.c.name))

    def manifest(self, kind: str | None = None, *, in_use: bool = True) -> list[Row]:
        """Parquet files, oldest data first; ``in_use``: without those that were replaced."""
        table = schema.manifest
        statement = select(table).order_by(table.c.min_us, table.c.path)
        if kind is not None:
            statement = statement.where(table.c.kind == kind)
        return self._rows(statement.where(table.c.replaced_us.is_(None)) if in_use else statement)


def _total(column: ColumnElement[int]) -> ColumnElement[int]:
    """SUM as int64: PostgreSQL's sum of bigint is numeric, which would arrive as Decimal."""
    return cast(func.sum(column), BigInteger)
