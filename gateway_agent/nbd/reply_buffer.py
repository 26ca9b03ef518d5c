"""The way of replies to one client: sent at once when the socket takes them, kept in order when it does not.

An I/O is complete when its last byte is in the client's socket buffer, not when it is queued here; so each
finished request waits with its end position until the socket has taken that much.
"""

from __future__ import annotations

import socket
from collections import deque

from gateway_agent.nbd.replies import Finished


class ReplyBuffer:
    """See the module docstring.

    Attributes:
        queued_pos: bytes ever given to ``send``.
        unsent_bytes: those of them that the socket has not taken.
        finishing: finished requests whose replies are not out whole, in order.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._backlog = memoryview(b"")
        self._more: deque[bytes] = deque()
        self.queued_pos = 0
        self.finishing: deque[Finished] = deque()
        self.unsent_bytes = 0

    @property
    def is_empty(self) -> bool:
        """Whether the socket has taken everything."""
        return not self.unsent_bytes

    def send(self, data: memoryview | bytes) -> bool:
        """Send or keep ``data`` (copied if kept). Returns whether everything is out.

        Raises:
            OSError: the client is gone.
        """
        size = len(data)
        self.queued_pos += size
        if self.unsent_bytes:
            self._more.append(bytes(data))
            self.unsent_bytes += size
            return False
        taken = self._send(data)
        if taken < size:
            self._backlog = memoryview(bytes(memoryview(data)[taken:]))
            self.unsent_bytes = size - taken
            return False
        return True

    def flush(self) -> bool:
        """Send what is kept, as far as the socket takes it. Returns whether everything is out.

        Raises:
            OSError: the client is gone.
        """
        while self.unsent_bytes:
            taken = self._send(self._backlog)
            self.unsent_bytes -= taken
            self._backlog = self._backlog[taken:]
            if self._backlog:
                return False
            if self._more:
                self._backlog = memoryview(self._more.popleft())
        return True

    def _send(self, data: memoryview | bytes) -> int:
        try:
            return self._sock.send(data)
        except BlockingIOError:
            return 0

    def take_finished(self) -> list[Finished]:
        """Requests whose replies are now out whole."""
        out_pos = self.queued_pos - self.unsent_bytes
        done = []
        while self.finishing and self.finishing[0][0] <= out_pos:
            done.append(self.finishing.popleft())
        return done
