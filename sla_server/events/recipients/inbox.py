"""The inbox of the page: an event is confirmed when its row is in SQL, where people read and acknowledge it.

The engine gives the ``store``, which hands rows to dbmanager and says when they are durable; while the
database is away the notices wait here, and the other recipients go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from pmdaemon.runtime.clock import Deadline
from sla_server.events.recipients.base import CONFIRMED, Answer, Notice, retry


class InboxStore(Protocol):
    """Where rows go."""

    def store(self, rows: Sequence[dict[str, Any]], deadline: Deadline) -> str:
        """Make rows of the inbox durable; "" or why that failed. A row that is there already stays."""


class Inbox:
    """See the module."""

    kind = "inbox"

    def __init__(self, name: str, store: InboxStore | None, *, timeout_s: float, most_notices: int) -> None:
        self.name = name
        self.timeout_s = timeout_s
        self.most_notices = most_notices
        self._store = store

    def deliver(self, notices: Sequence[Notice], deadline: Deadline) -> Answer:
        """See ``Recipient``."""
        if self._store is None:
            return retry("there is no database here to store it in")
        problem = self._store.store([notice.event.row() for notice in notices], deadline)
        return retry(problem) if problem else CONFIRMED

    def close(self) -> None:
        """See ``Recipient``."""
