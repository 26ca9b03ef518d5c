"""Dials gateways that are listed with an address, and again when such a connection ends.

Most agents dial in. Where storage hosts may not, the agent listens and is listed (``[[pmdaemon.gateway]]``,
or the table ``gateway_list``). Only who opens the TCP connection differs: the agent still speaks first, and
with TLS the PMDaemon is the server, so everything behind the acceptor is the same code.

    waiting ──due──► connecting ──► given to a pair and watched ──ended──► waiting
                         └── refused, 5 s ──────────────────────────────────►

How the end is noticed. The connection lives in a pair, the parent keeps a duplicate of the descriptor and
never reads from it. It asks epoll for nothing but hang-ups (EPOLLRDHUP): the gateway's, or the shutdown
that every ``Connection.close`` makes. When a pair is killed nobody shuts down, so ``forget_pair`` does:
without it the duplicate would keep the connection open.

Waits double from ``FIRST_S`` to ``MAX_S``, each shortened by a random share, and begin anew after a
connection that lived ``HEALTHY_NS``.

Thread: the parent's only. ``fileno`` is an epoll descriptor, to be put into the parent's selector.

Source: P3 (discovery); DESIGN.md 5.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import select
import socket
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

import structlog

from pmdaemon.runtime.backoff import Backoff
from pmdaemon.runtime.clock import Clock
from pmdaemon.runtime.config import parse_address

FIRST_S: Final = 0.5
MAX_S: Final = 30.0
JITTER_RATIO: Final = 0.9  # many that hang up at once are not dialled at once
CONNECT_NS: Final = 5 * 10**9
HEALTHY_NS: Final = 10 * 10**9
log = structlog.get_logger("dialler")

Offer = Callable[[socket.socket, str], object | None]
"""(connected socket, address) -> the pair that took it, or None."""


class Target(NamedTuple):
    """A listed gateway. ``address``: "10.0.0.5:7412"; an IP address, because looking up names would block."""

    name: str
    address: str
    source: str = "list"  # or "configuration": which of the two lists


class _Line:
    """One target and where it stands: ``sock`` is the dialled socket, later the duplicate."""

    def __init__(self, target: Target, due_ns: int, backoff: Backoff) -> None:
        self.target = target
        self.backoff = backoff
        self.sock: socket.socket | None = None
        self.pair: object | None = None
        self.due_ns = due_ns
        self.since_ns = 0
        self.last_failure = ""
        self.refusal = ""  # why a pair ended it; until one has lived HEALTHY_NS, or nobody answers
        self.last_refusal = ""

    def describe(self, now_ns: int) -> dict[str, str]:
        """For people: what it is doing, and what is wrong; connected again is not yet accepted again."""
        if self.pair is not None and now_ns - self.since_ns >= HEALTHY_NS:
            self.refusal = self.last_refusal = ""
        reason = self.refusal or self.last_failure
        if self.pair is not None and not reason:
            state = "connected"
        else:
            state = "dialling" if self.sock is not None else "waiting"
        return {**self.target._asdict(), "state": state, "reason": reason}


class Dialler:
    """See the module.

    Args:
        offer: hands a connected socket to a pair.
    """

    def __init__(self, offer: Offer, clock: Clock, chance: random.Random) -> None:
        self._offer = offer
        self._clock = clock
        self._chance = chance
        self._epoll = select.epoll()
        self._lines: dict[str, _Line] = {}
        self._by_fd: dict[int, _Line] = {}

    def fileno(self) -> int:
        """Readable when ``step`` has something to do besides by the clock."""
        return self._epoll.fileno()

    @property
    def connected(self) -> int:
        """Targets whose connection a pair has."""
        return sum(line.pair is not None for line in self._lines.values())

    def states(self) -> list[dict[str, str]]:
        """Each target: name, address, source, state (connected, dialling, waiting), reason."""
        now_ns = self._clock.monotonic_ns()
        return [line.describe(now_ns) for line in self._lines.values()]

    def refused(self, address: str, reason: str, *, is_over: bool = False) -> None:
        """The pair that has it says why it ends this connection.

        The end itself is noticed as any other, unless it ``is_over``: then nobody has it any more.
        """
        line = self._lines.get(address)
        if line is None:
            return
        if reason != line.last_refusal:  # said once, not at every try
            log.warning("not-accepted", gateway=line.target.name, address=address, reason=reason)
        line.refusal = line.last_refusal = reason
        if is_over and line.pair is not None:
            self._ended(line, reason)

    def replace(self, targets: Iterable[Target]) -> None:
        """The list is now this one. Who is not on it any more is hung up on."""
        wanted = {target.address: target for target in targets}
        for address in self._lines.keys() - wanted.keys():
            line = self._lines.pop(address)
            log.info("no-longer-listed", gateway=line.target.name, address=address)
            self._hang_up(line)
        now_ns = self._clock.monotonic_ns()
        for address, target in wanted.items():
            if address in self._lines:
                self._lines[address].target = target
            else:  # a long list must not be dialled in one instant
                spread_ns = round(self._chance.random() * min(1.0, len(wanted) / 500) * 1e9)
                backoff = Backoff(FIRST_S, MAX_S, JITTER_RATIO, self._chance)
                self._lines[address] = _Line(target, now_ns + spread_ns, backoff)

    def due_ns(self) -> int | None:
        """When ``step`` is next due by the clock; None if never."""
        return min((line.due_ns for line in self._lines.values() if line.pair is None), default=None)

    def step(self) -> None:
        """Dial who is due, give up who takes too long, notice who has answered or hung up."""
        for fd, events in self._epoll.poll(0):
            line = self._by_fd.get(fd)
            if line is None or line.sock is None:
                continue
            if line.pair is None:
                self._answered(line, line.sock)
            elif events & (select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR):
                self._ended(line, "the connection ended")
        now_ns = self._clock.monotonic_ns()
        for line in self._lines.values():
            if line.pair is None and now_ns >= line.due_ns:
                if line.sock is not None:
                    self._failed(line, f"no answer within {CONNECT_NS // 10**9} s")
                else:
                    self._dial(line)

    def _dial(self, line: _Line) -> None:
        address = parse_address(line.target.address)
        try:
            sock = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM)
        except OSError as exc:  # no descriptor left: see `open_files`
            self._failed(line, exc.strerror or str(exc))
            return
        sock.setblocking(False)
        line.sock = sock
        self._by_fd[sock.fileno()] = line
        self._epoll.register(sock.fileno(), select.EPOLLOUT)
        code = sock.connect_ex(address)
        if code not in (0, errno.EINPROGRESS):
            self._failed(line, os.strerror(code))
        else:
            line.due_ns = self._clock.monotonic_ns() + CONNECT_NS

    def _answered(self, line: _Line, sock: socket.socket) -> None:
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code or sock.getsockname() == sock.getpeername():  # a dial may connect to itself
            self._failed(line, os.strerror(code or errno.ECONNREFUSED))
            return
        pair = self._offer(sock, line.target.address)
        if pair is None:
            self._failed(line, "no pair takes it now")
            return
        # The pair has a descriptor of its own now; ours is the duplicate to watch.
        line.pair, line.since_ns = pair, self._clock.monotonic_ns()
        line.last_failure = ""
        self._epoll.modify(sock.fileno(), select.EPOLLRDHUP)
        log.info("dialled", gateway=line.target.name, address=line.target.address)

    def _ended(self, line: _Line, reason: str) -> None:
        if self._clock.monotonic_ns() - line.since_ns >= HEALTHY_NS:
            line.backoff.succeeded()
        self._failed(line, reason)

    def _failed(self, line: _Line, reason: str) -> None:
        """Hang up, if it was connected at all, and plan the next try."""
        if line.pair is None:
            line.refusal = ""  # nobody was there to be refused
        self._hang_up(line)
        line.due_ns = self._clock.monotonic_ns() + round(line.backoff.failed() * 1e9)
        if reason != line.last_failure:  # said once, not at every try
            log.warning("not-connected", gateway=line.target.name, address=line.target.address, reason=reason)
            line.last_failure = reason

    def _hang_up(self, line: _Line) -> None:
        sock, line.sock, line.pair = line.sock, None, None
        if sock is None:
            return
        self._by_fd.pop(sock.fileno(), None)
        self._epoll.unregister(sock.fileno())
        with contextlib.suppress(OSError):  # not connected, or ended by the other side already
            sock.shutdown(socket.SHUT_RDWR)
        sock.close()

    def forget_pair(self, pair: object) -> None:
        """This pair has died: its connections are over."""
        for line in self._lines.values():
            if line.pair is pair:
                self._ended(line, "its pair died")

    def close(self) -> None:
        """Hang up on everybody."""
        for line in self._lines.values():
            self._hang_up(line)
        self._epoll.close()
