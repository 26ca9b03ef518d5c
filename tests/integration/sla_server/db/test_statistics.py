"""A snapshot of the statistics: the same rows whoever reads them, when, and in how many parts."""

from __future__ import annotations

import contextlib
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sqlalchemy import text

from sla_server.db import schema, statistics
from sla_server.db.engine import begin
from sla_server.db.errors import SnapshotGone
from sla_server.db.statistics import StatisticsSnapshot
from sla_server.db.statistics_parts import Source, read_part
from tests.support.archive import HOUR_US, FilesRig, later
from tests.support.samples import (
    MINUTE_US,
    T0,
    Model,
    cuts_message,
    gateway_message,
    make_cut,
    streams_message,
)

COLUMNS = {
    "rollups": ("slot_us", "stream_id", "reads", "cost_milli", "covered_us"),
    "rollup_missed": ("slot_us", "stream_id", "io", "threshold_us", "missed"),
    "rollup_hours": ("hour_us", "stream_id", "reads"),
}
ALWAYS = (0, 1 << 60)


@pytest.fixture
def make_rig(database):
    made = []

    def make(clock, **config):
        made.append(FilesRig(database, clock=clock, **config))
        return made[-1]

    yield make
    for rig in made:
        rig.close()


@pytest.fixture
def take(database, tmp_path):
    """Takes snapshots, each with a directory of its own for its copy."""
    with contextlib.ExitStack() as stack:

        def take(window_us=ALWAYS) -> StatisticsSnapshot:
            copies = tmp_path / f"copies-{len(list(tmp_path.iterdir()))}"
            copies.mkdir()
            found = StatisticsSnapshot(database.config, database.data_dir, window_us, COLUMNS, copies)
            stack.enter_context(contextlib.closing(found))
            return found

        yield take


def rows_of(snapshot: StatisticsSnapshot, table: str) -> list[dict]:
    """Rows in SQL, read as a worker reads them: with nothing but the source and a part."""
    source = Source.parse(snapshot.source.encode())
    batches = [batch for part in snapshot.parts(table) for batch in read_part(source, part, COLUMNS[table])]
    return pa.Table.from_batches(batches).to_pylist() if batches else []


def in_files(files: statistics.Files, table: str) -> list[dict]:
    return [
        row for path in files.paths for row in pq.read_table(path, columns=list(COLUMNS[table])).to_pylist()
    ]


def test_rows_carry_the_sums(rig, take):
    items = [make_cut(seq, start_us=T0 + seq * 40_000_000) for seq in range(1, 6)]
    rig.feed(gateway_message(), streams_message(), *(cuts_message([item]) for item in items))
    model = Model.of(items)
    snapshot = take()
    rows = {(row["slot_us"], row["stream_id"]): row["reads"] for row in rows_of(snapshot, "rollups")}
    assert rows == {key: sums["reads"] for key, sums in model.slots.items()}
    assert snapshot.rows("rollups") == len(model.slots)
    missed = sum(row["missed"] for row in rows_of(snapshot, "rollup_missed"))
    assert missed == sum(entry[1] for entry in model.missed.values())
    assert sum(row["reads"] for row in rows_of(snapshot, "rollup_hours")) == sum(rows.values())
    assert sorted(snapshot.streams["volume"].to_pylist()) == ["vol-1", "vol-2"]
    assert snapshot.volumes["volume"].to_pylist() == ["vol-1", "vol-2"]


def test_ranges_are_half_open_and_may_be_empty(rig, take):
    rig.feed(cuts_message([make_cut(1), make_cut(2, start_us=T0 + MINUTE_US)]))
    assert {row["slot_us"] for row in rows_of(take((T0, T0 + MINUTE_US)), "rollups")} == {T0}
    empty = take((0, 1))
    assert [empty.rows(table) for table in COLUMNS] == [0, 0, 0]
    assert [empty.parts(table) for table in COLUMNS] == [[], [], []]


