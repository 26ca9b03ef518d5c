"""Parquet files: contents, names, limits, and what is swept."""

from __future__ import annotations

import hashlib
import os
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pmdaemon.runtime.clock import FakeClock
from pmdaemon.wire.cut import COL, COLUMNS
from sla_server.db.archive.files import cut_table
from sla_server.db.archive.writer import CutFileWriter
from sla_server.db.errors import ArchiveFailed
from sla_server.db.ingest.batch import IngestedCut
from tests.support.samples import EPOCH, T0, gateway, make_cut, stream


@pytest.fixture
def clock():
    return FakeClock(unix_us=T0)


@pytest.fixture
def archive(tmp_path, clock):
    return CutFileWriter(tmp_path, "abcd", 1 << 20, 60, clock)


def ingested(*items, offset_us=0):
    return [IngestedCut(item, offset_us, item.start_unix_us) for item in items]


def read(tmp_path, row):
    return pq.ParquetFile(tmp_path / row["path"]).read().to_pylist()


def test_rows_hold_everything_of_the_cut(tmp_path, archive):
    items = [
        make_cut(1, tg=4),
        make_cut(2, streams=(), gap=3),
        make_cut(3, gw=gateway(2), epoch=5, streams=(1,)),
    ]
    archive.add(10, 12, ingested(*items, offset_us=-2_000))
    row = archive.finish().row
    got = read(tmp_path, row)
    assert [r["seq"] for r in got] == [1, 1, 2, 3]
    assert [r["stream_id"] for r in got] == [stream(1), stream(2), None, stream(1, gateway(2))]
    first = got[0]
    assert first["gateway_id"] == gateway(1)
    assert first["epoch"] == str(EPOCH)
    assert first["start"] == datetime.fromtimestamp((T0 - 2_000) / 1e6, UTC)
    assert (first["raw_start_us"], first["offset_us"], first["duration_us"]) == (T0, -2_000, 1_000_000)
    assert (first["throttle_gen"], first["threshold_version"], got[2]["gap"]) == (4, 1, 3)
    assert all(got[1][name] == int(items[0].counters[COL[name]][1]) for name in COLUMNS[1:])
    assert all(got[2][name] == 0 for name in COLUMNS[1:])
    for index, (item, in_cut) in enumerate([(items[0], 0), (items[0], 1), (items[2], 0)]):
        entry = got[index if index < 2 else 3]
        mine = item.hist[item.hist["row"] == in_cut]
        assert (entry["hist_bucket"], entry["hist_count"]) == (
            mine["bucket"].tolist(),
            mine["count"].tolist(),
        )
        missed = item.missed[item.missed["row"] == in_cut]
        for name in ("io", "threshold_us", "counted", "missed"):
            assert entry[f"missed_{name}"] == missed[name].tolist()
    assert got[2]["hist_bucket"] == []


def test_entries_in_any_order_find_their_rows():
    item = make_cut(1)
    shuffled = item.hist[np.random.default_rng(1).permutation(len(item.hist))]
    import dataclasses

    rows = cut_table(ingested(dataclasses.replace(item, hist=shuffled))).to_pylist()
    for index in (0, 1):
        expected = {(int(e["bucket"]), int(e["count"])) for e in item.hist if e["row"] == index}
        assert set(zip(rows[index]["hist_bucket"], rows[index]["hist_count"], strict=True)) == expected


def test_the_manifest_row_describes_the_file(tmp_path, archive, clock):
    archive.add(10, 11, ingested(make_cut(1), make_cut(2)))
    archive.add(12, 12, ingested(make_cut(3, start_us=T0 - 5_000_000)))
    finished = archive.finish()
    path = tmp_path / finished.row["path"]
    assert finished.row == {
        "path": "cuts/2027-01-15/abcd-10-12.parquet",
        "kind": "cuts",
        "created_us": T0,
        "min_us": T0 - 5_000_000,
        "max_us": T0 + 2_000_000,
        "rows": 6,
        "cuts": 3,
        "bytes": path.stat().st_size,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "replaced_us": None,
    }
    assert (finished.first_seq, finished.last_seq) == (10, 12)
    metadata = pq.ParquetFile(path).metadata
    assert metadata.row_group(0).column(0).compression == "ZSTD"
    assert pq.read_schema(path).field("start").type == pa.timestamp("us", tz="UTC")


def test_records_without_cuts_move_the_cursor_and_make_no_file(tmp_path, archive):
    archive.add(4, 9, [])
    finished = archive.finish()
    assert (finished.first_seq, finished.last_seq, finished.row) == (4, 9, None)
    assert list(tmp_path.rglob("*.parquet")) == []


def test_due_by_age(archive, clock):
    assert not archive.is_due
    archive.add(1, 1, ingested(make_cut(1)))
    clock.advance(59.9)
    assert not archive.is_due
    clock.advance(0.2)
    assert archive.is_due
    archive.finish()
    assert not archive.is_due


def test_due_by_size(tmp_path, clock, monkeypatch):
    monkeypatch.setattr("sla_server.db.archive.files.ROW_GROUP_ROWS", 100)
    archive = CutFileWriter(tmp_path, "abcd", 20_000, 60, clock)
    seq = 0
    while not archive.is_due:
        seq += 1
        archive.add(seq, seq, ingested(make_cut(seq)))
    row = archive.finish().row
    assert 20_000 <= row["bytes"] < 60_000
    assert pq.ParquetFile(tmp_path / row["path"]).metadata.num_row_groups > 1
    assert len(read(tmp_path, row)) == row["rows"] == 2 * seq


def test_a_file_under_way_is_hidden_by_its_name(tmp_path, archive, monkeypatch):
    monkeypatch.setattr("sla_server.db.archive.files.ROW_GROUP_ROWS", 1)
    archive.add(1, 1, ingested(make_cut(1)))
    assert [path.name for path in tmp_path.rglob("*.parquet")] == ["_abcd-1.parquet"]
    archive.abort()
    assert list(tmp_path.rglob("*.parquet")) == []


def test_a_full_disk_gives_the_file_up_and_the_next_try_works(tmp_path, archive, monkeypatch):
    def no_space(_fd):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", no_space)
        archive.add(1, 1, ingested(make_cut(1)))
        with pytest.raises(ArchiveFailed, match="No space left"):
            archive.finish()
    assert list(tmp_path.rglob("*.parquet")) == []
    assert archive.last_seq == 0
    archive.add(1, 1, ingested(make_cut(1)))
    assert archive.finish().row["cuts"] == 1


def test_sweep_removes_what_no_manifest_row_names(tmp_path, archive):
    day = tmp_path / "cuts" / "2027-01-15"
    day.mkdir(parents=True)
    names = [
        "abcd-1-5.parquet",
        "abcd-6-9.parquet",
        "_abcd-10.parquet",
        "ffff-1-2.parquet",
        "eeee-1-2.parquet",
    ]
    for name in names:
        (day / name).write_bytes(b"x")
        os.utime(day / name, (T0 / 1e6, T0 / 1e6))
    os.utime(day / "eeee-1-2.parquet", (T0 / 1e6 - 90_000, T0 / 1e6 - 90_000))
    removed = archive.sweep({"cuts/2027-01-15/abcd-1-5.parquet"}, T0)
    assert sorted(os.path.basename(name) for name in removed) == sorted([names[1], names[2], names[4]])
    assert sorted(path.name for path in day.iterdir()) == sorted([names[0], names[3]])
