"""One data plane as the link sees it: frames on its control socket. Bytes in, bytes out; no socket.

    DP_HELLO ◄── on every connection, first        DP_COLLECT, DP_CAPS, DP_THRESHOLDS, DP_LEASE ──►
    DP_CUT   ◄── exactly one for each DP_COLLECT

Unknown kinds are ignored (a newer plane may announce something); a DP_CUT that was not asked for, or anything
before DP_HELLO, closes the connection.
"""

from __future__ import annotations

from collections.abc import Iterable

from gateway_agent.enforcers.nbd import NbdEnforcer
from gateway_agent.errors import PlaneLost
from gateway_agent.sources.nbd import NbdSource
from pmdaemon.errors import WireError
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.messages.agent import PLANE_FEATURES
from pmdaemon.wire.messages.base import WireMessage
from pmdaemon.wire.messages.planes import DpHello


class PlaneClient:
    """State of one control connection; ``source`` and ``enforcer`` are its two faces.

    Thread: the link's loop only.

    Args:
        name: of the plane.
        got: id of its last DP_CUT in the spool, 0 for none.
        volumes: that it serves by the agent's file.
        plane: of a process that has handed over to another one, what both serve (``Sample``).

    ``outgoing`` are bytes for the socket: the shell takes them away as they are sent.
    """

    def __init__(self, name: str, got: int, volumes: Iterable[str] = (), plane: str = "") -> None:
        self.name = name
        self.outgoing = bytearray()
        self.source = NbdSource(name, self._send, got, plane)
        self.enforcer = NbdEnforcer(name, self._send, self.source, frozenset(volumes))
        self.pid = 0
        self.listening: list[str] = []
        self.leaving: str | None = None  # how the process on this connection is called from now on
        self.is_stopping = False
        self.config: str | None = None  # digest of the part that it runs with
        self.problems: tuple[str, ...] = ()
        self.features: tuple[str, ...] = PLANE_FEATURES  # until it has said what it can do
        self._reader = frame.FrameReader()

    def _send(self, data: bytes) -> None:
        self.outgoing += data

    def send(self, message: WireMessage) -> None:
        """Queue one message."""
        self._send(message.encode())

    def opened(self) -> None:
        """The control socket is connected."""
        self.outgoing = bytearray()
        self._reader = frame.FrameReader()
        self.leaving = None
        self.is_stopping = False
        self.source.connected()
        self.enforcer.connected()

    def closed(self) -> None:
        """The control socket is gone."""
        self.outgoing = bytearray()
        self.source.disconnected()
        self.enforcer.disconnected()

    @property
    def has_more(self) -> bool:
        """Whether it stops, and waits for its last counts to be collected."""
        return self.is_stopping and self.source.can_be_asked and not self.source.awaits_answer

    def receive(self, data: bytes) -> bool:
        """Take in bytes; returns whether the plane's exports changed.

        Raises:
            PlaneLost: the bytes are not the protocol; close the connection.
        """
        changed = False
        try:
            for received in list(self._reader.feed(data)):
                if received.kind == Kind.DP_HELLO:
                    changed = self._hello(DpHello.parse(received.header, self.name)) or changed
                elif received.kind == Kind.DP_CUT:
                    if not self.source.awaits_answer:
                        raise PlaneLost(self.name, "sent a cut that was not asked for")
                    self.source.answered(received)
                    self.enforcer.source_answered()
        except WireError as exc:
            raise PlaneLost(self.name, str(exc)) from exc
        return changed

    def _hello(self, hello: DpHello) -> bool:
        if hello.leaving is not None:  # what it serves from here on is the next process's business
            self.leaving = hello.leaving
            return False
        self.is_stopping, self.pid, self.listening = hello.is_stopping, hello.pid, hello.listening
        self.config, self.problems, self.features = hello.config, hello.problems, hello.features
        return self.source.introduced(hello.exports)
