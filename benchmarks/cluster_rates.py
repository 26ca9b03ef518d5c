"""Rates of ``make bench-cluster``: small messages beside bare nats-py, one stopped consumer, a large message.

Bare nats-py publishes with an identity and acknowledges with an answer, as our library does: what is compared
is what the library adds. The large message is sent and read by processes of their own, whose greatest memory
the kernel says; the engine's object store takes the same bytes in this process.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

import nats
import nats.js.api
from nats.js import JetStreamContext

from sla_server.cluster.messages import Destination, DestinationKind, MessageSession, Received
from tests.support.cluster import LocalCluster

IN_FLIGHT: Final = 64
PAYLOAD: Final = b"x" * 200
SAMPLES: Final = 5
STOPPED_SAMPLES: Final = 3
SUBSCRIBERS: Final = 10
LIMIT_S: Final = 120.0
CHILD_LIMIT_S: Final = 1800.0


def small(cluster: LocalCluster, directory: Path, messages: int) -> tuple[dict[str, float], dict[str, Any]]:
    """Our producer and consumer over bare nats-py, messages a second."""
    rates: dict[str, list[float]] = {"produce": [], "bare_produce": [], "consume": [], "bare_consume": []}
    with MessageSession(
        cluster.urls, "bench", node=1, directory=directory, window_messages=IN_FLIGHT
    ) as session:
        session.create(Destination("bench-small", max_bytes=256 << 20))
        for _ in range(SAMPLES):
            rates["produce"].append(messages / _produced(session, messages))
            bare_produce_s, bare_consume_s = asyncio.run(_bare(cluster.urls, messages))
            rates["bare_produce"].append(messages / bare_produce_s)
            rates["consume"].append(messages / _consumed(session, messages))
            rates["bare_consume"].append(messages / bare_consume_s)
    medians = {key: statistics.median(values) for key, values in rates.items()}
    ratios = {
        "produce_ratio": medians["produce"] / medians["bare_produce"],
        "consume_ratio": medians["consume"] / medians["bare_consume"],
    }
    return ratios, {"small_per_s": rates}


def _produced(session: MessageSession, messages: int) -> float:
    producer = session.producer("bench-small")
    began_s = time.perf_counter()
    results = [producer.submit(PAYLOAD) for _ in range(messages)]
    for result in results:
        result.result(LIMIT_S)
    return time.perf_counter() - began_s


def _consumed(session: MessageSession, messages: int) -> float:
    consumer = session.consumer("bench-small", "reader", credit=2 * IN_FLIGHT)
    under_way: deque[concurrent.futures.Future[None]] = deque()
    began_s = time.perf_counter()
    for _ in range(messages):
        received = consumer.receive(LIMIT_S)
        assert received is not None
        under_way.append(received.start_acknowledging())
        if len(under_way) == IN_FLIGHT:
            under_way.popleft().result(LIMIT_S)
    for acknowledged in under_way:
        acknowledged.result(LIMIT_S)
    took_s = time.perf_counter() - began_s
    consumer.close()
    return took_s


async def _bare(urls: list[str], messages: int) -> tuple[float, float]:
    client = await nats.connect(urls)
    try:
        stream = client.jetstream(timeout=10)
        await stream.add_stream(
            nats.js.api.StreamConfig(
                name="BARE",
                subjects=["bare"],
                retention=nats.js.api.RetentionPolicy.WORK_QUEUE,
                num_replicas=3,
                max_bytes=256 << 20,
                duplicate_window=600,
            )
        )
        produced_s = await _bare_produced(stream, messages)
        consumed_s = await _bare_consumed(stream, messages)
        await stream.delete_stream("BARE")
        return produced_s, consumed_s
    finally:
        await client.close()


async def _bare_produced(stream: JetStreamContext, messages: int) -> float:
    numbers = iter(range(messages))

    async def produce() -> None:
        for number in numbers:
            await stream.publish("bare", PAYLOAD, headers={"Nats-Msg-Id": str(number)})

    began_s = time.perf_counter()
    await asyncio.gather(*(produce() for _ in range(IN_FLIGHT)))
    return time.perf_counter() - began_s


async def _bare_consumed(stream: JetStreamContext, messages: int) -> float:
    subscription = await stream.pull_subscribe("bare", "reader")
    while not ((info := await subscription.consumer_info()).cluster and info.cluster.leader):
        await asyncio.sleep(0.05)  # a consumer that was just made has no leader yet: it answers "unavailable"
    began_s, found = time.perf_counter(), 0
    while found < messages:
        group = await subscription.fetch(IN_FLIGHT, timeout=5)
        await asyncio.gather(*(message.ack_sync(timeout=10) for message in group))
        found += len(group)
    return time.perf_counter() - began_s


def stopped(cluster: LocalCluster, directory: Path, messages: int) -> tuple[dict[str, float], dict[str, Any]]:
    """Nine subscribers of a topic, with a tenth that goes on and with one that has stopped."""
    took_s: dict[str, list[float]] = {"going": [], "stopped": []}
    with MessageSession(cluster.urls, "bench", node=2, directory=directory) as session:
        for sample in range(STOPPED_SAMPLES):
            for kind, values in took_s.items():
                values.append(
                    _nine(session, f"bench-{kind}-{sample}", messages, is_stopped=kind == "stopped")
                )
    ratio = statistics.median(took_s["going"]) / statistics.median(took_s["stopped"])
    return {"stopped_ratio": ratio}, {"stopped_s": took_s}


def _nine(session: MessageSession, name: str, messages: int, *, is_stopped: bool) -> float:
    session.create(Destination(name, DestinationKind.TOPIC, max_bytes=32 << 20))
    consumers = [session.consumer(name, f"{name}-{number}") for number in range(SUBSCRIBERS)]
    assert all(consumer.wait_ready(1, LIMIT_S) for consumer in consumers)

    def read(number: int) -> None:
        for _ in range(messages):
            received = consumers[number].receive(LIMIT_S)
            assert received is not None
            received.start_acknowledging()

    threads = [threading.Thread(target=read, args=(number,)) for number in range(SUBSCRIBERS)]
    producer = session.producer(name)
    began_s = time.perf_counter()
    for thread in threads[is_stopped:]:
        thread.start()
    for _ in range(messages):
        producer.submit(PAYLOAD)
    for thread in threads[1:]:
        thread.join()
    took_s = time.perf_counter() - began_s
    if not is_stopped:
        threads[0].join()
    for consumer in consumers:
        consumer.close()
    return took_s


def large(cluster: LocalCluster, directory: Path, size_bytes: int) -> tuple[dict[str, float], dict[str, Any]]:
    """A message of so many bytes, sent and read, beside the engine's object store."""
    with MessageSession(cluster.urls, "bench", node=3, directory=directory / "own") as session:
        session.create(Destination("bench-large", max_bytes=8 << 20))
    sent = _child("send", cluster.urls, directory, size_bytes)
    read = _child("read", cluster.urls, directory, size_bytes)
    assert sent["digest"] == read["digest"], "the message is not what was sent"
    put_s, get_s = asyncio.run(_stored_object(cluster.urls, size_bytes))
    ratio = (put_s + get_s) / (sent["took_s"] + read["took_s"])
    values = {"large_memory": max(sent["memory_mb"], read["memory_mb"]), "large_ratio": ratio}
    return values, {"large": {"send": sent, "read": read, "object_put_s": put_s, "object_get_s": get_s}}


