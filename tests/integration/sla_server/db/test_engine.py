"""Connections: durability that the ingest queue relies on, limits, and what errors become."""

from __future__ import annotations

import functools
import sqlite3

import pytest
from sqlalchemy import event, text

from sla_server.db.config import DatabaseConfig
from sla_server.db.engine import begin, make_engine
from sla_server.db.errors import DatabaseDamaged, DatabaseRefused, DatabaseUnavailable


@pytest.fixture
def engine(database):
    opened = make_engine(database.config, database.data_dir)
    yield opened
    opened.dispose()


def run(engine, *statements):
    """All statements in one transaction."""
    with begin(engine) as connection:
        for statement in statements:
            connection.execute(text(statement))


def test_a_refused_value_is_final_and_rolled_back(engine):
    with pytest.raises(DatabaseRefused):
        run(engine, *(f"INSERT INTO meta (key, value) VALUES ('a', '{value}')" for value in "bc"))
    with begin(engine) as connection:
        assert connection.execute(text("SELECT count(*) FROM meta")).scalar() == 0


def test_anything_else_may_be_over_later(engine):
    with pytest.raises(DatabaseUnavailable) as caught, begin(engine) as connection:
        connection.execute(text("SELECT * FROM no_such_table"))
    assert caught.value.retryable
    assert "no_such_table" in caught.value.reason


def test_table_definitions_are_rolled_back_too(engine):
    with pytest.raises(DatabaseRefused):
        run(engine, "CREATE TABLE half_made (x integer)", "INSERT INTO meta (key, value) VALUES (NULL, 'c')")
    with pytest.raises(DatabaseUnavailable), begin(engine) as connection:
        connection.execute(text("SELECT * FROM half_made"))


def test_sqlite_commits_are_synced_and_readers_do_not_wait(tmp_path):
    engine = make_engine(DatabaseConfig(lock_timeout_s=3), tmp_path)
    with begin(engine) as connection:
        pragmas = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        }
    assert pragmas == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "busy_timeout": 3000}
    engine.dispose()


def test_a_second_sqlite_writer_waits_its_turn_and_then_says_so(tmp_path):
    config = DatabaseConfig(lock_timeout_s=0.1)
    first, second = make_engine(config, tmp_path), make_engine(config, tmp_path)
    with begin(first) as connection:
        connection.execute(text("CREATE TABLE t (x integer)"))
        with pytest.raises(DatabaseUnavailable, match="locked"), begin(second):
            pass
    with begin(second) as connection:
        connection.execute(text("INSERT INTO t VALUES (1)"))
    first.dispose()
    second.dispose()


def test_a_path_with_odd_characters(tmp_path):
    directory = tmp_path / "a?b#c%20 d"
    directory.mkdir()
    engine = make_engine(DatabaseConfig(), directory)
    with begin(engine) as connection:
        connection.execute(text("CREATE TABLE t (x integer)"))
    engine.dispose()
    assert (directory / "sla.db").exists()


@pytest.mark.db
def test_postgresql_sessions(postgres):
    url = postgres.create("sessions")
    postgres.execute("ALTER DATABASE sessions SET synchronous_commit = off")
    config = DatabaseConfig(url=url, statement_timeout_s=7, lock_timeout_s=3)
    names = ("statement_timeout", "lock_timeout", "TimeZone", "synchronous_commit", "transaction_read_only")
    for read_only, expected in (
        (False, ["7s", "3s", "UTC", "on", "off"]),
        (True, ["7s", "3s", "UTC", "off", "on"]),
    ):
        engine = make_engine(config, postgres.directory, read_only=read_only)
        with begin(engine) as connection:
            assert [connection.execute(text(f"SHOW {name}")).scalar() for name in names] == expected
        engine.dispose()


