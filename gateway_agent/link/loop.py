"""The link's loop: sockets, selector and clock around the core. The only place of the link that waits.

One thread. It sleeps in ``select`` until a socket is ready, the stop is asked for, or the earliest of: the
core's next due time, a connection's next try.

The server is dialled once every plane has introduced itself, or ``PLANES_GRACE_NS`` after the start: so that
the first registration normally names all exports. A plane that is lost later changes nothing about that: a
dial that has begun is seen to, or its time would pass again and again.
"""

from __future__ import annotations

import random
import selectors
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import structlog

from gateway_agent.errors import ServerLost
from gateway_agent.link.connection import LinkListener, PeerConnection
from gateway_agent.link.core import LinkCore
from gateway_agent.link.elsewhere import Attempt
from gateway_agent.link.identity import Identity
from gateway_agent.link.server_users import EVERY_USER, ServerUsers
from pmdaemon.runtime import watchdog
from pmdaemon.runtime.backoff import Backoff
from pmdaemon.runtime.clock import Clock, Deadline
from pmdaemon.runtime.hangup import Hangup
from pmdaemon.runtime.stop import Stop
from pmdaemon.runtime.threads import ThreadInbox
from pmdaemon.wire import sni
from pmdaemon.wire.messages.ends import Bye

log = structlog.get_logger("link")

PLANES_GRACE_NS: Final = 2_000_000_000
PLANE_RETRY_S: Final = (0.05, 1.0)  # a plane on the same host is back within a second or broken
SLEEP_S: Final = 30.0  # far below ``watchdog.LIMIT_S``, however long the interval is
STOP_LIMIT_S: Final = 1.0  # a last collection takes 200 ms at most


class ServerPeer:
    """Passes the PMDaemon's connection on to the core; a ``ConnectionPeer``."""

    def __init__(self, core: LinkCore) -> None:
        self._core = core

    def opened(self) -> None:
        """See ``ConnectionPeer``."""
        self._core.server_connected()

    def received(self, data: bytes) -> None:
        """See ``ConnectionPeer``."""
        self._core.server_data(data)

    def lost(self, reason: str) -> None:
        """See ``ConnectionPeer``."""
        self._core.server_lost(reason)

    def pending(self) -> bytearray:
        """See ``ConnectionPeer``."""
        return self._core.session.outgoing


class PlanePeer:
    """Passes one data plane's connection on to the core; a ``ConnectionPeer``."""

    def __init__(self, core: LinkCore, name: str) -> None:
        self._core = core
        self._name = name

    def opened(self) -> None:
        """See ``ConnectionPeer``."""
        self._core.plane_connected(self._name)

    def received(self, data: bytes) -> None:
        """See ``ConnectionPeer``."""
        self._core.plane_data(self._name, data)

    def lost(self, reason: str) -> None:
        """See ``ConnectionPeer``."""
        self._core.plane_lost(self._name, reason)

    def pending(self) -> bytearray:
        """See ``ConnectionPeer``."""
        return self._core.planes[self._name].outgoing


class InboxReader:
    """Passes what another thread has left in an inbox on to the core."""

    def __init__(self, inbox: ThreadInbox[Any], take: Callable[[Any], None]) -> None:
        self._inbox = inbox
        self._take = take

    def ready(self, _events: int) -> None:
        """The selector says that something is in it."""
        for item in self._inbox.drain():
            self._take(item)


