"""Queue, store, archive and writer around one test database, with a clock that a test moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from pmdaemon.runtime.clock import FakeClock
from sla_server.db.archive.store import open_files
from sla_server.db.archive.writer import CutFileWriter
from sla_server.db.config import DatabaseConfig
from sla_server.db.engine import make_engine
from sla_server.db.ingest.queue import IngestQueue
from sla_server.db.ingest.transaction import IngestStore
from sla_server.db.ingest.writer import IngestWriter
from sla_server.db.partitions import Retention
from sla_server.db.queries.reader import SqlReader, open_reader
from sla_server.ownership import Ownership
from tests.support.samples import T0


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
        )
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
