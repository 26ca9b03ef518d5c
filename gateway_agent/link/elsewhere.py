"""Other servers of the list, tried while the one that the link uses does not answer.

Of several servers one acts, and only that one answers. When its machine is gone nothing says so: a session
is silent, a dial waits. So meanwhile the others are dialled, each again after ``EVERY_NS``, and the
session stays what it is until one of them has *proved* to answer: with TLS by its certificate, else by
keeping the connection for ``PROOF_NS`` (what forwards a port to a server that does not run closes at once).
A server that was stopped keeps it, too: ``connection`` bounds how often a session is left for such a one.

    waits ──EVERY_NS──► connecting ──► (securing) ──► proved ──► ``proved`` hands it over
      ▲                     │              │
      └──── refused, ``LIMIT_NS`` ─────────┘

A server that stands by refuses, which costs neither side anything. So this may begin long before a silent
session is given up, and disturbs none when the server that acts was only slow.

Thread: the link's loop only.
"""

from __future__ import annotations

import errno
import random
import selectors
import socket
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from gateway_agent.errors import GatewayError
from gateway_agent.link.server_users import EVERY_USER, ServerUsers
from pmdaemon.pki.certificates import SERVER_URI
from pmdaemon.runtime.clock import Clock
from pmdaemon.runtime.transport import HandshakeFailed, TlsTransport, Transport

Address = str | tuple[str, int]
EVERY_NS: Final = 1_000_000_000  # each try of a server; a random half is taken off, so that fleets spread
LIMIT_NS: Final = 3_000_000_000  # connection and handshake
PROOF_NS: Final = 300_000_000


class Attempt:
    """One connection to another server, on its way to be proved.

    Attributes:
        place: of the address in the list.
        transport: the connection; None: closed, and tried again at ``due_ns``.
        due_ns: next try, end of the proof, or the limit.
        is_proved: it can be used.
    """

    def __init__(
        self,
        place: int,
        address: tuple[str, int],
        selector: selectors.BaseSelector,
        clock: Clock,
        tls: Callable[[], ssl.SSLContext] | None,
        server_name: str | None,
        chance: random.Random,
        users: ServerUsers,
    ) -> None:
        self._users = users
        self.place = place
        self._address = address
        self._selector = selector
        self._clock = clock
        self._tls = tls
        self._server_name = server_name
        self._chance = chance
        self._is_connected = False
        self.transport: Transport | None = None
        self.is_proved = False
        self.due_ns = clock.monotonic_ns() + round(EVERY_NS / 2 * chance.random())

    def turn(self) -> None:
        """Dial, give up, or find it proved, when it is time."""
        if self._clock.monotonic_ns() < self.due_ns or self.is_proved:
            return
        if self.transport is None:
            self._dial()
        elif self._is_connected and self._tls is None:
            self.is_proved = True
        else:
            self.close()

    def ready(self, _events: int) -> None:
        """The selector says that its socket is ready."""
        if isinstance(self.transport, TlsTransport):
            self._secure(self.transport)
        elif isinstance(self.transport, socket.socket):
            if self._is_connected:
                self.close()  # a server says nothing before it is spoken to: this is the end
            else:
                self._connected(self.transport)

    def close(self) -> None:
        """Let go of it; it is tried again later."""
        if self.transport is not None:
            with suppress(KeyError, ValueError):
                self._selector.unregister(self.transport)
            self.transport.close()
        self.transport, self._is_connected, self.is_proved = None, False, False
        wait_ns = EVERY_NS * (1 - self._chance.random() / 2)
        self.due_ns = self._clock.monotonic_ns() + round(wait_ns)

    def hand_over(self) -> Transport:
        """The proved connection, which is the caller's from now on."""
        assert self.transport is not None
        found, self.transport = self.transport, None
        self._selector.unregister(found)
        return found

    def _dial(self) -> None:
        family = socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET
        try:
            dialled = socket.socket(family, socket.SOCK_STREAM)
        except OSError:  # out of descriptors: the session that there is stays
            self.close()
            return
        dialled.setblocking(False)
        self.transport = dialled
        if dialled.connect_ex(self._address) not in (0, errno.EINPROGRESS):
            self.close()
            return
        self.due_ns = self._clock.monotonic_ns() + LIMIT_NS
        self._selector.register(dialled, selectors.EVENT_WRITE, self)

    def _connected(self, dialled: socket.socket) -> None:
        try:
            refused = dialled.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if refused or dialled.getsockname() == dialled.getpeername():  # its own echo: see ``connection``
                self.close()
                return
            if self._tls is None and self._users.why_not_dialled(dialled):
                self.close()
                return
            dialled.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._is_connected = True
            if self._tls is None:
                self.due_ns = self._clock.monotonic_ns() + PROOF_NS
                self._selector.modify(dialled, selectors.EVENT_READ, self)
                return
            self._selector.unregister(dialled)
            secured = TlsTransport(dialled, self._tls(), server_side=False, server_name=self._server_name)
        except (OSError, GatewayError):
            self.close()
            return
        self.transport = secured
        self._selector.register(secured, selectors.EVENT_WRITE, self)
        self._secure(secured)

    def _secure(self, secured: TlsTransport) -> None:
        if self.is_proved:
            self.close()  # it has ended since
            return
        try:
            wanted = secured.handshake()
        except HandshakeFailed:
            self.close()
            return
        if wanted is not None:
            self._selector.modify(secured, wanted, self)
        elif SERVER_URI not in secured.peer_uris():
            self.close()
        else:
            self.is_proved = True


class OtherServers:
    """See the module. Of a single server there are no others, and nothing happens.

    Args:
        addresses: of all servers; paths of Unix sockets are left out.
        tls, server_name, users: see ``PeerConnection``.
        chance: spreads the tries of a fleet.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        selector: selectors.BaseSelector,
        clock: Clock,
        tls: Callable[[], ssl.SSLContext] | None,
        server_name: str | None,
        chance: random.Random | None = None,
        users: ServerUsers = EVERY_USER,
    ) -> None:
        self._addresses = [each for each in addresses if isinstance(each, tuple)]
        chance = chance or random.Random()  # noqa: S311 - see above
        self._rest = selector, clock, tls, server_name, chance, users
        self._attempts: list[Attempt] = []

    @property
    def due_ns(self) -> int | None:
        """When ``turn`` has something to do; None: nothing is tried."""
        return min((attempt.due_ns for attempt in self._attempts), default=None)

    def turn(self, but: int) -> None:
        """Try all but the one at this place."""
        if not self._attempts:
            places = [place for place in range(len(self._addresses)) if place != but]
            self._attempts = [Attempt(place, self._addresses[place], *self._rest) for place in places]
        for attempt in self._attempts:
            attempt.turn()

    def proved(self) -> tuple[int, Transport] | None:
        """Place and connection of a server that answers, which are the caller's; the others are let go."""
        found = next((attempt for attempt in self._attempts if attempt.is_proved), None)
        if found is None:
            return None
        place, transport = found.place, found.hand_over()
        self.rest()
        return place, transport

    def rest(self) -> None:
        """No other is wanted any more."""
        for attempt in self._attempts:
            attempt.close()
        self._attempts = []
