"""What the gateway side of the code needs of a connection (``poller.connection`` is the real one).

Keeps ``gateways`` free of sockets, and lets its tests use a list of frames instead.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Protocol

from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.session import Session

if TYPE_CHECKING:
    from pmdaemon.pki.certificates import Credential
    from pmdaemon.poller.gateway import Gateway
    from pmdaemon.wire.messages.agent import Hello


class Sent(Enum):
    """What became of frames given to ``AgentPeer.send``."""

    SENT = "sent"
    """All bytes are in the kernel."""
    WAITING = "waiting"
    """Some wait for the socket; write interest is registered."""
    OVERFLOW = "overflow"
    """The peer reads too slowly: it is being disconnected."""
    GONE = "gone"
    """The connection is closed or draining; the frames were dropped."""


class AgentPeer(Protocol):
    """One agent's connection."""

    address: str
    last_received_ns: int
    session: Session
    hello: Hello | None
    schema_seen: bool
    gateway: Gateway | None
    credential: Credential | None

    def send(self, *frames: tuple[Kind, bytes]) -> Sent:
        """Send frames as one write. Any thread."""

    def send_poll(self, data: bytes) -> Sent:
        """``send`` of a POLL frame alone. Any thread."""

    def finish(self, kind: Kind, last_frame: bytes, reason: str, now_ns: int) -> None:
        """Send a last frame (ERROR or BYE) and drain. Inbound thread."""
