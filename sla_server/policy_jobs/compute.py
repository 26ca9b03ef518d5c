"""Everything between reading and publishing: the steps, each by itself, and the policy of all of them.

A step is a thin line from shared tables (``Frames``) through the transforms to a model in Spark's workers,
and gives a table as small as the fleet: *capacity*, *cost model*, *demand*, *attribution*. Each is a job of
its own, too (``step_job``); what such a job has stored may stand here for computing it again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from sla_server.policy_jobs import cuts, grouped, inputs, model, streams, transforms
from sla_server.policy_jobs.inputs import CAPACITY

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from sla_server.policy_jobs.demand import HourTables

HELD_DAYS: Final = 7  # once each hour of the week
BURST_DAYS: Final = 7  # slots of a volume come to one call: a week of minutes is 10,000
ROWS_AT_A_TIME: Final = 10_000  # of caps as Python objects
MOST_CURVES: Final = 1000  # some 1 MB of a report
COSTS: Final = "cost-model"
DEMAND: Final = "demand"
HARMS: Final = "attribution"
NOTHING: Final[Mapping[str, pa.Table]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Found:
    """What a run found: as many rows as the fleet has volumes times hours of the week, and no more.

    Attributes:
        caps: columns of ``grouped.CAPS``, and burst_s.
        capacity: one row a (backend, promise, step of its curve).
        curves: of the most loaded of them what people look at, see ``split_curves``.
        costs: one row a backend.
        harms: one row for each volume that hurt a promise.
        bursts: one row for each volume with a cap.
    """

    caps: pa.Table
    capacity: list[dict[str, Any]]
    costs: list[dict[str, Any]]
    harms: list[dict[str, Any]] = field(default_factory=list)
    bursts: list[dict[str, Any]] = field(default_factory=list)
    curves: list[dict[str, Any]] = field(default_factory=list)

    def cap_rows(self) -> Iterator[dict[str, Any]]:
        """The caps, as ``PolicyStore.publish`` takes them, some at a time."""
        return _some_at_a_time(self.caps)

    @property
    def demands(self) -> dict[str, float]:
        """The largest demand of each volume in the hours of the week, cost units a second."""
        largest = self.caps.group_by("volume").aggregate([("demand_p95", "max")])
        values = zip(largest["volume"].to_pylist(), largest["demand_p95_max"].to_pylist(), strict=True)
        return {volume: float(demand or 0.0) for volume, demand in values}

    def capped_rows(self) -> Iterator[dict[str, Any]]:
        """Those with a cap, likewise: of a large fleet all at once would be gigabytes of Python objects."""
        return _some_at_a_time(self._with_cap())

    @property
    def capped_hours(self) -> int:
        """How many those are."""
        return int(self.caps.num_rows - self.caps["cost_per_s"].null_count)

    @property
    def capped_volumes(self) -> list[str]:
        """Names of the volumes with a cap, without a Python object for each of their hours."""
        return sorted(self._with_cap()["volume"].unique().to_pylist())

    def _with_cap(self) -> pa.Table:
        import pyarrow.compute as pc

        return self.caps.filter(pc.field("cost_per_s").is_valid())


def _some_at_a_time(table: pa.Table) -> Iterator[dict[str, Any]]:
    for batch in table.to_batches(max_chunksize=ROWS_AT_A_TIME):
        yield from batch.to_pylist()


class Frames:
    """The tables that steps share, each made when the first step needs it; Spark keeps what several read.

    The owner calls ``release`` when all steps are done.
    """

    def __init__(self, spark: SparkSession, rows: inputs.Statistics, read: inputs.JobInputs) -> None:
        self.spark, self.rows, self.read = spark, rows, read
        self._kept: list[DataFrame] = []

    def release(self) -> None:
        """Let Spark forget what it keeps."""
        for frame in reversed(self._kept):
            frame.unpersist()
        self._kept.clear()

    def _keep(self, frame: DataFrame) -> DataFrame:
        self._kept.append(frame.cache())
        return frame

    @cached_property
    def _streams(self) -> pa.Table:
        """Of ``streams.streams_now``."""
        return streams.streams_now(self.read.streams, self.read.volumes)

    @cached_property
    def streams(self) -> DataFrame:
        """The same in Spark."""
        return self.spark.createDataFrame(self._streams)

    def of_volumes(self, samples: DataFrame, time_column: str, length_us: int) -> DataFrame:
        """Of ``transforms.volume_slots``."""
        widest = streams.widest(self._streams)
        return transforms.volume_slots(samples, self.streams, time_column, length_us, widest)

    @cached_property
    def promised(self) -> DataFrame:
        """Of ``transforms.promised_streams``."""
        scope = self.read.scope
        small = (
            self.spark.createDataFrame(table) for table in (scope.promises, scope.volumes, scope.clients)
        )
        return transforms.promised_streams(self.streams, *small)

    @property
    def promises_on_backends(self) -> pa.Table:
        """Backend, sla, objective and step of all promises in force, in order."""
        scope = self.read.scope
        lying = self._streams.select(["volume", "backend"]).group_by(["volume", "backend"]).aggregate([])
        pairs = scope.volumes.join(lying, "volume", join_type="inner")
        pairs = pairs.group_by(["promise", "backend"]).aggregate([]).join(scope.promises, "promise")
        names = ["backend", "sla", "objective", "step"]
        return pairs.select(names).sort_by([(name, "ascending") for name in names])

    @cached_property
    def slots(self) -> DataFrame:
        """Of ``transforms.volume_slots``."""
        slot_us = transforms.US_AN_HOUR // self.read.slots_an_hour
        return self._keep(self.of_volumes(self.rows.slots, "slot_us", slot_us))

    @cached_property
    def loads(self) -> DataFrame:
        """Of ``transforms.backend_slots``."""
        return self._keep(transforms.backend_slots(self.slots))

    @cached_property
    def points(self) -> DataFrame:
        """Of ``transforms.promise_points``, of intervals that have ended.

        Of the one under way a part of the load is stored: with all of its misses that would be a backend
        which breaks promises at little load.
        """
        ended = transforms.ended_slots(self.loads, self.read.slots_an_hour, self.read.hours.end_us)
        return self._keep(transforms.promise_points(ended, self.rows.missed, self.promised))

    @cached_property
    def _cuts(self) -> DataFrame | None:
        """Of ``cuts.in_bins``; None: there are no cuts."""
        if self.rows.cuts is None or not self.read.bin_us:
            return None
        return cuts.in_bins(self.rows.cuts, self.read.bin_us)

    @cached_property
    def volume_bins(self) -> DataFrame | None:
        """Of ``cuts.volume_bins``, likewise."""
        return None if self._cuts is None else self._keep(cuts.volume_bins(self._cuts, self.streams))

    @cached_property
    def promise_bins(self) -> DataFrame | None:
        """Of ``cuts.promise_bins``, likewise."""
        if self._cuts is None or self.volume_bins is None:
            return None
        of_backends = cuts.backend_bins(self.volume_bins)
        return cuts.promise_bins(self._cuts, self.promised, of_backends, self.read.bin_us)

    @cached_property
    def peaks(self) -> DataFrame | None:
        """Of ``cuts.peaks``, likewise."""
        return None if self.volume_bins is None else cuts.peaks(self.volume_bins, self.read.bin_us)

    @cached_property
    def zones(self) -> DataFrame:
        """Backend and time zone."""
        return self.spark.createDataFrame(self.read.hours.zones)


# -- Steps


def capacity_of(frames: Frames) -> pa.Table:
    """What each backend can take for each promise, unknown ones as the last valid; ``grouped.CAPACITY``."""
    seen = _rows(grouped.capacities(frames.points, frames.promise_bins))
    former = frames.read.former_capacity
    known = [model.with_former(row, former, frames.read.former_steps) for row in seen]
    backends = {row["backend"] for row in seen}
    # One that another promise tells of is not held to what the strictest of all promises needed once.
    lost = {backend: cost for backend, cost in former.items() if backend not in backends}
    known += [model.with_former(row, lost) for row in unseen(frames.promises_on_backends, seen)]
    return _table(known, grouped.CAPACITY)


def unseen(promises: pa.Table, seen: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Steps of promises of which there is no row: none of their I/O was counted in the window.

    That is so when the only agreement on a backend was changed an hour ago. What is known of the backend must
    not be lost with it.

    Args:
        promises: backend, sla, objective, step.
        seen: rows of CAPACITY.
    """
    keys = ("backend", "sla", "objective", "step")
    known = {tuple(row[key] for key in keys) for row in seen}
    empty: dict[str, Any] = dict.fromkeys(grouped.CAPACITY.names)
    empty |= {"points": 0, "highest_load": 0.0, "highest_kept": 0.0, "unlimited": False, "curve": ""}
    return [
        {**empty, **row, "reason": "nothing was counted under it yet"}
        for row in promises.to_pylist()
        if tuple(row[key] for key in keys) not in known
    ]


