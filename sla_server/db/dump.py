"""The SQL database as a file, and back: ``pg_dump`` and ``pg_restore``, or SQLite's backup interface.

Both copy one moment of a database in use. ``dump`` also tells which Parquet files counted in that moment.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Final

from sqlalchemy import Engine, inspect, select, text

from pmdaemon.runtime.files import make_directory, sync_directory, sync_file
from sla_server.db import schema
from sla_server.db.archive import manifest
from sla_server.db.archive.manifest import FileRow
from sla_server.db.engine import translated
from sla_server.db.errors import BackupFailed
from sla_server.db.migrate import current_revision

NAMES: Final = {"postgresql": "sql.dump", "sqlite": "sla.db"}
"""Name of the dump by kind of database."""


def dump(
    engine: Engine, directory: Path, at_once: Callable[[dict[str, int]], None]
) -> tuple[str, list[FileRow]]:
    """Write the database to ``directory``; returns its revision and the files in use, all as of one moment.

    Args:
        engine: of the database.
        directory: holds the dump.
        at_once: called soon after that moment with the cursors of table ``consumed`` as they were then.

    Raises:
        BackupFailed: a program is missing or failed, or there is no schema yet.
        DatabaseUnavailable: retryable.
    """
    target = directory / NAMES[engine.dialect.name]
    with translated(engine), engine.connect() as connection:
        if engine.dialect.name == "postgresql":
            connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        revision = current_revision(connection)
        if revision is None:
            raise BackupFailed("the database has no schema yet: there is nothing to back up")
        rows = manifest.rows(connection, in_use=True)
        if engine.dialect.name == "postgresql":
            at_once({row.queue: row.queue_seq for row in connection.execute(select(schema.consumed))})
            # The same snapshot for pg_dump as for the rows just read.
            snapshot = connection.execute(text("SELECT pg_export_snapshot()")).scalar_one()
            _run(engine, "pg_dump", "--format=custom", f"--snapshot={snapshot}", f"--file={target}")
        else:
            _copy_sqlite(Path(engine.url.database or ""), target)
            rows, cursors = _rows_of_copy(target)
            at_once(cursors)
    sync_file(target)
    return revision, rows


def is_empty(engine: Engine) -> bool:
    """Whether the database has no tables, or, with SQLite, does not exist."""
    if engine.dialect.name == "sqlite" and not Path(engine.url.database or "").exists():
        return True
    with translated(engine), engine.connect() as connection:
        return not inspect(connection).get_table_names()


def restore(engine: Engine, directory: Path) -> None:
    """Fill the empty database from the dump in ``directory``.

    Durability: SQLite's file is synced; PostgreSQL's is a committed transaction.

    Raises:
        BackupFailed: a program is missing or failed; nothing was changed.
    """
    source = directory / NAMES[engine.dialect.name]
    if engine.dialect.name == "postgresql":
        # Owners and grants name roles that may not exist here; sql/roles.sql makes them.
        options = ("--no-owner", "--no-privileges", "--exit-on-error", "--single-transaction")
        _run(engine, "pg_restore", *options, str(source))
        return
    target = Path(engine.url.database or "")
    make_directory(target.parent, 0o700)
    aside = target.with_name("_" + target.name)
    shutil.copyfile(source, aside)
    sync_file(aside)
    aside.rename(target)
    sync_directory(target.parent)


def _run(engine: Engine, program: str, *options: str) -> None:
    """Run one of PostgreSQL's programs on this database; the password goes through the environment."""
    path = shutil.which(program)
    if path is None:
        raise BackupFailed(f"{program} is missing: apt-get install postgresql-client")
    # `set` cannot remove a password, but it can build a URL that never had one.
    bare = engine.url.set(drivername="postgresql", password="").difference_update_query(["password"])
    url = bare.render_as_string(hide_password=False)
    environment = dict(os.environ)
    if password := engine.url.query.get("password") or engine.url.password:
        environment["PGPASSWORD"] = str(password)
    done = subprocess.run(
        [path, f"--dbname={url.replace(':@', '@', 1)}", *options],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    if done.returncode:
        raise BackupFailed(f"{program} ended with status {done.returncode}: {done.stderr.strip()}")


def _copy_sqlite(source: Path, target: Path) -> None:
    """One consistent copy; whoever writes meanwhile only makes it start over."""
    with (
        contextlib.closing(sqlite3.connect(f"file:{source}?mode=ro", uri=True)) as old,
        contextlib.closing(sqlite3.connect(target)) as new,
    ):
        old.backup(new)
        new.execute("PRAGMA journal_mode=DELETE")


def _rows_of_copy(path: Path) -> tuple[list[FileRow], dict[str, int]]:
    """Files in use and cursors."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.row_factory = sqlite3.Row
        found = connection.execute("SELECT * FROM manifest WHERE replaced_us IS NULL ORDER BY min_us, path")
        rows = [FileRow(**dict(row)) for row in found]
        return rows, dict(connection.execute("SELECT queue, queue_seq FROM consumed").fetchall())
