"""The application server as a process: sockets, waitress, threads, start and stop.

Two sockets listen, each with a waitress server, threads and places of its own. TCP is for browsers;
``DATA_DIR/api.sock`` is for the command line of those who may enter the data directory. The Unix socket has
threads and places that TCP cannot take, so whatever happens at TCP, ``sla mode observe`` gets through.

A connection that does not become a request is closed after some time:

    phase      it waits for                            it is closed after
    asking     the rest of a request (or its begin)    REQUEST_LIMIT_S, however slowly bytes trickle
    answering  the peer to read what it asked for      ANSWER_LIMIT_S
    idle       the next request                        IDLE_LIMIT_S
    working    this server                             never

When all places are taken, connections that ask, answer or idle are closed at once: of the user with the most
connections, the one whose peer has done nothing for longest. A peer that does not read holds a place only, no
thread: the connection's output takes an answer whole, and has one at a time. So the connections of one user
cannot keep another user out. Live streams alone wait for their peers, in threads of their own.

Threads: the caller's runs the loop of TCP, ``api-local`` that of the Unix socket; ``api-mailbox`` takes
messages; waitress has one for each live stream and 16 more, and 4 behind the Unix socket. On the stop: live
streams end, the loops end, all threads are joined with a deadline. State: ``HttpListener._waits``, what each
connection waits for; only the thread of ``serve`` touches it.

``RUNTIME_DIR/api.port`` (the port of the page) says that everything answers. Nothing here needs recovery: the
next snapshot comes within a second.

Downside accepted: a browser that stops reading without closing holds its place for two minutes
(ANSWER_LIMIT_S) unless others need it, with at most 1 MiB of memory and one answer.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import structlog
import waitress
from flask import Flask
from waitress import wasyncore
from waitress.buffers import ReadOnlyFileBasedBuffer
from waitress.channel import ClientDisconnected, HTTPChannel

import dashboard
from pmdaemon.mailbox import Mailbox, attach
from pmdaemon.reserve import initialized
from pmdaemon.runtime import sockets, watchdog
from pmdaemon.runtime.clock import Clock, server_clock
from pmdaemon.runtime.config import parse_address
from pmdaemon.runtime.files import make_directory, write_whole
from pmdaemon.runtime.stop import Stop
from pmdaemon.runtime.threads import ThreadGroup
from sla_server.api.access import Access
from sla_server.api.accounts import Directory
from sla_server.api.acting import ALONE, ActingServer
from sla_server.api.config import OIDC_CALLBACK, WORKER_THREADS, ApiConfig
from sla_server.api.context import AppContext
from sla_server.api.live_view import LiveView
from sla_server.api.mailbox_thread import MailboxThread, RequestPoster
from sla_server.api.metrics import MailboxCollector, Metrics
from sla_server.api.operations import Operations
from sla_server.api.passwords import network_of
from sla_server.api.scope import Scopes
from sla_server.api.security import PEER_UID, Guard, Logins, load_or_make_token, session_key
from sla_server.api.tls import PageCertificate
from sla_server.config import ResolvedConfig
from sla_server.db.queries.reader import SqlReader, open_reader

if TYPE_CHECKING:
    from sla_server.api.forwarding import RequestForwarder
    from sla_server.api.oidc import OidcProvider

log = structlog.get_logger("appserver")
Phase = Literal["asking", "answering", "idle", "working"]
REQUEST_LIMIT_S: Final = 20.0  # a body is 256 KB at most: 13 KB/s through a slow tunnel
ANSWER_LIMIT_S: Final = 120.0  # the chart library has 5 MB: 42 KB/s
IDLE_LIMIT_S: Final = 60.0
LIMITS_S: Final[Mapping[Phase, float]] = {
    "asking": REQUEST_LIMIT_S,
    "answering": ANSWER_LIMIT_S,
    "idle": IDLE_LIMIT_S,
}
LOOP_S: Final = 0.25  # how late the loop notices the stop and a limit
STOP_LIMIT_S: Final = 5.0
OUTPUT_MAX_BYTES: Final = 1 << 20  # of one connection in memory; what is more waits in a temporary file
SOCKET_NAME: Final = "api.sock"
PEER_HEADER: Final = PEER_UID.removeprefix("HTTP_")
# For the command line; each call takes a thread for some milliseconds, a change for 5 s at most.
LOCAL_THREADS: Final = 4
LOCAL_PLACES: Final = 64


def open_listener(address: str) -> socket.socket:
    """Bind and listen.

    Raises:
        ConfigError: the address is in use or not this machine's.
    """
    return sockets.open_listener("api.listen", *parse_address(address))


def open_local(path: Path) -> socket.socket | None:
    """Listen on a Unix socket of mode 0600; None, with a warning, where the file system has none.

    A socket that another process left there is replaced. The path may be longer than the 107 bytes of a
    socket's address: it is reached through its directory's descriptor.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.unlink(missing_ok=True)
        folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            listener.bind(f"/proc/self/fd/{folder}/{path.name}")
        finally:
            os.close(folder)
        path.chmod(0o600)
        listener.listen()
    except OSError as exc:
        listener.close()
        log.warning("no-local-socket", path=str(path), error=str(exc), effect="sla uses TCP")
        return None
    return listener


