"""TLS of NBD connections: the handshake beside the loop, then a connection with the methods of a socket.

    STARTTLS ──► TlsOpening ──one step of OpenSSL at a time──► TlsEngine's thread
                     │  bytes in and out: the loop                  │
                     └──on_ready(TlsConnection) or on_failed ◄──────┘

Theory of operation. OpenSSL works between two memory buffers (``ssl.MemoryBIO``): one receive brings many
records, and all records of a batch of replies leave in one send, as without TLS. The costly part of a
handshake, a signature of up to some milliseconds, is computed by one thread for all clients of a plane, so
that no other client's I/O waits for it. A ``TlsConnection`` belongs to exactly one side at a time: to that
thread between ``submit`` and the done list, else to the loop; so it needs no lock.

- Bytes that were decrypted, or received and not decrypted, are invisible to epoll. ``recv_into`` says so to
  the loop (``EventLoop.set_buffered``), which then calls the handler as if the socket was readable.
- ``send`` encrypts a piece and sends it. While some of its records wait for the socket, the last byte of the
  piece counts as not taken: so the caller waits for OUT, and offers that byte again, as it has to.
- Bounds: ``MOST_OPENINGS`` handshakes at a time, each within ``OPENING_LIMIT_NS``. Beyond, the one that has
  waited longest for its client is given up. OpenSSL's own answers that a peer does not take are limited.

No renegotiation, no session tickets: each connection shows its certificate.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import socket
import ssl
import stat
from collections import deque
from collections.abc import Callable
from typing import Any, Final, cast

import structlog

from gateway_agent.nbd.loop import GONE, IN, EventLoop
from pmdaemon.errors import ConfigError
from pmdaemon.runtime.threads import ThreadGroup

log = structlog.get_logger("tls")

OPENING_LIMIT_NS: Final = 10 * 10**9  # a handshake takes two round trips
MOST_OPENINGS: Final = 256  # some 50 KB each; the thread computes about a thousand a second
PIECE_BYTES: Final = 256 << 10  # encrypted at a time, 16 records; below a tenth of a millisecond
MOST_RECORDS: Final = 1024  # decrypted at a time: a peer may make them of one byte
MAX_ANSWER_BYTES: Final = 64 << 10  # alerts and answers to key updates that a peer does not take
_SCRATCH: Final = memoryview(bytearray(PIECE_BYTES))  # of the loop's thread
_HELLO_BYTES: Final = 65_536  # received at a time during a handshake


FileStates = tuple[tuple[int, int, int] | None, ...]


def file_states(*paths: str) -> FileStates:
    """What changes when one of the files is replaced or written; None for one that is not there."""
    return tuple(map(_state, paths))


def _state(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def load_own(context: ssl.SSLContext, setting: str, certificate: str, key: str) -> None:
    """Use this certificate; an empty ``key`` is in the same file.

    Raises:
        ConfigError: names the setting.
    """
    try:
        _refuse_pipes(certificate, key)
        # A password would be asked for at the terminal; an empty one makes an encrypted key an error.
        context.load_cert_chain(certificate, key or None, password=lambda: "")
    except OSError as exc:  # ssl.SSLError too
        files = f"{certificate} with {key or 'its key in the same file'}"
        fix = "Give a PEM file with the certificate, and one with its key, readable and not encrypted"
        raise ConfigError(setting, f"{files} cannot be used: {_problem(exc)}", fix) from exc


def load_authority(context: ssl.SSLContext, setting: str, path: str, fix: str) -> None:
    """Trust the authorities in this file.

    Raises:
        ConfigError: names the setting.
    """
    try:
        _refuse_pipes(path)
        context.load_verify_locations(path)
    except OSError as exc:
        raise ConfigError(setting, f"{path} cannot be used: {_problem(exc)}", fix) from exc


def load_revoked(context: ssl.SSLContext, setting: str, path: str) -> None:
    """Accept no certificate of a peer that is on a revocation list in this file, and none without a list.

    Raises:
        ConfigError: names the setting.
    """
    fix = (
        "Give a PEM file with the newest revocation list (CRL) of the authority of the clients' certificates"
    )
    before = context.cert_store_stats()["x509"]
    load_authority(context, setting, path, fix)
    found = context.cert_store_stats()
    if found["x509"] > before:  # OpenSSL has taken it for one of an authority
        problem = "there is a certificate in it, whose holder could certify clients"
        raise ConfigError(setting, f"{path} cannot be used: {problem}", "Leave only revocation lists in it")
    if not found["crl"]:
        raise ConfigError(setting, f"{path} cannot be used: there is no revocation list in it", fix)
    context.verify_flags |= ssl.VerifyFlags.VERIFY_CRL_CHECK_LEAF


def _refuse_pipes(*paths: str) -> None:
    """To open one would wait for its other end, for ever."""
    for path in paths:
        if path and stat.S_ISFIFO(os.stat(path).st_mode):
            raise OSError(errno.EINVAL, "it is a pipe, not a file", path)


def _problem(exc: OSError) -> str:
    if isinstance(exc, ssl.SSLError):
        return (exc.reason or str(exc)).replace("_", " ").lower()
    return exc.strerror or str(exc)


class TlsConnection:
    """An encrypted connection with the methods of a socket that sessions use (``sockets.Connection``).

    Args:
        loop: serves bytes that were decrypted already, which epoll does not show.
        sock: connected, non-blocking.
        context: of the server's side if ``server_side``.
        hostname: what the peer's certificate must be for, on the client's side.
    """

    def __init__(
        self,
        loop: EventLoop,
        sock: socket.socket,
        context: ssl.SSLContext,
        *,
        server_side: bool = True,
        hostname: str | None = None,
    ) -> None:
        self._loop = loop
        self._sock = sock
        self._received, self._sealed = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._received, self._sealed, server_side, hostname)
        self._unsent = memoryview(b"")  # records that the socket did not take
        self._owed = 0  # bytes encrypted, and to be offered again
        self._is_established = self._has_ended = self._is_shut = False

    # -- handshake (one side at a time: see the module docstring)

    def compute(self) -> bool:
        """One step of the handshake; returns whether it has ended well. Any thread.

        Raises:
            ssl.SSLError: it failed; ``flush`` sends the alert that says why.
        """
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def take_hello(self) -> bool:
        """Receive bytes of the handshake; returns whether there were some, False when the peer has ended.

        Raises:
            BlockingIOError: there are none now.
            OSError: the peer is gone.
        """
        data = self._sock.recv(_HELLO_BYTES)
        self._received.write(data)
        return bool(data)

    def established(self) -> None:
        """The handshake has ended well; the peer's first bytes may have come with it."""
        self._is_established = True
        self._loop.set_buffered(self.fileno(), self._received.pending > 0)

    def peer_certificate(self) -> dict[str, Any] | None:
        """Of the peer, verified; None or empty without."""
        return self._tls.getpeercert()

    @property
    def certificate(self) -> bytes | None:
        """The same, DER; None without."""
        return self._tls.getpeercert(binary_form=True)

    def version(self) -> str:
        """``TLSv1.3`` and the like."""
        return self._tls.version() or "none"

    # -- as a socket

    def fileno(self) -> int:
        """See ``sockets.Connection``."""
        return self._sock.fileno()

    def recv(self, count: int, /) -> bytes:
        """See ``sockets.Connection``."""
        data = bytearray(count)
        return bytes(data[: self.recv_into(memoryview(data))])

    def recv_into(self, view: memoryview, /) -> int:
        """See ``sockets.Connection``. An end without the peer's farewell is an end: NBD has its own.

        Raises:
            BlockingIOError: nothing is here.
            OSError: the connection broke, or what came was not encrypted for us.
        """
        if self._is_shut:
            if self._sock.recv_into(view):
                raise BlockingIOError  # dropped: ciphertext is no answer to anything
            return 0
        count = self._opened(view)
        if not count and not self._has_ended:
            received = self._sock.recv_into(_SCRATCH)
            if received:
                self._received.write(_SCRATCH[:received])
            else:
                self._received.write_eof()
            count = self._opened(view)
        if count or self._has_ended:
            return count
        raise BlockingIOError

    def _opened(self, view: memoryview) -> int:
        """Decrypt what is here; returns the bytes that came of it."""
        filled, size, is_more = 0, len(view), True
        try:
            for _ in range(MOST_RECORDS):
                if filled == size or self._has_ended:
                    break
                count = cast("int", self._tls.read(size - filled, view[filled:]))
                filled += count
                self._has_ended = not count
        except ssl.SSLWantReadError:
            is_more = False
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            self._has_ended = True
        if self._sealed.pending:
            self._answer()
        is_here = self._tls.pending() > 0 or self._received.pending > 0
        self._loop.set_buffered(self.fileno(), (is_more and is_here) or self._has_ended)
        return filled

    def _answer(self) -> None:
        """Send what OpenSSL has to say on its own, if the socket takes it."""
        if not self.flush() and self._sealed.pending > MAX_ANSWER_BYTES:
            raise ConnectionAbortedError(103, "it takes no answers of TLS")

    def send(self, data: memoryview | bytes, /) -> int:
        """See ``sockets.Connection``.

        Raises:
            BlockingIOError: the socket takes nothing now.
            OSError: the connection broke.
        """
        if not self.flush():
            raise BlockingIOError
        view = memoryview(data)
        done, self._owed = self._owed, 0
        while done < len(view):
            done += self._tls.write(view[done : done + PIECE_BYTES])
            if not self.flush():
                self._owed = 1
                return done - 1
        return done

    def flush(self) -> bool:
        """Send records that wait; returns whether none does any more.

        Raises:
            OSError: the connection broke.
        """
        while self._unsent or self._sealed.pending:
            if not self._unsent:
                self._unsent = memoryview(self._sealed.read())
            try:
                self._unsent = self._unsent[self._sock.send(self._unsent) :]
            except BlockingIOError:
                return False
        return True

    def shutdown(self, how: int, /) -> None:
        """See ``sockets.Connection``; what comes after it is dropped."""
        if not self._is_shut:
            self._say_farewell()
            self._is_shut = True
            self._loop.set_buffered(self.fileno(), False)
            self._sock.shutdown(how)

    def _say_farewell(self) -> None:
        if self._is_established and not self._is_shut:
            with contextlib.suppress(OSError):  # ssl.SSLWantReadError too: we do not wait for the peer's
                self._tls.unwrap()
            with contextlib.suppress(OSError):
                self.flush()

    def close(self) -> None:
        """See ``sockets.Connection``."""
        self._say_farewell()
        self._loop.set_buffered(self.fileno(), False)
        self._sock.close()


