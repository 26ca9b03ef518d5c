"""What becomes of requests for certificates, as events.

Thread: belongs to the inbound thread.

Source: P3; DESIGN.md 5 "Credentials".
"""

from __future__ import annotations

from typing import Final

from pmdaemon.errors import WireError
from pmdaemon.pki.certificates import Credential
from pmdaemon.poller import announcements
from pmdaemon.poller.peer import AgentPeer
from pmdaemon.poller.publisher import DBMANAGER, CutPublisher
from pmdaemon.runtime.clock import Clock
from pmdaemon.wire.session import error_code

REFUSAL_EVENT_NS: Final = 60 * 10**9  # a stranger who tries tokens must not fill the table of events


class Enrolments:
    """Tells of certificates made and refused."""

    def __init__(self, courier: CutPublisher, clock: Clock) -> None:
        self._courier = courier
        self._clock = clock
        self._next_event_ns: dict[str, int] = {}

    def made(self, conn: AgentPeer, held: Credential) -> None:
        """The desk has made a certificate. A renewed one counts from now on; a first one is an event."""
        if conn.credential is not None:
            conn.credential = held
            return
        text = f"gateway {held.name} was enrolled from {conn.address}"
        details = {"gateway_id": held.gateway_id, "serial": held.serial}
        row = announcements.event(
            "gateway-enrolled", "info", held.name, text, self._clock.unix_us(), **details
        )
        self._courier.news(row, DBMANAGER)

    def refused(self, conn: AgentPeer, error: WireError) -> None:
        """The desk has refused; an event, at most one in ``REFUSAL_EVENT_NS`` for each code."""
        now_ns, code = self._clock.monotonic_ns(), error_code(error)
        if now_ns < self._next_event_ns.get(code, 0):
            return
        self._next_event_ns[code] = now_ns + REFUSAL_EVENT_NS
        who = conn.credential.name if conn.credential is not None else conn.address
        text = f"no certificate for {who} ({code}): {error}"
        row = announcements.event("enrolment-refused", "warning", who, text, self._clock.unix_us(), code=code)
        self._courier.news(row, DBMANAGER)