def test_a_damaged_file_of_sqlite_is_said_to_be_one(tmp_path):
    engine = make_engine(DatabaseConfig(), tmp_path)
    run(
        engine,
        "CREATE TABLE t (x text)",
        *("INSERT INTO t VALUES (hex(randomblob(4000)))" for _ in range(20)),
    )
    with begin(engine) as connection:
        [path] = [row[2] for row in connection.execute(text("PRAGMA database_list"))]
    engine.dispose()  # the last connection moves the log into the file
    with open(path, "r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * 4096 * 4)
    engine = make_engine(DatabaseConfig(), tmp_path)
    with pytest.raises(DatabaseDamaged, match="sla storage restore") as caught, begin(engine) as connection:
        connection.execute(text("SELECT count(x), max(x) FROM t")).all()
    assert isinstance(caught.value, DatabaseUnavailable), "who waits for a database that is away waits for it"
    engine.dispose()


class FailingOnce(sqlite3.Connection):
    """A disk that takes one commit's pages and reports that it did not."""

    fails = False

    def commit(self) -> None:
        if type(self).fails:
            type(self).fails = False
            self.rollback()
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR | 4 << 8  # a sync
            raise error
        super().commit()


def test_after_an_io_error_sqlite_writes_behind_nothing_that_it_has_not_in_its_file(tmp_path, monkeypatch):
    """What is written again where a write has failed may be lost; nothing may come behind it."""
    monkeypatch.setattr(sqlite3, "connect", functools.partial(sqlite3.connect, factory=FailingOnce))
    config = DatabaseConfig(lock_timeout_s=0.1)
    engine, log = make_engine(config, tmp_path), tmp_path / "sla.db-wal"
    run(engine, "CREATE TABLE t (x integer)", "INSERT INTO t VALUES (1)")
    reader = make_engine(config, tmp_path, read_only=True)
    FailingOnce.fails = True
    with pytest.raises(DatabaseUnavailable, match="disk I/O error"):
        run(engine, "INSERT INTO t VALUES (2)")
    with begin(reader) as reading:
        assert reading.execute(text("SELECT x FROM t")).scalars().all() == [1]
        with pytest.raises(DatabaseUnavailable, match="must be emptied"):
            run(engine, "INSERT INTO t VALUES (3)")
    assert log.stat().st_size > 0
    with begin(engine) as connection:
        assert log.stat().st_size == 0
        connection.execute(text("INSERT INTO t VALUES (4)"))
    with begin(engine) as connection:
        assert log.stat().st_size > 0, "once"
        assert connection.execute(text("SELECT x FROM t")).scalars().all() == [1, 4]
    for each in (reader, engine):
        each.dispose()


def test_an_io_error_of_one_process_has_each_other_one_empty_the_log_and_those_that_are_started_later(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(sqlite3, "connect", functools.partial(sqlite3.connect, factory=FailingOnce))
    config, log = DatabaseConfig(lock_timeout_s=0.1), tmp_path / "sla.db-wal"
    server, job = make_engine(config, tmp_path), make_engine(config, tmp_path)
    run(server, "CREATE TABLE t (x integer)")
    with begin(job) as connection:
        assert log.stat().st_size > 0, "nothing has failed"
        connection.execute(text("INSERT INTO t VALUES (1)"))
    FailingOnce.fails = True
    with pytest.raises(DatabaseUnavailable, match="disk I/O error"):
        run(job, "INSERT INTO t VALUES (2)")
    for times in range(2):
        with begin(server) as connection:
            assert (log.stat().st_size > 0) == (times > 0), "once"
            connection.execute(text("INSERT INTO t VALUES (3)"))
    later = make_engine(config, tmp_path)
    with begin(later) as connection:
        assert log.stat().st_size == 0, "it cannot know who has emptied the log since"
    for each in (server, job, later):
        each.dispose()


def test_an_io_error_that_comes_while_the_log_is_emptied_has_it_emptied_again(tmp_path, monkeypatch):
    monkeypatch.setattr(sqlite3, "connect", functools.partial(sqlite3.connect, factory=FailingOnce))
    engine, log = make_engine(DatabaseConfig(lock_timeout_s=0.1), tmp_path), tmp_path / "sla.db-wal"
    run(engine, "CREATE TABLE t (x integer)")
    emptied = []

    def fail_another(_connection, _cursor, statement, *_how):
        if "wal_checkpoint" in statement:
            emptied.append(log.stat().st_size)
            if len(emptied) == 1:
                with begin(engine) as other:  # as another thread would
                    other.execute(text("INSERT INTO t VALUES (1)"))
                FailingOnce.fails = True
                with pytest.raises(DatabaseUnavailable), begin(engine) as other:
                    other.execute(text("INSERT INTO t VALUES (2)"))

    event.listen(engine, "after_cursor_execute", fail_another)
    FailingOnce.fails = True
    with pytest.raises(DatabaseUnavailable, match="disk I/O error"):
        run(engine, "INSERT INTO t VALUES (3)")
    run(engine, "INSERT INTO t VALUES (4)")
    before = len(emptied)
    run(engine, "INSERT INTO t VALUES (5)")
    assert len(emptied) == before + 1
    run(engine, "INSERT INTO t VALUES (6)")
    assert len(emptied) == before + 1
    assert not any(emptied)
    engine.dispose()
