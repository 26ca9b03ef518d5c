"""The links between nodes of a cluster on loopback, which a test cuts in one way, or makes slow.

A node's engine listens at an address that no other node knows, 127.0.1.N; what all of them know is the same
port at 127.0.0.1, where a proxy is. So also what nodes tell each other of a third one leads to its proxy. Who
has dialled says its name with the first bytes of the engine's protocol; until then bytes pass.

Held bytes wait and are forwarded later, as TCP sends again what a network has dropped: neither end sees more
than silence. State: loop and thread of each instance only; ``_held`` and ``_delays`` are replaced whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Final

PIECE_BYTES: Final = 1 << 16
LOOK_S: Final = 0.02
_NAME: Final = re.compile(rb'"server_name":"([^"]+)"')
Way = tuple[str, str]
"""From one node to another."""
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def hidden_host(place: int) -> str:
    """Where the engine of the node of this place (from 1) listens."""
    return f"127.0.1.{place}"


class NodeLinks:
    """Proxies of all nodes. Args: ``ports``, of routes, by name; the order gives the places."""

    def __init__(self, ports: Mapping[str, int]) -> None:
        self._hosts = {name: hidden_host(place) for place, name in enumerate(ports, 1)}
        self._ports = dict(ports)
        self._held: frozenset[Way] = frozenset()
        self._delays: dict[Way, float] = {}
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._servers: list[asyncio.Server] = []
        self._thread = threading.Thread(target=self._loop.run_forever, name="node-links", daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(30)

    @property
    def ways(self) -> list[Way]:
        """All of them."""
        return [(one, other) for one in self._ports for other in self._ports if one != other]

    def hold(self, ways: Iterable[Way]) -> None:
        """Nothing passes in these ways until they are let go."""
        self._held |= frozenset(ways)

    def let_go(self, ways: Iterable[Way]) -> None:
        """What has waited passes, and what comes."""
        self._held -= frozenset(ways)

    def delay(self, ways: Iterable[Way], seconds: float) -> None:
        """Each piece (64 KiB at most) takes so long in these ways; 0: none is held up."""
        self._delays = {**self._delays, **dict.fromkeys(ways, seconds)}

    def close(self) -> None:
        """End all connections."""
        asyncio.run_coroutine_threadsafe(self._finish(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

    async def _listen(self) -> None:
        for name, port in self._ports.items():
            serve = self._server_of(name)
            self._servers.append(await asyncio.start_server(serve, "127.0.0.1", port))

    def _server_of(self, name: str) -> Serve:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.ensure_future(self._join(name, reader, writer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            with contextlib.suppress(asyncio.CancelledError):
                await task

        return serve

    async def _join(self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        dialler: list[str] = []
        try:
            there = await asyncio.open_connection(self._hosts[name], self._ports[name])
        except OSError:
            writer.close()  # the node is away: the other one tries again
            return
        to_node = self._pump(reader, there[1], lambda: (dialler[0], name) if dialler else None, dialler)
        back = self._pump(there[0], writer, lambda: (name, dialler[0]) if dialler else None, None)
        ways = [asyncio.ensure_future(to_node), asyncio.ensure_future(back)]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            for end in (writer, there[1]):
                end.close()

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        way_of: Callable[[], Way | None],
        dialler: list[str] | None,
    ) -> None:
        seen = b""
        with contextlib.suppress(OSError):
            while data := await reader.read(PIECE_BYTES):
                if dialler is not None and not dialler:
                    seen += data
                    if found := _NAME.search(seen):
                        dialler.append(found[1].decode())
                        seen = b""
                if delay_s := self._delays.get(way_of() or ("", ""), 0.0):
                    await asyncio.sleep(delay_s)
                while way_of() in self._held:
                    await asyncio.sleep(LOOK_S)
                writer.write(data)
                await writer.drain()

    async def _finish(self) -> None:
        for server in self._servers:
            server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0.05)  # transports end
