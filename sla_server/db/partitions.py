"""The age of rows: partitions are made ahead on PostgreSQL, and old rows leave.

A partition holds one span of time (``SPANS``), aligned to the epoch and named by its first day. Those from
``BEHIND_US`` ago to ``AHEAD_US`` ahead are made before they are needed; whatever fits none (a backlog older
than that, a database whose manager was down for a week) goes to the default partition and is deleted by
range like anything on SQLite. A partition is made apart and then attached, which lets readers and the writer
go on; a span of which the default partition holds rows already is left to it.

Old rows leave with their partition on PostgreSQL, and by ranges in small steps elsewhere. One
``Retention.step`` makes partitions ahead, drops those that are too old, and deletes at most ``STEP_ROWS``
rows of a table in one short transaction; it says whether there is more. The writer calls it between its own
transactions: no thread of its own, no lock that the ingest would wait for. What fails is tried again at the
next turn; an outage is the writer's business.

What is still open (an episode, a throttle in force, a mode) stays however old it is, and so does a row whose
time was never set. The lifetime sums in ``streams`` stay, too. Policies have rules of their own
(``policy_retention``).

``ingest_watermark`` has a row for each agent start (epoch). Without the row of an epoch whose cuts an agent
still holds, those cuts would be counted twice. So the newest ``KEPT_EPOCHS`` of a gateway stay, as many as a
registration may name, and of the others each that was raised within ``WATERMARK_DAYS``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, NamedTuple

import structlog
from sqlalchemy import Connection, Engine, delete, func, select, text

from pmdaemon.runtime.clock import Clock
from pmdaemon.wire.messages.agent import MAX_SPOOL_EPOCHS
from sla_server.db import audit
from sla_server.db.config import RetentionConfig
from sla_server.db.engine import begin
from sla_server.db.errors import DbError
from sla_server.db.policy_retention import PolicyRetention
from sla_server.db.schema import DAY_US, ingest_watermark, meta
from sla_server.db.upsert import upsert

log = structlog.get_logger("partitions")
AHEAD_US: Final = 3 * DAY_US  # a manager that cannot make any (locks, rights) has that long to be helped
BEHIND_US: Final = 2 * DAY_US  # what agents' spools may hold after an outage
SPANS: Final = {
    "rollups": DAY_US,
    "rollup_missed": DAY_US,
    "coverage": DAY_US,
    "rollup_hours": 7 * DAY_US,
}
"""Table to the span of a partition; its first key column is the time."""
TIME_COLUMN: Final = {name: "hour_us" if name == "rollup_hours" else "slot_us" for name in SPANS}
_BOUND: Final = re.compile(r"FROM \((MINVALUE|'?-?\d+'?)\) TO \('?(-?\d+)'?\)")
FIRST_S: Final = 30.0  # after the start of its process: some hundred statements
EVERY_NS: Final = 600_000_000_000  # ten minutes: partitions are made days ahead
STEP_ROWS: Final = 5_000  # some 50 ms of SQLite
KEPT_EPOCHS: Final = MAX_SPOOL_EPOCHS
WATERMARK_DAYS: Final = 30  # longer than any spool lasts with a cut every few seconds
STEP_GATEWAYS: Final = 100  # with an epoch a minute, a day's rows of them are 144,000
LOCK_WAIT_MS: Final = 2_000  # while it waits for a reader, other readers wait behind it


@dataclass(frozen=True, slots=True)
class Partition:
    """A partition that holds times in [from_us, to_us)."""

    name: str
    from_us: int
    to_us: int


def default_of(table: str) -> str:
    """Name of a table's default partition."""
    return f"{table}_default"


def existing(connection: Connection, table: str) -> list[Partition]:
    """A table's partitions without the default one, oldest first."""
    statement = text(
        "SELECT child.relname, pg_get_expr(child.relpartbound, child.oid) FROM pg_inherits "
        "JOIN pg_class child ON child.oid = inhrelid WHERE inhparent = to_regclass(:name)"
    )
    found = []
    for name, bound in connection.execute(statement, {"name": table}):
        match = _BOUND.search(bound)
        if match:
            low = match[1].strip("'")
            found.append(Partition(name, 0 if low == "MINVALUE" else int(low), int(match[2])))
    return sorted(found, key=lambda partition: partition.from_us)


