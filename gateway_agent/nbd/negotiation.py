"""One client until its transmission phase: the I/O around ``ServerHandshake``.

It names the client, secures the connection if asked to, opens the volume's storage and hands the connection
to a session. It ends by itself after ``LIMIT_NS``, so that a client that says nothing holds no descriptor for
ever. A plane has at most ``MOST_NEGOTIATIONS`` at a time (``NegotiationTable``), so that a crowd that reaches
the port leaves descriptors and memory to those that work.
"""

from __future__ import annotations

import socket
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

import structlog

from gateway_agent.errors import ExportRefused, GatewayError
from gateway_agent.nbd import protocol as p
from gateway_agent.nbd.access import ClientIdentity, names_of
from gateway_agent.nbd.accounting import StreamAccount
from gateway_agent.nbd.exports import ExportTable
from gateway_agent.nbd.handshake import (
    TLS_REQUIRED,
    Action,
    Close,
    HandshakeState,
    Open,
    Send,
    ServerHandshake,
    StartTls,
    Transmit,
)
from gateway_agent.nbd.limits import Pending
from gateway_agent.nbd.listeners import ListenerGuard
from gateway_agent.nbd.loop import IN, EventLoop
from gateway_agent.nbd.sockets import Connection, client_name, peer_address
from gateway_agent.nbd.tls import TlsConnection, TlsOpening
from gateway_agent.nbd.upstream import Upstream, UpstreamOpening
from gateway_agent.nbd.upstream_handshake import NO_EXTENDED_HEADERS
from gateway_agent.nbd.volume import Volume
from pmdaemon.errors import ConfigError

log = structlog.get_logger("negotiation")
LIMIT_NS: Final = 30 * 10**9  # people type into nbdsh during negotiation
MOST_NEGOTIATIONS: Final = 1024
_RECEIVE_BYTES: Final = 65_536
_MOST_LOOKS: Final = 16  # for a client that can be given up: as many for 100 clients as for 1,000