def costs_of(frames: Frames) -> pa.Table:
    """What an I/O costs each backend; ``grouped.COST``."""
    return _table(_rows(grouped.costs(transforms.cost_slots(frames.loads))), grouped.COST)


def hourly_demand(frames: Frames) -> DataFrame:
    """Demand of each volume by local hour of the week; columns of ``transforms.hourly_demand``."""
    hours = frames.of_volumes(frames.rows.hours, "hour_us", transforms.US_AN_HOUR)
    rates = transforms.slots_and_hours(frames.slots, hours, frames.read.slots_an_hour)
    learned = frames.spark.createDataFrame(frames.read.hours.learned)
    return transforms.hourly_demand(rates, frames.zones, learned)


def demand_of(frames: Frames) -> pa.Table:
    """The same as a table, in order."""
    found = hourly_demand(frames).toArrow()
    return found.sort_by([(name, "ascending") for name in ("backend", "volume", "hour_of_week")])


def harms_of(frames: Frames) -> pa.Table:
    """Who hurt which promise; ``grouped.HARMS``."""
    intervals = transforms.intervals_to_attribute(frames.points)
    uses = transforms.uses_of_backends(frames.slots, intervals)
    found = grouped.harms(transforms.with_victims(intervals, frames.promised), uses)
    return _table(_rows(found, 5), grouped.HARMS)


