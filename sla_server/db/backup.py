"""Backup and restore of a server's state: SQL, the Parquet files that count, and the token.

A backup is a directory:

    backup.json      what it holds; written last, so a directory without it is no backup
    sql.dump         of PostgreSQL (pg_dump, custom format), or
    sla.db           of SQLite
    parquet/...      the files in use at that moment, by their manifest paths
    state/...        small files of the data directory (the API token)

The server may run meanwhile: database and list of files are of one moment, and replaced files stay for
``files.grace_s``, which must be longer than the copying takes. The ingest queue is not copied: it holds what
is on its way into the database, and belongs to the disk it is on. Only what SQL has counted already and no
file has yet is read from it and written to a file of the backup's own (``unfiled``), which restoring adds
into the manifest; so the files of a restored server have every cut that its SQL counts.

Restoring needs an empty database. If the data directory still has its queue, the records in it that are
newer than the backup are applied again at the next start, exactly once (the cursors are in the database).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sqlite3
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, NamedTuple

from sqlalchemy import Engine, delete, insert, inspect, select, text, update

from pmdaemon.runtime.clock import Clock
from pmdaemon.runtime.files import (
    close_directory,
    copy_durably,
    make_directory,
    sync_directory,
    sync_file,
    write_whole,
)
from sla_server.db import schema
from sla_server.db.archive import manifest
from sla_server.db.archive.files import digest_of
from sla_server.db.archive.manifest import FileRow
from sla_server.db.archive.store import FileStore, LocalFiles
from sla_server.db.archive.writer import CutFileWriter
from sla_server.db.engine import begin, translated
from sla_server.db.errors import DbError, FileDamaged
from sla_server.db.ingest.batch import decode_batch
from sla_server.db.ingest.queue import IngestRecord, read_beside
from sla_server.db.migrate import current_revision, newest_revision

HEAD: Final = "backup.json"
FORMAT: Final = 2
_FORMATS: Final = (1, FORMAT)
_NOT_STATE: Final = frozenset(("lock", "identity", "dbmanager.lock", "storage.lock", "server.log"))
_STATE_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_COPY_BYTES: Final = 1 << 20
_RECORDS: Final = 256  # decoded at a time
_NO_LIMIT: Final = 1 << 62
DUMP_NAMES: Final = {"postgresql": "sql.dump", "sqlite": "sla.db"}
"""Name of the dump by kind of database."""


@dataclass(frozen=True, slots=True)
class BackupHead:
    """What ``backup.json`` says.

    Attributes:
        unfiled: ``queue``, whose records up to ``queue_seq`` are in files with this one; ``row`` of the
            manifest, None if they held no cut. None: there were no such records.
    """

    format: int
    made_us: int
    software: str
    revision: str
    database: str
    files: int
    bytes: int
    sql_sha256: str
    state: list[str]
    unfiled: dict[str, Any] | None = None


def make(
    engine: Engine, files: FileStore, data_dir: Path, queue_dir: Path, target: Path, clock: Clock
) -> BackupHead:
    """Write a backup into ``target``, which must not exist or be empty.

    Durability: everything is synced before ``backup.json`` appears.

    Raises:
        DbError: nothing may be concluded from what is in ``target``.
        FileDamaged: a file is not what the manifest says (`sla storage verify` lists all of them).
    """
    if target.exists() and any(target.iterdir()):
        raise DbError(f"{target} is not empty. Give a new directory for each backup")
    make_directory(target, 0o700)
    close_directory(target, "the backup's directory")
    made_us = clock.unix_us()
    unfiled = _Unfiled(queue_dir)
    revision, rows = _dump(engine, target, unfiled.take)
    copies = LocalFiles(target / "parquet")
    for row in rows:
        copy(files, copies, row)
    unfiled_head = unfiled.write(copies, clock)
    if unfiled_head is not None and unfiled_head["row"] is not None:
        rows.append(FileRow(**unfiled_head["row"]))
    state = sorted(path.name for path in _state_files(engine, data_dir))
    make_directory(target / "state", 0o700)  # syncs the names of dump and folders, too
    for name in state:
        copy_durably(data_dir / name, target / "state" / name)
    size_bytes = sum(row.bytes for row in rows)
    made = BackupHead(
        FORMAT,
        made_us,
        version("storage-sla-server"),
        revision,
        engine.dialect.name,
        len(rows),
        size_bytes,
        _digest(target / DUMP_NAMES[engine.dialect.name]),
        state,
        unfiled_head,
    )
    write_whole(target / HEAD, json.dumps(asdict(made), indent=1) + "\n", synced=True)
    return made


class _Unfiled:
    """Records of the ingest queue that were in SQL and in no file at the moment of the dump."""

    def __init__(self, queue_dir: Path) -> None:
        self._queue_dir = queue_dir
        self._queue = ""
        self._bounds = (0, 0)
        self._records: list[IngestRecord] = []

    def take(self, cursors: dict[str, int]) -> None:
        """Read them, before the server deletes them.

        Raises:
            DbError: it did so already, and wrote over them, or it is no queue.
        """

        def bounds(queue_id: str) -> tuple[int, int]:
            self._queue = queue_id
            self._bounds = cursors.get(f"{queue_id}/parquet", 0), cursors.get(f"{queue_id}/sql", 0)
            return self._bounds

        found = read_beside(self._queue_dir, bounds)
        prefix = f"{self._queue}/refused/"  # of these another server has had the cuts: ``db.fence``
        refused = [
            (int(key.removeprefix(prefix)), last_seq)
            for key, last_seq in cursors.items()
            if key.startswith(prefix)
        ]
        self._records = [
            record
            for record in found
            if not any(after_seq < record.queue_seq <= last_seq for after_seq, last_seq in refused)
        ]

    def write(self, copies: LocalFiles, clock: Clock) -> dict[str, Any] | None:
        """Write their cuts to a file; what ``BackupHead.unfiled`` says of it.

        Durability: the file is on disk.
        """
        after_seq, last_seq = self._bounds
        if after_seq >= last_seq:
            return None
        archive = CutFileWriter(copies, self._queue, _NO_LIMIT, _NO_LIMIT, clock)
        while self._records:
            chunk, self._records = self._records[:_RECORDS], self._records[_RECORDS:]
            batch = decode_batch(chunk, after_seq)
            archive.add(batch.first_seq, batch.last_seq, batch.cuts, batch.columns)
            after_seq = batch.last_seq
        return {"queue": self._queue, "queue_seq": last_seq, "row": archive.finish().row}


def _register_unfiled(engine: Engine, unfiled: dict[str, Any]) -> None:
    """The backup's own file counts, and its records are not taken from a queue again."""
    table = schema.consumed
    with begin(engine) as connection:
        if unfiled["row"] is not None:
            connection.execute(insert(schema.manifest), unfiled["row"])
        is_cursor = table.c.queue == f"{unfiled['queue']}/parquet"
        connection.execute(update(table).where(is_cursor).values(queue_seq=unfiled["queue_seq"]))


