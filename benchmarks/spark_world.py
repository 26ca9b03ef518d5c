"""Generated statistics for ``make bench-spark``: rollups of a fleet as Parquet files, like the archive's.

``python -m benchmarks.spark_world DIR --rows 10000000`` writes ``rollups/N.parquet`` and
``missed/N.parquet``, an hour each, and nothing else; ``fleet`` says what streams and promises belong to them.
Hour 0 is the last one of the window, and the others go back from it. The same numbers come out whenever and
wherever it runs. Memory: the rows of one hour, some 60 MiB. Disk: some 25 bytes a row.

``--hours`` writes the hourly rollups of a large fleet instead (``LARGE``: 4,000 gateways with 16 streams), a
file a day, and the fine rollups of ten minutes of each of the last six hours, from which capacities are
learnt. Memory: the rows of ten minutes, some 230 MiB. Disk: some 8 bytes a row, 0.7 GB for 86 million.

In each backend one volume is a bully: its gusts are what breaks promises.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from sla_server.agreements.promise import CurveStep, Priority, Promise, VolumeClass
from sla_server.policy_jobs.demand import hour_tables
from sla_server.policy_jobs.inputs import JobInputs
from sla_server.policy_jobs.scope import scope_of
from sla_server.policy_jobs.transforms import HOUR_COLUMNS, MISSED_COLUMNS, SLOT_COLUMNS

Ints = npt.NDArray[np.int64]

SLOT_US = 60_000_000
HOUR_US = 3_600_000_000
SLOTS_A_FILE = 60
END_US = 1_792_000_000 // 3600 * HOUR_US
HALF_LIFE_DAYS = 14.0
THRESHOLD_US = 5_000
PERCENTILE = 95.0
FINE_HOURS = 6
FINE_SLOTS = 10


@dataclass(frozen=True)
class Shape:
    """A fleet.

    Attributes:
        promised: volumes of each backend under one agreement: a tenth of the streams have misses.
        crowded_per_s: load of a backend, cost a second, beyond which promises are missed: a fifth of slots.
    """

    backends: int
    volumes: int
    days: int
    streams_a_volume: int = 2
    promised: int = 5
    crowded_per_s: float = 820.0

    @property
    def streams(self) -> int:
        """Of all backends."""
        return self.backends * self.volumes * self.streams_a_volume

    @property
    def window_us(self) -> tuple[int, int]:
        """Of the job."""
        return END_US - self.days * 24 * HOUR_US, END_US


SMALL = Shape(20, 50, 28)
LARGE = Shape(400, 80, 57, crowded_per_s=1240.0)
STREAMS = SMALL.streams


@dataclass(frozen=True)
class Hour:
    """The rows of an hour (or less)."""

    slots: pa.Table
    missed: pa.Table


def fleet(shape: Shape = SMALL) -> JobInputs:
    """Streams, volumes and promises."""
    numbers = range(shape.streams)
    volumes = [f"v{number // shape.streams_a_volume:05}" for number in numbers]
    backends = [f"array-{number // (shape.streams_a_volume * shape.volumes):03}" for number in numbers]
    streams = pa.table(
        {
            "stream_id": pa.array(numbers, pa.int64()),
            "volume": volumes,
            "client": [f"host-{number % shape.streams_a_volume}" for number in numbers],
            "backend": backends,
        }
    )
    where = dict(zip(volumes, backends, strict=True))
    promises = [_promise(shape, backend) for backend in range(shape.backends)]
    # A floor below what volumes use, or none would ever have a cap.
    neighbours = VolumeClass("all", Priority.BEST_EFFORT, ("*",), floor_iops=1.0)
    scope = scope_of(promises, [neighbours], list(where), ["host-0", "host-1"])
    now = pa.table({"volume": list(where), "backend": list(where.values())})
    hours = hour_tables(dict.fromkeys(backends, "UTC"), shape.window_us, HALF_LIFE_DAYS)
    return JobInputs(streams, now, scope, promises, hours, {})


def _promise(shape: Shape, backend: int) -> Promise:
    names = tuple(f"v{backend * shape.volumes + number:05}" for number in range(shape.promised))
    curve = (CurveStep(1e6, THRESHOLD_US),)
    return Promise(
        f"sla-{backend:03}",
        1,
        "latency",
        Priority.GOLD,
        names,
        ("*",),
        "any",
        PERCENTILE,
        curve,
        0.9,
        60,
        0,
        0,
    )


@dataclass(frozen=True)
class _Counters:
    """Of some intervals of all streams; arrays of shape (intervals, streams)."""

    reads: Ints
    writes: Ints
    size: Ints

    @property
    def cost_milli(self) -> Ints:
        """As gateways charge it."""
        ios = self.reads + self.writes
        return ios * 1000 + ios * self.size * 1000 // 65_536


def _counters(shape: Shape, chance: np.random.Generator, minute: Ints, gusts: int) -> _Counters:
    """I/Os of intervals of a minute that begin at these minutes of the day, with so many kinds of gusts."""
    size = (len(minute), shape.streams)
    backend = np.arange(shape.streams) // (shape.streams_a_volume * shape.volumes)
    is_bully = np.arange(shape.streams) // shape.streams_a_volume % shape.volumes == shape.volumes - 1
    # Busy by day; each backend at its own hour, with gusts of some minutes.
    wave = 1 + np.sin((minute[:, None] - 72 * backend[None, :]) * (2 * np.pi / 1440))
    drawn = chance.integers(0, gusts, (-(-len(minute) // 5), shape.backends))
    gust = np.repeat(drawn, 5, axis=0)[: len(minute)][:, backend]
    base = (30 + 70 * wave * (1 + gust / 2)).astype(np.int64)
    base = np.where(is_bully[None, :] & (gust == gusts - 1), base * 25, base)
    reads = base + chance.integers(0, 40, size)
    # The share of writes changes by the minute, or their cost could not be told from that of reads.
    writes = 10 + 40 * (minute % 3)[:, None] + chance.integers(0, 20, size)
    return _Counters(reads, writes, 4096 * (1 + (gust + minute[:, None]) % 8))


def hour(number: int, slots: int = SLOTS_A_FILE, shape: Shape = SMALL) -> Hour:
    """The rows of an hour; integers from a seeded generator, so equal on every machine."""
    chance = np.random.default_rng([17, number])
    at_us = END_US - (number + 1) * HOUR_US + np.arange(slots, dtype=np.int64) * SLOT_US
    found = _counters(shape, chance, at_us // SLOT_US % 1440, 5)
    reads, writes = found.reads, found.writes
    read_bytes, write_bytes = reads * found.size, writes * found.size
    sequential = (reads + writes) * (np.arange(slots)[:, None] % 4) // 4
    streams = np.arange(shape.streams, dtype=np.int64)
    cells = reads.shape
    columns = {
        "slot_us": np.broadcast_to(at_us[:, None], cells),
        "stream_id": np.broadcast_to(streams, cells),
        "arrived": reads + writes,
        "reads": reads,
        "writes": writes,
        "read_bytes": read_bytes,
        "write_bytes": write_bytes,
        "svc_sum_us": (reads + writes - sequential) * 40
        + reads * 90
        + writes * 150
        + (read_bytes + write_bytes) // 900,
        "sequential": sequential,
        "placed": reads + writes,
        "cost_milli": found.cost_milli,
        "covered_us": np.full(cells, SLOT_US, dtype=np.int64),
        "caps_us": np.zeros(cells, dtype=np.int64),
    }
    is_promised = streams // shape.streams_a_volume % shape.volumes < shape.promised
    backend = streams // (shape.streams_a_volume * shape.volumes)
    counted = (reads + writes)[:, is_promised]
    load = columns["cost_milli"].reshape(slots, shape.backends, -1).sum(axis=2) / 60_000
    is_crowded = (load > shape.crowded_per_s)[:, backend[is_promised]]
    some = counted.shape
    missed: dict[str, npt.NDArray[Any]] = {
        "slot_us": np.broadcast_to(at_us[:, None], some),
        "stream_id": np.broadcast_to(streams[is_promised], some),
        "io": np.zeros(some, dtype=np.int32),
        "threshold_us": np.full(some, THRESHOLD_US, dtype=np.int64),
        "counted": counted,
        "missed": np.where(is_crowded, counted // 4, counted // 100),
    }
    return Hour(
        pa.table({name: columns[name].ravel() for name in SLOT_COLUMNS}),
        pa.table({name: missed[name].ravel() for name in MISSED_COLUMNS}),
    )


def rolled_up_hour(number: int, shape: Shape = LARGE) -> pa.Table:
    """The hourly rollups of an hour: sixty times what one of its minutes has."""
    at_us = END_US - (number + 1) * HOUR_US
    found = _counters(shape, np.random.default_rng([19, number]), np.array([at_us // SLOT_US % 1440]), 2)
    ios = (found.reads + found.writes)[0] * 60
    columns = {
        "hour_us": np.full(shape.streams, at_us, dtype=np.int64),
        "stream_id": np.arange(shape.streams, dtype=np.int64),
        "arrived": ios,
        "reads": found.reads[0] * 60,
        "writes": found.writes[0] * 60,
        "cost_milli": found.cost_milli[0] * 60,
        "covered_us": np.full(shape.streams, HOUR_US, dtype=np.int64),
    }
    return pa.table({name: columns[name] for name in HOUR_COLUMNS})


def write(place: Path, rows: int) -> int:
    """Write hours until there are about so many rollups; returns how many there are."""
    written = number = 0
    for kind in ("rollups", "missed"):
        (place / kind).mkdir(parents=True)
    while written < rows:
        slots = max(1, min(SLOTS_A_FILE, (rows - written) // STREAMS))
        written += _write_fine(place, number, hour(number, slots))
        number += 1
    return written


def _write_fine(place: Path, number: int, made: Hour) -> int:
    pq.write_table(made.slots, place / "rollups" / f"{number:05}.parquet", compression="zstd")
    pq.write_table(made.missed, place / "missed" / f"{number:05}.parquet", compression="zstd")
    return int(made.slots.num_rows)


def write_hours(place: Path, rows: int, shape: Shape = LARGE) -> tuple[int, int]:
    """Write hourly rollups of whole days until there are so many; returns those, and the fine ones."""
    for kind in ("rollups", "missed", "hours"):
        (place / kind).mkdir(parents=True)
    fine = sum(_write_fine(place, number, hour(number, FINE_SLOTS, shape)) for number in range(FINE_HOURS))
    hours = max(1, rows // shape.streams)
    for first in range(0, hours, 24):
        schema = pa.schema([(name, pa.int64()) for name in HOUR_COLUMNS])
        path = place / "hours" / f"{first // 24:03}.parquet"
        with pq.ParquetWriter(path, schema, compression="zstd") as writer:
            for number in range(first, min(first + 24, hours)):
                writer.write_table(rolled_up_hour(FINE_HOURS + number, shape))
    return hours * shape.streams, fine


def main() -> None:
    """Write a world to a directory."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("place", type=Path, help="a directory that does not exist")
    parser.add_argument("--rows", type=int, default=1_000_000, help="rollups, about")
    parser.add_argument("--hours", action="store_true", help="hourly rollups of the large fleet")
    chosen = parser.parse_args()
    if chosen.hours:
        hours, fine = write_hours(chosen.place, chosen.rows)
        print(f"{hours} hours and {fine} rollups in {chosen.place}")
    else:
        print(f"{write(chosen.place, chosen.rows)} rollups in {chosen.place}")


if __name__ == "__main__":
    main()
