"""Of several servers over one database, the one that writes: each transaction of others is refused.

A server that acts has a *fence*, a number that rises with each change of the acting server
(``sla_server.cluster.leases``). The table ``fences`` has the highest one that was ever taken, and whose it
is; rows of ``ingest_watermark`` carry the one under which they were written last. ``guard`` has each
transaction of an engine begin with a look at that row, under a shared lock that lasts as long as the
transaction. So a server that was stopped for a minute and goes on as if nothing had been writes nothing:
either its transaction is committed before the other server has taken the row, and the other one reads what
it has written, or it is refused (``FenceLost``).

A machine that is gone says no word more, and its transaction would hold the row until the database gives the
connection up, after hours. So sessions of a guarded engine end when they are silent for some seconds in the
middle of a transaction (``silence_s``).

Jobs (policy, rollup, back-test, report) have their own connections, with fewer rights, and transactions in
which they compute for minutes. So ``guard_job`` looks at the row as a transaction begins, and again directly
before its commit, then under a lock of the database that ``take`` waits for (PostgreSQL lets nobody lock a
row that may not change it).

The lease belongs to the database, and each cluster has one: so the first server that takes a fence here
stores the identity of its cluster in a row of its own, ``cluster``, and a server of another cluster is
refused from then on (``OtherCluster``).

A server over a database of its own has no fence. It looks as it starts that no other one has taken one
(``check_alone``), as its jobs do, and every few seconds from then on (``OthersWatch``): one that was started
since is reported, and an event. It ends nothing: gateways may know no other server than this one. One that
was one of several, and goes on alone, has the fence of the last term set to 0 by its operator; the row's
queue stays, so what of its own queue the others have had counts for nothing, as before (``take_alone``).

What a former term leaves. Cuts that are in the ingest queue of a server and not in SQL when another server
takes over come to that one again, from the agents: they are acknowledged only once they are in SQL
(``receiver``). In the queue they are *refused* from then on. ``take`` moves the cursors ``sql`` and
``records`` beyond them, and keeps their numbers in ``consumed``, key ``QUEUE/refused/N``, until the cursor
``parquet`` has passed them, too: records N+1 to ``queue_seq`` count for nothing. Key ``QUEUE/former`` has the
newest record of before: the cuts that follow it are not the next ones of their gateways, and what records up
to it say of high waters counts for nothing, either: SQL has what was stored of them.

What a crash can leave: ``take`` is one transaction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import structlog
from sqlalchemy import Connection, Engine, delete, event, inspect, select, text, update

from pmdaemon.reserve import raise_event
from pmdaemon.wire.messages.server import Problem
from sla_server.db import schema
from sla_server.db.engine import begin, translated
from sla_server.db.errors import (
    DatabaseUnavailable,
    FenceLost,
    NotAlone,
    OtherCluster,
    QueueCopied,
    ServerStandsBy,
)
from sla_server.db.ingest.records import event_row
from sla_server.db.upsert import upsert
from sla_server.lease_file import LeaseFile

if TYPE_CHECKING:
    from sla_server.config import ResolvedConfig

log = structlog.get_logger("fence")
NAME: Final = "gateways"
"""Of the lease: who has it polls all gateways, judges, controls and writes."""
CLUSTER: Final = "cluster"
"""Name of the row whose ``queue`` is the identity of the cluster that has the lease."""
Refused = tuple[tuple[int, int], ...]
"""Records of a queue that count for nothing: behind the one, up to the other."""
NOT_ALONE: Final = "server-not-alone"
LEASE_S: Final = 6.0
LEAST_SILENCE_S: Final = 10.0
"""``dbmanager`` computes between two statements, of a large window for a second or two."""
FENCE_LOCK: Final = 0x51A5_0004
"""Any constant but those of ``migrate``, ``policies`` and ``reports``; all releases must use the same."""
_LIMITS: Final = (
    "SELECT set_config(name, value, false) FROM (VALUES "
    "('idle_in_transaction_session_timeout', %(ms)s), ('tcp_user_timeout', %(ms)s), "
    "('tcp_keepalives_idle', %(s)s), ('tcp_keepalives_interval', '1'), ('tcp_keepalives_count', '3')"
    ") AS wanted (name, value)"
)

_LOCK_BRIEFLY: Final = text(
    "SELECT set_config('idle_in_transaction_session_timeout', :ms, true), pg_advisory_xact_lock_shared(:key)"
)


@dataclass(frozen=True, slots=True)
class FormerTerms:
    """What a server's queue has of terms after which another server has written.

    Attributes:
        refused: records that count for nothing.
        newest_seq: of all of them, also of those that are in SQL; 0: there are none.
    """

    refused: Refused = ()
    newest_seq: int = 0


@dataclass(frozen=True, slots=True)
class Fence:
    """Of the term in which this process runs.

    Attributes:
        number: higher than that of all terms before.
        server: this server's name.
        lease_s: of the lease.
        cluster: identity of the cluster whose lease it is; "": not known, as from a node of a former release.
    """

    number: int
    server: str
    lease_s: float = LEASE_S
    cluster: str = ""

    @property
    def silence_s(self) -> float:
        """So long a transaction may be silent; most of it passes before another server has the lease."""
        return max(LEAST_SILENCE_S, 1.5 * self.lease_s)

    def check(self, engine: Engine) -> None:
        """See that no higher one was taken; before the schema is looked at, which need not be there.

        Raises:
            FenceLost: one was.
            OtherCluster: the lease is not this cluster's.
            DatabaseUnavailable: come again.
        """
        with translated(engine):
            if not inspect(engine).has_table(schema.fences.name):
                return
        with begin(engine) as connection:
            taken = _taken(connection)
            self._is_claimed(connection, taken[1] if taken else "")
            self._refuse(taken)

    def take(self, engine: Engine, queue_id: str, newest_seq: int, now_us: int) -> FormerTerms:
        """Have the database refuse all lower fences; what of this server's queue is refused, too.

        Args:
            engine: without a guard.
            queue_id: of this server's ingest queue.
            newest_seq: newest record in it.
            now_us: for the row.

        Raises:
            FenceLost: a higher one was taken.
            OtherCluster: the lease is not this cluster's.
            QueueCopied: the queue is a copy of that of another server.
            DatabaseUnavailable: come again.
        """
        with begin(engine) as connection:
            if connection.dialect.name == "postgresql":
                connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": FENCE_LOCK})
            # There is always a row to lock: else two that are the first ones would not wait for each other.
            upsert(connection, schema.fences, [{"name": NAME}])
            found = _taken(connection, for_update=True)
            taken = found or (0, "", "")
            self._claim(connection, taken[1], now_us)
            self._refuse(taken)
            if taken[2] == queue_id and taken[1] not in ("", self.server):
                raise QueueCopied(self.server, taken[1])
            row = {
                "name": NAME,
                "fence": self.number,
                "server": self.server,
                "queue": queue_id,
                "since_us": now_us,
            }
            if (taken[0], taken[2]) != (self.number, queue_id):
                upsert(connection, schema.fences, [row], set_=("fence", "server", "queue", "since_us"))
            if taken[2] not in ("", queue_id):
                _refuse_rest(connection, queue_id, newest_seq)
            return _former_terms(connection, queue_id)

    def _is_claimed(self, connection: Connection, server: str) -> bool:
        """Whether the lease is that of this server's cluster; False: nobody has said whose it is."""
        table = schema.fences
        found = connection.execute(select(table.c.queue).where(table.c.name == CLUSTER)).scalar()
        if found and self.cluster and found != self.cluster:
            raise OtherCluster(self.server, server)
        return bool(found)

    def _claim(self, connection: Connection, server: str, now_us: int) -> None:
        if not self._is_claimed(connection, server) and self.cluster:
            row = {"name": CLUSTER, "fence": 0, "server": "", "queue": self.cluster, "since_us": now_us}
            upsert(connection, schema.fences, [row], set_=("queue", "since_us"))

    def limit(self, engine: Engine) -> None:
        """Have the database end each session of ``engine`` that is silent in a transaction.

        Before the first statement: a machine that dies as it makes the schema, or takes the fence, holds
        nobody up either. Connections of before are closed.
        """
        if engine.dialect.name == "postgresql" and not event.contains(engine, "connect", self._limit_silence):
            event.listen(engine, "connect", self._limit_silence)
            engine.dispose()

    def guard(self, engine: Engine) -> None:
        """Have each transaction of ``engine`` begin with a look at the fence; raises ``FenceLost`` there."""
        self.limit(engine)
        event.listen(engine, "begin", self._check)

    def guard_job(self, engine: Engine) -> None:
        """The same for a job, whose transactions are short in the database and may be long elsewhere."""
        event.listen(engine, "begin", self._check_unlocked)
        event.listen(engine, "commit", self._check_before_commit)

    def _limit_silence(self, connection: Any, _record: object) -> None:
        limits = {"ms": str(round(self.silence_s * 1000)), "s": str(max(1, round(self.silence_s / 3)))}
        with connection.cursor() as cursor:
            cursor.execute(_LIMITS, limits)
        connection.commit()

    def _check(self, connection: Connection) -> None:
        self._refuse(_taken(connection))

    def _check_unlocked(self, connection: Connection) -> None:
        self._refuse(_taken(connection, is_locked=False))

    def _check_before_commit(self, connection: Connection) -> None:
        if connection.dialect.name == "postgresql":
            limits = {"ms": str(round(self.silence_s * 1000)), "key": FENCE_LOCK}
            connection.execute(_LOCK_BRIEFLY, limits)
        self._check_unlocked(connection)

    def _refuse(self, taken: tuple[int, str, str] | None) -> None:
        if taken is not None and taken[0] > self.number:
            raise FenceLost(self.number, taken[0], taken[1])


