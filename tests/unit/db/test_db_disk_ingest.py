"""The disk queue behind the writer's protocol."""

from __future__ import annotations

from pathlib import Path

import pytest

from pmdaemon.diskqueue.record import DATA_START
from sla_server.db.disk_ingest import DiskIngestQueue
from sla_server.db.errors import QueueCorrupt, QueuePoisoned
from sla_server.db.ingest_queue import DurableQueue, Record

SIZE_BYTES = 1 << 20


def test_appends_reads_in_order_and_deletes(tmp_path: Path) -> None:
    queue: DurableQueue = DiskIngestQueue(tmp_path / "q", SIZE_BYTES, keep_bytes=0)
    assert (queue.synced_seq, queue.oldest_seq, queue.waiting_bytes) == (0, 1, 0)
    assert queue.append_many([b"1", b"2"]) == 2
    assert queue.append_many([]) == 2
    reader = queue.reader(0)
    assert reader.read(1) == [Record(1, b"1")]
    queue.append_many([b"3"])
    assert reader.read(1 << 20) == [Record(2, b"2"), Record(3, b"3")]
    assert reader.read(1) == []
    queue.delete_through(2)
    assert queue.oldest_seq == 3
    assert queue.reader(0).read(1 << 20) == [Record(3, b"3")]
    assert queue.waiting_bytes == 256
    queue.close()  # type: ignore[attr-defined]
    assert (tmp_path / "q").stat().st_mode & 0o777 == 0o700


def test_deletion_is_late(tmp_path: Path) -> None:
    queue = DiskIngestQueue(tmp_path / "q", SIZE_BYTES, keep_bytes=1024)
    queue.append_many([b"1", b"2", b"3"])
    queue.delete_through(3)
    assert queue.oldest_seq == 1
    queue.append_many([b"4" * 900])
    queue.delete_through(3)
    assert queue.oldest_seq == 4
    queue.close()


def test_number_and_identity_go_on_after_reopening(tmp_path: Path) -> None:
    queue = DiskIngestQueue(tmp_path / "q", SIZE_BYTES)
    queue.append_many([b"1"])
    name = queue.queue_id
    queue.close()
    again = DiskIngestQueue(tmp_path / "q", SIZE_BYTES)
    assert (again.queue_id, again.synced_seq) == (name, 1)
    assert again.append_many([b"2"]) == 2
    assert [record.payload for record in again.reader(0).read(99)] == [b"1", b"2"]
    again.close()


def test_probes_stand_before_and_after_the_sync(tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []
    queue = DiskIngestQueue(tmp_path / "q", SIZE_BYTES, lambda point: seen.append((point, queue.synced_seq)))
    queue.append_many([b"1"])
    assert [point for point, _seq in seen] == ["appended", "synced"]
    assert seen[1][1] == 1
    queue.close()


def test_errors_are_those_of_the_database_manager(tmp_path: Path) -> None:
    queue = DiskIngestQueue(tmp_path / "q", SIZE_BYTES, keep_bytes=0)
    queue.append_many([b"rots"])
    with (tmp_path / "q" / "ingest").open("r+b") as file:
        file.seek(DATA_START + 57)
        file.write(b"?")
    with pytest.raises(QueueCorrupt):
        queue.reader(0).read(1)
    queue.close()
    for act in (
        lambda: queue.append_many([b"x"]),
        lambda: queue.reader(0).read(1),
        lambda: queue.delete_through(1),
    ):
        with pytest.raises(QueuePoisoned):
            act()
