"""The policy job's door to SQL: statistics as Arrow tables, and one transaction that publishes a policy.

The job runs beside the server, so this is the one writer besides the dbmanager; it waits its turn
(``lock_timeout_s``). Versions are numbered under a lock: two jobs never publish the same number. A
published policy is never changed; services puts it in force (RECORD ``policies.state``).
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from sqlalchemy import Connection, Engine, Table, func, insert, select, text, update

from pmdaemon.runtime.clock import Clock, SystemClock
from sla_server.db import schema
from sla_server.db.archive import manifest
from sla_server.db.archive.store import FileStore, open_files
from sla_server.db.arrow import arrow_schema, batches
from sla_server.db.config import DatabaseConfig
from sla_server.db.engine import begin, make_engine, translated, where
from sla_server.db.errors import NoRightToPublish
from sla_server.db.queries.reader import SqlReader

PUBLISH_LOCK: Final = 0x51A5_0002  # any constant but migrate.ADVISORY_LOCK; all releases must use the same
HOURS_A_WEEK: Final = 168
PUBLISHED: Final = "published"
REJECTED: Final = "rejected"
RUNNING: Final = "running"


@dataclass(frozen=True, slots=True)
class StoredStatistics:
    """What ``PolicyStore.statistics`` found.

    Attributes:
        slots: rows of ``rollups`` in SQL.
        missed: rows of ``rollup_missed`` in SQL.
        hours: rows of ``rollup_hours``.
        slot_files: paths or URLs of files with further rows of ``rollups``; a (slot, stream) may be in
            several and in SQL: add them up.
        missed_files: the same of ``rollup_missed``.
        rows_in_files: rows in ``slot_files``.
    """

    slots: pa.Table
    missed: pa.Table
    hours: pa.Table
    slot_files: list[str]
    missed_files: list[str]
    rows_in_files: int


class PolicyStore:
    """What the policy job reads and writes.

    Attributes:
        reader: all other questions (``agreements``, ``policies``, ``manifest``).

    Thread: one at a time.
    """

    def __init__(self, engine: Engine, files: FileStore, clock: Clock | None = None) -> None:
        self._engine = engine
        self._files = files
        self._clock = clock or SystemClock()
        self.reader = SqlReader(engine)

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    def check_may_publish(self) -> None:
        """Check that ``publish`` will be allowed, before minutes of work are spent on it.

        Raises:
            NoRightToPublish: the role lacks the right to insert.
            DatabaseUnavailable: retryable.
        """
        if self._engine.dialect.name != "postgresql":
            return  # a file that cannot be written cannot be opened by a writer either
        allowed = text("SELECT has_table_privilege(:table, 'INSERT')")
        with translated(self._engine), self._engine.connect() as connection:
            names = [schema.policies.name, schema.policy_caps.name, schema.jobs.name]
            missing = [name for name in names if not connection.scalar(allowed, {"table": name})]
        if missing:
            raise NoRightToPublish(where(self._engine), missing)

    def statistics(self, from_us: int, to_us: int, columns: Mapping[str, Sequence[str]]) -> StoredStatistics:
        """Everything of [from_us, to_us) as of one moment: rows still in SQL, and the files with the others.

        The files stay for ``files.grace_s``, whatever becomes of them in the manifest.

        Args:
            from_us: us UTC.
            to_us: us UTC.
            columns: wanted columns of "rollups", "rollup_missed" and "rollup_hours".
        """
        tables: dict[str, pa.Table] = {}
        with translated(self._engine), self._engine.connect() as connection:
            if connection.dialect.name == "postgresql":
                connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            for name, wanted in columns.items():
                tables[name] = _table(connection, schema.metadata.tables[name], wanted, (from_us, to_us))
            slot_files = manifest.snapshot(connection, manifest.ROLLUPS, from_us, to_us)
            missed_files = manifest.snapshot(connection, manifest.MISSED, from_us, to_us)
        return StoredStatistics(
            slots=tables["rollups"],
            missed=tables["rollup_missed"],
            hours=tables["rollup_hours"],
            slot_files=[self._files.path_for_readers(row.path) for row in slot_files],
            missed_files=[self._files.path_for_readers(row.path) for row in missed_files],
            rows_in_files=sum(row.rows for row in slot_files),
        )

    def streams_table(self) -> pa.Table:
        """Table ``streams``."""
        return self._read(schema.streams)

    def volumes_table(self) -> pa.Table:
        """Table ``volumes``."""
        return self._read(schema.volumes)

    def _read(self, table: Table) -> pa.Table:
        with translated(self._engine), self._engine.connect() as connection:
            return _table(connection, table, table.columns.keys())

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
            caps: volume, hour_of_week (0 = Monday 00 UTC), cost_per_s (None: no cap), demand_p50, demand_p95.
            job: window, rows, versions: how it was computed.
            report: cost model, capacity per backend, back-test.
            published_by: who ran the job.
            state: ``PUBLISHED``, or ``REJECTED``: stored to be looked at, and put in force only by a pin.

        Raises:
            ValueError: a cap of an hour outside 0..167, or at or below 0.
            DatabaseRefused: the same (volume, hour) twice.
            DatabaseUnavailable: nothing was published; run the job again.
        """
        rows = [_cap_row(cap) for cap in caps]
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
            if rows:
                connection.execute(insert(schema.policy_caps), [{**row, "version": version} for row in rows])
        return version

    # -- Runs of jobs

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


def _table(
    connection: Connection, table: Table, names: Sequence[str], range_us: tuple[int, int] | None = None
) -> pa.Table:
    """Some columns of a table, by key: of all rows, or of those whose first key column lies in [from, to)."""
    key = list(table.primary_key.columns)
    statement = select(*(table.c[name] for name in names)).order_by(*key)
    if range_us is not None:
        statement = statement.where(key[0] >= range_us[0], key[0] < range_us[1])
    full_schema = arrow_schema(table)
    kind = pa.schema([full_schema.field(name) for name in names])
    return pa.Table.from_batches(batches(connection, statement, kind), schema=kind)


def open_policies(config: DatabaseConfig, data_dir: Path) -> PolicyStore:
    """The policy job's store, with connections of its own."""
    if config.policy_url:
        config = config.model_copy(update={"url": config.policy_url})
    return PolicyStore(make_engine(config, data_dir), open_files(config, data_dir))


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
    }
