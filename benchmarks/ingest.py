"""``make bench-ingest``: the database manager under the largest fleet, PostgreSQL and Parquet both on.

Real schema, a PostgreSQL of its own (fsync on), the dbmanager as its own process between real mailboxes;
load: ``benchmarks.ingest_load``, 1,000 gateways of 64 streams, a cut a second each.

1. *Sustained*: 64,000 stream rows a second are posted at an even pace. After a warm-up of one window of SQL
   the CPU time of dbmanager and PostgreSQL (all its processes) is read over ``SUSTAINED_S``.
2. *To durable*: a burst, encoded before the clock starts, is posted as fast as the mailbox takes it; the
   clock stops when DURABLE names the newest cut of all gateways. The writer goes on beside it. By then the
   disk itself must have been given at least the burst's bytes (its own counter, ``device_mb``): on a file
   system without a disk behind it "durable" means nothing, and the run fails.
3. *Catch-up*: a backlog is in an ingest queue; the writer alone puts it into SQL and Parquet. The clock
   stops when the last transaction and the last file are committed.

All rows are counted in SQL and in the manifest at the end: a run that lost or doubled one fails.
``manager_mib`` is the most memory seen that the manager has for itself, without the queue it has mapped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from benchmarks import harness
from benchmarks.ingest_load import EPOCH, Fleet, fleet
from pmdaemon.mailbox import Layout, Route, attach, create_segment
from pmdaemon.mailbox.errors import MailboxFull
from pmdaemon.runtime.clock import SystemClock
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from sla_server.db import migrate
from sla_server.db.archive.writer import CutFileWriter
from sla_server.db.config import DatabaseConfig
from sla_server.db.engine import make_engine
from sla_server.db.ingest.queue import IngestQueue
from sla_server.db.ingest.transaction import IngestStore
from sla_server.db.ingest.writer import IngestWriter
from sla_server.db.partitions import Retention
from sla_server.db.queries.reader import open_reader
from tests.support.postgres import PostgresServer

GATEWAYS: Final = 1000
STREAMS: Final = 64
WARM_S: Final = 20
SUSTAINED_S: Final = 40
BURST_S: Final = 15  # seconds of the fleet in one burst: 960,000 rows
BACKLOG_S: Final = 30
QUEUE_BYTES: Final = 1 << 30  # 40 s of the fleet
MIB: Final = 1 << 20
_CHILD: Final = (
    "import sys; from pathlib import Path; from types import SimpleNamespace as N\n"
    "from pmdaemon.runtime.stop import Stop; from sla_server.db import process\n"
    "from sla_server.db.config import DatabaseConfig\n"
    "import threading; run, data, url = sys.argv[1:]; stop = Stop()\n"
    "threading.Thread(target=lambda: (sys.stdin.read(), stop.set('told to')), daemon=True).start()\n"
    "settings = DatabaseConfig(url=url, queue_bytes=1 << 30)\n"
    "config = N(runtime_dir=Path(run), data_dir=Path(data), database=settings)\n"
    "config.volume_ownership, config.first_sight_volumes = 'first', 10_000\n"
    "sys.exit(process.run(config, stop))\n"
)


class Manager:
    """The dbmanager process and, in this one, the pair that feeds it."""

    def __init__(self, folder: Path, url: str) -> None:
        folder.mkdir()
        (folder / "run").mkdir(mode=0o700)
        routes = (Route("pair-0", "dbmanager", 16 * MIB), Route("dbmanager", "pair-0", MIB))
        names = ("supervisor", "services", "dbmanager", "pair-0")
        create_segment(folder / "run" / "main.mbx", Layout(names, routes, 4096))
        routes = (Route("appserver", "services", 4096), Route("services", "appserver", 4096))
        names = ("appserver", "services", "dbmanager", "supervisor")
        create_segment(folder / "run" / "app.mbx", Layout(names, routes, 64))
        self.box = attach(folder / "run" / "main.mbx", "pair-0")
        command = [sys.executable, "-c", _CHILD, str(folder / "run"), str(folder), url]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, cwd=Path(__file__).parents[1])
        self.durable: dict[str, int] = {}
        self.memory_mib = 0.0
        self._seen = False
        self.wait_for(lambda: self._seen)

    def hear(self) -> None:
        """Take the notices that have arrived."""
        for message in self.box.take():
            parsed = frame.decode(message.payload)
            self._seen |= parsed.kind == Kind.WATERMARKS
            if parsed.kind == Kind.DURABLE:
                self.durable |= {
                    gateway: seq for gateway, epoch, seq in parsed.header["hw"] if epoch == EPOCH
                }

    def post(self, message: bytes) -> None:
        """Post, waiting for room."""
        while True:
            try:
                self.box.post("dbmanager", message)
                return
            except MailboxFull:
                self.hear()
                time.sleep(0.002)

    def wait_for(self, condition: Any, limit_s: float = 300.0) -> None:
        """Take notices until ``condition()`` holds."""
        deadline_s = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > deadline_s or self.process.poll() is not None:
                raise RuntimeError("dbmanager did not answer in time, or ended")
            self.box.wait(0.02)
            self.hear()

    def is_durable(self, seq: int) -> bool:
        """Whether every gateway's cuts up to ``seq`` are."""
        return len(self.durable) == GATEWAYS and min(self.durable.values()) >= seq

    def sample(self) -> None:
        """Take note of its memory."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        self.memory_mib = max(self.memory_mib, int(status.split("RssAnon:")[1].split()[0]) / 1024)

    def stop(self) -> None:
        """Let it write everything and end."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        if self.process.wait(300):
            raise RuntimeError("dbmanager failed")
        self.box.close()


