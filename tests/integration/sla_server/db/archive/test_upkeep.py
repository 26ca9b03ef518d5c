"""Merging, giving up, deleting, orphans, moved rollups: each transaction on both databases."""

from __future__ import annotations

import threading

import pyarrow.parquet as pq
import pytest

from pmdaemon.wire import frame
from sla_server.db.archive import export, manifest, upkeep
from sla_server.db.archive.upkeep import storage_lock
from sla_server.db.engine import begin
from sla_server.db.errors import StorageBusy
from tests.support.archive import HOUR_US, FilesRig, archived, counted, later
from tests.support.samples import MINUTE_US, T0, Model, cuts_message, make_cut, record_message


@pytest.fixture
def make_rig(database):
    made = []

    def make(**options):
        made.append(FilesRig(database, **options))
        return made[-1]

    yield make
    for rig in made:
        rig.close()


@pytest.fixture
def rig(make_rig):
    return make_rig()


def seqs(items):
    return [item.seq for item in items]


def test_an_hour_of_files_becomes_one(rig):
    items = rig.files_of_cuts(5)
    assert rig.step().merged == {}, "the hour is not over"
    before = {row.path: pq.read_table(rig.files.path_for_readers(row.path)).to_pylist() for row in rig.rows()}
    rig.clock.advance(2 * 3600)
    [(path, parts)] = rig.step().merged.items()
    assert parts == list(before)
    [row] = rig.rows()
    assert (row.path, row.cuts, row.min_us) == (path, 10, T0)
    assert pq.read_table(rig.files.path_for_readers(path)).to_pylist() == [
        r for p in parts for r in before[p]
    ]
    assert archived(rig) == seqs(items)
    assert rig.step().merged == {}


def test_replaced_files_stay_for_readers_until_their_grace_is_over(rig):
    rig.files_of_cuts(3)
    snapshot = rig.reader.manifest("cuts")
    rig.clock.advance(2 * 3600)
    rig.step()
    assert sum(pq.read_metadata(rig.parquet_dir / row["path"]).num_rows for row in snapshot) == 12
    rig.clock.advance(99)
    assert rig.step().deleted == []
    rig.clock.advance(2)
    assert sorted(rig.step().deleted) == sorted(row["path"] for row in snapshot)
    assert rig.parquet_files() == [row.path for row in rig.rows(in_use=False)]
    assert archived(rig) == [1, 2, 3, 4, 5, 6]


def test_ingest_goes_on_between_and_after(rig):
    items = rig.files_of_cuts(3)
    rig.step(at_once=True)
    items += rig.files_of_cuts(3, first_seq=7)
    rig.step(at_once=True)
    assert len(rig.rows()) == 1
    assert archived(rig) == seqs(items)


def test_old_files_are_given_up_and_the_boundary_is_remembered(make_rig):
    rig = make_rig(cuts_max_age_h=1)
    rig.files_of_cuts(2)
    rig.clock.advance(3601)
    given_up = rig.step().given_up
    assert len(given_up) == 2
    assert rig.rows() == []
    with begin(rig.engine) as connection:
        assert manifest.boundary_us(connection, manifest.COMPLETE_FROM_KEY) == T0 + 4_000_000
    assert len(rig.parquet_files()) == 2, "readers may hold them"
    rig.clock.advance(101)
    assert sorted(rig.step().deleted) == sorted(given_up)
    assert rig.parquet_files() == []
    assert rig.reader.manifest(in_use=False) == []


def test_too_many_bytes_cost_the_oldest_file(make_rig):
    rig = make_rig()
    rig.files_of_cuts(4)
    rows = rig.rows()
    limit = sum(row.bytes for row in rows[2:])
    rig.settings.cuts_max_bytes = limit
    assert rig.step().given_up == [row.path for row in rows[:2]]
    assert sum(row.bytes for row in rig.rows(in_use=False)) <= limit, "deleted at once: the space is needed"
    assert archived(rig) == [5, 6, 7, 8]


def test_a_file_replaced_meanwhile_ends_the_merge(rig, monkeypatch):
    rig.files_of_cuts(3)
    merge_files = upkeep.merge_files

    def beside(files, group):
        row = merge_files(files, group)
        with begin(rig.engine) as connection:
            manifest.replace(connection, group[:1], None, rig.clock.unix_us())
        return row

    monkeypatch.setattr(upkeep, "merge_files", beside)
    assert rig.step(at_once=True).merged == {}
    assert archived(rig) == [3, 4, 5, 6]
    assert len(rig.parquet_files()) == 3, "the merged file is removed"


