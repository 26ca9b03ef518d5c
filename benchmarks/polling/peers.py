"""The other ways to poll N gateways from Python (P18), each with the same round: ask all, wait for all.

All get the request encoded beforehand and decode with the product's ``wire.frame``; they keep a copy of each
CUT until the round ends. They do *less* than the product: no record of positions, no acknowledgement, no
clock offset, no batching for the mailbox, no session table.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

from pmdaemon.wire.frame import FrameReader
from pmdaemon.wire.kinds import Kind

Sockets = list[socket.socket]
Timed = list[float]
GoOn = Callable[[Timed], bool]
BUFFER_BYTES = 128 << 10


class Receiver:
    """One connection's reply: feed bytes, learn whether the REPLY came; cuts go to the sink."""

    def __init__(self, sink: list[bytes]) -> None:
        self._reader = FrameReader()
        self._sink = sink

    def feed(self, data: bytes | memoryview) -> bool:
        """True when the REPLY was in it."""
        done = False
        for received in self._reader.feed(data):
            if received.kind == Kind.CUT:
                self._sink.append(bytes(received.raw))
            elif received.kind == Kind.REPLY:
                done = True
        return done


def thread_per_gateway(sockets: Sockets, request: bytes, go_on: GoOn) -> Timed:
    """A blocking thread each; released one by one, the last one to finish ends the round."""
    sink: list[bytes] = []
    starts = [threading.Lock() for _ in sockets]
    finished, guard = threading.Semaphore(0), threading.Lock()
    missing = 0
    stopping = False

    def work(sock: socket.socket, start: threading.Lock) -> None:
        nonlocal missing
        receiver, buffer = Receiver(sink), memoryview(bytearray(16384))
        while True:
            start.acquire()
            if stopping:
                return
            sock.sendall(request)
            while not receiver.feed(buffer[: sock.recv_into(buffer)]):
                pass
            with guard:
                missing -= 1
                last = not missing
            if last:
                finished.release()

    threads = []
    for sock, start in zip(sockets, starts, strict=True):
        sock.settimeout(None)
        start.acquire()
        threads.append(threading.Thread(target=work, args=(sock, start)))
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
        sink.clear()
    stopping = True
    for start in starts:
        start.release()
    for thread in threads:
        thread.join()
    return times


def one_blocking_thread(sockets: Sockets, request: bytes, go_on: GoOn) -> Timed:
    """One gateway after the other."""
    sink: list[bytes] = []
    receivers = [Receiver(sink) for _ in sockets]
    buffer = memoryview(bytearray(BUFFER_BYTES))
    for sock in sockets:
        sock.settimeout(None)
    times: Timed = []
    while go_on(times):
        begun_s = time.monotonic()
        for sock, receiver in zip(sockets, receivers, strict=True):
            sock.sendall(request)
            while not receiver.feed(buffer[: sock.recv_into(buffer)]):
                pass
        times.append(time.monotonic() - begun_s)
        sink.clear()
    return times


def asyncio_streams(sockets: Sockets, request: bytes, go_on: GoOn) -> Timed:
    """``asyncio`` with StreamReader and StreamWriter, a task a gateway that lives over all rounds."""

    async def main() -> Timed:
        sink: list[bytes] = []
        arrivals: asyncio.Queue[None] = asyncio.Queue()
        writers = []

        async def receive(reader: asyncio.StreamReader) -> None:
            receiver = Receiver(sink)
            while True:
                prefix = await reader.readexactly(8)
                (length,) = struct.unpack_from("<I", prefix)
                if receiver.feed(prefix + await reader.readexactly(length - 4)):
                    arrivals.put_nowait(None)

        tasks = []
        for sock in sockets:
            reader, writer = await asyncio.open_connection(sock=sock)
            writers.append(writer)
            tasks.append(asyncio.create_task(receive(reader)))
        times: Timed = []
        while go_on(times):
            begun_s = time.monotonic()
            for writer in writers:
                writer.write(request)
            for _ in writers:
                await arrivals.get()
            times.append(time.monotonic() - begun_s)
            sink.clear()
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


class _Poller(asyncio.BufferedProtocol):
    """One gateway; ``BufferedProtocol`` is asyncio's fastest form, with one shared buffer."""

    _buffer = memoryview(bytearray(BUFFER_BYTES))

    def __init__(self, sink: list[bytes], round_: _Round) -> None:
        self._receiver = Receiver(sink)
        self._round = round_

    def get_buffer(self, _sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._receiver.feed(self._buffer[:nbytes]):
            self._round.one()


async def _protocol_rounds(sockets: Sockets, request: bytes, go_on: GoOn) -> Timed:
    sink: list[bytes] = []
    round_ = _Round()
    loop = asyncio.get_running_loop()
    transports: list[Any] = []
    for sock in sockets:
        transport, _ = await loop.connect_accepted_socket(lambda: _Poller(sink, round_), sock)
        transports.append(transport)
    times: Timed = []
    while go_on(times):
        begun_s = time.monotonic()
        round_.missing = len(transports)
        round_.done.clear()
        for transport in transports:
            transport.write(request)
        await round_.done.wait()
        times.append(time.monotonic() - begun_s)
        sink.clear()
    for transport in transports:
        transport.abort()
    return times


def asyncio_protocol(sockets: Sockets, request: bytes, go_on: GoOn) -> Timed:
    """``asyncio`` with a BufferedProtocol a gateway."""
    return asyncio.run(_protocol_rounds(sockets, request, go_on))


def uvloop_protocol(sockets: Sockets, request: bytes, go_on: GoOn) -> Timed:
    """The same on uvloop."""
    import uvloop  # an extra (bench): only this variant needs it

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_protocol_rounds(sockets, request, go_on))


PEERS: dict[str, Callable[[Sockets, bytes, GoOn], Timed]] = {
    "threads": thread_per_gateway,
    "blocking": one_blocking_thread,
    "streams": asyncio_streams,
    "protocol": asyncio_protocol,
    "uvloop": uvloop_protocol,
}
