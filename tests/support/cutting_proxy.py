"""A TCP proxy on loopback that cuts and stalls connections when told to: the network of the chaos run."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from pathlib import Path

PIECE_BYTES = 1 << 16


class CuttingProxy:
    """Forwards ``port`` to ``target``, a port or a Unix socket, in a thread with an event loop of its own.

    State: the open connections (loop only); ``_open``, cleared while stalled: bytes then wait, in both ways;
    ``_refuses``: new connections are reset.
    """

    def __init__(self, target: int | Path) -> None:
        self.port = 0
        self._target = target
        self._refuses = False
        self._loop = asyncio.new_event_loop()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._open = asyncio.Event()
        self._open.set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)

    async def _listen(self) -> asyncio.Server:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refuses:
            writer.transport.abort()
            return
        try:
            if isinstance(self._target, Path):
                there = await asyncio.open_unix_connection(self._target)
            else:
                there = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            await self._open.wait()
            writer.close()  # the server is away: the agent tries again
            return
        pair = {writer, there[1]}
        self._writers |= pair
        try:
            one, other = self._pump(reader, there[1]), self._pump(there[0], writer)
            ways = [asyncio.ensure_future(way) for way in (one, other)]
            self._tasks |= set(ways)
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in ways:
                way.cancel()
            self._tasks -= set(ways)
        finally:
            self._writers -= pair
            for end in pair:
                end.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(PIECE_BYTES):
                await self._open.wait()
                writer.write(data)
                await writer.drain()
        await self._open.wait()  # the end of a connection is said no sooner than its bytes

    def cut(self) -> None:
        """Reset every connection."""
        self._loop.call_soon_threadsafe(self._cut)

    def _cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    def refuse(self, refused: bool) -> None:
        """Reset every connection, also new ones; or serve them again."""
        self._refuses = refused
        if refused:
            self.cut()

    def stall(self, stalled: bool) -> None:
        """Hold all bytes, or let them go."""
        self._loop.call_soon_threadsafe(self._open.clear if stalled else self._open.set)

    def close(self) -> None:
        """Cut everything and end."""
        self.cut()
        asyncio.run_coroutine_threadsafe(self._finish(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

    async def _finish(self) -> None:
        self._open.set()
        self._server.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.sleep(0.05)  # let the cancelled ones end
