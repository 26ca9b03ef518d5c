"""The policy job: ``python -m sla_server.policy_jobs.job --config FILE``. A plain command for timer and hand.

Steps: lock, read (SQL), compute (Spark), decide (numpy), publish (one SQL transaction under a new version).
Each run publishes a whole policy, and the newest is put in force. A crash before the last step leaves
nothing.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from pmdaemon.errors import SlaError
from pmdaemon.runtime import config as files
from pmdaemon.runtime import logs
from pmdaemon.runtime.stop import end_with_parent
from sla_server import config as configuration
from sla_server.db.engine import check_made
from sla_server.db.policies import PolicyStore, open_policies
from sla_server.policy_jobs import back_test, cost_model, inputs, model, publishing, transforms
from sla_server.policy_jobs.errors import JobRunning, SparkFailed
from sla_server.policy_jobs.session import build_session, scratch_of, stderr_to
from sla_server.policy_jobs.transforms import MISSED_DDL, PROMISE_DDL, SLOT_DDL

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

EX_UNAVAILABLE: Final = 69
EX_TEMPFAIL: Final = 75
NICER: Final = 10  # as the systemd unit: whatever else this machine does goes first


@contextmanager
def only_one(lock: Path) -> Iterator[None]:
    """Hold the job's lock.

    Raises:
        JobRunning: another run holds it.
    """
    lock.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise JobRunning(lock) from exc
        yield


def _rows(
    spark: SparkSession, table: pa.Table, paths: Sequence[str], ddl: str, keys: Sequence[str]
) -> DataFrame:
    """Rows from SQL with those of the files; a file deleted by now ends the job instead of counting less."""
    rows = spark.createDataFrame(table)
    if not paths:
        return rows
    in_files = spark.read.schema(ddl).parquet(*paths)
    return transforms.added_up(rows.select(in_files.columns).unionByName(in_files), keys)


def compute(spark: SparkSession, read: inputs.JobInputs) -> model.Policy:
    """Everything between reading and publishing."""
    streams = spark.createDataFrame(read.streams)
    slots = _rows(spark, read.slots, read.slot_files, SLOT_DDL, ("slot_us", "stream_id"))
    hours = transforms.without_covered_hours(spark.createDataFrame(read.hours), slots)
    slot_rates = transforms.volume_rates(slots, streams, "slot_us").cache()
    rates = slot_rates.unionByName(transforms.volume_rates(hours, streams, "hour_us"))
    demands = [row.asDict() for row in transforms.hourly_demand(rates).collect()]
    promise_rows = read.promise_rows()
    points: list[dict[str, Any]] = []
    if promise_rows:
        promises = spark.createDataFrame(promise_rows, PROMISE_DDL)
        keys = ("slot_us", "stream_id", "io", "threshold_us")
        missed = _rows(spark, read.missed, read.missed_files, MISSED_DDL, keys)
        frame = transforms.promise_points(slot_rates, missed, promises, streams)
        points = [row.asDict() for row in frame.collect()]
    moments = [row.asDict() for row in transforms.cost_moments(slots, streams).collect()]
    return replace(model.build(points, demands, read), costs=cost_model.cost_rows(moments))


def on_spark(
    settings: configuration.PolicyJobConfig, job_dir: Path, read: inputs.JobInputs, log_path: Path
) -> model.Policy:
    """Start Spark, compute, stop it.

    Raises:
        NoJava: there is nothing to start it with.
        SparkFailed: it does not start, or fails.
    """
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        spark = build_session(settings.master, job_dir, settings.driver_memory)
        try:
            return compute(spark, read)
        finally:
            spark.stop()
    except (PySparkException, Py4JError) as exc:
        reason = (str(exc).strip() or type(exc).__name__).splitlines()[0].rstrip(".")
        raise SparkFailed(reason, log_path) from exc


@contextmanager
def _noted(store: PolicyStore, who: str) -> Iterator[publishing.JobRun]:
    """The run as a row of ``jobs``, once it is sure that its result may be stored."""
    store.check_may_publish()
    with publishing.noted(store, who, status_of) as run:
        yield run


def run(config: configuration.ResolvedConfig, who: str) -> dict[str, Any]:
    """One whole run; returns what was published.

    Raises:
        JobRunning, NothingToLearn, UnreadableAgreement, NoJava, SparkFailed, NoRightToPublish,
            DatabaseUnavailable, NoDatabaseYet: nothing was published.
    """
    started_s = time.monotonic()
    check_made(config.database, config.data_dir)
    job_dir = config.data_dir / "policy-job"
    with (
        only_one(job_dir / "lock"),
        closing(open_policies(config.database, config.data_dir)) as store,
        _noted(store, who) as noted,
    ):
        read = inputs.read(store, time.time_ns() // 1000, config.policy.window_days)
        log_path = job_dir / "spark.log"
        noted.note("Spark computes", rows=read.rollups + read.hours.num_rows)
        shutil.rmtree(scratch_of(job_dir), ignore_errors=True)  # of a run that was killed
        click.echo(
            f"read {read.slots.num_rows} rollups and {read.hours.num_rows} hours; "
            f"{read.rollups - read.slots.num_rows} rollups in {len(read.slot_files)} files; starting Spark, "
            f"which writes its warnings to {log_path}",
            err=True,
        )
        try:
            with stderr_to(log_path):
                found = on_spark(config.policy, job_dir, read, log_path)
        finally:
            shutil.rmtree(scratch_of(job_dir), ignore_errors=True)
        job = {
            "window_days": config.policy.window_days,
            "rollups": read.rollups,
            "hours": read.hours.num_rows,
            "master": config.policy.master,
            "pyspark": version("pyspark"),
            "seconds": round(time.monotonic() - started_s, 1),
        }
        report = {
            "capacity": found.capacity,
            "cost_model": found.costs,
        }
        noted.note("the back-test runs")
        tested = back_test.made(store, config, found.caps, time.time_ns() // 1000)
        number = publishing.publish(
            store, noted, found.caps, tested, job=job, report=report, published_by=who
        )
    capped = [row for row in found.caps if row["cost_per_s"] is not None]
    return {
        "version": number,
        "back_test": tested,
        "exit_status": noted.exit_status,
        "capacity": found.capacity,
        "cost_model": found.costs,
        "capped": capped,
        "hours": len(found.caps),
        "job": job,
    }


def describe(result: dict[str, Any]) -> str:
    """The result for people."""
    done = "not published" if result["exit_status"] else "published"
    lines = [f"policy version {result['version']} {done} ({result['job']['seconds']} s)"]
    lines += back_test.describe(result["back_test"])
    for row in result["capacity"]:
        value = "unknown" if row["cost_per_s"] is None else f"{row['cost_per_s']:.0f} cost/s"
        lines.append(f"  capacity of {row['backend']} for {row['sla']}/{row['objective']}: {value}")
        lines.append(f"    {row['reason']}, {row['points']} intervals")
    for row in result["cost_model"]:
        lines += cost_model.describe(row)
    for row in result["capped"][:10]:
        lines.append(f"  {row['volume']} hour {row['hour_of_week']}: at most {row['cost_per_s']:.0f} cost/s")
    if not result["capped"]:
        lines.append("  no volume needs a cap in the hours seen")
    elif len(result["capped"]) > 10:
        lines.append(f"  and {len(result['capped']) - 10} more: sla get policies -o json")
    return "\n".join(lines)


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
@click.option("--show-config", is_flag=True, help="Print the values in force and exit.")
@click.option("--check-config", is_flag=True, help="Check the file and exit.")
def main(path: Path | None, output: str, scheduled: bool, show_config: bool, check_config: bool) -> None:
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
        result = run(config, who)
    except SlaError as exc:
        click.echo(f"policy job: {exc}", err=True)
        raise SystemExit(status_of(exc)) from exc
    click.echo(json.dumps(result) if output == "json" else describe(result))
    if result["exit_status"]:
        raise SystemExit(result["exit_status"])


if __name__ == "__main__":
    main()
