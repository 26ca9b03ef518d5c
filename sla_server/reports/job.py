"""The report job: ``python -m sla_server.reports.job --config FILE``, for schedule, timer and hand.

It issues what is due, or the report of one agreement and period. Each report is a transaction of its own, and
a report that cannot be made (a database that goes away, an agreement of another release) leaves the others
alone: the next run makes up for it. The server announces what was issued (``services.reports``).
"""

from __future__ import annotations

import time
from contextlib import closing
from typing import Any, Final

import click
import structlog

from sla_server import config as configuration
from sla_server.db.engine import check_made
from sla_server.db.fence import acting_fence
from sla_server.db.reports import ReportStore, open_reports
from sla_server.jobs import JobAnswer, as_process, job_command, noted, only_one
from sla_server.reports.errors import ReportError
from sla_server.reports.inputs import LAST
from sla_server.reports.issue import due_periods, issue
from sla_server.reports.sums import SumsCheck
from sla_server.rows import Row

log = structlog.get_logger("report-job")
KIND: Final = "reports"
WORDS: Final = {True: "kept", False: "not kept", None: "not judged"}


def issue_due(
    store: ReportStore, kind: str, who: str, now_us: int, sums: SumsCheck | None = None
) -> tuple[list[Row], list[str]]:
    """Issue all that is due; the reports, and what could not be made.

    Raises:
        DatabaseUnavailable: what was issued before stays.
    """
    issued: list[Row] = []
    refused: list[str] = []
    for name, period in due_periods(store.reader, kind, now_us):  # type: ignore[arg-type]
        try:
            row = issue(store, name, period, who, now_us, only_first=True, sums=sums)
        except ReportError as exc:
            refused.append(f"{name} {period}: {exc}")
            log.warning("report-not-issued", agreement=name, period=period, problem=str(exc))
            continue
        if row is not None:
            issued.append(row)
    return issued, refused


def run(
    config: configuration.ResolvedConfig,
    who: str,
    now_us: int,
    *,
    agreement: str | None = None,
    period: str = LAST,
    may_be_preliminary: bool = False,
) -> dict[str, Any]:
    """One whole run, noted in ``jobs``.

    Raises:
        JobRunning, ReportError, NoRightToPublish, DatabaseUnavailable, NoDatabaseYet: see the message.
    """
    check_made(config.database, config.data_dir)
    with (
        only_one(config.data_dir / "report-job" / "lock", "report"),
        closing(open_reports(config.database, config.data_dir, acting_fence(config))) as store,
    ):
        store.check_may_issue()
        with noted(store.jobs, KIND, who) as noted_run:
            refused: list[str] = []
            sums = SumsCheck.of(store.reader)
            if agreement is None:
                issued, refused = issue_due(store, config.reports.period, who, now_us, sums)
            else:
                row = issue(
                    store, agreement, period, who, now_us, may_be_preliminary=may_be_preliminary, sums=sums
                )
                issued = [] if row is None else [row]
            text = f"{len(issued)} reports issued" + (
                f"; {len(refused)} could not be made" if refused else ""
            )
            noted_run.note("; ".join(filter(None, (text, sums.words))), rows=len(issued))
    listed = [{key: value for key, value in row.items() if key != "body"} for row in issued]
    return {"issued": listed, "refused": refused, "sums": sums.as_dict()}


def describe(result: dict[str, Any]) -> str:
    """The result for people."""
    lines = []
    for row in result["issued"]:
        kept = ", ".join(f"{each['name']} {WORDS[each['is_kept']]}" for each in row["summary"]["objectives"])
        state = " (preliminary)" if row["is_preliminary"] else ""
        lines.append(f"{row['report_id']}{state} issued as number {row['number']}: {kept}")
        lines.append(f"  SHA-256 {row['digest']}")
    lines += [f"not issued: {text}" for text in result["refused"]]
    return "\n".join(lines) or "nothing to issue: each report that is due is there, and says the same"


@job_command("report-job")
@click.option("--agreement", help="Only of this one [all that is due].")
@click.option("--period", default=LAST, show_default=True, help="With --agreement: which.")
@click.option("--preliminary", is_flag=True, help="With --agreement: also while figures may still change.")
def main(
    config: configuration.ResolvedConfig, who: str, agreement: str | None, period: str, preliminary: bool
) -> JobAnswer:
    """Issue reports: all that are due, or the one of an agreement's period."""
    now_us = time.time_ns() // 1000
    result = run(config, who, now_us, agreement=agreement, period=period, may_be_preliminary=preliminary)
    return JobAnswer(result, describe(result))


if __name__ == "__main__":
    as_process(main)
