"""Syslog: RFC 5424 with structured data; TCP with octet counting (RFC 6587), TLS (RFC 5425), a Unix socket.

Syslog knows no confirmation. Over TCP a message counts as taken when the kernel of the other side has
acknowledged its bytes (``SIOCOUTQ`` is 0) and the connection is still open: a daemon that dies at that moment
loses what it had not read. Where that matters, a webhook confirms more.

``message`` is pure. Thread: the recipient's.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import socket
import ssl
import struct
import termios
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pmdaemon.runtime.clock import Deadline
from pmdaemon.runtime.excerpt import printable
from sla_server.events.documents import FACILITIES, SyslogSpec
from sla_server.events.recipients import wording
from sla_server.events.recipients.base import CONFIRMED, Answer, Notice, retry
from sla_server.events.recipients.http_client import MENDED_AFTER_S
from sla_server.events.recipients.network import LEAST_S, Resolver, connect, reason_of

SEVERITIES: Final = {"critical": 2, "warning": 4, "info": 6}
STRUCTURED_DATA_ID: Final = "sla@32473"
"""32473 is the enterprise number for documents and examples: we have none of our own."""
VALUE_CHARACTERS: Final = 200
MESSAGE_CHARACTERS: Final = 1000
PORT, TLS_PORT = 601, 6514
_ACK_POLL_S: Final = 0.002


def message(notice: Notice, spec: SyslogSpec, host: str, process: int) -> bytes:
    """One message without its frame."""
    event = notice.event
    priority = 8 * FACILITIES[spec.facility] + SEVERITIES[event.severity]
    head = " ".join(
        (
            f"<{priority}>1",
            wording.rfc3339(event.at_us),
            _token(host, 255),
            _token(spec.app_name, 48),
            str(process),
            _token(event.kind, 32),
        )
    )
    fields = {
        "id": notice.delivery_id,
        "severity": event.severity,
        "status": notice.status.value,
        "element": event.element,
        "subject": event.subject,
        "agreement": event.agreement,
        "gateway": event.gateway,
        "volume": event.volume,
        "repeats": str(notice.repeats) if notice.repeats > 1 else "",
    }
    data = "".join(f' {key}="{_value(value)}"' for key, value in fields.items() if value)
    text = printable(event.text, MESSAGE_CHARACTERS)
    return (
        f"{head} [{STRUCTURED_DATA_ID}{data}] ".encode() + b"\xef\xbb\xbf" + text.encode("utf-8", "replace")
    )


def _token(text: str, most: int) -> str:
    """A header field: visible ASCII without blanks; ``-`` where nothing is left."""
    return "".join(each if "!" <= each <= "~" else "_" for each in text)[:most] or "-"


def _value(text: str) -> str:
    """A value of structured data: three characters are escaped."""
    plain = printable(text, VALUE_CHARACTERS)
    return plain.replace("\\", "\\\\").replace('"', '\\"').replace("]", "\\]")


def counted(content: bytes) -> bytes:
    """A message in its frame for TCP and TLS: the number of its bytes before it."""
    return b"%d " % len(content) + content


class Syslog:
    """See the module."""

    kind = "syslog"

    def __init__(
        self,
        name: str,
        spec: SyslogSpec,
        secrets_dir: Path,
        resolver: Resolver,
        *,
        timeout_s: float,
        most_notices: int,
        process: int = 0,
    ) -> None:
        self.name = name
        self.timeout_s = timeout_s
        self.most_notices = most_notices
        self._spec = spec
        self._secrets_dir = secrets_dir
        self._resolver = resolver
        self._process = process
        self._host = socket.gethostname()
        self._sock: socket.socket | None = None

    def deliver(self, notices: Sequence[Notice], deadline: Deadline) -> Answer:
        """See ``Recipient``."""
        contents = [message(notice, self._spec, self._host, self._process) for notice in notices]
        try:
            if self._spec.unix is not None:
                self._send_unix(self._spec.unix, contents, deadline)
            else:
                self._send_stream(b"".join(map(counted, contents)), deadline)
        except OSError as exc:
            self.close()
            wait = MENDED_AFTER_S if isinstance(exc, ssl.SSLCertVerificationError) else None
            return retry(reason_of(exc), wait)
        return CONFIRMED

    def close(self) -> None:
        """See ``Recipient``."""
        sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()

    def _send_unix(self, path: str, contents: Sequence[bytes], deadline: Deadline) -> None:
        """Datagrams, as system daemons take them; else a stream with octet counting."""
        if self._sock is not None and self._sock.type != socket.SOCK_DGRAM and _is_gone(self._sock):
            self.close()
        sock = self._sock = self._sock or self._connect_unix(path, deadline)
        if sock.type != socket.SOCK_DGRAM:
            self._write(sock, b"".join(map(counted, contents)), deadline)
            return
        for content in contents:
            _limit(sock, deadline)
            sock.send(content)

    def _connect_unix(self, path: str, deadline: Deadline) -> socket.socket:
        for kind in (socket.SOCK_DGRAM, socket.SOCK_STREAM):
            sock = socket.socket(socket.AF_UNIX, kind)
            try:
                _limit(sock, deadline)
                sock.connect(path)
            except OSError as exc:
                sock.close()
                if kind == socket.SOCK_STREAM or not _is_wrong_type(exc):
                    raise OSError(exc.errno or 0, f"{path}: {reason_of(exc)}") from exc
            else:
                return sock
        raise AssertionError("the loop returns or raises")

    def _send_stream(self, content: bytes, deadline: Deadline) -> None:
        sock = self._sock
        if sock is not None and _is_gone(sock):
            self.close()
            sock = None
        if sock is None:
            sock = self._sock = self._connect(deadline)
        self._write(sock, content, deadline)

    def _connect(self, deadline: Deadline) -> socket.socket:
        spec = self._spec
        assert spec.server is not None  # cannot happen: the document has server or unix
        sock = connect(spec.server, spec.port or (TLS_PORT if spec.tls else PORT), deadline, self._resolver)
        if not spec.tls:
            return sock
        try:
            ca_file = None if spec.ca_file is None else str(self._secrets_dir / spec.ca_file)
            return ssl.create_default_context(cafile=ca_file).wrap_socket(sock, server_hostname=spec.server)
        except BaseException:
            sock.close()
            raise

    def _write(self, sock: socket.socket, content: bytes, deadline: Deadline) -> None:
        left = memoryview(content)
        while left:
            _limit(sock, deadline)
            left = left[sock.send(left) :]
        while _unacknowledged(sock):
            if deadline.passed:
                raise TimeoutError("the other side did not acknowledge it in time")
            time.sleep(_ACK_POLL_S)
        _is_closed(sock)  # raises if it was reset: then bytes were lost that its kernel had acknowledged


def _limit(sock: socket.socket, deadline: Deadline) -> None:
    if deadline.passed:
        raise TimeoutError("it took too long")
    sock.settimeout(max(LEAST_S, deadline.left_s()))


def _is_wrong_type(error: OSError) -> bool:
    return error.errno == errno.EPROTOTYPE


def _is_gone(sock: socket.socket) -> bool:
    try:
        return _is_closed(sock)
    except OSError:
        return True


def _unacknowledged(sock: socket.socket) -> int:
    """Bytes that the kernel of the other side has not acknowledged."""
    answer = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, b"\0" * 4)
    return int(struct.unpack("i", answer)[0])


def _is_closed(sock: socket.socket) -> bool:
    """Whether the other side has closed, having read everything; a syslog server sends nothing else.

    Raises:
        OSError: the connection was reset.
    """
    sock.setblocking(False)
    try:
        return sock.recv(1) == b""
    except (BlockingIOError, ssl.SSLWantReadError):
        return False
    finally:
        with contextlib.suppress(OSError):
            sock.setblocking(True)
