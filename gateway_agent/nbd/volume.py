"""One volume: its rates, and the sessions whose requests wait for them.

Held requests stay in their connection's buffer. Here is only a ring of the connections that have some, served
one request each in turn (fair between connections, whatever their depth), and one timer for all.

The rate always holds, whatever waits (ADR 15). I/Os held for ``max_hold_ns`` and more are counted, so that
cuts can say that a client may time out. Refused requests are not charged; they keep their place behind held
ones of their own connection, and wait for no rate.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

from gateway_agent.nbd.buffers import Buffers
from gateway_agent.nbd.config import ExportConfig
from gateway_agent.nbd.cuts import CutMaker
from gateway_agent.nbd.loop import EventLoop
from gateway_agent.nbd.protocol import ExportFacts
from pmdaemon.runtime.clock import Clock
from pmdaemon.runtime.limited_log import LimitedLog
from pmdaemon.wire.rates import Rates, RateSet


@dataclass(frozen=True, slots=True)
class Context:
    """What every connection of a plane shares.

    Attributes:
        scratch: buffer for one handler's use; nothing stays in it between events.
        payloads: memory for large writes, ``reply_memory`` for large reads (see ``buffers``).
    """

    loop: EventLoop
    clock: Clock
    cuts: CutMaker
    scratch: memoryview
    payloads: Buffers
    reply_memory: Buffers


class Holder(Protocol):
    """What a volume asks of a session."""

    def head_charge(self) -> tuple[int, float] | None:
        """(bytes, base cost) of the request at the head, or None when it is free of charge."""

    def head_arrived_ns(self) -> int | None:
        """When the head arrived; None when nothing can be admitted now."""

    def admit_head(self, now_ns: int) -> None:
        """Pass the head on."""

    def admit_all(self, now_ns: int) -> None:
        """Pass on as many as possible."""

    def push(self, now_ns: int) -> None:
        """Move admitted requests towards the storage; may close the session."""

    def unblock(self) -> bool:
        """Whether a refused request at the head can be answered now, after a push."""


class Volume:
    """See the module docstring.

    Attributes:
        facts: size and flags once known (at start for files, after the first connection for upstreams).
        warnings: about its upstream; limited, because one death is seen by every client.

    ``_late`` and ``_longest_ns`` count the I/Os of this cut that were held for too long.
    """

    def __init__(self, export: ExportConfig, rates: RateSet, context: Context, max_hold_ns: int) -> None:
        self.export = export
        self.rates = rates
        self.facts: ExportFacts | None = None
        self.warnings = LimitedLog("upstream")
        self._context = context
        self._max_hold_ns = max_hold_ns
        self._waiting: deque[Holder] = deque()
        self._late, self._longest_ns = 0, 0
        context.cuts.volumes.append(self)

    def take_late(self, now_ns: int) -> tuple[int, int] | None:
        """See ``cuts.Throttled``."""
        heads = [session.head_arrived_ns() for session in self._waiting]
        held_ns = max((now_ns - arrived for arrived in heads if arrived is not None), default=0)
        late, longest_ns = self._late, max(self._longest_ns, held_ns)
        self._late, self._longest_ns = 0, 0
        return (late, longest_ns // 1000) if longest_ns >= self._max_hold_ns else None

    def serve(self, session: Holder, now_ns: int) -> None:
        """``session`` has received something: admit what the rates allow, and push."""
        if self.rates.is_open:
            self._serve_open(session, now_ns)
            return
        if session not in self._waiting:
            self._waiting.append(session)
        touched = self._release(now_ns)
        touched[session] = None  # also without an admission: payload of an admitted write may have come
        self._push(touched, now_ns)

    def _serve_open(self, session: Holder, now_ns: int) -> None:
        while True:
            session.admit_all(now_ns)
            session.push(now_ns)
            if not session.unblock():
                return

    def set_caps(self, caps: Rates, now_ns: int) -> None:
        """Put other caps in force, now, also for what is already held."""
        if self.rates.set_caps(caps, now_ns):
            self.pump(now_ns)

    def pump(self, now_ns: int) -> None:
        """Admit what the rates allow by now."""
        if self.rates.is_open:
            waiting, self._waiting = self._waiting, deque()
            self._context.loop.cancel(self)
            for session in waiting:
                self._serve_open(session, now_ns)
            return
        self._push(self._release(now_ns), now_ns)

    def _push(self, touched: dict[Holder, None], now_ns: int) -> None:
        while touched:
            for session in touched:
                session.push(now_ns)
            again = [session for session in touched if session.unblock()]
            self._waiting.extend(session for session in again if session not in self._waiting)
            touched = self._release(now_ns) if again else {}

    def forget(self, session: Holder) -> None:
        """The session is closed."""
        if session in self._waiting:
            self._waiting.remove(session)

    def _release(self, now_ns: int) -> dict[Holder, None]:
        touched: dict[Holder, None] = {}
        while self._waiting:
            session = self._waiting[0]
            if session.head_arrived_ns() is None:
                self._waiting.popleft()
                continue
            charge = session.head_charge()
            if charge is not None and self.rates.ready_ns() > now_ns:
                free = self._free_of_charge()
                if free is None:
                    break
                session, charge = free, None
            if charge is not None:
                self._note_delay(session, now_ns)
                self.rates.charge(now_ns, *charge)
            session.admit_head(now_ns)
            touched[session] = None
            if session in self._waiting:  # it may have closed itself
                self._waiting.remove(session)
                self._waiting.append(session)
        self._plan()
        return touched

    def _free_of_charge(self) -> Holder | None:
        """A session whose head need not wait for the rates."""
        for session in self._waiting:
            if session.head_arrived_ns() is not None and session.head_charge() is None:
                return session
        return None

    def _note_delay(self, session: Holder, now_ns: int) -> None:
        arrived_ns = session.head_arrived_ns()
        if arrived_ns is not None and now_ns - arrived_ns >= self._max_hold_ns:
            self._late += 1
            self._longest_ns = max(self._longest_ns, now_ns - arrived_ns)

    def _plan(self) -> None:
        if any(session.head_arrived_ns() is not None for session in self._waiting):
            self._context.loop.at(self, self.rates.ready_ns(), self.pump)
        else:
            self._context.loop.cancel(self)
