"""The clients of a chaos run: their own count of I/Os is what SQL is compared with."""

from __future__ import annotations

import asyncio
import contextlib
import threading

from tests.support.load import Load
from tests.support.stage import Agent, Stage


class Clients(threading.Thread):
    """One load on each agent with a data plane, connected again whenever it breaks."""

    def __init__(self, stage: Stage, agents: list[Agent]) -> None:
        super().__init__(name="clients", daemon=True)
        self._sockets = {next(iter(agent.volumes)): agent.socket(stage) for agent in agents}
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self.loads: dict[str, list[Load]] = {volume: [] for volume in self._sockets}

    def run(self) -> None:
        """The thread's work."""
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._drive())
        self._loop.close()

    async def _drive(self) -> None:
        await asyncio.gather(*(self._one(volume) for volume in self._sockets))

    async def _one(self, volume: str) -> None:
        while not self._ended.is_set():
            load = Load(self._sockets[volume], volume, seed=len(self.loads[volume]), rate_iops=60)
            self.loads[volume].append(load)
            with contextlib.suppress(OSError, EOFError, asyncio.IncompleteReadError):
                await load.run(self._ended)
            await asyncio.sleep(0.1)

    def finish(self) -> None:
        """Stop and wait."""
        self._loop.call_soon_threadsafe(self._ended.set)
        self.join(20)

    def done(self, volume: str) -> int:
        """I/Os answered."""
        return sum(len(load.done) for load in self.loads[volume])
