"""The policy job's door to SQL: questions, and one transaction that publishes (``statistics`` has the rows).

The job runs beside the server, so this is the one writer besides the dbmanager; it waits its turn
(``lock_timeout_s``). Versions are numbered under a lock: two jobs never publish the same number. A
published policy is never changed; services puts it in force (RECORD ``policies.state``).
"""

from __future__ import annotations

import json
import uuid
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, Engine, Table, func, insert, select, text, update

from pmdaemon.runtime.clock import Clock, SystemClock
from sla_server.db import schema
from sla_server.db.config import DatabaseConfig
from sla_server.db.engine import begin, make_engine, translated, where
from sla_server.db.errors import DbError, NoRightToPublish
from sla_server.db.fence import Fence, fenced
from sla_server.db.job_results import JobResults
from sla_server.db.queries.reader import SqlReader
from sla_server.errors import JobRunning

PUBLISH_LOCK: Final = 0x51A5_0002  # any constant but migrate.ADVISORY_LOCK; all releases must use the same
JOB_LOCK: Final = 0x51A5_0005
"""With the kind of a job; any constant but those of ``migrate``, ``reports`` and ``fence``."""
_LIVE: Final = text(
    "SELECT set_config(wanted.name, wanted.value, false) FROM pg_settings JOIN (VALUES "
    "('idle_session_timeout', '0'), ('tcp_keepalives_idle', '10'), ('tcp_keepalives_interval', '5'), "
    "('tcp_keepalives_count', '4')) AS wanted (name, value) ON wanted.name = pg_settings.name"
)
"""Of the session of a lock: it is silent for as long as a job computes, and ends soon after its machine."""
HOURS_A_WEEK: Final = 168
ROWS_AT_A_TIME: Final = 10_000  # of caps; a large fleet has millions
PUBLISHED: Final = "published"
REJECTED: Final = schema.REJECTED
RUNNING: Final = "running"


