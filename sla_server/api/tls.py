"""TLS of page and API: the certificate file, and connections that speak it towards waitress.

waitress knows sockets only, so ``TlsSocket`` behaves as one that does not block. The certificate is read
again when its file has changed, so a renewal needs no restart; one that cannot be read is logged, and the
former stays. Thread: ``wrap`` belongs to the listening loop; of a connection, see ``TlsTransport``.
"""

from __future__ import annotations

import errno
import socket
import ssl
from pathlib import Path
from typing import Any, Final

import structlog

from pmdaemon.errors import ConfigError
from pmdaemon.runtime.clock import Clock
from pmdaemon.runtime.logs import LimitedLog
from pmdaemon.runtime.transport import RECORD_BYTES, HandshakeFailed, TlsTransport

log = structlog.get_logger("appserver")
SETTING: Final = "api.tls.certificate"
FIX: Final = (
    "Name a PEM file with the certificate and its chain, and one with its key, readable for the server alone "
    "and not encrypted; 'sla ca page --host NAME -o DIR' makes both"
)
LOOK_NS: Final = 10 * 10**9
BUFFER_BYTES: Final = 4 * RECORD_BYTES


def load_context(certificate: Path, key: Path | None) -> ssl.SSLContext:
    """The context of these files.

    Raises:
        ConfigError: they are not a certificate and its key, or others may read the key.
    """
    private = key or certificate
    try:
        if private.stat().st_mode & 0o077:
            raise ConfigError("api.tls.key", f"{private} can be read by others", f"Run: chmod 600 {private}")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0
        context.load_cert_chain(certificate, key, password=lambda: "")
    except (OSError, ssl.SSLError) as exc:
        raise ConfigError(SETTING, f"{certificate} cannot be used: {exc}", FIX) from exc
    return context


class TlsSocket(TlsTransport):
    """What waitress needs of a connected socket; the handshake is made by its first reads."""

    def __init__(
        self, sock: socket.socket, context: ssl.SSLContext, refusals: LimitedLog, now_ns: int
    ) -> None:
        self.family = sock.family
        super().__init__(sock, context, server_side=True)
        self._refusals = refusals
        self._since_ns = now_ns
        self._is_secure = False

    def getpeername(self) -> Any:
        """See ``socket.socket``, as the next three."""
        return self._tls.getpeername()

    def getsockopt(self, *what: Any) -> Any:
        """See ``getpeername``."""
        return self._tls.getsockopt(*what)

    def setsockopt(self, *what: Any) -> None:
        """See ``getpeername``."""
        self._tls.setsockopt(*what)

    def setblocking(self, flag: bool) -> None:
        """It never blocks."""
        assert not flag  # waitress's way

    def recv(self, _size: int) -> bytes:
        """Whatever has arrived: whole records, as what stays in one would be announced by no event.

        Raises:
            BlockingIOError: nothing yet.
            ConnectionResetError: the peer is gone.
        """
        if not self._is_secure:
            try:
                self._is_secure = self.handshake() is None
            except HandshakeFailed as exc:
                self._refusals.warning(self._since_ns, "page-handshake", code=exc.code, reason=exc.reason)
                return b""
            if not self._is_secure:
                raise BlockingIOError(errno.EWOULDBLOCK, "the handshake goes on")
        buffer = bytearray(BUFFER_BYTES)
        try:
            return bytes(memoryview(buffer)[: self.recv_into(buffer)])
        except BlockingIOError as exc:
            raise BlockingIOError(errno.EWOULDBLOCK, "nothing there") from exc
        except ssl.SSLError as exc:
            raise ConnectionResetError(errno.ECONNRESET, str(exc)) from exc

    def send(self, data: Any, /) -> int:
        """See ``Transport``; the errors as of ``recv``."""
        try:
            return super().send(data)
        except BlockingIOError as exc:
            raise BlockingIOError(errno.EWOULDBLOCK, "no room") from exc
        except ssl.SSLError as exc:
            raise ConnectionResetError(errno.ECONNRESET, str(exc)) from exc


class PageCertificate:
    """The files, read again when they have changed.

    Raises:
        ConfigError: they cannot be used, at the start.
    """

    def __init__(self, certificate: Path, key: Path | None, clock: Clock) -> None:
        self._files = certificate, key
        self._clock = clock
        self._refusals = LimitedLog("appserver")
        self._seen = self._stamps()
        self._context = load_context(certificate, key)
        self._check_at_ns = 0

    def _stamps(self) -> list[tuple[int, ...]]:
        """With mode and owner: of a key that was refused these alone may change."""
        found: list[tuple[int, ...]] = []
        for path in self._files:
            if path is not None:
                try:
                    status = path.stat()
                    found.append((status.st_mtime_ns, status.st_ino, status.st_mode, status.st_uid))
                except OSError:
                    found.append(())
        return found

    def wrap(self, sock: socket.socket) -> TlsSocket:
        """Speak TLS on an accepted connection; OSError if its peer is gone."""
        now_ns = self._clock.monotonic_ns()
        if now_ns >= self._check_at_ns:
            self._check_at_ns = now_ns + LOOK_NS
            self._check_files()
        return TlsSocket(sock, self._context, self._refusals, now_ns)

    def _check_files(self) -> None:
        stamps = self._stamps()
        if stamps == self._seen:
            return
        self._seen = stamps
        try:
            self._context = load_context(*self._files)
        except ConfigError as exc:
            log.error("certificate-not-read", problem=str(exc), effect="the former one is used")
        else:
            log.info("certificate-read", path=str(self._files[0]))
