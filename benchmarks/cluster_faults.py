"""Faults of ``make bench-cluster``: failover, kills, transactions that are crashed, a thousand clients.

Nodes are killed with SIGKILL and started again with what they have stored. A transaction's program "dies" by
an exception that no handler catches, between two steps of its commit; its session is then closed, and another
one goes on. Clients are links of the product, some hundred a process.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final, cast

import nats

from sla_server.cluster.errors import ClusterError
from sla_server.cluster.messages import Consumer, Destination, MessageSession, Received
from sla_server.cluster.messages.link import EngineLink
from tests.support.cluster import LocalCluster

LIMIT_S: Final = 240.0
PLANNED_LOOK_S: Final = 1.0
CLIENTS_EACH: Final = 250
PRODUCERS: Final = 3
SETTLED_S: Final = 3.0
QUIET_S: Final = 30.0  # longer than what was under way takes to come again
STEPS: Final = ("opening", "opened", "locked", "staged", "decided", "finished", "")
TARGETS: Final = ("bench-tx-a", "bench-tx-b", "bench-tx-c")


class Died(BaseException):
    """The program of a transaction is gone."""


class Gaps:
    """A producer that sends one message after the other, and when each was confirmed."""

    def __init__(self, session: MessageSession, name: str) -> None:
        self._producer = session.producer(name)
        self._stop = threading.Event()
        self.confirmed_s: list[float] = [time.monotonic()]
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._producer.send(b"x" * 200, limit_s=LIMIT_S)
            self.confirmed_s.append(time.monotonic())

    def wait_after(self, at_s: float) -> None:
        """Until something that was sent later is confirmed, and a little more."""
        while self.confirmed_s[-1] < at_s + PLANNED_LOOK_S:
            time.sleep(0.05)

    def longest_s(self, at_s: float) -> float:
        """The longest time without a confirmation from just before ``at_s`` on."""
        times = [when for when in self.confirmed_s if when > at_s - 1.0]
        return max(later - earlier for earlier, later in itertools.pairwise(times))

    def close(self) -> None:
        """End it."""
        self._stop.set()
        self._thread.join()


def leader(cluster: LocalCluster, stream: str) -> int:
    """Index of the node that leads a stream."""

    async def ask() -> str:
        client = await nats.connect([node.url() for node in cluster.nodes if node.child.is_running])
        try:
            info = await client.jetstream(timeout=10).stream_info(stream)
            return str(info.cluster.leader) if info.cluster else ""
        finally:
            await client.close()

    names = [node.config.node for node in cluster.nodes]
    while (name := asyncio.run(ask())) not in names:
        time.sleep(0.1)
    return names.index(name)


def failover(cluster: LocalCluster, directory: Path, times: int) -> tuple[dict[str, float], dict[str, Any]]:
    """How long a producer has no confirmation when the primary is killed, and when it hands over."""
    unplanned, planned = [], []
    destination = Destination("bench-failover", max_bytes=128 << 20)
    with MessageSession(cluster.urls, "bench", node=4, directory=directory) as session:
        session.create(destination)
        reader = session.subscribe("bench-failover", "reader", lambda _received: None)
        gaps = Gaps(session, "bench-failover")
        try:
            for _ in range(times):
                index, at_s = leader(cluster, destination.stream), time.monotonic()
                cluster.kill(index)
                gaps.wait_after(at_s)
                unplanned.append(gaps.longest_s(at_s))
                cluster.restore()
                time.sleep(SETTLED_S)
            for _ in range(times):
                at_s = time.monotonic()
                subject = f"STREAM.LEADER.STEPDOWN.{destination.stream}"
                session.link.run(session.link.ask(subject, {}))
                gaps.wait_after(at_s)
                planned.append(gaps.longest_s(at_s))
        finally:
            gaps.close()
            reader.close()
    values = {
        "unplanned_p50_s": statistics.median(unplanned),
        "unplanned_worst_s": max(unplanned),
        "planned_worst_s": max(planned),
    }
    return values, {"unplanned_s": unplanned, "planned_s": planned}


def kills(
    cluster: LocalCluster, directory: Path, number: int, seed: int
) -> tuple[dict[str, float], dict[str, Any]]:
    """Acknowledged messages that were lost, and those that came twice to a consumer, in so many kills."""
    chance, sent, received = random.Random(seed), Counter[str](), Counter[str]()
    stop, killed = threading.Event(), 0
    with contextlib.ExitStack() as ends:
        sessions = [
            ends.enter_context(
                MessageSession(cluster.urls, f"b{place}", node=20 + place, directory=directory / str(place))
            )
            for place in range(PRODUCERS + 1)
        ]
        sessions[0].create(Destination("bench-kills", max_bytes=128 << 20))
        # Each restart hands out again what was fetched; it is not dead for that.
        consumer = sessions[-1].consumer("bench-kills", "reader", max_deliveries=10_000)
        threads = [
            threading.Thread(target=send_counted, args=(one, "bench-kills", stop, sent))
            for one in sessions[:-1]
        ]
        threads.append(threading.Thread(target=receive_counted, args=(consumer, stop, received)))
        for thread in threads:
            thread.start()
        try:
            while killed < number:
                group = chance.sample(range(3), min(chance.choice((1, 2)), number - killed))
                for index in group:
                    cluster.kill(index)
                killed += len(group)
                time.sleep(chance.uniform(0.0, 2.0))
                cluster.restore()
                time.sleep(chance.uniform(0.0, SETTLED_S))
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    lost = sum(1 for identity in sent if identity not in received)
    doubled = sum(count - 1 for count in received.values())
    values = {"kills": float(killed), "lost": float(lost), "doubled": float(doubled)}
    return values, {"kills": {"sent": len(sent), "received": len(received)}}


def send_counted(session: MessageSession, name: str, stop: threading.Event, sent: Counter[str]) -> None:
    """Send one message after the other until the stop; ``sent`` are those that were confirmed."""
    producer = session.producer(name)
    while not stop.is_set():
        with contextlib.suppress(ClusterError):  # what is not confirmed counts nowhere
            sent[producer.send(b"x" * 200, limit_s=LIMIT_S)] += 1


def receive_counted(consumer: Consumer, stop: threading.Event, found: Counter[str]) -> None:
    """Until it was told to stop and nothing comes any more."""
    while True:
        received = consumer.receive(QUIET_S if stop.is_set() else 1.0)
        if received is None and stop.is_set():
            return
        if received is not None:
            found[received.identity] += 1
            with contextlib.suppress(ClusterError):
                received.acknowledge(LIMIT_S)


def transactions(
    cluster: LocalCluster, directory: Path, number: int
) -> tuple[dict[str, float], dict[str, Any]]:
    """Messages that go from one queue to three, in transactions that die at each step in turn."""
    nodes, steps = itertools.count(30), itertools.cycle(STEPS)
    moved, tried, died, took_s = 0, 0, Counter[str](), []

    def opened() -> MessageSession:
        node = next(nodes)
        return MessageSession(cluster.urls, "mover", node=node, directory=directory / str(node))

    session = opened()
    for name in ("bench-tx-in", *TARGETS):
        session.create(Destination(name, max_bytes=16 << 20))
    source = session.producer("bench-tx-in")
    for place in range(number):
        source.submit(b"%d" % place)
    session.flush("bench-tx-in", LIMIT_S)
    consumer = session.consumer("bench-tx-in", "mover", credit=1)
    while moved < number:
        step, identity = next(steps), f"bench-{tried}"
        tried += 1
        received = consumer.receive(LIMIT_S)
        assert received is not None, f"{moved} of {number} came"
        try:
            began_s = time.perf_counter()
            _move(session, received, identity, step)
            took_s.append(time.perf_counter() - began_s)
            moved += 1
        except Died:
            died[step] += 1
            session.close()
            session = opened()
            moved += session.outcome(identity)
            consumer = session.consumer("bench-tx-in", "mover", credit=1)
    consumer.close()
    found = {name: _all_of(session, name, number) for name in TARGETS}
    session.close()
    wanted = {str(place) for place in range(number)}
    half_done = sum(
        1
        for place in wanted | set().union(*found.values())
        if {counts[place] for counts in found.values()} != {1}
    )
    values = {"transactions": float(tried), "half_done": float(half_done)}
    raw = {"died": dict(died), "moved": moved, "commit_p50_s": statistics.median(took_s)}
    return values, {"transactions": raw}


def _move(session: MessageSession, received: Received, identity: str, step: str) -> None:
    def fault(name: str) -> None:
        if step and name.startswith(step):
            raise Died

    with session.transaction(identity, fault=fault) as transaction:
        transaction.acknowledge(received)
        for name in TARGETS:
            transaction.send(name, received.data)


def _all_of(session: MessageSession, name: str, number: int) -> Counter[str]:
    """What a destination has: as much as it should have, and a moment longer."""
    found: Counter[str] = Counter()
    consumer = session.consumer(name, "reader")
    while (received := consumer.receive(5.0 if found.total() >= number else 20.0)) is not None:
        found[received.data.decode()] += 1
        received.acknowledge()
    return found


def connections(
    cluster: LocalCluster, directory: Path, clients: int
) -> tuple[dict[str, float], dict[str, Any]]:
    """Clients on three nodes, of which one is killed: when all are back, and how often one tried."""
    del directory
    counts = [CLIENTS_EACH] * (clients // CLIENTS_EACH) + [clients % CLIENTS_EACH] * (
        clients % CLIENTS_EACH > 0
    )
    program = [sys.executable, "-m", "benchmarks.cluster_faults"]
    children = [
        subprocess.Popen(
            [*program, str(count), *cluster.urls],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for count in counts
    ]
    try:
        for child in children:
            _answer(child, "ready")
        victim = cluster.nodes[0].config.listen
        killed_s = time.monotonic()
        cluster.kill(0)
        found = []
        for child in children:
            assert child.stdin is not None
            child.stdin.write(f"{victim}\n")
            child.stdin.flush()
        for child in children:
            found.append(json.loads(_answer(child, "{")))
    finally:
        for child in children:
            child.kill()
            child.communicate()
    cluster.restore()
    back_s = max(one["back_s"] for one in found) - killed_s
    values = {"clients_back_s": back_s, "attempts": float(max(one["attempts"] for one in found))}
    lost = sum(one["lost"] for one in found)
    assert lost, "no client was connected to the node that was killed"
    return values, {"connections": {"clients": clients, "that_lost_their_node": lost}}


def _answer(child: subprocess.Popen[str], start: str) -> str:
    """The next line of a child that begins so; others are of its log."""
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith(start):
            return line
    raise RuntimeError(f"a process of clients has ended: {child.wait()}")


class CountedLink(EngineLink):
    """A link that counts how often it tries to connect, and knows when it is back."""

    def __init__(self, urls: list[str], name: str) -> None:
        super().__init__(urls, name)
        self.first_node = self.node
        self.attempts = 0
        self.back_s = 0.0
        inner = self.client._connect_to_server  # the library counts no attempts that fail

        async def counted(server: Any) -> None:
            self.attempts += 1
            await inner(server)

        cast(Any, self.client)._connect_to_server = counted


def run_clients(count: int, urls: list[str]) -> None:
    """So many clients in this process: connect, wait for the name of the node that was killed, report."""
    threading.stack_size(256 << 10)
    links = [CountedLink(urls, f"c{number}") for number in range(count)]
    print("ready", flush=True)
    victim = sys.stdin.readline().strip()
    losers = [link for link in links if link.first_node == victim]
    while not all(link.back_s for link in losers):
        for link in losers:
            if not link.back_s and link.reconnections and link.client.is_connected:
                link.back_s = time.monotonic()
        time.sleep(0.01)
    back_s = max((link.back_s for link in losers), default=0.0)
    attempts = max((link.attempts for link in losers), default=0)
    print(json.dumps({"back_s": back_s, "attempts": attempts, "lost": len(losers)}), flush=True)
    sys.stdin.readline()  # until it is killed


if __name__ == "__main__":
    run_clients(int(sys.argv[1]), sys.argv[2:])
