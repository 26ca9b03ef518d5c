"""What all jobs have in common: one run of each at a time, a row in SQL, and the command.

    @job_command("policy-job")             python -m MODULE --config FILE [-o json] [--scheduled] ...
    def main(config, who, ...):            -> ``JobAnswer``: printed, its status is the command's
        with (
            only_one(lock, "policy"),      status 79 if another run has these files,
            noted(store, "policy", who),   or this database; a row of ``jobs`` from begin to end
        ): ...
    as_process(main)                       of the module as a program: it ends with that status

A run is a row of table ``jobs`` from the moment it holds the lock: when, who, how far, how it ended. A run
that was killed leaves ``running`` behind, and the next one, which holds the lock, notes it as killed.

Thread: the main one of a process of its own.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Final, NoReturn, ParamSpec

import click

from pmdaemon.errors import SlaError
from pmdaemon.runtime import config as files
from pmdaemon.runtime import logs
from pmdaemon.runtime.stop import end_with_parent, stopped_in_order
from sla_server import config as configuration
from sla_server.errors import JobRunning

if TYPE_CHECKING:
    from sla_server.db.policies import PolicyStore

P = ParamSpec("P")
EX_UNAVAILABLE: Final = 69
EX_TEMPFAIL: Final = 75
STOP_S: Final = 4  # less than the supervisor waits
NICER: Final = 10  # as the systemd unit: whatever else this machine does goes first
_SHOWN: Final = 500  # characters of an error in the list of runs


@contextmanager
def only_one(lock: Path, name: str) -> Iterator[None]:
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


def status_of(error: SlaError) -> int:
    """The exit status: 75 means another thing to users of ``sla``, so a database that is away is 69."""
    return EX_UNAVAILABLE if error.exit_status == EX_TEMPFAIL else error.exit_status


# -- The row of a run


@dataclass
class JobRun:
    """One run under way. ``end`` is what is noted of a good end.

    Attributes:
        note: says how far it is, in words, and of how many rows.
    """

    note: Callable[..., None]
    version: int | None = None
    exit_status: int = 0


@contextmanager
def noted(store: PolicyStore, kind: str, who: str) -> Iterator[JobRun]:
    """Note a run from begin to end, however it ends, under the lock of all runs over this database.

    The caller holds that of the data directory, in which the job has its files.

    Args:
        store: with the right to insert.
        kind: of the job.
        who: started it.

    Raises:
        JobRunning: another run holds the lock; it may have a data directory of its own.
    """
    with store.alone(kind):
        job_id = store.begin_job(kind, who)
        run = JobRun(lambda text, rows=None: _noted(store, job_id, text, rows))
        try:
            yield run
        except BaseException as exc:
            text = "it was stopped" if _is_stop(exc) else (str(exc).strip() or type(exc).__name__)[:_SHOWN]
            with suppress(SlaError):  # the error itself matters more than its note
                store.end_job(job_id, "failed", _status(exc), text=text)
            raise
        state = "not-published" if run.exit_status else "done"
        store.end_job(job_id, state, run.exit_status, version=run.version)


def _noted(store: PolicyStore, job_id: str, text: str, rows: int | None) -> None:
    columns: dict[str, str | int | None] = {"text": text}
    if rows is not None:
        columns["rows"] = rows
    with suppress(SlaError):  # a note of progress is not worth the run
        store.report_job(job_id, **columns)


def _status(error: BaseException) -> int:
    match error:
        case SlaError():
            return status_of(error)
        case SystemExit(code=int(code)):
            return code
        case KeyboardInterrupt():
            return 130
        case _:
            return 1


def _is_stop(error: BaseException) -> bool:
    return isinstance(error, KeyboardInterrupt | SystemExit)


# -- The command


@dataclass(frozen=True, slots=True)
class JobAnswer:
    """What a job says when it ends well.

    Attributes:
        result: for programs.
        text: for people.
        exit_status: of the command.
    """

    result: Mapping[str, Any]
    text: str
    exit_status: int = 0


def job_command(
    name: str, at_stop: Callable[[], object] = lambda: None
) -> Callable[[Callable[Concatenate[configuration.ResolvedConfig, str, P], JobAnswer]], click.Command]:
    """Make the command of a job of the function that runs it; options of its own stand below this one.

    Args:
        name: of its log, and of who started it where no user did.
        at_stop: ends what this process waits for, when SIGTERM comes.
    """

    def made(run: Callable[Concatenate[configuration.ResolvedConfig, str, P], JobAnswer]) -> click.Command:
        @wraps(run)
        def command(
            path: Path | None,
            output: str,
            scheduled: bool,
            show_config: bool,
            check_config: bool,
            *own: P.args,
            **options: P.kwargs,
        ) -> None:
            logs.configure(name)
            try:
                config = configuration.load(path)
                if show_config or check_config:
                    click.echo(files.show(config) if show_config else "configuration is good")
                    return
                if scheduled:
                    end_with_parent()
                    os.nice(NICER)
                who = "schedule" if scheduled else os.environ.get("USER", name)
                with stopped_in_order(STOP_S, at_stop):
                    answer = run(config, who, *own, **options)
            except SlaError as exc:
                click.echo(f"{name.replace('-job', ' job')}: {exc}", err=True)
                raise SystemExit(status_of(exc)) from exc
            click.echo(json.dumps(answer.result) if output == "json" else answer.text)
            if answer.exit_status:
                raise SystemExit(answer.exit_status)

        for option in reversed(OPTIONS):
            command = option(command)
        return click.command()(command)

    return made


def as_process(command: click.Command) -> NoReturn:
    """Run the command of a job as all that this process does, and end it at once with its status.

    When Python ends in the usual way, Arrow's threads are destroyed while some may still run: of a hundred
    processes that had read Parquet one or two ended with SIGABRT (Arrow 26.0;
    github.com/apache/arrow/issues/34314), a policy job after it had published among them, which was a failed
    run for its timer. Everything of ours has ended by then.
    """
    try:
        command()
        status = 0
    except SystemExit as exc:
        status = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
        if isinstance(exc.code, str):
            click.echo(exc.code, err=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


OPTIONS: Final = (
    click.option(
        "--config",
        "path",
        type=click.Path(path_type=Path),
        envvar="SLA_CONFIG",
        help="The server's TOML file.",
    ),
    click.option(
        "-o", "output", type=click.Choice(["table", "json"]), default="table", help="Form of the answer."
    ),
    click.option("--scheduled", is_flag=True, hidden=True, help="Started by the server."),
    click.option("--show-config", is_flag=True, help="Print the values in force and exit."),
    click.option("--check-config", is_flag=True, help="Check the file and exit."),
)
"""Of every job."""