def make_ahead(connection: Connection, now_us: int) -> list[str]:
    """Make what will be needed, in the caller's transaction; returns the names of new partitions."""
    if connection.dialect.name != "postgresql":
        return []
    made = []
    for table, span_us in SPANS.items():
        default = default_of(table)
        if connection.execute(text("SELECT to_regclass(:name)"), {"name": default}).scalar() is None:
            connection.execute(text(f"CREATE TABLE {default} PARTITION OF {table} DEFAULT"))
            made.append(default)
        have = existing(connection, table)
        first_us = (now_us - BEHIND_US) // span_us * span_us
        for from_us in range(first_us, now_us + AHEAD_US + 1, span_us):
            to_us = from_us + span_us
            overlaps = any(part.from_us < to_us and from_us < part.to_us for part in have)
            if not overlaps and not _default_has(connection, table, from_us, to_us):
                made.append(_make(connection, table, from_us, to_us))
    if made:
        log.info("partitions-made", names=made)
    return made


def _default_has(connection: Connection, table: str, from_us: int, to_us: int) -> bool:
    column = TIME_COLUMN[table]
    statement = (
        f"SELECT EXISTS (SELECT FROM {default_of(table)} WHERE {column} >= {from_us} AND {column} < {to_us})"  # noqa: S608
    )
    return bool(connection.execute(text(statement)).scalar())


def _make(connection: Connection, table: str, from_us: int, to_us: int) -> str:
    name = f"{table}_{datetime.fromtimestamp(from_us // 1_000_000, UTC):%Y%m%d}"
    connection.execute(text(f"CREATE TABLE {name} (LIKE {table} INCLUDING ALL)"))
    connection.execute(
        text(f"ALTER TABLE {table} ATTACH PARTITION {name} FOR VALUES FROM ({from_us}) TO ({to_us})")
    )
    return name


def _limit_lock_wait(connection: Connection, lock_wait_ms: int) -> None:
    """Let this transaction fail rather than wait longer for a reader.

    Making a partition locks the default one, dropping one the whole table, both exclusively; while either
    waits for a reader, all other readers of the table wait behind it.
    """
    connection.execute(text(f"SET LOCAL lock_timeout = {lock_wait_ms}"))


def _drop(connection: Connection, name: str) -> None:
    """Drop a partition."""
    connection.execute(text(f"DROP TABLE {name}"))


class RetentionRule(NamedTuple):
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
    RetentionRule("rollups", "slot_us", "rollups_days"),
    RetentionRule("rollup_missed", "slot_us", "rollups_days"),
    RetentionRule("coverage", "slot_us", "coverage_days"),
    RetentionRule("plane_gaps", "slot_us", "coverage_days"),
    RetentionRule("late_cuts", "slot_us", "coverage_days"),
    RetentionRule("outages", "to_us", "coverage_days"),
    RetentionRule("rollup_hours", "hour_us", "hours_days"),
    RetentionRule("slices", "start_us", "slices_days"),
    RetentionRule("episodes", "opened_us", "slices_days", "closed_us IS NOT NULL"),
    RetentionRule("events", "at_us", "events_days", both_ways=True),
    RetentionRule("deliveries", "at_us", "events_days"),
    RetentionRule(
        "throttles", "requested_us", "events_days", "state IN ('observed', 'released', 'expired', 'refused')"
    ),
    RetentionRule("decisions", "at_us", "decisions_days", both_ways=True),
    RetentionRule("sessions", "expires_us", "events_days"),
    RetentionRule("api_tokens", "expires_us", "audit_days"),
    RetentionRule("approvals", "expires_us", "audit_days"),
    RetentionRule("pools", "read_us", "space_days"),
    RetentionRule("pool_volumes", "gone_us", "space_days"),
    RetentionRule("pool_days", "day_us", "space_days", both_ways=True),
    RetentionRule("pool_actions", "at_us", "space_days"),
    RetentionRule("jobs", "started_us", "audit_days", "ended_us IS NOT NULL"),
)
DECISIONS_KEY: Final = "decisions_from_us"
"""Key of ``meta``: decisions made before it may have been deleted, or were never stored."""


