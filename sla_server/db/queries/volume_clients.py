"""What the clients of one volume did over a range: rates and percentiles of each, the busiest first.

The database sums each stream and joins its histograms, as ``history`` has it sum each slot; those of one
client (it may come through several gateways) are added up here, and percentiles are made of the ones shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, Table

from sla_server.db.partitions import SPANS
from sla_server.db.queries.history import add_percentiles, by_partition, sums
from sla_server.db.queries.rows import chunks
from sla_server.rows import Row

STREAMS_A_STATEMENT: Final = 10_000
_ADDED: Final = ("reads", "writes", "read_bytes", "write_bytes", "errors", "cost_milli", "hist")
"""What streams of one client have together; histograms that are joined are one."""


@dataclass(frozen=True, slots=True)
class VolumeClients:
    """The clients of one volume.

    Attributes:
        items: client, iops, read_iops, write_iops, bytes_per_s and cost_per_s (on average), errors, p50_us,
            p95_us, p99_us, and ``last_us``, the end of the newest slot or hour in which it did something.
        count: how many there are; of them as many are in ``items`` as were asked for.
        read_every: one slot or hour in so many was read.
    """

    items: list[Row]
    count: int = 0
    read_every: int = 1


def read_clients(
    connection: Connection,
    table: Table,
    times: range,
    clients: Mapping[int, str],
    seconds: float,
    step_us: int,
    limit: int,
    buckets: int,
) -> tuple[list[Row], int]:
    """(rows of the busiest clients, how many there are).

    Args:
        connection: to read from.
        table: single rollups, or hours.
        times: the slots or hours that are read.
        clients: streams with the client of each.
        seconds: how long all of ``times`` are.
        step_us: how long one of them is.
        limit: rows that are wanted.
        buckets: of the table's histograms.
    """
    found: dict[str, Row] = {}
    for ids in chunks(sorted(clients), STREAMS_A_STATEMENT):
        for some in by_partition(times, SPANS[table.name]):
            result = connection.execute(sums(connection, table, some, ids, by="stream_id"))
            names = tuple(result.keys())
            for values in result:
                row = dict(zip(names, values, strict=True))
                _add(found, clients[row["stream_id"]], row)
    shown = sorted(found.values(), key=lambda row: (-row["cost_milli"], row["client"]))[:limit]
    add_percentiles(connection, shown, buckets)
    return [_finished(row, seconds, step_us) for row in shown], len(found)


def _add(found: dict[str, Row], client: str, row: Row) -> None:
    into = found.get(client)
    if into is None:
        found[client] = {"client": client, **row}
        return
    for name in _ADDED:
        into[name] += row[name]
    into["newest_us"] = max(into["newest_us"], row["newest_us"])


def _finished(row: Row, seconds: float, step_us: int) -> Row:
    """Counts become rates."""
    return {
        "client": row["client"],
        "iops": round((row["reads"] + row["writes"]) / seconds, 3),
        "read_iops": round(row["reads"] / seconds, 3),
        "write_iops": round(row["writes"] / seconds, 3),
        "bytes_per_s": round((row["read_bytes"] + row["write_bytes"]) / seconds),
        "cost_per_s": round(row["cost_milli"] / 1000 / seconds, 3),
        "errors": row["errors"],
        "p50_us": row["p50_us"],
        "p95_us": row["p95_us"],
        "p99_us": row["p99_us"],
        "last_us": row["newest_us"] + step_us,
    }
