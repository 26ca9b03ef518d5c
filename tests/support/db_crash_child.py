"""A dbmanager without mailboxes that kills itself at a named point; ``tests.support.forks`` calls ``main``.

It plays intake and writer in turn, as the process does, and the agent, too: from what is durable after
recovery it sends the following cuts in batches of three. Each confirmed high water is written to ``acks``.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psycopg  # noqa: F401 - once, before the forks
import pyarrow as pa

from pmdaemon.mailbox import Message
from pmdaemon.wire import frame
from sla_server.db.config import DatabaseConfig
from sla_server.db.ingest.intake import HighWater, IngestIntake
from sla_server.db.process import _queue_records
from tests.support.database import Rig
from tests.support.samples import EPOCH, cuts_message, gateway, make_cut

pa.array([0])  # pyarrow looks for pandas at its first array: once, before the forks


def main(url: str, folder: str, point: str, nth: int, last_seq: int) -> None:
    data_dir = Path(folder)
    left = [nth]

    def probe(name: str) -> None:
        if name == point:
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)

    acks = os.open(data_dir / "acks", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    config = DatabaseConfig(url=url)
    rig = Rig(config, data_dir, probe)
    high = HighWater(rig.reader.watermarks())
    intake = IngestIntake(1, high)
    assert intake.recover(_queue_records(rig.queue), rig.store.cursors()[0]) == []
    seq = high.of(gateway(1), EPOCH)
    os.write(acks, f"recovered {seq}\n".encode())
    while seq < last_seq:
        items = [make_cut(number) for number in range(max(seq, 1), min(seq + 3, last_seq) + 1)]
        absorbed = intake.absorb([Message("pair-0", cuts_message(items), 1)])
        rig.queue.append_many(absorbed.records)
        seq = frame.decode(absorbed.notices[0].payload).header["hw"][0][2]
        os.write(acks, f"durable {seq}\n".encode())
        probe("noticed")
        rig.writer.step()
        rig.clock.advance(25)
    rig.drain(final=True)
    rig.close()
