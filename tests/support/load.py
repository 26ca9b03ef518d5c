"""Our own NBD load: open loop (Poisson arrivals) or closed loop (a depth), every I/O timed.

Open loop measures from the moment an I/O *should* have been sent, so a server that stalls cannot hide it by
making the client wait (coordinated omission). Each finished I/O is one ``Timed`` record; figures are
computed from these records and from nothing the server says.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tests.support import nbd_client

BLOCK_BYTES = 4096


class Timed(NamedTuple):
    """One I/O: when it was due and when it ended, seconds on the monotonic clock."""

    due_s: float
    end_s: float

    @property
    def latency_ms(self) -> float:
        """From due to end."""
        return (self.end_s - self.due_s) * 1000


@dataclass
class Load:
    """One client of one export.

    Attributes:
        rate_iops: Poisson arrivals a second, or 0 for a closed loop.
        gaps_s: of an open loop instead of Poisson arrivals: seconds before each I/O, without end.
        depth: outstanding I/Os of the closed loop; the open loop has no limit.
        finish_s: how long it waits at its end for what is outstanding.
        read_ratio: share of reads; the rest are writes.
    """

    socket_path: Path
    export: str
    seed: int
    rate_iops: float = 0.0
    depth: int = 0
    read_ratio: float = 0.7
    gaps_s: Iterator[float] | None = None
    finish_s: float = 2.0
    done: list[Timed] = field(default_factory=list)
    errors: int = 0
    hung: list[Timed] = field(default_factory=list)
    """I/Os of the open loop that were not answered when it ended; they end never."""
    _waiting: dict[int, tuple[float, int]] = field(default_factory=dict)
    _cookie: int = 0

    async def run(self, stop: asyncio.Event) -> None:
        """Drive the load until ``stop``; then let what is outstanding finish (``finish_s`` at most)."""
        reader, writer = await asyncio.open_unix_connection(str(self.socket_path), limit=1 << 20)
        blocks = await nbd_client.client_handshake(reader, writer, self.export) // BLOCK_BYTES
        rng = random.Random(self.seed)
        receiver = asyncio.create_task(self._receive(reader, writer, blocks, rng, stop))
        try:
            if self._is_open:
                await self._arrivals(writer, blocks, rng, stop)
            else:
                for _ in range(self.depth):
                    self._send(writer, blocks, rng, time.monotonic())
                await stop.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.finish_s):
                    while self._waiting and not receiver.done():
                        await asyncio.sleep(0.01)
            writer.write(nbd_client.REQUEST.pack(nbd_client.REQUEST_MAGIC, 0, nbd_client.DISC, 0, 0, 0))
        finally:
            if self._is_open:
                self.hung = [Timed(due_s, math.inf) for due_s, _ in self._waiting.values()]
            receiver.cancel()
            with contextlib.suppress(asyncio.CancelledError, ConnectionError, asyncio.IncompleteReadError):
                await receiver
            writer.close()

    @property
    def _is_open(self) -> bool:
        return bool(self.rate_iops) or self.gaps_s is not None

    async def _arrivals(
        self, writer: asyncio.StreamWriter, blocks: int, rng: random.Random, stop: asyncio.Event
    ) -> None:
        due_s = time.monotonic()
        while not stop.is_set() and not writer.is_closing():
            due_s += next(self.gaps_s) if self.gaps_s is not None else rng.expovariate(self.rate_iops)
            pause_s = due_s - time.monotonic()
            if pause_s > 0:
                await asyncio.sleep(pause_s)
            self._send(writer, blocks, rng, due_s)

    def _send(self, writer: asyncio.StreamWriter, blocks: int, rng: random.Random, due_s: float) -> None:
        kind = nbd_client.READ if rng.random() < self.read_ratio else nbd_client.WRITE
        self._cookie += 1
        self._waiting[self._cookie] = (due_s, BLOCK_BYTES if kind == nbd_client.READ else 0)
        offset = rng.randrange(blocks) * BLOCK_BYTES
        payload = bytes(BLOCK_BYTES) if kind == nbd_client.WRITE else b""
        writer.write(
            nbd_client.REQUEST.pack(nbd_client.REQUEST_MAGIC, 0, kind, self._cookie, offset, BLOCK_BYTES)
            + payload
        )

    async def _receive(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        blocks: int,
        rng: random.Random,
        stop: asyncio.Event,
    ) -> None:
        while True:
            _magic, error, cookie = nbd_client.SIMPLE.unpack(await reader.readexactly(nbd_client.SIMPLE.size))
            due_s, length = self._waiting.pop(cookie)
            if error:
                self.errors += 1
            elif length:
                await reader.readexactly(length)
            self.done.append(Timed(due_s, time.monotonic()))
            if self.depth and not stop.is_set():
                self._send(writer, blocks, rng, time.monotonic())


def percentile_ms(records: list[Timed], percentile: float) -> float | None:
    """Exact percentile (nearest rank) of the records' latencies in ms; None for no record."""
    if not records:
        return None
    ordered = sorted(record.latency_ms for record in records)
    rank = max(1, -(-len(ordered) * percentile // 100))
    return ordered[int(rank) - 1]


def between(records: list[Timed], start_s: float, end_s: float) -> list[Timed]:
    """Records that were due in [start_s, end_s)."""
    return [record for record in records if start_s <= record.due_s < end_s]
