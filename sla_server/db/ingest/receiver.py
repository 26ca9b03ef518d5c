"""The intake's thread: mailboxes in, queue, notices out.

One round: take messages, ``IngestIntake.absorb``, append with one sync, post the notices. While nothing
arrives it sleeps on the doorbells. While the queue has no room for a whole round it takes nothing: mailboxes
fill, pairs are refused and ask their agents again later, which keep everything until then.

A recipient without room does not hold the others up: its notices wait in a bounded list, oldest dropped
first. Dropping is safe: watermarks are asked for by the next GATEWAY, DURABLE is repeated when a cut comes
again, and who waits for RECORDED has a time limit.

Thread: ``db-intake`` alone posts and takes. Failure: a queue that cannot write ends the thread, and with it
the process.
"""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import structlog

from pmdaemon.errors import MailboxError
from pmdaemon.mailbox.errors import MailboxCorrupt, MailboxFull, MessageDamaged
from pmdaemon.runtime import watchdog
from pmdaemon.runtime.clock import Clock, Deadline, server_clock
from pmdaemon.runtime.stop import Stop
from pmdaemon.wire.messages.server import Problem
from sla_server.db.ingest.intake import Incoming, IngestIntake, Notice
from sla_server.db.ingest.queue import DurableQueue

log = structlog.get_logger("db-intake")
TAKE_MESSAGES: Final = 256
TAKE_BYTES: Final = 1 << 20  # four CUTS batches of a pair for one sync
ROUND_BYTES: Final = (
    2 * TAKE_BYTES
)  # a message larger than TAKE_BYTES comes alone, and no frame is twice that
MAX_WAITING_NOTICES: Final = 1000
BACKSTOP_S: Final = 0.05
FULL_PAUSE_S: Final = 0.25
DRAIN_S: Final = 2.0


class IngestMailbox(Protocol):
    """What is needed of a mailbox."""

    @property
    def expected(self) -> tuple[str, ...]:
        """Names it may post to, of processes that run or may start at any time."""

    def post(self, recipients: str, payload: bytes) -> None:
        """Post to one recipient; raises MailboxFull."""

    def take(self, max_messages: int, max_bytes: int) -> Sequence[Incoming]:
        """What has arrived; never blocks."""

    def fileno(self) -> int:
        """Doorbell."""

    def prepare_sleep(self) -> bool:
        """Ask to be rung; False if something waits."""

    def awake(self) -> None:
        """End of sleep."""


class IngestReceiver:
    """Moves messages between mailboxes, intake and queue.

    Args:
        boxes: the main one and the application's.
        intake: decides.
        queue: keeps.
        on_urgent: called when a RECORD was appended.
        probe: called at "noticed"; crash tests die there.
        tick: called once a round; tells how full everything is.
        clock: says since when the queue is full.

    Attributes:
        pauses: how often the queue became too full to take from the mailboxes.
    """

    def __init__(
        self,
        boxes: Sequence[IngestMailbox],
        intake: IngestIntake,
        queue: DurableQueue,
        on_urgent: Callable[[], None],
        probe: Callable[[str], None] = lambda _point: None,
        tick: Callable[[], None] = lambda: None,
        clock: Clock | None = None,
    ) -> None:
        self._boxes = boxes
        self._intake = intake
        self._queue = queue
        self._on_urgent = on_urgent
        self._probe = probe
        self._waiting: dict[tuple[int, str], deque[bytes]] = {}
        self._tick = tick
        self._clock = clock or server_clock()
        self._is_full = False
        self._full_since_us = 0
        self._damage: Problem | None = None
        self.pauses = 0

    def greet(self) -> None:
        """Post WATERMARKS to every pair."""
        for number, box in enumerate(self._boxes):
            pairs = [
                name for name in box.expected if name.startswith("pair-")
            ]  # the others ask when they start
            self._send(number, self._intake.greetings(pairs))

    def round(self) -> bool:
        """Take, keep, answer, once; returns whether anything came.

        Raises:
            QueuePoisoned: nothing can be kept any more.
        """
        self._send_waiting()
        came = False
        for number, box in enumerate(self._boxes):
            if self._queue_is_full():
                return came
            messages = self._take(box)
            if not messages:
                continue
            came = True
            absorbed = self._intake.absorb(messages)
            self._queue.append_many(absorbed.records)
            self._send(number, absorbed.notices)
            self._probe("noticed")
            if absorbed.is_urgent:
                self._on_urgent()
        return came

    def run(self, stop: Stop) -> None:
        """Rounds until ``stop``, then until the mailboxes are empty (2 s at most)."""
        self.greet()
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

    def _take(self, box: IngestMailbox) -> Sequence[Incoming]:
        try:
            return box.take(TAKE_MESSAGES, TAKE_BYTES)
        except MessageDamaged as exc:  # its cuts come again after the pair's rewind
            log.error("message-discarded", error=str(exc))
        except MailboxCorrupt as exc:
            if self._damage is None:  # once: it stays so until the supervisor has made the segment anew
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
        asleep: list[IngestMailbox] = []
        try:
            for box in self._boxes:
                if not box.prepare_sleep():
                    return
                asleep.append(box)
            select.select([stop.fileno(), *(box.fileno() for box in asleep)], [], [], BACKSTOP_S)
        except MailboxCorrupt:
            stop.wait(BACKSTOP_S)  # ``take`` has reported it; do not spin on it
        finally:
            for box in asleep:
                box.awake()

    def _send(self, number: int, notices: Sequence[Notice]) -> None:
        for notice in notices:
            key = (number, notice.recipient)
            waiting = self._waiting.get(key)
            if waiting:
                waiting.append(notice.payload)  # behind those before it
            elif not self._post(number, notice.recipient, notice.payload):
                self._waiting[key] = deque([notice.payload], maxlen=MAX_WAITING_NOTICES)

    def _send_waiting(self) -> None:
        for (number, recipient), waiting in list(self._waiting.items()):
            while waiting and self._post(number, recipient, waiting[0]):
                waiting.popleft()
            if not waiting:
                del self._waiting[number, recipient]

    def _post(self, number: int, recipient: str, payload: bytes) -> bool:
        """False when the recipient has no room; what can never be delivered is dropped."""
        try:
            self._boxes[number].post(recipient, payload)
        except MailboxFull:
            return False
        except MailboxError as exc:
            log.warning("notice-not-deliverable", recipient=recipient, error=str(exc))
        return True
