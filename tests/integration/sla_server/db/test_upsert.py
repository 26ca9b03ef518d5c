"""Many rows at once: by COPY on PostgreSQL, by tuples on SQLite, with the same result as one by one."""

from __future__ import annotations

import numpy as np
import psycopg
import pytest
from sqlalchemy import select

from pmdaemon.runtime.clock import FakeClock
from sla_server.db import schema, upsert
from sla_server.db.engine import begin, make_engine
from sla_server.db.errors import DatabaseUnavailable
from sla_server.db.ingest.writer import REST_LIMIT_NS
from sla_server.db.upsert import COPY_FROM_ROWS, DIRECT_ROWS, upsert_columns
from tests.support.database import Rig
from tests.support.samples import (
    T0,
    assert_database_holds,
    cuts_message,
    gateway,
    make_cut,
    record_message,
)

MANY = 700  # streams: more than one IN list


def many_cuts(seqs):
    return [make_cut(seq, gw=gateway(1 + seq % 2), streams=range(MANY), seed=5) for seq in seqs]


def test_sums_of_many_streams_over_transactions_and_a_restart(database):
    items = many_cuts(range(1, 7))
    first = Rig(database.config, database.data_dir)
    first.feed(cuts_message(items[:1]), cuts_message(items[1:2]))
    first.feed(cuts_message(items[2:4]))
    first.close()
    second = Rig(database.config, database.data_dir)
    second.feed(cuts_message(items[4:5]))
    second.feed(cuts_message(items[5:6]))
    assert_database_holds(second.reader, items)
    second.close()


@pytest.mark.parametrize("count", [3, COPY_FROM_ROWS, 4 * COPY_FROM_ROWS])
def test_columns_are_set_added_and_raised(rig, count):
    table = schema.streams
    ids = np.arange(count, dtype=np.int64) + (1 << 62)
    for names, reads, last in ((["a"], 2, 50), (["ä\\N\t"], 3, 40)):
        columns = {
            "stream_id": ids,
            "reads": np.full(count, reads),
            "last_us": np.full(count, last),
            "volume": names * count,
            "client": names * count,
        }
        with begin(rig.engine) as connection:
            upsert_columns(connection, table, columns, set_=("volume",), add=("reads",), maximum=("last_us",))
    wanted = select(
        table.c.stream_id, table.c.reads, table.c.last_us, table.c.volume, table.c.client, table.c.cuts
    )
    with begin(rig.engine) as connection:
        rows = connection.execute(wanted.order_by(table.c.stream_id)).all()
    assert [tuple(row) for row in rows] == [(int(i), 5, 50, "ä\\N\t", "a", 0) for i in ids]


@pytest.mark.parametrize("count", [1, DIRECT_ROWS, 3 * DIRECT_ROWS])
def test_rows_are_inserted_and_changed_alike_however_many_they_are(rig, count):
    table = schema.slices
    for ours, offered, reason in ((True, None, "a % b"), (False, 2.5, "'; --")):
        rows = [
            {
                "name": f"sla-{number}",
                "revision": 0,
                "objective": "p99 %(x)s ?",
                "start_us": T0 + number,
                "version": 3,
                "length_us": 60,
                "state": "bad",
                "ours": ours,
                "offered_iops": offered,
                "reason": reason,
            }
            for number in range(count)
        ]
        with begin(rig.engine) as connection:
            upsert.upsert(connection, table, rows, set_=("ours", "offered_iops", "reason"))
    wanted = select(table.c.name, table.c.objective, table.c.ours, table.c.offered_iops, table.c.reason)
    with begin(rig.engine) as connection:
        found = connection.execute(wanted.order_by(table.c.start_us)).all()
    assert [tuple(row) for row in found] == [
        (f"sla-{number}", "p99 %(x)s ?", False, 2.5, "'; --") for number in range(count)
    ]


class SlowClock(FakeClock):
    """A clock of which every look costs a second."""

    def monotonic_ns(self):
        self.advance(1)
        return super().monotonic_ns()


def test_while_sql_rests_records_are_stored_and_cuts_gather(database):
    """A transaction that took a while is followed by a rest of four times that, except for RECORD."""
    rig = Rig(database.config, database.data_dir, clock=SlowClock(unix_us=T0))
    rig.feed(cuts_message([make_cut(1)]))
    rig.writer._rest_until_ns = rig.clock.monotonic_ns() + REST_LIMIT_NS
    rig.queue.append_many([cuts_message([make_cut(2)]), record_message([("events", {"event_id": "e"})])])
    rig.writer.step()
    assert [row["event_id"] for row in rig.reader.events()] == ["e"]
    assert_database_holds(rig.reader, [make_cut(1)])
    assert rig.queue.oldest_seq == 1
    rig.close()
    again = Rig(
        database.config, database.data_dir
    )  # as after kill -9: the cuts come again, the record does not
    assert again.store.cursors()[0] == 1
    again.drain(final=True)
    assert_database_holds(again.reader, [make_cut(1), make_cut(2)])
    assert len(again.reader.events()) == 1
    again.close()


def test_a_database_of_the_first_release_goes_on(database):
    """It has no cursor ``records``: what its one cursor has passed is not stored again."""
    first = Rig(database.config, database.data_dir)
    first.feed(record_message([("events", {"event_id": "e", "text": "old"})]), cuts_message([make_cut(1)]))
    with begin(first.engine) as connection:
        table = schema.consumed
        connection.execute(table.delete().where(table.c.queue == f"{first.queue.queue_id}/records"))
        connection.execute(schema.events.update().values(text="changed since"))
    first.close()
    second = Rig(database.config, database.data_dir)
    second.feed(cuts_message([make_cut(2)]))
    assert [row["text"] for row in second.reader.events()] == ["changed since"]
    assert_database_holds(second.reader, [make_cut(1), make_cut(2)])
    second.close()


@pytest.mark.parametrize("database", [pytest.param("postgresql", marks=pytest.mark.db)], indirect=True)
def test_a_full_disk_within_a_copy_is_an_outage(database, monkeypatch):
    engine = make_engine(database.config, database.data_dir)
    ids = np.arange(COPY_FROM_ROWS, dtype=np.int64)

    def full(*_what):
        raise psycopg.errors.DiskFull("could not extend file")

    monkeypatch.setattr(upsert, "copy_stream", full)
    with pytest.raises(DatabaseUnavailable, match="could not extend file"), begin(engine) as connection:
        upsert_columns(connection, schema.streams, {"stream_id": ids, "cuts": ids})
    engine.dispose()
