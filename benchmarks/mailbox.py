"""``make bench-mailbox``: the mailbox against the queues of Python's world, in one run, medians of 5.

One or three producer processes send the same bytes to one consumer; all variants are interleaved within each
round, and a ratio is the median of the ratios within the rounds. Sizes 100 B, 4 KB, 100 KB. The peers' waits
are their own; the mailbox's consumer sleeps on its doorbell, its producers yield when it is full.

Variants of the mailbox: ``lanes`` and ``shared`` (post, take), ``*_many`` (post_many of 64, take of 64) and
``*_views`` (post_many of up to 8, take_views: payloads are used where they lie). Peers: multiprocessing's
Queue, SimpleQueue and Pipe (with a lock, as several producers need), faster-fifo as it comes (pickle) and in
its fastest form (raw bytes, batches of 64 both ways), pyzmq PUSH/PULL over ipc (one producer only).

Also: slots inspected per take behind 10,000 foreign messages, kills with everything acknowledged accounted
for (tests/crash/chaos.py), and the round trip of two sleeping processes.
"""

from __future__ import annotations

import importlib.metadata
import os
import pickle
import queue
import select
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import zmq
from faster_fifo import Queue as FasterFifo

from benchmarks import harness
from pmdaemon.mailbox import Layout, LookAhead, Mailbox, Route, attach, create_segment
from pmdaemon.mailbox.errors import MailboxFull
from tests.crash import chaos

ROUNDS = 5
MESSAGES = {100: 45_000, 4096: 30_000, 102_400: 3_000}  # a variant and round; about 0.2 s
BATCH = 64
KILLS = 1_050
FOREIGN = 10_000
_context = get_context("fork")


def payloads(size: int) -> list[bytes]:
    """Different objects and bytes, so that nobody profits from seeing the same one again."""
    return [os.urandom(size) for _ in range(BATCH if size < 100_000 else 16)]


class Transport:
    """One way to carry bytes: opened before the producers are forked, then on both sides, then timed."""

    def __init__(self, folder: Path, producers: int, size: int) -> None:
        self.folder, self.producers, self.size = folder, producers, size
        self.open()

    def open(self) -> None:
        """Make what both sides share, before the producers are forked."""

    def open_sender(self, number: int) -> None:
        """Producer ``number``, before the start signal."""

    def open_receiver(self) -> None:
        """Consumer, after the producers were forked."""

    def send_all(self, count: int, data: list[bytes]) -> None:
        """Producer: send ``count`` messages."""
        raise NotImplementedError

    def receive(self) -> int:
        """Consumer: wait for some messages and return their number."""
        raise NotImplementedError

    def close(self) -> None:
        """Give everything back."""


class Box(Transport):
    form, batch, views = "lanes", 1, False

    def open(self) -> None:
        names = tuple(f"p{number}" for number in range(self.producers))
        ring_bytes = (1 if self.size < 100_000 else 2) << 20
        routes = tuple(Route(name, "consumer", ring_bytes) for name in names)
        create_segment(self.folder / "segment", Layout(("consumer", *names), routes, 2048, self.form))
        self.box = attach(self.folder / "segment", "consumer")
        self.take: Callable[[], list[Any]] = self.box.take_views if self.views else self.box.take

    def open_sender(self, number: int) -> None:
        self.box = attach(self.folder / "segment", f"p{number}")

    def send_all(self, count: int, data: list[bytes]) -> None:
        if self.batch > 1:
            self.send_batches(self.box, count, data[: self.batch])
            return
        post, length = self.box.post, len(data)
        for index in range(count):
            while True:
                try:
                    post("consumer", data[index % length])
                    break
                except MailboxFull:
                    os.sched_yield()

    def send_batches(self, box: Mailbox, left: int, data: list[bytes]) -> None:
        while left:
            try:
                box.post_many("consumer", data[:left])
                left -= len(data[:left])
            except MailboxFull as full:
                left -= full.posted
                os.sched_yield()

    def receive(self) -> int:
        while not (messages := self.take()):
            self.box.wait(1)
        return len(messages)

    def close(self) -> None:
        self.box.close()


class BoxMany(Box):
    batch = BATCH


class BoxViews(Box):
    batch, views = 8, True


class Shared(Box):
    form = "shared"


class SharedMany(BoxMany):
    form = "shared"


class MpQueue(Transport):
    def open(self) -> None:
        self.queue: Any = _context.Queue()

    def send_all(self, count: int, data: list[bytes]) -> None:
        length = len(data)
        for index in range(count):
            self.queue.put(data[index % length])
        self.queue.close()
        self.queue.join_thread()

    def receive(self) -> int:
        self.queue.get()
        return 1

    def close(self) -> None:
        self.queue.close()


