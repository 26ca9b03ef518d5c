"""The control socket: the link connects, collects cuts and brings caps, thresholds and leases.

One link at a time; a connection becomes the link with its first order, and replaces the former (a restarted
link, or one whose end we have not noticed). Others ask for a report only: ``gateway-agent status``.

No message of the link can hold up I/O: nothing here waits, and a link that does not read is dropped. A link
that is gone changes nothing: caps stay until their lease ends, cuts are kept until it is back.

A next process of this plane takes its sockets over here, too (``takeover``). One at a time: its connection is
the *heir*, from DP_TAKE_OVER until DP_TAKEN or its end.

A malformed frame closes the connection with ERROR; caps or thresholds with impossible values are refused
and logged, the former stay in force (the link sees it by the cuts' ``tg`` and ``ts``).
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final, Protocol

import structlog

from gateway_agent.nbd.loop import IN, OUT, EventLoop
from pmdaemon.errors import BadCaps, WireError
from pmdaemon.runtime.sockets import accept
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.messages.base import Header
from pmdaemon.wire.messages.costs import Costs
from pmdaemon.wire.messages.ends import Error, Unsupported
from pmdaemon.wire.messages.plane_report import DpReport, PlaneReport
from pmdaemon.wire.messages.plane_sets import PlaneCaps, PlaneThresholds
from pmdaemon.wire.messages.planes import DpCollect, DpCosts, DpHello

log = structlog.get_logger("control")
MAX_UNSENT_BYTES: Final = 8 << 20  # eight largest frames: a link that far behind is stuck, not slow
MAX_CONNECTIONS: Final = 8  # the link, one that replaces it, and some terminals
_RECEIVE_BYTES: Final = 65_536
_ORDERS: Final = frozenset((Kind.DP_COLLECT, Kind.DP_CAPS, Kind.DP_THRESHOLDS, Kind.DP_COSTS, Kind.DP_LEASE))


class LinkCommands(Protocol):
    """What the link may ask of the plane; tests of the protocol and of the hand-over answer in its place."""

    def hello(self) -> DpHello:
        """DP_HELLO."""

    def collect(self, got: int) -> bytes | None:
        """The DP_CUT frame to answer with; None when there is nothing more, ever."""

    def caps(self, caps: PlaneCaps) -> None:
        """DP_CAPS; may raise BadCaps."""

    def thresholds(self, thresholds: PlaneThresholds) -> None:
        """DP_THRESHOLDS; may raise BadCaps."""

    def costs(self, costs: Costs) -> None:
        """DP_COSTS."""

    def lease(self) -> None:
        """DP_LEASE."""

    def report(self) -> PlaneReport:
        """What DP_REPORT carries: see ``report``."""

    def offer(self) -> tuple[bytes, list[socket.socket]] | None:
        """DP_HAND_OVER, and the sockets for clients, which are accepted no more; None if that cannot be."""

    def keep(self) -> None:
        """The heir has ended: accept clients again."""

    def handed_over(self) -> None:
        """The heir serves."""


class ControlServer:
    """See the module docstring. Owns the listening socket."""

    def __init__(self, loop: EventLoop, listener: socket.socket, commands: LinkCommands) -> None:
        self._loop = loop
        self._listener = listener
        self._commands = commands
        self._link: _ControlConnection | None = None
        self._heir: _ControlConnection | None = None
        self._connections: list[_ControlConnection] = []
        self.had_link = False
        """Whether one has connected since this process began, or a program that may have become it."""
        loop.watch(listener.fileno(), IN, self._on_connection, lambda _exc: None)

    def _on_connection(self, _events: int) -> None:
        accepted = accept(self._listener, partial(self._loop.pause_input, self._listener.fileno()))
        if accepted is None:
            return
        if len(self._connections) >= MAX_CONNECTIONS:
            idle = [each for each in self._connections if each not in (self._link, self._heir)]
            idle[0].close("too many connections that are no link")
        made = _ControlConnection(
            self._loop, accepted[0], self._commands, self._is_link, self._take_over, self._forget
        )
        self._connections.append(made)
        self.had_link = True
        made.send(self._commands.hello().encode())

    def _is_link(self, connection: _ControlConnection) -> None:
        if self._link is connection:
            return
        log.info("link-connected")
        former, self._link = self._link, connection
        if former is not None:
            former.close("a new link has connected")

    def _take_over(self, connection: _ControlConnection, kind: int) -> None:
        if kind == Kind.DP_TAKEN:
            if connection is self._heir:
                self._heir = None
                connection.close("it serves")
                self._commands.handed_over()
            return
        offered = self._commands.offer() if self._heir is None else None
        if offered is None:
            connection.close("this process hands over to another one, or stops")
            return
        self._heir = connection
        data, sockets = offered
        connection.send_sockets(data, [self._listener, *sockets])

    def move(self, listener: socket.socket) -> None:
        """Listen elsewhere: the former socket is the heir's from now on."""
        self._loop.forget(self._listener.fileno())
        self._listener.close()
        self._listener = listener
        self._loop.watch(listener.fileno(), IN, self._on_connection, lambda _exc: None)

    def _forget(self, connection: _ControlConnection) -> None:
        self._connections.remove(connection)
        if self._heir is connection:
            log.warning("heir-gone", reason=connection.reason)
            self._heir = None
            self._commands.keep()
        if self._link is connection:
            log.info("link-gone", reason=connection.reason)
            self._link = None

    @property
    def has_link(self) -> bool:
        """Whether a link is connected, or a program that may yet become it."""
        return bool(self._connections)

    def send_hello(self, leaving: str | None = None) -> None:
        """Send name, addresses and exports of this plane to the link, if there is one."""
        for connection in tuple(self._connections):
            connection.send(replace(self._commands.hello(), leaving=leaving).encode())

    def close(self) -> None:
        """Close the connection and the listening socket."""
        for connection in tuple(self._connections):
            connection.close("the plane stops")
        self._loop.forget(self._listener.fileno())
        self._listener.close()


