"""Stands for ``services`` and ``dbmanager``: takes both mailboxes and acknowledges every batch kept.

Usage: python -m benchmarks.polling.taker SEGMENT. Its CPU is not the daemon's and is not counted.
"""

from __future__ import annotations

import select
import sys
import uuid
from collections import deque
from pathlib import Path

from pmdaemon.mailbox import attach
from pmdaemon.mailbox.errors import MailboxFull
from pmdaemon.runtime.stop import Stop
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind


def notices(payload: bytes | memoryview) -> list[bytes]:
    """The DURABLE notice for a CUTS message; nothing for others."""
    batch = frame.decode(payload)
    if batch.kind != Kind.CUTS:
        return []
    newest: dict[tuple[str, int], int] = {}
    for raw in frame.split(batch.blob):
        header = frame.decode(raw).header
        newest[str(uuid.UUID(bytes=header["gw"])), header["ep"]] = header["seq"]
    rows = [[gateway_id, epoch, seq] for (gateway_id, epoch), seq in newest.items()]
    return [frame.encode(Kind.DURABLE, {"inc": 1, "hw": rows})]


def main() -> None:
    """Take until the signal."""
    stop = Stop()
    stop.install_signals()
    services, dbmanager = (attach(Path(sys.argv[1]), name) for name in ("services", "dbmanager"))
    dbmanager.post("pair-0", frame.encode(Kind.WATERMARKS, {"inc": 1, "hw": []}))
    waiting: deque[bytes] = deque()
    while not stop.is_set():
        while services.take(256, 1 << 24):
            pass
        messages = dbmanager.take(64, 1 << 24)
        if messages or waiting:
            for message in messages:
                waiting += notices(message.payload)
            while waiting:
                try:
                    dbmanager.post("pair-0", waiting[0])
                except MailboxFull:
                    break  # the pair has not taken the last ones yet: again in the next turn
                waiting.popleft()
        elif dbmanager.prepare_sleep():
            select.select([dbmanager.fileno(), stop.fileno()], [], [], 0.05)
            dbmanager.awake()


if __name__ == "__main__":
    main()
