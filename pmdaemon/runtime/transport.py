"""What a connection reads and writes through: a plain socket as it is, or TLS with the same face.

``Transport`` is the part of ``socket.socket`` that ``poller.connection`` uses, so a plain socket *is* one and
costs nothing. ``TlsTransport`` behaves like a non-blocking socket: what OpenSSL calls "want read" and "want
write" are ``WantRead`` and ``WantWrite``, which are ``BlockingIOError``; a caller that handles a plain socket
handles TLS. A write that would block is repeated with the same bytes at the front, as OpenSSL demands,
because callers keep unsent bytes in order.

Lock ``_lock`` guards the OpenSSL object: in CPython 3.11 it has none of its own and the interpreter lock is
released inside. It is a leaf, held around one non-blocking call.

Source: P10; measured with a prototype (TLS doubles the CPU of a poll, the lock costs nothing measurable).
"""

from __future__ import annotations

import selectors
import socket
import ssl
import threading
from typing import Any, Final, Protocol

from pmdaemon.errors import SlaError

PEEK_BYTES: Final = 4096  # a ClientHello of OpenSSL is 300 to 1,500 bytes
RECORD_BYTES: Final = 16_384  # the largest TLS record; OpenSSL hands out one a read
_VERIFY_CODES: Final = {  # X509_V_ERR_* of OpenSSL
    9: "certificate-not-yet-valid",
    10: "certificate-expired",
    18: "unknown-authority",
    19: "unknown-authority",
    20: "unknown-authority",
    21: "unknown-authority",
    26: "wrong-certificate",
}
_REASONS: Final = {
    "HTTP_REQUEST": ("not-tls", "it spoke HTTP, not TLS"),
    "HTTPS_PROXY_REQUEST": ("not-tls", "it spoke HTTP, not TLS"),
    "WRONG_VERSION_NUMBER": ("not-tls", "it did not speak TLS"),
    "UNSUPPORTED_PROTOCOL": ("tls-version", "it does not offer TLS 1.3"),
    "NO_SHARED_CIPHER": ("tls-version", "it offers no cipher of TLS 1.3"),
    "TLSV1_ALERT_UNKNOWN_CA": ("refused-by-peer", "it does not know the authority of our certificate"),
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": ("refused-by-peer", "it demands a certificate"),
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": ("refused-by-peer", "it says that our certificate has expired"),
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": ("refused-by-peer", "it does not accept our certificate"),
    "SSLV3_ALERT_BAD_CERTIFICATE": ("refused-by-peer", "it does not accept our certificate"),
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": ("refused-by-peer", "it does not accept this kind of certificate"),
}


class WantRead(BlockingIOError):
    """Nothing can be done before the peer has sent more."""


class WantWrite(BlockingIOError):
    """Nothing can be done before the socket takes more."""


class HandshakeFailed(SlaError):
    """TLS could not be agreed on; the connection is of no use.

    Attributes:
        code: for counters: ``certificate-expired``, ``unknown-authority``, ``not-tls``, ...
    """

    def __init__(self, code: str, reason: str) -> None:
        self.code = code
        self.reason = reason
        super().__init__(f"TLS handshake failed ({code}): {reason}")


class Transport(Protocol):
    """The part of a non-blocking socket that a connection uses."""

    def fileno(self) -> int:
        """The descriptor, -1 when closed."""

    def send(self, data: Any, /) -> int:
        """Bytes taken.

        Raises:
            BlockingIOError: none just now.
            OSError: the connection broke.
        """

    def recv_into(self, buffer: Any, /) -> int:
        """Bytes received, 0 at the end of the stream; raises as ``send``."""

    def shutdown(self, how: int, /) -> None:
        """Say that we send no more."""

    def close(self) -> None:
        """Give it back."""


