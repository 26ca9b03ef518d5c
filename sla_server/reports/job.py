"""The report job: ``python -m sla_server.reports.job --config FILE``, for schedule, timer and hand.

It issues what is due, or the report of one agreement and period. Each report is a transaction of its own, and
a report that cannot be made (a database that goes away, an agreement of another release) leaves the others
alone: the next run makes up for it. The server announces what was issued (``services.reports``).
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import click
import structlog

from pmdaemon.errors import SlaError
from pmdaemon.runtime import config as files
from pmdaemon.runtime import logs
from pmdaemon.runtime.stop import end_with_parent
from sla_server import config as configuration
from sla_server.db.engine import check_made
from sla_server.db.fence import acting_fence
from sla_server.db.reports import ReportStore, open_reports
from sla_server.reports.errors import IssueRunning, ReportError
from sla_server.reports.inputs import LAST
from sla_server.reports.issue import due_periods, issue
from sla_server.rows import Row

log = structlog.get_logger("report-job")
KIND: Final = "reports"
NICER: Final = 10  # whatever else this machine does goes first
EX_UNAVAILABLE: Final = 69
EX_TEMPFAIL: Final = 75
WORDS: Final = {True: "kept", False: "not kept", None: "not judged"}
_SHOWN: Final = 500  # characters of an error in the list of runs


@contextmanager
def _only_one(lock: Path) -> Iterator[None]:
    lock.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise IssueRunning(lock) from exc
        yield


def issue_due(store: ReportStore, kind: str, who: str, now_us: int) -> tuple[list[Row], list[str]]:
    """Issue all that is due; the reports, and what could not be made.

    Raises:
        DatabaseUnavailable: what was issued before stays.
    """
    issued: list[Row] = []
    refused: list[str] = []
    for name, period in due_periods(store.reader, kind, now_us):  # type: ignore[arg-type]
        try:
            row = issue(store, name, period, who, now_us, only_first=True)
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
        IssueRunning, ReportError, NoRightToPublish, DatabaseUnavailable, NoDatabaseYet: see the message.
    """
    check_made(config.database, config.data_dir)
    with (
        _only_one(config.data_dir / "report-job" / "lock"),
        closing(open_reports(config.database, config.data_dir, acting_fence(config))) as store,
    ):
        store.check_may_issue()
        job_id = store.jobs.begin_job(KIND, who)
        try:
            refused: list[str] = []
            if agreement is None:
                issued, refused = issue_due(store, config.reports.period, who, now_us)
            else:
                row = issue(store, agreement, period, who, now_us, may_be_preliminary=may_be_preliminary)
                issued = [] if row is None else [row]
        except BaseException as exc:
            status = _status_of(exc) if isinstance(exc, SlaError) else 1
            with suppress(SlaError):  # the error itself matters more than its note
                store.jobs.end_job(job_id, "failed", status, text=str(exc)[:_SHOWN])
            raise
        text = f"{len(issued)} reports issued" + (f"; {len(refused)} could not be made" if refused else "")
        store.jobs.end_job(job_id, "done", 0, text=text, rows=len(issued))
    listed = [{key: value for key, value in row.items() if key != "body"} for row in issued]
    return {"issued": listed, "refused": refused}


def _status_of(error: SlaError) -> int:
    """75 means another thing to users of ``sla``, so a database that is away is 69."""
    return EX_UNAVAILABLE if error.exit_status == EX_TEMPFAIL else error.exit_status


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


@click.command()
@click.option(
    "--config", "path", type=click.Path(path_type=Path), envvar="SLA_CONFIG", help="The server's TOML file."
)
@click.option("--agreement", help="Only of this one [all that is due].")
@click.option("--period", default=LAST, show_default=True, help="With --agreement: which.")
@click.option("--preliminary", is_flag=True, help="With --agreement: also while figures may still change.")
@click.option(
    "-o", "output", type=click.Choice(["table", "json"]), default="table", help="Form of the answer."
)
@click.option("--scheduled", is_flag=True, hidden=True, help="Started by the server.")
@click.option("--show-config", is_flag=True, help="Print the values in force and exit.")
@click.option("--check-config", is_flag=True, help="Check the file and exit.")
def main(
    path: Path | None,
    agreement: str | None,
    period: str,
    preliminary: bool,
    output: str,
    scheduled: bool,
    show_config: bool,
    check_config: bool,
) -> None:
    """Issue reports: all that are due, or the one of an agreement's period."""
    logs.configure("report-job")
    try:
        config = configuration.load(path)
        if show_config or check_config:
            click.echo(files.show(config) if show_config else "configuration is good")
            return
        if scheduled:
            end_with_parent()
            os.nice(NICER)
        who = "schedule" if scheduled else os.environ.get("USER", "report-job")
        result = run(
            config,
            who,
            time.time_ns() // 1000,
            agreement=agreement,
            period=period,
            may_be_preliminary=preliminary,
        )
    except SlaError as exc:
        click.echo(f"report job: {exc}", err=True)
        raise SystemExit(_status_of(exc)) from exc
    click.echo(json.dumps(result) if output == "json" else describe(result))


if __name__ == "__main__":
    main()
