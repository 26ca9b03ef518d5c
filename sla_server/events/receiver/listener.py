"""HTTP for other servers: a few threads that share one listening socket, each with one connection at a time.

h11 has the protocol, ``handler`` the decisions; here are sockets and time:

    phase        limit                                   then
    handshake    REQUEST_S                               closed
    first byte   REQUEST_S                               closed
    idle         IDLE_S; none while all places are taken closed
    head, body   REQUEST_S, however slowly bytes trickle closed
    answer       REQUEST_S for a peer that does not read closed

A peer that was refused before its body was read is answered, and what it still sends is read and dropped for
DRAIN_S: a connection that is closed with bytes unread is reset, and the answer with it. One host has half of
the places at most; further connections of it are closed at once.

Without descriptors no thread tries to accept for a second.

A fault of ours ends the connection that met it; only a disk that fails ends the thread.

Certificates are read again when their file changes, at the next connection.

Threads: ``ev-post-N``, watched: at rest while they wait for a peer. State:
``_hosts`` and ``_busy``, guarded by ``_lock``.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import h11
import structlog

from pmdaemon.errors import ConfigError, SlaError
from pmdaemon.runtime import watchdog
from pmdaemon.runtime.clock import Deadline
from pmdaemon.runtime.sockets import accept, open_listener, wait_readable
from pmdaemon.runtime.stop import Stop
from pmdaemon.runtime.threads import ThreadGroup
from sla_server.events.receiver.handler import PostAnswer, PostHandler
from sla_server.events.recipients.network import LEAST_S, reason_of

log = structlog.get_logger("receiver")
REQUEST_S: Final = 20.0
IDLE_S: Final = 60.0
DRAIN_S: Final = 5.0
LOOK_S: Final = 0.25
"""How late an idle connection notices the stop, or that another one wants its place."""
HEAD_BYTES: Final = 16 << 10
READ_BYTES: Final = 64 << 10


@dataclass(frozen=True, slots=True)
class ListenerFiles:
    """Files of TLS; both in PEM."""

    certificate: Path
    key: Path


class EventListener:
    """See the module.

    Args:
        setting: key of ``address`` in the configuration, for errors.
        address: host and port to listen on; port 0 takes a free one.
        handler: decides.
        files: of TLS; None: plain HTTP.
        places: connections at a time.

    Attributes:
        port: that is listened on.

    Raises:
        ConfigError: the address is taken, or the certificate cannot be used.
    """

    def __init__(
        self,
        setting: str,
        address: tuple[str, int],
        handler: PostHandler,
        files: ListenerFiles | None = None,
        places: int = 16,
    ) -> None:
        self._handler = handler
        self._files = files
        self._places = places
        self._lock = threading.Lock()
        self._hosts: Counter[str] = Counter()
        self._busy = 0
        self._rest_until_s = 0.0  # one number, replaced whole by any thread
        self._context: ssl.SSLContext | None = None
        self._seen: tuple[int, ...] = ()
        if files is not None:
            self._context, self._seen = server_context(files), _versions(files)
        self._listener = open_listener(setting, *address)
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])

    def start(self, threads: ThreadGroup, stop: Stop) -> None:
        """Take connections until the stop."""
        for number in range(self._places):
            threads.start(f"ev-post-{number}", lambda: self._run(stop))

    def close(self) -> None:
        """Close the listening socket; the threads have ended."""
        self._listener.close()

    def _run(self, stop: Stop) -> None:
        while not stop.is_set():
            watchdog.rest()
            rest_s = self._rest_until_s - time.monotonic()
            if rest_s > 0 and stop.wait(rest_s):
                return
            wait_readable((self._listener, stop))
            accepted = accept(self._listener, self._rest)
            if accepted is None:
                if self._rest_until_s <= time.monotonic():  # another thread was faster, or the peer has gone
                    stop.wait(LEAST_S)
                continue
            sock, peer = accepted
            with sock, self._place(peer[0]) as is_free:
                if is_free:
                    self._serve(sock, peer[0], stop)

    def _rest(self, for_ns: int) -> None:
        """Of all threads: no descriptor is free, and the socket stays readable."""
        self._rest_until_s = time.monotonic() + for_ns / 1e9

    @contextlib.contextmanager
    def _place(self, host: str) -> Iterator[bool]:
        """Count a connection; whether its host may have one more."""
        with self._lock:
            self._hosts[host] += 1
            self._busy += 1
            is_free = self._hosts[host] <= max(1, self._places // 2)
        try:
            yield is_free
        finally:
            with self._lock:
                self._busy -= 1
                self._hosts[host] -= 1
                if not self._hosts[host]:
                    del self._hosts[host]

    def _serve(self, sock: socket.socket, host: str, stop: Stop) -> None:
        try:
            watchdog.beat()
            with self._secured(sock) as secured:
                connection = _Connection(secured)
                while (
                    not stop.is_set() and self._waits(connection, stop) and self._exchange(connection, host)
                ):
                    watchdog.beat()
        except (OSError, h11.ProtocolError) as exc:
            log.info("connection-ended", host=host, reason=reason_of(exc))
        except SlaError:  # the disk fails: nothing can be recorded any more
            raise
        except Exception:  # no peer ends the process by what it sends
            log.exception("connection-failed", host=host)

    def _secured(self, sock: socket.socket) -> socket.socket:
        sock.settimeout(REQUEST_S)
        if self._files is None:
            return sock
        secured = self._tls(self._files).wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        try:
            secured.do_handshake()
        except BaseException:
            secured.close()
            raise
        return secured

    def _tls(self, files: ListenerFiles) -> ssl.SSLContext:
        """The context; a new one if the files have changed and can be used."""
        with self._lock:
            assert self._context is not None  # there are files
            with contextlib.suppress(OSError):
                if (seen := _versions(files)) != self._seen:
                    self._seen = seen
                    try:
                        self._context = server_context(files)
                    except ConfigError as exc:  # the one before is used on; the log says so once
                        log.error("certificate-not-read", problem=str(exc))
            return self._context

    def _waits(self, connection: _Connection, stop: Stop) -> bool:
        """Wait for the next request; whether one comes."""
        deadline = Deadline(REQUEST_S if connection.is_new else IDLE_S)
        watchdog.rest()
        while not connection.has_bytes(LOOK_S):
            with self._lock:
                is_full = self._busy >= self._places
            if stop.is_set() or deadline.passed or (is_full and not connection.is_new):
                return False
        watchdog.beat()
        return True

    def _exchange(self, connection: _Connection, host: str) -> bool:
        """One request and its answer; whether the connection goes on."""
        deadline = Deadline(REQUEST_S)
        request = connection.head(deadline)
        if request is None:
            return False
        headers = {name: value.decode("latin-1") for name, value in request.headers}
        target = request.target.decode("latin-1")
        length = headers.get(b"content-length")
        is_sized = length is not None and b"transfer-encoding" not in headers
        refusal = self._handler.admit(
            request.method.decode("latin-1"), target, host, int(length or 0) if is_sized else None
        )
        if refusal is not None:
            self._handler.answered(refusal.status)
            connection.refuse(refusal)
            return False
        content = connection.body(deadline)
        answer = self._handler.answer(target, headers.get(b"sla-signature", ""), content)
        self._handler.answered(answer.status)
        return connection.answer(answer)


class _Connection:
    """One connection, for its thread alone.

    Attributes:
        is_new: it has not brought a request yet.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES)
        self.is_new = True

    def has_bytes(self, wait_s: float) -> bool:
        """Whether something can be read, or the peer has gone, after so long at most."""
        if self._http.trailing_data[0] or (isinstance(self._sock, ssl.SSLSocket) and self._sock.pending()):
            return True
        return wait_readable((self._sock,), wait_s)

    def head(self, deadline: Deadline) -> h11.Request | None:
        """The next request; None: the peer has closed.

        Raises:
            OSError: it is late or gone. h11.ProtocolError: it speaks no HTTP; it was answered.
        """
        try:
            event = self._event(deadline)
        except h11.RemoteProtocolError as exc:
            if self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                self.refuse(PostAnswer(exc.error_status_hint, "this is no request of HTTP"))
            raise
        self.is_new = False
        return event if isinstance(event, h11.Request) else None

    def body(self, deadline: Deadline) -> bytes:
        """The body; as long as announced.

        Raises:
            OSError, h11.ProtocolError: see ``head``.
        """
        parts = []
        while isinstance(event := self._event(deadline), h11.Data):
            parts.append(bytes(event.data))
        return b"".join(parts)

    def answer(self, answer: PostAnswer) -> bool:
        """Send an answer; whether another request may come."""
        self._send(answer, is_last=False)
        if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
            return False
        self._http.start_next_cycle()
        return True

    def refuse(self, answer: PostAnswer) -> None:
        """Send an answer without having read the body, and close."""
        self._send(answer, is_last=True)
        deadline = Deadline(DRAIN_S)
        with contextlib.suppress(OSError):
            if not isinstance(self._sock, ssl.SSLSocket):
                self._sock.shutdown(socket.SHUT_WR)
            while not deadline.passed:
                self._sock.settimeout(max(LEAST_S, deadline.left_s()))
                if not self._sock.recv(READ_BYTES):
                    return

    def _event(self, deadline: Deadline) -> object:
        while True:
            event = self._http.next_event()
            if event is not h11.NEED_DATA:
                return event
            if self._http.they_are_waiting_for_100_continue:
                self._write(self._http.send(h11.InformationalResponse(status_code=100, headers=[])))
            if deadline.passed:
                raise TimeoutError("the request did not come in time")
            self._sock.settimeout(max(LEAST_S, deadline.left_s()))
            self._http.receive_data(self._sock.recv(READ_BYTES))

    def _send(self, answer: PostAnswer, *, is_last: bool) -> None:
        content = f"{answer.text}\n".encode()
        headers = [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(content)))]
        if answer.after_s:
            headers.append(("Retry-After", str(answer.after_s)))
        if is_last:
            headers.append(("Connection", "close"))
        head = self._http.send(h11.Response(status_code=answer.status, headers=headers))
        body = self._http.send(h11.Data(data=content))
        self._write((head or b"") + (body or b"") + (self._http.send(h11.EndOfMessage()) or b""))

    def _write(self, data: bytes | None) -> None:
        self._sock.settimeout(REQUEST_S)
        self._sock.sendall(data or b"")


def server_context(files: ListenerFiles) -> ssl.SSLContext:
    """TLS 1.3 with this certificate.

    Raises:
        ConfigError: it cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_cert_chain(files.certificate, files.key)
    except (OSError, ssl.SSLError) as exc:
        problem = f"{files.certificate} and {files.key} are no certificate with its key ({reason_of(exc)})"
        raise ConfigError("tls", problem, "Give both in PEM, readable for this user") from exc
    return context


def _versions(files: ListenerFiles) -> tuple[int, ...]:
    status = files.certificate.stat(), files.key.stat()
    return tuple(value for each in status for value in (each.st_mtime_ns, each.st_ino))
