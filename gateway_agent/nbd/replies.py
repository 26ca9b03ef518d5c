"""Reading an upstream's simple replies while they pass through: where each ends, and whose it is. Sans-IO.

A simple reply does not tell its own length: a read's payload has the length that was asked for, unless the
error field is set. So the reader looks each cookie up among the requests in flight.
"""

from __future__ import annotations

from typing import Final

from gateway_agent.errors import NbdProtocolError
from gateway_agent.nbd import protocol as p
from gateway_agent.nbd.accounting import FAILED_BIT

InFlight = dict[int, tuple[int, int, int, int]]
"""cookie -> (arrived_ns, sent_ns, word without outcome, payload bytes of a successful reply)."""
Finished = tuple[int, int, int, int, int]
"""(end position in the client's stream, word, arrived_ns, sent_ns, reply_ns)."""
_NOTHING: Final = (0, 0, 0)


class ReplyReader:
    """See the module docstring.

    Attributes:
        payload_left: bytes of the reply in progress that have not arrived; 0 at a boundary between replies.
        boundary: offset, in the view last fed, behind the last whole reply; None when all of that view lies
            within one payload. Only there may bytes of our own be inserted.
    """

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self.payload_left = 0
        self.boundary: int | None = None
        self._current = _NOTHING

    @property
    def in_progress(self) -> tuple[int, int, int] | None:
        """(arrived_ns, sent_ns, word) of the reply that has arrived in part, else None."""
        word, arrived_ns, sent_ns = self._current
        return (arrived_ns, sent_ns, word) if self.payload_left else None

    def feed(
        self, view: memoryview, position: int, inflight: InFlight, now_ns: int
    ) -> tuple[int, list[Finished]]:
        """Parse received bytes.

        Args:
            view: bytes that begin where the last call stopped. An error number that the protocol does not
                know is replaced by EIO, in place.
            position: where ``view`` begins in the client's stream.
            inflight: answered requests are taken out of it.
            now_ns: when these bytes were received.

        Returns:
            Number of bytes that may be passed on (the rest, below 16 bytes, is part of a header and must be
            fed again), and the requests that they finish.

        Raises:
            NbdProtocolError: not a simple reply, or one that nobody asked for.
        """
        finished: list[Finished] = []
        size, offset = len(view), 0
        self.boundary = None
        if self.payload_left:
            offset = min(self.payload_left, size)
            self.payload_left -= offset
            if self.payload_left:
                return offset, finished
            finished.append((position + offset, *self._current, now_ns))
        self.boundary = offset
        unpack, pop = p.SIMPLE_REPLY.unpack_from, inflight.pop
        while size - offset >= 16:
            magic, error, cookie = unpack(view, offset)
            entry = pop(cookie, None)
            if magic != 0x67446698 or entry is None:
                raise NbdProtocolError(
                    self._peer, f"reply with magic {magic:#x} and unknown cookie {cookie:#x}"
                )
            arrived_ns, sent_ns, word, payload_bytes = entry
            offset += 16
            if error:
                word |= FAILED_BIT
                if error not in p.WIRE_ERRORS:
                    p.SIMPLE_REPLY.pack_into(view, offset - 16, magic, p.EIO, cookie)
            elif payload_bytes:
                offset += payload_bytes
                if offset > size:
                    self.payload_left = offset - size
                    self._current = word, arrived_ns, sent_ns
                    return size, finished
            finished.append((position + offset, word, arrived_ns, sent_ns, now_ns))
            self.boundary = offset
        return offset, finished
