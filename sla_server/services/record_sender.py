"""RECORDs: rows for SQL, sent to dbmanager until it answers that they are durable.

Each frame carries an id of its own. dbmanager answers RECORDED once the frame is in its durable queue. A
frame that is not answered in time (dbmanager was killed between taking and keeping it) is posted again with
everything after it (``mailbox.sender``), so that the rows of one key arrive in their order and an old one
never overwrites a newer one for good; rows are upserts, so a repeat does no harm.

What a crash of this process can leave: frames not yet posted die with it. Slices are judged again from SQL,
the controller reads throttles again; events are in the reserve of this process, and delivery brings them to
SQL.

Thread: the main loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import structlog

from pmdaemon.errors import FrameTooLarge
from pmdaemon.mailbox.sender import OTHERS, MailboxSender, PostingMailbox, Resend
from pmdaemon.runtime.excerpt import printable
from pmdaemon.wire.messages.server import RecordRows
from sla_server.rows import Row, Rows

log = structlog.get_logger("record-sender")
RECIPIENT: Final = "dbmanager"
RESEND: Final = Resend(
    first_ns=5_000_000_000,  # durability takes milliseconds; five seconds is a dead dbmanager
    last_ns=60_000_000_000,  # while it stays away its ring must not fill with repeats
)
FRAME_ROWS: Final = 128
"""Slices are some 300 bytes a row, a header holds 64 KiB; what does not fit is halved, and encoded again."""
TOO_MANY: Final = "too many records wait for the database manager; try again when it is back"
"""Nobody refused the rows: they were not even sent."""
Done = Callable[[bool, str], None]
Rejected = list[tuple[str, str]]
"""Table of a row, and why it cannot be recorded."""


@dataclass(slots=True)
class _Ticket:
    """A caller to be called when the last of ``open_frames`` is durable."""

    done: Done
    open_frames: int
    error: str = ""


class RecordSender:
    """See the module.

    Args:
        mailbox: of this process.
        tag: unique to it.
        limit_bytes: of rows that wait.
        sender: name of the process.
        raise_event: takes each event among the rows for delivery, once (``pmdaemon.reserve``).

    Attributes:
        resent: times that frames were posted again.
    """

    def __init__(
        self,
        mailbox: PostingMailbox,
        tag: str,
        limit_bytes: int,
        *,
        sender: str = "services",
        raise_event: Callable[[Row], object] = lambda _row: None,
    ) -> None:
        self._tag = tag
        self._name = sender
        self._raise_event = raise_event
        self._sender = MailboxSender({OTHERS: mailbox}, limit_bytes, resend=RESEND)
        self._tickets: dict[str, _Ticket] = {}
        self._serial = 0
        self._unfit = 0
        self.resent = 0

    @property
    def lost(self) -> int:
        """Frames dropped because the limit was reached, and rows that fit no frame."""
        return self._sender.lost + self._unfit

    def append(self, rows: Rows, done: Done | None = None) -> None:
        """Queue rows; ``done(ok, error)`` is called once all of them are durable or refused.

        Rows with ``done`` belong together: dbmanager stores those of one frame all or none. A row that fits
        no frame (64 KiB), or holds what msgpack has no form for, is dropped, counted and logged; with
        ``done`` none is queued.
        """
        if not rows:
            if done is not None:
                done(True, "")
            return
        if done is None:  # else what they speak of is in force only if it is recorded: see below
            self._raise(rows)
        request = f"{self._tag}.{self._serial}"
        parts, unfit = _frames(rows, request, self._name, together=done is not None)
        self._serial += 1
        for table, problem in unfit:
            self._unfit += 1
            log.error("record-unfit", table=table, problem=problem, lost=self.lost)
        if unfit and done is not None:
            done(False, f"a row of {unfit[0][0]} cannot be recorded: {unfit[0][1]}")
            return
        if not parts:
            return
        if not self._sender.put_all(RECIPIENT, parts):
            log.error(
                "records-lost",
                frames=len(parts),
                waiting_bytes=self._sender.waiting_bytes(RECIPIENT),
                lost=self.lost,
            )
            if done is not None:
                done(False, TOO_MANY)
            return
        if done is not None:
            self._raise(rows)
            ticket = _Ticket(done, len(parts))
            self._tickets.update((request, ticket) for request, _ in parts)

    def _raise(self, rows: Rows) -> None:
        for table, row in rows:
            if table == "events":
                self._raise_event(row)

    def flush(self, now_ns: int) -> None:
        """Post what has room; post again what was not answered in time."""
        if due := self._sender.flush(now_ns):
            log.warning("records-sent-again", frames=due)
            self.resent += 1

    def recorded(self, request: str, ok: bool, error: str, now_ns: int) -> None:
        """Handle an answer of dbmanager; a repeated one, or one to another process, is ignored."""
        if not self._sender.answered(RECIPIENT, request, now_ns):
            return
        if not ok:
            log.error("record-refused", request=request, error=error)
        ticket = self._tickets.pop(request, None)
        if ticket is None:
            return
        ticket.open_frames -= 1
        ticket.error = ticket.error or ("" if ok else error or "refused")
        if ticket.open_frames == 0:
            ticket.done(not ticket.error, ticket.error)  # last: it may append again

    def waiting(self) -> int:
        """Frames that are not known to be durable."""
        return self._sender.waiting()


def _frames(
    rows: Rows, request: str, sender: str, *, together: bool
) -> tuple[list[tuple[str, bytes]], Rejected]:
    """RECORD frames that carry all rows in order, each with its own id; and the rows that fit none."""
    frames: list[tuple[str, bytes]] = []
    unfit: Rejected = []

    def pack(part: Rows) -> None:
        name = f"{request}.{len(frames)}"
        listed = [[table, row] for table, row in part]
        try:
            frames.append((name, RecordRows(listed, name, sender, together or None).encode()))
        except (FrameTooLarge, TypeError, ValueError, OverflowError) as exc:
            if len(part) == 1:
                unfit.append((part[0][0], printable(f"{type(exc).__name__}: {exc}", 300)))
                return
            pack(part[: len(part) // 2])
            pack(part[len(part) // 2 :])

    for first in range(0, len(rows), FRAME_ROWS):
        pack(rows[first : first + FRAME_ROWS])
    return frames, unfit