async def _stored_object(urls: list[str], size_bytes: int) -> tuple[float, float]:
    client = await nats.connect(urls)
    try:
        stream = client.jetstream(timeout=30)
        config = nats.js.api.ObjectStoreConfig(replicas=3, max_bytes=size_bytes + (64 << 20))
        bucket = await stream.create_object_store("bench", config=config)
        began_s = time.perf_counter()
        await bucket.put("large", cast(Any, Pattern(size_bytes)))
        put_s = time.perf_counter() - began_s
        with tempfile.TemporaryFile() as target:
            began_s = time.perf_counter()
            await bucket.get("large", writeinto=cast(Any, target))
            get_s = time.perf_counter() - began_s
        await stream.delete_object_store("bench")
        return put_s, get_s
    finally:
        await client.close()


def _child(action: str, urls: list[str], directory: Path, size_bytes: int) -> dict[str, Any]:
    program = [sys.executable, "-m", "benchmarks.cluster_rates", action, str(directory / action)]
    done = subprocess.run(
        [*program, str(size_bytes), *urls], capture_output=True, text=True, timeout=CHILD_LIMIT_S, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{action} of the large message failed: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


class Pattern:
    """A file of so many bytes that is nowhere: blocks that differ."""

    def __init__(self, size_bytes: int) -> None:
        self._left_bytes = size_bytes
        self._count = 0
        self.digest = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        """The next bytes; all that are left for -1."""
        size = self._left_bytes if size < 0 else min(size, self._left_bytes)
        self._left_bytes -= size
        self._count += 1
        found = (self._count.to_bytes(8, "little") * (size // 8 + 1))[:size]
        self.digest.update(found)
        return found

    def readinto(self, buffer: memoryview) -> int:
        """The same into a buffer, as the object store reads."""
        found = self.read(len(buffer))
        buffer[: len(found)] = found
        return len(found)


def _peak_mb() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def run_child(action: str, directory: Path, size_bytes: int, urls: list[str]) -> dict[str, Any]:
    """Send or read the large message in this process."""
    node = 10 if action == "send" else 11
    fragments_bytes = size_bytes + (64 << 20)
    with MessageSession(
        urls, action, node=node, directory=directory, fragments_bytes=fragments_bytes
    ) as session:
        before_mb, began_s = _peak_mb(), time.perf_counter()
        received: Received | None = None
        if action == "send":
            source = Pattern(size_bytes)
            session.send_large("bench-large", cast(BinaryIO, source))
            digest = source.digest
        else:
            received = session.consumer("bench-large", "reader").receive(LIMIT_S)
            assert received is not None
            digest = hashlib.sha256()
            for piece in session.read_large(received):
                digest.update(piece)
        took_s = time.perf_counter() - began_s
        if received is not None:
            session.acknowledge_large(received)
        return {
            "took_s": took_s,
            "memory_mb": _peak_mb(),
            "memory_before_mb": before_mb,
            "digest": digest.hexdigest(),
        }


if __name__ == "__main__":
    print(json.dumps(run_child(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])))
