"""Receivers on loopback that answer, hang, send slowly or close, as a test says; HTTP, and plain streams."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

RELEASED_S: Final = 60.0
Request = tuple[str, str, dict[str, str], bytes]
"""Method, path, headers and body."""


class HttpReceiver:
    """An HTTP server; ``answers`` are used one after another, the last one again and again.

    Attributes:
        requests: (method, path, headers, body) in the order of arrival. An answer finds its own with
            ``request_of``: the newest here may have come over another connection meanwhile.
        released: set by the test to let handlers go that hang.
    """

    def __init__(
        self, *answers: Callable[[BaseHTTPRequestHandler], None], context: ssl.SSLContext | None = None
    ):
        self.requests: list[Request] = []
        self.released = threading.Event()
        self._answers = list(answers) or [status(200)]
        self._lock = threading.Lock()  # guards requests and _answers
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            received: Request

            def handle_request(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                content = self.rfile.read(length)
                self.received = self.command, self.path, dict(self.headers), content
                with receiver._lock:
                    receiver.requests.append(self.received)
                    answers = receiver._answers
                    answer = answers.pop(0) if len(answers) > 1 else answers[0]
                with contextlib.suppress(OSError):
                    answer(self)

            do_POST = do_GET = handle_request

            def log_message(self, *_args: Any) -> None:
                """Tests read ``requests``."""

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            receiver: HttpReceiver

            def handle_error(self, request: Any, client_address: Any) -> None:
                """A client that gives up is what tests are about."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self._server.receiver = self
        if context is not None:
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self.port = self._server.server_address[1]
        scheme = "http" if context is None else "https"
        self.url = f"{scheme}://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    def events(self) -> list[dict[str, Any]]:
        """What a webhook of ours has brought, each event as often as it came."""
        bodies = [body for _, _, _, body in list(self.requests)]
        return [alert["delivery"]["event"] for body in bodies for alert in json.loads(body)["alerts"]]

    def __enter__(self) -> HttpReceiver:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(60)


Responder = Callable[[BaseHTTPRequestHandler], None]


def request_of(handler: BaseHTTPRequestHandler) -> Request:
    """The request that this handler answers."""
    found: Request = handler.received  # type: ignore[attr-defined]
    return found


def status(code: int, content: bytes = b"", **headers: str) -> Responder:
    """Answer at once; ``_`` in the names of headers is ``-``."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(code)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content)

    return answer


def hang(handler: BaseHTTPRequestHandler) -> None:
    """Answer nothing."""
    _receiver(handler).released.wait(RELEASED_S)
    handler.close_connection = True


def close(handler: BaseHTTPRequestHandler) -> None:
    """Close the connection without an answer."""
    handler.close_connection = True


def drip(code: int, *, headers: bool) -> Responder:
    """Send the answer's headers, or its body, byte by byte and without end."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(b"HTTP/1.1 %d Fine\r\n" % code)
        if not headers:
            handler.wfile.write(b"Content-Length: 1000000\r\n\r\n")
        handler.wfile.write(b"X-Slow: ")
        while not _receiver(handler).released.wait(0.02):
            handler.wfile.write(b"a")
        handler.close_connection = True

    return answer


def huge(code: int) -> Responder:
    """Send a body without end, as fast as it is taken."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(b"HTTP/1.1 %d Fine\r\nContent-Length: 100000000000\r\n\r\n" % code)
        while not _receiver(handler).released.is_set():
            handler.wfile.write(b"a" * 65_536)

    return answer


def _receiver(handler: BaseHTTPRequestHandler) -> HttpReceiver:
    found: HttpReceiver = handler.server.receiver  # type: ignore[attr-defined]
    return found


@contextlib.contextmanager
def stream_listener(family: int = socket.AF_INET, address: Any = ("127.0.0.1", 0)) -> Iterator[socket.socket]:
    """A listening socket of a test."""
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind(address)
        listener.listen()
        listener.settimeout(RELEASED_S)
        yield listener


def read_all(sock: socket.socket, count: int) -> bytes:
    """Exactly ``count`` bytes."""
    sock.settimeout(RELEASED_S)
    found = b""
    while len(found) < count:
        piece = sock.recv(count - len(found))
        if not piece:
            raise EOFError(f"{len(found)} of {count} bytes came: {found!r}")
        found += piece
    return found