class SimpleQueue(Transport):
    def open(self) -> None:
        self.queue = _context.SimpleQueue()

    def send_all(self, count: int, data: list[bytes]) -> None:
        for index in range(count):
            self.queue.put(data[index % len(data)])

    def receive(self) -> int:
        self.queue.get()
        return 1

    def close(self) -> None:
        self.queue.close()


class Pipe(Transport):
    def open(self) -> None:
        self.readable, self.writable = _context.Pipe(False)
        self.lock = _context.Lock()

    def send_all(self, count: int, data: list[bytes]) -> None:
        for index in range(count):
            with self.lock:
                self.writable.send_bytes(data[index % len(data)])

    def receive(self) -> int:
        self.readable.recv_bytes()
        return 1

    def close(self) -> None:
        self.readable.close()
        self.writable.close()


class Fifo(Transport):
    """faster-fifo as it comes: pickle, put and get."""

    raw = False

    def open(self) -> None:
        plain = bytes if self.raw else pickle.loads
        dumps = (lambda data: data) if self.raw else pickle.dumps
        self.queue = FasterFifo(max_size_bytes=4 << 20, loads=plain, dumps=dumps)

    def send_all(self, count: int, data: list[bytes]) -> None:
        for index in range(count):
            self.put(self.queue.put, data[index % len(data)])

    def put(self, put: Callable[[Any], None], what: Any) -> None:
        while True:
            try:
                put(what)
                return
            except queue.Full:
                continue

    def receive(self) -> int:
        self.queue.get(timeout=60)
        return 1

    def close(self) -> None:
        self.queue.close()


class FifoMany(Fifo):
    """Its fastest form: raw bytes, batched both ways."""

    raw = True

    def send_all(self, count: int, data: list[bytes]) -> None:
        while count:
            self.put(self.queue.put_many, data[:count])
            count -= len(data[:count])

    def receive(self) -> int:
        return len(self.queue.get_many(timeout=60, max_messages_to_get=BATCH))


class Zmq(Transport):
    def open(self) -> None:
        self.addresses = [f"ipc://{self.folder}/zmq{number}" for number in range(self.producers)]

    def open_receiver(self) -> None:
        # Not before the fork: a context does not survive one.
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.PULL)
        self.socket.setsockopt(zmq.RCVTIMEO, 60_000)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 1)
        for address in self.addresses:
            self.socket.connect(address)

    def open_sender(self, number: int) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.PUSH)
        self.socket.setsockopt(zmq.LINGER, 60_000)
        self.socket.bind(self.addresses[number])

    def send_all(self, count: int, data: list[bytes]) -> None:
        for index in range(count):
            self.socket.send(data[index % len(data)])
        self.close()

    def receive(self) -> int:
        self.socket.recv()
        return 1

    def close(self) -> None:
        self.socket.close()
        self.context.term()


VARIANTS: dict[str, type[Transport]] = {
    "lanes": Box,
    "shared": Shared,
    "mp_queue": MpQueue,
    "lanes_many": BoxMany,
    "fifo_many": FifoMany,
    "fifo": Fifo,
    "lanes_views": BoxViews,
    "shared_many": SharedMany,
    "simple_queue": SimpleQueue,
    "pipe": Pipe,
    "zmq_ipc": Zmq,
}


@contextmanager
def folder() -> Iterator[Path]:
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="sla-bench-", dir=shm if shm.is_dir() else None) as name:
        yield Path(name)


def cell(kind: type[Transport], size: int, producers: int) -> float:
    """Microseconds a message, from the start signal to the last one received."""
    count = MESSAGES[size] // producers
    data = payloads(size)
    with folder() as place:
        transport = kind(place, producers, size)
        readable, writable = os.pipe()
        ready, tell = os.pipe()
        pids = []
        for number in range(producers):
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    os.close(writable)
                    transport.open_sender(number)
                    os.write(tell, b"!")
                    os.read(readable, 1)  # end of file is the start signal
                    transport.send_all(count, data)
                    status = 0
                finally:
                    os._exit(status)
            pids.append(pid)
        transport.open_receiver()
        for _ in pids:
            os.read(ready, 1)
        for fd in (readable, ready, tell):
            os.close(fd)
        left = count * producers
        started_s = time.perf_counter()
        os.close(writable)
        while left > 0:
            left -= transport.receive()
        took_s = time.perf_counter() - started_s
        for pid in pids:
            if os.waitpid(pid, 0)[1]:
                raise RuntimeError(f"a producer of {kind.__name__} failed")
        transport.close()
    return took_s / (count * producers) * 1e6


