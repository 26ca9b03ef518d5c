"""A real block trace replayed over several volumes: every I/O and byte counted, volume by volume."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support import nbd_client
from tests.support.stage import Agent, Stage

TRACE = Path(__file__).parents[1] / "fixtures" / "traces" / "wsrch-excerpt.trace"
VOLUME_BYTES = 1 << 30  # sparse; addresses are taken modulo this


class Request(NamedTuple):
    at_s: float
    volume: str
    offset: int
    length: int
    read: bool


def requests() -> list[Request]:
    rows = [[int(part) for part in line.split()] for line in TRACE.read_text().splitlines()]
    first_ns = rows[0][0]
    return [
        Request(
            (at - first_ns) / 1e9,
            f"ws-{device}",
            sector * 512 % (VOLUME_BYTES - (1 << 20)),
            size * 512,
            kind == 1,
        )
        for at, device, sector, size, kind in rows
    ]


async def replay(socket_path: Path, volume: str, trace: list[Request]) -> None:
    """Send each request at its time, wait for all answers."""
    reader, writer = await asyncio.open_unix_connection(str(socket_path), limit=1 << 22)
    await nbd_client.client_handshake(reader, writer, volume)

    async def answers() -> None:
        for _ in trace:
            _magic, error, cookie = nbd_client.SIMPLE.unpack(await reader.readexactly(nbd_client.SIMPLE.size))
            assert not error
            if trace[cookie].read:
                await reader.readexactly(trace[cookie].length)

    receiving = asyncio.create_task(answers())
    start_s = time.monotonic()
    for cookie, request in enumerate(trace):
        await asyncio.sleep(max(0.0, start_s + request.at_s - time.monotonic()))
        kind = nbd_client.READ if request.read else nbd_client.WRITE
        head = nbd_client.REQUEST.pack(
            nbd_client.REQUEST_MAGIC, 0, kind, cookie, request.offset, request.length
        )
        writer.write(head + (b"" if request.read else bytes(request.length)))
    await receiving
    writer.write(nbd_client.REQUEST.pack(nbd_client.REQUEST_MAGIC, 0, nbd_client.DISC, 0, 0, 0))
    await writer.drain()
    writer.close()


@pytest.fixture
def traced_stage(tmp_path: Path) -> Iterator[Stage]:
    with Stage(tmp_path, interval_s=0.5) as stage:
        volumes = {}
        for volume in sorted({request.volume for request in requests()}):
            image = tmp_path / f"{volume}.img"
            with image.open("wb") as file:
                file.truncate(VOLUME_BYTES)
            volumes[volume] = str(image)
        stage.start_server()
        stage.start_agent(Agent("gateway-trace", volumes))
        stage.wait(stage.gateways_up, "the gateway")
        yield stage


def test_a_real_trace_is_counted_volume_by_volume(traced_stage: Stage) -> None:
    by_volume: dict[str, list[Request]] = defaultdict(list)
    for request in requests():
        by_volume[request.volume].append(request)
    socket_path = traced_stage.agents[0].socket(traced_stage)

    async def all_volumes() -> None:
        async with asyncio.TaskGroup() as tasks:
            for volume, trace in by_volume.items():
                tasks.create_task(replay(socket_path, volume, trace))

    asyncio.run(all_volumes())
    expected = {}
    for volume, trace in by_volume.items():
        sums: Counter[str] = Counter()
        for request in trace:
            sums["reads" if request.read else "writes"] += 1
            sums["read_bytes" if request.read else "write_bytes"] += request.length
        expected[volume] = {key: sums[key] for key in ("reads", "writes", "read_bytes", "write_bytes")}

    def stored() -> bool:
        rows = {row["volume"]: row for row in traced_stage.get("volumes")["items"]}
        return {v: {k: rows[v][k] for k in expected[v]} for v in expected if v in rows} == expected

    assert traced_stage.wait(stored, "the trace's counts in the database")