def test_replacing_twice_is_refused_and_changes_nothing(rig):
    rig.files_of_cuts(2)
    rows = rig.rows()
    with begin(rig.engine) as connection:
        manifest.replace(connection, rows[:1], None, 5)
    with pytest.raises(manifest.ManifestChanged) as caught, begin(rig.engine) as connection:
        manifest.replace(connection, rows, None, 6)
    assert caught.value.retryable
    assert rig.rows() == rows[1:]


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("harm", [flip, lambda path: path.unlink(), lambda path: path.write_bytes(b"")])
def test_a_damaged_file_is_told_once_and_not_merged(rig, harm):
    rig.files_of_cuts(3)
    victim = rig.rows()[1].path
    harm(rig.parquet_dir / victim)
    done = rig.step(at_once=True)
    assert list(done.damaged) == [victim]
    assert done.merged == {}
    rig.step(at_once=True)
    events = [row for row in rig.reader.events() if row["kind"] == "file-damaged"]
    assert [(row["severity"], victim in row["text"]) for row in events] == [("critical", True)]
    assert len(rig.rows()) == 2, "the others are merged by the next pass, the damaged one stays as it is"


def test_a_missing_file_is_an_event(rig):
    rig.files_of_cuts(1)
    victim = rig.rows()[0].path
    (rig.parquet_dir / victim).unlink()
    assert rig.step().missing == [victim]
    assert [row["kind"] for row in rig.reader.events()] == ["file-missing"]


def test_orphans_go_when_seen_twice_an_hour_apart(rig):
    rig.files_of_cuts(1)
    [row] = rig.rows()
    orphan = rig.parquet_dir / row.path.replace(".parquet", "9.parquet")
    foreign = orphan.with_name("ffff-1-2.parquet")
    for path in (orphan, foreign):
        path.write_bytes(b"x")
    assert rig.step().orphans == []
    rig.clock.advance(3599)
    assert rig.step().orphans == []
    rig.clock.advance(2)
    assert rig.step().orphans == [orphan.relative_to(rig.parquet_dir).as_posix()]
    assert foreign.exists()
    assert (rig.parquet_dir / row.path).exists()


def test_a_file_that_is_committed_after_the_first_look_stays(rig):
    rig.files_of_cuts(1)
    with begin(rig.engine) as connection:
        [row] = manifest.rows(connection)
        manifest.replace(connection, [row], None, 1)
        manifest.forget(connection, [row.path])
    assert rig.step().orphans == []
    with begin(rig.engine) as connection:
        manifest.add(connection, row)
    rig.clock.advance(3601)
    assert rig.step().orphans == []
    assert (rig.parquet_dir / row.path).exists()


def test_two_processes_do_not_look_after_the_same_files(rig):
    with storage_lock(rig.files.lock_dir), pytest.raises(StorageBusy, match="looking after the files"):
        rig.step()


def test_the_thread_goes_on_after_an_error_and_ends_when_told(rig, monkeypatch):
    rig.settings.interval_s = 0.1
    tries = []
    again = threading.Event()

    def busy(**_options):
        tries.append(1)
        if len(tries) == 2:
            again.set()
        raise StorageBusy(rig.parquet_dir)

    monkeypatch.setattr(rig.upkeep, "step", busy)
    thread = threading.Thread(target=rig.upkeep.run, name="db-files")
    thread.start()
    assert again.wait(60)
    rig.upkeep.finish()
    thread.join(60)
    assert not thread.is_alive()


# -- moved rollups


def hours_of_cuts(rig, hours):
    items = [make_cut(n + 1, start_us=T0 + n * 20 * MINUTE_US) for n in range(hours * 3)]
    rig.feed(*(cuts_message([item]) for item in items))
    return items


def expected(items):
    model = Model.of(items)
    reads = {key: sums["reads"] for key, sums in model.slots.items() if sums["reads"]}
    missed = {key: entry[1] for key, entry in model.missed.items() if entry[1]}
    return reads, missed


def nonzero(counters):
    return tuple({key: value for key, value in counter.items() if value} for counter in counters)


