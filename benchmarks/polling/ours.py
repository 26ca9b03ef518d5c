"""The product's own pair in rounds: its real registry, record, courier, session, inbound and outbound.

Only three things are the benchmark's: the schedule (all gateways are due when the former round is complete),
the loop around ``step`` of each thread, and in the in-memory form the sink. With ``sink="mailbox"`` the posts
go through a real segment to a process that takes them and sends DURABLE for each batch, as dbmanager does.
"""

from __future__ import annotations

import os
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.polling import payload
from benchmarks.polling.peers import WARM_ROUNDS, GoOn, Sockets, Timed
from pmdaemon.cycle.control import ControlBook
from pmdaemon.cycle.courier import Courier
from pmdaemon.cycle.watermarks import Notice
from pmdaemon.gateways.reception import Reception
from pmdaemon.gateways.registry import Registry
from pmdaemon.gateways.usual import FRAMES
from pmdaemon.mailbox import Layout, Route, attach, create_segment
from pmdaemon.net.connection import Connection
from pmdaemon.net.handover import Handover
from pmdaemon.net.inbound import Hint, Inbound
from pmdaemon.net.moving import ToOutbound
from pmdaemon.net.outbound import Outbound
from pmdaemon.net.unified import UnifiedCore
from pmdaemon.net.vigil import Patience
from pmdaemon.runtime.clock import SystemClock
from pmdaemon.runtime.stop import Stop
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind

MIB = 1 << 20


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

    def advance(self, incarnation: int, notice: Notice, now_ns: int) -> bool:
        """See ``Registry``."""
        self.durable_rows += len(notice)
        return super().advance(incarnation, notice, now_ns)


