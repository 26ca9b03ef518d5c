"""HTTP for recipients: one request within one deadline, its answer as an ``Answer``.

    2xx              confirmed
    408, 425, 429, 5xx   sent again, after Retry-After if the server names a time
    400, 413, 415, 422   refused: this message will never be taken
    other 4xx, 3xx   sent again after a minute: the address or the credentials are wrong, not the message,
                     and a person can mend them before the notice is too old

Redirects are not followed: a signed body goes only where the document says. Of an answer only the first
bytes are read, and only those that are needed; a server that confirms and then sends slowly or without end
holds up nothing.

A connection is kept for the next delivery, unless something came behind the answer. Thread: the recipient's.
"""

from __future__ import annotations

from sla_server import lean_httpx  # noqa: F401 - before httpx: see there

# isort: split
import ssl
import time
from collections.abc import Iterable, Mapping
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import httpcore
import structlog

from pmdaemon.runtime.clock import Deadline
from pmdaemon.runtime.excerpt import printable
from sla_server.events.recipients.base import CONFIRMED, Answer, refused, retry
from sla_server.events.recipients.network import BoundedBackend, Resolver, reason_of
from sla_server.events.recipients.secret_files import hidden

log = structlog.get_logger("delivery")
READ_BYTES: Final = 4 << 10
"""Of an answer that is no success; enough for its reason."""
DRAINED_BYTES: Final = 64 << 10
"""Of a success, so that its connection can be used again."""
DRAIN_S: Final = 1.0
REASON_CHARACTERS: Final = 200
MOST_AFTER_S: Final = 3600.0
MENDED_AFTER_S: Final = 60.0
"""Wait after an answer that only a person can change."""
AGAIN: Final = frozenset((408, 425, 429))
NEVER: Final = frozenset((400, 413, 415, 422))


class HttpClient:
    """Sends requests of one recipient.

    Args:
        resolver: shared by all recipients.
        ca_file: certificates to trust in place of the system's.
    """

    def __init__(self, resolver: Resolver, ca_file: Path | None = None) -> None:
        self._backend = BoundedBackend(resolver)
        self._ca_file = ca_file
        self._pool: httpcore.ConnectionPool | None = None

    def send(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes,
        deadline: Deadline,
        secrets: Iterable[str] = (),
    ) -> Answer:
        """Send a request and say what its answer means; see ``exchange``."""
        return self.exchange(method, url, headers, body, deadline, secrets)[0]

    def exchange(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes,
        deadline: Deadline,
        secrets: Iterable[str] = (),
        most_bytes: int = 0,
        *,
        quotes_body: bool = True,
    ) -> tuple[Answer, bytes]:
        """Send a request; what its answer means, and of a success the content.

        Args:
            method: GET or POST.
            url: http or https.
            headers: without Host and Content-Length.
            body: empty for none.
            deadline: of everything.
            secrets: kept out of the reason.
            most_bytes: of the content of a success; 0: it is not wanted.
            quotes_body: the reason may repeat what the body of a failure says; not where the address is a
                secret, since a server may repeat it in a form that is not found.
        """
        self._backend.deadline = deadline
        fields = {"Host": _host_of(url), "User-Agent": "storage-sla", "Accept": "*/*", **headers}
        if body or method != "GET":
            fields["Content-Length"] = str(len(body))
        try:
            with self._connections().stream(
                method, url, headers=list(fields.items()), content=body
            ) as response:
                if 200 <= response.status < 300:
                    found = CONFIRMED, self._content(response, deadline, most_bytes)
                else:
                    found = self._not_taken(response, secrets, quotes_body), b""
            self._close_if_answered_twice()
            return found
        except (httpcore.TimeoutException, httpcore.NetworkError, httpcore.ProtocolError) as exc:
            self.close()
            return retry(_plain(str(exc) or type(exc).__name__, secrets)), b""
        except httpcore.UnsupportedProtocol:
            return retry("its address begins with neither http:// nor https://", MENDED_AFTER_S), b""
        except OSError as exc:  # the certificates to trust cannot be read
            return retry(f"{self._ca_file}: {reason_of(exc)}", MENDED_AFTER_S), b""

    def close(self) -> None:
        """Close the connections; the next request opens one."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _connections(self) -> httpcore.ConnectionPool:
        if self._pool is None:
            context = ssl.create_default_context(cafile=None if self._ca_file is None else str(self._ca_file))
            self._pool = httpcore.ConnectionPool(
                ssl_context=context, max_connections=1, http2=False, network_backend=self._backend
            )
        return self._pool

    def _close_if_answered_twice(self) -> None:
        """What came behind an answer would be taken for the answer to the next request, unseen by the server.

        httpcore itself closes a connection where such bytes come before the next request; those that came
        with the answer are in its parser (h11), which it does not show.
        """
        for connection in self._pool.connections if self._pool is not None else ():
            parser = getattr(getattr(connection, "_connection", None), "_h11_state", None)
            if parser is not None and parser.trailing_data[0]:
                log.warning("answered-twice", effect="the connection is closed; the second answer is ignored")
                self.close()
                return

    def _content(self, response: httpcore.Response, deadline: Deadline, most_bytes: int) -> bytes:
        if not most_bytes:
            self._backend.deadline = Deadline(min(DRAIN_S, deadline.left_s()))
        return self._excerpt(response, most_bytes or DRAINED_BYTES)

    def _not_taken(self, response: httpcore.Response, secrets: Iterable[str], quotes_body: bool) -> Answer:
        status = response.status
        headers = {name.lower(): value.decode("latin-1") for name, value in response.headers}
        if 300 <= status < 400:
            where = urlsplit(headers.get(b"location", ""))
            target = f" to {where.scheme}://{where.hostname}" if where.hostname else ""
            text = f"HTTP {status}: redirected{target}; write the new address"
            return retry(_plain(text, secrets), MENDED_AFTER_S)
        excerpt = self._excerpt(response, READ_BYTES).decode("utf-8", "replace").strip()
        said = f": {excerpt}" if excerpt and quotes_body else ""
        reason = _plain(f"HTTP {status}{said}", secrets)
        if status in NEVER:
            return refused(reason)
        if status in AGAIN or status >= 500:
            return retry(reason, retry_after_s(headers.get(b"retry-after", "")))
        return retry(reason, MENDED_AFTER_S)

    @staticmethod
    def _excerpt(response: httpcore.Response, most: int) -> bytes:
        """The first bytes of the body, those that come in time."""
        found = b""
        try:
            for piece in response.iter_stream():
                found += piece[: most - len(found)]
                if len(found) >= most:
                    break
        except (httpcore.TimeoutException, httpcore.NetworkError, httpcore.ProtocolError):
            pass  # the status has been said, and that is what counts
        return found


def _plain(text: str, secrets: Iterable[str]) -> str:
    """What may be shown of a text: secrets first, since a cut one would not be found."""
    return printable(hidden(text, secrets), REASON_CHARACTERS)


def retry_after_s(text: str, now_s: float | None = None) -> float | None:
    """Seconds of a Retry-After header, a number or a date; None: there is none that can be read."""
    text = text.strip()
    if text.isascii() and text.isdecimal() and len(text) <= 9:
        return min(MOST_AFTER_S, float(text))
    try:
        at_s = parsedate_to_datetime(text).timestamp()
    except (ValueError, OverflowError):
        return None
    return min(MOST_AFTER_S, max(0.0, at_s - (time.time() if now_s is None else now_s)))


def _host_of(url: str) -> str:
    return urlsplit(url).netloc.rpartition("@")[2]
