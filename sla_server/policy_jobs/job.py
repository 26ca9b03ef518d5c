"""The policy job: ``python -m sla_server.policy_jobs.job --config FILE``. A plain command for timer and hand.

Steps: lock, take a snapshot, compute (Spark, with the models in its workers), publish (one SQL transaction
under a new version). Each run publishes a whole policy, and the newest is put in force. A crash before the
last step leaves nothing. What the jobs of single steps (``step_job``) have stored recently is taken as it is.

What reaches this process: streams and agreements, one row for each promise on each backend, and the caps.
"""

from __future__ import annotations

import time
from contextlib import closing
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import click

from sla_server import config as configuration
from sla_server.db.engine import check_made
from sla_server.db.fence import acting_fence
from sla_server.db.policies import open_policies
from sla_server.jobs import JobAnswer, as_process, job_command, noted, only_one
from sla_server.policy_jobs import attribution, back_test, cost_model, publishing, stored_results
from sla_server.policy_jobs.compute import STEPS, Found, compute
from sla_server.policy_jobs.inputs import demand_in_force
from sla_server.policy_jobs.session import check_files, end_java
from sla_server.policy_jobs.spark_run import on_statistics
from sla_server.policy_jobs.step_job import describe_capacity

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sla_server.policy_jobs.inputs import JobInputs, Statistics

SHOWN_CAPS: Final = 1000  # of the answer; all are in SQL: ``sla policy show``, ``explain``


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
    started_s, end_us = time.monotonic(), now_us or time.time_ns() // 1000
    check_made(config.database, config.data_dir)
    check_files(config.database.files.url)
    job_dir = config.data_dir / "policy-job"
    with (
        only_one(job_dir / "lock", "policy"),
        closing(open_policies(config.database, config.data_dir, acting_fence(config))) as store,
    ):
        store.check_may_publish()
        with noted(store, publishing.KIND, who) as noted_run:

            def action(spark: SparkSession, rows: Statistics, read: JobInputs) -> tuple[Found, list[str]]:
                stored = stored_results.fresh(store.results, STEPS, read, config.policy, end_us)
                return compute(spark, rows, read, stored, demand_in_force(store)), sorted(stored)

            (found, taken), job = on_statistics(
                config,
                store,
                job_dir,
                end_us,
                lambda rows: noted_run.note("Spark computes", rows=rows),
                action,
            )
            job |= {"taken": taken, "seconds": round(time.monotonic() - started_s, 1)}
            report = {
                "capacity": found.capacity,
                "curves": found.curves,
                "cost_model": found.costs,
                "harms": found.harms,
                "bursts": found.bursts,
            }
            noted_run.note("the back-test runs")
            tested = back_test.made(store, config, found.capped_rows, end_us, found.demands)
            number = publishing.publish(
                store, noted_run, found.cap_rows(), tested, job=job, report=report, published_by=who
            )
    return {
        "version": number,
        "back_test": tested,
        "exit_status": noted_run.exit_status,
        "capacity": found.capacity,
        "cost_model": found.costs,
        "harms": found.harms,
        "bursts": found.bursts,
        "capped": list(islice(found.capped_rows(), SHOWN_CAPS)),
        "capped_hours": found.capped_hours,
        "hours": found.caps.num_rows,
        "job": job,
    }


def describe(result: dict[str, Any]) -> str:
    """The result for people."""
    job = result["job"]
    memory = ", ".join(f"{mib} MiB in {name}" for name, mib in job["peak_mib"].items())
    took = f"{job['seconds']} s, of which Spark's start {job['spark_start_s']} s"
    done = "not published" if result["exit_status"] else "published"
    lines = [f"policy version {result['version']} {done} ({took}; at most {memory})"]
    if job["taken"]:
        lines.append(f"  not computed again: {', '.join(job['taken'])}")
    lines += back_test.describe(result["back_test"])
    for row in result["capacity"]:
        lines += describe_capacity(row)
    for row in result["cost_model"]:
        lines += cost_model.describe(row)
    for row in result["harms"][:10]:
        lines += attribution.describe(row)
    for row in result["capped"][:10]:
        lines.append(
            f"  {row['volume']} hour {row['hour_of_week']}: at most {row['cost_per_s']:.0f} weighted IOPS"
        )
    if not result["capped"]:
        lines.append("  no volume needs a cap in the hours seen")
    elif result["capped_hours"] > 10:
        lines.append(f"  and {result['capped_hours'] - 10:,} more: sla policy show {result['version']}")
    return "\n".join(lines)


@job_command("policy-job", end_java)  # else what waits for a result goes on to wait
@click.option("--as-of", type=int, help="End of the window (us UTC); default: now. For runs to be compared.")
def main(config: configuration.ResolvedConfig, who: str, as_of: int | None) -> JobAnswer:
    """Compute a throttling policy from the stored statistics and publish it."""
    result = run(config, who, as_of)
    return JobAnswer(result, describe(result), result["exit_status"])


if __name__ == "__main__":
    as_process(main)
