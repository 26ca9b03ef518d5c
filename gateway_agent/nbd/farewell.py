"""The end of a connection to an upstream that no client uses any more: all answers, DISC, and then its close.

    answers are owed ──all are here──► DISC, or ABORT, is said ──it closes──► closed
          └──────────────── FAREWELL_NS, or a mistake of the upstream ──────────┘

Closed earlier, the connection would refuse what the upstream still writes: nbdkit reports an error for each
client that goes, and 1.32 ends with a failed assertion now and then when answers are behind DISC, which takes
the volume from everyone. What comes is dropped. A request that was sent in part cannot be completed: then our
direction is shut down within it, and the upstream's answers are taken all the same.

Thread: the loop's.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gateway_agent.nbd.buffers import InFlight
from gateway_agent.nbd.loop import IN, OUT, EventLoop
from gateway_agent.nbd.replies import Replies
from gateway_agent.nbd.sockets import Connection

FAREWELL_NS: Final = 10 * 10**9  # answers of a storage that hangs are not waited for
_RECEIVE_BYTES: Final = 262_144


@dataclass
class OwedAnswers:
    """What an upstream has still to answer.

    Attributes:
        reader: of its replies.
        inflight: the requests.
        partial_header: first bytes of a reply that have arrived.
        on_end: called once, when all have come or are not waited for any more.
    """

    reader: Replies
    inflight: InFlight
    partial_header: bytes
    on_end: Callable[[], None]

    @property
    def is_empty(self) -> bool:
        """Whether nothing is owed."""
        return not self.inflight and not self.reader.payload_left

    def take(self, data: bytes) -> None:
        """Bytes of the upstream.

        Raises:
            NbdProtocolError: they are no answers to these requests.
        """
        view = memoryview(bytearray(self.partial_header + data))
        usable, _ = self.reader.feed(view, 0, self.inflight, 0)
        self.partial_header = bytes(view[usable:])


class UpstreamFarewell:
    """See the module docstring. State: what is owed, and what of the last words was not sent.

    Args:
        loop: what watches it.
        sock: not watched; owned from now on.
        words: the last ones; none for a connection within whose requests our direction must end.
        owed: None for nothing.
        on_closed: called once.
    """

    def __init__(
        self,
        loop: EventLoop,
        sock: Connection,
        words: bytes,
        owed: OwedAnswers | None = None,
        on_closed: Callable[[UpstreamFarewell], None] = lambda _farewell: None,
    ) -> None:
        self._loop = loop
        self._sock = sock
        self._words = words
        self._owed = owed
        self._on_closed = on_closed
        self.is_closed = False
        loop.watch(sock.fileno(), IN, self._on_event, lambda _exc: self.close())
        loop.at(self, loop.clock.monotonic_ns() + FAREWELL_NS, lambda _now_ns: self.close())
        if not words:
            self._shut_down()
        self._go_on()

    def _go_on(self) -> None:
        """Say the last words, as soon as nothing is owed."""
        if self._owed is not None:
            if not self._owed.is_empty:
                return
            self._end_owed()
        try:
            self._words = self._words[self._sock.send(self._words) :] if self._words else b""
        except BlockingIOError:
            pass
        except OSError:
            self.close()
            return
        self._loop.want(self._sock.fileno(), IN | OUT if self._words else IN)

    def _end_owed(self) -> None:
        owed, self._owed = self._owed, None
        if owed is not None:
            owed.on_end()

    def _on_event(self, _events: int) -> None:
        try:
            data = self._sock.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            self._go_on()
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        if self._owed is not None:
            self._owed.take(data)
        self._go_on()

    def _shut_down(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the connection now. Safe to call twice."""
        if self.is_closed:
            return
        self.is_closed = True
        self._loop.cancel(self)
        self._loop.forget(self._sock.fileno())
        with contextlib.suppress(OSError):
            self._sock.close()
        self._end_owed()
        self._on_closed(self)


def begin_farewell(
    under_way: set[UpstreamFarewell], loop: EventLoop, sock: Connection, words: bytes, owed: OwedAnswers
) -> None:
    """Begin one that is in ``under_way`` until it has ended; see ``UpstreamFarewell``."""
    farewell = UpstreamFarewell(loop, sock, words, owed, under_way.discard)
    if not farewell.is_closed:
        under_way.add(farewell)
