"""Failed logins for the audit log: one row at once, then one a span of time with their count.

The audit log takes no change and keeps three years, so a row for each wrong password would let anybody who
can reach the form fill it. The first failure of an account from one place in the network is recorded at once,
as those who look want to see it; the others of the next ``SPAN_US`` are counted, and recorded as one row with
the count and the times of the first and the last: when that has passed, when the right password comes, or at
the end of the process. Names that are no account count as one account, with the newest few of them as
examples; when ``MOST_KEYS`` are counted, further ones count as one. So an hour adds at most two rows for each
of ``MOST_KEYS`` + 1, and one more for each login.

What is lost by a crash: counts of the last span, never that there was a failure.

State: ``_counts``, under ``_lock``. Thread: any.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, Final

from pmdaemon.runtime.clock import Clock
from sla_server.api.passwords import network_of

SPAN_US: Final = 3_600_000_000
MOST_KEYS: Final = 64
MOST_NAMES: Final = 5
NO_ACCOUNT: Final = "no such account"
OTHERS: Final = ("many accounts", "many addresses")
Entry = tuple[str, dict[str, Any]]
"""Subject, and what the row says after it."""


@dataclass
class _Count:
    """Failures of one key that are not recorded yet."""

    since_us: int
    count: int = 0
    first_us: int = 0
    last_us: int = 0
    address: str = ""
    names: list[str] = field(default_factory=list)

    def add(self, now_us: int, address: str, name: str) -> None:
        self.count += 1
        self.first_us = self.first_us or now_us
        self.last_us, self.address = now_us, address
        if name:
            self.names = [name, *(each for each in self.names if each != name)][:MOST_NAMES]

    def entry(self, key: tuple[str, str]) -> Entry:
        after: dict[str, Any] = {
            "address": key[1] if key == OTHERS else self.address,
            "count": self.count,
            "from_us": self.first_us,
            "to_us": self.last_us,
        }
        return key[0], after | ({"names": self.names} if self.names else {})


class FailedLogins:
    """See the module."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, str], _Count] = {}

    def add(self, subject: str, address: str, *, is_account: bool = True) -> list[Entry]:
        """Note a failure; returns what is to be recorded now, what others have left to say among it."""
        now_us = self._clock.unix_us()
        with self._lock:
            due = self._take_due(now_us)
            key = (subject if is_account else NO_ACCOUNT, network_of(address))
            name = "" if is_account else subject
            found = self._counts.get(key)
            if found is None and len(self._counts) >= MOST_KEYS:
                key, found = OTHERS, self._counts.get(OTHERS)
            if found is not None:
                found.add(now_us, address, name)
                return due
            self._counts[key] = _Count(now_us)
        first: dict[str, Any] = {"address": address}
        return [*due, (key[0], first | ({"names": [name]} if name else {}))]

    def succeeded(self, subject: str, address: str) -> list[Entry]:
        """The right password has come: what is to be recorded of the failures before it."""
        key = subject, network_of(address)
        with self._lock:
            found = self._counts.pop(key, None)
        return [] if found is None or not found.count else [found.entry(key)]

    def due(self) -> list[Entry]:
        """What is to be recorded of spans that have passed."""
        with self._lock:
            return self._take_due(self._clock.unix_us())

    def rest(self) -> list[Entry]:
        """All that is not recorded yet, at the end of the process."""
        with self._lock:
            found = [one.entry(key) for key, one in self._counts.items() if one.count]
            self._counts.clear()
        return found

    def _take_due(self, now_us: int) -> list[Entry]:
        """Spans that have passed; a clock that has gone back ends them, too."""
        over = [
            key for key, one in self._counts.items() if not one.since_us <= now_us < one.since_us + SPAN_US
        ]
        ended = [(key, self._counts.pop(key)) for key in over]
        return [one.entry(key) for key, one in ended if one.count]
