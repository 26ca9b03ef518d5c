"""The database is away: since when and why, when it is tried again, and that people are notified.

Who is notified of a beginning has to be notified of its end, also where the database is back when the next
process starts: nothing fails then, and nothing else would say that it has ended. So ``OutageMark`` keeps that
a beginning was announced.

Thread: one.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import structlog

from pmdaemon.reserve import raise_event
from pmdaemon.runtime.backoff import doubled
from pmdaemon.runtime.files import sync_directory
from pmdaemon.wire.messages.server import DAMAGED, Problem
from sla_server.db.ingest.records import event_row

log = structlog.get_logger("dbmanager")
FILE: Final = "database-away"
BACKOFF_FIRST_S: Final = 0.5
BACKOFF_LIMIT_S: Final = 15.0
ANNOUNCED_S: Final = 5.0
"""A failover or a lock takes less; a person can do something about what lasts longer."""
_DIGITS: Final = 20


class OutageMark:
    """A file that says whether people are notified of an outage that goes on.

    It has the same few bytes at all times, written when it is made: a full disk may be why the database is
    away, and has no room for new ones. One that cannot be written or read counts as none; the log says so.

    Args:
        directory: where it is; None: nothing is kept.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._path = directory / FILE if directory is not None else None
        if self._path is not None and not self._path.exists():
            self.clear()
            try:
                sync_directory(self._path.parent)  # else a power cut may take the name, with what is in it
            except OSError as exc:
                log.warning("outage-mark-not-written", path=str(self._path), problem=str(exc))

    def set(self, since_us: int) -> None:
        """People are notified of an outage since that time.

        Durability: on disk on return.
        """
        self._write(since_us)

    def clear(self) -> None:
        """And that it has ended."""
        self._write(0)

    def since_us(self) -> int:
        """Since when it was away as people know it; 0: they know of none."""
        if self._path is None:
            return 0
        try:
            text = self._path.read_text("ascii", "replace")[:_DIGITS]
        except OSError as exc:
            log.warning("outage-mark-unreadable", path=str(self._path), problem=str(exc))
            return 0
        return int(text) if text.isascii() and text.isdecimal() else 0

    def _write(self, since_us: int) -> None:
        if self._path is None:
            return
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.pwrite(fd, f"{since_us:0{_DIGITS}d}\n".encode(), 0)
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as exc:
            log.warning("outage-mark-not-written", path=str(self._path), problem=str(exc))


class DatabaseOutage:
    """The state of a database that is away, from the first failure to the first success. Pure.

    While it lasts the writer tries again with backoff, the queue holds, the intake goes on, and ``problem``
    is reported every other second (PRESSURE). Once it has lasted ``ANNOUNCED_S``, an event ``database-away``
    is raised, which needs no database, and ``database-back`` afterwards. One with the figures,
    ``database-was-away``, is stored after every outage: nobody has to act on what has ended.

    Args:
        mark: whether people were notified, kept over restarts.

    Attributes:
        since_us: first failure, 0 while it works.
        reason: of the newest failure.
        tries: failures since.
        problem: the same for PRESSURE, None while it works. Replaced whole: any thread may read it.
        is_announced: the event that it is away was raised.
    """

    def __init__(self, mark: OutageMark | None = None) -> None:
        self._mark = mark or OutageMark()
        self.since_us = 0
        self.reason = ""
        self.tries = 0
        self.problem: Problem | None = None
        self.is_announced = False

    @property
    def is_on(self) -> bool:
        """Whether the database is away."""
        return self.tries > 0

    def failed(self, now_us: int, reason: str, *, is_damage: bool = False) -> None:
        """A transaction failed; ``is_damage``: and will go on to fail, ``reason`` says what to do."""
        self.since_us = self.since_us or now_us
        self.reason = reason
        self.tries += 1
        text = f"the database cannot be used: {reason}. The ingest queue holds what arrives"
        damage = Problem(DAMAGED, self.since_us, reason)
        self.problem = damage if is_damage else Problem("database", self.since_us, text)

    def wait_s(self) -> float:
        """How long to wait before the next try: doubled each time, 15 s at most."""
        return doubled(BACKOFF_FIRST_S, self.tries - 1, BACKOFF_LIMIT_S)

    def announce(self, now_us: int) -> None:
        """Raise an event if it has lasted long enough, once."""
        if self.is_announced or now_us - self.since_us < ANNOUNCED_S * 1e6:
            return
        self.is_announced = True
        self._mark.set(self.since_us)
        text = f"the database cannot be used: {self.reason}. The ingest queue holds what arrives"
        raise_event(
            event_row(
                (self.since_us, "announced"),
                self.since_us,
                "database-away",
                "critical",
                element="dbmanager",
                subject="database",
                text=text,
            )
        )

    def raise_end(self, now_us: int, since_us: int = 0) -> None:
        """Raise the event that it is back; ``since_us``: of an outage that a process before has announced."""
        since_us = since_us or self.since_us
        text = f"the database can be used again, after {(now_us - since_us) / 1e6:.1f} s"
        row = event_row(
            (since_us,), now_us, "database-back", "info",
            element="dbmanager", subject="database", text=text,
        )  # fmt: skip
        raise_event(row)
        self._mark.clear()

    def started(self, now_us: int) -> None:
        """The database can be used at the start: what was announced has ended, also by a process before."""
        if self.is_announced:
            self.raise_end(now_us)
        elif since_us := self._mark.since_us():
            self.raise_end(now_us, since_us)
        self.ended()

    def event(self, now_us: int, queue_bytes: int) -> dict[str, Any]:
        """A row of ``events`` about what has ended."""
        seconds = (now_us - self.since_us) / 1e6
        return event_row(
            (self.since_us, self.reason),
            self.since_us,
            "database-was-away",
            "info",
            element="dbmanager",
            subject="database",
            text=f"the database could not be used for {seconds:.1f} s ({self.reason}); "
            "nothing was lost, the ingest queue held everything",
            details={"seconds": seconds, "tries": self.tries, "queue_bytes": queue_bytes},
        )

    def ended(self) -> None:
        """A transaction succeeded."""
        self.since_us, self.reason, self.tries, self.problem = 0, "", 0, None
        self.is_announced = False