class TlsOpening:
    """One handshake, within a time limit.

    It calls exactly one of ``on_ready`` (the connection is not watched any more) and ``on_failed``, never
    from inside its constructor, unless it is cancelled; and ``on_failed`` behind an ``on_ready`` that raises.
    The caller closes the connection, also after ``cancel``.

    Args:
        engine: of the plane.
        connection: not watched; the handshake begins with the peer's bytes, or with ours as a client.
        on_ready: the connection can be used.
        on_failed: gets the reason.
        is_client: we speak first.
    """

    def __init__(
        self,
        engine: TlsEngine,
        connection: TlsConnection,
        on_ready: Callable[[], None],
        on_failed: Callable[[str], None],
        *,
        is_client: bool = False,
    ) -> None:
        self._engine = engine
        self._loop = engine.loop
        self._connection = connection
        self._fd = connection.fileno()
        self._on_ready = on_ready
        self._on_failed = on_failed
        self.is_computing = False
        self._has_ended = False
        self._outcome: bool | str = False  # written by the thread
        limit_ns = self._loop.clock.monotonic_ns() + OPENING_LIMIT_NS
        self._loop.at(self, limit_ns, lambda _now: self.fail("no TLS handshake within 10 s"))
        engine.add(self)
        if is_client:
            self._submit()
        else:
            self._await_peer()

    def _await_peer(self) -> None:
        self._loop.watch(self._fd, IN, self._on_event, lambda exc: self.fail(str(exc)))

    def _on_event(self, events: int) -> None:
        try:
            if events & IN and self._connection.take_hello():
                self._submit()
            elif events & (IN | GONE):
                self.fail("the peer left during the TLS handshake")
        except BlockingIOError:
            return
        except OSError as exc:
            self.fail(f"the peer is gone: {exc.strerror}")

    def _submit(self) -> None:
        self.is_computing = True
        self._loop.forget(self._fd)  # not only IN: a hang-up would be reported again and again
        self._engine.submit(self)

    def compute(self) -> None:
        """One step. Thread: the engine's. Raises nothing."""
        try:
            self._outcome = self._connection.compute()
        except ssl.SSLError as exc:
            self._outcome = exc.reason.replace("_", " ").lower() if exc.reason else str(exc)
            if isinstance(exc, ssl.SSLCertVerificationError):
                self._outcome = f"certificate verify failed: {exc.verify_message}"
        except Exception as exc:  # noqa: BLE001 - a thread's outermost; the connection is given up
            self._outcome = repr(exc)

    def computed(self) -> None:
        """The thread has given the connection back. Thread: the loop's."""
        self.is_computing = False
        if self._has_ended:
            return
        try:
            is_sent = self._connection.flush()  # also the alert of a failure, which tells the peer why
        except OSError as exc:
            self.fail(f"the peer is gone: {exc.strerror}")
            return
        if isinstance(self._outcome, str):
            self.fail(f"the TLS handshake failed: {self._outcome}")
        elif not is_sent:
            self.fail("the peer does not take the TLS handshake")
        elif self._outcome:
            self.cancel()
            self._connection.established()
            try:
                self._on_ready()
            except Exception as exc:  # noqa: BLE001 - logged; others are behind it in the same turn
                self._loop.report(exc, lambda exc: self._on_failed(str(exc)))
        else:
            self._await_peer()

    def fail(self, reason: str) -> None:
        """Give up."""
        if not self._has_ended:
            self.cancel()
            self._on_failed(reason)

    def cancel(self) -> None:
        """Give up and call neither function."""
        self._has_ended = True
        self._loop.cancel(self)
        self._loop.forget(self._fd)
        self._engine.remove(self)


