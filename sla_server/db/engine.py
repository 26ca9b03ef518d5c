"""Connections: one place where an engine is made, and where foreign exceptions are translated.

SQLite: WAL, so that readers never wait for the writer; ``synchronous=FULL``, because records leave the ingest
queue once their transaction is committed, and a commit that power loss can undo would lose them; transactions
begin as IMMEDIATE in writers (a read that is upgraded later fails with SQLITE_BUSY when the policy job
committed in between) and as plain ones in readers, which also get ``query_only``.

After an error of the disk SQLite writes some places again: see ``log_renewal``.

PostgreSQL: statement and lock timeouts, UTC, and no ``synchronous_commit=off`` for the same reason.

Thread: an Engine may be used by any thread; a Connection belongs to one.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, SQLAlchemyError

from pmdaemon.runtime.config import masked
from sla_server.db.config import DatabaseConfig
from sla_server.db.errors import DatabaseDamaged, DatabaseRefused, DatabaseUnavailable, NoDatabaseYet
from sla_server.db.log_renewal import LogRenewal, forget_former_pages

CONNECT_TIMEOUT_S = 5
FULL_ADVICE = "Make room on the disk that holds it; what comes in meanwhile waits in the ingest queue"
LOCKED_ADVICE = (
    "Another program has it open and does not let go: end that (an sqlite3 shell, a copy of the file; "
    "`fuser` names it). What comes in meanwhile waits in the ingest queue"
)


def make_engine(config: DatabaseConfig, data_dir: Path, *, read_only: bool = False) -> Engine:
    """An engine for this configuration; connects to nothing yet.

    Args:
        config: the ``[database]`` table.
        data_dir: where an SQLite file lies when no URL is given.
        read_only: use ``reader_url`` if there is one, refuse writes; a missing SQLite file is then an error
            instead of a new database.
    """
    url = make_url((config.reader_url if read_only else "") or config.resolved_url(data_dir))
    if url.drivername == "sqlite":
        return _sqlite_engine(config, url, read_only)
    return _postgresql_engine(config, url, read_only)


def check_made(config: DatabaseConfig, data_dir: Path) -> None:
    """See that a server has been started with this configuration, before anything is made for a command.

    Raises:
        NoDatabaseYet: SQLite's file is missing. A PostgreSQL server is asked when it is used.
    """
    url = make_url(config.resolved_url(data_dir))
    if url.drivername == "sqlite" and not (path := Path(url.database or "").absolute()).exists():
        raise NoDatabaseYet(path)


def prepare_files(config: DatabaseConfig, data_dir: Path) -> None:
    """For the process that writes most, as it starts: see ``log_renewal.forget_former_pages``."""
    url = make_url(config.resolved_url(data_dir))
    if url.drivername == "sqlite":
        forget_former_pages(Path(url.database or "").absolute())


def where(engine: Engine) -> str:
    """The database's address for people, without its secrets."""
    return masked(engine.url.render_as_string(hide_password=True))


def _sqlite_engine(config: DatabaseConfig, url: URL, read_only: bool) -> Engine:
    path = Path(url.database or "").absolute()
    address = f"file:{quote(str(path))}?mode={'rw' if read_only else 'rwc'}"

    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(
            address, uri=True, timeout=config.lock_timeout_s, isolation_level=None, check_same_thread=False
        )
        try:
            connection.execute("PRAGMA foreign_keys=ON")
            if read_only:
                connection.execute("PRAGMA query_only=ON")
            else:
                connection.execute("PRAGMA journal_mode=WAL")
                connection.execute("PRAGMA synchronous=FULL")
        except BaseException:
            connection.close()
            raise
        return connection

    engine = create_engine(url, creator=connect, pool_size=config.pool_size, max_overflow=2, pool_timeout=10)
    begin = "BEGIN" if read_only else "BEGIN IMMEDIATE"
    renewal = LogRenewal(engine, path, where(engine)) if not read_only else None

    # isolation_level=None leaves transactions to us; without it sqlite3 commits before DDL.
    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        if renewal is not None:
            renewal.before(connection)
        connection.exec_driver_sql(begin)

    return engine


