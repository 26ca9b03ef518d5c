"""Whether this server reaches its database, found out every few seconds over a new connection.

A new one each time: it meets what any part meets that starts now, also a password that is refused. Nothing is
changed, and nothing is waited for but the answer. A database that is a replica, and takes no writes, is not
reached.

State: ``_state``, a value that is replaced by the thread ``node-sql`` alone; any thread may read it. A check
that hangs (a database that stands still) has begun and not ended, so it needs no deadline: ``away_s`` grows
meanwhile. Where nothing is heard of the other machine at all, the system ends the connection (``LOST_MS``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import structlog
from sqlalchemy import Engine, inspect, select, text
from sqlalchemy.engine import make_url

from pmdaemon.errors import SlaError
from pmdaemon.runtime import watchdog
from pmdaemon.runtime.stop import Stop
from sla_server.db import schema
from sla_server.db.engine import begin, make_engine, where
from sla_server.db.errors import DatabaseUnavailable, SchemaTooNew
from sla_server.db.fence import CLUSTER
from sla_server.db.migrate import current_revision, known_revisions

if TYPE_CHECKING:
    from sla_server.config import ResolvedConfig

log = structlog.get_logger("cluster")
LOST_MS: Final = "10000"
"""Bytes that the other machine does not acknowledge for so long end the connection (tcp_user_timeout)."""
STATEMENT_S: Final = 10.0
SLOW_S: Final = 5.0
"""A check that takes longer is no sign that the database is reached, until it ends well."""


@dataclass(frozen=True, slots=True)
class DatabaseFound:
    """What a check has found in the database.

    Attributes:
        cluster: identity of the cluster whose servers take over from each other here; "": none does yet.
        problem: why this server could not act over it all the same; "" if it could.
    """

    cluster: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class ReachState:
    """What is known at one moment.

    Attributes:
        away_s: for how long it was tried in vain; 0 while it is reached.
        reached_s: for how long each check has ended well; 0 if the newest did not.
        problem: how the newest check failed; "" if it did not, or hangs.
        found: by the newest one that ended well.
    """

    away_s: float = 0.0
    reached_s: float = 0.0
    problem: str = ""
    found: DatabaseFound = DatabaseFound()


@dataclass(frozen=True, slots=True)
class _Checks:
    reached_ns: int = 0  # end of the first of those in a row that ended well
    tried_ns: int = 0  # begin of the first that has not ended well since; 0: none
    problem: str = ""
    found: DatabaseFound = DatabaseFound()


class DatabaseReach:
    """See the module.

    Args:
        check: one check; raises ``SlaError`` if the database is not reached.
        now_ns: a monotonic clock.
    """

    def __init__(self, check: Callable[[], DatabaseFound], now_ns: Callable[[], int]) -> None:
        self._check = check
        self._now_ns = now_ns
        self._state = _Checks()

    def probe(self) -> None:
        """Check once. Thread: ``node-sql``."""
        former = self._state
        begun = former if former.tried_ns else replace(former, tried_ns=self._now_ns())
        self._state = begun
        try:
            found = self._check()
        except (SlaError, OSError) as exc:
            said = exc.reason if isinstance(exc, DatabaseUnavailable) else str(exc)
            problem = said.split("\n", 1)[0] or type(exc).__name__
            if not former.problem:
                log.warning("database-not-reached", problem=problem)
            self._state = replace(begun, reached_ns=0, problem=problem)
        else:
            if former.problem:
                log.info("database-reached-again")
            is_steady = former.reached_ns and self._now_ns() - begun.tried_ns < SLOW_S * 1e9
            self._state = _Checks(former.reached_ns if is_steady else self._now_ns(), 0, "", found)

    def state(self) -> ReachState:
        """As of now."""
        state, now_ns = self._state, self._now_ns()
        tried_s = (now_ns - state.tried_ns) / 1e9 if state.tried_ns else 0.0
        if state.reached_ns and tried_s < SLOW_S:  # the check that runs is the next of those that end well
            return ReachState(0.0, (now_ns - state.reached_ns) / 1e9, "", state.found)
        return ReachState(tried_s, 0.0, state.problem, state.found)

    def run(self, stop: Stop, interval_s: float) -> None:
        """Check until the stop."""
        while not stop.is_set():
            watchdog.rest()  # a check may hang for as long as the database does
            self.probe()
            stop.wait(interval_s)


def reach_of(config: ResolvedConfig, now_ns: Callable[[], int]) -> DatabaseReach:
    """Of the database of this configuration."""
    url = make_url(config.database.resolved_url(config.data_dir))
    if url.drivername != "sqlite" and "tcp_user_timeout" not in url.query:
        url = url.update_query_dict({"tcp_user_timeout": LOST_MS})
    database = config.database.model_copy(
        update={
            "url": url.render_as_string(hide_password=False),
            "statement_timeout_s": STATEMENT_S,
            "lock_timeout_s": STATEMENT_S,
        }
    )
    engine = make_engine(database, config.data_dir)

    def check() -> DatabaseFound:
        try:
            return find(engine)
        finally:
            engine.dispose()

    return DatabaseReach(check, now_ns)


def find(engine: Engine) -> DatabaseFound:
    """One look at the database.

    Raises:
        DatabaseUnavailable: it is not reached, or takes no writes.
    """
    with begin(engine) as connection:
        if connection.dialect.name == "postgresql" and connection.scalar(text("SELECT pg_is_in_recovery()")):
            raise DatabaseUnavailable(where(engine), "it is a replica, and takes no writes")
        if not inspect(connection).has_table(schema.fences.name):
            return DatabaseFound()
        table = schema.fences
        cluster = connection.scalar(select(table.c.queue).where(table.c.name == CLUSTER))
        revision, known = current_revision(connection), known_revisions()
        too_new = revision is not None and revision not in known
        problem = str(SchemaTooNew(where(engine), str(revision), known[-1])) if too_new else ""
        return DatabaseFound(str(cluster or ""), problem)