class Retention:
    """Keeps the age of rows within the settings.

    Args:
        engine: a writing engine.
        settings: days for each kind.
        clock: wall clock for ages, monotonic for turns.
        first_s: until the first step: a process that has just started has cuts to store that have waited.
    """

    def __init__(self, engine: Engine, settings: RetentionConfig, clock: Clock, first_s: float = 0.0) -> None:
        self._engine = engine
        self._settings = settings
        self._clock = clock
        self._due_ns = clock.monotonic_ns() + round(first_s * 1e9) if first_s else 0
        self._policies = PolicyRetention(engine)

    @property
    def is_due(self) -> bool:
        """Whether it is time for a step, which may delete rows."""
        return self._clock.monotonic_ns() >= self._due_ns

    def run_if_due(self) -> bool:
        """A step, if it is time for one; returns whether there is more to do now. Never raises DbError."""
        if not self.is_due:
            return False
        now_ns = self._clock.monotonic_ns()
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
                _limit_lock_wait(connection, LOCK_WAIT_MS)
                make_ahead(connection, now_us)
            for rule in RULES:
                if rule.table in SPANS:
                    self._drop_old(rule, now_us)
        self._record_reach(now_us)
        has_more = [self._delete_step(rule, now_us) for rule in RULES]  # each has its turn
        has_more.append(self._policies.step(now_us - round(self._settings.policies_days * DAY_US)))
        audit_us = now_us - round(self._settings.audit_days * DAY_US)
        with begin(self._engine) as connection:
            has_more.append(audit.prune(connection, audit_us, now_us))
        return any([*has_more, self._forget_epochs(now_us - WATERMARK_DAYS * DAY_US)])

    def _record_reach(self, now_us: int) -> None:
        """Say how far back decisions reach, before any of them is deleted.

        The first time it is now: an older release stored none. A time ahead of now is that of a clock that
        was wrong, and under which all of them were deleted.
        """
        limit_us = now_us - round(self._settings.decisions_days * DAY_US)
        row = {"key": DECISIONS_KEY, "value": str(now_us)}
        with begin(self._engine) as connection:
            value = connection.execute(select(meta.c.value).where(meta.c.key == DECISIONS_KEY)).scalar()
            if value is not None:
                from_us = max(min(int(value), now_us), limit_us)
                if from_us == int(value):
                    return
                row["value"] = str(from_us)
            upsert(connection, meta, [row], set_=["value"])

    def _limit_us(self, rule: RetentionRule, now_us: int) -> int:
        days: float = getattr(self._settings, rule.days)
        return now_us - round(days * DAY_US)

    def _drop_old(self, rule: RetentionRule, now_us: int) -> None:
        limit_us = self._limit_us(rule, now_us)
        with begin(self._engine) as connection:
            old = [p for p in existing(connection, rule.table) if p.to_us <= limit_us]
        for partition in old:
            with begin(self._engine) as connection:
                _limit_lock_wait(connection, LOCK_WAIT_MS)
                _drop(connection, partition.name)
            log.info("partition-dropped", name=partition.name)

    def _delete_step(self, rule: RetentionRule, now_us: int) -> bool:
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
        candidates = f"FROM {table} WHERE {old} LIMIT {STEP_ROWS}"
        statement = text(f"DELETE FROM {table} WHERE " + chosen.format(candidates))  # noqa: S608
        with begin(self._engine) as connection:
            deleted = connection.execute(statement, limits).rowcount
        if deleted:
            log.info("rows-deleted", table=table, rows=deleted)
        return deleted >= STEP_ROWS

    def _forget_epochs(self, limit_us: int) -> bool:
        """Delete old epochs of up to ``STEP_GATEWAYS`` gateways; returns whether there may be more."""
        table, raised_us = ingest_watermark, ingest_watermark.c.updated_us
        old = (raised_us > 0) & (raised_us < limit_us)
        many = select(table.c.gateway_id).group_by(table.c.gateway_id).having(func.count() > KEPT_EPOCHS)
        with_old = select(table.c.gateway_id).where(old, table.c.gateway_id.in_(many)).distinct()
        with begin(self._engine) as connection:
            gateways = connection.execute(with_old.limit(STEP_GATEWAYS)).scalars().all()
        deleted = 0
        for gateway_id in gateways:
            is_its = table.c.gateway_id == gateway_id
            kept = select(raised_us).where(is_its).order_by(raised_us.desc())
            with begin(self._engine) as connection:
                oldest_kept_us = connection.execute(kept.offset(KEPT_EPOCHS - 1).limit(1)).scalar_one()
                leaves = is_its & old & (raised_us < oldest_kept_us)
                deleted += connection.execute(delete(table).where(leaves)).rowcount
        if deleted:
            log.info("rows-deleted", table=table.name, rows=deleted)
        return deleted > 0 and len(gateways) == STEP_GATEWAYS
