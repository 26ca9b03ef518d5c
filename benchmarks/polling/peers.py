"""The other ways to poll N gateways from Python (P18), each with the same round: ask all, wait for all.

Only the way of input and output differs: what is asked and what is done with an answer is a ``Work``.
``ProductWork`` (in ``ours``) is the product's own: positions, acknowledgement, session table, clock offset,
batches. ``LeanWork`` sends a request encoded beforehand, decodes the frames, keeps a copy of each CUT until
the round ends and does nothing else: a program that would only collect, as the prototypes of
the prototype did. ``BareWork`` looks at nothing: what input and output alone cost.
"""

from __future__ import annotations

import asyncio
import functools
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from pmdaemon.wire.frame import FrameReader
from pmdaemon.wire.kinds import Kind

Sockets = list[socket.socket]
Timed = list[float]
GoOn = Callable[[Timed], bool]
End = Callable[[], object]
BUFFER_BYTES = 128 << 10
EVENTS = 256
WARM_ROUNDS = 3  # so large are the rings of ``pair-mailbox``: a round in hand, one under way, and more
LEAN = "-lean"  # suffix of a variant with LeanWork
BARE = "-bare"  # suffix of a variant with BareWork
FREE = "-free"  # suffix of a variant that may run on every CPU


class Work(Protocol):
    """What is done for one connection, whatever the way of input and output."""

    def request(self) -> bytes:
        """The next request."""

    def feed(self, data: bytes | memoryview) -> bool:
        """Act on received bytes; True when the REPLY was in them."""


Works = Sequence[Work]


class LeanWork:
    """Decode and keep."""

    def __init__(self, request: bytes, sink: list[bytes]) -> None:
        self._request = request
        self._reader = FrameReader()
        self._sink = sink

    def request(self) -> bytes:
        """The same for all."""
        return self._request

    def feed(self, data: bytes | memoryview) -> bool:
        """See ``Work``."""
        done = False
        for received in self._reader.take(data)[0]:
            if received.kind == Kind.CUT:
                self._sink.append(bytes(received.raw))
            elif received.kind == Kind.REPLY:
                done = True
        return done


class BareWork:
    """Count the bytes of the answer."""

    def __init__(self, request: bytes, answer_bytes: int) -> None:
        self._request = request
        self._answer_bytes = self._missing = answer_bytes

    def request(self) -> bytes:
        """The same for all."""
        return self._request

    def feed(self, data: bytes | memoryview) -> bool:
        """See ``Work``."""
        self._missing -= len(data)
        if self._missing:
            return False
        self._missing = self._answer_bytes
        return True


def thread_per_gateway(sockets: Sockets, works: Works, end: End, go_on: GoOn) -> Timed:
    """A blocking thread each; released one by one, the last one to finish ends the round."""
    starts = [threading.Lock() for _ in sockets]
    finished, guard = threading.Semaphore(0), threading.Lock()
    missing = 0
    stopping = False

    def serve(sock: socket.socket, work: Work, start: threading.Lock) -> None:
        nonlocal missing
        buffer = memoryview(bytearray(16384))
        while True:
            start.acquire()
            if stopping:
                return
            with guard:  # what it works on is shared
                request = work.request()
            sock.sendall(request)
            is_done = False
            while not is_done:
                size = sock.recv_into(buffer)
                with guard:
                    is_done = work.feed(buffer[:size])
            with guard:
                missing -= 1
                last = not missing
            if last:
                finished.release()

    threads = []
    for sock, work, start in zip(sockets, works, starts, strict=True):
        sock.settimeout(None)
        start.acquire()
        threads.append(threading.Thread(target=serve, args=(sock, work, start)))
    threading.stack_size(256 << 10)
    for thread in threads:
        thread.start()
    times: Timed = []
    while go_on(times):
        begun_s = time.monotonic()
        missing = len(sockets)
        for start in starts:
            start.release()
        finished.acquire()
        times.append(time.monotonic() - begun_s)
        end()
    stopping = True
    for start in starts:
        start.release()
    for thread in threads:
        thread.join()
    return times


def one_blocking_thread(sockets: Sockets, works: Works, end: End, go_on: GoOn) -> Timed:
    """One gateway after the other."""
    buffer = memoryview(bytearray(BUFFER_BYTES))
    for sock in sockets:
        sock.settimeout(None)
    times: Timed = []
    while go_on(times):
        begun_s = time.monotonic()
        for sock, work in zip(sockets, works, strict=True):
            sock.sendall(work.request())
            while not work.feed(buffer[: sock.recv_into(buffer)]):
                pass
        times.append(time.monotonic() - begun_s)
        end()
    return times