def fenced(engine: Engine, fence: Fence | None) -> Engine:
    """The engine of a job or a command, each of whose transactions looks at the fence, if there is one.

    Without one its first transaction raises ``NotAlone`` if servers take over from each other here.
    """
    if fence is not None:
        fence.guard_job(engine)
        return engine

    seen: list[bool] = []

    def check_first(connection: Connection) -> None:
        if not seen:
            _check_alone(connection)
            seen.append(True)

    event.listen(engine, "begin", check_first)
    return engine


def check_alone(engine: Engine) -> None:
    """See that the servers of this database, if there are several, are not more than its file says.

    Raises:
        NotAlone: a server has taken a fence here.
        DatabaseUnavailable: come again.
    """
    with begin(engine) as connection:
        _check_alone(connection)


def take_alone(engine: Engine, queue_id: str, newest_seq: int) -> FormerTerms:
    """What of the queue of a server without others is refused: it may have been one of several.

    The row of the fence then still names the queue that was written from last.

    Args:
        engine: of the database, with its schema.
        queue_id: of this server's ingest queue.
        newest_seq: newest record in it.

    Raises:
        NotAlone: a server has taken a fence here.
        DatabaseUnavailable: come again.
    """
    with begin(engine) as connection:
        taken = _taken(connection, for_update=True)
        if taken is not None and taken[0]:
            raise NotAlone(taken[1])
        if taken is not None and taken[2] not in ("", queue_id):
            _refuse_rest(connection, queue_id, newest_seq)
            own = update(schema.fences).where(schema.fences.c.name == NAME)
            connection.execute(own.values(queue=queue_id, server=""))  # alone, it has no name of a node
        return _former_terms(connection, queue_id)


