"""What SQLite writes again after an error of the disk reaches the disk.

What could not be written where a file was growing is lost at a power cut even if it is written again and
synced, on ext4 (``runtime.writeback``). SQLite does so in two places:

    its log        frames of a commit that failed are written over: so behind an error the log is emptied, by
                   a checkpoint, before the next transaction
    the database   a checkpoint that failed is repeated: so before that checkpoint the file's pages are
                   dropped. SQLite keeps the error of its automatic checkpoints to itself: so the kernel is
                   asked at each transaction whether it could not write something of the file

Jobs and commands are processes with connections of their own, and one that saw an error may end: so a file
beside the database has a byte for each. A process that writes while another one has an error may repeat its
checkpoint before it knows: they would have to end in the same millisecond.

A descriptor of the database file, once closed, takes all locks of this process on it along, also SQLite's.
So there is one a process, and it stays.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path
from typing import Final

import structlog
from sqlalchemy import Connection, Engine, event
from sqlalchemy.engine import ExceptionContext

from pmdaemon.runtime.writeback import forget_pages, missed_error
from sla_server.db.errors import DatabaseUnavailable

log = structlog.get_logger("database")
FAILURES_SUFFIX: Final = "-failures"
_opened: dict[Path, int] = {}  # database files, see the module


def forget_former_pages(database: Path) -> None:
    """What a former process could not write is shown no more; only before this one has a connection.

    Its last connection may have failed in a checkpoint as it was closed, of which SQLite says nothing.
    """
    if database.exists():
        forget_pages(_descriptor(database))


def _descriptor(database: Path) -> int:
    fd = _opened.get(database)
    if fd is None or not os.path.samestat(os.fstat(fd), os.stat(database)):  # one that was put in its place
        fd = _opened[database] = os.open(database, os.O_RDONLY | os.O_CLOEXEC)
    return fd


class LogRenewal:
    """Whether a write or sync of SQLite's has failed since its log was last emptied; see the module.

    ``_renewed`` counts the failures before the log was emptied: this process's, and those in the file. No
    flag, as another transaction may fail just when this one's has emptied it. Nothing removes the file: each
    process that starts behind a failure empties the log once. Where it cannot be written only this process
    knows.

    Args:
        engine: one that writes.
        database: its file.
        address: for error texts.
    """

    def __init__(self, engine: Engine, database: Path, address: str) -> None:
        self._database = database
        self._address = address
        self._file = database.with_name(f"{database.name}{FAILURES_SUFFIX}")
        self._failures = 0
        self._renewed = 0, 0
        event.listen(engine, "handle_error", self._saw)

    def _saw(self, context: ExceptionContext) -> None:
        code = getattr(context.original_exception, "sqlite_errorcode", 0)
        if code & 0xFF == sqlite3.SQLITE_IOERR:
            self._failed()

    def _failed(self) -> None:
        self._failures += 1
        with contextlib.suppress(OSError), self._file.open("ab") as file:
            file.write(b"!")

    def _seen(self) -> tuple[int, int]:
        try:
            return self._failures, os.stat(self._file).st_size
        except OSError:  # there was none
            return self._failures, 0

    def before(self, connection: Connection) -> None:
        """Before a transaction begins.

        Raises:
            DatabaseUnavailable: a reader still needs the log; come again.
        """
        try:
            fd = _descriptor(self._database)
            error = missed_error(fd)
        except OSError as exc:  # as a rule the disk's; SQLite will say what it is
            fd, error = _opened.get(self._database, -1), exc.errno or 0
        if error:
            text = "a checkpoint has failed; it is repeated before anything else is written"
            log.error("database-not-written", database=self._address, error=os.strerror(error), text=text)
            self._failed()
        seen = self._seen()
        if seen == self._renewed:
            return
        if fd >= 0:
            forget_pages(fd)
        is_busy, _, _ = connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)").one()
        if is_busy:
            raise DatabaseUnavailable(
                self._address, "its log must be emptied after an I/O error, and is being read"
            )
        self._renewed = seen
