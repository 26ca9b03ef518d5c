"""The rollup job: ``python -m sla_server.policy_jobs.rollup_job --config FILE``. A plain command.

Each day that has left SQL, and each day of which late data came, becomes files of hourly and daily rollups,
one transaction a day (``db.rollups``). A run that ends in between leaves the days before; the next goes on.
Without a day that is due Spark is not started.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from sla_server import config as configuration
from sla_server.db.engine import check_made
from sla_server.db.errors import FileDamaged
from sla_server.db.fence import acting_fence
from sla_server.db.rollups import RollupStore, open_rollups
from sla_server.jobs import JobAnswer, JobRun, as_process, job_command, noted, only_one
from sla_server.policy_jobs import rollups
from sla_server.policy_jobs.session import check_files, end_java, stderr_to
from sla_server.policy_jobs.spark_run import on_spark, scratch

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sla_server.db.rollups import DueDay

KIND: Final = "rollup"


def run(config: configuration.ResolvedConfig, who: str) -> dict[str, Any]:
    """One whole run, noted in ``jobs``; returns what was made.

    Raises:
        JobRunning, FilesNotForSpark, NoJava, SparkFailed, ArchiveFailed, DatabaseUnavailable, NoDatabaseYet:
            the days before it are rolled up.
        FileDamaged: all days are, but those with such a file.
    """
    check_made(config.database, config.data_dir)
    check_files(config.database.files.url)
    job_dir = config.data_dir / "rollup-job"
    with (
        only_one(job_dir / "lock", KIND),
        closing(open_rollups(config.database, config.data_dir, acting_fence(config))) as store,
        noted(store.jobs, KIND, who) as noted_run,
    ):
        store.sweep()
        days = store.due()
        done: dict[str, Any] = {"days": [], "files": 0, "rows": 0, "peak_mib": {}}
        if days:
            rows = sum(day.rows for day in days)
            noted_run.note(f"Spark rolls up {len(days)} days", rows=rows)
            done = _on_spark(config, store, job_dir, days, noted_run)
        noted_run.note(summary(done), rows=done["rows"])
    return done


def _on_spark(
    config: configuration.ResolvedConfig,
    store: RollupStore,
    job_dir: Path,
    days: list[DueDay],
    noted_run: JobRun,
) -> dict[str, Any]:
    """Start Spark, roll up, stop it."""
    log_path = job_dir / "spark.log"

    def action(spark: SparkSession) -> dict[str, Any]:
        return roll_up(spark, store, days, noted_run)

    click.echo(f"{len(days)} days are due; Spark starts, and writes its warnings to {log_path}", err=True)
    with scratch(job_dir), stderr_to(log_path):
        rows = sum(day.rows for day in days)
        done, use = on_spark(config.policy, job_dir, action, log_path, rows)
    return {**done, "peak_mib": use.peak_mib}


def roll_up(spark: SparkSession, store: RollupStore, days: list[DueDay], noted_run: JobRun) -> dict[str, Any]:
    """Roll up these days, one after the other.

    Raises:
        FileDamaged: of the first day that has such a file; all others are rolled up.
    """
    done: dict[str, Any] = {"days": [], "files": 0, "rows": 0}
    damaged: list[FileDamaged] = []
    for number, day in enumerate(days, 1):
        try:
            store.check(day)
        except FileDamaged as exc:  # until it is given up for its age, weeks of days would wait behind it
            damaged.append(exc)
            continue
        made = rollups.rolled_up(spark, day, store)
        if store.commit(day, made):  # else another server's run was faster
            done["days"].append(day.name)
            done["files"] += len(made)
            done["rows"] += day.rows
        count = number - len(damaged)
        noted_run.note(f"{count} of {len(days)} days are rolled up", rows=done["rows"])
    if damaged:
        raise damaged[0]
    return done


def summary(done: dict[str, Any]) -> str:
    """One line for people."""
    days = done["days"]
    if not days:
        return "no day is due: every day that has left SQL is rolled up"
    span = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return f"{len(days)} days rolled up ({span}): {done['rows']:,} rollups became {done['files']} files"


@job_command("rollup-job", end_java)
def main(config: configuration.ResolvedConfig, who: str) -> JobAnswer:
    """Make hourly and daily rollups of the days that have left SQL, and of those of which late data came."""
    done = run(config, who)
    return JobAnswer(done, summary(done))


if __name__ == "__main__":
    as_process(main)
