"""What volumes of one backend used of it over time, and clients of one volume: whose load it was.

Rollups are keyed by (slot, stream), as ``history`` says, so slots and streams are both named. A backend may
have thousands of streams and a range thousands of slots: of a range with more than ``ROWS_MAX`` rows only one
slot or hour in so many is read, evenly over the range (``read_every``). What is shown of those is exact. Over
some days they are of all times of the day: every 24th hour would show nothing but midnights.
Slots are taken together until there are at most ``POINTS_MAX`` of them: no screen shows more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Final

import numpy as np
import numpy.typing as npt
from sqlalchemy import Connection, Engine, Table, select

from pmdaemon.wire.histogram import BUCKETS, COARSE_BUCKETS
from sla_server.db import schema
from sla_server.db.engine import translated
from sla_server.db.partitions import SPANS
from sla_server.db.queries.history import by_partition, extent, read_settings
from sla_server.db.queries.rows import chunks, one_of
from sla_server.db.queries.volume_clients import STREAMS_A_STATEMENT, VolumeClients, read_clients
from sla_server.db.schema import HOUR_US
from sla_server.rows import Row

ROWS_MAX: Final = 30_000
POINTS_MAX: Final = 240
POINTS_MIN: Final = 24
"""Of a backend with very many streams: then more rows are read."""
NAMED: Final = 6
"""Volumes with a load of their own in the answer; all others together are the rest."""
HOURS_A_DAY: Final = 24
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BackendLoad:
    """The load of one backend.

    Attributes:
        items: oldest first: slot_us, length_us, cost_per_s, iops, bytes_per_s and by_volume: the cost
            rates of ``volumes``, by name. A time in which nothing is stored has none.
        volumes: those that used most in the range, the largest first, ``NAMED`` at most.
        others: how many more used it.
        read_every: one slot or hour in so many was read.
    """

    items: list[Row]
    volumes: list[str]
    others: int = 0
    read_every: int = 1


class LoadQueries:
    """The questions; ``SqlReader.loads``. Thread: any."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def of_backend(self, backend: str, from_us: int, to_us: int, now_us: int) -> BackendLoad:
        """The load of [from_us, to_us); by the hour where slots are too many or have moved to files.

        ``now_us``: a slot that has not ended by then does not come; an hour counts as far as it has gone.
        """
        table = schema.streams
        named = select(table.c.stream_id, table.c.volume).where(table.c.backend == backend)
        with translated(self._engine), self._engine.connect() as connection:
            streams = {row.stream_id: row.volume for row in connection.execute(named)}
            return read_load(connection, streams, from_us, to_us, now_us)

    def of_clients(self, volume: str, from_us: int, to_us: int, now_us: int, limit: int) -> VolumeClients:
        """What clients of a volume did in [from_us, to_us), ``limit`` at most; ``now_us`` as above."""
        streams = schema.streams
        named = select(streams.c.stream_id, streams.c.client).where(streams.c.volume == volume)
        with translated(self._engine), self._engine.connect() as connection:
            clients = {row.stream_id: row.client for row in connection.execute(named)}
            table, read = _times_of(connection, len(clients), from_us, to_us, now_us)
            if not read.starts:
                return VolumeClients([])
            seconds = max(read.seconds(read.starts), 1.0)
            buckets = BUCKETS if table is schema.rollups else COARSE_BUCKETS
            step_us = read.starts.step // read.every
            rows, count = read_clients(
                connection, table, read.starts, clients, seconds, step_us, limit, buckets
            )
            return VolumeClients(rows, count, read.every)


def read_load(
    connection: Connection, streams: Mapping[int, str], from_us: int, to_us: int, now_us: int
) -> BackendLoad:
    """The load of some streams, given with their volumes."""
    table, read = _times_of(connection, len(streams), from_us, to_us, now_us)
    if not read.starts:
        return BackendLoad([], [])
    ids, times = sorted(streams), read.starts
    found = np.concatenate(
        [rows for some in chunks(ids, STREAMS_A_STATEMENT) for rows in _rows(connection, table, times, some)]
    )
    return _summed(found, read, [streams[each] for each in ids], np.array(ids))


