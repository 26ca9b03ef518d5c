"""Messages that wait for room: a bounded queue for each recipient, in order, tried again each tick.

Nothing is lost silently. A message with a ``key`` stands for a state (newest snapshot, newest caps of a
gateway): a newer one takes the place of one that still waits. Others (answers) wait in order up to a byte
limit; what does not fit is counted in ``lost`` and logged as an error.

RECORDs have a queue of their own, ``journal``, because they wait for an answer too.

Thread: the main loop only (one poster a mailbox).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from itertools import count
from typing import Protocol

import structlog

from pmdaemon.mailbox.errors import MailboxFull

log = structlog.get_logger("outbox")


class PostingMailbox(Protocol):
    """The posting side of a mailbox."""

    def post(self, recipients: str | Sequence[str], payload: bytes) -> None:
        """Post; raises MailboxFull."""

    def post_many(self, recipient: str, payloads: Sequence[bytes]) -> None:
        """Post in order; raises MailboxFull, whose ``posted`` of them were posted."""


class Outbox:
    """See the module.

    Attributes:
        lost: messages dropped because the limit was reached
        full: times a recipient had no room
    """

    def __init__(self, routes: Mapping[str, PostingMailbox], limit_bytes: int) -> None:
        self._routes = routes
        self._limit_bytes = limit_bytes
        self._waiting: dict[str, OrderedDict[Hashable, bytes]] = {}
        self._bytes: dict[str, int] = {}
        self._serial = count()
        self.lost = 0
        self.full = 0

    def put(self, recipient: str, payload: bytes, key: Hashable | None = None) -> bool:
        """Queue one frame; False if it was dropped because too much waits already."""
        waiting = self._waiting.setdefault(recipient, OrderedDict())
        size = self._bytes.get(recipient, 0)
        if key is not None and key in waiting:
            size -= len(waiting.pop(key))
        elif key is None and size + len(payload) > self._limit_bytes:
            self.lost += 1
            log.error(
                "message-lost", recipient=recipient, waiting=len(waiting), waiting_bytes=size, lost=self.lost
            )
            return False
        waiting[("serial", next(self._serial)) if key is None else key] = payload
        self._bytes[recipient] = size + len(payload)
        return True

    def flush(self) -> None:
        """Post what has room."""
        for recipient, waiting in self._waiting.items():
            mailbox = self._routes[recipient if recipient in self._routes else "*"]
            if not waiting:
                continue
            posted = len(waiting)
            try:
                mailbox.post_many(recipient, list(waiting.values()))
            except MailboxFull as full:
                self.full += 1
                posted = full.posted
            for _ in range(posted):
                _, payload = waiting.popitem(last=False)
                self._bytes[recipient] -= len(payload)

    def waiting(self, recipient: str | None = None) -> int:
        """Messages that wait, for one recipient or for all."""
        if recipient is not None:
            return len(self._waiting.get(recipient, ()))
        return sum(len(queue) for queue in self._waiting.values())
