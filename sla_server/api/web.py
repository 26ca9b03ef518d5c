"""The web server: waitress around the app, the mailbox thread beside it, start and stop.

Threads: the caller's runs the socket loop; ``api-mailbox`` takes messages; waitress has one for each live
stream and 16 more. On the stop: live streams end, the loop ends, waitress' threads and ``api-mailbox`` are
joined with a deadline.

Downside accepted: a browser that stops reading without closing holds its place and thread until its
connection breaks, with at most 1 MiB of output.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import structlog
import waitress
from flask import Flask
from waitress import wasyncore

import dashboard
from pmdaemon.runtime import listening, watchdog
from pmdaemon.runtime.clock import Clock, SystemClock
from pmdaemon.runtime.files import write_whole
from pmdaemon.runtime.stop import Stop
from pmdaemon.runtime.threads import ThreadGroup
from sla_server.api.bridge import Box, Bridge, Poster
from sla_server.api.calls import Calls
from sla_server.api.config import WORKER_THREADS, ApiConfig, split_address
from sla_server.api.live import LiveView
from sla_server.api.meters import MailboxCollector, Meters
from sla_server.api.parts import Parts
from sla_server.api.security import Guard, Logins, load_or_make_token
from sla_server.api.source import Source

log = structlog.get_logger("appserver")
LOOP_S: Final = 0.25  # how late the socket loop notices the stop
STOP_LIMIT_S: Final = 5.0
OUTPUT_MAX_BYTES: Final = 1 << 20  # of one connection, before its thread waits for the browser


def open_listener(address: str) -> socket.socket:
    """Bind and listen.

    Raises:
        ConfigError: the address is in use or not this machine's.
    """
    return listening.open_listener("api.listen", *split_address(address))


@dataclass
class WebServer:
    """One application server over given parts; ``process.run`` and tests make it."""

    config: ApiConfig
    data_dir: Path
    source: Source
    box: Box
    listener: socket.socket
    stop: Stop
    clock: Clock = SystemClock()  # noqa: RUF009 - stateless

    def __post_init__(self) -> None:
        host, self.port = self.listener.getsockname()[:2]
        self.address = f"http://[{host}]:{self.port}/" if ":" in host else f"http://{host}:{self.port}/"
        self.parts = make_parts(self.config, self.data_dir, self.source, self.box, self.clock, self.port)
        self.app: Flask = dashboard.create_app(self.parts)

    def announce(self, runtime_dir: Path) -> None:
        """Make a one-time login address and write both files; clients may come from now on."""
        url = f"{self.address}login?code={self.parts.logins.issue(life_s=None)}"
        self.parts.meters.folder = runtime_dir / "metrics"
        write_whole(runtime_dir / "login.url", url + "\n")
        write_whole(runtime_dir / "api.port", f"{self.port}\n")
        log.info("page-ready", address=self.address, sign_in_once=url)

    def serve(self) -> int:
        """Serve until the stop; 1 if the mailbox thread died, else 0."""
        threads = ThreadGroup(lambda name, exc: self.stop.set(f"thread {name} died: {exc}"))
        bridge = Bridge(self.box, self.parts.live, self.parts.calls, self.stop)
        threads.start("api-mailbox", bridge.run)
        channels: dict[int, Any] = {}
        server = waitress.create_server(
            self.app,
            map=channels,
            sockets=[self.listener],
            threads=WORKER_THREADS + self.config.live_streams_max,
            connection_limit=4 * (WORKER_THREADS + self.config.live_streams_max),
            max_request_body_size=self.config.max_body_bytes,
            outbuf_high_watermark=OUTPUT_MAX_BYTES,
            outbuf_overflow=OUTPUT_MAX_BYTES,
            asyncore_use_poll=True,
            ident=None,
        )
        try:
            while not self.stop.is_set():
                watchdog.beat()
                wasyncore.loop(timeout=LOOP_S, use_poll=True, map=channels, count=1)
        finally:
            log.info("page-stopping", reason=self.stop.reason)
            self.parts.live.close()
            server.task_dispatcher.shutdown(cancel_pending=True, timeout=STOP_LIMIT_S)
            wasyncore.close_all(map=channels, ignore_all=True)
            self.stop.set("the page stopped")
            threads.join(STOP_LIMIT_S)
        return 1 if threads.failed else 0


def make_parts(config: ApiConfig, data_dir: Path, source: Source, box: Box, clock: Clock, port: int) -> Parts:
    """Everything the handlers work with.

    Raises:
        ConfigError: the token file is unusable.
    """
    token = load_or_make_token(config.token_path(data_dir))
    live = LiveView(clock, streams_max=config.live_streams_max, stale_after_s=config.stale_after_s)
    calls = Calls(Poster(box), clock, wait_s=config.request_wait_s)
    return Parts(
        config=config,
        token=token,
        source=source,
        live=live,
        calls=calls,
        guard=Guard(token, config.allowed_hosts),
        logins=Logins(clock),
        meters=Meters(live, calls, MailboxCollector(box.name, box.stats)),
        clock=clock,
        port=port,
    )
