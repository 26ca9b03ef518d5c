"""What an error of the database tells people to do."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy.exc import OperationalError

from sla_server.db.config import DatabaseConfig
from sla_server.db.engine import begin, make_engine, translated
from sla_server.db.errors import DatabaseUnavailable


def test_a_full_disk_of_sqlite_is_told_as_that(tmp_path: Path) -> None:
    """SQLite says the same of a file that has reached its largest size."""
    engine = make_engine(DatabaseConfig(), tmp_path)
    with begin(engine) as connection:
        connection.exec_driver_sql("CREATE TABLE t (a)")
        connection.exec_driver_sql("PRAGMA max_page_count = 2")
    with pytest.raises(DatabaseUnavailable) as caught, begin(engine) as connection:
        connection.exec_driver_sql("INSERT INTO t VALUES (zeroblob(100000))")
    engine.dispose()
    assert "database or disk is full. Make room on the disk" in str(caught.value)
    assert "accepts this user" not in str(caught.value)


def test_a_locked_file_of_sqlite_is_told_as_that(tmp_path: Path) -> None:
    engine = make_engine(DatabaseConfig(lock_timeout_s=0.1), tmp_path)
    with begin(engine) as connection:
        connection.exec_driver_sql("CREATE TABLE t (a)")
    with closing(sqlite3.connect(tmp_path / "sla.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(DatabaseUnavailable) as caught, begin(engine) as connection:
            connection.exec_driver_sql("INSERT INTO t VALUES (1)")
    engine.dispose()
    assert "database is locked. Another program has it open" in str(caught.value)
    assert "accepts this user" not in str(caught.value)


@pytest.mark.parametrize(
    ("state", "advice"), [("53100", "Make room on the disk"), ("57P03", "Check that it runs")]
)
def test_a_full_disk_of_postgresql_is_told_as_that(tmp_path: Path, state: str, advice: str) -> None:
    class Refusal(Exception):
        sqlstate = state

    engine = make_engine(DatabaseConfig(), tmp_path)
    with pytest.raises(DatabaseUnavailable, match=advice), translated(engine):
        raise OperationalError("INSERT", {}, Refusal("no"))
