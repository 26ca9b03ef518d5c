"""The policy job: ``python -m sla_server.policy_jobs.job --config FILE``. A plain command for timer and hand.

Steps: lock, take a snapshot, compute (Spark, with the models in its workers), publish (one SQL transaction
under a new version). Each run publishes a whole policy, and the newest is put in force. A crash before the
last step leaves nothing.

What reaches this process: streams and agreements, one row for each promise on each backend, and the caps.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from pmdaemon.errors import SlaError
from pmdaemon.runtime import config as files
from pmdaemon.runtime import logs
from pmdaemon.runtime.stop import end_with_parent
from sla_server import config as configuration
from sla_server.db.engine import check_made
from sla_server.db.fence import acting_fence
from sla_server.db.policies import PolicyStore, open_policies
from sla_server.db.statistics import StatisticsSnapshot
from sla_server.policy_jobs import (
    attribution,
    back_test,
    cost_model,
    grouped,
    inputs,
    model,
    publishing,
    transforms,
)
from sla_server.policy_jobs.errors import JobRunning, SparkFailed
from sla_server.policy_jobs.session import (
    build_session,
    check_files,
    end_java,
    master_of,
    peak_mib,
    scratch_of,
    stderr_to,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from sla_server.policy_jobs.demand import HourTables

T = TypeVar("T")
EX_UNAVAILABLE: Final = 69
EX_TEMPFAIL: Final = 75
BURST_DAYS: Final = 7  # slots of a volume come to one call: a week of minutes is 10,000
ROWS_AT_A_TIME: Final = 10_000  # of caps as Python objects
MOST_CURVES: Final = 1000  # some 1 MB of a report
STOP_S: Final = 4  # less than the supervisor waits
STOPPED: Final = 128 + signal.SIGTERM
NICER: Final = 10  # as the systemd unit: whatever else this machine does goes first


@contextmanager
def only_one(lock: Path, name: str = "policy") -> Iterator[None]:
    """Hold the lock of the job of this name.

    Raises:
        JobRunning: another run holds it.
    """
    lock.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise JobRunning(lock, name) from exc
        yield


@dataclass(frozen=True, slots=True)
class Found:
    """What a run found: as many rows as the fleet has volumes times hours of the week, and no more.

    Attributes:
        caps: columns of ``grouped.CAPS``.
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
        for batch in self.caps.to_batches(max_chunksize=ROWS_AT_A_TIME):
            yield from batch.to_pylist()

    @property
    def demands(self) -> dict[str, float]:
        """The largest demand of each volume in the hours of the week, cost units a second."""
        largest = self.caps.group_by("volume").aggregate([("demand_p95", "max")])
        values = zip(largest["volume"].to_pylist(), largest["demand_p95_max"].to_pylist(), strict=True)
        return {volume: float(demand or 0.0) for volume, demand in values}

    @property
    def capped(self) -> list[dict[str, Any]]:
        """Rows with a cap."""
        rows: list[dict[str, Any]] = self._with_cap().to_pylist()
        return rows

    @property
    def capped_volumes(self) -> list[str]:
        """Names of the volumes with a cap, without a Python object for each of their hours."""
        return sorted(self._with_cap()["volume"].unique().to_pylist())

    def _with_cap(self) -> pa.Table:
        import pyarrow.compute as pc

        return self.caps.filter(pc.field("cost_per_s").is_valid())


