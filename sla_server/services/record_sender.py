"""RECORDs until dbmanager says that they are durable, however often it is killed meanwhile.

Each frame carries an id of its own. dbmanager answers RECORDED once the frame is in its durable queue. A
frame that is not answered in time (dbmanager was killed between taking and keeping it) is sent again, *with
everything after it*, so that the rows of one key arrive in their order and an old one never overwrites a
newer one for good; rows are upserts, so a repeat does no harm. Answered frames wait behind an unanswered
one for that reason.

What a crash of this process can leave: frames not yet posted die with it. Slices are judged again from SQL,
the brain re-reads throttles; an event that waited here is lost, which takes a full mailbox at the same
moment.

Belongs to the main loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Final

import structlog

from pmdaemon.errors import FrameTooLarge
from pmdaemon.mailbox.errors import MailboxFull
from pmdaemon.runtime.excerpt import printable
from pmdaemon.wire.messages.server import RecordRows
from sla_server.services.outbox import PostingMailbox
from sla_server.services.rows import Rows

log = structlog.get_logger("journal")
RECIPIENT: Final = "dbmanager"
RESEND_FIRST_NS: Final = 5_000_000_000  # durability takes milliseconds; five seconds is a dead dbmanager
RESEND_LAST_NS: Final = 60_000_000_000  # while it stays away its ring must not fill with repeats
FRAME_ROWS: Final = 128
"""Slices are some 300 bytes a row, a header holds 64 KiB; what does not fit is halved, and encoded again."""
Done = Callable[[bool, str], None]
Rejected = list[tuple[str, str]]
"""Table of a row, and why it cannot be recorded."""


@dataclass(slots=True)
class _Entry:
    """One frame; ``answered`` frames wait only for those before them."""

    request: str
    payload: bytes
    ticket: _Ticket | None
    answered: bool = False


@dataclass(slots=True)
class _Ticket:
    """Somebody who wants to know when the last of ``open_frames`` is durable."""

    done: Done
    open_frames: int
    error: str = ""


class RecordSender:
    """See the module.

    Attributes:
        lost: frames dropped because the limit was reached, and rows that fit no frame
        resent: times the queue was sent again
    """

    def __init__(self, mailbox: PostingMailbox, tag: str, limit_bytes: int) -> None:
        self._mailbox = mailbox
        self._tag = tag
        self._limit_bytes = limit_bytes
        self._entries: deque[_Entry] = deque()
        self._by_request: dict[str, _Entry] = {}
        self._serial = 0
        self._bytes = 0
        self._sent = 0  # entries of the queue's head that are posted
        self._waiting_since_ns = 0
        self._resend_ns = RESEND_FIRST_NS
        self.lost = 0
        self.resent = 0

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
        parts, unfit = _frames(rows, f"{self._tag}.{self._serial}", together=done is not None)
        self._serial += 1
        for table, problem in unfit:
            self.lost += 1
            log.error("record-unfit", table=table, problem=problem, lost=self.lost)
        if unfit and done is not None:
            done(False, f"a row of {unfit[0][0]} cannot be recorded: {unfit[0][1]}")
            return
        if not parts:
            return
        size = sum(len(payload) for _, payload in parts)
        if self._bytes + size > self._limit_bytes:
            self.lost += len(parts)
            log.error("records-lost", frames=len(parts), waiting_bytes=self._bytes, lost=self.lost)
            if done is not None:
                done(False, "too many records wait for the database manager; try again when it is back")
            return
        ticket = _Ticket(done, len(parts)) if done is not None else None
        for request, payload in parts:
            entry = _Entry(request, payload, ticket)
            self._entries.append(entry)
            self._by_request[request] = entry
        self._bytes += size

    def flush(self, now_ns: int) -> None:
        """Post what has room; send again what was not answered in time."""
        if self._sent and now_ns - self._waiting_since_ns >= self._resend_ns:
            log.warning("records-sent-again", frames=self._sent, waited_s=self._resend_ns / 1e9)
            self._sent = 0
            self.resent += 1
            self._resend_ns = min(2 * self._resend_ns, RESEND_LAST_NS)
        if self._sent == 0:
            self._waiting_since_ns = now_ns
        unsent = [entry.payload for entry in islice(self._entries, self._sent, None)]
        if unsent:
            try:
                self._mailbox.post_many(RECIPIENT, unsent)
                self._sent += len(unsent)
            except MailboxFull as full:
                self._sent += full.posted

    def recorded(self, request: str, ok: bool, error: str, now_ns: int) -> None:
        """Dbmanager's answer; one that is not ours, or a repeated one, is ignored."""
        entry = self._by_request.get(request)
        if entry is None or entry.answered:
            return
        entry.answered = True
        self._waiting_since_ns = now_ns
        self._resend_ns = RESEND_FIRST_NS
        if not ok:
            log.error("record-refused", request=request, error=error)
        ticket = entry.ticket
        if ticket is not None:
            ticket.open_frames -= 1
            ticket.error = ticket.error or ("" if ok else error or "refused")
        while self._entries and self._entries[0].answered:
            gone = self._entries.popleft()
            del self._by_request[gone.request]
            self._bytes -= len(gone.payload)
            self._sent = max(self._sent - 1, 0)
        # Last: what the waiting one does may append again.
        if ticket is not None and ticket.open_frames == 0:
            ticket.done(not ticket.error, ticket.error)

    def waiting(self) -> int:
        """Frames that are not known to be durable."""
        return sum(not entry.answered for entry in self._entries)


def _frames(rows: Rows, request: str, *, together: bool) -> tuple[list[tuple[str, bytes]], Rejected]:
    """RECORD frames that carry all rows in order, each with its own id; and the rows that fit none."""
    frames: list[tuple[str, bytes]] = []
    unfit: Rejected = []

    def pack(part: Rows) -> None:
        name = f"{request}.{len(frames)}"
        listed = [[table, row] for table, row in part]
        try:
            frames.append((name, RecordRows(listed, name, "services", together or None).encode()))
        except (FrameTooLarge, TypeError, ValueError, OverflowError) as exc:
            if len(part) == 1:
                unfit.append((part[0][0], printable(f"{type(exc).__name__}: {exc}", 300)))
                return
            pack(part[: len(part) // 2])
            pack(part[len(part) // 2 :])

    for first in range(0, len(rows), FRAME_ROWS):
        pack(rows[first : first + FRAME_ROWS])
    return frames, unfit