def test_rollups_of_old_hours_move_and_nothing_is_lost(make_rig):
    rig = make_rig(clock=later(6), rollups_after_h=3)
    items = hours_of_cuts(rig, 5)
    assert rig.step().hours_moved == 3
    assert {row.kind for row in rig.rows()} == {"rollups", "missed"}
    assert nonzero(counted(rig)) == expected(items)
    left = rig.reader.slice_inputs({s for _, s in Model.of(items).slots}, set(), 0, 1 << 62)
    assert min(row["slot_us"] for row in left.rows) == T0 + 3 * HOUR_US
    assert min(row["slot_us"] for row in left.missed) == T0 + 3 * HOUR_US
    assert rig.step().hours_moved == 0


def test_rollups_that_services_have_not_judged_stay(make_rig):
    rig = make_rig(clock=later(6), rollups_after_h=2)
    items = hours_of_cuts(rig, 5)
    judged = {"name": "gold", "objective": "latency", "start_us": T0 + 3 * HOUR_US, "revision": 0}
    rig.feed(record_message([("slices", judged)]))
    assert rig.step().hours_moved == 1, "the newest judged slice is two hours further"
    rig.feed(record_message([("slices", {**judged, "start_us": T0 + 5 * HOUR_US})]))
    assert rig.step().hours_moved == 2
    rig.clock.advance(8 * 86_400)
    assert rig.step().hours_moved == 2, "nobody judges after a week"
    assert nonzero(counted(rig)) == expected(items)


def test_the_backlog_of_a_gateway_stays(make_rig):
    """It was away for days and begins to send what it kept: its slices are judged from that."""
    rig = make_rig(clock=later(72), rollups_after_h=48)
    late = make_cut(1, start_us=T0)
    received = rig.clock.unix_us() - 5_000
    message = frame.decode(cuts_message([late]))
    rig.feed(frame.encode(message.kind, {**message.header, "recv_us": [received]}, bytes(message.blob)))
    assert rig.step().hours_moved == 0
    rig.feed(cuts_message([make_cut(2, start_us=T0 + 60 * HOUR_US)]))
    assert rig.step().hours_moved == 1


def test_a_large_hour_moves_in_parts(make_rig, monkeypatch):
    monkeypatch.setattr(
        export, "PART_ROWS", 6
    )  # three slots an hour, six rows each: two of rollups, four of missed
    rig = make_rig(clock=later(6), rollups_after_h=3)
    items = hours_of_cuts(rig, 5)
    assert rig.step().hours_moved == 3
    spans = sorted((row.min_us, row.max_us) for row in rig.rows() if row.kind == "rollups")
    assert [start - T0 for start, _ in spans] == [n * 20 * MINUTE_US for n in range(9)]
    assert {end - start + 1 for start, end in spans} == {20 * MINUTE_US}
    assert nonzero(counted(rig)) == expected(items)


def test_late_cuts_move_to_further_files_and_add_up(make_rig):
    rig = make_rig(clock=later(6), rollups_after_h=3)
    items = hours_of_cuts(rig, 5)
    rig.step()
    late = [make_cut(99, start_us=T0), make_cut(100, start_us=T0 + 20 * MINUTE_US)]
    rig.feed(cuts_message(late))
    assert nonzero(counted(rig)) == expected(items + late)
    rig.clock.advance(1)
    assert rig.step().hours_moved == 1
    assert len([row for row in rig.rows() if row.kind == "rollups"]) == 4
    assert nonzero(counted(rig)) == expected(items + late)
    rig.step(at_once=True)
    assert nonzero(counted(rig)) == expected(items + late)


def test_a_cut_that_comes_while_an_hour_is_written_keeps_it_in_sql(make_rig):
    items: list = []
    fed: list = []

    def probe(point):
        if point == "export-published" and not fed:
            fed.append(make_cut(99, start_us=T0))
            rig.feed(cuts_message(fed))

    rig = make_rig(probe=probe, clock=later(6), rollups_after_h=3)
    items = hours_of_cuts(rig, 5)
    assert rig.step().hours_moved == 0
    assert rig.parquet_files() == []
    assert nonzero(counted(rig)) == expected(items + fed)
    assert rig.step().hours_moved == 3
    assert nonzero(counted(rig)) == expected(items + fed)
