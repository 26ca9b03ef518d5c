"""The ingest queue: order, late deletion, room, errors; against a plain list."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from pmdaemon.diskqueue.format import DATA_START
from sla_server.db.errors import DbError, IngestQueuePoisoned, NoRoomForQueue, OldQueueFiles
from sla_server.db.ingest.queue import IngestQueue, IngestRecord, check_room

SIZE_BYTES = 1 << 20


def test_appends_reads_in_order_and_deletes(tmp_path: Path) -> None:
    queue = IngestQueue(tmp_path / "q", SIZE_BYTES, keep_bytes=0)
    assert (queue.synced_seq, queue.oldest_seq, queue.waiting_bytes) == (0, 1, 0)
    assert queue.append_many([b"1", b"2"]) == 2
    assert queue.append_many([]) == 2
    reader = queue.reader(0)
    assert reader.read(1) == [IngestRecord(1, b"1")]
    queue.append_many([b"3"])
    assert reader.read(1 << 20) == [IngestRecord(2, b"2"), IngestRecord(3, b"3")]
    assert reader.read(1) == []
    queue.delete_through(2)
    assert queue.oldest_seq == 3
    assert queue.reader(0).read(1 << 20) == [IngestRecord(3, b"3")]
    assert queue.waiting_bytes == 256
    queue.close()  # type: ignore[attr-defined]
    assert (tmp_path / "q").stat().st_mode & 0o777 == 0o700


def test_deletion_is_late(tmp_path: Path) -> None:
    queue = IngestQueue(tmp_path / "q", SIZE_BYTES, keep_bytes=1024)
    queue.append_many([b"1", b"2", b"3"])
    queue.delete_through(3)
    assert queue.oldest_seq == 1
    queue.append_many([b"4" * 900])
    queue.delete_through(3)
    assert queue.oldest_seq == 4
    queue.close()


def test_number_and_identity_go_on_after_reopening(tmp_path: Path) -> None:
    queue = IngestQueue(tmp_path / "q", SIZE_BYTES)
    queue.append_many([b"1"])
    name = queue.queue_id
    queue.close()
    again = IngestQueue(tmp_path / "q", SIZE_BYTES)
    assert (again.queue_id, again.synced_seq) == (name, 1)
    assert again.append_many([b"2"]) == 2
    assert [record.payload for record in again.reader(0).read(99)] == [b"1", b"2"]
    again.close()


def test_probes_stand_before_and_after_the_sync(tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []
    queue = IngestQueue(
        tmp_path / "q", SIZE_BYTES, probe=lambda point: seen.append((point, queue.synced_seq))
    )
    queue.append_many([b"1"])
    assert [point for point, _seq in seen] == ["appended", "synced"]
    assert seen[1][1] == 1
    queue.close()


def test_errors_are_those_of_the_database_manager(tmp_path: Path) -> None:
    queue = IngestQueue(tmp_path / "q", SIZE_BYTES, keep_bytes=0)
    queue.append_many([b"rots"])
    with (tmp_path / "q" / "ingest").open("r+b") as file:
        file.seek(DATA_START + 57)
        file.write(b"?")
    with pytest.raises(DbError, match="is damaged at byte"):
        queue.reader(0).read(1)
    queue.close()
    for act in (
        lambda: queue.append_many([b"x"]),
        lambda: queue.reader(0).read(1),
        lambda: queue.delete_through(1),
    ):
        with pytest.raises(IngestQueuePoisoned):
            act()


def test_files_of_an_earlier_version_are_refused_with_a_way_out(tmp_path: Path) -> None:
    (tmp_path / "q").mkdir()
    (tmp_path / "q" / f"{1:020d}.seg").write_bytes(b"SLAIQ001")
    with pytest.raises(OldQueueFiles, match="Start that version once more"):
        IngestQueue(tmp_path / "q", SIZE_BYTES)
    assert not (tmp_path / "q" / "ingest").exists()


def test_room_is_for_bytes_in_one_piece_and_for_entries(tmp_path: Path) -> None:
    queue = IngestQueue(tmp_path / "q", SIZE_BYTES, keep_bytes=0)
    part = 100 << 10
    appended = 0
    while queue.has_room(part, 1):
        appended = queue.append_many([bytes(part)])
    assert appended >= 7
    assert queue.fullness_ratio > 0.7
    queue.delete_through(appended - 2)
    while queue.has_room(part, 1):  # round the ring's end
        appended = queue.append_many([bytes(part)])
        queue.delete_through(appended - 2)
        if appended > 40:
            break
    assert appended > 40, "a fifth in use leaves room wherever it lies"
    assert not queue.has_room(1, 1024)
    queue.delete_through(appended)
    assert (queue.fullness_ratio, queue.has_room(1, 1000)) == (0.0, True)
    queue.close()


def test_a_size_changed_later_holds_from_the_next_start(tmp_path: Path) -> None:
    queue = IngestQueue(tmp_path / "q", SIZE_BYTES)
    identity, expected = queue.queue_id, [bytes([n]) * (40 << 10) for n in range(10)]
    queue.append_many(expected)
    for size_bytes in (2 * SIZE_BYTES, SIZE_BYTES // 4):
        queue.close()
        with capture_logs() as logs:
            queue = IngestQueue(tmp_path / "q", size_bytes)
        assert (queue.queue_id, queue.size_bytes, queue.synced_seq) == (identity, 2 * SIZE_BYTES, 10)
        assert [record.payload for record in queue.reader(0).read(1 << 20)] == expected
    [told] = [line for line in logs if line["event"] == "queue-keeps-its-size"]
    assert (told["bytes"], told["configured"]) == (2 * SIZE_BYTES, SIZE_BYTES // 4), "it does not fit"
    queue.close()


STEPS = st.lists(
    st.one_of(
        st.lists(st.binary(max_size=900), min_size=1, max_size=4).map(lambda p: ("append", p)),
        st.integers(0, 20).map(lambda n: ("delete", n)),
        st.just(("reopen", None)),
    ),
    max_size=12,
)


@settings(max_examples=40, deadline=None)
@given(steps=STEPS)
def test_against_a_list(tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, object]]) -> None:
    directory = tmp_path_factory.mktemp("q")
    queue = IngestQueue(directory, 64 << 10, keep_bytes=2048)
    model: list[bytes] = []
    deleted = 0
    for action, value in steps:
        if action == "append":
            model += value  # type: ignore[arg-type]
            assert queue.append_many(value) == len(model)  # type: ignore[arg-type]
        elif action == "delete":
            deleted = max(deleted, min(value, len(model)))  # type: ignore[type-var]
            queue.delete_through(deleted)
        else:
            queue.close()
            queue = IngestQueue(directory, 64 << 10, keep_bytes=2048)
        kept = queue.reader(0).read(1 << 20)
        assert [(seq, payload) for seq, payload in kept] == list(enumerate(model, 1))[
            len(model) - len(kept) :
        ]
        assert len(model) - len(kept) <= deleted, "nothing goes that was not consumed"
        assert queue.oldest_seq == len(model) - len(kept) + 1
        behind = queue.reader(deleted).read(1 << 20)
        assert [record.payload for record in behind] == model[deleted:]
    queue.close()


def test_room_is_asked_for_only_while_the_queue_is_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_room(tmp_path / "deep" / "q", SIZE_BYTES)
    assert list(tmp_path.iterdir()) == []
    needed_bytes = sum(made.stat().st_size for made in _made(tmp_path / "other"))
    for free_bytes, is_refused in ((needed_bytes, False), (needed_bytes - 1, True)):
        found = SimpleNamespace(f_blocks=1, f_bavail=free_bytes, f_bfree=free_bytes, f_frsize=1)
        monkeypatch.setattr(os, "statvfs", lambda _path, found=found: found)
        with pytest.raises(NoRoomForQueue) if is_refused else nullcontext():
            check_room(tmp_path / "q", SIZE_BYTES)
    check_room(tmp_path / "other", 2 * SIZE_BYTES)  # its owner copies it once there is room


def _made(directory: Path) -> list[Path]:
    IngestQueue(directory, SIZE_BYTES).close()
    return list(directory.iterdir())


def test_a_queue_that_lags_behind_the_database_leaves_the_consumed_numbers_unused(tmp_path: Path) -> None:
    queue = IngestQueue(tmp_path / "q", SIZE_BYTES)
    queue.append_many([b"1", b"2"])
    queue.go_on_behind(2)
    assert queue.append_many([b"3"]) == 3
    with capture_logs() as logs:
        queue.go_on_behind(40)
    assert [(line["newest"], line["consumed"]) for line in logs] == [(3, 40)]
    assert queue.append_many([b"41"]) == 41
    assert queue.reader(40).read(99) == [IngestRecord(41, b"41")]
    queue.close()
    again = IngestQueue(tmp_path / "q", SIZE_BYTES)
    assert [record.queue_seq for record in again.reader(0).read(99)] == [1, 2, 3, 41]
    again.go_on_behind(41)
    assert again.append_many([b"42"]) == 42
    again.close()
