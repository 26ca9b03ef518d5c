"""The receiver's thread: mailboxes in, queue, notices out.

One round: take messages, ``IngestIntake.absorb``, append with one sync, post the notices. While nothing
arrives it sleeps on the doorbells. While the queue has no room for a whole round it takes nothing: mailboxes
fill, pairs are refused and ask their agents again later, which keep everything until then.

A recipient without room does not hold the others up: its notices wait (``mailbox.sender``), and beyond
``MAX_WAITING_NOTICES`` the oldest are dropped. That is safe: watermarks are asked for by the next GATEWAY,
DURABLE is repeated when a cut comes again, and a process that waits for RECORDED asks again.

Where several servers take over from each other, notices go out only once SQL has what they are about
(``stored_seq``): the server that takes over has SQL, and not this one's queue. So agents keep their cuts some
seconds longer, and for as long as the database is away.

Thread: ``db-intake`` alone posts and takes. Failure: a queue that cannot write ends the thread, and with it
the process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import structlog

from pmdaemon.errors import MailboxError
from pmdaemon.mailbox import BACKSTOP_S, OTHERS, MailboxSender, wait_any
from pmdaemon.mailbox.errors import MailboxCorrupt, MessageDamaged
from pmdaemon.mailbox.mailbox import WaitingMailbox
from pmdaemon.mailbox.sender import PostingMailbox
from pmdaemon.runtime import watchdog
from pmdaemon.runtime.clock import Clock, Deadline, server_clock
from pmdaemon.runtime.stop import Stop
from pmdaemon.wire.messages.server import Problem
from sla_server.db.ingest.intake import Incoming, IngestIntake, IntakeNotice
from sla_server.db.ingest.queue import IngestQueue

log = structlog.get_logger("db-intake")
TAKE_MESSAGES: Final = 256
TAKE_BYTES: Final = 1 << 20  # four CUTS batches of a pair for one sync
ROUND_BYTES: Final = (
    2 * TAKE_BYTES
)  # a message larger than TAKE_BYTES comes alone, and no frame is twice that
MAX_WAITING_NOTICES: Final = 1000
MAX_WAITING_BYTES: Final = 64 << 20  # as many notices with the longest header
MAX_HELD_ROUNDS: Final = 10_000
"""Rounds of notices that wait for SQL; of more the oldest are dropped, as above."""
FULL_PAUSE_S: Final = 0.25
DRAIN_S: Final = 2.0


class IngestMailbox(PostingMailbox, WaitingMailbox, Protocol):
    """What is needed of a mailbox; ``receiver`` is tested without segments, by a list of messages."""

    @property
    def expected(self) -> tuple[str, ...]:
        """Names it may post to, of processes that run or may start at any time."""

    def take(self, max_messages: int, max_bytes: int) -> Sequence[Incoming]:
        """What has arrived; never blocks."""


class IngestReceiver:
    """Moves messages between mailboxes, intake and queue.

    Args:
        mailboxes: the main one and the application's.
        intake: decides.
        queue: keeps.
        on_urgent: called when a RECORD was appended.
        probe: called at "noticed"; crash tests die there.
        tick: called once a round; reports how full everything is.
        clock: says since when the queue is full.
        stored_seq: every record up to it is in SQL; None: to be in the queue is enough.

    Attributes:
        pauses: how often the queue became too full to take from the mailboxes.
    """

    def __init__(
        self,
        mailboxes: Sequence[IngestMailbox],
        intake: IngestIntake,
        queue: IngestQueue,
        on_urgent: Callable[[], None],
        probe: Callable[[str], None] = lambda _point: None,
        tick: Callable[[], None] = lambda: None,
        clock: Clock | None = None,
        stored_seq: Callable[[], int] | None = None,
    ) -> None:
        self._mailboxes = mailboxes
        self._stored_seq = stored_seq
        self._held: deque[tuple[int, MailboxSender, Sequence[IntakeNotice]]] = deque(maxlen=MAX_HELD_ROUNDS)
        self._senders = [
            MailboxSender(
                {OTHERS: mailbox},
                MAX_WAITING_BYTES,
                limit_messages=MAX_WAITING_NOTICES,
                drop_oldest=True,
                on_undeliverable=_log_undeliverable,
            )
            for mailbox in mailboxes
        ]
        self._intake = intake
        self._queue = queue
        self._on_urgent = on_urgent
        self._probe = probe
        self._tick = tick
        self._clock = clock or server_clock()
        self._is_full = False
        self._full_since_us = 0
        self._damage: Problem | None = None
        self.pauses = 0

    def announce_watermarks(self) -> None:
        """Post WATERMARKS to every pair; the other processes ask when they start."""
        for mailbox, sender in zip(self._mailboxes, self._senders, strict=True):
            pairs = [name for name in mailbox.expected if name.startswith("pair-")]
            self._send(sender, self._intake.all_watermarks(pairs))

    def round(self) -> bool:
        """Take, keep, answer, once; returns whether anything came.

        Raises:
            QueuePoisoned: nothing can be kept any more.
        """
        for sender in self._senders:
            sender.flush()
        self._release()
        came = False
        for mailbox, sender in zip(self._mailboxes, self._senders, strict=True):
            if self._queue_is_full():
                return came
            messages = self._take(mailbox)
            if not messages:
                continue
            came = True
            absorbed = self._intake.absorb(messages)
            self._queue.append_many(absorbed.records)
            self._send(sender, absorbed.notices)
            self._probe("noticed")
            if absorbed.is_urgent:
                self._on_urgent()
        return came

    def run(self, stop: Stop) -> None:
        """Rounds until ``stop``, then until the mailboxes are empty (2 s at most)."""
        self.announce_watermarks()
        while not stop.is_set():
            watchdog.beat()
            self._tick()
            if not self.round():
                self._sleep(stop)
        deadline = Deadline(DRAIN_S)
        while self.round() and not deadline.passed:
            pass

    def problems(self) -> list[Problem]:
        """What keeps it from taking: a damaged mailbox, a full queue. Thread: the intake's."""
        found = [] if self._damage is None else [self._damage]
        if self._is_full:
            reason = "the ingest queue is full: nothing is taken from the mailboxes, agents keep their cuts"
            found.append(Problem("ingest-queue", self._full_since_us, reason))
        return found

    def _send(self, sender: MailboxSender, notices: Sequence[IntakeNotice]) -> None:
        """Send what is about records up to the newest one, now or once SQL has them."""
        if self._stored_seq is None:
            _send(sender, notices)
        elif notices:
            self._held.append((self._queue.synced_seq, sender, notices))
            self._release()

    def _release(self) -> None:
        while self._stored_seq is not None and self._held and self._held[0][0] <= self._stored_seq():
            _seq, sender, notices = self._held.popleft()
            _send(sender, notices)

    def _take(self, mailbox: IngestMailbox) -> Sequence[Incoming]:
        try:
            return mailbox.take(TAKE_MESSAGES, TAKE_BYTES)
        except MessageDamaged as exc:  # its cuts come again after the pair's rewind
            log.error("message-discarded", error=str(exc))
        except MailboxCorrupt as exc:
            if self._damage is None:  # once: it stays so until the supervisor has replaced the segment
                log.error("mailbox-damaged", error=str(exc))
                self._damage = Problem("mailbox", self._clock.unix_us(), str(exc))
        return ()

    def _queue_is_full(self) -> bool:
        is_full = not self._queue.has_room(ROUND_BYTES, TAKE_MESSAGES)
        if is_full != self._is_full:
            self._is_full = is_full
            self.pauses += is_full
            self._full_since_us = self._clock.unix_us()
            log.warning("queue-full" if is_full else "queue-has-room", queue_bytes=self._queue.waiting_bytes)
        return is_full

    def _sleep(self, stop: Stop) -> None:
        """Until a doorbell, the stop, or the backstop."""
        if self._is_full:
            stop.wait(FULL_PAUSE_S)
            return
        try:
            wait_any(self._mailboxes, BACKSTOP_S, [stop])
        except MailboxCorrupt:
            stop.wait(BACKSTOP_S)  # ``take`` has reported it; do not spin on it


def _send(sender: MailboxSender, notices: Sequence[IntakeNotice]) -> None:
    for notice in notices:
        sender.send(notice.payload, notice.recipient)


def _log_undeliverable(recipient: str, error: MailboxError) -> None:
    log.warning("notice-not-deliverable", recipient=recipient, error=str(error))