class PolicyStore:
    """What the policy job reads and writes.

    Attributes:
        reader: all other questions (``agreements``, ``policies``, ``manifest``).
        results: what jobs of single steps found.

    Thread: one at a time.
    """

    def __init__(self, engine: Engine, clock: Clock | None = None) -> None:
        self._engine = engine
        self._clock = clock or SystemClock()
        self.reader = SqlReader(engine)
        self.results = JobResults(engine, self._clock, self.reader.results)
        self._alone: set[str] = set()  # kinds whose lock this store holds

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    def check_may_publish(self) -> None:
        """Check that ``publish`` will be allowed, before minutes of work are spent on it.

        Raises:
            NoRightToPublish: the role lacks the right to insert.
            DatabaseUnavailable: retryable.
        """
        self._check_may_insert(schema.policies, schema.policy_caps, schema.jobs)

    def check_may_store(self) -> None:
        """The same for what jobs of single steps find.

        Raises:
            NoRightToPublish: the role lacks the right to insert.
            DatabaseUnavailable: retryable.
        """
        self._check_may_insert(schema.job_results, schema.jobs)

    def _check_may_insert(self, *tables: Table) -> None:
        if self._engine.dialect.name != "postgresql":
            return  # a file that cannot be written cannot be opened by a writer either
        allowed = text("SELECT has_table_privilege(:table, 'INSERT')")
        names = [table.name for table in tables]
        with translated(self._engine), self._engine.connect() as connection:
            missing = [name for name in names if not connection.scalar(allowed, {"table": name})]
        if missing:
            raise NoRightToPublish(where(self._engine), missing)

    def publish(
        self,
        caps: Iterable[Mapping[str, Any]],
        *,
        job: Mapping[str, Any],
        report: Mapping[str, Any],
        published_by: str,
        state: str = PUBLISHED,
    ) -> int:
        """Publish a policy in one transaction and return its version, the highest so far plus one.

        Args:
            caps: volume, hour_of_week (0 = Monday 00 UTC), cost_per_s (None: no cap), demand_p50, demand_p95,
                and perhaps burst_s (seconds of the cap that may pass at once; None: the default).
            job: window, rows, versions: how it was computed.
            report: cost model, capacity per backend, back-test.
            published_by: who ran the job.
            state: ``PUBLISHED``, or ``REJECTED``: stored to be looked at, and put in force only by a pin.

        Raises:
            ValueError: a cap of an hour outside 0..167, or at or below 0.
            DatabaseRefused: the same (volume, hour) twice.
            DatabaseUnavailable: nothing was published; run the job again.
        """
        rows = map(_cap_row, caps)
        policy = {
            "created_us": self._clock.unix_us(),
            "state": state,
            "job": json.dumps(job, default=str),
            "report": json.dumps(report, default=str),
            "published_by": published_by,
        }
        with begin(self._engine) as connection:
            if connection.dialect.name == "postgresql":
                # SQLite's BEGIN IMMEDIATE has locked everything already. A table lock needs more than INSERT.
                connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": PUBLISH_LOCK})
            highest = connection.execute(select(func.max(schema.policies.c.version))).scalar()
            version = (highest or 0) + 1
            connection.execute(insert(schema.policies), {**policy, "version": version})
            while some := [{**row, "version": version} for row in islice(rows, ROWS_AT_A_TIME)]:
                connection.execute(insert(schema.policy_caps), some)
        return version

    # -- Runs of jobs

    @contextmanager
    def alone(self, kind: str) -> Iterator[None]:
        """Hold the lock of this kind of job, which all runs over this database share.

        Each may have files and a user of its own (``sla-policy.timer`` and ``sla-job@policy.timer``), so a
        lock in a data directory does not keep them apart. The lock is its session's: it is free once the
        connection has ended, however this process ends. SQLite's file lies in the one data directory.

        Raises:
            JobRunning: another run holds it.
            DatabaseUnavailable: retryable.
        """
        if kind in self._alone or self._engine.dialect.name != "postgresql":
            yield
            return
        connection = self._locked(kind)
        self._alone.add(kind)
        try:
            yield
        finally:
            self._alone.discard(kind)
            with suppress(DbError), translated(self._engine):  # the session may have ended by itself
                connection.close()

    def _locked(self, kind: str) -> Connection:
        statement = text("SELECT pg_try_advisory_lock(CAST(:job AS integer), CAST(:kind AS integer))")
        number = zlib.crc32(kind.encode()) - (1 << 31)
        with translated(self._engine):
            connection = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
            connection.detach()  # not back into the pool: its session, and the lock, end with it
            try:
                connection.execute(_LIVE)
                is_held = connection.scalar(statement, {"job": JOB_LOCK, "kind": number})
            except BaseException:
                connection.close()
                raise
            if is_held:
                return connection
            connection.close()
        raise JobRunning(f"a lock in {where(self._engine)}", kind)

    def begin_job(self, kind: str, who: str) -> str:
        """Note that a run begins, and return its id. The caller holds the lock of this kind of job.

        So a run that is still noted as running was killed, and is noted so.
        """
        table, now_us, job_id = schema.jobs, self._clock.unix_us(), str(uuid.uuid4())
        killed = (table.c.kind == kind) & (table.c.state == RUNNING)
        with begin(self._engine) as connection:
            connection.execute(
                update(table)
                .where(killed)
                .values(state="killed", ended_us=now_us, text="it ended without a word")
            )
            row = {"job_id": job_id, "kind": kind, "state": RUNNING, "who": who, "started_us": now_us}
            connection.execute(insert(table), row)
        return job_id

    def report_job(self, job_id: str, **columns: str | int | None) -> None:
        """Note how far a run is (``text``, ``rows``)."""
        with begin(self._engine) as connection:
            connection.execute(update(schema.jobs).where(schema.jobs.c.job_id == job_id).values(columns))

    def end_job(self, job_id: str, state: str, exit_status: int, **columns: str | int | None) -> None:
        """Note how a run ended: ``state`` done, not-published or failed, and perhaps its ``version``."""
        ended_us = self._clock.unix_us()
        self.report_job(job_id, state=state, exit_status=exit_status, ended_us=ended_us, **columns)


def open_policies(config: DatabaseConfig, data_dir: Path, fence: Fence | None = None) -> PolicyStore:
    """The policy job's store, with connections of its own; of several servers with the acting one's fence."""
    if config.policy_url:
        config = config.model_copy(update={"url": config.policy_url})
    return PolicyStore(fenced(make_engine(config, data_dir), fence))


def _cap_row(cap: Mapping[str, Any]) -> dict[str, Any]:
    hour, cost = int(cap["hour_of_week"]), cap.get("cost_per_s")
    if not 0 <= hour < HOURS_A_WEEK:
        raise ValueError(f"hour_of_week is {hour}, expected 0 (Monday 00 UTC) to {HOURS_A_WEEK - 1}")
    if cost is not None and not cost > 0:
        raise ValueError(f"cost_per_s of {cap['volume']!r} is {cost!r}; a cap is above 0, None means no cap")
    return {
        "volume": str(cap["volume"]),
        "hour_of_week": hour,
        "cost_per_s": None if cost is None else float(cost),
        "demand_p50": cap.get("demand_p50"),
        "demand_p95": cap.get("demand_p95"),
        "burst_s": cap.get("burst_s"),
    }
