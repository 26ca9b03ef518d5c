"""A queue on a FaultDisk, without threads and with a fake clock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pmdaemon.diskqueue import DiskQueue, QueueSettings
from pmdaemon.runtime.clock import FakeClock
from tests.support.faulty_disk import FaultDisk

RING_BYTES = 16 * 256


def settings(**changes: Any) -> QueueSettings:
    values: dict[str, Any] = {
        "data_path": Path("q"),
        "data_bytes": RING_BYTES,
        "entries": 12,
        "reserve_bytes": 0,
        "reserve_entries": 0,
    }
    return QueueSettings(**{**values, **changes})


def open_queue(disk: FaultDisk, clock: FakeClock | None = None, **changes: Any) -> DiskQueue:
    return DiskQueue(
        settings(**changes),
        data=disk.open("data"),
        index=disk.open("index"),
        helper=False,
        clock=clock or FakeClock(),
    )


def contents(queue: DiskQueue) -> dict[int, bytes]:
    return {message.seq: message.data for message in queue.peek(0, 1 << 30)}


def drain(queue: DiskQueue) -> list[bytes]:
    messages = queue.lock(1000, most_bytes=1 << 30)
    queue.delete([message.seq for message in messages])
    return [message.data for message in messages]
