"""The product's own pair in rounds (``rig``), and its work for an answer as other ways of polling do it.

Here is the loop around ``step`` of each thread. In the mailbox form the posts go through a real segment to a
process that takes them and sends DURABLE for each batch, as dbmanager does.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.polling import payload
from benchmarks.polling.peers import WARM_ROUNDS, GoOn, Sockets, Timed
from benchmarks.polling.rig import MemorySink, Rig
from pmdaemon.mailbox import Layout, Route, attach, create_segment
from pmdaemon.poller.connection import AgentConnection
from pmdaemon.poller.fast_path import FRAMES
from pmdaemon.poller.unified import UnifiedCore
from pmdaemon.runtime.stop import Stop
from pmdaemon.wire.kinds import Kind

MIB = 1 << 20


class ProductWork:
    """What the product does for one connection, for another way of input and output.

    Thread: one at a time; the record, the publisher and the counters are shared.
    """

    def __init__(self, rig: Rig, conn: AgentConnection) -> None:
        self._rig = rig
        self._conn = conn
        assert conn.gateway is not None  # it has registered
        self._gateway = conn.gateway

    def request(self) -> bytes:
        """A POLL with positions, as outbound makes it."""
        rig = self._rig
        rig.polls += 1
        now_ns = time.monotonic_ns()
        asked = self._gateway.ask(
            rig.polls, now_ns, rig.standing_caps.lease_is_fresh(now_ns), rig.registry.catch_up, ()
        )
        assert asked is not None  # the round before is complete
        self._conn.session.sending(Kind.POLL)
        rig.sent_bytes += len(asked[1])
        return asked[1]

    def feed(self, data: bytes | memoryview) -> bool:
        """Session table, reception, publisher, as inbound does."""
        conn, done, fast_path = self._conn, False, self._rig.handlers.fast_path
        conn.last_received_ns = time.monotonic_ns()
        view = memoryview(data)
        if fast_path.take(conn, view, len(view), is_placed=False):
            return True
        messages = 0
        for received in conn.session.feed(view):
            messages += 1
            self._rig.handlers.handle(conn, received)
            done = done or received.kind == Kind.REPLY
        if fast_path.should_learn and messages == FRAMES:
            fast_path.learn(view)
        return done


def product_works(sockets: Sockets) -> tuple[Sockets, list[ProductWork], Callable[[], object]]:
    """Register every connection with the product; (sockets, works, end of round) for a peer."""
    rig = Rig(MemorySink())
    rig.register(sockets)
    works, taken = [], []
    for gateway in rig.registry.all():
        conn = gateway.conn
        assert isinstance(conn, AgentConnection)
        rig.inbound.release(conn)
        works.append(ProductWork(rig, conn))
        taken.append(socket.socket(fileno=os.dup(conn.fileno())))
    for sock in taken:
        sock.setblocking(False)
    fast_path = rig.handlers.fast_path
    fast_path.begin()

    def end_round() -> None:
        rig.publisher.post_cuts()
        fast_path.begin()

    return taken, works, end_round


def _await_durable(rig: Rig, mailbox: Any) -> None:
    """Follow the notices until every cut is durable, so that rounds do not outrun the taker."""
    sleeper = select.poll()
    sleeper.register(mailbox.fileno(), select.POLLIN)
    while rig.registry.durable_rows < rig.counters["cuts"]:  # some wait for their batch to be old enough
        if rig.publisher.refused_keeping:
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
    times: Timed = []
    while go_on(times):
        begun_s = time.monotonic()
        target = rig.counters["replies"] + expected
        rig.schedule.wanted = True
        while rig.counters["replies"] < target:
            if core.step() and rig.counters["replies"] < target:
                core.sleep(stop)
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
            assert rig.publisher.posted_cuts > 0
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
