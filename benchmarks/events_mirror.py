"""What mirroring to a partner costs: the same events accepted with and without one, in one run.

The partner is a delivery process of its own, on the same machine, over TLS; it has no recipients, so it
keeps what it gets. Accepting does not wait for it: the cost is the thread that reads, encrypts and sends.
*Mirrored* is measured until the partner has all of it on disk.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pmdaemon.pki.authority import Authority
from pmdaemon.runtime.clock import Deadline, SystemClock
from sla_server.events.config import EventPairConfig
from sla_server.events.engine import DeliveryEngine, EngineParts
from sla_server.events.intake import EventIntake
from sla_server.events.later import LATER_BYTES, LaterQueue
from sla_server.events.pair import CooperatingPair
from sla_server.events.queue import EventQueue, QueuedEvent
from sla_server.events.recipients.base import Held, Routed
from sla_server.events.stages.confirm import RetryRules

ROOM, LIMIT_S, LIFETIME_S = 64 << 20, 120.0, 86_400.0
CONFIG = """
data_dir = "{folder}/data"
runtime_dir = "{folder}/run"
[events.pair]
enabled = true
name = "b"
partner = "a"
listen = "127.0.0.1:{port}"
address = "127.0.0.1:{partner_port}"
mirror_bytes = {room}
"""
Batches = Sequence[Sequence[QueuedEvent]]


def mirrored(folder: Path, batches: Batches) -> dict[str, float]:
    """Accepted with a partner against without one, and events a second that reach the partner's disk."""
    count = sum(map(len, batches))
    with accepting(folder / "alone") as (intake, queues, _):
        alone_s = accept(intake, batches, lambda: None)
    authority, ports = Authority(folder / "ca"), [free_port(), free_port()]
    authority.init()
    with partner(folder / "b", authority, ports), accepting(folder / "a") as (intake, queues, engine):
        pair = paired(folder / "a", authority, ports, queues)
        pair.start()
        try:
            until(lambda: pair.status()["mirroring"], "the partner does not answer")
            began_s = time.perf_counter()
            both_s = accept(intake, batches, lambda: pair.publish(engine))
            until(lambda: pair.status()["behind"] == 0, "the partner does not keep up")
            mirrored_s = time.perf_counter() - began_s
        finally:
            pair.close()
    return {"mirror_vs_alone": alone_s / both_s, "mirror_rate": count / mirrored_s}


def accept(intake: EventIntake, batches: Batches, publish: Callable[[], None]) -> float:
    """Seconds until all batches are durable here."""
    began_s = time.perf_counter()
    for batch in batches:
        intake.accept(batch)
        publish()  # the main loop does so each time something has arrived
    return time.perf_counter() - began_s


class Queues:
    """Those of one server."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700)
        self.events = EventQueue(folder, "initial", 1 << 20), EventQueue(folder, "main", ROOM)
        self.later = LaterQueue(EventQueue(folder, "later", LATER_BYTES))

    def close(self) -> None:
        for queue in (*self.events, self.later):
            queue.close()


class ToNobody:
    """Routes nothing, and nothing is deleted."""

    def route(self, _event: object) -> Sequence[Routed]:
        return ()

    def held(self, _event: object, _recipient: str, _now_us: int) -> Held | None:
        return None

    def escalates(self, _recipient: str) -> bool:
        return False


@contextmanager
def accepting(folder: Path) -> Iterator[tuple[EventIntake, Queues, DeliveryEngine]]:
    """What a server accepts events with."""
    queues, clock = Queues(folder), SystemClock()
    ids = {queue.name: queue.queue_id for queue in queues.events}
    parts = EngineParts(queues.events, queues.later, folder / "state.json", ids)
    engine = DeliveryEngine(parts, ToNobody(), RetryRules(), clock, lambda *_event: None)
    try:
        yield EventIntake(folder, *queues.events, clock), queues, engine
    finally:
        engine.close()
        queues.close()


@contextmanager
def partner(folder: Path, authority: Authority, ports: Sequence[int]) -> Iterator[None]:
    """The other server's delivery process."""
    (folder / "run").mkdir(parents=True, mode=0o700)
    with_certificate(folder / "data", authority, "b")
    config = folder / "server.toml"
    config.write_text(CONFIG.format(folder=folder, port=ports[1], partner_port=ports[0], room=ROOM))
    command = [sys.executable, "-m", "sla_server.process", "delivery", "--config", str(config)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def paired(folder: Path, authority: Authority, ports: Sequence[int], queues: Queues) -> CooperatingPair:
    """Our side."""
    with_certificate(folder, authority, "a")
    listen, address = (f"127.0.0.1:{port}" for port in ports)
    config = EventPairConfig(enabled=True, name="a", partner="b", listen=listen, address=address)
    clock = SystemClock()
    return CooperatingPair(config, folder, folder, queues.events, queues.later, clock, lambda: None)


def with_certificate(data_dir: Path, authority: Authority, name: str) -> None:
    (data_dir / "pair").mkdir(parents=True, mode=0o700)
    (data_dir / "pair" / "pair.pem").write_bytes(authority.partner_credential(name, LIFETIME_S))
    (data_dir / "pair" / "ca.crt").write_bytes(authority.store.read("ca.crt"))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def until(is_so: Callable[[], bool], problem: str) -> None:
    deadline = Deadline(LIMIT_S)
    while not is_so():
        if deadline.passed:
            raise RuntimeError(problem)
        time.sleep(0.001)