class TlsEngine:
    """Computes all handshakes of a plane in one thread. Thread: the loop's, but for ``_work``.

    The thread is started for the first handshake.
    """

    def __init__(self, loop: EventLoop, most: int = MOST_OPENINGS) -> None:
        self.loop = loop
        self._most = most
        self._openings: dict[TlsOpening, None] = {}  # oldest first
        self._jobs: queue.SimpleQueue[TlsOpening | None] = queue.SimpleQueue()
        self._done: deque[TlsOpening] = deque()
        self._wake_fd = -1
        self._group = ThreadGroup()

    def add(self, opening: TlsOpening) -> None:
        """Count one more; beyond the limit the oldest that waits for its peer is given up, or this one."""
        self._openings[opening] = None
        if len(self._openings) > self._most:
            late = next((each for each in self._openings if not each.is_computing), opening)
            self.remove(late)
            now_ns = self.loop.clock.monotonic_ns()
            self.loop.at(late, now_ns, lambda _now: late.fail("too many TLS handshakes at a time"))

    def remove(self, opening: TlsOpening) -> None:
        """It has ended."""
        self._openings.pop(opening, None)

    def submit(self, opening: TlsOpening) -> None:
        """Let the thread do the next step of ``opening``."""
        if self._wake_fd < 0:
            wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            try:
                self._group.start("nbd-tls", self._work)
            except BaseException:  # no room for a thread: this handshake fails, the next one tries again
                os.close(wake_fd)
                raise
            self._wake_fd = wake_fd
            self.loop.watch(wake_fd, IN, self._on_done, lambda _exc: None)
        self._jobs.put(opening)

    def _work(self) -> None:
        while (opening := self._jobs.get()) is not None:
            opening.compute()
            self._done.append(opening)
            os.eventfd_write(self._wake_fd, 1)

    def _on_done(self, _events: int) -> None:
        os.eventfd_read(self._wake_fd)  # before the list: what comes later rings again
        while self._done:
            self._done.popleft().computed()

    def stop(self) -> None:
        """End the thread after the steps it has.

        Raises:
            ThreadDidNotStop: it still computes.
        """
        if self._wake_fd >= 0:
            self._jobs.put(None)
            self.loop.forget(self._wake_fd)
            self._group.join()
            os.close(self._wake_fd)
            self._wake_fd = -1
