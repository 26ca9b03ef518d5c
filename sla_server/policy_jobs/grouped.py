"""The models inside Spark: a function for each, which gets the rows of one backend (or promise) as Arrow.

Rows of a group come in any order, which differs from one cluster to another; so each function sorts them
first, and sums in that order. The arithmetic is in ``model``, ``capacity`` and others, which know nothing of
Spark.
Workers import this module: it must be installed there, or sent along.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pmdaemon.wire.rates import COST_BYTES
from sla_server.policy_jobs import cost_model, model
from sla_server.policy_jobs.attribution import SharedIntervals, attribute
from sla_server.policy_jobs.bursts import burst_pair, burst_seconds
from sla_server.policy_jobs.capacity import Floats, Intervals, Ints, capacity, combined
from sla_server.policy_jobs.steady import Bins, is_complete, steady
from sla_server.policy_jobs.transforms import HOURS_A_WEEK, PLACED, US_A_SECOND

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
        ("between", pa.float64()),
        ("minutes", pa.float64()),
        ("unlimited", pa.bool_()),
        ("reason", pa.string()),
        ("curve", pa.string()),
    ]
)
"""``minutes``: what minutes alone say; ``curve``: JSON of a ``capacity.CapacityCurve``, or empty."""
COST: Final = pa.schema(
    [
        ("backend", pa.string()),
        ("cost_write", pa.float64()),
        ("cost_bytes", pa.int64()),
        ("read_us", pa.float64()),
        ("random_us", pa.float64()),
        ("sequential", pa.float64()),
        ("r2", pa.float64()),
        ("slots", pa.int64()),
        ("reason", pa.string()),
    ]
)
HARMS: Final = pa.schema(
    [
        ("backend", pa.string()),
        ("sla", pa.string()),
        ("objective", pa.string()),
        ("step", pa.int32()),
        ("volume", pa.string()),
        ("share", pa.float64()),
        ("avoided_bad", pa.int64()),
        ("avoided_missed", pa.float64()),
        ("bad", pa.int64()),
        ("first_us", pa.int64()),
        ("last_us", pa.int64()),
        ("worst_us", pa.int64()),
        ("likely_cause", pa.bool_()),
        ("reason", pa.string()),
    ]
)
BURSTS: Final = pa.schema(
    [
        ("backend", pa.string()),
        ("volume", pa.string()),
        ("cost_per_s", pa.float64()),
        ("burst_cost", pa.float64()),
        ("days", pa.int64()),
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


def capacities(points: DataFrame, bins: DataFrame | None = None) -> DataFrame:
    """One row a (backend, promise, step); CAPACITY.

    Args:
        points: of ``transforms.promise_points``.
        bins: of ``cuts.promise_bins``.
    """
    if bins is not None:
        points = points.unionByName(bins, allowMissingColumns=True)
    return points.groupBy("backend", "sla", "objective", "step").applyInArrow(capacity_of, _ddl(CAPACITY))


def costs(slots: DataFrame) -> DataFrame:
    """One row a backend, of the rows of ``transforms.cost_slots``; COST."""
    return slots.groupBy("backend").applyInArrow(cost_of, _ddl(COST))


def caps(demand: DataFrame) -> DataFrame:
    """Caps of all volumes, of the rows of ``transforms.demand_under_limits``; CAPS."""
    return demand.groupBy("backend").applyInArrow(caps_of, _ddl(CAPS))


def harms(intervals: DataFrame, uses: DataFrame) -> DataFrame:
    """Who hurt which promise, of ``transforms.with_victims`` and ``uses_of_backends``; HARMS."""
    # Not a cogroup: both come from the same tables, and Spark cannot tell their columns apart.
    together = intervals.unionByName(uses, allowMissingColumns=True)
    return together.groupBy("backend").applyInArrow(_harms_together, _ddl(HARMS))


def bursts(slots: DataFrame, half_life_days: float, now_us: int) -> DataFrame:
    """One row a volume, of rows of ``transforms.volume_slots``; BURSTS."""

    def burst(rows: pa.Table) -> pa.Table:
        return burst_of(rows, half_life_days, now_us)

    # Spark hands over every column there is, whether it is used or not.
    needed = slots.select("backend", "volume", "at_us", "demand")
    return needed.groupBy("backend", "volume").applyInArrow(burst, _ddl(BURSTS))


def _harms_together(rows: pa.Table) -> pa.Table:
    is_of_volume = pc.is_valid(rows["volume"])
    of_volumes = rows.filter(is_of_volume).combine_chunks()
    uses = pa.table(
        {
            "volume": of_volumes["volume"].take(pc.list_parent_indices(of_volumes["used_at_us"])),
            "at_us": pc.list_flatten(of_volumes["used_at_us"]),
            "used": pc.list_flatten(of_volumes["used"]),
        }
    )
    rest = rows.filter(pc.invert(is_of_volume))
    is_of_promise = pc.is_valid(rest["victims"])
    intervals, promises = rest.filter(pc.invert(is_of_promise)), rest.filter(is_of_promise)
    return harms_of(_with_lists(intervals, promises), uses)


def _with_lists(intervals: pa.Table, promises: pa.Table) -> pa.Table:
    """Beside each interval the ``victims`` of its promise: one of a few lists, none of which is copied."""
    named, wanted = (
        list(zip(*(table[name].to_pylist() for name in ("sla", "objective")), strict=True))
        for table in (promises, intervals)
    )
    number = {key: place for place, key in enumerate(named)}
    index = pa.array([number[key] for key in wanted], pa.int32())
    lists = pa.DictionaryArray.from_arrays(index, promises["victims"].combine_chunks())
    return intervals.set_column(intervals.column_names.index("victims"), "victims", lists)


def harms_of(intervals: pa.Table, uses: pa.Table) -> pa.Table:
    """Who hurt the promises on one backend."""
    if not intervals.num_rows or not uses.num_rows:
        return pa.Table.from_pylist([], schema=HARMS)
    uses = uses.sort_by([("volume", "ascending"), ("at_us", "ascending")])
    volumes, column = np.unique(uses["volume"].to_numpy(zero_copy_only=False), return_inverse=True)
    times, place = np.unique(uses["at_us"].to_numpy(), return_inverse=True)
    used = np.zeros((len(times), len(volumes)))
    used[place, column] = _floats(uses, "used")
    keys = ("sla", "objective", "step")
    intervals = intervals.sort_by([(name, "ascending") for name in (*keys, "at_us")])
    names = [tuple(row[name] for name in keys) for row in intervals.select(list(keys)).to_pylist()]
    found = []
    for key, members in groupby(range(len(names)), names.__getitem__):
        part = intervals.take(list(members))
        at_us = part["at_us"].to_numpy()
        known = np.minimum(np.searchsorted(times, at_us), len(times) - 1)
        seen = SharedIntervals(
            at_us=at_us.astype(np.int64),
            counted=_floats(part, "counted"),
            missed=_floats(part, "missed"),
            load=_floats(part, "load"),
            times=_floats(part, "times"),
            used=np.where((times[known] == at_us)[:, None], used[known], 0.0),
            volumes=tuple(volumes.tolist()),
            victims=frozenset(part["victims"][0].as_py()),
            allowed_ratio=part["allowed"][0].as_py(),
        )
        head = {"backend": intervals["backend"][0].as_py(), **dict(zip(keys, key, strict=True))}
        found += [{**head, **asdict(harm)} for harm in attribute(seen)]
    return pa.Table.from_pylist(found, schema=HARMS)


def burst_of(slots: pa.Table, half_life_days: float, now_us: int) -> pa.Table:
    """The burst pair of one volume; no row where too little was seen."""
    slots = slots.sort_by("at_us")
    at_us = slots["at_us"].to_numpy().astype(np.int64)
    steps = np.diff(at_us)
    slot_us = int(steps[steps > 0].min()) if (steps > 0).any() else US_A_SECOND
    found = burst_pair(at_us, _floats(slots, "demand"), slot_us / US_A_SECOND, now_us, half_life_days)
    head = {name: slots[name][0].as_py() for name in ("backend", "volume")}
    return pa.Table.from_pylist([{**head, **asdict(found)}] if found else [], schema=BURSTS)


def capacity_of(points: pa.Table) -> pa.Table:
    """The capacity of one backend for one promise at one step of its curve.

    Args:
        points: minutes, and bins of cuts, which have a ``bin_us``.
    """
    points = points.sort_by("at_us")
    allowed = points["allowed"][0].as_py()
    is_bin = pc.is_valid(points["bin_us"]) if "bin_us" in points.column_names else pa.nulls(0)
    bins = points.filter(is_bin) if len(is_bin) else points.slice(0, 0)
    minutes = points.filter(pc.invert(is_bin)) if len(is_bin) else points
    load, counted, missed = (_floats(minutes, name) for name in ("load", "counted", "missed"))
    at_us = minutes["at_us"].to_numpy().astype(np.int64)
    of_minutes = capacity(Intervals(load, counted, missed, allowed, at_us=at_us))
    found = combined(of_minutes, _steady_bins(bins, at_us, load, allowed) if bins.num_rows else None)
    keys = {name: points[name][0].as_py() for name in ("backend", "sla", "objective", "step")}
    row = {**keys, **asdict(found), "minutes": of_minutes.cost_per_s}
    row["curve"] = json.dumps(row["curve"]) if found.curve is not None else ""
    return pa.Table.from_pylist([row], schema=CAPACITY)


def _steady_bins(bins: pa.Table, minute_us: Ints, minute_load: Floats, allowed: float) -> Intervals:
    """Intervals of one load, of bins by time."""
    bin_us, at_us = bins["bin_us"][0].as_py(), bins["at_us"].to_numpy().astype(np.int64)
    names = ("load", "counted", "missed", "ios", "svc_us")
    found = Bins(at_us, *(_floats(bins, name) for name in names))
    found = found.only(is_complete(at_us, found.load, bin_us, minute_us, minute_load))
    return steady(found, bin_us, allowed, float(bins["threshold_us"][0].as_py()))


def cost_of(slots: pa.Table) -> pa.Table:
    """What an I/O costs one backend."""
    slots = slots.sort_by("at_us")
    moments = {"backend": slots["backend"][0].as_py(), **cost_moments(slots)}
    return pa.Table.from_pylist(cost_model.cost_rows([moments]), schema=COST)


def cost_moments(slots: pa.Table) -> dict[str, Any]:
    """Sums for ``cost_model.fit``.

    x is (reads, writes, bytes / 65,536, random I/Os) an I/O of the backend in a slot, y the time at the
    storage an I/O in us; a slot counts as often as it has I/Os. Where it is known of most I/Os whether they
    are sequential, only the slots count in which it is; else that is left out of all (x3 is 0).
    """
    reads, writes, size, svc_us = (_floats(slots, name) for name in ("reads", "writes", "bytes", "svc_us"))
    arrived, sequential, placed = (_floats(slots, name) for name in PLACED)
    weight = reads + writes
    is_placed = (placed > 0) & (placed >= cost_model.MOSTLY_PLACED * arrived)
    random = 1.0 - sequential / np.maximum(placed, 1.0)
    if knows := cost_model.is_enough(is_placed, weight):
        reads, writes, size, svc_us, weight, random = (
            column[is_placed] for column in (reads, writes, size, svc_us, weight, random)
        )
    else:
        random = np.zeros(len(weight))
    x = (reads / weight, writes / weight, size / COST_BYTES / weight, random)
    return cost_model.moments(x, svc_us / weight, weight, is_placed=knows)


def caps_of(demand: pa.Table) -> pa.Table:
    """Caps by hour of the week of the volumes of one backend; without a known capacity there is none."""
    known = demand["needs"].drop_null()
    needs = model.decode(known[0].as_py() if len(known) else None)
    # Python objects of an hour at a time: of 10,000 volumes a week would be gigabytes.
    demand = demand.filter(pc.is_valid(demand["volume"])).drop_columns("needs")
    demand = demand.sort_by([("hour_of_week", "ascending"), ("volume", "ascending")])
    hours, begins = np.unique(demand["hour_of_week"].to_numpy(), return_index=True)
    parts = pairwise([*begins.tolist(), demand.num_rows])
    each_hour = (demand.slice(first, last - first).to_pylist() for first, last in parts)
    found = model.caps_of_hours(zip(hours.tolist(), each_hour, strict=True), needs)
    key = zip(demand["volume"].to_pylist(), demand["hour_of_week"].to_pylist(), strict=True)
    caps = pa.array([found.get(volume, {}).get(hour) for volume, hour in key], pa.float64())
    columns = [demand["volume"], demand["hour_of_week"], caps, demand["p50"], demand["p95"]]
    return pa.table(columns, names=CAPS.names).cast(CAPS)


def with_bursts(caps: pa.Table, pairs: Sequence[Mapping[str, Any]], rooms: Mapping[str, float]) -> pa.Table:
    """Caps with ``burst_s``, for volumes that have a burst pair; no Python object for each cap.

    Args:
        caps: CAPS.
        pairs: rows of BURSTS.
        rooms: of backends, cost units that may come at once (``bursts.room_of``).
    """
    backends = sorted({pair["backend"] for pair in pairs})
    volumes = pa.array([pair["volume"] for pair in pairs], pa.string())
    place = pc.if_else(caps["cost_per_s"].is_valid(), pc.index_in(caps["volume"], value_set=volumes), None)
    capped = place.is_valid().to_numpy()
    found = np.full(caps.num_rows, np.nan)
    if capped.any():
        pair = place.drop_null().to_numpy().astype(np.int64)
        at = np.array([backends.index(each["backend"]) for each in pairs])[pair]
        hour = caps["hour_of_week"].to_numpy()[capped].astype(np.int64)
        room = np.repeat([rooms.get(name, 0.0) for name in backends], HOURS_A_WEEK)
        bucket = np.array([float(each["burst_cost"]) for each in pairs])[pair]
        cap = caps["cost_per_s"].to_numpy()[capped].astype(np.float64)
        found[capped] = burst_seconds(cap, bucket, at * HOURS_A_WEEK + hour, room)
    return caps.append_column("burst_s", pa.array(found, pa.float64(), from_pandas=True))


def _ddl(kind: pa.Schema) -> str:
    """The same columns for Spark."""
    return ", ".join(f"{field.name} {_SPARK_KINDS[field.type]}" for field in kind)


def _floats(table: pa.Table, name: str) -> Any:
    return table[name].to_numpy().astype(np.float64)