def read_head(source: Path) -> BackupHead:
    """What is in a backup.

    Raises:
        DbError: this is none, or of a newer release.
    """
    try:
        head: dict[str, Any] = dict(json.loads((source / HEAD).read_text()))
        if head["format"] in _FORMATS and str(head["revision"]) <= newest_revision():
            return _checked(BackupHead(**head))
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as exc:
        raise DbError(f"{source / HEAD}: {exc}. This is no complete backup; take another one") from exc
    raise DbError(
        f"{source} was made by release {head.get('software')}, which is newer. Install that release"
    )


def _checked(head: BackupHead) -> BackupHead:
    """See that every field is what ``make`` writes: names become paths, and a backup may be another's work.

    Raises:
        ValueError: names the field and its value.
    """
    for name, kind in (("database", str), ("sql_sha256", str), ("made_us", int), ("state", list)):
        if type(getattr(head, name)) is not kind:
            raise ValueError(f"{name} {str(getattr(head, name))[:60]!r} is not {kind.__name__}")
    for name in head.state:
        if not isinstance(name, str) or not _STATE_NAME.fullmatch(name) or name in _NOT_STATE:
            raise ValueError(f"state {str(name)[:60]!r} is not the name of a state file")
    if (unfiled := head.unfiled) is not None:
        if type(unfiled["queue"]) is not str or type(unfiled["queue_seq"]) is not int:
            raise ValueError(f"unfiled {str(unfiled)[:60]!r} names no queue and record")
        if unfiled["row"] is not None:
            FileRow(**unfiled["row"])
    return head


class Restored(NamedTuple):
    """A backup that was brought back, and the files in it that are not what its manifest says."""

    head: BackupHead
    damaged: list[str]


def restore(engine: Engine, files: FileStore, data_dir: Path, source: Path) -> Restored:
    """Bring a backup back. The server must be stopped; a migration happens at its next start.

    Files first, the database last: whatever fails before leaves an empty database and may be repeated. At
    last the backup's own file is entered; if that fails, empty the database and repeat.

    Raises:
        DbError: the database is not empty, or the backup is damaged.
    """
    head = read_head(source)
    if head.database != engine.dialect.name:
        raise DbError(f"the backup is of {head.database}, [database] url names {engine.dialect.name}")
    dumped = source / DUMP_NAMES[head.database]
    if not dumped.exists() or _digest(dumped) != head.sql_sha256:
        raise DbError(f"{dumped} is missing or damaged. Take another backup")
    if not _is_empty(engine):
        raise DbError(
            "the database is not empty. Restore into a new one: create an empty database (PostgreSQL) or "
            "move the file away together with its -wal and -shm (SQLite)"
        )
    copies = LocalFiles(source / "parquet")
    digests = {name: _restore_file(copies, files, name) for name in copies.listing()}
    make_directory(data_dir, 0o700)
    for name in head.state:
        kept = source / "state" / name
        if kept.is_symlink() or not kept.is_file():
            raise DbError(f"{kept} is missing or no plain file. Take another backup")
        if not (data_dir / name).exists():
            copy_durably(kept, data_dir / name)
    _restore_dump(engine, source)
    _forget_fences(engine)
    if head.unfiled is not None:
        _register_unfiled(engine, head.unfiled)
    return Restored(head, _damaged(engine, digests))


