"""Upstreams whose host is gone without a word: power, or the network between.

TCP does not report it. What waits for an answer waits for hours, and what was sent and not acknowledged for a
quarter of an hour. So the kernel asks the other end every ``EVERY_NS`` (keepalive); as often it is checked
whether anything has come from there since, if only an acknowledgement, and whether the kernel waits for one
(``TCP_INFO``). After ``MOST_SILENT`` checks without any the socket is shut down, which its reader sees as an
end like any other. That takes 47 to 62 s.

Not ``TCP_USER_TIMEOUT``, which also ends a connection to a server that lives and takes no bytes for so long:
storage that hangs is waited for, and reported (``stalls``). Its kernel acknowledges what asks for its window,
at last every two minutes, and between these nothing is waited for. One such question may be lost on a network
that is in order, and the next one is two minutes away; so two must be: a host that is gone after its storage
has hung for long is found after five minutes at most.

Checks are counted, not seconds: after a suspension of this machine the other end has had no time to answer.
Thread: the loop's.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import Final

from gateway_agent.nbd.loop import EventLoop

EVERY_NS: Final = 15 * 10**9
MOST_SILENT: Final = 3
"""A network that is made again (spanning tree, a switch that starts) takes up to 50 s."""
_SPREAD_MS: Final = 2_000  # by which a living host's answer to a keepalive may be late
_TCP_INFO: Final = struct.Struct("=2xBBB51xI")
"""Of ``struct tcp_info``: retransmissions and probes that have no answer, how often the interval of either
was doubled (that of keepalives is not), milliseconds since the last ACK."""


def end_when_silent(loop: EventLoop, sock: socket.socket, uri: str) -> None:
    """Check a connected socket until it is closed; a Unix socket has no other host.

    Args:
        loop: what the socket's reader runs in.
        sock: below TLS, if there is any.
        uri: for the log.
    """
    if sock.family == socket.AF_UNIX:
        return
    every_s, silent = EVERY_NS // 10**9, 0
    with contextlib.suppress(OSError):  # one that has ended meanwhile is found so by its reader
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, every_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every_s)

    def check(now_ns: int) -> None:
        nonlocal silent
        if sock.fileno() < 0:
            return
        silent = silent + 1 if is_silent(sock) else 0
        if silent < MOST_SILENT:
            loop.at((sock, "silence"), now_ns + EVERY_NS, check)
            return
        loop.warnings.warning(now_ns, "upstream-silent", error=f"{uri}: nothing came for a minute")
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    loop.at((sock, "silence"), loop.clock.monotonic_ns() + EVERY_NS, check)


def is_silent(sock: socket.socket) -> bool:
    """Whether the kernel waits for a sign of the other end, and has had none since the check before."""
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except OSError:  # it has ended since
        return False
    if len(info) < _TCP_INFO.size:
        return False
    retransmits, probes, doubled, silent_ms = _TCP_INFO.unpack(info)
    is_asked = retransmits or probes > (1 if doubled else 0)
    return bool(is_asked) and silent_ms > EVERY_NS // 10**6 + _SPREAD_MS
