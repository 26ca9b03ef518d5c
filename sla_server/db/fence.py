"""Of several servers over one database, the one that writes: each transaction of others is refused.

A server that acts has a *fence*, a number that rises with each change of the acting server
(``sla_server.cluster.leases``). The table ``fences`` has the highest one that was ever taken, and whose it
is; rows of ``ingest_watermark`` carry the one under which they were written last. ``guard`` has each
transaction of an engine begin with a look at that row, under a shared lock that lasts as long as the
transaction. So a server that was stopped for a minute and goes on as if nothing had been writes nothing:
either its transaction is committed before the other server has taken the row, and the other one reads what
it has written, or it is refused (``FenceLost``).

A server over a database of its own has no fence, asks for no row, and sends no statement more.

What a former term leaves. Cuts that are in the ingest queue of a server and not in SQL when another server
takes over come to that one again, from the agents: they are acknowledged only once they are in SQL
(``receiver``). In the queue they are *refused* from then on. ``take`` moves the cursors ``sql`` and
``records`` beyond them, and keeps their numbers in ``consumed``, key ``QUEUE/refused/N``, until the cursor
``parquet`` has passed them, too: records N+1 to ``queue_seq`` count for nothing.

What a crash can leave: ``take`` is one transaction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, Engine, delete, event, select

from sla_server.db import schema
from sla_server.db.engine import begin
from sla_server.db.errors import FenceLost
from sla_server.db.upsert import upsert

NAME: Final = "gateways"
"""Of the lease: who has it polls all gateways, judges, controls and writes."""
Refused = tuple[tuple[int, int], ...]
"""Records of a queue that count for nothing: behind the one, up to the other."""


@dataclass(frozen=True, slots=True)
class Fence:
    """Of the term in which this process runs.

    Attributes:
        number: higher than that of all terms before.
        server: this server's name.
    """

    number: int
    server: str

    def take(self, engine: Engine, queue_id: str, newest_seq: int, now_us: int) -> Refused:
        """Have the database refuse all lower fences; what of this server's queue is refused, too.

        Args:
            engine: without a guard.
            queue_id: of this server's ingest queue.
            newest_seq: newest record in it.
            now_us: for the row.

        Raises:
            FenceLost: a higher one was taken.
            DatabaseUnavailable: come again.
        """
        with begin(engine) as connection:
            taken = _taken(connection, for_update=True)
            if taken is not None and taken[0] > self.number:
                raise FenceLost(self.number, taken[0], taken[1])
            row = {
                "name": NAME,
                "fence": self.number,
                "server": self.server,
                "queue": queue_id,
                "since_us": now_us,
            }
            if taken is None or taken[0] < self.number:
                upsert(connection, schema.fences, [row], set_=("fence", "server", "queue", "since_us"))
            if taken is not None and taken[2] != queue_id:
                _refuse_rest(connection, queue_id, newest_seq)
            return _refused(connection, queue_id)

    def guard(self, engine: Engine) -> None:
        """Have each transaction of ``engine`` begin with a look at the fence; raises ``FenceLost`` there."""

        @event.listens_for(engine, "begin")
        def _check(connection: Connection) -> None:
            taken = _taken(connection)
            if taken is not None and taken[0] > self.number:
                raise FenceLost(self.number, taken[0], taken[1])


def _taken(connection: Connection, *, for_update: bool = False) -> tuple[int, str, str] | None:
    """Fence, server and queue; the row stays as it is until the transaction ends."""
    table = schema.fences
    statement = select(table.c.fence, table.c.server, table.c.queue).where(table.c.name == NAME)
    row = connection.execute(statement.with_for_update(read=not for_update)).one_or_none()
    return None if row is None else (int(row[0]), str(row[1]), str(row[2]))


def _refuse_rest(connection: Connection, queue_id: str, newest_seq: int) -> None:
    """What SQL lacks of a queue counts for nothing: another server has had those cuts from the agents."""
    sql_key, records_key = (f"{queue_id}/{name}" for name in ("sql", "records"))
    cursor = _cursor(connection, sql_key)
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


def _refused(connection: Connection, queue_id: str) -> Refused:
    """Of those that no file has passed; others are forgotten."""
    table, prefix = schema.consumed, f"{queue_id}/refused/"
    passed = _cursor(connection, f"{queue_id}/parquet")
    of_queue = table.c.queue.startswith(prefix)
    connection.execute(delete(table).where(of_queue & (table.c.queue_seq <= passed)))
    rows = connection.execute(select(table.c.queue, table.c.queue_seq).where(of_queue))
    return tuple(sorted((int(str(row[0]).removeprefix(prefix)), int(row[1])) for row in rows))


def _cursor(connection: Connection, key: str) -> int:
    table = schema.consumed
    found = connection.execute(select(table.c.queue_seq).where(table.c.queue == key)).scalar()
    return int(found or 0)
