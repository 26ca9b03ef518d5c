"""Caps and their lease as the link knows them. Pure; time comes as an argument.

The planes hold the caps and count the lease themselves; the link keeps the newest set so that a plane that
comes back gets it at once, *if its lease still runs* and only for what is left of it. A link that was
restarted knows no set: the planes still hold theirs, the server sends it again on registration, and renewals
are passed on meanwhile.

CAPS_ACK is due when every reachable enforcer has proved that it took the set (see ``enforcers.base``).
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway_agent.enforcers.base import Enforcer
from pmdaemon.wire.messages.agent import CapsAck, CapSet


class CapsKeeper:
    """State: the set in force, the end of its lease (monotonic ns), whether its acknowledgement is owed."""

    def __init__(self, enforcers: Sequence[Enforcer]) -> None:
        self._enforcers = enforcers
        self._held: CapSet | None = None
        self._lease_end_ns = 0
        self._ack_owed = False

    def replace(self, caps: CapSet, now_ns: int) -> None:
        """The server sent a set: hand it to every enforcer that is reachable."""
        self._held = caps
        self._lease_end_ns = now_ns + caps.lease_us * 1000
        self._ack_owed = True
        for enforcer in self._enforcers:
            if enforcer.reachable:
                enforcer.apply(caps, caps.lease_us)

    def enforcer_back(self, enforcer: Enforcer, now_ns: int) -> None:
        """An enforcer became reachable: give it what still holds."""
        left_us = (self._lease_end_ns - now_ns) // 1000
        if self._held is not None and left_us > 0:
            enforcer.apply(self._held, left_us)

    def renew(self, now_ns: int) -> None:
        """The server renewed the lease of all caps."""
        if self._held is not None:
            self._lease_end_ns = now_ns + self._held.lease_us * 1000
        for enforcer in self._enforcers:
            enforcer.renew_lease()

    def server_gone(self) -> None:
        """The session ended: no acknowledgement is owed to it; the caps hold until their lease ends."""
        self._ack_owed = False

    @property
    def lease_end_ns(self) -> int | None:
        """When the caps in force end without renewal; None when nothing is in force."""
        return self._lease_end_ns if self._held is not None and self._held.caps else None

    def expire(self, now_ns: int) -> CapSet | None:
        """Forget a set whose lease has ended; returns it, once."""
        end_ns = self.lease_end_ns
        if end_ns is None or now_ns < end_ns:
            return None
        lapsed, self._held, self._ack_owed = self._held, None, False
        return lapsed

    def due_ack(self) -> CapsAck | None:
        """The CAPS_ACK that is due now, once; None while proof is missing."""
        if not self._ack_owed or self._held is None:
            return None
        gen = self._held.gen
        reachable = [enforcer for enforcer in self._enforcers if enforcer.reachable]
        refusing = [enforcer.name for enforcer in reachable if enforcer.refused == gen]
        if not self._enforcers or refusing:
            self._ack_owed = False
            refused = f"refused by {', '.join(refusing)}, whose log says why; the former caps hold there"
            reason = refused if refusing else "this gateway only observes: it has no data plane"
            return CapsAck(gen, ok=False, reason=reason)
        if not reachable or any(enforcer.took != gen for enforcer in reachable):
            return None
        self._ack_owed = False
        return CapsAck(gen, ok=True, reason="")
