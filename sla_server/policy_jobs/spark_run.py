"""One use of Spark: start it, do something, stop it, with its warnings in a file and its failures as ours.

Each job has a directory of its own: lock, Spark's log (``spark.log``, of the newest run) and scratch files,
which are removed at the end, and by the next run after one that was killed. The job's lock keeps two apart.

``on_statistics`` is what jobs about the stored statistics do with it: a snapshot, what the driver reads of
it, and the rows for Spark.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from sla_server.db.statistics import StatisticsSnapshot
from sla_server.policy_jobs import inputs
from sla_server.policy_jobs.errors import SparkFailed
from sla_server.policy_jobs.session import build_session, master_of, peak_mib, scratch_of, stderr_to
from sla_server.policy_jobs.transforms import US_A_DAY

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sla_server import config as configuration
    from sla_server.db.policies import PolicyStore

T = TypeVar("T")


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
        rows: rollups and cuts that will be read, about.

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
def scratch(job_dir: Path) -> Iterator[Path]:
    """An empty directory for temporary files, gone with the block. The caller holds the job's lock."""
    path = scratch_of(job_dir)
    shutil.rmtree(path, ignore_errors=True)  # of a run that was killed
    path.mkdir(mode=0o700, parents=True)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def on_statistics(
    config: configuration.ResolvedConfig,
    store: PolicyStore,
    job_dir: Path,
    now_us: int,
    begun: Callable[[int], None],
    action: Callable[[SparkSession, inputs.Statistics, inputs.JobInputs], T],
) -> tuple[T, dict[str, Any]]:
    """Do something with the statistics of the policy window; also returns how it was done.

    Args:
        config: the server's.
        store: agreements and former results.
        job_dir: the job's directory.
        now_us: the end of the window.
        begun: is called with the number of rows before Spark starts.
        action: what to do.

    Raises:
        NothingToLearn, UnreadableAgreement, NoSuchCalendar, FilesNotForSpark, NoJava, SparkFailed,
            DatabaseUnavailable.
    """
    settings, log_path = config.policy, job_dir / "spark.log"
    window_us = (now_us - settings.window_days * US_A_DAY, now_us)
    with (
        scratch(job_dir) as copy_dir,
        closing(
            StatisticsSnapshot(config.database, config.data_dir, window_us, inputs.COLUMNS, copy_dir)
        ) as snapshot,
    ):
        interval_s = config.pmdaemon.interval_s
        read = inputs.read(store, snapshot, settings, config.database.rollup_s, interval_s)
        cut_rows = settings.cut_rows if read.bin_us else 0
        cuts = min(sum(row.rows for row in snapshot.cut_files), cut_rows)
        in_sql, in_files = snapshot.rows(inputs.SLOTS), snapshot.slot_files.rows
        hours = snapshot.rows(inputs.HOURS) + snapshot.hour_files.rows
        rows = in_sql + in_files + hours
        begun(rows)

        def in_session(spark: SparkSession) -> tuple[T, str]:
            found = action(spark, inputs.statistics(spark, snapshot, cut_rows, read), read)
            return found, master_of(spark, settings.master)

        click.echo(
            f"{in_sql} rollups are in SQL, {in_files} in {len(snapshot.slot_files.paths)} files, {hours} "
            f"hours in SQL and {len(snapshot.hour_files.paths)} files; Spark starts, and writes its warnings "
            f"to {log_path}",
            err=True,
        )
        with stderr_to(log_path):
            (found, master), use = on_spark(settings, job_dir, in_session, log_path, rows + cuts)
    return found, {
        "window_days": settings.window_days,
        "rollups": in_sql + in_files,
        "hours": hours,
        "cuts": cuts,
        "master": master,
        "pyspark": version("pyspark"),
        "spark_start_s": use.start_s,
        "peak_mib": use.peak_mib,
    }