class Negotiation:
    """See the module docstring.

    Args:
        loop: what watches it.
        sock: the client's socket, prepared.
        exports: what may be asked for.
        on_end: called once when this object has let go of the client.
        guard: of the plane's listeners; without one there is no TLS.
        tls: what this client is offered, or must ask for.

    Attributes:
        client: as far as it is known now.
    """

    def __init__(
        self,
        loop: EventLoop,
        sock: socket.socket,
        exports: ExportTable,
        on_end: Callable[[Negotiation], None],
        guard: ListenerGuard | None = None,
        tls: p.TlsMode = "off",
    ) -> None:
        self._loop = loop
        self._plain = sock
        self._sock: Connection = sock
        self._exports = exports
        self._on_end = on_end
        self._guard = guard
        self.client = identity_of(sock)
        self._handshake = ServerHandshake(
            _Visible(self, exports), f"client {self.client}", tls, lambda: exports.has_extended(self.client)
        )
        self._to_do = deque[Action]()
        self._securing: TlsOpening | None = None
        self._opening: UpstreamOpening | None = None
        self._volume: Volume | None = None
        self._stream: StreamAccount | None = None
        self._mode = p.SIMPLE_REPLIES
        self._left_over = b""
        self._asked_ns = 0  # when the client asked for the volume
        self._has_ended = False
        self._watch()
        loop.at(
            self, loop.clock.monotonic_ns() + LIMIT_NS, lambda _now: self.close("negotiation takes too long")
        )

    def _watch(self) -> None:
        self._loop.watch(self._sock.fileno(), IN, self._on_event, self._failed)

    def _failed(self, exc: Exception) -> None:
        """A step of it has raised, which is logged, perhaps in an event of its upstream."""
        self.close(str(exc))

    @property
    def identity(self) -> ClientIdentity:
        """See ``accounting.CountedSession``."""
        return self.client

    @property
    def export(self) -> None:
        """See ``accounting.CountedSession``; what it may use is looked at when its session begins."""

    @property
    def has_spoken(self) -> bool:
        """Whether the client has sent something valid."""
        return self._handshake.state is not HandshakeState.FLAGS

    @property
    def awaits_storage(self) -> bool:
        """Whether the client waits for us, and we for its upstream."""
        return self._opening is not None

    def start(self) -> None:
        """Send the greeting."""
        self._send(self._handshake.greeting())

    def _on_event(self, events: int) -> None:
        try:
            data = self._sock.recv(_RECEIVE_BYTES) if events & IN else b""
        except BlockingIOError:
            return
        except OSError as exc:
            self.close(f"the client is gone: {exc.strerror}")
            return
        if not data:
            self.close("the client left during negotiation")
            return
        self._do(self._handshake.feed(data))

    def _do(self, actions: list[Action]) -> None:
        """What one action leads to is done behind it, not within it: a client may ask for much at once."""
        is_within = bool(self._to_do)
        self._to_do.extend(actions)
        while self._to_do and not is_within and not self._has_ended:
            action = self._to_do[0]
            if isinstance(action, Send):
                self._send(action.data)
            elif isinstance(action, Open):
                self._open(action.export, action.mode)
            elif isinstance(action, StartTls):
                self._start_tls()
            elif isinstance(action, Close):
                self.close(action.reason)
            self._to_do.popleft()

    def _start_tls(self) -> None:
        assert self._guard is not None  # without it no client is offered TLS
        self._loop.forget(self._sock.fileno())
        try:
            connection, opening = self._guard.secure(self._plain, self._on_secured, self._on_insecure)
        except ConfigError as exc:
            self._on_insecure(str(exc))
            return
        self._sock, self._securing = connection, opening

    def _on_secured(self) -> None:
        assert isinstance(self._sock, TlsConnection)  # set when it began
        assert self._guard is not None  # see _start_tls
        self._securing = None
        if self._guard.is_revoked(self._sock.certificate):  # since its handshake began
            self._on_insecure("its certificate is on the revocation list")
            return
        names, certificate = names_of(self._sock.peer_certificate()), self._sock.certificate
        self.client = replace(self.client, names=names, is_secure=True, certificate=certificate)
        self._watch()
        self._handshake.secured()

    def _on_insecure(self, reason: str) -> None:
        assert self._guard is not None  # see _start_tls
        self._securing = None
        self._guard.turn_away("tls", self.client, reason)
        self.close(reason)

    def _send(self, data: bytes) -> None:
        """Negotiation is small: a client whose buffer cannot take it is not reading, and is dropped."""
        try:
            taken = self._sock.send(data) if data else 0
        except OSError as exc:
            self.close(f"the client is gone: {exc.strerror}")
            return
        if taken != len(data):
            self.close("the client does not read its answers")

    def _open(self, export: str, mode: p.ReplyMode) -> None:
        self._mode = mode
        self._asked_ns = self._loop.clock.monotonic_ns()
        try:
            self._volume, client = self._exports.find(export, self.client)
            uri = self._volume.export.upstream
            if mode.extended and uri is None:
                raise ExportRefused(p.Rep.ERR_UNKNOWN, NO_EXTENDED_HEADERS)
            self._claim(self._exports.stream(self._volume, client) if self._handshake.keeps_backend else None)
            facts = self._file_facts(self._volume) if uri is None else None
        except ExportRefused as exc:
            self._refuse(exc.code, str(exc), exc.reason)
            return
        if uri is None:
            assert facts is not None  # just asked for
            self._ready(None, facts)
        else:
            self._loop.want(self._sock.fileno(), 0)  # one thing at a time; the client waits for its answer
            self._opening = UpstreamOpening(
                self._loop,
                uri,
                self._ready,
                self._on_upstream_failed,
                on_failure=self._failed,
                will_transmit=self._handshake.keeps_backend,
                wants_block_size=self._handshake.wants_block_size,
                tls=self._exports.upstream_tls(self._volume),
                mode=mode,
            )

    def _file_facts(self, volume: Volume) -> p.ExportFacts:
        try:
            return self._exports.file_facts(volume)
        except ExportRefused:
            self._count_failure()
            raise

    def _count_failure(self) -> None:
        """A client that is refused for want of its storage is a failure of that storage."""
        if self._stream is not None:
            self._stream.connection_refused(self._asked_ns, self._loop.clock.monotonic_ns())

    def _claim(self, stream: StreamAccount | None) -> None:
        """Be a connection of ``stream``, so that it is not forgotten before its session begins."""
        if self._stream is not None:
            self._stream.sessions.remove(self)
        if stream is not None:
            stream.sessions.append(self)
        self._stream = stream

    def gauges(self) -> tuple[int, int]:
        """See ``accounting.CountedSession``."""
        return 0, 0

    def outstanding(self, now_ns: int) -> list[Pending]:
        """See ``accounting.CountedSession``."""
        return []

    def cut_ended(self, now_ns: int) -> None:
        """See ``accounting.CountedSession``."""

    def _on_upstream_failed(self, error: GatewayError) -> None:
        assert self._volume is not None  # set by _open
        now_ns = self._loop.clock.monotonic_ns()
        if self._mode.extended:
            self._volume.extended.has = False  # until it is asked again: it may be another server
        self._volume.warnings.warning(now_ns, "upstream-not-there", peer=str(self.client), error=str(error))
        self._opening = None
        self._count_failure()
        self._loop.want(self._sock.fileno(), IN)
        self._refuse(p.Rep.ERR_UNKNOWN, f"the storage behind this export is not available: {error}")

    def _refuse(self, code: int, text: str, reason: str = "") -> None:
        """Answer ``text``; ``reason`` is why, if that is not for the client's eyes."""
        if reason and self._guard is not None:
            self._guard.turn_away("not-allowed", self.client, reason)
        else:
            now_ns = self._loop.clock.monotonic_ns()
            self._loop.warnings.warning(
                now_ns, "client-refused", peer=str(self.client), reason=reason or text
            )
        self._do(self._handshake.refused(code, text))

    def _ready(self, upstream: Upstream | None, facts: p.ExportFacts) -> None:
        assert self._volume is not None  # set by _open
        self._opening = None
        facts = self._exports.learn(self._volume, facts).for_client(self._mode)
        if self._stream is None:  # INFO: the client wanted to know, not to use
            self._loop.want(self._sock.fileno(), IN)
            self._do(self._handshake.opened(facts, self._texts()))
            return
        self._close_if_refused(self._volume)
        self._send_reply(facts)
        if self._has_ended:  # or the client left meanwhile
            if upstream is not None:
                upstream.leave(self._loop)
            return
        stream = self._stream
        stream.connection_made(self._loop.clock.monotonic_ns())
        self._let_go()
        try:
            session = self._exports.session(self._sock, self._volume, stream, facts, upstream, self._mode)
        except Exception:  # no memory for its buffer: nothing else would close these
            self._sock.close()
            if upstream is not None:
                upstream.leave(self._loop)
            raise
        finally:
            self._on_end(self)
        session.identity = self.client
        try:
            session.start(self._left_over)
        except Exception as exc:  # noqa: BLE001 - logged; this event is none of the session's
            self._loop.report(exc, session.failed)

    def _close_if_refused(self, volume: Volume) -> None:
        """There may have been a reload since it asked."""
        refused = self._guard.refusal_of(self.client, volume.export) if self._guard is not None else None
        if self._guard is not None and refused is not None:
            self._guard.turn_away(refused[0], self.client, refused[1])
            self.close(refused[1])

    def _send_reply(self, facts: p.ExportFacts) -> None:
        """The last one; the bytes that already belong to transmission are kept for the session."""
        for action in self._handshake.opened(facts, self._texts()):
            if isinstance(action, Transmit):
                self._left_over = action.left_over
            elif isinstance(action, Send) and not self._has_ended:
                self._send(action.data)

    def _texts(self) -> dict[p.Info, str]:
        assert self._volume is not None  # set by _open
        export = self._volume.export
        described = f"volume {export.volume} on backend {export.backend}"
        return {p.Info.NAME: export.volume, p.Info.DESCRIPTION: described}

    def _let_go(self) -> None:
        self._has_ended = True
        self._claim(None)
        self._loop.cancel(self)
        self._loop.forget(self._sock.fileno())

    def close(self, reason: str) -> None:
        """Close the connection. Safe to call twice."""
        if self._has_ended:
            return
        if self._guard is not None and self._handshake.lacked_tls and not self._handshake.is_secure:
            self._guard.turn_away("tls-required", self.client, TLS_REQUIRED)
        log.debug("negotiation-closed", peer=str(self.client), reason=reason)
        if self._securing is not None:
            self._securing.cancel()
        if self._opening is not None:
            self._opening.cancel()
            if self._stream is not None:
                self._stream.connection_given_up(self._asked_ns, self._loop.clock.monotonic_ns())
        self._let_go()
        self._sock.close()
        self._on_end(self)


