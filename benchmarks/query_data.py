"""Generated statistics for ``make bench-query`` and the tests of plans: what a server has after some days.

Tables are filled by COPY from columns made by numpy, in the order in which ingest writes them, and only as
far back as the product keeps them in SQL: single rollups and coverage ``fine_hours``, hours, slices, events
and throttles ``days``. One draw of histograms and names per stream is repeated over time, shifted, so that
generating costs less than loading.
"""

from __future__ import annotations

import io
import json
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import psycopg
import pyarrow as pa
from pyarrow import csv

from pmdaemon.wire.histogram import COARSE_BUCKETS
from pmdaemon.wire.names import stream_id
from sla_server.agreements.document import Agreement
from sla_server.db import histogram_codec, migrate, partitions, schema
from sla_server.db.config import DatabaseConfig
from sla_server.db.engine import begin, make_engine

MINUTE_US: Final = 60_000_000
HOUR_US: Final = 60 * MINUTE_US
DAY_US: Final = 24 * HOUR_US
END_US: Final = 1_800_000_000_000_000 // DAY_US * DAY_US
"""The present of the generated world: a midnight."""
BLOBS: Final = 997  # different histograms; prime, so that streams do not always meet the same one
FIRST_ID: Final = str(uuid.UUID(int=1))
"""Of the oldest row in each table of events and the like."""
THRESHOLDS_US: Final = (5_000, 12_000)
HOURS_A_STEP: Final = 4