def _damaged(engine: Engine, digests: Mapping[str, str]) -> list[str]:
    """Files that differ from their row, or are missing: none of what was promised to be whole."""
    with begin(engine) as connection:
        rows = manifest.rows(connection, in_use=True)
    return sorted(row.path for row in rows if digests.get(row.path) != row.sha256)


def _forget_fences(engine: Engine) -> None:
    """Of several servers none acts on an empty database; the first that does begins a new term."""
    if inspect(engine).has_table(schema.fences.name):  # a former release had none
        with begin(engine) as connection:
            connection.execute(delete(schema.fences))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return digest_of(file)


def copy(files: FileStore, target: FileStore, row: FileRow) -> None:
    """Copy one file, checking it on the way.

    Raises:
        FileDamaged: it is missing, or not what its row says.
    """
    aside = target.aside(row.path)
    try:
        with files.open(row.path) as old, aside.open("wb") as new:
            shutil.copyfileobj(old, new, _COPY_BYTES)
    except FileNotFoundError as exc:
        raise FileDamaged(row.path, "the file is missing") from exc
    with aside.open("rb") as written:
        if digest_of(written) != row.sha256:
            aside.unlink()
            raise FileDamaged(row.path, "its SHA-256 is not that in the manifest")
    target.publish(aside, row.path)


def _restore_file(copies: FileStore, files: FileStore, name: str) -> str:
    """Copy a file back unless the same one is there; returns its SHA-256."""
    with copies.open(name) as copy_file:
        wanted = digest_of(copy_file)
    try:
        with files.open(name) as there:
            if digest_of(there) == wanted:
                return wanted
    except FileNotFoundError:
        pass
    aside = files.aside(name)
    with copies.open(name) as old, aside.open("wb") as new:
        shutil.copyfileobj(old, new, _COPY_BYTES)
    files.publish(aside, name)
    return wanted


def _state_files(engine: Engine, data_dir: Path) -> Iterator[Path]:
    """Small files of the data directory that are neither database nor lock nor log."""
    database = Path(engine.url.database or "").name if engine.dialect.name == "sqlite" else None
    for path in data_dir.glob("*"):
        is_database = database is not None and path.name.startswith(database)
        if (
            path.is_file()
            and _STATE_NAME.fullmatch(path.name)
            and path.name not in _NOT_STATE
            and not is_database
        ):
            yield path


def _dump(
    engine: Engine, directory: Path, at_once: Callable[[dict[str, int]], None]
) -> tuple[str, list[FileRow]]:
    """Write the database to ``directory``; returns its revision and the files in use, all as of one moment.

    Args:
        engine: of the database.
        directory: holds the dump.
        at_once: called soon after that moment with the cursors of table ``consumed`` as they were then.

    Raises:
        DbError: a program is missing or failed, or there is no schema yet.
        DatabaseUnavailable: retryable.
    """
    target = directory / DUMP_NAMES[engine.dialect.name]
    with translated(engine), engine.connect() as connection:
        if engine.dialect.name == "postgresql":
            connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        revision = current_revision(connection)
        if revision is None:
            raise DbError("the database has no schema yet: there is nothing to back up")
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


def _is_empty(engine: Engine) -> bool:
    """Whether the database has no tables, or, with SQLite, does not exist."""
    if engine.dialect.name == "sqlite" and not Path(engine.url.database or "").exists():
        return True
    with translated(engine), engine.connect() as connection:
        return not inspect(connection).get_table_names()


def _restore_dump(engine: Engine, directory: Path) -> None:
    """Fill the empty database from the dump in ``directory``.

    Durability: SQLite's file is synced; PostgreSQL's is a committed transaction.

    Raises:
        DbError: a program is missing or failed; nothing was changed.
    """
    source = directory / DUMP_NAMES[engine.dialect.name]
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
        raise DbError(f"{program} is missing: apt-get install postgresql-client")
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
        raise DbError(f"{program} ended with status {done.returncode}: {done.stderr.strip()}")


def _copy_sqlite(source: Path, target: Path) -> None:
    """One consistent copy; a writer meanwhile only makes it start again."""
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
