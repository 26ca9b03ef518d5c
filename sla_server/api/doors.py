"""The doors of the API: a listening socket each, with waitress, threads and room of its own.

TCP is for browsers; ``DATA_DIR/api.sock`` for the command line of whoever may enter the data directory. The
Unix door has its own threads and places, so whatever happens at TCP, ``sla mode observe`` gets through.

At each door a connection that does not become a request gives way:

    phase      what it waits for                       ends after
    asking     the rest of a request (or its begin)    REQUEST_LIMIT_S, however slowly bytes trickle
    answering  the peer to read what it asked for      ANSWER_LIMIT_S
    idle       the next request                        IDLE_LIMIT_S
    working    us                                      never

When all places are taken, connections that ask, answer or idle give way at once: of the user with the most
connections, the one whose peer has done nothing for longest. A peer that does not read holds a place only, no
thread: the connection's output takes an answer whole, and has one at a time. So one user's connections cannot
keep another user out. Live streams alone wait for their peers, in threads of their own.

State: ``HttpListener._waits``, what each connection waits for. Thread: only ``serve`` touches it.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import structlog
import waitress
from waitress import wasyncore
from waitress.buffers import ReadOnlyFileBasedBuffer
from waitress.channel import ClientDisconnected, HTTPChannel

from pmdaemon.runtime import sockets, watchdog
from pmdaemon.runtime.stop import Stop

log = structlog.get_logger("appserver")
Phase = Literal["asking", "answering", "idle", "working"]
REQUEST_LIMIT_S: Final = 20.0  # a body is 256 KB at most: 13 KB/s through a slow tunnel
ANSWER_LIMIT_S: Final = 120.0  # the chart library has 5 MB: 42 KB/s
IDLE_LIMIT_S: Final = 60.0
LIMITS_S: Final[Mapping[Phase, float]] = {
    "asking": REQUEST_LIMIT_S,
    "answering": ANSWER_LIMIT_S,
    "idle": IDLE_LIMIT_S,
}
LOOP_S: Final = 0.25  # how late the loop notices the stop and a limit
STOP_LIMIT_S: Final = 5.0
OUTPUT_MAX_BYTES: Final = 1 << 20  # of one connection in memory; what is more waits in a temporary file
SOCKET_NAME: Final = "api.sock"


def open_local(path: Path) -> socket.socket | None:
    """Listen on a Unix socket of mode 0600; None, with a warning, where the file system has none.

    A socket that another process left there is replaced. The path may be longer than the 107 bytes of a
    socket's address: it is reached through its directory's descriptor.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.unlink(missing_ok=True)
        folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            listener.bind(f"/proc/self/fd/{folder}/{path.name}")
        finally:
            os.close(folder)
        path.chmod(0o600)
        listener.listen()
    except OSError as exc:
        listener.close()
        log.warning("no-local-socket", path=str(path), error=str(exc), effect="sla uses TCP")
        return None
    return listener


class HttpConnection(HTTPChannel):  # type: ignore[misc]  # waitress has no types
    """One connection. Its answers wait in no thread; it knows how much its peer has taken."""

    sent_bytes = 0

    def service(self) -> None:
        """Answer a request so that its thread never waits for a peer that does not read.

        Requests sent before the answer to the last are dropped, and that answer ends the connection: the
        next answer would wait for the first. A file is sent whole, whatever range is asked for: it stays on
        the disk until the peer takes it, while a range is made in pieces. HTTP allows both.
        """
        with self.requests_lock:
            first, *more = self.requests
            first.headers.pop("RANGE", None)
            if more:
                first.headers["CONNECTION"] = "close"
                self.requests[1:] = []
        for request in more:
            request.close()
        super().service()

    def write_soon(self, data: Any) -> int:
        """As in waitress; a file that finds its peer gone is closed."""
        try:
            return int(super().write_soon(data))
        except ClientDisconnected:
            if isinstance(data, ReadOnlyFileBasedBuffer):
                data.close()
            raise

    def send(self, data: bytes, do_close: bool = True) -> int:
        """As in waitress, counted."""
        sent = int(super().send(data, do_close=do_close))
        self.sent_bytes += sent
        return sent


