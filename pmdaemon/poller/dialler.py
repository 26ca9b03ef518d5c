"""Gateways that are listed with an address: which they are, dialling them, and dialling again.

Most agents dial in. Where storage hosts may not, the agent listens and is listed. Only who opens the TCP
connection differs: the agent still speaks first, and with TLS the PMDaemon is the server, so everything
behind the acceptor is the same code.

    waiting ──due──► connecting ──► given to a pair and watched ──ended──► waiting
                         └── refused, 5 s ──────────────────────────────────►

*The list* (``GatewayList``) has two sources: the configuration (``[[pmdaemon.gateway]]``) and the
database's table ``gateway_list``, which dbmanager publishes as a file, ``<runtime_dir>/gateways.json``:
``[{"name": ..., "address": ...}, ...]``. A file, because the parent of the pairs has no mailbox and needs
the newest list only, whichever of the two starts first. Entries that cannot be dialled are named in the log
and left out. When both lists have an address, the configuration's name counts.

*The end of a connection.* The connection lives in a pair; the parent keeps a duplicate of the descriptor
and never reads from it. It asks epoll for nothing but hang-ups (EPOLLRDHUP): the gateway's, or the shutdown
that every ``AgentConnection.close`` makes. When a pair is killed no process shuts down, so ``forget_pair``
does: without it the duplicate would keep the connection open.

*Waits* double from ``FIRST_S`` to ``MAX_S``, each shortened by a random share, and begin again after a
connection that lived ``HEALTHY_NS``.

*The report* (``DialledFile``) says how it goes with each, for the application server to show:
``<runtime_dir>/metrics/dialled.json``, ``[{"name", "address", "source": "list"|"configuration", "state":
"connected"|"dialling"|"waiting"|"not-dialled", "reason"}, ...]``, written whole when it changes and touched
each second: an old file says that the daemon is gone.

Thread: the parent's only. ``Dialler.fileno`` is an epoll descriptor, to be put into the parent's selector.

Source: P3 (discovery); DESIGN.md 5.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import select
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

import structlog

from pmdaemon.poller.config import ListedGateway, PmFile
from pmdaemon.runtime.backoff import Backoff
from pmdaemon.runtime.client_user import server_uids, user_name
from pmdaemon.runtime.clock import Clock
from pmdaemon.runtime.config import parse_address
from pmdaemon.runtime.files import write_whole
from pmdaemon.runtime.sockets import dial_error
from pmdaemon.runtime.term import ALWAYS, Term

FIRST_S: Final = 0.5
MAX_S: Final = 30.0
JITTER_RATIO: Final = 0.9  # many that hang up at once are not dialled at once
CONNECT_NS: Final = 5 * 10**9
HEALTHY_NS: Final = 10 * 10**9
MAX_LISTED: Final = 10_000
OTHER_ACTS: Final = "another server acts"
log = structlog.get_logger("dialler")

Offer = Callable[[socket.socket, str], object | None]
"""(connected socket, address) -> the pair that took it, or None."""


class Target(NamedTuple):
    """A listed gateway. ``address``: "10.0.0.5:7412"; an IP address, because resolving names would block."""

    name: str
    address: str
    source: str = "list"  # or "configuration": which of the two lists


class _Entry:
    """One target and its state: ``sock`` is the dialled socket, later the duplicate."""

    def __init__(self, target: Target, due_ns: int, backoff: Backoff) -> None:
        self.target = target
        self.backoff = backoff
        self.sock: socket.socket | None = None
        self.pair: object | None = None
        self.due_ns = due_ns
        self.since_ns = 0
        self.last_failure = ""
        self.refusal = ""  # why a pair ended it; until one has lived HEALTHY_NS, or none answers
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
        term: outside of it nobody is dialled.
        uids: users of this machine that may be at the other end; None: any, as the certificate decides.
    """

    def __init__(
        self,
        offer: Offer,
        clock: Clock,
        rng: random.Random,
        term: Term = ALWAYS,
        uids: frozenset[int] | None = None,
    ) -> None:
        self._offer = offer
        self._uids = uids
        self._term = term
        self._clock = clock
        self._rng = rng
        self._epoll = select.epoll()
        self._entries: dict[str, _Entry] = {}
        self._by_fd: dict[int, _Entry] = {}

    def fileno(self) -> int:
        """Readable when ``step`` has something to do besides by the clock."""
        return self._epoll.fileno()

    @property
    def connected(self) -> int:
        """Targets whose connection a pair has."""
        return sum(entry.pair is not None for entry in self._entries.values())

    def states(self) -> list[dict[str, str]]:
        """Each target: name, address, source, state (connected, dialling, waiting), reason."""
        now_ns = self._clock.monotonic_ns()
        return [entry.describe(now_ns) for entry in self._entries.values()]

    def refused(self, address: str, reason: str, *, is_over: bool = False) -> None:
        """The pair that has it says why it ends this connection.

        The end itself is noticed as any other, unless it ``is_over``: then no pair has it any more.
        """
        entry = self._entries.get(address)
        if entry is None:
            return
        if reason != entry.last_refusal:  # logged once, not at every try
            log.warning("not-accepted", gateway=entry.target.name, address=address, reason=reason)
        entry.refusal = entry.last_refusal = reason
        if is_over and entry.pair is not None:
            self._ended(entry, reason)

    def replace(self, targets: Iterable[Target]) -> None:
        """The list is now this one. Connections to those no longer on it are ended."""
        wanted = {target.address: target for target in targets}
        for address in self._entries.keys() - wanted.keys():
            entry = self._entries.pop(address)
            log.info("no-longer-listed", gateway=entry.target.name, address=address)
            self._hang_up(entry)
        now_ns = self._clock.monotonic_ns()
        for address, target in wanted.items():
            if address in self._entries:
                self._entries[address].target = target
            else:  # a long list must not be dialled in one instant
                spread_ns = round(self._rng.random() * min(1.0, len(wanted) / 500) * 1e9)
                backoff = Backoff(FIRST_S, MAX_S, JITTER_RATIO, self._rng)
                self._entries[address] = _Entry(target, now_ns + spread_ns, backoff)

    def due_ns(self) -> int | None:
        """When ``step`` is next due by the clock; None if never."""
        return min((entry.due_ns for entry in self._entries.values() if entry.pair is None), default=None)

    def step(self) -> None:
        """Dial what is due, give up what takes too long, notice what has answered or hung up."""
        for fd, events in self._epoll.poll(0):
            entry = self._by_fd.get(fd)
            if entry is None or entry.sock is None:
                continue
            if entry.pair is None:
                self._answered(entry, entry.sock)
            elif events & (select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR):
                self._ended(entry, "the connection ended")
        now_ns = self._clock.monotonic_ns()
        for entry in self._entries.values():
            if entry.pair is None and now_ns >= entry.due_ns:
                if entry.sock is not None:
                    self._failed(entry, f"no answer within {CONNECT_NS // 10**9} s")
                else:
                    self._dial(entry)

    def _dial(self, entry: _Entry) -> None:
        if not self._term.is_on():  # the gateway would leave the server that acts now for this one
            self._failed(entry, OTHER_ACTS)
            return
        address = parse_address(entry.target.address)
        try:
            sock = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM)
        except OSError as exc:  # no descriptor left: see `open_files`
            self._failed(entry, exc.strerror or str(exc))
            return
        sock.setblocking(False)
        entry.sock = sock
        self._by_fd[sock.fileno()] = entry
        self._epoll.register(sock.fileno(), select.EPOLLOUT)
        code = sock.connect_ex(address)
        if code not in (0, errno.EINPROGRESS):
            self._failed(entry, os.strerror(code))
        else:
            entry.due_ns = self._clock.monotonic_ns() + CONNECT_NS

    def _answered(self, entry: _Entry, sock: socket.socket) -> None:
        if code := dial_error(sock):
            self._failed(entry, os.strerror(code))
            return
        if not self._term.is_on():  # it was dialled before this server stood still
            self._failed(entry, OTHER_ACTS)
            return
        if self._uids is not None:
            found = server_uids(sock)
            if not found or not found <= self._uids:
                names = ", ".join(map(user_name, sorted(found))) or "no user that the kernel knows"
                fix = "name it in pmdaemon.agent_users, or enable TLS"
                self._failed(entry, f"who listens there is {names}, whose agents are not served; {fix}")
                return
        pair = self._offer(sock, entry.target.address)
        if pair is None:
            self._failed(entry, "no pair takes it now")
            return
        # The pair has a descriptor of its own now; ours is the duplicate to watch.
        entry.pair, entry.since_ns = pair, self._clock.monotonic_ns()
        entry.last_failure = ""
        self._epoll.modify(sock.fileno(), select.EPOLLRDHUP)
        log.info("dialled", gateway=entry.target.name, address=entry.target.address)

    def _ended(self, entry: _Entry, reason: str) -> None:
        if self._clock.monotonic_ns() - entry.since_ns >= HEALTHY_NS:
            entry.backoff.succeeded()
        self._failed(entry, reason)

    def _failed(self, entry: _Entry, reason: str) -> None:
        """Hang up, if it was connected at all, and plan the next try."""
        if entry.pair is None:
            entry.refusal = ""  # there was no peer to be refused
        self._hang_up(entry)
        entry.due_ns = self._clock.monotonic_ns() + round(entry.backoff.failed() * 1e9)
        if reason != entry.last_failure:  # logged once, not at every try
            log.warning(
                "not-connected", gateway=entry.target.name, address=entry.target.address, reason=reason
            )
            entry.last_failure = reason

    def _hang_up(self, entry: _Entry) -> None:
        sock, entry.sock, entry.pair = entry.sock, None, None
        if sock is None:
            return
        self._by_fd.pop(sock.fileno(), None)
        self._epoll.unregister(sock.fileno())
        with contextlib.suppress(OSError):  # not connected, or ended by the other side already
            sock.shutdown(socket.SHUT_RDWR)
        sock.close()

    def forget_pair(self, pair: object) -> None:
        """This pair has died: its connections have ended."""
        for entry in self._entries.values():
            if entry.pair is pair:
                self._ended(entry, "its pair died")

    def close(self) -> None:
        """Hang up on all."""
        for entry in self._entries.values():
            self._hang_up(entry)
        self._epoll.close()


