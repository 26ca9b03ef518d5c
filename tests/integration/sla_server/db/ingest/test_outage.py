"""A database that goes away, times out, is read-only, or is full: the queue holds, later all is there."""

from __future__ import annotations

import contextlib
import signal
import threading
from pathlib import Path

import pytest
from sqlalchemy import event, text

from pmdaemon.runtime.clock import Deadline
from sla_server.db import migrate
from sla_server.db.config import DatabaseConfig
from sla_server.db.engine import begin, make_engine
from sla_server.db.errors import DatabaseUnavailable
from sla_server.db.ingest import outage as outages
from sla_server.db.ingest.outage import DatabaseOutage
from tests.support.database import Rig
from tests.support.samples import T0, assert_database_holds, cuts_message, make_cut, record_message


@contextlib.contextmanager
def running(rig):
    """The writer's thread."""
    thread = threading.Thread(target=rig.writer.run, name="db-writer")
    thread.start()
    try:
        yield
    finally:
        rig.writer.finish()
        thread.join(60)
        assert not thread.is_alive()


def wait_until(condition, what):
    deadline = Deadline(180)
    pause = threading.Event()
    while not condition():
        assert not deadline.passed, what
        pause.wait(0.01)


def put(rig, *items):
    for item in items:
        rig.queue.append_many([cuts_message([item])])
    rig.writer.wake()


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(outages, "BACKOFF_FIRST_S", 0.01)
    monkeypatch.setattr(outages, "BACKOFF_LIMIT_S", 0.05)


@pytest.mark.db
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGQUIT])
def test_a_server_that_stops_and_comes_back_needs_no_restart(
    restarting_postgres, migrated_template, tmp_path, quick, how
):
    postgres = restarting_postgres
    url = postgres.create(f"away_{how.name.lower()}", migrated_template)
    rig = Rig(DatabaseConfig(url=url, flush_interval_s=0.05), tmp_path)
    items = [make_cut(seq) for seq in range(1, 7)]
    with running(rig):
        put(rig, *items[:2])
        wait_until(lambda: rig.writer.sql_seq == 2, "the first cuts")
        postgres.stop(how)
        put(rig, *items[2:4])
        wait_until(lambda: rig.writer.outage.tries >= 2, "the outage was noticed")
        put(rig, *items[4:])
        assert rig.writer.sql_seq == 2
        assert rig.writer.outage.since_us == T0
        rig.clock.advance(90)
        postgres.start()
        wait_until(lambda: rig.writer.sql_seq == 6 and not rig.writer.outage.is_on, "recovery")
    assert_database_holds(rig.reader, items)
    [row] = [row for row in rig.reader.events() if row["kind"] == "database-was-away"]
    assert (row["at_us"], row["severity"], row["details"]["seconds"]) == (T0, "info", 90.0)
    rig.close()


def _slow_updates(connection):
    """Every update of a cursor takes longer than the statement timeout."""
    connection.execute(
        text(
            "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS "
            "'BEGIN PERFORM pg_sleep(20); RETURN NEW; END'"
        )
    )
    connection.execute(
        text("CREATE TRIGGER slow BEFORE UPDATE ON consumed FOR EACH ROW EXECUTE FUNCTION slow()")
    )


@pytest.mark.db
def test_a_statement_timeout_undoes_all_and_is_tried_again(postgres, migrated_template, tmp_path):
    url = postgres.create("slow_statements", migrated_template)
    rig = Rig(DatabaseConfig(url=url, statement_timeout_s=1), tmp_path)
    patient = make_engine(DatabaseConfig(url=url), tmp_path)
    with begin(patient) as connection:
        _slow_updates(connection)
    rig.queue.append_many([cuts_message([make_cut(1)])])
    with pytest.raises(DatabaseUnavailable, match="statement timeout"):
        rig.writer.step()
    assert rig.reader.totals()["streams"] == 0
    with begin(patient) as connection:
        connection.execute(text("DROP TRIGGER slow ON consumed"))
    patient.dispose()

    def is_drained():
        """As the writer's thread does: on a machine that stands still any statement takes a second."""
        try:
            rig.drain()
        except DatabaseUnavailable as exc:
            assert "statement timeout" in str(exc)  # noqa: PT017  # another reason is a failure
            return False
        return True

    wait_until(is_drained, "all of it in SQL")
    assert_database_holds(rig.reader, [make_cut(1)])
    rig.close()


