"""Generated statistics for ``make bench-spark``: rollups of a fleet as Parquet files, like the archive's.

``python -m benchmarks.spark_world DIR --rows 10000000`` writes ``rollups/N.parquet`` and
``missed/N.parquet``, an hour each, and nothing else; ``fleet`` says what streams and promises belong to them.
The same numbers come out whenever and wherever it runs. Memory: the rows of one hour.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sla_server.agreements.promise import CurveStep, Priority, Promise
from sla_server.policy_jobs.demand import hour_tables
from sla_server.policy_jobs.inputs import JobInputs
from sla_server.policy_jobs.scope import scope_of
from sla_server.policy_jobs.transforms import MISSED_COLUMNS, SLOT_COLUMNS

SLOT_US = 60_000_000
SLOTS_A_FILE = 60
FIRST_US = 1_790_000_000 // 3600 * 3600 * 1_000_000
WINDOW_US = 35 * 86_400_000_000
BACKENDS = 20
VOLUMES_A_BACKEND = 50
STREAMS_A_VOLUME = 2
STREAMS = BACKENDS * VOLUMES_A_BACKEND * STREAMS_A_VOLUME
PROMISED = 5  # volumes of each backend under one agreement: a tenth of the streams have misses
THRESHOLD_US = 5_000
PERCENTILE = 95.0
CROWDED_PER_S = 760.0  # load of a backend, cost a second, beyond which promises are missed: a fifth of slots


@dataclass(frozen=True)
class Hour:
    """The rows of an hour (or less)."""

    slots: pa.Table
    missed: pa.Table


def fleet() -> JobInputs:
    """Streams, volumes and promises."""
    numbers = range(STREAMS)
    volumes = [f"v{number // STREAMS_A_VOLUME:05}" for number in numbers]
    backends = [f"array-{number // (STREAMS_A_VOLUME * VOLUMES_A_BACKEND):02}" for number in numbers]
    streams = pa.table(
        {
            "stream_id": pa.array(numbers, pa.int64()),
            "volume": volumes,
            "client": [f"host-{number % STREAMS_A_VOLUME}" for number in numbers],
            "backend": backends,
        }
    )
    where = dict(zip(volumes, backends, strict=True))
    promises = [_promise(backend) for backend in range(BACKENDS)]
    scope = scope_of(promises, [], list(where), ["host-0", "host-1"])
    hours = hour_tables(dict.fromkeys(backends, "UTC"), (FIRST_US, FIRST_US + WINDOW_US), half_life_days=14)
    on = pa.table({"volume": list(where), "backend": list(where.values())})
    return JobInputs(streams, on, scope, promises, hours, {})


def _promise(backend: int) -> Promise:
    names = tuple(f"v{backend * VOLUMES_A_BACKEND + number:05}" for number in range(PROMISED))
    curve = (CurveStep(1e6, THRESHOLD_US),)
    return Promise(
        f"sla-{backend:02}",
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


def hour(number: int, slots: int = SLOTS_A_FILE) -> Hour:
    """The rows of hour ``number``; integers from a seeded generator, so equal on every machine."""
    chance = np.random.default_rng([17, number])
    shape = (slots, STREAMS)
    at_us = FIRST_US + (number * SLOTS_A_FILE + np.arange(slots, dtype=np.int64)) * SLOT_US
    minute = (number * SLOTS_A_FILE + np.arange(slots)) % 1440
    backend = np.arange(STREAMS) // (STREAMS_A_VOLUME * VOLUMES_A_BACKEND)
    # Busy by day; each backend at its own hour, with gusts of some minutes.
    wave = 1 + np.sin((minute[:, None] - 72 * backend[None, :]) * (2 * np.pi / 1440))
    gust = np.repeat(chance.integers(0, 5, (-(-slots // 5), BACKENDS)), 5, axis=0)[:slots][:, backend]
    base = (30 + 70 * wave * (1 + gust / 2)).astype(np.int64)
    reads = base + chance.integers(0, 40, shape)
    # The share of writes changes by the minute, or their cost could not be told from that of reads.
    writes = 10 + 40 * ((number + np.arange(slots)) % 3)[:, None] + chance.integers(0, 20, shape)
    size = 4096 * (1 + (gust + np.arange(slots)[:, None]) % 8)
    read_bytes, write_bytes = reads * size, writes * size
    columns = {
        "slot_us": np.broadcast_to(at_us[:, None], shape),
        "stream_id": np.broadcast_to(np.arange(STREAMS, dtype=np.int64), shape),
        "arrived": reads + writes,
        "reads": reads,
        "writes": writes,
        "read_bytes": read_bytes,
        "write_bytes": write_bytes,
        "svc_sum_us": reads * 90 + writes * 150 + (read_bytes + write_bytes) // 900,
        "cost_milli": (reads + writes) * 1000 + (read_bytes + write_bytes) * 1000 // 65_536,
        "covered_us": np.full(shape, SLOT_US, dtype=np.int64),
    }
    is_promised = np.arange(STREAMS) // STREAMS_A_VOLUME % VOLUMES_A_BACKEND < PROMISED
    counted = (reads + writes)[:, is_promised]
    load = columns["cost_milli"].reshape(slots, BACKENDS, -1).sum(axis=2) / 60_000
    is_crowded = (load > CROWDED_PER_S)[:, backend[is_promised]]
    late = np.where(is_crowded, counted // 4, counted // 100)
    some = counted.shape
    missed = {
        "slot_us": np.broadcast_to(at_us[:, None], some),
        "stream_id": np.broadcast_to(np.arange(STREAMS, dtype=np.int64)[is_promised], some),
        "io": np.zeros(some, dtype=np.int32),
        "threshold_us": np.full(some, THRESHOLD_US, dtype=np.int64),
        "counted": counted,
        "missed": late,
    }
    return Hour(
        pa.table({name: columns[name].ravel() for name in SLOT_COLUMNS}),
        pa.table({name: missed[name].ravel() for name in MISSED_COLUMNS}),
    )


def write(place: Path, rows: int) -> int:
    """Write hours until there are about so many rollups; returns how many there are."""
    written = number = 0
    for kind in ("rollups", "missed"):
        (place / kind).mkdir(parents=True)
    while written < rows:
        made = hour(number, max(1, min(SLOTS_A_FILE, (rows - written) // STREAMS)))
        pq.write_table(made.slots, place / "rollups" / f"{number:05}.parquet", compression="zstd")
        pq.write_table(made.missed, place / "missed" / f"{number:05}.parquet", compression="zstd")
        written += made.slots.num_rows
        number += 1
    return written


def main() -> None:
    """Write a world to a directory."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("place", type=Path, help="a directory that does not exist")
    parser.add_argument("--rows", type=int, default=1_000_000, help="rollups, about")
    chosen = parser.parse_args()
    print(f"{write(chosen.place, chosen.rows)} rollups in {chosen.place}")


if __name__ == "__main__":
    main()