class _ControlConnection:
    """One connection; ``reason`` says why it was closed."""

    def __init__(
        self,
        loop: EventLoop,
        sock: socket.socket,
        commands: LinkCommands,
        on_order: Callable[[_ControlConnection], None],
        on_takeover: Callable[[_ControlConnection, int], None],
        on_closed: Callable[[_ControlConnection], None],
    ) -> None:
        sock.setblocking(False)
        self._loop = loop
        self._sock = sock
        self._commands = commands
        self._on_order = on_order
        self._on_takeover = on_takeover
        self._on_closed = on_closed
        self.reason = ""
        self._reader = frame.FrameReader()
        self._unsent = bytearray()
        self._is_closed = False
        loop.watch(sock.fileno(), IN, self._on_event, lambda exc: self.close(str(exc)))

    def _on_event(self, events: int) -> None:
        if events & OUT:
            self._flush()
        if self._is_closed or not events & ~OUT:
            return
        try:
            data = self._sock.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError as exc:
            self.close(exc.strerror or "receive failed")
            return
        if not data:
            self.close("the link has closed the connection")
            return
        self._on_data(data)

    def _on_data(self, data: bytes) -> None:
        try:
            for received in self._reader.feed(data):
                if self._is_closed:
                    return
                self._on_frame(received)
        except WireError as exc:
            log.warning("link-refused", error=str(exc))
            self.send(Error(type(exc).__name__, str(exc)).encode())
            self.close(str(exc))

    def _on_frame(self, received: frame.Frame) -> None:
        header = received.header
        if received.kind in _ORDERS:
            self._on_order(self)
        if received.kind == Kind.DP_STATUS:
            report = self._commands.report()
            self.send(DpReport(report.hello.plane, report).encode())
        elif received.kind == Kind.DP_COLLECT:
            answer = self._commands.collect(DpCollect.parse(header).got)
            if answer is None:
                self.close("it has everything")
            else:
                self.send(answer)
        elif received.kind == Kind.DP_LEASE:
            self._commands.lease()
        elif received.kind == Kind.DP_COSTS:
            self._commands.costs(DpCosts.parse(header))
        elif received.kind in (Kind.DP_TAKE_OVER, Kind.DP_TAKEN):
            self._on_takeover(self, received.kind)
        elif received.kind in (Kind.DP_CAPS, Kind.DP_THRESHOLDS):
            try:
                self._on_set(received.kind, frame.unfold(received).header)
            except BadCaps as exc:
                log.error("link-order-refused", error=str(exc))
        else:
            self.send(Unsupported(received.kind).encode())

    def _on_set(self, kind: int, header: Header) -> None:
        if kind == Kind.DP_CAPS:
            self._commands.caps(PlaneCaps.parse(header))
        else:
            self._commands.thresholds(PlaneThresholds.parse(header))

    def send(self, data: bytes) -> None:
        """Send or keep ``data``; drops a link that lets too much pile up."""
        if self._is_closed:
            return
        self._unsent += data
        self._flush()
        if len(self._unsent) > MAX_UNSENT_BYTES:
            self.close("the link does not read")

    def send_sockets(self, data: bytes, sockets: list[socket.socket]) -> None:
        """Send ``data``, and with its first byte the descriptors of ``sockets``."""
        self._flush()
        if self._is_closed:
            return
        if self._unsent:
            self.close("it does not read")
            return
        try:
            sent = socket.send_fds(self._sock, [data], [sock.fileno() for sock in sockets])
        except OSError as exc:
            self.close(exc.strerror or "send failed")
            return
        self.send(data[sent:])

    def _flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._sock.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError as exc:
            self.close(exc.strerror or "send failed")
            return
        self._loop.want(self._sock.fileno(), IN | OUT if self._unsent else IN)

    def close(self, reason: str) -> None:
        """Close the connection. Safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        self.reason = reason
        self._loop.forget(self._sock.fileno())
        with contextlib.suppress(OSError):
            self._sock.close()
        self._on_closed(self)