@pytest.mark.db
def test_a_table_that_somebody_locks_is_waited_for_and_tried_again(postgres, migrated_template, tmp_path):
    url = postgres.create("locked_table", migrated_template)
    rig = Rig(DatabaseConfig(url=url, lock_timeout_s=0.1), tmp_path)
    rig.queue.append_many([cuts_message([make_cut(1)])])
    other = make_engine(DatabaseConfig(url=url), tmp_path)
    with begin(other) as connection:
        connection.execute(text("LOCK TABLE rollups IN ACCESS EXCLUSIVE MODE"))
        with pytest.raises(DatabaseUnavailable, match="lock timeout"):
            rig.writer.step()
    other.dispose()
    rig.drain()
    assert_database_holds(rig.reader, [make_cut(1)])
    rig.close()


@pytest.mark.db
def test_after_a_failover_new_connections_are_made(postgres, migrated_template, tmp_path, quick):
    """The former primary still answers, read-only: what is in the pool must not be used again."""
    url = postgres.create("demoted", migrated_template)
    rig = Rig(DatabaseConfig(url=url, flush_interval_s=0.05), tmp_path)
    with rig.engine.connect() as connection:
        connection.execute(text("SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY"))
        connection.commit()
    rig.queue.append_many([cuts_message([make_cut(1)])])
    with pytest.raises(DatabaseUnavailable, match="read-only"):
        rig.writer.step()
    with running(rig):
        wait_until(lambda: rig.writer.sql_seq == 1, "a connection to the new primary")
    assert_database_holds(rig.reader, [make_cut(1)])
    rig.close()


def test_a_full_sqlite_disk_loses_nothing(tmp_path):
    config = DatabaseConfig()
    engine = make_engine(config, tmp_path)
    migrate.upgrade(engine)
    engine.dispose()
    rig = Rig(config, tmp_path)
    limit_pages = [0]

    @event.listens_for(rig.engine, "connect")
    def _limited(connection, _record):
        if limit_pages[0]:
            connection.execute(f"PRAGMA max_page_count={limit_pages[0]}")

    items = [make_cut(seq, streams=range(200)) for seq in range(1, 6)]
    rig.feed(cuts_message(items[:1]), record_message([("events", {"event_id": "e"})]))
    with begin(rig.engine) as connection:
        limit_pages[0] = connection.exec_driver_sql("PRAGMA page_count").scalar() + 1
    rig.store.disconnect()
    for item in items[1:]:
        item = make_cut(item.seq, start_us=T0 + item.seq * 60_000_000, streams=range(200))
        rig.queue.append_many([cuts_message([item])])
    with pytest.raises(DatabaseUnavailable, match="full"):
        rig.writer.step()
    assert_database_holds(rig.reader, items[:1])
    limit_pages[0] = 0
    rig.store.disconnect()
    rig.drain(final=True)
    later = [make_cut(i.seq, start_us=T0 + i.seq * 60_000_000, streams=range(200)) for i in items[1:]]
    assert_database_holds(rig.reader, items[:1] + later)
    rig.close()


def test_backoff_doubles_up_to_its_limit():
    outage = DatabaseOutage()
    waits = []
    for number in range(8):
        outage.failed(T0 + number, "gone")
        waits.append(outage.wait_s())
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 15.0]
    assert (outage.since_us, outage.tries) == (T0, 8)
    assert outage.problem is not None
    assert (outage.problem.what, outage.problem.since_us) == ("database", T0)
    assert "gone" in outage.problem.reason
    outage.ended()
    assert not outage.is_on
    assert outage.problem is None


def test_the_module_needs_no_database_file(tmp_path):
    """A directory that cannot be written to is an outage, not a crash."""
    missing = Path(tmp_path) / "no" / "such"
    engine = make_engine(DatabaseConfig(), missing)
    with pytest.raises(DatabaseUnavailable, match="open"), begin(engine):
        pass