class OthersWatch:
    """Looks while a server without ``[cluster.takeover]`` runs whether another one has begun to act here.

    Thread: dbmanager's main one; ``problem`` may be read by any.

    Attributes:
        problem: for PRESSURE; None: there is none.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._server = ""
        self.problem: Problem | None = None

    def check(self, now_us: int) -> None:
        """Once; a database that is away says nothing new."""
        try:
            check_alone(self._engine)
        except NotAlone as exc:
            self._found(exc, now_us)
        except DatabaseUnavailable:
            return
        else:
            self._server, self.problem = "", None

    def _found(self, found: NotAlone, now_us: int) -> None:
        since_us = self.problem.since_us if self.problem else now_us
        self.problem = Problem(NOT_ALONE, since_us, str(found))
        if found.server == self._server:
            return
        self._server = found.server
        log.error("server-not-alone", problem=str(found))
        event = event_row(
            (found.server, since_us),
            now_us,
            NOT_ALONE,
            "critical",
            element="server",
            subject="database",
            text=str(found),
            details={"server": found.server},
        )
        raise_event(event)


def _check_alone(connection: Connection) -> None:
    if not inspect(connection).has_table(schema.fences.name):
        return
    taken = _taken(connection, is_locked=False)
    if taken is not None and taken[0]:
        raise NotAlone(taken[1])


def acting_fence(config: ResolvedConfig) -> Fence | None:
    """The fence of a job or a command that writes beside the server; None: the database is its own.

    Raises:
        ServerStandsBy: this server does not act.
    """
    if config.cluster is None or not config.cluster.takeover.enabled:
        return None
    lease, node = LeaseFile(config.runtime_dir).read(), config.cluster.node
    if (number := lease.held_fence) is None:
        raise ServerStandsBy(node, lease.acting)
    return Fence(number, node, config.cluster.takeover.lease_s, lease.cluster)


def _taken(
    connection: Connection, *, for_update: bool = False, is_locked: bool = True
) -> tuple[int, str, str] | None:
    """Fence, server and queue; the row stays as it is until the transaction ends, if it ``is_locked``."""
    table = schema.fences
    statement = select(table.c.fence, table.c.server, table.c.queue).where(table.c.name == NAME)
    if is_locked:
        statement = statement.with_for_update(read=not for_update)
    row = connection.execute(statement).one_or_none()
    return None if row is None else (int(row[0]), str(row[1]), str(row[2]))


def _refuse_rest(connection: Connection, queue_id: str, newest_seq: int) -> None:
    """What SQL lacks of a queue counts for nothing: another server has had those cuts from the agents."""
    sql_key, records_key = (f"{queue_id}/{name}" for name in ("sql", "records"))
    cursor = _cursor(connection, sql_key)
    former = {"queue": f"{queue_id}/former", "queue_seq": newest_seq}
    upsert(connection, schema.consumed, [former], maximum=("queue_seq",))
    if newest_seq <= cursor:
        return
    upsert(
        connection,
        schema.consumed,
        [{"queue": f"{queue_id}/refused/{cursor}", "queue_seq": newest_seq}],
        maximum=("queue_seq",),
    )
    moved = [{"queue": key, "queue_seq": newest_seq} for key in (sql_key, records_key)]
    upsert(connection, schema.consumed, moved, maximum=("queue_seq",))
    log.warning(
        "queue-records-refused",
        queue=queue_id,
        records=f"{cursor + 1} to {newest_seq}",
        effect="another server has written since; their cuts came to it from the agents",
    )


def _refused(connection: Connection, queue_id: str) -> Refused:
    """Of those that no file has passed; others are forgotten."""
    table, prefix = schema.consumed, f"{queue_id}/refused/"
    passed = _cursor(connection, f"{queue_id}/parquet")
    of_queue = table.c.queue.startswith(prefix)
    connection.execute(delete(table).where(of_queue & (table.c.queue_seq <= passed)))
    rows = connection.execute(select(table.c.queue, table.c.queue_seq).where(of_queue))
    return tuple(sorted((int(str(row[0]).removeprefix(prefix)), int(row[1])) for row in rows))


def _former_terms(connection: Connection, queue_id: str) -> FormerTerms:
    return FormerTerms(_refused(connection, queue_id), _cursor(connection, f"{queue_id}/former"))


def _cursor(connection: Connection, key: str) -> int:
    table = schema.consumed
    found = connection.execute(select(table.c.queue_seq).where(table.c.queue == key)).scalar()
    return int(found or 0)
