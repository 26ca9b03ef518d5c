"""A MODELLED disk: an NBD server with one FIFO queue shared by all connections, a fixed time a request.

This is the only part of the demonstration that is not real. It stands for a storage subsystem that volumes
share, an array of some disks: it works on so many requests at once, each for the same time, and the next in
the queue begins when one of them ends. So latency rises with the load of everybody. The bytes are real (kept
in memory); only the time is modelled. With ``--file`` it is real, too: that of a block of a file, moved with
O_DIRECT, one at a time (``direct_file``).

SIGUSR1 makes it slower by half; SIGSTOP makes it hang; SIGUSR2 makes every request fail, or no more.

Usage: ``python -m tests.support.modelled_disk SOCKET [--service-ms 20] [--at-once 8] [--size-mib 64]
[--file PATH]``
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import click

from tests.support import nbd_client
from tests.support.direct_file import DirectFile


class Disk:
    """The queue, shared by all, and the bytes of each export. One event loop, no lock needed."""

    def __init__(
        self, size_bytes: int, service_s: float, at_once: int, file: DirectFile | None = None
    ) -> None:
        self._size_bytes = size_bytes
        self._exports: dict[str, bytearray] = {}
        self._service_s = service_s
        self._fails = False
        self._file = file
        self._worker = ThreadPoolExecutor(1, "direct-file")  # starts no thread before its first work
        self._free_at_s = [0.0] * at_once  # a heap: when each of the requests under way will have ended

    def become_slower(self) -> None:
        """From now on each request takes half as long again."""
        self._service_s *= 1.5

    def fail_or_heal(self) -> None:
        """From now on each request ends with an error, or does as it should again."""
        self._fails = not self._fails

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until it disconnects."""
        try:
            name = await nbd_client.server_handshake(reader, writer, self._size_bytes)
            if name is not None:
                data = self._exports.setdefault(name, bytearray(self._size_bytes))
                await self._transmission(reader, writer, data)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client went away: nothing of ours depends on it
        finally:
            writer.close()

    async def _transmission(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytearray
    ) -> None:
        loop = asyncio.get_running_loop()
        while True:
            head = await reader.readexactly(nbd_client.REQUEST.size)
            _magic, _flags, kind, cookie, offset, length = nbd_client.REQUEST.unpack(head)
            if kind == nbd_client.DISC:
                return
            payload = await reader.readexactly(length) if kind == nbd_client.WRITE else b""
            answer = partial(self._answer, data, kind, offset, length, payload)
            if self._file is None:
                loop.call_at(self.finish_s(loop.time()), _send, writer, cookie, answer)
            else:
                move = partial(self._file.move, is_write=kind != nbd_client.READ)
                done = loop.run_in_executor(self._worker, move)
                done.add_done_callback(partial(_send_when_moved, writer, cookie, answer))

    def _answer(
        self, data: bytearray, kind: int, offset: int, length: int, payload: bytes
    ) -> tuple[int, bytes]:
        return (5, b"") if self._fails else _finish(data, kind, offset, length, payload)  # EIO

    def finish_s(self, now_s: float) -> float:
        """When a request that arrives at ``now_s`` ends; it takes its place in the queue."""
        end_s = max(self._free_at_s[0], now_s) + self._service_s
        heapq.heapreplace(self._free_at_s, end_s)
        return end_s


def _finish(data: bytearray, kind: int, offset: int, length: int, payload: bytes) -> tuple[int, bytes]:
    """Do the I/O at the moment it completes: (NBD error, bytes read)."""
    if offset + length > len(data):
        return 22, b""  # EINVAL
    if kind == nbd_client.READ:
        return 0, bytes(data[offset : offset + length])
    if kind == nbd_client.WRITE:
        data[offset : offset + length] = payload
    elif kind in (nbd_client.TRIM, nbd_client.ZEROES):
        data[offset : offset + length] = bytes(length)
    return 0, b""


def _send(writer: asyncio.StreamWriter, cookie: int, answer: Callable[[], tuple[int, bytes]]) -> None:
    error, data = answer()
    with contextlib.suppress(ConnectionError, RuntimeError):
        writer.write(nbd_client.SIMPLE.pack(nbd_client.SIMPLE_MAGIC, error, cookie) + data)


def _send_when_moved(
    writer: asyncio.StreamWriter,
    cookie: int,
    answer: Callable[[], tuple[int, bytes]],
    done: asyncio.Future[None],
) -> None:
    _send(writer, cookie, answer if done.exception() is None else lambda: (5, b""))  # EIO


async def _serve(path: Path, disk: Disk) -> None:
    server = await asyncio.start_unix_server(disk.serve, path=str(path))
    # Ends with its parent: the demonstration holds our standard input open.
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, disk.become_slower)
    loop.add_signal_handler(signal.SIGUSR2, disk.fail_or_heal)
    loop.add_reader(sys.stdin.fileno(), lambda: ended.set() if not os.read(0, 1) else None)
    async with server:
        await ended.wait()


@click.command()
@click.argument("socket_path", type=click.Path(path_type=Path))
@click.option("--service-ms", default=20.0, show_default=True, help="Time of one request.")
@click.option("--at-once", default=8, show_default=True, help="Requests that it works on at the same time.")
@click.option("--size-mib", default=64, show_default=True, help="Size of the export.")
@click.option("--file", type=click.Path(path_type=Path), help="Do real I/O on this file, with O_DIRECT.")
def main(socket_path: Path, service_ms: float, at_once: int, size_mib: int, file: Path | None) -> None:
    """Serve a modelled disk on a Unix socket until standard input closes."""
    socket_path.unlink(missing_ok=True)
    direct = DirectFile(file) if file is not None else None
    asyncio.run(_serve(socket_path, Disk(size_mib << 20, service_ms / 1000, at_once, direct)))


if __name__ == "__main__":
    main()
