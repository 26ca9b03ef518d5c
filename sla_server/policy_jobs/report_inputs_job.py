"""The job of report inputs: ``python -m sla_server.policy_jobs.report_inputs_job --config FILE``.

Spark adds up the judged slices of every agreement by period: of the newest revision of each slice, how many
there are of each version, state and length. These are the period sums that reports and pages work out one
agreement at a time (``SqlReader.slice_sums``); here they are of the whole fleet at once, of the period that
goes on and the one before, each agreement's own and that of ``[reports] period``. They are stored as a whole
(``job_results``): a report is compared with them before it is issued (``reports.sums``), and
``compliance.sums_of_rows`` makes its figures of them.

A crash leaves what was stored before.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from sla_server import config as configuration
from sla_server.agreements.compliance import sums_of_rows, terms_by_version
from sla_server.db.engine import check_made
from sla_server.db.fence import acting_fence
from sla_server.db.policies import open_policies
from sla_server.db.statistics import StatisticsSnapshot
from sla_server.jobs import JobAnswer, JobRun, as_process, job_command, noted, only_one
from sla_server.policy_jobs import sql_source, stored_results, transforms
from sla_server.policy_jobs.session import end_java, stderr_to
from sla_server.policy_jobs.spark_run import on_spark, scratch
from sla_server.reports.inputs import find_period, versions_of
from sla_server.reports.period import period_at, usual_kind
from sla_server.reports.sums import SUMS_JOB

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from sla_server.agreements.promise import InForce
    from sla_server.rows import Row

KIND: Final = SUMS_JOB
SLICES: Final = "slices"
SPANS: Final = pa.schema(
    [("name", pa.string()), ("period", pa.string()), ("from_us", pa.int64()), ("to_us", pa.int64())]
)

SUMS: Final = pa.schema(
    [
        *((name, pa.string()) for name in transforms.PERIOD_KEYS),
        ("version", pa.int64()),
        ("state", pa.string()),
        ("ours", pa.bool_()),
        ("inexact", pa.bool_()),
        ("length_us", pa.int64()),
        ("n", pa.int64()),
    ]
)


def spans_of(rows: Sequence[Row], kind: str, now_us: int) -> pa.Table:
    """The period that goes on and the one before, of each agreement that was in force in them; SPANS.

    Args:
        rows: all versions of all agreements, by name.
        kind: of periods beside the agreement's own, or ``own``.
        now_us: wall clock.
    """
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for name, versions in groupby(rows, lambda row: row["name"]):
        items = versions_of(list(versions), (), now_us)
        if not items:
            continue
        for period in _periods_of(items, kind, now_us):
            found[str(name), period[0]] = period[1:]
    listed = [
        {"name": name, "period": text, "from_us": from_us, "to_us": to_us}
        for (name, text), (from_us, to_us) in sorted(found.items())
    ]
    return pa.Table.from_pylist(listed, schema=SPANS)


def _periods_of(items: Sequence[InForce], kind: Any, now_us: int) -> list[tuple[str, int, int]]:
    """Of now, also for an agreement that has ended: the slices of years ago are in reports since."""
    spec = items[-1].agreement.spec
    found = []
    for each in dict.fromkeys((usual_kind(spec.window), usual_kind(spec.window) if kind == "own" else kind)):
        running = period_at(each, spec.time_zone, now_us)
        before = period_at(each, spec.time_zone, running.from_us - 1)
        # Of the version that held last in it, as the report has it; another zone's would not compare.
        found += [running, find_period(items, before.text, now_us)]
    ended_us = items[-1].ended_us
    return [
        (each.text, each.from_us, each.to_us) for each in found if ended_us is None or each.from_us < ended_us
    ]


def run(config: configuration.ResolvedConfig, who: str, now_us: int | None = None) -> dict[str, Any]:
    """One whole run; the sums, rows of ``transforms.PERIOD_SUMS``.

    Raises:
        JobRunning, NoJava, SparkFailed, NoRightToPublish, DatabaseUnavailable, NoDatabaseYet: what was stored
            before stays.
    """
    end_us = now_us or time.time_ns() // 1000
    check_made(config.database, config.data_dir)
    job_dir = config.data_dir / "report-inputs-job"
    with (
        only_one(job_dir / "lock", KIND),
        closing(open_policies(config.database, config.data_dir, acting_fence(config))) as store,
    ):
        store.check_may_store()
        with noted(store, KIND, who) as noted_run:
            agreements = list(store.reader.all_agreements())
            spans = spans_of(agreements, config.reports.period, end_us)
            sums, rows = SUMS.empty_table(), 0
            if spans.num_rows:
                sums, rows = _computed(config, job_dir, spans, noted_run)
            store.results.replace(KIND, end_us, "", stored_results.encoded(sums))
            noted_run.note(f"{sums.num_rows:,} sums of {spans.num_rows:,} periods stored", rows=rows)
    found = sums.to_pylist()
    return {"slices": rows, "sums": found, "periods": described(agreements, found)}


def _computed(
    config: configuration.ResolvedConfig, job_dir: Path, spans: pa.Table, noted_run: JobRun
) -> tuple[pa.Table, int]:
    """The sums, and of how many rows; without a slice Spark is not started."""
    window_us = min(spans["from_us"].to_pylist()), max(spans["to_us"].to_pylist())
    columns, log_path = {SLICES: transforms.SLICE_COLUMNS}, job_dir / "spark.log"
    with (
        scratch(job_dir) as copy_dir,
        closing(
            StatisticsSnapshot(config.database, config.data_dir, window_us, columns, copy_dir)
        ) as snapshot,
    ):
        rows = snapshot.rows(SLICES)
        noted_run.note("Spark computes", rows=rows)

        def action(spark: SparkSession) -> pa.Table:
            slices = sql_source.rows_in_sql(spark, snapshot, SLICES, columns[SLICES], transforms.SLICE_DDL)
            return sums_of(spark, slices, spans)

        if not rows:
            return SUMS.empty_table(), 0
        with stderr_to(log_path):
            return on_spark(config.policy, job_dir, action, log_path, rows)[0], rows


def sums_of(spark: SparkSession, slices: DataFrame, spans: pa.Table) -> pa.Table:
    """The sums as a table, in order."""
    found = transforms.period_sums(slices, spark.createDataFrame(spans)).toArrow()
    return found.sort_by([(name, "ascending") for name in transforms.PERIOD_SUMS]).cast(SUMS)


def described(agreements: Sequence[Row], sums: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What a report would say of each objective and period: compliance and coverage, by the terms agreed."""
    versions = {name: list(rows) for name, rows in groupby(agreements, lambda row: row["name"])}
    found = []
    for key, rows in groupby(sums, lambda row: (row["name"], row["objective"], row["period"])):
        terms = terms_by_version(versions[key[0]], key[1])
        if terms:
            of_period = sums_of_rows(rows, terms, terms[max(terms)])
            found.append(
                {
                    **dict(zip(("name", "objective", "period"), key, strict=True)),
                    "compliance": of_period.compliance,
                    "coverage": of_period.coverage,
                    "slices": of_period.counts.states(),
                }
            )
    return found


def describe(found: Mapping[str, Any]) -> str:
    """The result for people."""
    lines = [
        f"{found['slices']:,} slices; {len(found['sums']):,} sums of {len(found['periods'])} periods stored"
    ]
    for each in found["periods"]:
        kept = "not known" if each["compliance"] is None else f"{100 * each['compliance']:.4f} % of the time"
        lines.append(f"  {each['name']}/{each['objective']} {each['period']}: kept {kept}")
    return "\n".join(lines)


@job_command("report-inputs-job", end_java)  # else what waits for a result goes on to wait
def main(config: configuration.ResolvedConfig, who: str) -> JobAnswer:
    """Add up the judged slices of all agreements by period, and store the sums."""
    found = run(config, who)
    return JobAnswer(found, describe(found))


if __name__ == "__main__":
    as_process(main)