def one_epoll_loop(sockets: Sockets, works: Works, end: End, go_on: GoOn) -> Timed:
    """One thread and raw epoll: the least that a poller in Python can do."""
    buffer = memoryview(bytearray(BUFFER_BYTES))
    owners = {sock.fileno(): (sock.recv_into, work.feed) for sock, work in zip(sockets, works, strict=True)}
    senders = [(sock.send, work.request) for sock, work in zip(sockets, works, strict=True)]
    times: Timed = []
    with select.epoll() as epoll:
        for descriptor in owners:
            epoll.register(descriptor, select.EPOLLIN)
        while go_on(times):
            begun_s = time.monotonic()
            for send, request in senders:
                send(request())
            missing = len(senders)
            while missing:
                for descriptor, _ in epoll.poll(-1, EVENTS):
                    receive, feed = owners[descriptor]
                    missing -= feed(buffer[: receive(buffer)])
            times.append(time.monotonic() - begun_s)
            end()
    return times


def asyncio_streams(sockets: Sockets, works: Works, end: End, go_on: GoOn) -> Timed:
    """``asyncio`` with StreamReader and StreamWriter, a task a gateway that lives over all rounds."""

    async def main() -> Timed:
        arrivals: asyncio.Queue[None] = asyncio.Queue()
        writers = []

        async def receive(reader: asyncio.StreamReader, work: Work) -> None:
            while True:
                prefix = await reader.readexactly(8)
                (length,) = struct.unpack_from("<I", prefix)
                if work.feed(prefix + await reader.readexactly(length - 4)):
                    arrivals.put_nowait(None)

        tasks = []
        for sock, work in zip(sockets, works, strict=True):
            reader, writer = await asyncio.open_connection(sock=sock)
            writers.append((writer, work))
            tasks.append(asyncio.create_task(receive(reader, work)))
        times: Timed = []
        while go_on(times):
            begun_s = time.monotonic()
            for writer, work in writers:
                writer.write(work.request())
            for _ in writers:
                await arrivals.get()
            times.append(time.monotonic() - begun_s)
            end()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return times

    return asyncio.run(main())


class _Round:
    """Counts a round's replies."""

    def __init__(self) -> None:
        self.missing = 0
        self.done = asyncio.Event()

    def one(self) -> None:
        self.missing -= 1
        if not self.missing:
            self.done.set()


class _Poller(asyncio.Protocol):
    """One gateway, as most programs are written: the event loop hands over bytes of its own."""

    def __init__(self, work: Work, round_: _Round) -> None:
        self._work = work
        self._round = round_

    def data_received(self, data: bytes) -> None:
        if self._work.feed(data):
            self._round.one()


class _BufferedPoller(asyncio.BufferedProtocol):
    """The same by asyncio's fastest form, with one buffer for all."""

    _buffer = memoryview(bytearray(BUFFER_BYTES))

    def __init__(self, work: Work, round_: _Round) -> None:
        self._work = work
        self._round = round_

    def get_buffer(self, _sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._work.feed(self._buffer[:nbytes]):
            self._round.one()


async def _protocol_rounds(
    poller_of: type[_Poller] | type[_BufferedPoller], sockets: Sockets, works: Works, end: End, go_on: GoOn
) -> Timed:
    round_ = _Round()
    loop = asyncio.get_running_loop()
    transports: list[Any] = []
    for sock, work in zip(sockets, works, strict=True):
        transport, _ = await loop.connect_accepted_socket(functools.partial(poller_of, work, round_), sock)
        transports.append((transport, work))
    times: Timed = []
    while go_on(times):
        begun_s = time.monotonic()
        round_.missing = len(transports)
        round_.done.clear()
        for transport, work in transports:
            transport.write(work.request())
        await round_.done.wait()
        times.append(time.monotonic() - begun_s)
        end()
    for transport, _ in transports:
        transport.abort()
    return times


def asyncio_protocol(sockets: Sockets, works: Works, end: End, go_on: GoOn) -> Timed:
    """``asyncio`` with a Protocol a gateway."""
    return asyncio.run(_protocol_rounds(_Poller, sockets, works, end, go_on))


def asyncio_buffered(sockets: Sockets, works: Works, end: End, go_on: GoOn) -> Timed:
    """``asyncio`` with a BufferedProtocol a gateway."""
    return asyncio.run(_protocol_rounds(_BufferedPoller, sockets, works, end, go_on))


def uvloop_buffered(sockets: Sockets, works: Works, end: End, go_on: GoOn) -> Timed:
    """The same on uvloop."""
    import uvloop  # an extra (bench): only this variant needs it

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_protocol_rounds(_BufferedPoller, sockets, works, end, go_on))


PEERS: dict[str, Callable[[Sockets, Works, End, GoOn], Timed]] = {
    "threads": thread_per_gateway,
    "blocking": one_blocking_thread,
    "loop": one_epoll_loop,
    "streams": asyncio_streams,
    "protocol": asyncio_protocol,
    "buffered": asyncio_buffered,
    "uvloop": uvloop_buffered,
}