def _times_of(
    connection: Connection, streams: int, from_us: int, to_us: int, now_us: int
) -> tuple[Table, _Times]:
    """Where and when is read for so many streams: slots, hours, or of many hours some; of none nothing."""
    slot_us, moved_us = read_settings(connection)
    is_fine = from_us >= moved_us and (to_us - from_us) // slot_us * streams <= ROWS_MAX
    table = schema.rollups if is_fine else schema.rollup_hours
    step_us = slot_us if is_fine else HOUR_US
    first_us, last_us = extent(connection, table, from_us // step_us * step_us, to_us)
    if is_fine:
        last_us = min(last_us, now_us // step_us * step_us - step_us)
    if not streams or last_us < first_us:
        return table, _Times(range(0), 1, now_us)
    times = range(first_us, last_us + 1, step_us)
    every = 1 if is_fine else one_hour_in(len(times), streams)
    return table, _Times(times[::every], every, now_us)


def one_hour_in(hours: int, streams: int) -> int:
    """How many hours there are to one that is read."""
    every = -(-hours * streams // max(ROWS_MAX, POINTS_MIN * streams))
    while hours > 2 * HOURS_A_DAY and gcd(every, HOURS_A_DAY) > 1:
        every += 1
    return every


def _rows(connection: Connection, table: Table, times: range, ids: Sequence[int]) -> Iterator[Numbers]:
    """(time, stream, cost in thousandths, I/Os, bytes) of each; arrays, as there may be over a million."""
    time, stream = table.primary_key.columns
    counts = table.c.reads + table.c.writes, table.c.read_bytes + table.c.write_bytes
    for some in by_partition(times, SPANS[table.name]):
        # The bounds say nothing new; they show PostgreSQL which partitions to leave out.
        bounds = time >= some[0], time <= some[-1]
        statement = select(time, stream, table.c.cost_milli, *counts).where(*bounds)
        wanted = one_of(connection, time, some), one_of(connection, stream, ids)
        rows = [tuple(row) for row in connection.execute(statement.where(*wanted))]
        yield np.array(rows, dtype=np.int64).reshape(-1, 5)


@dataclass(frozen=True, slots=True)
class _Times:
    """Which slots or hours were read."""

    starts: range
    every: int
    now_us: int

    def seconds(self, starts: range) -> float:
        """How long some of them were, so far."""
        step_us = starts.step // self.every
        return (len(starts) * step_us - max(0, starts[-1] + step_us - self.now_us)) / 1e6


def _summed(found: Numbers, read: _Times, owners: Sequence[str], ids: Numbers) -> BackendLoad:
    """Points of some slots each, and of the volumes with most of the load their own.

    ``owners``: the volume of each of ``ids``.
    """
    times = read.starts
    together = -(-len(times) // POINTS_MAX)
    point = (found[:, 0] - times.start) // times.step // together
    names, numbers = np.unique(np.array(owners), return_inverse=True)
    volume = numbers[np.searchsorted(ids, found[:, 1])]
    costs = np.bincount(volume, weights=found[:, 2], minlength=len(names))
    order = np.argsort(-costs, kind="stable")
    users = int((costs > 0).sum())
    chosen = order[: min(NAMED, users)]
    column = np.full(len(names), NAMED)
    column[chosen] = np.arange(len(chosen))
    count = -(-len(times) // together)
    by_volume = np.bincount(
        point * (NAMED + 1) + column[volume], weights=found[:, 2], minlength=count * (NAMED + 1)
    ).reshape(count, NAMED + 1)
    ios, transferred = (np.bincount(point, weights=found[:, at], minlength=count) for at in (3, 4))
    items = []
    for at in np.unique(point).tolist():
        slots = times[at * together : (at + 1) * together]
        seconds = max(read.seconds(slots), 1.0)
        rates = np.round(by_volume[at] / 1000 / seconds, 3)
        items.append(
            {
                "slot_us": slots[0],
                "length_us": len(slots) * times.step,
                "cost_per_s": round(float(by_volume[at].sum()) / 1000 / seconds, 3),
                "iops": round(float(ios[at]) / seconds, 3),
                "bytes_per_s": round(float(transferred[at]) / seconds),
                "by_volume": dict(zip(names[chosen].tolist(), rates.tolist(), strict=False)),
            }
        )
    return BackendLoad(items, names[chosen].tolist(), users - len(chosen), read.every)