STEPS: Final[Mapping[str, Callable[[Frames], pa.Table]]] = MappingProxyType(
    {COSTS: costs_of, CAPACITY: capacity_of, DEMAND: demand_of, HARMS: harms_of}
)
"""Each is a job of its own."""


def compute(
    spark: SparkSession,
    rows: inputs.Statistics,
    read: inputs.JobInputs,
    stored: Mapping[str, pa.Table] = NOTHING,
    in_force: pa.Table | None = None,
) -> Found:
    """The policy.

    Args:
        spark: the session.
        rows: of the window.
        read: what the driver knows.
        stored: of steps, what they found recently; all others are computed.
        in_force: of ``inputs.demand_in_force``.
    """
    frames = Frames(spark, rows, read)

    def step(name: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = (stored[name] if name in stored else STEPS[name](frames)).to_pylist()
        return found

    try:
        capacity, curves = split_curves(step(CAPACITY))
        caps = _caps(frames, capacity, stored.get(DEMAND), in_force)
        bursts = _bursts(frames, caps, read.hours)
        caps = grouped.with_bursts(caps, bursts, model.rooms_of(capacity, read.promises))
        return Found(caps, capacity, step(COSTS), step(HARMS), bursts, curves)
    finally:
        frames.release()


def _caps(
    frames: Frames, capacity: list[dict[str, Any]], known: pa.Table | None, in_force: pa.Table | None
) -> pa.Table:
    spark, read = frames.spark, frames.read
    demand = hourly_demand(frames) if known is None else spark.createDataFrame(known)
    expected = transforms.expected_demand(demand, frames.zones, spark.createDataFrame(read.hours.coming))
    if in_force is not None and in_force.num_rows:
        from_us = read.hours.end_us - HELD_DAYS * transforms.US_A_DAY
        before = spark.createDataFrame(in_force)
        expected = transforms.demand_when_held(expected, before, frames.slots, from_us)
    needs = {name: model.encode(each) for name, each in model.needs_of(capacity, read.promises).items()}
    limited = transforms.demand_under_limits(
        expected,
        spark.createDataFrame(read.scope.classes),
        _texts(spark, backend=needs.keys(), needs=needs.values()),
        frames.peaks if needs else None,
    )
    caps = grouped.caps(limited).toArrow()
    return caps.sort_by([("volume", "ascending"), ("hour_of_week", "ascending")])


def _bursts(frames: Frames, caps: pa.Table, hours: HourTables) -> list[dict[str, Any]]:
    """Burst pairs of volumes with a cap: only there they have a use."""
    from pyspark.sql import functions as F

    capped = Found(caps, [], []).capped_volumes
    if not capped:
        return []
    recent = frames.slots.where(F.col("at_us") >= hours.end_us - BURST_DAYS * 86_400 * transforms.US_A_SECOND)
    names = _texts(frames.spark, volume=capped)
    return _rows(
        grouped.bursts(recent.join(F.broadcast(names), "volume"), hours.half_life_days, hours.end_us), 2
    )


def _texts(spark: SparkSession, **columns: Iterable[str]) -> DataFrame:
    """A small table. Made of an Arrow table: for one of tuples Spark starts a Python worker."""
    import pyarrow as pa

    return spark.createDataFrame(
        pa.table({name: pa.array(list(texts), pa.string()) for name, texts in columns.items()})
    )


def split_curves(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of CAPACITY without their curves, and the curves.

    Every reader of a policy reads its whole report, so of a large fleet there are ``MOST_CURVES``: those
    whose highest load comes nearest to their capacity, or exceeds it.
    """
    plain = [{key: value for key, value in row.items() if key != "curve"} for row in rows]
    drawn = [row for row in rows if row["curve"]]
    drawn.sort(key=lambda row: -row["highest_load"] / (row["cost_per_s"] or math.inf))
    keys = ("backend", "sla", "objective", "step")
    curves = [{**{key: row[key] for key in keys}, **json.loads(row["curve"])} for row in drawn[:MOST_CURVES]]
    return plain, curves


def _rows(frame: DataFrame, columns: int = 4) -> list[dict[str, Any]]:
    """The rows of a small result, in the order of its first columns."""
    rows: list[dict[str, Any]] = frame.toArrow().to_pylist()
    return sorted(rows, key=lambda row: [str(value) for value in list(row.values())[:columns]])


def _table(rows: list[dict[str, Any]], kind: pa.Schema) -> pa.Table:
    import pyarrow as pa

    return pa.Table.from_pylist(rows, schema=kind)