def inspected(look: LookAhead, form: str, takes: int) -> float:
    """Slots inspected per take of a message that stands behind FOREIGN messages to somebody else."""
    routes = (Route("a", "other", 1 << 20), Route("a", "me", 1 << 20))
    with folder() as place:
        create_segment(place / "segment", Layout(("a", "me", "other"), routes, 4 * FOREIGN, form))
        with attach(place / "segment", "a") as a, attach(place / "segment", "me", look) as me:
            for _ in range(FOREIGN):
                a.post("other", b"")
            me.take()  # not counted: somebody who was there all the time has seen them come
            before = me.stats()["slots_inspected"]
            for _ in range(takes):
                a.post("me", b"x" * 100)
                assert len(me.take(1)) == 1
            return float(me.stats()["slots_inspected"] - before) / takes


def round_trip_us(trips: int) -> float:
    """Two processes that sleep in a selector and wake each other, microseconds there and back."""
    with folder() as place:
        routes = (Route("a", "b", 4096), Route("b", "a", 4096))
        create_segment(place / "segment", Layout(("a", "b"), routes, 64))
        pid = os.fork()
        if pid == 0:
            try:
                with attach(place / "segment", "b") as b:
                    while True:
                        echo(b, "a")
            finally:
                os._exit(1)
        with attach(place / "segment", "a") as a:
            times = []
            for _ in range(trips):
                started_s = time.perf_counter()
                a.post("b", b"ping")
                await_one(a)
                times.append(time.perf_counter() - started_s)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return statistics.median(times) * 1e6


def await_one(box: Mailbox) -> None:
    poll = select.poll()
    poll.register(box, select.POLLIN)
    while not box.take():
        if box.prepare_sleep():
            poll.poll(50)
            box.awake()


def echo(box: Mailbox, to: str) -> None:
    await_one(box)
    box.post(to, b"pong")


def measure() -> harness.Sample:
    """One whole run."""
    rows: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for size in MESSAGES:
            for producers in (1, 3):
                for name, kind in VARIANTS.items():
                    if name == "zmq_ipc" and producers > 1:
                        continue  # its receiver stalled with three producers of 100 B, whoever bound
                    rows.setdefault(f"{name}.{size}.{producers}", []).append(cell(kind, size, producers))
    values = goals(rows)
    no_resets = LookAhead(threshold=None)
    values["inspected_without_resets"] = inspected(no_resets, "shared", 20_000)
    values["inspected_with_resets"] = inspected(LookAhead(), "shared", 20_000)
    values["inspected_without_look_ahead"] = inspected(LookAhead(enabled=False), "shared", 20)
    values["round_trip_us"] = round_trip_us(3_000)
    outcomes = {form: chaos.run(form, KILLS // 2, 120, 7) for form in ("lanes", "shared")}
    values["chaos_kills"] = sum(outcome.kills for outcome in outcomes.values())
    values["chaos_faults"] = sum(o.lost + o.doubled + o.disordered for o in outcomes.values())
    raw = {
        "us_per_message": rows,
        "chaos": {form: vars(outcome) for form, outcome in outcomes.items()},
        "values": values,
    }
    names = ("faster-fifo", "pyzmq")
    return harness.Sample(values, raw, {name: importlib.metadata.version(name) for name in names})


def goals(rows: dict[str, list[float]]) -> dict[str, float]:
    """Medians of the ratios within each round, which cancels the machine's mood."""

    def times(ours: str, peer: str, size: int, producers: int = 1) -> float:
        pairs = zip(rows[f"{peer}.{size}.{producers}"], rows[f"{ours}.{size}.{producers}"], strict=True)
        return statistics.median(theirs / own for theirs, own in pairs)

    return {
        "mp_queue_100": times("lanes", "mp_queue", 100),
        "mp_queue_4k": times("lanes", "mp_queue", 4096),
        "mp_queue_100_3p": times("lanes", "mp_queue", 100, 3),
        "mp_queue_4k_3p": times("lanes", "mp_queue", 4096, 3),
        "mp_queue_100k": times("lanes_views", "mp_queue", 102_400),
        "fifo_100": times("lanes", "fifo", 100),
        "fifo_4k": times("lanes", "fifo", 4096),
        "fifo_100k": times("lanes_views", "fifo", 102_400),
        "fifo_many_100": times("lanes_many", "fifo_many", 100),
        "fifo_many_4k": times("lanes_many", "fifo_many", 4096),
        "fifo_many_100k": times("lanes_views", "fifo_many", 102_400),
        "shared_mp_queue_100": times("shared", "mp_queue", 100),
        "shared_mp_queue_4k": times("shared", "mp_queue", 4096),
    }


if __name__ == "__main__":
    harness.main("mailbox", measure)
