"""Connections that have not registered yet: how many there may be, how long they may take, what is logged.

A stranger costs a descriptor and memory (less than a session: ``make bench-tls``) and has proved nothing. At
most ``limit_for`` are kept: 1,024 with TLS, and never more than half of the descriptors, so that the other
half is left to gateways. When one more comes, the oldest goes if it has had ``PATIENCE_NS`` (an honest
handshake takes milliseconds, a slow-loris takes for ever), else the newcomer goes: in a storm of honest
reconnects those who wait are about to be served, and who is turned away dials again after a random wait.

Log lines about strangers are limited too, or ten thousand attempts would fill the disk.

Thread: the inbound thread's.
"""

from __future__ import annotations

import resource
from typing import Final, Generic, TypeVar

MAX_STRANGERS: Final = 1024  # with TLS
MAX_PLAIN: Final = 8192  # without: half of the default limit of open files, and twice a large fleet
PATIENCE_NS: Final = 2 * 10**9
TLS_LIMIT_NS: Final = 5 * 10**9  # a handshake is two round trips
HANDSHAKES_A_ROUND: Final = 4  # about 1 ms each: what a registered gateway waits for behind a storm

Conn = TypeVar("Conn")


def limit_for(tls: bool) -> int:
    """How many strangers this process may have, by what they cost and its limit of open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    half = MAX_PLAIN if soft == resource.RLIM_INFINITY else min(MAX_PLAIN, soft // 2)
    return min(MAX_STRANGERS, half) if tls else half


class UnregisteredConnections(Generic[Conn]):
    """Unregistered connections, oldest first."""

    def __init__(self, limit: int = MAX_STRANGERS) -> None:
        self._limit = limit
        self._since: dict[Conn, int] = {}

    def __len__(self) -> int:
        return len(self._since)

    def admit(self, now_ns: int) -> tuple[bool, Conn | None]:
        """Whether a newcomer may stay, and who must go for it."""
        if len(self._since) < self._limit:
            return True, None
        oldest, since_ns = next(iter(self._since.items()))
        if now_ns - since_ns >= PATIENCE_NS:
            return True, oldest
        return False, None

    def add(self, conn: Conn, now_ns: int) -> None:
        """A connection has come."""
        self._since[conn] = now_ns

    def remove(self, conn: Conn) -> None:
        """It has registered, or is gone. Harmless for one that is not here."""
        self._since.pop(conn, None)