@dataclass(frozen=True, slots=True)
class World:
    """How much there is."""

    streams: int = 1_000
    clients_per_volume: int = 2
    gateways: int = 64
    backends: int = 8
    agreements: int = 50
    policies: int = 5
    days: int = 30
    fine_hours: int = 48

    @property
    def volumes(self) -> int:
        """How many volumes."""
        return self.streams // self.clients_per_volume

    def volume(self, number: int) -> str:
        """Name of a volume."""
        return f"vol-{number:04d}"

    def gateway(self, number: int) -> str:
        """gateway_id."""
        return str(uuid.UUID(int=0xBE0000 + number))

    def stream_ids(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Ids of all streams, by (volume, client)."""
        return np.array([self._stream(n)["stream_id"] for n in range(self.streams)], dtype=np.int64)

    def _stream(self, number: int) -> dict[str, Any]:
        volume, client = divmod(number, self.clients_per_volume)
        names = {
            "gateway_id": self.gateway(volume % self.gateways),
            "volume": self.volume(volume),
            "client": f"host-{client}",
        }
        backend = f"disk-{volume % self.backends}"
        return {
            "stream_id": stream_id(names["gateway_id"], names["volume"], names["client"]),
            **names,
            "backend": backend,
        }

    def inventory(self) -> dict[str, list[dict[str, Any]]]:
        """Rows of the small tables."""
        first_us = END_US - self.days * DAY_US
        gateways = [
            {
                "gateway_id": self.gateway(n),
                "name": f"gw-{n:03d}",
                "state": "up",
                "first_seen_us": first_us,
                "last_seen_us": END_US,
                "last_cut_us": END_US,
            }
            for n in range(self.gateways)
        ]
        volumes = [
            {"volume": self.volume(n), "backend": f"disk-{n % self.backends}", "size_bytes": 1 << 40}
            for n in range(self.volumes)
        ]
        sums = dict.fromkeys(schema.STREAM_SUMS, 10**9)
        return {
            "meta": [{"key": "rollup_s", "value": "60"}],
            "gateways": gateways,
            "volumes": volumes,
            "backends": [{"backend": f"disk-{n}", "first_seen_us": first_us} for n in range(self.backends)],
            "streams": [{**self._stream(n), **sums, "last_us": END_US} for n in range(self.streams)],
            "progress": [{"gateway_id": row["gateway_id"], "corrected_us": END_US} for row in gateways],
            "agreements": [self._agreement(n) for n in range(self.agreements)],
            "policies": [
                {
                    "version": n + 1,
                    "created_us": END_US,
                    "state": "superseded",
                    "job": "{}",
                    "report": json.dumps({"harms": [self._harm(each) for each in range(self.agreements)]}),
                }
                for n in range(self.policies)
            ],
            "processes": [
                {"name": name, "state": "running", "pid": 1} for name in ("services", "dbmanager", "pair-0")
            ],
            "pools": [
                {"owner": "server", "pool": f"pool-{n}", "read_us": END_US} for n in range(self.backends)
            ],
        }

    def _harm(self, number: int) -> dict[str, Any]:
        """One row of a policy's attribution."""
        numbers = {"step": 0, "share": 0.5, "avoided_bad": 40, "avoided_missed": 9e5, "bad": 60}
        names = {"backend": "disk-0", "sla": f"sla-{number:03}", "objective": "latency"}
        when = dict.fromkeys(("first_us", "last_us", "worst_us"), END_US - DAY_US)
        return {**names, **numbers, **when, "volume": self.volume(number), "likely_cause": True, "reason": ""}

    def _agreement(self, number: int) -> dict[str, Any]:
        objective = {
            "name": "latency",
            "indicator": {"metric": "latency", "percentile": 95},
            "demand_curve": [{"value_ms": 12}],
            "budgeting": {"target": 0.995},
        }
        scope = {"volumes": [self.volume(number)]}
        spec = {
            "apiVersion": "storage-sla/v1",
            "kind": "SLA",
            "metadata": {"name": f"sla-{number:03d}"},
            "spec": {"scope": scope, "priority": "gold", "objectives": [objective]},
        }
        return {
            "name": f"sla-{number:03d}",
            "version": 1,
            "document": "x" * 2_000,
            "spec": json.dumps(Agreement.from_spec(spec).spec_json()),
            "priority": "gold",
            "applied_us": END_US - self.days * DAY_US,
        }


Columns = dict[str, Any]


class Generator:
    """Columns of the large tables, some hours at a time."""

    def __init__(self, world: World, seed: int = 1) -> None:
        self._world = world
        self._ids = world.stream_ids()
        rng = np.random.default_rng(seed)
        self._base = rng.integers(100, 30_000, size=BLOBS)
        sparse, dense = [], []
        for _ in range(BLOBS):
            buckets = np.unique(rng.integers(20, 60, size=9))
            buckets = np.sort(np.concatenate((buckets, buckets + 99)))
            counts = rng.integers(1, 4_000, size=len(buckets))
            sparse.append("\\x" + histogram_codec.encode_sparse(buckets, counts).hex())
            hour = np.zeros(COARSE_BUCKETS, dtype=np.int64)
            np.add.at(hour, (buckets % 99) >> 1, counts * 60)
            dense.append("\\x" + histogram_codec.encode_hours(hour[None])[0].hex())
        self._sparse, self._dense = pa.array(sparse), pa.array(dense)

    def _grid(self, from_us: int, to_us: int, step_us: int) -> tuple[Any, Any, Any]:
        """(time, stream, number of the draw) of every (time, stream), by time."""
        times = np.arange(from_us, to_us, step_us, dtype=np.int64)
        at = np.repeat(times, len(self._ids))
        stream = np.tile(np.arange(len(self._ids)), len(times))
        return at, stream, (stream + at // step_us) % BLOBS

    def _counters(self, draw: Any, scale: int) -> Columns:
        base = self._base[draw] * scale
        factors = {"read_bytes": 8192, "write_bytes": 4096, "lat_sum_us": 900, "svc_sum_us": 700}
        factors |= {"delay_sum_us": 0, "others": 0, "errors": 0, "cost_milli": 1_062, "arrived": 2}
        counters = {name: base * factors.get(name, 1) for name in schema.COUNTERS}
        return {**counters, "covered_us": np.full(len(draw), MINUTE_US * scale)}

    def rollups(self, from_us: int, to_us: int) -> Columns:
        """Rows of ``rollups``."""
        at, stream, draw = self._grid(from_us, to_us, MINUTE_US)
        gauges = {"held_max": draw % 7, "inflight_max": draw % 31}
        keys = {"slot_us": at, "stream_id": self._ids[stream]}
        return {**keys, **self._counters(draw, 1), **gauges, "hist": self._sparse.take(pa.array(draw))}

    def missed(self, from_us: int, to_us: int) -> Columns:
        """Rows of ``rollup_missed``."""
        at, stream, draw = self._grid(from_us, to_us, MINUTE_US)
        count = len(THRESHOLDS_US)
        return {
            "slot_us": np.repeat(at, count),
            "stream_id": np.repeat(self._ids[stream], count),
            "io": np.zeros(len(at) * count, dtype=np.int64),
            "threshold_us": np.tile(THRESHOLDS_US, len(at)),
            "counted": np.repeat(self._base[draw], count),
            "missed": np.repeat(self._base[draw] // 50, count),
        }

    def hours(self, from_us: int, to_us: int) -> Columns:
        """Rows of ``rollup_hours``."""
        at, stream, draw = self._grid(from_us, to_us, HOUR_US)
        gauges = {"held_max": draw % 7, "inflight_max": draw % 31, "caps_us": draw * 1_000}
        keys = {"hour_us": at, "stream_id": self._ids[stream]}
        return {**keys, **self._counters(draw, 60), **gauges, "hist": self._dense.take(pa.array(draw))}

    def coverage(self, from_us: int, to_us: int) -> Columns:
        """Rows of ``coverage``."""
        times = np.arange(from_us, to_us, MINUTE_US, dtype=np.int64)
        names = [self._world.gateway(n) for n in range(self._world.gateways)]
        return {
            "slot_us": np.repeat(times, len(names)),
            "gateway_id": names * len(times),
            "covered_us": np.full(len(times) * len(names), MINUTE_US),
            "cuts": np.full(len(times) * len(names), 60),
        }

    def slices(self, from_us: int, to_us: int) -> Columns:
        """Rows of ``slices``; one in a hundred was judged twice."""
        times = np.arange(from_us, to_us, MINUTE_US, dtype=np.int64)
        again = times[::100]
        start = np.tile(np.concatenate((times, again)), self._world.agreements)
        per = len(times) + len(again)
        revision = np.tile(np.repeat([0, 1], [len(times), len(again)]), self._world.agreements)
        states = pa.array(["good", "good", "good", "good", "not_applicable", "bad"])
        return {
            "name": np.repeat([f"sla-{n:03d}" for n in range(self._world.agreements)], per),
            "objective": ["latency"] * len(start),
            "start_us": start,
            "revision": revision,
            "version": np.ones(len(start), dtype=np.int64),
            "length_us": np.full(len(start), MINUTE_US),
            "state": states.take(pa.array(start // MINUTE_US % 6)),
            "n": np.full(len(start), 4_800),
            "missed": start // MINUTE_US % 500,
            "offered_iops": np.full(len(start), 80.0),
            "threshold_us": np.full(len(start), 5_000),
            "coverage_ratio": np.full(len(start), 1.0),
            "judged_us": start + 2 * MINUTE_US,
        }

    def log(self, table: str, key: str, count: int) -> Columns:
        """Rows of ``events``, ``audit``, ``throttles`` or ``episodes``, spread evenly over all days."""
        span_us = self._world.days * DAY_US
        at = END_US - span_us + np.arange(count, dtype=np.int64) * (span_us // count)
        columns: Columns = {key: [str(uuid.UUID(int=n * 7919 + 1)) for n in range(count)]}
        texts = [self._world.volume(n % self._world.volumes) for n in range(count)]
        if table in ("events", "audit"):
            return {**columns, "at_us": at, "subject": texts}
        if table == "episodes":
            names = [f"sla-{n % self._world.agreements:03}" for n in range(count)]
            objectives = ["latency"] * count
            return {
                **columns,
                "name": names,
                "objective": objectives,
                "opened_us": at,
                "closed_us": at + MINUTE_US,
            }
        state = ["released"] * (count - 40) + ["seen"] * 40
        return {**columns, "volume": texts, "state": state, "requested_us": at}

    def caps(self, version: int) -> Columns:
        """Rows of ``policy_caps``."""
        volumes = np.repeat([self._world.volume(n) for n in range(self._world.volumes)], 168)
        count = len(volumes)
        return {
            "version": np.full(count, version),
            "volume": volumes,
            "hour_of_week": np.tile(np.arange(168), self._world.volumes),
            "cost_per_s": np.full(count, 1234.5),
            "demand_p50": np.full(count, 100.0),
            "demand_p95": np.full(count, 200.0),
        }

    def large(self) -> Iterator[tuple[str, Columns]]:
        """Every large table, piece by piece."""
        first_us, fine_us = END_US - self._world.days * DAY_US, END_US - self._world.fine_hours * HOUR_US
        step_us = HOURS_A_STEP * HOUR_US
        for start_us in range(fine_us, END_US, step_us):
            end_us = min(start_us + step_us, END_US)
            yield "rollups", self.rollups(start_us, end_us)
            yield "rollup_missed", self.missed(start_us, end_us)
            yield "coverage", self.coverage(start_us, end_us)
        for start_us in range(first_us, END_US, DAY_US):
            yield "rollup_hours", self.hours(start_us, start_us + DAY_US)
            yield "slices", self.slices(start_us, start_us + DAY_US)
        yield "events", self.log("events", "event_id", 10_000 * self._world.days)
        yield "audit", self.log("audit", "audit_id", 1_000 * self._world.days)
        yield "throttles", self.log("throttles", "throttle_id", 1_000 * self._world.days)
        yield "episodes", self.log("episodes", "episode_id", 100 * self._world.days)
        for version in range(1, self._world.policies + 1):
            yield "policy_caps", self.caps(version)


def prepare(url: str, world: World) -> None:
    """The newest schema, with the partitions that a server which ran all the time would have made."""
    engine = make_engine(DatabaseConfig(url=url), Path())
    migrate.upgrade(engine)
    with begin(engine) as connection:
        for day in range(world.days, -1, -1):
            partitions.make_ahead(connection, END_US - day * DAY_US)
    engine.dispose()


def load(conninfo: str, world: World) -> dict[str, int]:
    """Fill an empty database of the newest schema; returns rows by table."""
    rows: dict[str, int] = {}
    with psycopg.connect(conninfo) as connection:
        for name, records in world.inventory().items():
            table = pa.Table.from_pylist(records)
            _copy(connection, name, dict(zip(table.column_names, table.columns, strict=True)))
            rows[name] = len(records)
        for name, columns in Generator(world).large():
            rows[name] = rows.get(name, 0) + _copy(connection, name, columns)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("VACUUM ANALYZE")
        connection.execute("CHECKPOINT")
    return rows


def _copy(connection: psycopg.Connection[Any], name: str, columns: Mapping[str, Any]) -> int:
    table = pa.table(dict(columns))
    buffer = io.BytesIO()
    csv.write_csv(table, buffer, csv.WriteOptions(include_header=False))
    names = ", ".join(table.column_names)
    statement = f"COPY {name} ({names}) FROM STDIN WITH (FORMAT csv)"  # names of our own schema
    with connection.cursor() as cursor, cursor.copy(statement) as copy:
        copy.write(buffer.getbuffer())
    return int(table.num_rows)
