"""Moving accepted sockets from the parent to a pair, and reports the other way.

One SOCK_SEQPACKET socket pair a child. Message boundaries are kept, so a descriptor and the address of its
peer stay together:

    parent -> pair   the peer's address as text, one descriptor (SCM_RIGHTS)
    pair -> parent   a report as JSON, once a second

Both ends are non-blocking: a pair that does not read loses the connection offered to it (the agent dials
again), it does not stop the acceptor. The kernel keeps a descriptor in flight alive, so the parent closes
its copy at once; if the pair dies first, the kernel closes the connection and the agent dials again.

Source: DESIGN.md 5 ("hands the raw descriptor to the least loaded pair before a byte is read");
notes/polling.md 7 (measured).
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import socket
from typing import Any, Final, NamedTuple

from pmdaemon.errors import PeerGone

MAX_MESSAGE_BYTES: Final = 8192
_FD_BYTES: Final = array.array("i").itemsize


class Report(NamedTuple):
    """What a pair tells the parent each second."""

    connections: int
    gateways: int
    t_ptmax_us: float


def make() -> tuple[socket.socket, socket.socket]:
    """(parent's end, pair's end), both non-blocking."""
    parent, pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent.setblocking(False)
    pair.setblocking(False)
    return parent, pair


def offer(control: socket.socket, sock: socket.socket, address: str) -> bool:
    """Give a socket to the pair; False if it does not take it now. The caller closes its copy either way."""
    try:
        socket.send_fds(control, [address.encode()], [sock.fileno()])
    except OSError:  # full, or the pair has died
        return False
    return True


class Receiver:
    """The pair's end: an ``Arrivals`` for the inbound thread."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control

    def fileno(self) -> int:
        """Readable when sockets have arrived."""
        return self._control.fileno()

    def take(self) -> list[tuple[socket.socket, str]]:
        """The sockets that have arrived, with their peers' addresses; at most 64 at a time.

        Raises:
            PeerGone: the parent has closed its end; this process must stop.
        """
        taken: list[tuple[socket.socket, str]] = []
        while len(taken) < 64:
            try:
                text, ancillary, _, _ = self._control.recvmsg(
                    MAX_MESSAGE_BYTES, socket.CMSG_SPACE(_FD_BYTES), socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                break
            descriptors = array.array("i")
            for level, kind, data in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    descriptors.frombytes(data[: len(data) - len(data) % _FD_BYTES])
            if not text and not descriptors:
                if taken:
                    break  # serve these first; the end of the stream is still there
                raise PeerGone("the parent of this pair", "its control socket is closed")
            for descriptor in descriptors:
                taken.append((socket.socket(fileno=descriptor), text.decode(errors="replace")))
        return taken


def report(control: socket.socket, values: Report) -> None:
    """Tell the parent how things stand; dropped if it does not read just now."""
    with contextlib.suppress(BlockingIOError):
        control.send(json.dumps(values._asdict()).encode())


def take_reports(control: socket.socket) -> list[Report]:
    """What the pair has told since the last call.

    Raises:
        PeerGone: the pair has died or closed its end.
    """
    reports: list[Report] = []
    while True:
        try:
            data = control.recv(MAX_MESSAGE_BYTES)
        except BlockingIOError:
            return reports
        except OSError as exc:
            raise PeerGone("pair", exc.strerror or os.strerror(exc.errno or 0)) from exc
        if not data:
            raise PeerGone("pair", "its control socket is closed")
        values: dict[str, Any] = json.loads(data)
        reports.append(Report(**values))
