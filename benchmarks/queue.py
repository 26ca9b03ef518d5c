"""The disk queue against plain files, SQLite and persist-queue; every variant durable, 200-byte records.

All variants of a sample run one after another on the same file system, in turn, five samples; the values
are ratios of medians. SQLite: WAL, synchronous=FULL, one connection behind a lock for 64 threads (the
fastest way found: separate connections starve each other). persist-queue is a peer of this benchmark only:
when it is not installed its row reads "missing" (``pip install persist-queue``). The index sync period
stays at its default and the checksums on.
"""

from __future__ import annotations

import gc
import os
import sqlite3
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import closing
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from benchmarks.harness import Sample, main
from pmdaemon.diskqueue import DiskQueue, QueueSettings
from pmdaemon.diskqueue.format import DATA_START, read_file_header, scan
from pmdaemon.diskqueue.storage import FileStorage

RECORD = b"x" * 200
BATCH = [RECORD] * 100
SAMPLES = 5
SINGLE, THREADS, EACH, BATCHES, SLOW_BATCHES, FILL_BATCHES = 1000, 64, 100, 80, 4, 900


def rate(count: int, work: Callable[[], None]) -> float:
    """Records a second."""
    gc.collect()
    began_s = time.perf_counter()
    work()
    return count / (time.perf_counter() - began_s)


def in_threads(put: Callable[[], object]) -> Callable[[], None]:
    """THREADS producers, EACH records each."""

    def produce() -> None:
        for _ in range(EACH):
            put()

    def work() -> None:
        threads = [threading.Thread(target=produce) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return work


def repeated(count: int, put: Callable[[], object]) -> Callable[[], None]:
    """One producer."""

    def work() -> None:
        for _ in range(count):
            put()

    return work


class PlainFile:
    """Append and fdatasync, the floor that a file gives without any structure."""

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def put(self) -> None:
        """One record."""
        os.write(self.fd, RECORD)
        os.fdatasync(self.fd)


class Sqlite:
    """A table of one process."""

    def __init__(self, path: Path) -> None:
        self.db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self.lock = threading.Lock()
        for text in (
            "pragma journal_mode=wal",
            "pragma synchronous=full",
            "create table q(id integer primary key, date integer, data blob)",
        ):
            self.db.execute(text).fetchall()

    def put(self) -> None:
        """One row, one transaction."""
        with self.lock:
            self.db.execute("insert into q(date, data) values(?, ?)", (1, RECORD))

    def put_many(self) -> None:
        """A hundred rows, one transaction."""
        self.db.execute("begin")
        self.db.executemany("insert into q(date, data) values(?, ?)", [(1, data) for data in BATCH])
        self.db.execute("commit")


def persist_queue(path: Path) -> Any:
    """The durable form of persist-queue: SQLite, a commit for each put; None when not installed."""
    try:
        module = import_module("persistqueue")
    except ImportError:
        return None
    return module.SQLiteQueue(str(path), auto_commit=True, multithreading=True)


def one_sample(folder: Path, rates: dict[str, list[float]]) -> None:
    """Every variant once."""
    settings = QueueSettings(data_path=folder / "queue", data_bytes=32 << 20, entries=100_000)
    with closing(DiskQueue(settings)) as queue:
        plain, table, peer = (
            PlainFile(folder / "plain"),
            Sqlite(folder / "table"),
            persist_queue(folder / "pq"),
        )

        def measure(name: str, count: int, work: Callable[[], None]) -> None:
            rates.setdefault(name, []).append(rate(count, work))

        measure("queue 1", SINGLE, repeated(SINGLE, lambda: queue.put(RECORD)))
        measure("plain 1", SINGLE, repeated(SINGLE, plain.put))
        rounds = queue.stat()["rounds"]
        measure("queue 64", THREADS * EACH, in_threads(lambda: queue.put(RECORD)))
        rounds = queue.stat()["rounds"] - rounds
        rates.setdefault("records a sync at 64", []).append(THREADS * EACH / rounds)
        measure("plain 64", THREADS * EACH, in_threads(plain.put))
        measure("sqlite 64", THREADS * EACH, in_threads(table.put))
        measure("queue batch", BATCHES * 100, repeated(BATCHES, lambda: queue.put_many(BATCH)))
        measure("sqlite batch", BATCHES * 100, repeated(BATCHES, table.put_many))
        if peer is not None:
            measure(
                "persist-queue batch",
                SLOW_BATCHES * 100,
                repeated(SLOW_BATCHES * 100, lambda: peer.put(RECORD)),
            )
        os.close(plain.fd)
        table.db.close()
    filled = QueueSettings(data_path=folder / "filled", data_bytes=24 << 20, entries=100_000)
    with closing(DiskQueue(filled)) as queue:
        for _ in range(FILL_BATCHES):
            queue.put_many(BATCH)
    del queue  # its entries would be walked by the garbage collector; a recovery begins without them
    gc.collect()
    rates.setdefault("scan", []).append(scanned(filled.data_path))
    began_s = time.perf_counter()
    queue = DiskQueue(filled)
    rates.setdefault("open", []).append(FILL_BATCHES * 100 / (time.perf_counter() - began_s))
    queue.close()


def scanned(path: Path) -> float:
    """Records a second that the search of recovery finds and checks."""
    storage = FileStorage(path, read_only=True)
    header, _copies = read_file_header(storage.view())
    assert header is not None  # a queue was just closed there
    ring = storage.view()[DATA_START:]
    began_s = time.perf_counter()
    count = len(scan(ring, header.seed).intact)
    value = count / (time.perf_counter() - began_s)
    ring.release()
    storage.close()
    return value


def measure() -> Sample:
    """One whole run."""
    rates: dict[str, list[float]] = {}
    for _ in range(SAMPLES):
        with tempfile.TemporaryDirectory(prefix="bench-queue-") as folder:
            one_sample(Path(folder), rates)
    median = {name: statistics.median(values) for name, values in rates.items()}
    for name, value in median.items():
        print(f"  {name:<24} {value:>12,.0f} /s")
    values = {
        "one_vs_plain": median["queue 1"] / median["plain 1"],
        "threads_vs_sqlite": median["queue 64"] / median["sqlite 64"],
        "threads_vs_plain": median["queue 64"] / median["plain 64"],
        "batch_vs_sqlite": median["queue batch"] / median["sqlite batch"],
        "recovery_scan": median["scan"] / 1e6,
    }
    peers = {"sqlite": sqlite3.sqlite_version, "persist-queue": "not installed"}
    if "persist-queue batch" in median:
        values["batch_vs_persist_queue"] = median["queue batch"] / median["persist-queue batch"]
        peers["persist-queue"] = metadata.version("persist-queue")
    return Sample(values, {"rates": rates, "medians": median}, peers)


if __name__ == "__main__":
    main("queue", measure)