class LinkLoop:
    """Runs one core. Thread: constructed and run by one and the same.

    Attributes:
        on_hangup: called when ``hangup`` has come.
        on_turn: called at each turn of the loop.
    """

    def __init__(
        self,
        core: LinkCore,
        servers: Sequence[tuple[str, int]],
        plane_sockets: Mapping[str, str],
        server_backoff: Backoff,
        stop: Stop,
        clock: Clock,
        identity: Identity | None = None,
        listen: tuple[str, int] | None = None,
        hangup: Hangup | None = None,
        users: ServerUsers = EVERY_USER,
    ) -> None:
        self._core = core
        self._hangup = hangup
        self.on_hangup: Callable[[], None] = lambda: None
        self.on_turn: Callable[[], None] = lambda: None
        self._stop = stop
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._selector.register(stop, selectors.EVENT_READ)
        if hangup is not None:
            self._selector.register(hangup, selectors.EVENT_READ)
        tls = identity.context if identity is not None else None
        name = sni.name_of(identity.credential.gateway_id) if identity is not None else None
        self._server = PeerConnection(
            "pmdaemon", servers, ServerPeer(core), server_backoff, self._selector, clock, tls, name, users
        )
        self.listener = (
            LinkListener(listen, self._server, self._selector, clock, tls, name, users) if listen else None
        )
        self._chance = random.Random()  # noqa: S311 - spreads retries, guards nothing
        self._planes: list[PeerConnection] = []
        self._sockets: dict[str, str] = {}  # of each of them
        self.add_planes(plane_sockets)
        self._grace_end_ns = clock.monotonic_ns() + PLANES_GRACE_NS
        self._may_dial = False

    def add_inbox(self, inbox: ThreadInbox[Any], take: Callable[[Any], None]) -> None:
        """Call ``take`` with whatever comes into an inbox."""
        self._selector.register(inbox, selectors.EVENT_READ, InboxReader(inbox, take))

    def add_planes(self, sockets: Mapping[str, str]) -> None:
        """Dial the control sockets of planes, but of those that are known already."""
        for name, path in sockets.items():
            if name not in self._sockets:
                self._sockets[name] = path
                backoff = Backoff(*PLANE_RETRY_S, 0.1, self._chance)
                peer = PlanePeer(self._core, name)
                self._planes.append(PeerConnection(name, [path], peer, backoff, self._selector, self._clock))

    def _match_planes(self) -> None:
        """Let go of planes that the core has forgotten; dial processes that have handed over to another."""
        for name in self._core.planes.keys() - self._sockets.keys():
            path = self._sockets.get(name.rpartition(".")[0])
            if path is not None:
                self.add_planes({name: str(Path(path).with_name(f"{name}.sock"))})
        for connection in [each for each in self._planes if each.name not in self._core.planes]:
            connection.abandon()
            self._planes.remove(connection)
            del self._sockets[connection.name]

    def dial_again(self, reason: str) -> None:
        """End the session to the PMDaemon, if there is one, and begin another."""
        self._server.close(reason)

    def run(self) -> None:
        """Until the stop is asked for; then one last cut and a goodbye."""
        while not self._stop.is_set():
            watchdog.beat()
            self._turn()
        self._finish()

    def _server_may_be_dialled(self) -> bool:
        if not self._may_dial:
            is_complete = all(plane.source.can_be_asked for plane in self._core.planes.values())
            self._may_dial = is_complete or self._clock.monotonic_ns() >= self._grace_end_ns
        return self._may_dial

    def _connections(self) -> list[PeerConnection]:
        if self._server.due_ns is None or self._server_may_be_dialled():
            return [*self._planes, self._server]
        return self._planes

    def _turn(self, limit_s: float | None = None) -> None:
        self._match_planes()
        self.on_turn()
        self._server.silent(self._core.is_quiet)
        for connection in self._connections():
            connection.turn()
        for key, events in self._selector.select(self._timeout_s(limit_s)):
            if isinstance(key.data, PeerConnection | Attempt | LinkListener | InboxReader):
                key.data.ready(events)
        if self._hangup is not None and self._hangup.take():
            self.on_hangup()
        if self.listener is not None:
            self.listener.turn()
        try:
            self._core.tick()
        except ServerLost as exc:
            self._server.close(exc.reason, is_silent=True)
        # What the core queued leaves now, not after the next sleep.
        for connection in self._connections():
            connection.turn()

    def _timeout_s(self, limit_s: float | None) -> float:
        due = [connection.due_ns for connection in self._connections()]
        if self._server.due_ns is not None:
            due.append(self._grace_end_ns if not self._server_may_be_dialled() else self._server.due_ns)
        due.append(self._server.try_ns)
        if self.listener is not None:
            due.append(self.listener.due_ns)
        known = [item for item in due if item is not None]
        wait_s = (min([*known, self._core.next_due_ns()]) - self._clock.monotonic_ns()) / 1e9
        return max(0.0, min(wait_s, SLEEP_S if limit_s is None else limit_s))

    def _finish(self) -> None:
        log.info("stopping", reason=self._stop.reason)
        deadline = Deadline(STOP_LIMIT_S, self._clock)
        self._selector.unregister(self._stop)
        if self.listener is not None:
            self.listener.close()
        for plane in self._planes:  # they are stopping as well
            plane.dial_no_more()
        if not self._core.collecting:
            self._core.collect_now()
        while self._core.collecting and not deadline.passed:
            self._turn(deadline.left_s())
        self._core.session.drain(Bye(self._stop.reason))
        if self._server.due_ns is None:
            self._server.turn()
        for connection in [*self._planes, self._server]:
            connection.abandon()
        self._selector.close()
