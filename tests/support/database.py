"""Queue, store, archive and writer around one test database, with a clock that a test moves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from pmdaemon.runtime.clock import FakeClock
from pmdaemon.wire.cut import Cut
from sla_server.db.archive.store import open_files
from sla_server.db.archive.writer import CutFileWriter
from sla_server.db.config import DatabaseConfig
from sla_server.db.engine import make_engine
from sla_server.db.fence import Fence
from sla_server.db.ingest import writer as writers
from sla_server.db.ingest.accumulator import IngestWindow
from sla_server.db.ingest.queue import IngestQueue
from sla_server.db.ingest.transaction import IngestStore
from sla_server.db.ingest.writer import IngestWriter
from sla_server.db.partitions import Retention
from sla_server.db.queries.reader import SqlReader, open_reader
from sla_server.ownership import Ownership
from tests.support.samples import T0, cuts_message, make_cut

BACKLOG_STEP_BYTES = 3_000  # some three cuts


def no_probe(_point: str) -> None:
    pass


class Rig:
    """Opens everything as the process does: sweep, then cursors."""

    def __init__(
        self,
        config: DatabaseConfig,
        data_dir: Path,
        probe: Callable[[str], None] = no_probe,
        clock: FakeClock | None = None,
        ownership: Ownership = "open",
        first_sight_volumes: int = 10_000,
        fence: Fence | None = None,
    ) -> None:
        self.clock = clock or FakeClock(unix_us=T0)
        self.parquet_dir = config.resolved_parquet_dir(data_dir)
        self.engine = make_engine(config, data_dir)
        self.queue = IngestQueue(config.resolved_queue_dir(data_dir), 1 << 20, probe, keep_bytes=64 << 10)
        self.store = IngestStore(
            self.engine,
            self.queue.queue_id,
            config.rollup_s,
            self.clock,
            probe,
            ownership,
            first_sight_volumes,
            fence.number if fence else 0,
        )
        if fence is not None:
            former = fence.take(self.engine, self.queue.queue_id, self.queue.synced_seq, self.clock.unix_us())
            self.queue.refused, self.queue.former_seq = former.refused, former.newest_seq
            fence.guard(self.engine)
        files, queue_id = open_files(config, data_dir), self.queue.queue_id
        self.archive = CutFileWriter(
            files, queue_id, config.file_max_bytes, config.file_max_s, self.clock, probe
        )
        self.store.prepare()
        self.reader: SqlReader = open_reader(config, data_dir)
        self.swept = self.archive.sweep({row["path"] for row in self.reader.manifest(in_use=False)}, T0)
        self.refused_dir = data_dir / "refused"
        self.retention = Retention(self.engine, config.retention, self.clock)
        self.writer = IngestWriter(
            self.queue, self.store, self.archive, self.clock, 1.0, self.refused_dir, self.retention, probe
        )
        self.writer.start(self.store.cursors())

    def feed(self, *payloads: bytes) -> None:
        """Append one by one, and let the writer work."""
        for payload in payloads:
            self.queue.append_many([payload])
        self.drain()

    def drain(self, *, final: bool = False) -> None:
        while self.writer.step(final=final):
            pass

    def parquet_files(self) -> Sequence[str]:
        return sorted(
            path.relative_to(self.parquet_dir).as_posix() for path in self.parquet_dir.rglob("*.parquet")
        )

    def die(self) -> None:
        """What kill -9 leaves: files as they are, the queue's index not synced."""
        queue = self.queue._queue
        queue._stopping = True
        queue._work.set()
        queue._group.join(60)
        queue._close_files()
        self.engine.dispose()
        self.reader.close()

    def close(self) -> None:
        self.queue.close()
        self.engine.dispose()
        self.reader.close()


class Gate:
    """A store's commit that waits until the test lets it go, once; ``commit`` is what it then does."""

    def __init__(self, store: IngestStore) -> None:
        self.commit: Callable[[IngestWindow, int], None] = store.commit
        self.entered, self.go = threading.Event(), threading.Event()

    def __call__(self, window: IngestWindow, oldest_seq: int) -> None:
        self.entered.set()
        assert self.go.wait(60)
        self.commit(window, oldest_seq)


def under_way(rig: Rig, monkeypatch: pytest.MonkeyPatch, payloads: Sequence[bytes]) -> Gate:
    """Queue a backlog, of which each step reads some, and begin a gated commit of the first of it."""
    monkeypatch.setattr(writers, "STEP_BYTES", BACKLOG_STEP_BYTES)
    gate = Gate(rig.store)
    monkeypatch.setattr(rig.store, "commit", gate)
    for payload in payloads:
        rig.queue.append_many([payload])
    rig.clock.advance(16)
    assert rig.writer.step()
    assert gate.entered.wait(60)
    return gate


def backlog(rig: Rig, monkeypatch: pytest.MonkeyPatch, count: int, *others: bytes) -> tuple[list[Cut], Gate]:
    """A gated commit is under way while the rest of the backlog waits; returns the cuts and the gate."""
    items = [make_cut(seq) for seq in range(1, count + 1)]
    return items, under_way(rig, monkeypatch, [*(cuts_message([item]) for item in items), *others])


def archived(rig: Rig) -> list[tuple[str, int, int]]:
    """(gateway, epoch, seq) of every cut in the files of the manifest."""
    found: list[tuple[str, str, int]] = []
    for row in rig.reader.manifest():
        table = pq.ParquetFile(rig.parquet_dir / row["path"]).read(["gateway_id", "epoch", "seq"])
        cuts = dict.fromkeys(zip(*(column.to_pylist() for column in table.columns), strict=True))
        assert len(cuts) == row["cuts"]
        assert table.num_rows == row["rows"]
        found += list(cuts)
    return [(gateway_id, int(epoch), seq) for gateway_id, epoch, seq in found]


def identity(items: Sequence[Cut]) -> list[tuple[str, int, int]]:
    """What ``archived`` says of these cuts."""
    return [(item.gateway_id, item.epoch, item.seq) for item in items]