class Wait(NamedTuple):
    """What a connection waits for, since when, and when its peer last did something."""

    phase: Phase
    since_s: float
    moved_s: float
    sent_bytes: int


class HttpListener:
    """One listening socket and everything behind it."""

    def __init__(
        self,
        app: Any,
        listener: socket.socket,
        *,
        threads: int,
        places: int,
        max_body_bytes: int,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._channels: dict[int, Any] = {}
        self._places = places
        self._now_s = now_s
        self._waits: dict[Any, Wait] = {}
        self._port = listener.getsockname()[1] if listener.family != socket.AF_UNIX else None
        self._server = waitress.create_server(
            app,
            map=self._channels,
            sockets=[listener],
            threads=threads,
            connection_limit=places + 64,  # ours is reached first; the map also holds the listener
            max_request_body_size=max_body_bytes,
            outbuf_high_watermark=OUTPUT_MAX_BYTES,
            outbuf_overflow=OUTPUT_MAX_BYTES,
            asyncore_use_poll=True,
            ident=None,
        )
        self._server.channel_class = HttpConnection

    def serve(self, stop: Stop, end_streams: Callable[[], None]) -> None:
        """Serve until the stop; then let live streams end, stop the threads, close every connection."""
        try:
            while not stop.is_set():
                watchdog.beat()
                wasyncore.loop(timeout=LOOP_S, use_poll=True, map=self._channels, count=1)
                self.make_room()
        finally:
            end_streams()
            self._server.task_dispatcher.shutdown(cancel_pending=True, timeout=STOP_LIMIT_S)
            for channel in list(self._server.active_channels.values()):
                channel.handle_close()  # with the files of its answers
            wasyncore.close_all(map=self._channels, ignore_all=True)

    def make_room(self) -> None:
        """Close what is over its limit, and what must give way so that the next connection finds a place."""
        now_s = self._now_s()
        waits: dict[Any, Wait] = {}
        for channel in list(self._server.active_channels.values()):
            wait = self._wait_of(channel, now_s)
            if now_s - wait.since_s >= LIMITS_S.get(wait.phase, now_s + 1):
                channel.handle_close()
            else:
                waits[channel] = wait
        if len(waits) >= self._places:
            uids = {} if self._port is None else sockets.client_uids(self._port)
            users = {channel: uids.get(channel.addr[:2]) for channel in waits}
            waiting = {channel: wait.moved_s for channel, wait in waits.items() if wait.phase != "working"}
            for channel in giving_way(waiting, users, len(waits) - self._places + 1):
                channel.handle_close()
                del waits[channel]
        self._waits = waits

    def _wait_of(self, channel: Any, now_s: float) -> Wait:
        phase, sent_bytes = phase_of(channel), channel.sent_bytes
        before = self._waits.get(channel)
        if before is None or before.phase != phase:
            return Wait(phase, now_s, now_s, sent_bytes)
        return Wait(
            phase, before.since_s, before.moved_s if before.sent_bytes == sent_bytes else now_s, sent_bytes
        )


def phase_of(channel: Any) -> Phase:
    """What a connection waits for."""
    if channel.total_outbufs_len:
        return "answering"
    if channel.requests:
        return "working"
    is_new = channel.last_activity == channel.creation_time
    return "asking" if is_new or channel.request is not None else "idle"


def giving_way(waiting: Mapping[Any, float], users: Mapping[Any, int | None], count: int) -> list[Any]:
    """Which ``count`` connections are closed, fewer if there are not so many.

    Args:
        waiting: connection that may give way -> when its peer last did something.
        users: every connection -> its user, None if unknown.
        count: how many places are needed.
    """
    held = Counter(users.values())
    left = sorted(waiting, key=waiting.__getitem__)
    chosen: list[Any] = []
    while left and len(chosen) < count:
        first = max(left, key=lambda channel: held[users[channel]])  # the first of equals
        left.remove(first)
        held[users[first]] -= 1
        chosen.append(first)
    return chosen
