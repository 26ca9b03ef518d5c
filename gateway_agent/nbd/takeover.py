"""A plane's next process takes the place of the former one, while clients do I/O: at an upgrade.

    next process                                             former process (``control``, ``plane``)
      connect to NAME.sock ──────── DP_TAKE_OVER ──────────►   accepts no client; those that come wait in the
      ◄── DP_HAND_OVER with the listening sockets ──────────   queue of the socket, and are not refused
      serves with caps, thresholds, cut of the former
      ────────────────────────────── DP_TAKEN ─────────────►   is NAME.PID from now on, lets its clients go,
      accepts clients                                          and stops when the link has its last counts

The listening sockets are never closed in between, so no connect fails. If the next process ends before
DP_TAKEN, the former one serves on, as if nothing had been. Behind it there is no way back: a next process
that dies is started again and makes its sockets again, as after any death.

``take_over`` is the next process's side; it waits for the former one, ``LIMIT_S`` at most, before it serves.
``Inheritance`` owns the descriptors until ``Plane`` has taken those that it wants.
"""

from __future__ import annotations

import glob
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import structlog

from gateway_agent.errors import PlaneLost
from gateway_agent.nbd.loop import EventLoop
from gateway_agent.nbd.sockets import bound_address, unlink_own
from gateway_agent.nbd.volume import PlaneContext
from pmdaemon.errors import WireError
from pmdaemon.runtime.clock import Clock, Deadline
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.messages.planes import DpHandOver, DpHello, DpTaken, DpTakeOver

log = structlog.get_logger("takeover")
LIMIT_S: Final = (
    10.0  # the former process answers within a turn of its loop; one that hangs keeps its clients
)
MOST_SOCKETS: Final = 253  # SCM_MAX_FD of Linux; the control socket is one of them
AGAIN_NS: Final = 10**9
_RECEIVE_BYTES: Final = 65_536


@dataclass(slots=True)
class Inheritance:
    """What the next process got of the former one.

    Attributes:
        control: the socket on which links connect.
        listeners: those for clients, by their text in the agent's file; ``Plane`` takes out what it uses.
        caps: the server's, header of DP_CAPS, if their lease runs; it ends at ``lease_end_ns``.
        thresholds: header of DP_THRESHOLDS; ``costs``: of DP_COSTS.
        start_ns: when the former process's cut in progress began, monotonic; ``start_us`` the same by the
            wall clock. The next one's first cut begins there, too: so both fit in one cut of the gateway.
        pid: of the former process, if it has said so.
    """

    control: socket.socket
    listeners: dict[str, socket.socket]
    caps: dict[str, Any] | None = None
    lease_end_ns: int | None = None
    thresholds: dict[str, Any] | None = None
    start_ns: int = 0
    start_us: int = 0
    costs: dict[str, Any] | None = None
    pid: int | None = None
    _former: socket.socket | None = field(default=None, repr=False)

    def confirm(self) -> None:
        """We serve: the former process lets its clients go. Listeners that are wanted no more are closed."""
        for sock in self.listeners.values():
            address = bound_address(sock)
            sock.close()
            unlink_own(address)
        self.listeners.clear()
        former, self._former = self._former, None
        if former is not None:
            with former:
                try:
                    former.sendall(DpTaken().encode())
                except OSError as exc:  # it has ended: we serve all the same, and accept what has waited
                    log.warning("former-process-gone", problem=exc.strerror)


def take_over(path: str, plane: str, clock: Clock) -> Inheritance | None:
    """Ask the process that serves this plane for its sockets; None if there is none.

    Args:
        path: its control socket.
        plane: its name.
        clock: bounds the wait.

    Raises:
        PlaneLost: it does not hand over: it is of a release that cannot, or hangs, or is another plane's.
    """
    former = socket.socket(socket.AF_UNIX)
    former.settimeout(LIMIT_S)
    received: list[int] = []
    try:
        try:
            former.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            former.close()
            return None
        former.sendall(DpTakeOver().encode())
        said, pid = _hear(former, plane, received, Deadline(LIMIT_S, clock))
        if len(received) != 1 + len(said.listeners):
            raise PlaneLost(
                plane, f"it names {len(said.listeners)} listeners, and sends {len(received)} sockets"
            )
    except (OSError, WireError, PlaneLost) as exc:
        former.close()
        for fd in received:
            os.close(fd)
        if isinstance(exc, PlaneLost):
            raise
        reason = str(exc) if isinstance(exc, WireError) else exc.strerror or "it does not answer"
        raise PlaneLost(plane, reason) from exc
    sockets = [_adopted(fd) for fd in received]
    listeners = dict(zip(said.listeners, sockets[1:], strict=True))
    log.info("taken-over", plane=plane, listening=list(listeners))
    return Inheritance(
        sockets[0],
        listeners,
        said.caps,
        said.lease_end_ns,
        said.thresholds,
        said.start_ns,
        said.start_us,
        said.costs,
        pid,
        former,
    )


