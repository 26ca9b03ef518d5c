"""Old rows leave: partitions are dropped on PostgreSQL, ranges are deleted in small steps elsewhere.

One ``step`` makes partitions ahead, drops those that are too old, and deletes at most ``STEP_ROWS`` rows in
one short transaction; it says whether there is more. The writer calls it between its own transactions: no
thread of its own, no lock that the ingest would wait for. What fails is tried again at the next turn; an
outage is the writer's business.

What is still open (an episode, a throttle in force) stays however old it is, and so does a row whose time
was never set. The lifetime sums in ``streams`` stay, too.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import structlog
from sqlalchemy import Engine, text

from pmdaemon.runtime.clock import Clock
from sla_server.db import partitions
from sla_server.db.config import RetentionConfig
from sla_server.db.engine import begin
from sla_server.db.errors import DbError
from sla_server.db.partitions import DAY_US, SPANS, default_of

log = structlog.get_logger("retention")
EVERY_NS: Final = 600_000_000_000  # ten minutes: partitions are made days ahead
STEP_ROWS: Final = 5_000  # some 50 ms of SQLite
LOCK_WAIT_MS: Final = 2_000  # while we wait for a reader, other readers wait behind us


class Rule(NamedTuple):
    """Rows of ``table`` whose ``column`` is older than the setting ``days`` leave, if ``condition`` holds.

    ``both_ways``: also rows as far ahead. No clock that was set right again explains them, they would be the
    newest for ever, and their age would never come.
    """

    table: str
    column: str
    days: str
    condition: str = "true"
    both_ways: bool = False


RULES: Final = (
    Rule("rollups", "slot_us", "rollups_days"),
    Rule("rollup_missed", "slot_us", "rollups_days"),
    Rule("coverage", "slot_us", "coverage_days"),
    Rule("rollup_hours", "hour_us", "hours_days"),
    Rule("slices", "start_us", "slices_days"),
    Rule("episodes", "opened_us", "slices_days", "closed_us IS NOT NULL"),
    Rule("events", "at_us", "events_days", both_ways=True),
    Rule(
        "throttles", "requested_us", "events_days", "state IN ('observed', 'released', 'expired', 'refused')"
    ),
    Rule("audit", "at_us", "audit_days"),
)


class Retention:
    """Keeps the age of rows within the settings.

    Args:
        engine: a writing engine.
        settings: days for each kind.
        clock: wall clock for ages, monotonic for turns.
    """

    def __init__(self, engine: Engine, settings: RetentionConfig, clock: Clock) -> None:
        self._engine = engine
        self._settings = settings
        self._clock = clock
        self._due_ns = 0

    def run_if_due(self) -> bool:
        """A step, if it is time for one; returns whether there is more to do now. Never raises DbError."""
        now_ns = self._clock.monotonic_ns()
        if now_ns < self._due_ns:
            return False
        self._due_ns = now_ns + EVERY_NS
        try:
            has_more = self.step()
        except DbError as exc:
            log.warning("retention-postponed", error=str(exc))
            return False
        if has_more:
            self._due_ns = now_ns
        return has_more

    def step(self) -> bool:
        """One pass; returns whether rows are left that should go.

        Raises:
            DatabaseUnavailable: also when a reader holds a partition; come again.
        """
        now_us = self._clock.unix_us()
        if self._engine.dialect.name == "postgresql":
            with begin(self._engine) as connection:
                partitions.limit_lock_wait(connection, LOCK_WAIT_MS)
                partitions.make_ahead(connection, now_us)
            for rule in RULES:
                if rule.table in SPANS:
                    self._drop_old(rule, now_us)
        has_more = [self._delete_some(rule, now_us) for rule in RULES]  # each has its turn
        return any(has_more)

    def _limit_us(self, rule: Rule, now_us: int) -> int:
        days: float = getattr(self._settings, rule.days)
        return now_us - round(days * DAY_US)

    def _drop_old(self, rule: Rule, now_us: int) -> None:
        limit_us = self._limit_us(rule, now_us)
        with begin(self._engine) as connection:
            old = [p for p in partitions.existing(connection, rule.table) if p.to_us <= limit_us]
        for partition in old:
            with begin(self._engine) as connection:
                partitions.limit_lock_wait(connection, LOCK_WAIT_MS)
                partitions.drop(connection, partition.name)
            log.info("partition-dropped", name=partition.name)

    def _delete_some(self, rule: Rule, now_us: int) -> bool:
        """Delete up to STEP_ROWS of one table; returns whether it were so many."""
        if self._engine.dialect.name == "postgresql":
            table = default_of(rule.table) if rule.table in SPANS else rule.table
            chosen = "ctid = ANY (ARRAY (SELECT ctid {}))"
        else:
            table, chosen = rule.table, "rowid IN (SELECT rowid {})"
        limits = {"limit_us": self._limit_us(rule, now_us)}
        age = f"{rule.column} > 0 AND {rule.column} < :limit_us"
        if rule.both_ways:
            limits["ahead_us"] = 2 * now_us - limits["limit_us"]
            age = f"({age} OR {rule.column} > :ahead_us)"
        old = f"{age} AND {rule.condition}"
        some = f"FROM {table} WHERE {old} LIMIT {STEP_ROWS}"
        statement = text(f"DELETE FROM {table} WHERE " + chosen.format(some))  # noqa: S608
        with begin(self._engine) as connection:
            deleted = connection.execute(statement, limits).rowcount
        if deleted:
            log.info("rows-deleted", table=table, rows=deleted)
        return deleted >= STEP_ROWS