def compute(spark: SparkSession, rows: inputs.Statistics, read: inputs.JobInputs) -> Found:
    """Everything between reading and publishing."""
    scope = read.scope
    streams = transforms.streams_now(spark.createDataFrame(read.streams), spark.createDataFrame(read.volumes))
    promised = transforms.promised_streams(
        streams, *(spark.createDataFrame(table) for table in (scope.promises, scope.volumes, scope.clients))
    )
    slots = transforms.volume_slots(rows.slots, streams, "slot_us").cache()
    loads = transforms.backend_slots(slots)
    points = transforms.promise_points(loads, rows.missed, promised).cache()
    try:
        seen, curves = split_curves(_sorted(grouped.capacities(points)))
        capacity = [model.with_former(row, read.former_capacity) for row in seen]
        costs = _sorted(grouped.costs(transforms.cost_slots(loads)))
        hours = transforms.volume_slots(rows.hours, streams, "hour_us")
        zones, learned, coming = (
            spark.createDataFrame(table)
            for table in (read.hours.zones, read.hours.learned, read.hours.coming)
        )
        rates = transforms.slots_and_hours(slots, hours, read.slots_an_hour)
        demand = transforms.hourly_demand(rates, zones, learned)
        needs = [
            (backend, model.encode(each)) for backend, each in model.needs_of(capacity, read.promises).items()
        ]
        known = transforms.demand_under_limits(
            transforms.expected_demand(demand, zones, coming),
            spark.createDataFrame(scope.classes),
            spark.createDataFrame(needs, "backend string, needs string"),
        )
        caps = grouped.caps(known).toArrow()
        found = Found(caps.sort_by([("volume", "ascending"), ("hour_of_week", "ascending")]), capacity, costs)
        intervals = transforms.intervals_to_attribute(points, promised)
        harms = _sorted(grouped.harms(intervals, transforms.uses_of_backends(slots, intervals)), 5)
        return replace(found, harms=harms, bursts=_bursts(spark, slots, found, read.hours), curves=curves)
    finally:
        points.unpersist()
        slots.unpersist()


def _bursts(spark: SparkSession, slots: DataFrame, found: Found, hours: HourTables) -> list[dict[str, Any]]:
    """Burst pairs of volumes with a cap: only there they have a use."""
    from pyspark.sql import functions as F

    capped = found.capped_volumes
    recent = slots.where(F.col("at_us") >= hours.end_us - BURST_DAYS * 86_400 * transforms.US_A_SECOND)
    some = recent.join(
        F.broadcast(spark.createDataFrame([(name,) for name in capped], "volume string")), "volume"
    )
    return _sorted(grouped.bursts(some, hours.half_life_days, hours.end_us), 2) if capped else []


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


def _sorted(frame: DataFrame, columns: int = 4) -> list[dict[str, Any]]:
    """The rows of a small result, in the order of its first columns."""
    rows: list[dict[str, Any]] = frame.toArrow().to_pylist()
    return sorted(rows, key=lambda row: [str(value) for value in list(row.values())[:columns]])


@dataclass(frozen=True, slots=True)
class SparkUse:
    """What Spark took of a run: until there was a session, and memory at most (``session.peak_mib``)."""

    start_s: float
    peak_mib: dict[str, int]


def on_spark(
    settings: configuration.PolicyJobConfig,
    job_dir: Path,
    action: Callable[[SparkSession], T],
    log_path: Path,
    rows: int,
) -> tuple[T, SparkUse]:
    """Start Spark, compute, stop it.

    Args:
        settings: of the job.
        job_dir: its directory.
        action: what to do with the session.
        log_path: where stderr goes meanwhile, for the error.
        rows: rollups that will be read, about.

    Raises:
        NoJava: there is nothing to start it with.
        SparkFailed: it does not start, or fails.
    """
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    started_s = time.monotonic()
    try:
        spark = build_session(settings.master, job_dir, settings.driver_memory, settings.spark, rows)
        start_s = time.monotonic() - started_s
        try:
            found = action(spark)
            return found, SparkUse(round(start_s, 1), peak_mib())
        finally:
            spark.stop()
    except (PySparkException, Py4JError, ConnectionError) as exc:
        if (stop := _stop_behind(exc)) is not None:
            raise stop from exc
        raise SparkFailed(reason_of(exc), log_path) from exc


def _stop_behind(error: BaseException | None) -> BaseException | None:
    """What stopped the job, if this error is only what Spark says of being stopped."""
    while error is not None and not isinstance(error, SystemExit | KeyboardInterrupt):
        error = error.__context__
    return error