def former_processes(path: str) -> int:
    """How many processes that served this plane before still serve clients.

    Args:
        path: control socket of the plane; theirs are beside it, as NAME.PID.sock.

    Raises:
        OSError: there is no descriptor to look for them.
    """
    return sum(map(_listens, former_sockets(path)))


def former_sockets(path: str) -> list[Path]:
    """Their control sockets, also of those that have ended without removing theirs.

    Raises:
        OSError: see ``former_processes``.
    """
    own = Path(path)
    return list(own.parent.glob(f"{glob.escape(own.stem)}.*.sock"))


class FormerProcesses:
    """Those that served this plane before, while they may do so still.

    As long as there is one, no ledger of this process is believed. When the last has ended, what it changed
    is in no ledger, so that each is uncovered until its next flush.

    Attributes:
        number: how many there may be.

    Args:
        loop: what looks again, each ``AGAIN_NS``.
        path: control socket of the plane.
        context: of this process.
        inherited: what the last of them handed over; it has its own socket beside ``path`` some time later.
        on_fewer: called with the time when ``number`` has changed.
    """

    def __init__(
        self,
        loop: EventLoop,
        path: str,
        context: PlaneContext,
        inherited: Inheritance | None,
        on_fewer: Callable[[int], None] = lambda _now_ns: None,
    ) -> None:
        self._loop = loop
        self._path = path
        self._context = context
        self._pid = inherited.pid if inherited is not None else None
        self._is_unknown = inherited is not None and self._pid is None  # it may serve for ever
        self._on_fewer = on_fewer
        self.number = former_processes(path) + (inherited is not None)
        context.other.is_former = self.number > 0
        self._plan()

    def _plan(self) -> None:
        if self.number:
            self._loop.at(self, self._loop.clock.monotonic_ns() + AGAIN_NS, self._check)

    def _check(self, now_ns: int) -> None:
        before = self.number
        try:
            self.number = former_processes(self._path)
        except OSError:  # without descriptors nothing is known; they are looked for again
            self._plan()
            return
        if self._pid is not None and os.path.exists(f"/proc/{self._pid}"):
            own = Path(self._path)
            self.number += not own.with_name(f"{own.stem}.{self._pid}.sock").exists()
        if self.number != before:
            self._on_fewer(now_ns)
        if not self.number and not self._is_unknown:
            self._context.other.is_former = False
            for ledger in self._context.ledgers.values():
                ledger.doubt()
            log.info("former-processes-ended")
        self._plan()


def _listens(path: Path) -> bool:
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.setblocking(False)
            sock.connect(str(path))
    except (FileNotFoundError, ConnectionRefusedError):  # it has ended
        return False
    except OSError:  # its queue is full, it is another user's, or this process has no descriptor: it may
        pass
    return True


def _hear(
    former: socket.socket, plane: str, received: list[int], deadline: Deadline
) -> tuple[DpHandOver, int | None]:
    """Wait for DP_HAND_OVER and the process id before it; descriptors that come are added to ``received``."""
    reader, pid = frame.FrameReader(), None
    while not deadline.passed:
        data, fds, _, _ = socket.recv_fds(former, _RECEIVE_BYTES, MOST_SOCKETS)
        received += fds
        if not data:
            raise PlaneLost(plane, "the process that serves it does not hand over; see its log")
        for each in reader.feed(data):
            if each.kind == Kind.DP_HAND_OVER:
                return DpHandOver.parse(frame.unfold(each).header), pid
            if each.kind == Kind.DP_HELLO:
                pid = DpHello.parse(each.header, plane).pid
            elif each.kind == Kind.UNSUPPORTED:
                raise PlaneLost(plane, "the process that serves it is of a release without upgrade")
    raise PlaneLost(plane, f"the process that serves it has not answered for {LIMIT_S:.0f} s")


def _adopted(fd: int) -> socket.socket:
    os.set_inheritable(fd, False)
    sock = socket.socket(fileno=fd)
    sock.setblocking(False)
    return sock
