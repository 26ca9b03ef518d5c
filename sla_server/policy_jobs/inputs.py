"""What the job reads: a snapshot of the statistics for Spark; in the driver what is as small as the fleet.

Rows of statistics never come into this process: Spark reads those in SQL by parts (``sql_source``) and older
ones from Parquet files, whose paths are of the same snapshot (``db.statistics``). The driver has the streams,
the distinct names among them, and the promises in force.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from itertools import islice
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pydantic import ValidationError

from pmdaemon.runtime.config import describe
from sla_server.agreements.calendars import CalendarDocument
from sla_server.agreements.document import Agreement
from sla_server.agreements.periods import CalendarWindow
from sla_server.agreements.promise import InForce, Priority, Promise, classes, promises
from sla_server.agreements.volume_labels import label_book
from sla_server.db.queries.job_results import table_of
from sla_server.policy_jobs import sql_source
from sla_server.policy_jobs.cuts import bin_length_us, chosen_cuts, read_cuts
from sla_server.policy_jobs.demand import HourTables, hour_tables
from sla_server.policy_jobs.errors import NoSuchCalendar, NothingToLearn, UnreadableAgreement
from sla_server.policy_jobs.model import StepKey
from sla_server.policy_jobs.scope import KnownNames, Scope, scope_of
from sla_server.policy_jobs.session import check_connector, for_spark
from sla_server.policy_jobs.transforms import (
    HOUR_COLUMNS,
    HOUR_DDL,
    MISSED_COLUMNS,
    MISSED_DDL,
    SLOT_COLUMNS,
    SLOT_DDL,
    STREAM_COLUMNS,
    US_A_DAY,
    US_AN_HOUR,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from sla_server.config import PolicyJobConfig
    from sla_server.db.policies import PolicyStore
    from sla_server.db.statistics import Files, StatisticsSnapshot

CAPACITY = "capacity"
"""Kind of the job, and of what it stores."""
SLOTS, MISSED, HOURS = "rollups", "rollup_missed", "rollup_hours"
COLUMNS = {SLOTS: SLOT_COLUMNS, MISSED: MISSED_COLUMNS, HOURS: HOUR_COLUMNS}
"""What a snapshot is taken of."""


WAS = pa.schema([("volume", pa.string()), ("hour_of_week", pa.int32()), ("was_p95", pa.float64())])
ROWS_AT_A_TIME = 10_000  # as Python objects; of a large fleet there are millions


@dataclass(frozen=True)
class JobInputs:
    """What the driver knows.

    Attributes:
        streams: columns ``STREAM_COLUMNS``; the backend is the one that was announced with the stream.
        volumes: volume and backend, where it lies now.
        scope: what agreements say of them.
        promises: in force.
        hours: which hour of the week is when, at each backend.
        former_capacity: backend -> the lowest valid capacity of the newest policy, cost units a second.
        slots_an_hour: of fine rollups; an hourly one weighs as many of them.
        bin_us: length of the bins that cuts are read in; 0: they are not.
        former_steps: the same of each step of a promise whose agreement was in force then as it is now.
    """

    streams: pa.Table
    volumes: pa.Table
    scope: Scope
    promises: Sequence[Promise]
    hours: HourTables
    former_capacity: dict[str, float]
    slots_an_hour: int = 60
    bin_us: int = 0
    former_steps: Mapping[StepKey, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Statistics:
    """Rows of the window, in SQL and in files; a key may have several, which are to be added up.

    Attributes:
        slots, missed, hours: columns ``SLOT_COLUMNS``, ``MISSED_COLUMNS``, ``HOUR_COLUMNS``.
        cuts: columns ``cuts.CUT_DDL``, of the last days; None: there are none.
    """

    slots: DataFrame
    missed: DataFrame
    hours: DataFrame
    cuts: DataFrame | None = None


def read(
    store: PolicyStore,
    snapshot: StatisticsSnapshot,
    settings: PolicyJobConfig,
    rollup_s: int = 60,
    interval_s: float = 1.0,
) -> JobInputs:
    """What the driver needs.

    Args:
        store: agreements, documents and former policies.
        snapshot: of the statistics.
        settings: of the job.
        rollup_s: length of a fine rollup.
        interval_s: gateways are polled that often.

    Raises:
        NothingToLearn: there are no rollups in the window.
        NoSuchCalendar: ``settings`` name one that is not in force.
        UnreadableAgreement: one in force does not fit this release.
        DatabaseUnavailable: retryable.
    """
    in_files = snapshot.slot_files.paths or snapshot.hour_files.paths
    if not snapshot.rows(SLOTS) and not snapshot.rows(HOURS) and not in_files:
        raise NothingToLearn(settings.window_days)
    book = label_book(*store.reader.pages.label_rows())
    in_force = [_in_force(row).with_labels(book) for row in store.reader.agreements(in_force=True)]
    streams = snapshot.streams.select(list(STREAM_COLUMNS))
    in_scope = promises(in_force)
    scope = scope_of(
        in_scope,
        classes(in_force),
        streams["volume"].unique().to_pylist(),
        streams["client"].unique().to_pylist(),
    )
    volumes = snapshot.volumes.select(["volume", "backend"])
    on = dict(zip(streams["volume"].to_pylist(), streams["backend"].to_pylist(), strict=True))
    on |= dict(zip(volumes["volume"].to_pylist(), volumes["backend"].to_pylist(), strict=True))
    hours = hour_tables(
        zones_of(in_force, on, settings.time_zone),
        snapshot.window_us,
        settings.half_life_days,
        _holidays(store, settings.calendar),
    )
    bin_us = bin_length_us(interval_s) if settings.cut_rows else 0
    rows, made_us = former_rows(store)
    return JobInputs(
        streams,
        volumes,
        scope,
        in_scope,
        hours,
        former_capacity=lowest_known(rows),
        slots_an_hour=3600 // rollup_s,
        bin_us=bin_us,
        former_steps=known_steps(
            rows, {each.agreement.name for each in in_force if each.applied_us <= made_us}
        ),
    )


def zones_of(in_force: Sequence[InForce], backend_of: Mapping[str, str], default: str) -> dict[str, str]:
    """The time zone of each backend: of the agreement with the highest priority on it whose period has one.

    Args:
        in_force: agreements.
        backend_of: of all volumes.
        default: of the other backends.
    """
    names = KnownNames(backend_of)
    found: dict[str, str] = {}
    for item in sorted(in_force, key=lambda each: -Priority.parse(each.agreement.spec.priority)):
        window = item.agreement.spec.window
        if isinstance(window, CalendarWindow):
            for volume in sorted(names.meant(item.volumes)):
                found.setdefault(backend_of[volume], window.tz)
    return {backend: found.get(backend, default) for backend in backend_of.values()}


def _holidays(store: PolicyStore, calendar: str) -> frozenset[date]:
    """Of a calendar in force; none without a name."""
    if not calendar:
        return frozenset()
    for row in store.reader.documents(kind="Calendar", in_force=True):
        if row["name"] == calendar:
            return frozenset(CalendarDocument.from_json(row["spec"]).spec.holidays)
    raise NoSuchCalendar(calendar)


def statistics(
    spark: SparkSession, snapshot: StatisticsSnapshot, cut_rows: int = 0, read: JobInputs | None = None
) -> Statistics:
    """The snapshot's rows; nothing is read yet.

    Args:
        spark: the session.
        snapshot: of the statistics.
        cut_rows: of raw cuts, read at most so many.
        read: what the driver has read: which of them depends on lengths there.

    Raises:
        FilesNotForSpark: it has no connector for them.
    """
    files = snapshot.slot_files, snapshot.missed_files, snapshot.hour_files
    check_connector(spark, [path for each in files for path in each.paths])  # old weeks have hours alone
    return Statistics(
        slots=_rows(spark, snapshot, SLOTS, SLOT_DDL, snapshot.slot_files),
        missed=_rows(spark, snapshot, MISSED, MISSED_DDL, snapshot.missed_files),
        hours=_rows(spark, snapshot, HOURS, HOUR_DDL, snapshot.hour_files, snapshot.hour_days),
        cuts=_cuts(spark, snapshot, cut_rows, read),
    )


def _cuts(
    spark: SparkSession, snapshot: StatisticsSnapshot, most_rows: int, read: JobInputs | None
) -> DataFrame | None:
    lengths = (US_AN_HOUR // read.slots_an_hour, read.bin_us) if read is not None and read.bin_us else ()
    numbers, spans = chosen_cuts(snapshot.cut_files, most_rows, *lengths)
    paths = [snapshot.cut_path(snapshot.cut_files[number]) for number in numbers]
    paths = [path for path in paths if "://" in path or os.access(path, os.R_OK)]
    return read_cuts(spark, [for_spark(path) for path in paths], spans) if paths else None


def _rows(
    spark: SparkSession,
    snapshot: StatisticsSnapshot,
    table: str,
    ddl: str,
    files: Files,
    days: Sequence[int] = (),
) -> DataFrame:
    """Rows of SQL and of files; a file deleted by now ends the job instead of counting less.

    Of ``days`` the files have every row: those in SQL are the same ones.
    """
    from pyspark.sql import functions as F

    rows = sql_source.rows_in_sql(spark, snapshot, table, COLUMNS[table], ddl)
    if not files.paths:
        return rows
    time = COLUMNS[table][0]
    begin_us, end_us = snapshot.window_us
    in_files = spark.read.schema(ddl).parquet(*map(for_spark, files.paths))
    in_window = (F.col(time) >= begin_us) & (F.col(time) < end_us)
    if days:
        rows = rows.where(~F.expr(f"{time} div {US_A_DAY} * {US_A_DAY}").isin(*days))
    return rows.unionByName(in_files.where(in_window))


def _in_force(row: dict[str, Any]) -> InForce:
    try:
        agreement = Agreement.from_spec(row["spec"])
    except ValidationError as exc:
        raise UnreadableAgreement(row["name"], row["version"], describe(exc)) from exc
    return InForce(agreement, row["version"], row["applied_us"], row["ended_us"])


def demand_in_force(store: PolicyStore) -> pa.Table:
    """What volumes asked for when the policy in force was made, in the hours for which it has caps; WAS.

    Raises:
        DatabaseUnavailable: retryable.
    """
    in_force = store.reader.policy_in_force()
    rows = iter(store.reader.capped_hours(in_force["version"]) if in_force is not None else ())
    batches = []
    while some := list(islice(rows, ROWS_AT_A_TIME)):
        known = [
            {**{name: row[name] for name in WAS.names[:2]}, "was_p95": row["demand_p95"]}
            for row in some
            if row["demand_p95"] is not None
        ]
        batches.append(pa.RecordBatch.from_pylist(known, schema=WAS))
    return pa.Table.from_batches(batches, schema=WAS)


def former_rows(store: PolicyStore) -> tuple[list[dict[str, Any]], int]:
    """Last valid values, and of when: a day without contention must not forget what an earlier one showed."""
    policies = store.reader.policies(limit=1)
    rows: list[dict[str, Any]] = policies[0]["report"].get("capacity", []) if policies else []
    made_us: int = policies[0]["created_us"] if policies else 0
    stored = store.results.whole(CAPACITY)
    if stored is not None and stored[0].made_us > made_us:
        # The capacity job has them from the policy before it, or better ones.
        return table_of(stored[1]).to_pylist(), stored[0].made_us
    return rows, made_us


def lowest_known(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Of each backend the lowest capacity that is known."""
    found: dict[str, float] = {}
    for row in rows:
        if row["cost_per_s"] is not None:
            found[row["backend"]] = min(row["cost_per_s"], found.get(row["backend"], float("inf")))
    return found


def known_steps(rows: Iterable[Mapping[str, Any]], agreements: Collection[str]) -> dict[StepKey, float]:
    """The capacity of each step that is known, of these agreements: others asked for something else."""
    return {
        (row["backend"], row["sla"], row["objective"], row["step"]): row["cost_per_s"]
        for row in rows
        if row["cost_per_s"] is not None and row.get("sla") in agreements
    }