SORT_MEMORY: Final = "32MB"
"""Of PostgreSQL for one sort of a reader: the slices of a month, 8 MB, would else be sorted on disk."""


def _postgresql_engine(config: DatabaseConfig, url: URL, read_only: bool) -> Engine:
    options = (
        f"-c statement_timeout={round(config.statement_timeout_s * 1000)} "
        f"-c lock_timeout={round(config.lock_timeout_s * 1000)} -c timezone=UTC"
    )
    if read_only:
        options += f" -c default_transaction_read_only=on -c work_mem={SORT_MEMORY}"
    connect_args: dict[str, Any] = {"options": options}
    if "connect_timeout" not in url.query:
        connect_args["connect_timeout"] = CONNECT_TIMEOUT_S
    engine = create_engine(
        url,
        connect_args=connect_args,
        pool_size=config.pool_size,
        max_overflow=2,
        pool_timeout=10,
        pool_pre_ping=True,
    )
    if not read_only:

        @event.listens_for(engine, "connect")
        def _durable_commits(connection: Any, _record: object) -> None:
            with connection.cursor() as cursor:
                cursor.execute("SHOW synchronous_commit")
                if cursor.fetchone() == ("off",):
                    cursor.execute("SET synchronous_commit = on")
            connection.commit()

    return engine


@contextmanager
def translated(engine: Engine) -> Iterator[None]:
    """Turn what SQLAlchemy and drivers raise into our errors.

    Only a value that the database refuses is final; everything else (connection, lock, timeout, disk full,
    missing right, standby that is read-only) may be over later and is DatabaseUnavailable.

    Raises:
        DatabaseRefused: DataError or IntegrityError.
        DatabaseDamaged: SQLite's file is damaged.
        DatabaseUnavailable: anything else.
    """
    try:
        yield
    except (DataError, IntegrityError) as exc:
        raise DatabaseRefused(_first_line(exc)) from exc
    except SQLAlchemyError as exc:
        if _is_damage(exc):
            raise DatabaseDamaged(where(engine), _first_line(exc)) from exc
        if _is_full(exc):
            raise DatabaseUnavailable(where(engine), _first_line(exc), FULL_ADVICE) from exc
        if _is_locked(exc):
            raise DatabaseUnavailable(where(engine), _first_line(exc), LOCKED_ADVICE) from exc
        raise DatabaseUnavailable(where(engine), _first_line(exc)) from exc


def _is_damage(error: SQLAlchemyError) -> bool:
    """Whether SQLite says that its file is not what it wrote."""
    cause = error.orig if isinstance(error, DBAPIError) else None
    code = getattr(cause, "sqlite_errorcode", 0)  # only errors of SQLite itself have one
    return code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _is_full(error: SQLAlchemyError) -> bool:
    """Whether the database says that its disk has no room."""
    cause = error.orig if isinstance(error, DBAPIError) else None
    code = getattr(cause, "sqlite_errorcode", 0)
    return code & 0xFF == sqlite3.SQLITE_FULL or getattr(cause, "sqlstate", "") == "53100"


def _is_locked(error: SQLAlchemyError) -> bool:
    """Whether another process keeps SQLite's file locked, for longer than is waited."""
    cause = error.orig if isinstance(error, DBAPIError) else None
    return getattr(cause, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY


def _first_line(error: SQLAlchemyError) -> str:
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    return (str(cause).strip() or type(cause).__name__).splitlines()[0]


@contextmanager
def begin(engine: Engine) -> Iterator[Connection]:
    """One transaction: committed at the end of the block, rolled back if it raises. Errors are translated."""
    with translated(engine), engine.begin() as connection:
        yield connection
