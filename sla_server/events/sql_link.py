"""The way to SQL: events, and rows of what became of notices, as RECORDs for dbmanager.

``SqlLink`` belongs to the main loop. ``RecordRecipient`` is a recipient like any other, the only one that is
always there: it makes sure that each event is a row, also one whose process died before its own row was sent.
It runs in its thread, hands rows over and waits until dbmanager has them on disk. While dbmanager, the
mailbox or SQL are away its lane waits and no other lane does.

Rows of deliveries are for people: beyond ``LIMIT_BYTES`` they are dropped, with a count.
"""

from __future__ import annotations

import threading
import uuid
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import structlog

from pmdaemon.errors import MailboxError, WireError
from pmdaemon.mailbox import Mailbox, attach
from pmdaemon.mailbox.errors import MessageDamaged
from pmdaemon.runtime.clock import Clock, Deadline
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.messages.server import Recorded
from sla_server.events.first_reading import MOST_IDS
from sla_server.events.recipients.base import CONFIRMED, Answer, Notice, Recipient, refused, retry
from sla_server.rows import Rows
from sla_server.services.record_sender import TOO_MANY, Done, RecordSender

log = structlog.get_logger("delivery")
NAME: Final = "@sql"  # no document has such a name
"""The lane of records; in a relay, too, where they are its memory of identities."""
LIMIT_BYTES: Final = 4 << 20
ATTACH_NS: Final = 1_000_000_000
TIMEOUT_S: Final = 30.0
MOST_NOTICES: Final = 64
NO_ANSWER: Final = "dbmanager has not answered"
MOST_ROWS: Final = 10_000
"""Rows for people that wait while there is no mailbox; some 5 MB."""


class EventRecords(Protocol):
    """What the lane ``NAME`` brings every event to, and rows of what became of notices.

    ``SqlLink`` in a server; a relay has no SQL (``sla_server.relay.records``).

    Attributes:
        known: identities of events that are recorded and in no queue any more; read at the start.
        most_ids: so many identities are kept in mind, those that are waiting included.
    """

    @property
    def known(self) -> Iterable[str]:
        """See above."""

    @property
    def most_ids(self) -> int:
        """See above."""

    def recipient(self) -> Recipient:
        """The recipient that confirms what is recorded; made again after one was left behind."""

    def store(self, rows: Sequence[dict[str, Any]], deadline: Deadline) -> str:
        """See ``recipients.inbox.InboxStore``."""

    def report(self, rows: Iterable[dict[str, Any]]) -> None:
        """Take rows of what became of notices; never blocks or raises."""

    def step(self) -> None:
        """Called by the main loop after each step of the engine."""

    def close(self) -> None:
        """Let go of files; no thread records any more."""


class SqlLink:
    """See the module.

    Thread: ``submit`` any, all else the main loop.
    """

    known: Iterable[str] = ()
    most_ids = MOST_IDS

    def __init__(self, segment: Path, clock: Clock) -> None:
        self._segment = segment
        self._clock = clock
        self._mailbox: Mailbox | None = None
        self._sender: RecordSender | None = None
        self._next_ns = 0
        self._lock = threading.Lock()  # guards _submitted, _rows and _dropped
        self._submitted: deque[tuple[Rows, Done | None]] = deque()
        self._rows = 0
        self._dropped = 0

    @property
    def lost(self) -> int:
        """Frames that found no room, and submissions that came while too many rows waited for a mailbox."""
        return (self._sender.lost if self._sender else 0) + self._dropped

    def submit(self, rows: Rows, done: Done | None = None) -> None:
        """Leave rows for the next ``step``; ``done`` is called by the main loop.

        Without ``done`` they are dropped and counted while more than ``MOST_ROWS`` wait.
        """
        with self._lock:
            if done is None and self._rows + len(rows) > MOST_ROWS:
                self._dropped += 1
                return
            self._rows += len(rows)
            self._submitted.append((rows, done))

    def report(self, rows: Iterable[dict[str, Any]]) -> None:
        """Rows of the table ``deliveries``; those of our own recipient are of no use to people."""
        wanted: Rows = [("deliveries", row) for row in rows if row["recipient"] != NAME]
        if wanted:
            self.submit(wanted)

    def store(self, rows: Sequence[dict[str, Any]], deadline: Deadline) -> str:
        """Make rows of ``events`` durable: "" once they are, or why not. Thread: a recipient's.

        See ``recipients.inbox.InboxStore``.
        """
        answered = threading.Event()
        said: list[tuple[bool, str]] = []

        def done(is_ok: bool, error: str) -> None:
            said.append((is_ok, error))
            answered.set()

        self.submit([("events", row) for row in rows], done)
        if not answered.wait(deadline.left_s()):
            self._withdraw(done)  # the caller comes again with the same rows
            return NO_ANSWER
        is_ok, error = said[0]
        return "" if is_ok else error or "dbmanager refused it"

    def recipient(self) -> RecordRecipient:
        """See ``EventRecords``; a new one for each thread."""
        return RecordRecipient(self)

    def step(self) -> None:
        """Take answers, post what waits.

        Raises:
            MailboxCorrupt: the segment is damaged; the supervisor makes it again and restarts this process.
        """
        now_ns = self._clock.monotonic_ns()
        if self._sender is None and not self._attach(now_ns):
            return
        assert self._sender is not None  # it is attached
        assert self._mailbox is not None
        for sender, payload in self._taken(self._mailbox):
            try:
                answer = frame.decode(payload)
                if answer.kind == Kind.RECORDED:
                    said = Recorded.parse(answer.header)
                    self._sender.recorded(said.request, said.ok, said.error, now_ns)
            except WireError as exc:
                log.error("message-dropped", sender=sender, problem=str(exc))
        with self._lock:
            submitted, self._submitted, self._rows = self._submitted, deque(), 0
        for rows, done in submitted:
            self._sender.append(rows, done)
        self._sender.flush(now_ns)

    def close(self) -> None:
        """Let go of the mailbox."""
        if self._mailbox is not None:
            self._mailbox.close()

    def _withdraw(self, done: Done) -> None:
        with self._lock:
            self._submitted = deque(each for each in self._submitted if each[1] is not done)
            self._rows = sum(len(rows) for rows, _ in self._submitted)

    def _attach(self, now_ns: int) -> bool:
        if now_ns < self._next_ns:
            return False
        self._next_ns = now_ns + ATTACH_NS
        try:
            self._mailbox = attach(self._segment, "delivery")
        except MailboxError as exc:
            log.warning("no-mailbox", problem=str(exc))
            return False
        self._sender = RecordSender(self._mailbox, uuid.uuid4().hex[:12], LIMIT_BYTES, sender="delivery")
        return True

    @staticmethod
    def _taken(mailbox: Mailbox) -> Sequence[tuple[str, bytes]]:
        try:
            return [(message.sender, bytes(message.payload)) for message in mailbox.take()]
        except MessageDamaged as exc:
            log.error("message-discarded", problem=str(exc))
            return []


class RecordRecipient:
    """See the module and ``recipients.base.Recipient``."""

    name = NAME
    kind = "record"
    timeout_s = TIMEOUT_S
    most_notices = MOST_NOTICES

    def __init__(self, link: SqlLink) -> None:
        self._link = link

    def deliver(self, notices: Sequence[Notice], deadline: Deadline) -> Answer:
        """See ``Recipient``."""
        problem = self._link.store([notice.event.row() for notice in notices], deadline)
        if not problem:
            return CONFIRMED
        return retry(problem) if problem in (NO_ANSWER, TOO_MANY) else refused(problem)

    def close(self) -> None:
        """See ``Recipient``; nothing is open."""