@pytest.mark.parametrize("rows_a_part", [1, 3, 1000])
def test_parts_hold_every_row_once(rig, take, monkeypatch, rows_a_part):
    monkeypatch.setattr(statistics, "ROWS_A_PART", rows_a_part)
    items = [make_cut(n + 1, start_us=T0 + n * n * MINUTE_US) for n in range(6)]  # farther and farther apart
    rig.feed(*(cuts_message([item]) for item in items))
    snapshot = take()
    assert len(snapshot.parts("rollups")) == -(-snapshot.rows("rollups") // rows_a_part)
    keys = Counter((row["slot_us"], row["stream_id"]) for row in rows_of(snapshot, "rollups"))
    assert len(keys) == snapshot.rows("rollups") > 6
    assert set(keys.values()) == {1}


def test_a_snapshot_stays_what_it_was_while_rows_move_to_files(make_rig, take):
    """Nothing is in both and nothing in neither, before, while and after hours move."""
    rig = make_rig(later(6), rollups_after_h=3)
    items = [make_cut(n + 1, start_us=T0 + n * 20 * MINUTE_US) for n in range(15)]
    rig.feed(*(cuts_message([item]) for item in items))
    before = take()
    expected = {table: sorted(map(str, rows_of(before, table))) for table in COLUMNS}
    assert before.slot_files.paths == []
    assert rig.step().hours_moved == 3
    rig.feed(cuts_message([make_cut(16, start_us=T0 + 5 * HOUR_US)]))
    for table in COLUMNS:
        assert sorted(map(str, rows_of(before, table))) == expected[table], "rows moved, and more came in"
    after = take((0, T0 + 5 * HOUR_US))
    rig.step(at_once=True)
    for table, files in (("rollups", after.slot_files), ("rollup_missed", after.missed_files)):
        rows = rows_of(after, table)
        moved = in_files(files, table)
        assert sorted(map(str, rows + moved)) == expected[table]
        assert files.rows == len(moved) > 0
        assert rows
    first_hour = take((T0, T0 + HOUR_US))
    assert len(first_hour.slot_files.paths) == 1
    assert first_hour.rows("rollups") == 0


def test_ingest_goes_on_beside_a_snapshot(rig, take):
    snapshot = take()
    rig.feed(cuts_message([make_cut(1)]))
    assert rig.reader.totals()["cuts"] == 2
    assert snapshot.rows("rollups") == 0
    assert take().rows("rollups") > 0


def test_a_snapshot_holds_no_lock_that_retention_would_wait_for(database, rig, take):
    rig.feed(cuts_message([make_cut(1)]))
    snapshot = take()
    with begin(rig.engine) as connection:
        for table in (*COLUMNS, "manifest", "streams", "volumes"):
            if database.kind == "postgresql":
                connection.execute(text(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE NOWAIT"))
            else:
                connection.execute(text(f"DELETE FROM {table}"))
    assert len(rows_of(snapshot, "rollups")) == snapshot.rows("rollups") > 0


def test_a_snapshot_that_has_ended_is_no_empty_one(database, rig, take):
    rig.feed(cuts_message([make_cut(1)]))
    snapshot = take()
    [part] = snapshot.parts("rollups")
    snapshot.close()
    source = snapshot.source
    if database.kind == "sqlite":
        source = Source("sqlite", source.address + "-on-another-machine")
    with pytest.raises(SnapshotGone, match=r"Run the job again\. With SQLite, Spark must run on the machine"):
        list(read_part(source, part, COLUMNS["rollups"]))


def test_slices_lie_in_time_by_their_begin_and_are_read_with_text_and_truths(rig, take, database, tmp_path):
    rows = [
        {"name": "gold, \"1\"", "objective": "latency", "start_us": T0 + at, "revision": 0, "state": "good",
         "length_us": MINUTE_US, "inexact": at > 0, "ours": at == 0}
        for at in (0, MINUTE_US, 99 * MINUTE_US)
    ]  # fmt: skip
    with begin(rig.engine) as connection:
        connection.execute(schema.slices.insert(), rows)
    columns = {"slices": ("start_us", "name", "state", "inexact", "ours")}
    window_us = (T0, T0 + 99 * MINUTE_US)
    with contextlib.closing(
        StatisticsSnapshot(database.config, database.data_dir, window_us, columns, tmp_path)
    ) as snapshot:
        assert snapshot.rows("slices") == 2
        (part,) = snapshot.parts("slices")
        found = pa.Table.from_batches(read_part(snapshot.source, part, columns["slices"])).to_pylist()
    assert found == [{name: row[name] for name in columns["slices"]} for row in rows[:2]]
