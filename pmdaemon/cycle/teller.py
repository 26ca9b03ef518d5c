"""Tells ``services`` every other second how full is what a process writes to (PRESSURE).

Best effort: without room it is not sent, and the next one says the same. Thread: the mailbox's poster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from pmdaemon.mailbox.errors import MailboxError
from pmdaemon.runtime.clock import Clock
from pmdaemon.wire import pressure

SERVICES = "services"


class Gauged(Protocol):
    """What is needed of a mailbox."""

    @property
    def name(self) -> str:
        """Of this participant."""

    def post(self, recipients: str, payload: bytes) -> object:
        """Deliver or raise MailboxFull."""

    def stats(self) -> dict[str, Any]:
        """Counters; ``full`` and ``ring_fill_ratio`` are used."""


class Teller:
    """See the module's text.

    Args:
        mailbox: where it posts, and whose rings it tells of.
        fullness: shares in use beside those of the rings.
        refused: counters beside the mailbox's own.
    """

    def __init__(
        self,
        mailbox: Gauged,
        clock: Clock,
        fullness: Callable[[], Mapping[str, float]],
        refused: Callable[[], Mapping[str, int]],
    ) -> None:
        self._mailbox = mailbox
        self._clock = clock
        self._fullness = fullness
        self._refused = refused
        self._due_ns = 0

    def tick(self) -> None:
        """Tell if it is time."""
        now_ns = self._clock.monotonic_ns()
        if now_ns < self._due_ns:
            return
        self._due_ns = now_ns + pressure.PERIOD_NS
        stats = self._mailbox.stats()
        fullness = {**stats["ring_fill_ratio"], **self._fullness()}
        refused = {"posts": stats["full"], **self._refused()}
        frame = pressure.encode(self._mailbox.name, self._clock.unix_us(), fullness, refused)
        try:
            self._mailbox.post(SERVICES, frame)
        except MailboxError:  # full, or a segment without that route
            return
