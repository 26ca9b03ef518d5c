"""A pair without the process around it: its real registry, record, publisher, session, inbound and outbound.

Two things are the benchmark's: the schedule (all gateways are due when the former round is complete), and in
the in-memory form the mailbox.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks.polling.peers import Sockets
from pmdaemon.poller.catch_up import CatchUp
from pmdaemon.poller.frame_handlers import FrameHandlers
from pmdaemon.poller.gateway import Registry
from pmdaemon.poller.inbound import Inbound, ToInbound
from pmdaemon.poller.migration import ToOutbound
from pmdaemon.poller.outbound import Outbound
from pmdaemon.poller.publisher import CutPublisher
from pmdaemon.poller.standing_caps import StandingCaps
from pmdaemon.poller.timeouts import TimeoutPolicy
from pmdaemon.runtime.clock import SystemClock
from pmdaemon.runtime.threads import ThreadInbox
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.messages.server import HighWaters


class MemorySink:
    """A mailbox that forgets: posts are counted, WATERMARKS is all that ever comes."""

    def __init__(self) -> None:
        self.posted_bytes = 0
        self._inbox: list[Any] = [_Taken(frame.encode(Kind.WATERMARKS, {"inc": 1, "hw": []}))]
        self._fd = os.eventfd(0)

    def post(self, _recipients: str | Sequence[str], payload: bytes) -> None:
        """Count it."""
        self.posted_bytes += len(payload)

    def take(self, _max_messages: int = 0, _max_bytes: int = 0) -> list[Any]:
        """WATERMARKS, once."""
        taken, self._inbox = self._inbox, []
        return taken

    def fileno(self) -> int:
        """Never readable."""
        return self._fd

    def prepare_sleep(self) -> bool:
        """Nothing waits."""
        return True

    def awake(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self._fd)


class _Taken:
    sender = "dbmanager"

    def __init__(self, payload: bytes) -> None:
        self.payload = payload


class Rounds:
    """A schedule: everybody is due when a round is asked for."""

    interval_ns = 10**9
    missed_ticks = 0

    def __init__(self) -> None:
        self.gateways: list[str] = []
        self.wanted = False
        self.left_out: frozenset[str] = frozenset()

    def add(self, gateway_id: str, _now_ns: int) -> None:
        """Poll it in each round."""
        self.gateways.append(gateway_id)

    def take_due(self, _now_ns: int) -> list[str]:
        """All but those left out, if a round was asked for."""
        if not self.wanted:
            return []
        self.wanted = False
        return [name for name in self.gateways if name not in self.left_out]

    def remove(self, _gateway_id: str) -> None:
        """Gateways stay."""

    def next_due_ns(self) -> int | None:
        """Long ago, if a round was asked for."""
        return 0 if self.wanted else None


class CountingRegistry(Registry):
    """Knows how many rows of DURABLE have come."""

    durable_rows = 0

    def advance(self, incarnation: int, notice: HighWaters, now_ns: int) -> bool:
        """See ``Registry``."""
        self.durable_rows += len(notice)
        return super().advance(incarnation, notice, now_ns)


class Rig:
    """A pair without the process around it."""

    def __init__(self, mailbox: Any) -> None:
        clock = SystemClock()
        self.registry = CountingRegistry(CatchUp(1 << 40, 10**9))
        self.counters: Counter[str] = Counter()
        self.schedule = Rounds()
        self.to_inbound: ThreadInbox[ToInbound] = ThreadInbox()
        self.registered: ThreadInbox[ToOutbound] = ThreadInbox()
        self.publisher = CutPublisher(mailbox, 0, self.registry.refused)
        self.standing_caps = StandingCaps()
        self.polls = self.sent_bytes = 0
        self.handlers = handlers = FrameHandlers(
            self.registry,
            self.publisher,
            clock,
            interval_us=1_000_000,
            on_registered=self.registered.put,
            counters=self.counters,
        )
        self.inbound = Inbound(
            self.registry,
            handlers,
            self.publisher,
            clock,
            TimeoutPolicy.for_interval(10**9),
            to_inbound=self.to_inbound,
            migrator=None,
            counters=self.counters,
        )
        self.outbound = Outbound(
            self.registry,
            mailbox,
            clock,
            self.schedule,  # type: ignore[arg-type]  # what outbound uses of it
            to_inbound=self.to_inbound,
            to_outbound=self.registered,
            counters=Counter(),
            standing_caps=self.standing_caps,
        )

    def register(self, sockets: Sockets) -> None:
        """Adopt every connection and let it register."""
        for index, sock in enumerate(sockets):
            self.inbound.adopt(sock, f"127.0.0.1:{index}")
        until_s = time.monotonic() + 60
        while len(self.schedule.gateways) < len(sockets):
            self.inbound.step(0.05)
            self.outbound.step()
            if time.monotonic() > until_s:
                raise RuntimeError(f"{len(self.schedule.gateways)} of {len(sockets)} gateways registered")
        while not self.registry.has_watermarks:
            self.outbound.step()
        while self.publisher.waiting_news:  # while it waits, the first round's cuts would be refused
            self.inbound.step(0.05)
            if time.monotonic() > until_s:
                raise RuntimeError(
                    f"{self.publisher.waiting_news} announcements found no room in the mailbox"
                )
