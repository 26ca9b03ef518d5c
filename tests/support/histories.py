"""Histories of statistics for the policy job, as tables that Spark takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from sla_server.agreements.promise import CurveStep, Priority, Promise
from sla_server.policy_jobs.demand import HourTables, hour_tables
from sla_server.policy_jobs.inputs import JobInputs, Statistics
from sla_server.policy_jobs.scope import scope_of
from sla_server.policy_jobs.sql_source import no_rows
from sla_server.policy_jobs.transforms import HOUR_DDL

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SLOT_US = 60_000_000
ERP, BATCH = 1, 2


@dataclass(frozen=True)
class History:
    """Rows of SQL, and what the driver knows."""

    slots: pa.Table
    missed: pa.Table
    inputs: JobInputs

    def statistics(self, spark: SparkSession) -> Statistics:
        """Its rows as DataFrames; there are no hours."""
        slots, missed = spark.createDataFrame(self.slots), spark.createDataFrame(self.missed)
        return Statistics(slots, missed, no_rows(spark, HOUR_DDL))


def promise(volume: str = "erp", clients: tuple[str, ...] = ("*",)) -> Promise:
    """95 % of I/Os within 12 ms."""
    curve = (CurveStep(150, 12_000),)
    return Promise(
        "gold", 1, "latency", Priority.GOLD, (volume,), clients, "any", 95.0, curve, 0.95, 60, 0, 0
    )


def utc_hours(*backends: str, window_us: tuple[int, int] = (0, 10 * SLOT_US)) -> HourTables:
    """No holidays, nor anything that fades."""
    return hour_tables(dict.fromkeys(backends, "UTC"), window_us, half_life_days=10_000)


def known_history() -> History:
    """Ten minutes: batch at rising rates beside an ERP at 80 I/O/s, which misses its promise above 400."""
    slots: list[dict[str, Any]] = []
    missed: list[dict[str, Any]] = []
    for minute, batch_rate in enumerate((0, 100, 200, 250, 300, 320, 350, 380, 420, 420)):
        at_us = minute * SLOT_US
        for stream, rate in ((ERP, 80), (BATCH, batch_rate)):
            ios = rate * 60
            slots.append(
                {
                    "slot_us": at_us,
                    "stream_id": stream,
                    "arrived": ios,
                    "reads": ios,
                    "writes": 0,
                    "read_bytes": ios * 4096,
                    "write_bytes": 0,
                    "svc_sum_us": ios * 100,
                    "cost_milli": ios * 1000,
                    "covered_us": SLOT_US,
                    "sequential": ios // 2,
                    "placed": ios,
                    "caps_us": 0,
                }
            )
        late = 4000 if 80 + batch_rate > 400 else 20
        missed.append(
            {
                "slot_us": at_us,
                "stream_id": ERP,
                "io": 0,
                "threshold_us": 12_000,
                "counted": 4800,
                "missed": late,
            }
        )
    streams = pa.table(
        {
            "stream_id": [ERP, BATCH],
            "volume": ["erp", "batch"],
            "client": ["host-a", "host-b"],
            "backend": ["disk", "disk"],
        }
    )
    volumes = pa.table({"volume": ["erp", "batch"], "backend": ["disk", "disk"]})
    scope = scope_of([promise()], [], ["erp", "batch"], ["host-a", "host-b"])
    kind = pa.schema([(name, pa.int32() if name == "io" else pa.int64()) for name in missed[0]])
    return History(
        pa.Table.from_pylist(slots),
        pa.Table.from_pylist(missed, schema=kind),
        JobInputs(streams, volumes, scope, [promise()], utc_hours("disk"), {}),
    )