class NothingToRead(Exception):
    """A part of a TLS record, or of the handshake, has arrived; more must come."""


class HttpConnection(HTTPChannel):  # type: ignore[misc]  # waitress has no types
    """One connection. Its answers wait in no thread; it counts how much its peer has taken."""

    sent_bytes = 0

    def service(self) -> None:
        """Answer a request so that its thread never waits for a peer that does not read.

        Requests sent before the answer to the last are dropped, and that answer ends the connection: the
        next answer would wait for the first. A file is sent in full, whatever range is asked for: it stays on
        the disk until the peer takes it, while a range is made in pieces. HTTP allows both.
        """
        with self.requests_lock:
            first, *more = self.requests
            first.headers.pop("RANGE", None)
            first.headers.pop(PEER_HEADER, None)
            peer = self.socket  # None: closed meanwhile
            if peer is not None and peer.family == socket.AF_UNIX:
                first.headers[PEER_HEADER] = str(sockets.unix_peer_uid(peer))
            if more:
                first.headers["CONNECTION"] = "close"
                self.requests[1:] = []
        for request in more:
            request.close()
        super().service()

    def recv(self, buffer_size: int) -> bytes:
        """As in waitress; with TLS there may be nothing to read although something has arrived."""
        try:
            return bytes(super().recv(buffer_size))
        except BlockingIOError as exc:
            raise NothingToRead from exc

    def handle_read(self) -> None:
        """As in waitress."""
        with contextlib.suppress(NothingToRead):
            super().handle_read()

    def write_soon(self, data: Any) -> int:
        """As in waitress; a file that finds its peer gone is closed."""
        try:
            return int(super().write_soon(data))
        except ClientDisconnected:
            if isinstance(data, ReadOnlyFileBasedBuffer):
                data.close()
            raise

    def send(self, data: bytes, do_close: bool = True) -> int:
        """As in waitress, counted."""
        sent = int(super().send(data, do_close=do_close))
        self.sent_bytes += sent
        return sent


class Wait(NamedTuple):
    """The phase of a connection, its begin, and the time when its peer last did something."""

    phase: Phase
    since_s: float
    moved_s: float
    sent_bytes: int


