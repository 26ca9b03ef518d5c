"""The channel between the parent and a pair: messages, sockets, and bytes too many for a message.

One SOCK_SEQPACKET socket pair a child. Message boundaries are kept, so a message and its descriptors
(SCM_RIGHTS) stay together; ``channel_messages`` has them all. Both ends are non-blocking. What
the other side does not take now waits in ``_outbox``, in order, with its descriptors open; nothing waits
for room in the acceptor: a *new* connection that finds a queue is refused, and the agent dials again. The
kernel keeps descriptors in flight alive; if the receiver dies first, it closes them and the agents dial
again.

Thread: ``send_or_drop`` may be called by any thread; everything else by the one that owns the end.

Source: P12; DESIGN.md 5 (SOCK_SEQPACKET, measured with a prototype).
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
from collections import deque
from collections.abc import Sequence
from typing import Final

from pmdaemon.errors import PeerGone
from pmdaemon.poller.channel_messages import Body, NewConnection, Sent, decode, encode, op_of

MAX_MESSAGE_BYTES: Final = 65536  # a report with 256 shards and its metrics is some 10 KB
MAX_DESCRIPTORS: Final = 2
TAKE: Final = 64  # messages of one ``take``: a storm of arrivals must not keep the inbound thread
_FD_BYTES: Final = array.array("i").itemsize


class ChannelMessage:
    """A received message. ``descriptors`` are the receiver's to close."""

    def __init__(self, body: Body, descriptors: list[int]) -> None:
        self.body = body
        self.descriptors = descriptors

    @property
    def op(self) -> str:
        """What it is about."""
        return op_of(self.body)

    def close(self) -> None:
        """Close what was not taken."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = []

    def take_socket(self) -> socket.socket:
        """The first descriptor, as a socket."""
        return socket.socket(fileno=self.descriptors.pop(0))

    def take_bytes(self) -> bytes:
        """The content of the last descriptor, a memory file; closes it."""
        with os.fdopen(self.descriptors.pop(), "rb") as file:
            file.seek(0)
            return file.read()


def make() -> tuple[socket.socket, socket.socket]:
    """(parent's end, pair's end), both non-blocking."""
    parent, pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent.setblocking(False)
    pair.setblocking(False)
    return parent, pair


def memory_file(data: bytes) -> int:
    """A memory file with ``data``; returns its descriptor."""
    fd = os.memfd_create("sla-moved", os.MFD_CLOEXEC)
    with open(os.dup(fd), "wb") as file:
        file.write(data)
    return fd


class Channel:
    """One end of the control socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._outbox: deque[tuple[bytes, list[int]]] = deque()

    def fileno(self) -> int:
        """Readable when something has arrived."""
        return self._sock.fileno()

    @property
    def waiting(self) -> int:
        """Messages that wait for room; the owner's selector must then ask for write readiness."""
        return len(self._outbox)

    def offer(self, connection: NewConnection, sock: socket.socket) -> bool:
        """Send now, or not at all; False if there is no room. The caller closes its copy either way."""
        return not self._outbox and self._send(encode(connection), [sock.fileno()])

    def send_or_drop(self, body: Sent) -> None:
        """Send now; dropped if the other side does not read just now. For what is soon reported again."""
        with contextlib.suppress(OSError):
            self._sock.send(encode(body))

    def send(self, body: Sent, descriptors: Sequence[int] = ()) -> None:
        """Send in order, now or as soon as there is room. Takes the descriptors and closes them once sent."""
        self._outbox.append((encode(body), list(descriptors)))
        self.flush()

    def flush(self) -> bool:
        """Send what waits; True when nothing does any more."""
        while self._outbox:
            data, descriptors = self._outbox[0]
            if not self._send(data, descriptors):
                return False
            self._outbox.popleft()
            _close(descriptors)
        return True

    def _send(self, data: bytes, descriptors: list[int]) -> bool:
        try:
            if descriptors:
                socket.send_fds(self._sock, [data], descriptors)
            else:
                self._sock.send(data)
        except OSError:  # full, too many descriptors in flight, or dead, which its end of file shows
            return False
        return True

    def take(self) -> list[ChannelMessage]:
        """What has arrived, ``TAKE`` messages at most.

        Raises:
            PeerGone: the other side has closed its end or died, and everything it sent was taken.
        """
        taken: list[ChannelMessage] = []
        while len(taken) < TAKE:
            try:
                data, ancillary, _, _ = self._sock.recvmsg(
                    MAX_MESSAGE_BYTES, socket.CMSG_SPACE(MAX_DESCRIPTORS * _FD_BYTES), socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                break
            except OSError as exc:
                if taken:
                    break
                raise PeerGone("the other end", exc.strerror or "") from exc
            descriptors = array.array("i")
            for level, kind, raw in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    descriptors.frombytes(raw[: len(raw) - len(raw) % _FD_BYTES])
            if not data:
                if taken:
                    break  # serve these first; the end of the stream is still there
                raise PeerGone("the other end", "its control socket is closed")
            taken.append(ChannelMessage(decode(data), list(descriptors)))
        return taken

    def close(self) -> None:
        """Close this end and everything that still waits for room."""
        while self._outbox:
            _close(self._outbox.popleft()[1])
        self._sock.close()


def _close(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())