class GatewayList:
    """Rereads the file when it has changed. Thread: the parent's.

    Attributes:
        not_dialled: entries left out, as ``DialledFile`` reports them.
    """

    def __init__(self, config: PmFile) -> None:
        self.not_dialled: list[dict[str, str]] = []
        self._config = config
        self._version: int | None = None

    def changed(self) -> list[Target] | None:
        """The whole list if it has changed since the last call, or at the first."""
        try:
            version = self._config.list_path.stat().st_mtime_ns
        except OSError:
            version = 0
        if version == self._version:
            return None
        self._version = version
        listed = {item["address"]: Target(item["name"], item["address"]) for item in self._stored()}
        for configured in self._config.pmdaemon.gateway:
            listed[configured.address] = Target(configured.name, configured.address, "configuration")
        return list(listed.values())

    def _stored(self) -> list[dict[str, str]]:
        self.not_dialled = []
        try:
            items = json.loads(self._config.list_path.read_bytes())
        except FileNotFoundError:
            return []
        except (OSError, ValueError, RecursionError) as exc:
            log.warning("list-not-read", path=str(self._config.list_path), error=str(exc))
            return []
        kept = []
        for item in items[:MAX_LISTED] if isinstance(items, list) else []:
            try:
                entry = ListedGateway.model_validate(item)
            except ValueError as exc:
                self._leave_out(item, str(exc).splitlines()[-2].strip()[:300])
                continue
            if self._config.pmdaemon.may_dial(entry.address):
                kept.append(entry.model_dump())
            else:
                self._leave_out(item, "another machine's address, and TLS is off: see [pmdaemon.tls]")
        return kept

    def _leave_out(self, item: Any, reason: str) -> None:
        log.warning("not-dialled", entry=str(item)[:200], reason=reason)
        if isinstance(item, dict):
            name, address = (str(item.get(key, ""))[:200] for key in ("name", "address"))
            left_out = {"name": name, "address": address, "source": "list"}
            self.not_dialled.append({**left_out, "state": "not-dialled", "reason": reason})


class DialledFile:
    """See the module. Thread: the parent's. State: what was written last."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written = ""

    def write(self, rows: list[dict[str, str]]) -> None:
        """Report how it goes with each.

        Raises:
            OSError: no room, or no directory.
        """
        text = json.dumps(rows)
        if text == self._written and self._path.exists():
            os.utime(self._path)
            return
        write_whole(self._path, text)
        self._written = text