def prepare(sock: socket.socket) -> None:
    """Make a socket what this package expects: non-blocking, no Nagle."""
    sock.setblocking(False)
    if sock.family != socket.AF_UNIX:  # socket pairs of tests
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class TlsTransport:
    """TLS over a connected socket, which it owns from now on.

    Attributes:
        has_begun: whether the handshake has; from then on the connection's state is in this process.

    Thread: ``handshake`` and ``recv_into`` belong to the receiving thread, ``send`` may be called by any.

    Raises:
        OSError: the peer is gone already; the socket is closed.
    """

    def __init__(
        self,
        sock: socket.socket,
        context: ssl.SSLContext,
        *,
        server_side: bool,
        server_name: str | None = None,
    ) -> None:
        prepare(sock)
        self.has_begun = False
        self._lock = threading.Lock()
        try:
            self._tls = context.wrap_socket(
                sock,
                server_side=server_side,
                do_handshake_on_connect=False,
                suppress_ragged_eofs=True,
                server_hostname=server_name,
            )
        except ValueError as exc:  # data of a connection that was reset before the handshake
            raise ConnectionResetError(104, str(exc)) from exc

    def fileno(self) -> int:
        """See ``Transport``."""
        return self._tls.fileno()

    def handshake(self) -> int | None:
        """Go on with the handshake: None when it is done, else the selector event it waits for.

        Raises:
            HandshakeFailed: it cannot succeed any more.
        """
        self.has_begun = True
        try:
            with self._lock:
                self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return selectors.EVENT_READ
        except ssl.SSLWantWriteError:
            return selectors.EVENT_WRITE
        except (OSError, ValueError) as exc:  # ValueError: never connected
            raise _failure(exc) from exc
        return None

    def peek(self) -> bytes:
        """What has arrived, left where it is; only before the handshake begins."""
        try:
            return socket.socket.recv(self._tls, PEEK_BYTES, socket.MSG_PEEK)
        except OSError:  # nothing yet, or gone: the handshake will say so
            return b""

    def detach(self) -> int:
        """Give the descriptor away; only before the handshake begins, while TLS has no state."""
        assert not self.has_begun  # callers ask ``Connection.is_movable``
        return self._tls.detach()

    def peer_der(self) -> bytes | None:
        """The peer's certificate, checked against the CA; None if it sent none."""
        return self._tls.getpeercert(binary_form=True)

    def peer_uris(self) -> list[str]:
        """The URIs of the peer's certificate."""
        details = self._tls.getpeercert() or {}
        names: Any = details.get("subjectAltName", ())
        return [value for kind, value in names if kind == "URI"]

    def send(self, data: Any, /) -> int:
        """See ``Transport``."""
        try:
            with self._lock:
                return self._tls.send(data)
        except ssl.SSLWantWriteError as exc:
            raise WantWrite from exc
        except ssl.SSLWantReadError as exc:
            raise WantRead from exc

    def recv_into(self, buffer: Any, /) -> int:
        """See ``Transport``. Takes as many records as there are and fit, so a backlog needs few rounds."""
        view = memoryview(buffer)
        size = 0
        try:
            with self._lock:
                while len(view) - size >= RECORD_BYTES or not size:
                    got = self._tls.recv_into(view[size:])
                    size += got
                    if got < RECORD_BYTES:
                        break
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as exc:
            if not size:
                raise WantRead from exc
        except OSError as exc:
            if not size:
                raise _broken(exc) from exc
        return size

    def shutdown(self, how: int, /) -> None:
        """See ``Transport``. TCP alone: OpenSSL's own goodbye would have to be waited for."""
        socket.socket.shutdown(self._tls, how)

    def close(self) -> None:
        """See ``Transport``."""
        self._tls.close()


def _broken(error: OSError) -> OSError:
    """An error of OpenSSL in words; with TLS 1.3 a client meets a refused certificate only when it reads."""
    if isinstance(error, ssl.SSLError):
        failure = _failure(error)
        return ConnectionAbortedError(103, failure.reason)
    return error


def _failure(error: Exception) -> HandshakeFailed:
    if isinstance(error, ssl.SSLCertVerificationError):
        code = _VERIFY_CODES.get(error.verify_code, "bad-certificate")
        return HandshakeFailed(code, f"its certificate is not accepted: {error.verify_message}")
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):  # the latter before Python 3.11.4
        return HandshakeFailed("closed", "it closed the connection during the handshake")
    if isinstance(error, ssl.SSLError):
        reason = error.reason or "unknown"
        default = ("handshake", reason.lower().replace("_", " "))
        return HandshakeFailed(*_REASONS.get(reason, default))
    if isinstance(error, OSError):
        return HandshakeFailed("closed", error.strerror or str(error))
    return HandshakeFailed("closed", str(error))