class Rig:
    """A pair without the process around it."""

    def __init__(self, mailbox: Any) -> None:
        clock = SystemClock()
        self.registry = CountingRegistry()
        self.counters: Counter[str] = Counter()
        self.schedule = Rounds()
        self.hints: Handover[Hint] = Handover()
        self.registered: Handover[ToOutbound] = Handover()
        self.courier = Courier(mailbox, 0, self.registry.rewind)
        self.book = ControlBook()
        self.polls = self.sent_bytes = 0
        self.reception = reception = Reception(
            self.registry,
            self.courier,
            clock,
            interval_us=1_000_000,
            on_registered=self.registered.put,
            counters=self.counters,
        )
        self.inbound = Inbound(
            self.registry,
            reception,
            self.courier,
            clock,
            Patience.for_interval(10**9),
            hints=self.hints,
            mover=None,
            counters=self.counters,
        )
        self.outbound = Outbound(
            self.registry,
            mailbox,
            clock,
            self.schedule,  # type: ignore[arg-type]  # what outbound uses of it
            hints=self.hints,
            registered=self.registered,
            counters=Counter(),
            book=self.book,
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
        while self.courier.waiting_news:  # while it waits, the first round's cuts would be refused
            self.inbound.step(0.05)
            if time.monotonic() > until_s:
                raise RuntimeError(f"{self.courier.waiting_news} announcements found no room in the mailbox")


class ProductWork:
    """What the product does for one connection, for another way of input and output.

    Thread: one at a time; the record, the courier and the counters are shared.
    """

    def __init__(self, rig: Rig, conn: Connection) -> None:
        self._rig = rig
        self._conn = conn
        assert conn.gateway is not None  # it has registered
        self._gateway = conn.gateway

    def request(self) -> bytes:
        """A POLL with positions, as outbound makes it."""
        rig = self._rig
        rig.polls += 1
        now_ns = time.monotonic_ns()
        asked = self._gateway.ask(rig.polls, now_ns, rig.book.lease_is_fresh(now_ns))
        assert asked is not None  # the round before is complete
        self._conn.session.sending(Kind.POLL)
        rig.sent_bytes += len(asked[1])
        return asked[1]

    def feed(self, data: bytes | memoryview) -> bool:
        """Session table, reception, courier, as inbound does."""
        conn, done, usual = self._conn, False, self._rig.reception.usual
        conn.last_received_ns = time.monotonic_ns()
        view = memoryview(data)
        if usual.take(conn, view, len(view), is_placed=False):
            return True
        messages = 0
        for received in conn.session.feed(view):
            messages += 1
            self._rig.reception.handle(conn, received)
            done = done or received.kind == Kind.REPLY
        if usual.has_lesson and messages == FRAMES:
            usual.learn(view)
        return done


def product_works(sockets: Sockets) -> tuple[Sockets, list[ProductWork], Callable[[], object]]:
    """Register every connection with the product; (sockets, works, end of round) for a peer."""
    rig = Rig(MemorySink())
    rig.register(sockets)
    works, taken = [], []
    for gateway in rig.registry.all():
        conn = gateway.conn
        assert isinstance(conn, Connection)
        rig.inbound.release(conn)
        works.append(ProductWork(rig, conn))
        taken.append(socket.socket(fileno=os.dup(conn.fileno())))
    for sock in taken:
        sock.setblocking(False)
    usual = rig.reception.usual
    usual.begin()

    def end_round() -> None:
        rig.courier.post_cuts()
        usual.begin()

    return taken, works, end_round


def _await_durable(rig: Rig, mailbox: Any) -> None:
    """Follow the notices until every cut is durable, so that rounds do not outrun the taker."""
    sleeper = select.poll()
    sleeper.register(mailbox.fileno(), select.POLLIN)
    while rig.registry.durable_rows < rig.counters["cuts"]:  # some wait for their batch to be old enough
        if rig.courier.refused_keeping:
            raise RuntimeError("the taker fell behind: a batch was refused, and its cuts will not come")
        rig.outbound.step()
        if mailbox.prepare_sleep():
            sleeper.poll(50)
            mailbox.awake()


def _pair_rounds(rig: Rig, expected: int, go_on: GoOn, mailbox: Any = None) -> Timed:
    """Outbound in this thread, inbound in its own, as in the pair process."""
    done = os.eventfd(0)
    target, stopping = 0, False

    def inbound() -> None:
        told = 0
        while not stopping:
            rig.inbound.step(0.2)
            if rig.counters["replies"] >= target > told:
                told = target
                os.eventfd_write(done, 1)

    thread = threading.Thread(target=inbound, name="pm-in-0")
    thread.start()
    sleeper = select.poll()
    sleeper.register(rig.registered.fileno(), select.POLLIN)
    sleeper.register(done, select.POLLIN)
    times: Timed = []
    while go_on(times):
        begun_s = time.monotonic()
        target = rig.counters["replies"] + expected
        rig.schedule.wanted = True
        rig.outbound.step()
        sleeper.poll()
        os.eventfd_read(done)
        times.append(time.monotonic() - begun_s)
        if mailbox is not None:
            _await_durable(rig, mailbox)
    stopping = True
    thread.join()
    os.close(done)
    return times


def _unified_rounds(rig: Rig, expected: int, go_on: GoOn) -> Timed:
    """The core in this thread, as in its process; the inbound thread wakes it."""
    core, stop = UnifiedCore(rig.inbound, rig.outbound), Stop()
    thread = threading.Thread(target=lambda: core.run_inbound(stop), name="pm-in-0")
    thread.start()
    sleeper = core.sleeper()
    times: Timed = []
    while go_on(times):
        begun_s = time.monotonic()
        target = rig.counters["replies"] + expected
        rig.schedule.wanted = True
        while rig.counters["replies"] < target:
            if core.step() and rig.counters["replies"] < target:
                rig.outbound.sleep(sleeper)
        times.append(time.monotonic() - begun_s)
    stop.set("the measurement is over")
    while not core.step():
        pass
    thread.join()
    core.close()
    return times


def unified(sockets: Sockets, stalled: int, go_on: GoOn) -> Timed:
    """Unified mode with the in-memory sink."""
    sink = MemorySink()
    rig = Rig(sink)
    rig.register(sockets)
    times = _unified_rounds(rig, len(sockets) - stalled, go_on)
    assert sink.posted_bytes > 0
    return times


def stalled_pair(sockets: Sockets, stalled: int, go_on: GoOn) -> Timed:
    """``memory_pair``; in each second round the stalled gateways, which never answer, are polled as well.

    As in the product once they are called stalled: their last poll does not keep them from being polled.
    """
    rig = Rig(MemorySink())
    rig.register(sockets)
    ids = frozenset(payload.gateway_id(index) for index in range(len(sockets) - stalled, len(sockets)))

    def next_round(times: Timed) -> bool:
        rig.schedule.left_out = ids if len(times) % 2 else frozenset()
        for gateway_id in ids:
            gateway = rig.registry.get(gateway_id)
            assert gateway is not None  # all have registered
            gateway.awaiting_since_ns = None
        return go_on(times)

    return _pair_rounds(rig, len(sockets) - stalled, next_round)


T_PTMAX: list[float] = []
"""Of the last run of ``memory_pair``: CPU us a message of the inbound thread, median and longest."""


def memory_pair(sockets: Sockets, stalled: int, go_on: GoOn) -> Timed:
    """The pair with the in-memory sink."""
    sink = MemorySink()
    rig = Rig(sink)
    rig.register(sockets)
    samples: list[float] = []
    add = rig.inbound.t_ptmax.add

    def note(sample_us: float, now_ns: int) -> None:
        samples.append(sample_us)
        add(sample_us, now_ns)

    rig.inbound.t_ptmax.add = note  # type: ignore[method-assign]
    times = _pair_rounds(rig, len(sockets) - stalled, go_on)
    assert sink.posted_bytes > 0
    T_PTMAX[:] = [statistics.median(samples), rig.inbound.t_ptmax.value_us]
    return times


def mailbox_pair(sockets: Sockets, stalled: int, go_on: GoOn) -> Timed:
    """The pair with the real mailbox, and a process that takes and acknowledges."""
    with tempfile.TemporaryDirectory(prefix="sla-poll-", dir="/dev/shm") as folder:
        path = Path(folder) / "main.mbx"
        # The warm-up fills it: like the C loop's sink, no page of it is touched for the first time later.
        warm_bytes = WARM_ROUNDS * len(sockets) * len(payload.cut_template())
        ring_bytes = (warm_bytes // MIB + 1) * MIB
        routes = (
            *(Route("pair-0", name, ring_bytes) for name in ("services", "dbmanager")),
            *(Route(name, "pair-0", MIB) for name in ("services", "dbmanager")),
        )
        names = ("services", "dbmanager", "pair-0")
        create_segment(path, Layout(participants=names, routes=routes, slots_per_sender=4096))
        taker = subprocess.Popen([sys.executable, "-m", "benchmarks.polling.taker", str(path)])
        if (cpus := os.cpu_count() or 1) > 1:
            os.sched_setaffinity(taker.pid, {cpus - 1})
        mailbox = attach(path, "pair-0")
        try:
            rig = Rig(mailbox)
            rig.register(sockets)
            times = _pair_rounds(rig, len(sockets) - stalled, go_on, mailbox)
            assert rig.courier.posted_cuts > 0
            return times
        finally:
            taker.terminate()
            taker.wait(10)
            mailbox.close()


def accept_all(listener: socket.socket, count: int) -> Sockets:
    """Accept ``count`` connections."""
    return [listener.accept()[0] for _ in range(count)]


FORMS = {"pair": memory_pair, "pair-mailbox": mailbox_pair, "unified": unified}
STALLED = "stalled"
