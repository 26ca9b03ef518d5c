"""Tells ``services`` every other second how full is what a process writes to, and its problems (PRESSURE).

Best effort: without room it is not sent, and the next one says the same. Thread: the mailbox's poster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from pmdaemon.mailbox.errors import MailboxError
from pmdaemon.runtime.clock import Clock
from pmdaemon.wire.messages.server import PRESSURE_PERIOD_NS, Pressure, Problem

SERVICES = "services"


class MailboxGauges(Protocol):
    """What is needed of a mailbox."""

    @property
    def name(self) -> str:
        """Of this participant."""

    def post(self, recipients: str, payload: bytes) -> object:
        """Deliver or raise MailboxFull."""

    def stats(self) -> dict[str, Any]:
        """Counters; ``full`` and ``ring_fill_ratio`` are used."""


class BackpressureReporter:
    """See the module's text.

    Args:
        mailbox: where it posts, and whose rings it tells of.
        fullness: shares in use beside those of the rings.
        refused: counters beside the mailbox's own.
        problems: what the process cannot use just now.
        copies: further mailboxes, with the recipient there.
    """

    def __init__(
        self,
        mailbox: MailboxGauges,
        clock: Clock,
        fullness: Callable[[], Mapping[str, float]],
        refused: Callable[[], Mapping[str, int]],
        problems: Callable[[], Sequence[Problem]] = tuple,
        copies: Sequence[tuple[MailboxGauges, str]] = (),
    ) -> None:
        self._mailbox = mailbox
        self._clock = clock
        self._fullness = fullness
        self._refused = refused
        self._problems = problems
        self._recipients = ((mailbox, SERVICES), *copies)
        self._due_ns = 0

    def tick(self) -> None:
        """Tell if it is time."""
        if self._clock.monotonic_ns() >= self._due_ns:
            self.tell()

    def tell(self) -> None:
        """Tell now."""
        self._due_ns = self._clock.monotonic_ns() + PRESSURE_PERIOD_NS
        stats = self._mailbox.stats()
        fullness = {**stats["ring_fill_ratio"], **self._fullness()}
        refused = {"posts": stats["full"], **self._refused()}
        now_us, problems = self._clock.unix_us(), self._problems()
        frame = Pressure(self._mailbox.name, now_us, fullness, refused, tuple(problems)).encode()
        for mailbox, recipient in self._recipients:
            with suppress(MailboxError):  # full, or a segment without that route
                mailbox.post(recipient, frame)