class _Visible:
    """Names of the exports that a client may see, looked for when they are gone through."""

    def __init__(self, talk: Negotiation, exports: ExportTable) -> None:
        self._talk = talk
        self._exports = exports

    def __iter__(self) -> Iterator[str]:
        return iter(self._exports.visible(self._talk.client))


class NegotiationTable:
    """The clients of a plane that are in negotiation, at most ``most``.

    For one more, the oldest that has sent nothing valid is given up; if all have, the oldest; but none that
    waits for its upstream: a storage that is slow would let in no client at all. If the oldest all do, the
    new one is turned away. Each is counted and logged by the guard.

    Args:
        guard: of the plane's listeners.
        most: for tests.
    """

    def __init__(self, guard: ListenerGuard, most: int = MOST_NEGOTIATIONS) -> None:
        self._guard = guard
        self._most = most
        self._silent: OrderedDict[Negotiation, None] = OrderedDict()  # when last looked at; oldest first
        self._spoken: OrderedDict[Negotiation, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._silent) + len(self._spoken)

    def __iter__(self) -> Iterator[Negotiation]:
        yield from self._silent
        yield from self._spoken

    def make_room(self, client: ClientIdentity) -> bool:
        """Whether one more, ``client``, may begin now; another may be given up for it."""
        if len(self) < self._most:
            return True
        late = self._find_late()
        reason = f"{self._most} clients are in negotiation already"
        self._guard.turn_away("crowd", late.client if late is not None else client, reason)
        if late is None:
            return False
        late.close(reason)
        return True

    def add(self, negotiation: Negotiation) -> None:
        """One begins, for which there is room."""
        self._silent[negotiation] = None

    def discard(self, negotiation: Negotiation) -> None:
        """One has ended."""
        self._silent.pop(negotiation, None)
        self._spoken.pop(negotiation, None)

    def _find_late(self) -> Negotiation | None:
        while self._silent:
            oldest = next(iter(self._silent))
            if not oldest.has_spoken:
                return oldest
            del self._silent[oldest]  # each is moved once
            self._spoken[oldest] = None
        for _ in range(min(_MOST_LOOKS, len(self._spoken))):
            oldest = next(iter(self._spoken))
            if not oldest.awaits_storage:
                return oldest
            self._spoken.move_to_end(oldest)
        return None


def identity_of(sock: socket.socket) -> ClientIdentity:
    """A client as its socket shows it.

    Raises:
        OSError: it is already gone.
    """
    return ClientIdentity(client_name(sock), peer_address(sock))
