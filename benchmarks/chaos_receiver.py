"""``python -m benchmarks.chaos_receiver``: a receiver of webhooks on loopback that fails as a file says.

Each request is written to the journal, one line of JSON, before it is answered; so the journal has what
reached the receiver, also if it is killed. Modes, read from the file for each request:

    well     200
    slow     200 after a second
    twice    200, and 200 once more right behind it
    fail     500
    refuse   400 for a single notice, 500 for several
    hang     no answer until the sender gives up
    close    the connection is closed in the middle of the answer's first line
"""

from __future__ import annotations

import json
import os
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import click

TAKEN: Final = ("well", "slow", "twice")
MODES: Final = (*TAKEN, "fail", "refuse", "hang", "close")
SLOW_S: Final = 1.0
HANG_S: Final = 30.0


class Receiver(ThreadingHTTPServer):
    """See the module."""

    daemon_threads = True

    def __init__(self, port: int, journal: Path, mode: Path) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self._fd = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._mode = mode
        self._lock = threading.Lock()  # one line after another

    def take(self, body: bytes) -> tuple[str, int]:
        """Write down a request; returns the mode, and how many notices it has."""
        notices = [alert["delivery"] for alert in json.loads(body)["alerts"]]
        with self._lock:
            mode = self._mode.read_text()
            os.write(self._fd, (json.dumps({"mode": mode, "notices": notices}) + "\n").encode())
        return mode, len(notices)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A sender that gives up is expected."""


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server: Receiver

    def do_POST(self) -> None:
        """Answer as the mode says."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        mode, notices = self.server.take(body)
        if mode == "hang":
            self.connection.settimeout(HANG_S)
            self.rfile.read(1)
            self.close_connection = True
        elif mode == "twice":
            self.wfile.write(2 * b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")  # in one go
        elif mode == "close":
            self.wfile.write(b"HTTP/1.1 2")
            self.close_connection = True
        else:
            if mode == "slow":
                time.sleep(SLOW_S)
            code = 200 if mode in TAKEN else 400 if mode == "refuse" and notices == 1 else 500
            self.send_response(code)
            self.send_header("Content-Length", "0")
            self.end_headers()

    def log_message(self, *_args: Any) -> None:
        """The journal has it all."""


@click.command()
@click.option("--port", type=int, required=True)
@click.option("--journal", type=click.Path(path_type=Path), required=True)
@click.option("--mode", type=click.Path(path_type=Path), required=True)
def main(port: int, journal: Path, mode: Path) -> None:
    """Receive until killed."""
    Receiver(port, journal, mode).serve_forever()


if __name__ == "__main__":
    main()
