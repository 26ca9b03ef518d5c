"""The door of the report job to SQL: reading, and one short transaction that adds a link to the chain.

Reports are numbered from 1 on, and each has the digest of the one before it, so a row that was changed, taken
away or put in between is noticed. Numbers are given under a lock: two jobs never issue the same. Rows are
inserted and never change; triggers refuse it (``sql/versions/0019``).

Like the policy job it runs beside the server and waits its turn (``lock_timeout_s``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Engine, func, insert, select, text

from pmdaemon.runtime import strict_json
from sla_server.db import schema
from sla_server.db.config import DatabaseConfig
from sla_server.db.engine import begin, make_engine, translated, where
from sla_server.db.errors import NoRightToPublish
from sla_server.db.fence import Fence, fenced
from sla_server.db.policies import PolicyStore
from sla_server.db.queries.reader import SqlReader
from sla_server.rows import Row

REPORT_LOCK: Final = (
    0x51A5_0003  # any constant but those of migrations and policies; all releases use the same
)
NO_REPORT: Final = "0" * 64
"""Digest of what is before the first report."""


@dataclass(frozen=True, slots=True)
class ChainEnd:
    """Where the next report is added: its number, the digest before it, and what it would revise."""

    number: int
    previous: str
    latest: Row | None


class ReportStore:
    """What the report job reads and writes.

    Attributes:
        reader: all questions.
        jobs: notes of runs.

    Thread: one at a time.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.reader = SqlReader(engine)
        self.jobs = PolicyStore(engine)

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    def check_may_issue(self) -> None:
        """Check that ``append`` will be allowed.

        Raises:
            NoRightToPublish: the role lacks the right to insert.
            DatabaseUnavailable: retryable.
        """
        if self._engine.dialect.name != "postgresql":
            return
        allowed = text("SELECT has_table_privilege(:table, 'INSERT')")
        with translated(self._engine), self._engine.connect() as connection:
            names = (schema.reports.name, schema.jobs.name)
            missing = [name for name in names if not connection.scalar(allowed, {"table": name})]
        if missing:
            raise NoRightToPublish(where(self._engine), missing)

    def append(
        self, name: str, period: str, make: Callable[[ChainEnd], Mapping[str, Any] | None]
    ) -> Row | None:
        """Add a report of an agreement's period; None if ``make`` has nothing to add.

        Args:
            name: of the agreement.
            period: its text.
            make: gives the row for an end of the chain; called once, within the transaction.

        Raises:
            DatabaseUnavailable: nothing was added.
        """
        table = schema.reports
        with begin(self._engine) as connection:
            if connection.dialect.name == "postgresql":  # SQLite's BEGIN IMMEDIATE has locked all
                connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": REPORT_LOCK})
            number = connection.execute(select(func.max(table.c.number))).scalar() or 0
            digest = connection.execute(select(table.c.digest).where(table.c.number == number)).scalar()
            wanted = table.c.name == name, table.c.period == period
            newest = select(table).where(*wanted).order_by(table.c.revision.desc()).limit(1)
            latest = connection.execute(newest).mappings().first()
            end = ChainEnd(number + 1, digest or NO_REPORT, None if latest is None else dict(latest))
            row = make(end)
            if row is None:
                return None
            values = {**row, "summary": strict_json.dumps(row["summary"])}
            connection.execute(insert(table), values)
        return dict(row)


def open_reports(config: DatabaseConfig, data_dir: Path, fence: Fence | None = None) -> ReportStore:
    """The store, with connections of its own and the rights of the policy job; see ``open_policies``."""
    if config.policy_url:
        config = config.model_copy(update={"url": config.policy_url})
    return ReportStore(fenced(make_engine(config, data_dir), fence))