def _cpu_s(pid: int) -> float:
    """CPU time of a process, its children, and those it has waited for."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    cpu_s = sum(int(value) for value in fields[11:15]) / os.sysconf("SC_CLK_TCK")
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return cpu_s + sum(_cpu_s(int(child)) for child in children)


def _sustained(manager: Manager, server: PostgresServer, load: Fleet) -> dict[str, float]:
    """Post second by second at an even pace; CPU of both over the last ``SUSTAINED_S``."""
    assert server.process is not None
    pids = {"dbmanager": manager.process.pid, "postgresql": server.process.pid}
    before: dict[str, float] = {}
    started_s = time.monotonic()
    for second in range(1, WARM_S + SUSTAINED_S + 1):
        if second == WARM_S + 1:
            before = {name: _cpu_s(pid) for name, pid in pids.items()} | {"at": time.monotonic()}
        messages = list(load.messages(range(second, second + 1)))
        for number, (message, _) in enumerate(messages):
            pause_s = started_s + second - 1 + number / len(messages) - time.monotonic()
            if pause_s > 0:
                time.sleep(pause_s)
            manager.post(message)
            manager.hear()
        manager.sample()
    time.sleep(max(0.0, started_s + WARM_S + SUSTAINED_S - time.monotonic()))
    elapsed_s = time.monotonic() - before["at"]
    cores = {name: (_cpu_s(pid) - before[name]) / elapsed_s for name, pid in pids.items()}
    manager.wait_for(lambda: manager.is_durable(WARM_S + SUSTAINED_S))
    return cores | {"rows_per_s": load.rows_a_second * SUSTAINED_S / elapsed_s}


def _device_mb(folder: Path) -> float:
    """Megabytes that were written so far to the disk below ``folder``, by its own counter."""
    number = folder.stat().st_dev
    counters = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/stat")
    if not counters.exists():
        raise RuntimeError(f"{folder} lies on no disk of its own: set TMPDIR to a directory on one")
    return int(counters.read_text().split()[6]) * 512 / 1e6  # sectors of 512 bytes, whatever the disk's own


def _burst(manager: Manager, load: Fleet, first_second: int, folder: Path) -> dict[str, float]:
    """A burst until DURABLE names its last cut: rows a second, and what went to the disk meanwhile."""
    seconds = range(first_second, first_second + BURST_S)
    messages = [message for message, _ in load.messages(seconds)]
    burst_mb, before_mb = sum(map(len, messages)) / 1e6, _device_mb(folder)
    started_s = time.monotonic()
    for message in messages:
        manager.post(message)
    manager.wait_for(lambda: manager.is_durable(seconds[-1]))
    elapsed_s = time.monotonic() - started_s
    device_mb = _device_mb(folder) - before_mb
    if device_mb < burst_mb:
        raise RuntimeError(f"called durable, but of {burst_mb:.0f} MB the disk got {device_mb:.0f} MB")
    rows_per_s = load.rows_a_second * BURST_S / elapsed_s
    return {"rows_per_s": rows_per_s, "s": elapsed_s, "burst_mb": burst_mb, "device_mb": device_mb}


def _catch_up(folder: Path, url: str, load: Fleet) -> float:
    """Rows a second from a queue into SQL and Parquet."""
    config = DatabaseConfig(url=url)
    engine = make_engine(config, folder)
    migrate.upgrade(engine)
    clock = SystemClock()
    queue = IngestQueue(folder / "queue", QUEUE_BYTES)
    for message, _ in load.messages(range(1, BACKLOG_S + 1)):
        queue.append_many([message])
    store = IngestStore(engine, queue.queue_id, config.rollup_s, clock)
    archive = CutFileWriter(
        folder / "parquet", queue.queue_id, config.file_max_bytes, config.file_max_s, clock
    )
    store.prepare()
    retention = Retention(engine, config.retention, clock)
    writer = IngestWriter(
        queue, store, archive, clock, config.flush_interval_s, folder / "refused", retention
    )
    writer.start(store.cursors())
    started_s = time.monotonic()
    while writer.step(final=True):
        pass
    elapsed_s = time.monotonic() - started_s
    if store.cursors() != (queue.synced_seq, queue.synced_seq):
        raise RuntimeError("the backlog was not stored")
    queue.close()
    engine.dispose()
    return load.rows_a_second * BACKLOG_S / elapsed_s


def _wait_for_sql(manager: Manager, url: str, folder: Path, seq: int, limit_s: float = 300.0) -> None:
    """Until every gateway's cuts up to ``seq`` are in SQL."""
    reader = open_reader(DatabaseConfig(url=url), folder)
    deadline_s = time.monotonic() + limit_s
    while min(stored for _, _, stored in reader.watermarks()) < seq:
        if time.monotonic() > deadline_s:
            raise RuntimeError("the writer fell behind: the burst is not in SQL")
        manager.sample()
        time.sleep(0.5)
    reader.close()


