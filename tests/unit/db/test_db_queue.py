"""The ingest queue: order, durability, recovery, against a plain list."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sla_server.db.errors import QueueCorrupt, QueuePoisoned
from sla_server.db.ingest_queue import HEADER, MAGIC, IngestQueue

SEGMENT_BYTES = 200


def read_all(queue, after_seq=0, max_bytes=1 << 20):
    reader = queue.reader(after_seq)
    try:
        got = []
        while records := reader.read(max_bytes):
            got += records
        return [(record.queue_seq, record.payload) for record in got]
    finally:
        reader.close()


@pytest.fixture
def queue(tmp_path):
    opened = IngestQueue(tmp_path / "q", SEGMENT_BYTES)
    yield opened
    opened.close()


STEPS = st.lists(
    st.one_of(
        st.lists(st.binary(max_size=90), min_size=1, max_size=4).map(lambda p: ("append", p)),
        st.integers(0, 20).map(lambda n: ("delete", n)),
        st.just(("reopen", None)),
    ),
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(steps=STEPS)
def test_against_a_list(tmp_path_factory, steps):
    directory = tmp_path_factory.mktemp("q")
    queue = IngestQueue(directory, SEGMENT_BYTES)
    queue_id, model, deleted = queue.queue_id, [], 0
    for action, value in steps:
        if action == "append":
            model += [(len(model) + 1 + index, payload) for index, payload in enumerate(value)]
            assert queue.append_many(value) == len(model)
        elif action == "delete":
            deleted = max(deleted, min(value, len(model)))
            queue.delete_through(deleted)
        else:
            queue.close()
            queue = IngestQueue(directory, SEGMENT_BYTES)
            assert queue.queue_id == queue_id
        assert queue.synced_seq == len(model)
        kept = read_all(queue)
        assert kept == model[len(model) - len(kept) :], "what is held is the newest, in order, without holes"
        assert len(model) - len(kept) <= deleted, "nothing goes that was not consumed"
        assert queue.oldest_seq == len(model) - len(kept) + 1
        assert queue.waiting_bytes == sum(path.stat().st_size for path in directory.glob("*.seg"))
        assert read_all(queue, deleted) == model[deleted:]
    queue.close()


def test_a_reader_sees_what_is_appended_later(queue):
    reader = queue.reader(0)
    assert reader.read(100) == []
    queue.append_many([b"a" * 150, b"b"])
    assert [record.queue_seq for record in reader.read(1)] == [1], "one at least, also above the limit"
    queue.append_many([b"c"])  # begins another segment
    assert [record.payload for record in reader.read(1000)] == [b"b", b"c"]
    reader.close()


def test_segments_are_deleted_only_when_all_their_records_are_consumed(queue, tmp_path):
    queue.append_many([b"x" * 150, b"y" * 150])
    queue.append_many([b"z"])
    assert len(list((tmp_path / "q").glob("*.seg"))) == 2
    queue.delete_through(1)
    assert len(list((tmp_path / "q").glob("*.seg"))) == 2
    queue.delete_through(2)
    assert [path.name for path in (tmp_path / "q").glob("*.seg")] == [f"{3:020d}.seg"]
    queue.delete_through(3)
    assert read_all(queue) == [(3, b"z")], "the newest segment carries the numbering on"


@pytest.mark.parametrize("cut_bytes", range(1, HEADER.size + 5))
def test_a_torn_tail_is_cut_off(tmp_path, cut_bytes):
    queue = IngestQueue(tmp_path)
    queue.append_many([b"first", b"torn"])
    queue.close()
    path = next(tmp_path.glob("*.seg"))
    os.truncate(path, path.stat().st_size - cut_bytes)
    queue = IngestQueue(tmp_path)
    assert read_all(queue) == [(1, b"first")]
    assert queue.append_many([b"again"]) == 2
    assert read_all(queue) == [(1, b"first"), (2, b"again")]
    queue.close()


def test_garbage_behind_the_last_record_is_cut_off(tmp_path):
    queue = IngestQueue(tmp_path)
    queue.append_many([b"first"])
    queue.close()
    with next(tmp_path.glob("*.seg")).open("ab") as file:
        file.write(b"\0" * 100)  # a file system that extended the file but never wrote the data
    queue = IngestQueue(tmp_path)
    assert read_all(queue) == [(1, b"first")]
    queue.close()


def test_died_while_beginning_a_segment(tmp_path):
    queue = IngestQueue(tmp_path)
    queue.append_many([b"first"])
    queue.close()
    (tmp_path / f"{2:020d}.seg").write_bytes(MAGIC[:3])
    queue = IngestQueue(tmp_path)
    assert queue.append_many([b"second"]) == 2
    assert read_all(queue) == [(1, b"first"), (2, b"second")]
    queue.close()


@pytest.mark.parametrize("at", [len(MAGIC) + 2, len(MAGIC) + HEADER.size + 1])
def test_damage_in_an_older_segment_is_an_error_that_names_the_file(tmp_path, at):
    queue = IngestQueue(tmp_path, SEGMENT_BYTES)
    queue.append_many([b"x" * 300])
    queue.append_many([b"newest"])
    queue.close()
    path = sorted(tmp_path.glob("*.seg"))[0]
    data = bytearray(path.read_bytes())
    data[at] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(QueueCorrupt, match=path.name):
        IngestQueue(tmp_path, SEGMENT_BYTES)


def test_a_missing_segment_is_an_error(tmp_path):
    queue = IngestQueue(tmp_path, SEGMENT_BYTES)
    for letter in b"abc":
        queue.append_many([bytes([letter]) * 250])
    queue.close()
    sorted(tmp_path.glob("*.seg"))[1].unlink()
    with pytest.raises(QueueCorrupt, match="expected 2"):
        IngestQueue(tmp_path, SEGMENT_BYTES)


def test_a_failed_sync_poisons_until_reopened(tmp_path, monkeypatch):
    queue = IngestQueue(tmp_path)
    queue.append_many([b"first"])

    def fail(_fd):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fail)
        with pytest.raises(QueuePoisoned, match="Input/output"):
            queue.append_many([b"second"])
    with pytest.raises(QueuePoisoned):
        queue.append_many([b"third"])
    assert queue.synced_seq == 1
    assert read_all(queue) == [(1, b"first")], "what was not synced is not shown"
    queue.close()


def test_recovered_records_are_synced_before_they_count(tmp_path, monkeypatch):
    IngestQueue(tmp_path).append_many([b"first"])
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    queue = IngestQueue(tmp_path)
    assert [os.path.basename(path) for path in synced] == [f"{1:020d}.seg"]
    queue.close()
