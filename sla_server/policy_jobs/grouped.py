"""The models inside Spark: a function for each, which gets the rows of one backend (or promise) as Arrow.

Rows of a group come in any order, which differs from one cluster to another; so each function sorts them
first, and sums in that order. The arithmetic is in ``model``, ``capacity`` and others, which know nothing of
Spark.
Workers import this module: it must be installed there, or sent along.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from pmdaemon.wire.rates import COST_BYTES
from sla_server.policy_jobs import cost_model, model
from sla_server.policy_jobs.capacity import Intervals, capacity

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_SPARK_KINDS: Final = {
    pa.string(): "string",
    pa.int32(): "int",
    pa.int64(): "bigint",
    pa.float64(): "double",
    pa.bool_(): "boolean",
}
CAPACITY: Final = pa.schema(
    [
        ("backend", pa.string()),
        ("sla", pa.string()),
        ("objective", pa.string()),
        ("step", pa.int32()),
        ("cost_per_s", pa.float64()),
        ("points", pa.int64()),
        ("highest_load", pa.float64()),
        ("highest_kept", pa.float64()),
        ("isotonic", pa.float64()),
        ("bound", pa.float64()),
        ("queueing", pa.float64()),
        ("unlimited", pa.bool_()),
        ("reason", pa.string()),
    ]
)
COST: Final = pa.schema(
    [
        ("backend", pa.string()),
        ("cost_write", pa.float64()),
        ("cost_bytes", pa.int64()),
        ("read_us", pa.float64()),
        ("r2", pa.float64()),
        ("slots", pa.int64()),
        ("reason", pa.string()),
    ]
)
CAPS: Final = pa.schema(
    [
        ("volume", pa.string()),
        ("hour_of_week", pa.int32()),
        ("cost_per_s", pa.float64()),
        ("demand_p50", pa.float64()),
        ("demand_p95", pa.float64()),
    ]
)


def capacities(points: DataFrame) -> DataFrame:
    """One row a (backend, promise, step), of the rows of ``transforms.promise_points``; CAPACITY."""
    return points.groupBy("backend", "sla", "objective", "step").applyInArrow(capacity_of, _ddl(CAPACITY))


def costs(slots: DataFrame) -> DataFrame:
    """One row a backend, of the rows of ``transforms.cost_slots``; COST."""
    return slots.groupBy("backend").applyInArrow(cost_of, _ddl(COST))


def caps(demand: DataFrame) -> DataFrame:
    """Caps of all volumes, of the rows of ``transforms.demand_under_limits``; CAPS."""
    return demand.groupBy("backend").applyInArrow(caps_of, _ddl(CAPS))


def capacity_of(points: pa.Table) -> pa.Table:
    """The capacity of one backend for one promise at one step of its curve."""
    points = points.sort_by("at_us")
    load, counted, missed = (_floats(points, name) for name in ("load", "counted", "missed"))
    at_us = points["at_us"].to_numpy().astype(np.int64)
    found = capacity(Intervals(load, counted, missed, points["allowed"][0].as_py(), at_us=at_us))
    keys = {name: points[name][0].as_py() for name in ("backend", "sla", "objective", "step")}
    return pa.Table.from_pylist([{**keys, **asdict(found)}], schema=CAPACITY)


def cost_of(slots: pa.Table) -> pa.Table:
    """What an I/O costs one backend."""
    slots = slots.sort_by("at_us")
    moments = {"backend": slots["backend"][0].as_py(), **cost_moments(slots)}
    return pa.Table.from_pylist(cost_model.cost_rows([moments]), schema=COST)


def cost_moments(slots: pa.Table) -> dict[str, Any]:
    """Sums for ``cost_model.fit``.

    x is (reads, writes, bytes / 65,536) an I/O of the backend in a slot, y the time at the storage an I/O in
    us; a slot counts as often as it has I/Os.
    """
    reads, writes, size, svc_us = (_floats(slots, name) for name in ("reads", "writes", "bytes", "svc_us"))
    weight = reads + writes
    parts = {
        "x0": reads / weight,
        "x1": writes / weight,
        "x2": size / COST_BYTES / weight,
        "y": svc_us / weight,
    }
    products = [(a, b) for i, a in enumerate(("x0", "x1", "x2")) for b in ("x0", "x1", "x2")[i:]]
    products += [("x0", "y"), ("x1", "y"), ("x2", "y"), ("y", "y")]
    sums = {f"{a}{b}": float(np.sum(weight * parts[a] * parts[b])) for a, b in products}
    means = {name: float(np.sum(weight * parts[name])) for name in ("y", "x2")}
    return {"n": len(weight), "w": float(np.sum(weight)), **means, **sums}


def caps_of(demand: pa.Table) -> pa.Table:
    """Caps by hour of the week of the volumes of one backend; without a known capacity there is none."""
    rows = demand.sort_by([("hour_of_week", "ascending"), ("volume", "ascending")]).to_pylist()
    found = model.caps_of_week(rows, model.decode(rows[0]["needs"]))
    return pa.table(
        [
            pa.array([row["volume"] for row in rows], pa.string()),
            pa.array([row["hour_of_week"] for row in rows], pa.int32()),
            pa.array([found.get(row["volume"], {}).get(row["hour_of_week"]) for row in rows], pa.float64()),
            pa.array([row["p50"] for row in rows], pa.float64()),
            pa.array([row["p95"] for row in rows], pa.float64()),
        ],
        schema=CAPS,
    )


def _ddl(kind: pa.Schema) -> str:
    """The same columns for Spark."""
    return ", ".join(f"{field.name} {_SPARK_KINDS[field.type]}" for field in kind)


def _floats(table: pa.Table, name: str) -> Any:
    return table[name].to_numpy().astype(np.float64)