class HttpListener:
    """One listening socket and everything behind it."""

    def __init__(
        self,
        app: Any,
        listener: socket.socket,
        *,
        threads: int,
        places: int,
        max_body_bytes: int,
        tls: PageCertificate | None = None,
        is_behind_proxy: bool = False,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._channels: dict[int, Any] = {}
        self._places = places
        self._now_s = now_s
        self._waits: dict[Any, Wait] = {}
        self._tls = tls
        self._port = listener.getsockname()[1] if listener.family != socket.AF_UNIX else None
        self._server = waitress.create_server(
            app,
            map=self._channels,
            sockets=[listener],
            threads=threads,
            connection_limit=places + 64,  # ``places`` is reached first; the map also holds the listener
            max_request_body_size=max_body_bytes,
            outbuf_high_watermark=OUTPUT_MAX_BYTES,
            outbuf_overflow=OUTPUT_MAX_BYTES,
            asyncore_use_poll=True,
            ident=None,
            url_scheme="http" if tls is None else "https",
            clear_untrusted_proxy_headers=not is_behind_proxy,  # the application reads them (LocalProxy)
        )
        self._server.channel_class = HttpConnection
        self._accept_at_s = 0.0  # until then nothing is accepted: without descriptors
        self._accepts = self._server.readable
        self._server.readable = self._is_accepting
        self._server.accept = self._accept

    def _accept(self) -> Any:
        accepted = sockets.accept(self._server.socket, self._pause_accepting)
        if accepted is None or self._tls is None:
            return accepted
        sock, peer = accepted
        try:
            return self._tls.wrap(sock), peer
        except OSError:  # gone already
            sock.close()
            return None

    def _pause_accepting(self, for_ns: int) -> None:
        self._accept_at_s = self._now_s() + for_ns / 1e9

    def _is_accepting(self) -> bool:
        return self._now_s() >= self._accept_at_s and bool(self._accepts())

    def serve(self, stop: Stop, end_streams: Callable[[], None]) -> None:
        """Serve until the stop; then let live streams end, stop the threads, close every connection."""
        try:
            while not stop.is_set():
                watchdog.beat()
                wasyncore.loop(timeout=LOOP_S, use_poll=True, map=self._channels, count=1)
                self.make_room()
        finally:
            end_streams()
            self._server.task_dispatcher.shutdown(cancel_pending=True, timeout=STOP_LIMIT_S)
            for channel in list(self._server.active_channels.values()):
                channel.handle_close()  # with the files of its answers
            wasyncore.close_all(map=self._channels, ignore_all=True)

    def make_room(self) -> None:
        """Close connections over their limit, and as many others as the next connection needs for a place."""
        now_s = self._now_s()
        waits: dict[Any, Wait] = {}
        for channel in list(self._server.active_channels.values()):
            wait = self._wait_of(channel, now_s)
            if now_s - wait.since_s >= LIMITS_S.get(wait.phase, now_s + 1):
                channel.handle_close()
            else:
                waits[channel] = wait
        if len(waits) >= self._places:
            uids = {} if self._port is None else sockets.client_uids(self._port)
            users = {channel: user_of(channel, uids, self._port) for channel in waits}
            waiting = {channel: wait.moved_s for channel, wait in waits.items() if wait.phase != "working"}
            for channel in connections_to_close(waiting, users, len(waits) - self._places + 1):
                channel.handle_close()
                del waits[channel]
        self._waits = waits

    def _wait_of(self, channel: Any, now_s: float) -> Wait:
        phase, sent_bytes = phase_of(channel), channel.sent_bytes
        before = self._waits.get(channel)
        if before is None or before.phase != phase:
            return Wait(phase, now_s, now_s, sent_bytes)
        return Wait(
            phase, before.since_s, before.moved_s if before.sent_bytes == sent_bytes else now_s, sent_bytes
        )


def user_of(channel: Any, uids: Mapping[Any, int], port: int | None) -> int | str | None:
    """Who has a connection: a user of this machine, or a place in the network; None: on the Unix socket."""
    if port is None:
        return None
    uid = uids.get(channel.addr[:2])
    return network_of(str(channel.addr[0])) if uid is None else uid


def phase_of(channel: Any) -> Phase:
    """The phase that a connection is in."""
    if channel.total_outbufs_len:
        return "answering"
    if channel.requests:
        return "working"
    is_new = channel.last_activity == channel.creation_time
    return "asking" if is_new or channel.request is not None else "idle"


def connections_to_close(
    waiting: Mapping[Any, float], users: Mapping[Any, int | str | None], count: int
) -> list[Any]:
    """Choose ``count`` connections to close, fewer if there are not so many.

    Args:
        waiting: connection that may be closed -> when its peer last did something.
        users: every connection -> its user (``user_of``).
        count: how many places are needed.
    """
    connections_of = Counter(users.values())
    left = sorted(waiting, key=waiting.__getitem__)
    chosen: list[Any] = []
    while left and len(chosen) < count:
        first = max(left, key=lambda channel: connections_of[users[channel]])  # the first of equals
        left.remove(first)
        connections_of[users[first]] -= 1
        chosen.append(first)
    return chosen


@dataclass
class WebServer:
    """One application server over a given source, mailbox and listener; ``run`` and tests make it."""

    config: ApiConfig
    data_dir: Path
    source: SqlReader
    mailbox: Mailbox
    listener: socket.socket
    stop: Stop
    clock: Clock = field(default_factory=server_clock)
    local: socket.socket | None = None
    """The Unix socket, listening; None: TCP only."""
    nodes: tuple[str, ...] = ()
    """Of the cluster, this server's own first."""
    acting: ActingServer = ALONE
    """Which of several servers acts."""
    other_runbook: str = ""
    """See ``AppContext``."""

    def __post_init__(self) -> None:
        host, self.port = self.listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        scheme = "https" if self.config.tls.certificate else "http"
        self.address = f"{self.config.external_url or f'{scheme}://{shown}:{self.port}'}/"
        self.context = make_context(
            self.config,
            self.data_dir,
            self.source,
            self.mailbox,
            self.clock,
            self.address,
            self.nodes,
            self.acting,
            self.other_runbook,
        )
        tls = self.config.tls
        self.certificate = (
            None if tls.certificate is None else PageCertificate(tls.certificate, tls.key, self.clock)
        )
        self.app: Flask = dashboard.create_app(self.context)

    def _each_turn(self) -> None:
        """What is due by itself. Thread: ``api-mailbox``, so it reads no SQL."""
        self.context.access.record_failed_logins()
        self.context.access.end_lapsed_tokens()

    def announce(self, runtime_dir: Path) -> None:
        """Write the port file; clients may come from now on. Sign-in addresses are made when asked for."""
        self.context.metrics.folder = runtime_dir / "metrics"
        write_whole(runtime_dir / "api.port", f"{self.port}\n")
        initialized()
        log.info("page-ready", address=self.address, sign_in="sla login")

    def serve(self) -> int:
        """Serve until the stop; 1 if a thread died, else 0."""
        threads = ThreadGroup(lambda name, exc: self.stop.set(f"thread {name} died: {exc}"))
        mailbox_thread = MailboxThread(
            self.mailbox,
            self.context.live,
            self.context.operations,
            self.stop,
            self._each_turn,
        )
        threads.start("api-mailbox", mailbox_thread.run)
        body_bytes = self.config.max_body_bytes
        if self.local is not None:
            local = HttpListener(
                self.app, self.local, threads=LOCAL_THREADS, places=LOCAL_PLACES, max_body_bytes=body_bytes
            )
            threads.start("api-local", lambda: local.serve(self.stop, self.context.live.close))
        workers = WORKER_THREADS + self.config.live_streams_max
        browsers = HttpListener(
            self.app,
            self.listener,
            threads=workers,
            places=4 * workers,
            max_body_bytes=body_bytes,
            tls=self.certificate,
            is_behind_proxy=bool(self.config.external_url),
        )
        try:
            browsers.serve(self.stop, self.context.live.close)
        finally:
            log.info("page-stopping", reason=self.stop.reason)
            self.stop.set("the page stopped")
            self.context.access.record_failed_logins(all_of_them=True)
            threads.join(2 * STOP_LIMIT_S)
        return 1 if threads.failed else 0


def make_context(
    config: ApiConfig,
    data_dir: Path,
    source: SqlReader,
    mailbox: Mailbox,
    clock: Clock,
    address: str,
    nodes: tuple[str, ...] = (),
    acting: ActingServer = ALONE,
    other_runbook: str = "",
) -> AppContext:
    """Make everything the handlers work with.

    Raises:
        ConfigError: the token file is unusable.
    """
    token = load_or_make_token(config.token_path(data_dir))
    live = LiveView(clock, streams_max=config.live_streams_max, stale_after_s=config.stale_after_s)
    directory = Directory(source.access, clock, config.oidc.token_days)
    operations = Operations(RequestPoster(mailbox), clock, wait_s=config.request_wait_s, check=acting.check)
    guard = Guard(token, config.hosts(), directory, needs_login=config.reading == "login")
    return AppContext(
        config=config,
        token=token,
        source=source,
        live=live,
        operations=operations,
        guard=guard,
        logins=Logins(clock),
        scopes=Scopes(source, clock),
        access=Access(directory, operations, clock, config=config),
        metrics=Metrics(
            live,
            operations,
            MailboxCollector(mailbox.name, mailbox.stats),
            source,
            config.metrics_rows_max,
        ),
        clock=clock,
        address=address,
        oidc=make_provider(config, token, clock, address),
        nodes=nodes,
        acting=acting,
        forwarder=make_forwarder(acting, guard, token, config),
        other_runbook=other_runbook,
    )


def make_forwarder(
    acting: ActingServer, guard: Guard, token: str, config: ApiConfig
) -> RequestForwarder | None:
    """None: there is no other server. Its library takes some MB, so it is read for those who use it."""
    if acting.runtime_dir is None:
        return None
    from sla_server.api.forwarding import RequestForwarder

    return RequestForwarder(acting, guard, token, config.request_wait_s)


def make_provider(config: ApiConfig, token: str, clock: Clock, address: str) -> OidcProvider | None:
    """The provider that is configured; its libraries take some MB, so they are read for those who use it."""
    if not config.oidc.issuer:
        return None
    from sla_server.api.oidc import OidcProvider

    redirect_url = config.oidc.redirect_url or address.rstrip("/") + OIDC_CALLBACK
    return OidcProvider(config.oidc, redirect_url, session_key(token), clock)


def run(config: ResolvedConfig, stop: Stop) -> int:
    """Serve until the stop; returns the exit status.

    Raises:
        ConfigError: the address is taken, or the token file is unusable.
        MailboxError: the small segment is missing or of another layout.
    """
    listener = open_listener(config.api.listen)
    mailbox = attach(config.runtime_dir / "app.mbx", "appserver")
    local_path = config.data_dir / SOCKET_NAME
    make_directory(config.data_dir, 0o700)
    local = open_local(local_path)
    try:
        source = open_reader(config.database, config.data_dir)
        cluster = config.cluster
        nodes = (cluster.node, *(peer.name for peer in cluster.peers)) if cluster else ()
        takes_over = cluster is not None and cluster.takeover.enabled
        authority = config.ca_dir / "ca.crt"
        acting = ActingServer(config.runtime_dir if takes_over else None, server_clock(), authority)
        server = WebServer(
            config.api,
            config.data_dir,
            source,
            mailbox,
            listener,
            stop,
            local=local,
            nodes=nodes,
            acting=acting,
            other_runbook=config.notify.runbook_url,
        )
        server.announce(config.runtime_dir)
        return server.serve()
    finally:
        (config.runtime_dir / "api.port").unlink(missing_ok=True)
        if local is not None:
            local_path.unlink(missing_ok=True)
            local.close()
        mailbox.close()
        listener.close()
