"""Ways to carry bytes between processes, for ``benchmarks.mailbox``: ours, and the queues of Python's world.

Each is opened before the producers are forked, then on both sides, and only then timed. Peers carry the same
bytes as we do, as they come from their own documentation; none of them has a checksum.
"""

from __future__ import annotations

import pickle
import queue
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import zmq
from faster_fifo import Queue as FasterFifo

from pmdaemon.mailbox import Layout, Mailbox, Route, attach, create_segment
from pmdaemon.mailbox.errors import MailboxFull
from pmdaemon.mailbox.layout import RING_UNIT_BYTES

BATCH = 64
ROOM_BYTES = 4 << 20  # for faster-fifo, and for the rings of all our producers together
NAP_S, NAP_LARGE_S = 300e-6, 50e-6  # of a producer that finds no room: less than it takes to empty it
_context = get_context("fork")


class Transport(ABC):
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

    @abstractmethod
    def send_all(self, count: int, data: list[bytes]) -> None:
        """Producer: send ``count`` messages."""

    @abstractmethod
    def receive(self) -> int:
        """Consumer: wait for some messages and return their number."""

    def close(self) -> None:
        """Give everything back."""


class Box(Transport):
    """The mailbox: post one message, take up to 64."""

    form, batch, views = "lanes", 1, False

    def open(self) -> None:
        names = tuple(f"p{number}" for number in range(self.producers))
        ring_bytes = ROOM_BYTES // self.producers // RING_UNIT_BYTES * RING_UNIT_BYTES
        routes = tuple(Route(name, "consumer", ring_bytes) for name in names)
        self.nap_s = NAP_S if self.size < 100_000 else NAP_LARGE_S
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
                    time.sleep(self.nap_s)

    def send_batches(self, box: Mailbox, left: int, data: list[bytes]) -> None:
        while left:
            batch = data[:left]
            left -= len(batch)
            while batch:
                try:
                    box.post_many("consumer", batch)
                    break
                except MailboxFull as full:
                    batch = batch[full.posted :]
                    time.sleep(self.nap_s)

    def receive(self) -> int:
        while not (messages := self.take()):
            self.box.wait(1)
        return len(messages)

    def close(self) -> None:
        self.box.close()


class BoxMany(Box):
    """post_many of 64: a bundle, if the messages are small."""

    batch = BATCH


class BoxViews(Box):
    """Payloads are used where they lie."""

    batch, views = 16, True


class BoxSingleViews(Box):
    """Post one message; payloads are used where they lie."""

    views = True


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
        self.queue = FasterFifo(max_size_bytes=ROOM_BYTES, loads=plain, dumps=dumps)

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
    "lanes_single_views": BoxSingleViews,
    "shared_many": SharedMany,
    "simple_queue": SimpleQueue,
    "pipe": Pipe,
    "zmq_ipc": Zmq,
}