def reason_of(error: Exception) -> str:
    """Why Spark failed: in our own words if a worker of ours raised them, else its first line."""
    if isinstance(error, ConnectionError):
        return "its Java process has ended; the kernel's log says whether it was for want of memory"
    text = str(error).strip() or type(error).__name__
    own = re.search(r"^sla_server\.\S+: (.+)$", text, re.MULTILINE)
    return (own.group(1) if own else text.splitlines()[0]).rstrip(".")


@contextmanager
def _noted(store: PolicyStore, who: str) -> Iterator[publishing.JobRun]:
    """The run as a row of ``jobs``, once it is sure that its result may be stored."""
    store.check_may_publish()
    with publishing.noted(store, who, status_of) as run:
        yield run


def run(config: configuration.ResolvedConfig, who: str, now_us: int | None = None) -> dict[str, Any]:
    """One whole run; returns what was published.

    Args:
        config: the server's.
        who: started it.
        now_us: the end of the window, us UTC; None: now. Recency and the coming week are counted from it.

    Raises:
        JobRunning, NothingToLearn, UnreadableAgreement, FilesNotForSpark, NoJava, SparkFailed,
            NoRightToPublish, DatabaseUnavailable, NoDatabaseYet: nothing was published.
    """
    started_s, now_us = time.monotonic(), now_us or time.time_ns() // 1000
    check_made(config.database, config.data_dir)
    check_files(config.database.files.url)
    job_dir = config.data_dir / "policy-job"
    scratch = scratch_of(job_dir)
    with (
        only_one(job_dir / "lock"),
        closing(open_policies(config.database, config.data_dir, acting_fence(config))) as store,
        _noted(store, who) as noted,
    ):
        shutil.rmtree(scratch, ignore_errors=True)  # of a run that was killed
        scratch.mkdir(mode=0o700, parents=True)
        try:
            found, job = _computed(config, store, job_dir, noted, now_us)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        job["seconds"] = round(time.monotonic() - started_s, 1)
        report = {
            "capacity": found.capacity,
            "curves": found.curves,
            "cost_model": found.costs,
            "harms": found.harms,
            "bursts": found.bursts,
        }
        noted.note("the back-test runs")
        tested = back_test.made(store, config, found.capped, now_us, found.demands)
        number = publishing.publish(
            store, noted, found.cap_rows(), tested, job=job, report=report, published_by=who
        )
    return {
        "version": number,
        "back_test": tested,
        "exit_status": noted.exit_status,
        "capacity": found.capacity,
        "cost_model": found.costs,
        "harms": found.harms,
        "bursts": found.bursts,
        "capped": found.capped,
        "hours": found.caps.num_rows,
        "job": job,
    }


def _computed(
    config: configuration.ResolvedConfig,
    store: PolicyStore,
    job_dir: Path,
    noted: publishing.JobRun,
    now_us: int,
) -> tuple[Found, dict[str, Any]]:
    """What is to be published, and how it was computed."""
    settings = config.policy
    window_us = (now_us - settings.window_days * 86_400 * transforms.US_A_SECOND, now_us)
    taken = StatisticsSnapshot(
        config.database, config.data_dir, window_us, inputs.COLUMNS, scratch_of(job_dir)
    )
    with closing(taken) as snapshot:
        read = inputs.read(store, snapshot, settings, config.database.rollup_s)
        in_sql, in_files, hours = (
            snapshot.rows(inputs.SLOTS),
            snapshot.slot_files.rows,
            snapshot.rows(inputs.HOURS) + snapshot.hour_files.rows,
        )
        log_path = job_dir / "spark.log"
        noted.note("Spark computes", rows=in_sql + in_files + hours)

        def action(spark: SparkSession) -> tuple[Found, str]:
            found = compute(spark, inputs.statistics(spark, snapshot), read)
            return found, master_of(spark, settings.master)

        click.echo(
            f"{in_sql} rollups are in SQL, {in_files} in {len(snapshot.slot_files.paths)} files, {hours} "
            f"hours in SQL and {len(snapshot.hour_files.paths)} files; Spark starts, and writes its warnings "
            f"to {log_path}",
            err=True,
        )
        with stderr_to(log_path):
            (found, master), use = on_spark(settings, job_dir, action, log_path, in_sql + in_files + hours)
    return found, {
        "window_days": settings.window_days,
        "rollups": in_sql + in_files,
        "hours": hours,
        "master": master,
        "pyspark": version("pyspark"),
        "spark_start_s": use.start_s,
        "peak_mib": use.peak_mib,
    }


