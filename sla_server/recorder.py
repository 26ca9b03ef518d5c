"""Rows of the supervisor for SQL: states of processes and events, kept until dbmanager has them on disk.

A row is a RECORD frame of its own with an id of its own, which RECORDED answers. Frames without an answer
are posted again (``mailbox.sender``): dbmanager was killed between taking and keeping them, or the segment
they lay in was made again. Rows are upserts, so a repeat does no harm. Beyond ``MAX_ROWS`` the oldest rows
go: the newest states matter most. Rows that are not yet durable die with the supervisor.

Thread: the supervisor's only one.
"""

from __future__ import annotations

import uuid
from typing import Any, Final, Protocol

import structlog

from pmdaemon.errors import FrameTooLarge, MailboxError, WireError
from pmdaemon.mailbox import MailboxSender, Message, Resend
from pmdaemon.mailbox.errors import MailboxCorrupt, MessageDamaged
from pmdaemon.mailbox.sender import PostingMailbox
from pmdaemon.reserve import event_row, raise_event
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.messages.server import Recorded, RecordRows

log = structlog.get_logger("supervisor")
RECIPIENT: Final = "dbmanager"
MAX_ROWS: Final = 100
MAX_BYTES: Final = MAX_ROWS * (64 << 10)  # as many of the longest
RESEND: Final = Resend(
    first_ns=5_000_000_000,  # durability takes milliseconds
    last_ns=60_000_000_000,  # a dbmanager that stays away finds a few repeats in its ring, not a full one
)
NAMESPACE: Final = uuid.UUID("6f3c1b52-6c0a-4b55-9f5b-0a1f6f1f7d11")


class RecorderMailbox(PostingMailbox, Protocol):
    """What is needed of a mailbox."""

    def take(self) -> list[Message]:
        """What has arrived; never waits."""


class Recorder:
    """See the module.

    Attributes:
        mailbox: where it posts and takes; None while there is none, and rows wait.
        has_recorded: a dbmanager has answered since the start.
        discarded: messages to the supervisor that were damaged.
    """

    def __init__(self) -> None:
        self._mailboxes: dict[str, PostingMailbox] = {}
        self._sender = MailboxSender(
            self._mailboxes, MAX_BYTES, limit_messages=MAX_ROWS, drop_oldest=True, resend=RESEND
        )
        self.mailbox: RecorderMailbox | None = None
        self.has_recorded = False
        self.discarded = 0

    def attach(self, mailbox: RecorderMailbox | None) -> None:
        """Post to this mailbox from now on, and also what the former one got and dbmanager did not answer."""
        self.mailbox = mailbox
        self._mailboxes.clear()
        if mailbox is not None:
            self._mailboxes[RECIPIENT] = mailbox
        self._sender.post_again(RECIPIENT)

    def add(self, table: str, row: dict[str, Any], now_ns: int) -> None:
        """Keep a row, and post it if there is room; one that fits no frame is dropped."""
        request = uuid.uuid4().hex
        try:
            record = RecordRows([[table, row]], request, "supervisor").encode()
        except FrameTooLarge as exc:
            log.error("record-dropped", table=table, problem=str(exc))
        else:
            self._sender.put_all(RECIPIENT, [(request, record)])
        self.flush(now_ns)

    def add_event(
        self,
        kind: str,
        severity: str,
        subject: str,
        text: str,
        details: dict[str, Any],
        *,
        at_us: int,
        now_ns: int,
    ) -> None:
        """Raise an event, and keep its row."""
        event_id = str(uuid.uuid5(NAMESPACE, f"{kind}/{subject}/{at_us}"))
        row = event_row(kind, severity, "supervisor", subject, text, at_us, details, event_id)
        raise_event(row)
        self.add("events", row, now_ns)

    def flush(self, now_ns: int) -> None:
        """Take answers; post what has room, and again what was not answered in time."""
        if self.mailbox is None:
            return
        for message in self._take(self.mailbox):
            try:
                answer = frame.decode(message.payload)
                if answer.kind == Kind.RECORDED:
                    said = Recorded.parse(answer.header)
                    self.has_recorded |= self._sender.answered(RECIPIENT, said.request, now_ns)
            except WireError as exc:
                log.error("message-dropped", sender=message.sender, problem=str(exc))
        refused = self._sender.full
        error = "its mailbox is full"
        try:
            self._sender.flush(now_ns)
        except MailboxError as exc:  # a damaged segment is made again by the supervisor's next step
            refused, error = -1, str(exc)
        if self._sender.full != refused:
            log.warning("record-waits", error=error, rows=self._sender.waiting())

    def _take(self, mailbox: RecorderMailbox) -> list[Message]:
        """What has arrived; a damaged message is none."""
        try:
            return mailbox.take()
        except MessageDamaged as exc:
            self.discarded += 1
            log.error("message-discarded", error=str(exc), discarded=self.discarded)
        except MailboxCorrupt as exc:
            log.error("mailbox-damaged", error=str(exc))
        return []

    def waiting(self) -> int:
        """Rows that are not known to be durable."""
        return self._sender.waiting()
