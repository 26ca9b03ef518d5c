"""What the link asks of an enforcer of caps.

A cap set is complete: a volume it does not name has no cap of the server's. Enforcers answer by *proof*:
``took`` is the generation that was certainly applied, not the one that was sent.
"""

from __future__ import annotations

from typing import Protocol

from pmdaemon.wire.messages.agent import CapSet


class Enforcer(Protocol):
    """One enforcer of caps. Thread: the link's loop only."""

    @property
    def name(self) -> str:
        """Unique within the agent: the plane's name."""

    @property
    def reachable(self) -> bool:
        """Whether caps can be handed over now."""

    @property
    def volumes(self) -> frozenset[str]:
        """Volumes whose caps it enforces; it ignores all others."""

    @property
    def took(self) -> int | None:
        """Generation that was certainly applied, None before the first."""

    @property
    def refused(self) -> int | None:
        """Generation that was certainly not applied; the former caps hold."""

    def apply(self, caps: CapSet, lease_us: int) -> None:
        """Hand over a set; ``lease_us`` is what is left of its lease now."""

    def renew_lease(self) -> None:
        """The server renewed the lease of all caps."""

    def lapsed(self) -> None:
        """The lease of the caps has ended: static caps hold from now on."""