def _count(url: str, folder: Path, expected_rows: int, expected_cuts: int) -> float:
    """Check that nothing was lost or doubled; returns Parquet bytes a stream row."""
    reader = open_reader(DatabaseConfig(url=url), folder)
    stored = sum(row["cuts"] for row in reader.streams())
    files = reader.manifest()
    reader.close()
    rows, cuts = sum(row["rows"] for row in files), sum(row["cuts"] for row in files)
    if (stored, rows, cuts) != (expected_rows, expected_rows, expected_cuts):
        raise RuntimeError(
            f"{expected_rows} rows, but SQL has {stored}, files {rows}; cuts: {expected_cuts}, {cuts}"
        )
    return float(sum(row["bytes"] for row in files) / rows)


def measure() -> harness.Sample:
    """One whole run."""
    folder = Path(tempfile.mkdtemp(prefix="sla-bench-"))
    load = fleet(GATEWAYS, STREAMS)
    server = PostgresServer({"shared_buffers": "256MB", "max_wal_size": "4GB"})
    try:
        url = server.create("sustained")
        manager = Manager(folder / "sustained", url)
        for message in load.announcements():
            manager.post(message)
        cores = _sustained(manager, server, load)
        burst = _burst(manager, load, WARM_S + SUSTAINED_S + 1, folder)
        seconds = WARM_S + SUSTAINED_S + BURST_S
        _wait_for_sql(manager, url, folder, seconds)
        manager.stop()
        bytes_a_row = _count(url, folder, seconds * load.rows_a_second, seconds * GATEWAYS)
        url = server.create("backlog")
        (folder / "backlog").mkdir()
        catch_up = _catch_up(folder / "backlog", url, load)
        _count(url, folder, BACKLOG_S * load.rows_a_second, BACKLOG_S * GATEWAYS)
    finally:
        server.remove()
        shutil.rmtree(folder, ignore_errors=True)
    if cores["rows_per_s"] < 0.99 * load.rows_a_second:
        raise RuntimeError(f"the load was {cores['rows_per_s']:.0f} rows a second, not {load.rows_a_second}")
    values = {
        "sustained_cores": cores["dbmanager"] + cores["postgresql"],
        "catch_up_rows_per_s": catch_up,
        "durable_rows_per_s": burst["rows_per_s"],
        "parquet_bytes_per_row": bytes_a_row,
    }
    raw: dict[str, Any] = {"cores": cores, "burst": burst, "manager_mib": manager.memory_mib}
    return harness.Sample(values, raw, {"postgresql": harness.version_of("psql")})


if __name__ == "__main__":
    harness.main("ingest", measure)
