"""The web server: the app behind its doors, the mailbox thread beside it, start and stop.

Threads: the caller's runs the loop of TCP, ``api-local`` that of the Unix socket; ``api-mailbox`` takes
messages; waitress has one for each live stream and 16 more, and 4 behind the Unix socket. On the stop: live
streams end, the loops end, all threads are joined with a deadline.

Downside accepted: a browser that stops reading without closing holds its place for two minutes
(``doors.ANSWER_LIMIT_S``) unless others need it, with at most 1 MiB of memory and one answer.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import structlog
from flask import Flask

import dashboard
from pmdaemon.runtime import sockets
from pmdaemon.runtime.clock import Clock, server_clock
from pmdaemon.runtime.files import write_whole
from pmdaemon.runtime.stop import Stop
from pmdaemon.runtime.threads import ThreadGroup
from sla_server.api.config import WORKER_THREADS, ApiConfig, split_address
from sla_server.api.context import AppContext
from sla_server.api.doors import STOP_LIMIT_S, HttpListener
from sla_server.api.live_view import LiveView
from sla_server.api.mailbox_thread import ApiMailbox, MailboxThread, RequestPoster
from sla_server.api.metrics import MailboxCollector, Metrics
from sla_server.api.operations import Operations
from sla_server.api.security import Guard, Logins, load_or_make_token
from sla_server.api.source import SqlSource

log = structlog.get_logger("appserver")
LOCAL_THREADS: Final = (
    4  # for the command line; each call takes one for some milliseconds, a change for 5 s at most
)
LOCAL_PLACES: Final = 64


def open_listener(address: str) -> socket.socket:
    """Bind and listen.

    Raises:
        ConfigError: the address is in use or not this machine's.
    """
    return sockets.open_listener("api.listen", *split_address(address))


@dataclass
class WebServer:
    """One application server over given parts; ``process.run`` and tests make it."""

    config: ApiConfig
    data_dir: Path
    source: SqlSource
    box: ApiMailbox
    listener: socket.socket
    stop: Stop
    clock: Clock = field(default_factory=server_clock)
    local: socket.socket | None = None
    """The Unix socket, listening; None: TCP only."""

    def __post_init__(self) -> None:
        host, self.port = self.listener.getsockname()[:2]
        self.address = f"http://[{host}]:{self.port}/" if ":" in host else f"http://{host}:{self.port}/"
        self.parts = make_parts(self.config, self.data_dir, self.source, self.box, self.clock, self.address)
        self.app: Flask = dashboard.create_app(self.parts)

    def announce(self, runtime_dir: Path) -> None:
        """Write the port file; clients may come from now on. Sign-in addresses are made when asked for."""
        self.parts.meters.folder = runtime_dir / "metrics"
        write_whole(runtime_dir / "api.port", f"{self.port}\n")
        log.info("page-ready", address=self.address, sign_in="sla login")

    def serve(self) -> int:
        """Serve until the stop; 1 if a thread died, else 0."""
        threads = ThreadGroup(lambda name, exc: self.stop.set(f"thread {name} died: {exc}"))
        bridge = MailboxThread(self.box, self.parts.live, self.parts.calls, self.stop)
        threads.start("api-mailbox", bridge.run)
        body_bytes = self.config.max_body_bytes
        if self.local is not None:
            local = HttpListener(
                self.app, self.local, threads=LOCAL_THREADS, places=LOCAL_PLACES, max_body_bytes=body_bytes
            )
            threads.start("api-local", lambda: local.serve(self.stop, self.parts.live.close))
        workers = WORKER_THREADS + self.config.live_streams_max
        door = HttpListener(
            self.app, self.listener, threads=workers, places=4 * workers, max_body_bytes=body_bytes
        )
        try:
            door.serve(self.stop, self.parts.live.close)
        finally:
            log.info("page-stopping", reason=self.stop.reason)
            self.stop.set("the page stopped")
            threads.join(2 * STOP_LIMIT_S)
        return 1 if threads.failed else 0


def make_parts(
    config: ApiConfig, data_dir: Path, source: SqlSource, box: ApiMailbox, clock: Clock, address: str
) -> AppContext:
    """Everything the handlers work with.

    Raises:
        ConfigError: the token file is unusable.
    """
    token = load_or_make_token(config.token_path(data_dir))
    live = LiveView(clock, streams_max=config.live_streams_max, stale_after_s=config.stale_after_s)
    calls = Operations(RequestPoster(box), clock, wait_s=config.request_wait_s)
    return AppContext(
        config=config,
        token=token,
        source=source,
        live=live,
        calls=calls,
        guard=Guard(token, config.allowed_hosts),
        logins=Logins(clock),
        meters=Metrics(live, calls, MailboxCollector(box.name, box.stats)),
        clock=clock,
        address=address,
    )
