"""How a run of the job is noted, and whether what it found is published.

A run is a row of table ``jobs`` from the moment it holds the lock: when, who, how far, how it ended. A run
that was killed leaves ``running`` behind, and the next one, which holds the lock, notes it as killed.

What was found is published if the back-test says that it helps, or if nothing is capped by it. Else it is
stored as ``rejected`` with the same report, which says why: it can be looked at, and put in force by a pin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

from pmdaemon.errors import SlaError
from sla_server.db.policies import PUBLISHED, REJECTED, PolicyStore

KIND: Final = "policy"
NOT_PUBLISHED: Final = 81
"""Exit status of a run that found a policy which does not help."""
_SHOWN: Final = 500  # characters of an error in the list of runs


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
def noted(
    store: PolicyStore, who: str, status_of: Callable[[SlaError], int], kind: str = KIND
) -> Iterator[JobRun]:
    """Note a run from begin to end, however it ends. The caller holds the job's lock.

    Args:
        store: with the right to insert.
        who: started it.
        status_of: the exit status of an error.
        kind: of the job.
    """
    job_id = store.begin_job(kind, who)
    run = JobRun(lambda text, rows=None: _noted(store, job_id, text, rows))
    try:
        yield run
    except BaseException as exc:
        status = status_of(exc) if isinstance(exc, SlaError) else 130 if _is_stop(exc) else 1
        text = "it was stopped" if _is_stop(exc) else (str(exc).strip() or type(exc).__name__)[:_SHOWN]
        with suppress(SlaError):  # the error itself matters more than its note
            store.end_job(job_id, "failed", status, text=text)
        raise
    state = "not-published" if run.exit_status else "done"
    store.end_job(job_id, state, run.exit_status, version=run.version)


def _noted(store: PolicyStore, job_id: str, text: str, rows: int | None) -> None:
    columns: dict[str, str | int | None] = {"text": text}
    if rows is not None:
        columns["rows"] = rows
    with suppress(SlaError):  # a note of progress is not worth the run
        store.report_job(job_id, **columns)


def _is_stop(error: BaseException) -> bool:
    return isinstance(error, KeyboardInterrupt | SystemExit)


def publish(
    store: PolicyStore,
    run: JobRun,
    caps: Iterable[dict[str, Any]],
    back_test: Mapping[str, Any],
    **columns: Any,
) -> int:
    """Store what was found under the next version, published or rejected as the back-test says.

    Args:
        store: where to.
        run: gets the version and the exit status.
        caps: as ``PolicyStore.publish`` takes them.
        back_test: what it found; ``publish`` says whether, ``reason`` why.
        columns: job, report and published_by of ``PolicyStore.publish``.
    """
    is_good = bool(back_test["publish"])
    report = {**columns.pop("report"), "back_test": dict(back_test)}
    state = PUBLISHED if is_good else REJECTED
    run.version = store.publish(caps, report=report, state=state, **columns)
    run.exit_status = 0 if is_good else NOT_PUBLISHED
    run.note(str(back_test["reason"]))
    return run.version
