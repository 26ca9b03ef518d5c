"""Messages kept for each recipient until its mailbox has room or, as an option, until it has answered.

A post never waits, so a full recipient refuses. What must not be lost for that reason is kept here, in order,
and posted by the next ``flush``; a full recipient holds no other up. With ``Resend`` messages stay until they
are answered. One without an answer is posted again after ``first_ns``, *with everything after it*, so that
messages about one thing arrive in their order and an old one never comes last; for that reason answered
messages wait behind an unanswered one. The pause doubles, up to ``last_ns``, while no answer comes.

**Bounds.** ``limit_bytes`` and ``limit_messages`` hold for each recipient. Beyond them a new message is
refused, counted in ``lost`` and logged, or, with ``drop_oldest``, the oldest goes and is counted; once the
recipient has taken the rest, ``overflowed`` names it, and the owner can report everything again. A message
with a ``key`` reports a state (the newest snapshot): a newer one takes the place of one that still waits, and
is never refused.

Messages not yet posted die with their process.

Thread: one, the posting thread of the mailboxes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Final, Protocol

import structlog

from pmdaemon.mailbox.errors import MailboxError, MailboxFull

log = structlog.get_logger("mailbox")
OTHERS: Final = "*"
"""As a recipient: the mailbox of all recipients that have none of their own."""
_BATCH: Final = 256  # messages a post, so that a refusal of tens of thousands costs what one of few does


class PostingMailbox(Protocol):
    """The posting side of a mailbox."""

    def post(self, recipients: str | Sequence[str], payload: bytes | memoryview) -> object:
        """Post a copy to each; raises MailboxFull, which names those without room."""

    def post_many(self, recipient: str, payloads: Sequence[bytes]) -> object:
        """Post in order; raises MailboxFull, whose ``posted`` of them were posted."""


@dataclass(frozen=True, slots=True)
class Resend:
    """Pauses after which messages without an answer are posted again: the first, and the longest."""

    first_ns: int
    last_ns: int


class _Queue:
    """Messages to one recipient.

    Attributes:
        messages: by key, oldest first. size_bytes: of their payloads.
        posted: messages at the front that are posted; they stay until they are answered.
        answered: keys of posted messages that wait for an older one's answer.
        since_ns: when the first of them was posted, or the newest answer came. resend_ns: the present pause.
        has_dropped: the oldest had to go, and ``overflowed`` has not named the recipient since.
    """

    __slots__ = ("answered", "has_dropped", "messages", "posted", "resend_ns", "since_ns", "size_bytes")

    def __init__(self, resend: Resend | None) -> None:
        self.messages: OrderedDict[Hashable, bytes] = OrderedDict()
        self.size_bytes = self.posted = self.since_ns = 0
        self.answered: set[Hashable] = set()
        self.resend_ns = resend.first_ns if resend else 0
        self.has_dropped = False

    def append(self, key: Hashable, payload: bytes) -> None:
        self.messages[key] = payload
        self.size_bytes += len(payload)

    def remove(self, key: Hashable) -> None:
        self.size_bytes -= len(self.messages.pop(key))

    def remove_oldest(self) -> None:
        key, payload = self.messages.popitem(last=False)
        self.size_bytes -= len(payload)
        self.answered.discard(key)
        self.posted = max(self.posted - 1, 0)


class MailboxSender:
    """See the module.

    Args:
        mailboxes: by recipient; ``OTHERS`` is the mailbox of all others.
        limit_bytes, limit_messages: of what is kept for one recipient.
        drop_oldest: beyond them the oldest message goes; else a new one is refused.
        resend: keep messages until ``answered``, and post them again. Then ``put_all`` is the way in.
        on_undeliverable: a message that can never be posted is dropped and reported here; else it is raised.

    Attributes:
        lost: messages refused or dropped because a limit was reached.
        full: times that a recipient had no room.
    """

    def __init__(
        self,
        mailboxes: Mapping[str, PostingMailbox],
        limit_bytes: int,
        *,
        limit_messages: int | None = None,
        drop_oldest: bool = False,
        resend: Resend | None = None,
        on_undeliverable: Callable[[str, MailboxError], None] | None = None,
    ) -> None:
        self._mailboxes = mailboxes
        self._limit_bytes = limit_bytes
        self._limit_messages = limit_messages
        self._drop_oldest = drop_oldest
        self._resend = resend
        self._on_undeliverable = on_undeliverable
        self._queues: dict[str, _Queue] = {}
        self._serial = count()
        self.lost = 0
        self.full = 0

    def put(self, recipient: str, payload: bytes, key: Hashable | None = None) -> bool:
        """Queue a message for the next ``flush``; False if it was refused because too much waits already."""
        assert self._resend is None  # a key would name an answer, and a posted message could be replaced
        queue = self._queue(recipient)
        if key is not None:
            if key in queue.messages:
                queue.remove(key)
        elif not self._drop_oldest and self._is_beyond(queue, 1, len(payload)):
            self.lost += 1
            log.error(
                "message-lost",
                recipient=recipient,
                waiting=len(queue.messages),
                waiting_bytes=queue.size_bytes,
                lost=self.lost,
            )
            return False
        queue.append(("serial", next(self._serial)) if key is None else key, payload)
        self._drop_beyond(queue)
        return True

    def put_all(self, recipient: str, messages: Sequence[tuple[Hashable, bytes]]) -> bool:
        """Queue messages, all or none, each with a key that no other has; False if they were refused."""
        queue = self._queue(recipient)
        size_bytes = sum(len(payload) for _, payload in messages)
        if not self._drop_oldest and self._is_beyond(queue, len(messages), size_bytes):
            self.lost += len(messages)
            return False
        for key, payload in messages:
            queue.append(key, payload)
        self._drop_beyond(queue)
        return True

    def _drop_beyond(self, queue: _Queue) -> None:
        while self._drop_oldest and len(queue.messages) > 1 and self._is_beyond(queue, 0, 0):
            queue.remove_oldest()
            queue.has_dropped = True
            self.lost += 1

    def send(self, payload: bytes, *recipients: str) -> None:
        """Post to all recipients at once, or queue the message for those without room or with a queue."""
        assert self._resend is None  # as in ``put``
        free = [name for name in recipients if not self._queue(name).messages]
        waits = [name for name in recipients if name not in free]
        for mailbox in dict.fromkeys(map(self._mailbox, free)):
            names = [name for name in free if self._mailbox(name) is mailbox]
            try:
                mailbox.post(names[0] if len(names) == 1 else names, payload)
            except MailboxFull as full:
                self.full += 1
                waits += [name for name in names if name in full.recipients]
            except MailboxError as exc:
                if self._on_undeliverable is None:
                    raise
                self._on_undeliverable(", ".join(names), exc)
        for name in waits:
            self.put(name, payload)

    def flush(self, now_ns: int = 0) -> int:
        """Post what has room, and again what was not answered in time; returns how many were due again."""
        due = 0
        for recipient, queue in self._queues.items():
            if self._resend is not None:
                due += self._rewind(queue, self._resend, now_ns)
            while unposted := list(islice(queue.messages.values(), queue.posted, queue.posted + _BATCH)):
                posted = self._post(recipient, unposted)
                if self._resend is not None:
                    queue.posted += posted
                else:
                    for _ in range(posted):
                        queue.remove_oldest()
                if posted < len(unposted):
                    break
        return due

    @staticmethod
    def _rewind(queue: _Queue, resend: Resend, now_ns: int) -> int:
        due = 0
        if queue.posted and now_ns - queue.since_ns >= queue.resend_ns:
            due, queue.posted = queue.posted, 0
            queue.resend_ns = min(2 * queue.resend_ns, resend.last_ns)
        if not queue.posted:
            queue.since_ns = now_ns
        return due

    def _post(self, recipient: str, payloads: Sequence[bytes]) -> int:
        """Post the first payloads that find room; returns their number."""
        mailbox = self._mailbox(recipient)
        try:
            mailbox.post_many(recipient, payloads)
        except MailboxFull as full:
            self.full += 1
            return full.posted
        except MailboxError:
            if self._on_undeliverable is None:
                raise
            return self._post_singly(recipient, payloads, self._on_undeliverable)
        return len(payloads)

    def _post_singly(
        self, recipient: str, payloads: Sequence[bytes], report: Callable[[str, MailboxError], None]
    ) -> int:
        """As ``_post``, when one of them can never be posted: that one counts as posted."""
        for number, payload in enumerate(payloads):
            try:
                self._mailbox(recipient).post(recipient, payload)
            except MailboxFull:
                self.full += 1
                return number
            except MailboxError as exc:
                report(recipient, exc)
        return len(payloads)

    def post_again(self, recipient: str) -> None:
        """Post everything without an answer at the next ``flush``: the mailbox it was posted to is gone."""
        self._queue(recipient).posted = 0

    def answered(self, recipient: str, key: Hashable, now_ns: int) -> bool:
        """The recipient has answered this message; False if it is not known, or was answered before."""
        queue = self._queue(recipient)
        if key not in queue.messages or key in queue.answered:
            return False
        assert self._resend is not None  # else no message waits for an answer
        queue.answered.add(key)
        queue.since_ns = now_ns
        queue.resend_ns = self._resend.first_ns
        while queue.messages and next(iter(queue.messages)) in queue.answered:
            queue.remove_oldest()
        return True

    def waiting(self, recipient: str | None = None) -> int:
        """Messages not posted, or not answered, yet, for one recipient or for all."""
        queues = self._queues.values() if recipient is None else [self._queue(recipient)]
        return sum(len(queue.messages) - len(queue.answered) for queue in queues)

    def waiting_bytes(self, recipient: str) -> int:
        """Payload bytes kept for one recipient."""
        return self._queue(recipient).size_bytes

    def overflowed(self) -> list[str]:
        """Recipients that have taken what was kept, but not what was dropped before; each is named once."""
        found = [name for name, queue in self._queues.items() if queue.has_dropped and not queue.messages]
        for name in found:
            self._queues[name].has_dropped = False
        return found

    def _queue(self, recipient: str) -> _Queue:
        queue = self._queues.get(recipient)
        if queue is None:
            queue = self._queues[recipient] = _Queue(self._resend)
        return queue

    def _mailbox(self, recipient: str) -> PostingMailbox:
        return self._mailboxes[recipient if recipient in self._mailboxes else OTHERS]

    def _is_beyond(self, queue: _Queue, messages: int, size_bytes: int) -> bool:
        """Whether so much more would exceed a limit."""
        return queue.size_bytes + size_bytes > self._limit_bytes or (
            self._limit_messages is not None and len(queue.messages) + messages > self._limit_messages
        )