def describe(result: dict[str, Any]) -> str:
    """The result for people."""
    job = result["job"]
    memory = " and ".join(f"{mib} MiB in {name}" for name, mib in job["peak_mib"].items())
    took = f"{job['seconds']} s, of which Spark's start {job['spark_start_s']} s"
    done = "not published" if result["exit_status"] else "published"
    lines = [f"policy version {result['version']} {done} ({took}; at most {memory})"]
    lines += back_test.describe(result["back_test"])
    for row in result["capacity"]:
        value = "unknown" if row["cost_per_s"] is None else f"{row['cost_per_s']:.0f} cost/s"
        step = f" step {row['step'] + 1}" if row["step"] else ""
        lines.append(f"  capacity of {row['backend']} for {row['sla']}/{row['objective']}{step}: {value}")
        lines.append(f"    {row['reason']}, {row['points']} intervals")
    for row in result["cost_model"]:
        lines += cost_model.describe(row)
    for row in result["harms"][:10]:
        lines += attribution.describe(row)
    for row in result["capped"][:10]:
        lines.append(f"  {row['volume']} hour {row['hour_of_week']}: at most {row['cost_per_s']:.0f} cost/s")
    if not result["capped"]:
        lines.append("  no volume needs a cap in the hours seen")
    elif len(result["capped"]) > 10:
        lines.append(f"  and {len(result['capped']) - 10} more: sla get policies -o json")
    return "\n".join(lines)


@contextmanager
def stopped_in_order() -> Iterator[None]:
    """Let SIGTERM end the block as Ctrl-C does, so that the end of the run is noted; a second one kills.

    Thread: the main one.
    """

    def stop(_number: int, _frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.alarm(STOP_S)
        end_java()  # else what waits for a result goes on to wait
        raise SystemExit(STOPPED)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGTERM, before)


def status_of(error: SlaError) -> int:
    """The exit status: 75 means another thing to users of ``sla``, so a database that is away is 69."""
    return EX_UNAVAILABLE if error.exit_status == EX_TEMPFAIL else error.exit_status


@click.command()
@click.option(
    "--config", "path", type=click.Path(path_type=Path), envvar="SLA_CONFIG", help="The server's TOML file."
)
@click.option(
    "-o", "output", type=click.Choice(["table", "json"]), default="table", help="Form of the answer."
)
@click.option("--scheduled", is_flag=True, hidden=True, help="Started by the server.")
@click.option("--as-of", type=int, help="End of the window (us UTC); default: now. For runs to be compared.")
@click.option("--show-config", is_flag=True, help="Print the values in force and exit.")
@click.option("--check-config", is_flag=True, help="Check the file and exit.")
def main(
    path: Path | None, output: str, scheduled: bool, as_of: int | None, show_config: bool, check_config: bool
) -> None:
    """Compute a throttling policy from the stored statistics and publish it."""
    logs.configure("policy-job")
    try:
        config = configuration.load(path)
        if show_config or check_config:
            click.echo(files.show(config) if show_config else "configuration is good")
            return
        if scheduled:
            end_with_parent()
            os.nice(NICER)
        who = "schedule" if scheduled else os.environ.get("USER", "policy-job")
        with stopped_in_order():
            result = run(config, who, as_of)
    except SlaError as exc:
        click.echo(f"policy job: {exc}", err=True)
        raise SystemExit(status_of(exc)) from exc
    click.echo(json.dumps(result) if output == "json" else describe(result))
    if result["exit_status"]:
        raise SystemExit(result["exit_status"])


if __name__ == "__main__":
    main()
