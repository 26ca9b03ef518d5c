"""The consumer: two cursors, retries, a disk that fills up, and the thread around it."""

from __future__ import annotations

import dataclasses
import threading
import time

import pytest
from sqlalchemy import text

from pmdaemon.runtime.clock import Deadline
from sla_server.db.archive import writer as archive_writers
from sla_server.db.errors import ArchiveFailed, DatabaseRefused, DatabaseUnavailable
from sla_server.db.ingest import outage as outages
from sla_server.db.ingest import writer as writers
from sla_server.db.ingest.transaction import CursorMoved
from tests.support import database as support
from tests.support.database import Gate, Rig, archived, backlog, identity
from tests.support.samples import (
    T0,
    assert_database_holds,
    cuts_message,
    gateway,
    gateway_message,
    make_cut,
    record_message,
)


def test_sql_at_once_files_when_due_records_leave_after_both(rig):
    items = [make_cut(seq) for seq in range(1, 200)]
    for item in items:
        rig.queue.append_many([cuts_message([item])])
    rig.drain()
    assert_database_holds(rig.reader, items)
    assert rig.reader.manifest() == []
    assert rig.queue.oldest_seq == 1, "the cuts wait for their file"
    rig.clock.advance(61)
    rig.drain()
    assert archived(rig) == identity(items)
    assert rig.store.cursors() == (199, 199)
    assert rig.queue.oldest_seq > 1
    more = [make_cut(200)]
    rig.feed(cuts_message(more))
    rig.drain(final=True)
    assert archived(rig) == identity(items + more)


def test_a_restart_goes_on_where_both_cursors_stand(database):
    items = [make_cut(seq) for seq in range(1, 7)]
    first = Rig(database.config, database.data_dir)
    first.feed(*(cuts_message([item]) for item in items[:2]))
    first.clock.advance(61)
    first.drain()
    first.feed(*(cuts_message([item]) for item in items[2:4]))
    first.close()
    second = Rig(database.config, database.data_dir)
    assert second.store.cursors() == (4, 2)
    second.feed(*(cuts_message([item]) for item in items[4:]))
    second.drain(final=True)
    assert_database_holds(second.reader, items)
    assert archived(second) == identity(items)
    second.close()


def test_a_restart_knows_which_planes_were_in_the_newest_cuts(database):
    """Plane a is stopped; the first cuts after the start are without it, too; the last is late."""

    def cut_at(seq, marks, seconds=1):
        start_us = T0 + (seq if seconds == 1 else 2) * 1_000_000
        cut = make_cut(seq, start_us=start_us, duration_us=seconds * 1_000_000)
        return dataclasses.replace(cut, extra={"dp": marks})

    items = [cut_at(n, {"a": 1, "b": n}) for n in range(1, 31)]
    items.append(cut_at(31, {"a": 2, "b": 30}, seconds=29))
    first = Rig(database.config, database.data_dir)
    first.feed(cuts_message(items[:20]))
    first.close()
    second = Rig(database.config, database.data_dir)
    second.feed(cuts_message(items[20:]))
    second.drain(final=True)
    gaps = second.reader.slice_inputs([], [gateway(1)], 0, 1 << 62).plane_gaps
    # All of its 29 s twice: they are in the others' cuts, and its own late one proves nothing of them.
    assert {row["plane"]: row["missing_us"] // 1_000_000 for row in gaps} == {"a": 58, "b": 29}
    second.close()


def test_a_plane_that_is_named_no_longer_leaves_its_streams_without_one(database):
    """It got another name while the manager was away; stream 1 has no I/O under the new one."""

    def cut_at(seq, marks, streams, of):
        cut = make_cut(seq, start_us=T0 + seq * 1_000_000, streams=streams)
        bits = {name: bytes([1 << row]) for name, row in of.items()}
        return dataclasses.replace(cut, extra={"dp": marks, "of": bits})

    def planes(rig):
        rig.drain(final=True)
        return sorted(row["planes"] for row in rig.reader.streams())

    first = Rig(database.config, database.data_dir)
    first.feed(cuts_message([cut_at(n, {"a": n, "b": n}, (1, 2), {"a": 0, "b": 1}) for n in range(1, 4)]))
    assert planes(first) == ["a", "b"]
    first.close()
    second = Rig(database.config, database.data_dir)
    second.feed(cuts_message([cut_at(4, {"c": 1, "b": 4}, (2,), {"b": 0})]))
    assert planes(second) == ["", "b"]
    second.close()


def test_slots_that_get_cuts_late_are_noted(rig):
    """Of another data plane, two minutes after the others' of that time."""
    items = [make_cut(1, start_us=T0 + 120_000_000), make_cut(2, start_us=T0 + 10_000_000)]
    rig.feed(cuts_message(items, recv_us=T0 + 121_500_000))
    [row] = rig.reader.late_cuts(0, T0)
    assert (row["slot_us"], row["gateway_id"]) == (T0, gateway(1))
    assert rig.reader.late_cuts(row["noted_us"], T0) == rig.reader.late_cuts(0, T0 + 1) == []
    rig.clock.advance(1)
    rig.feed(cuts_message([make_cut(3, start_us=T0 + 11_000_000)], recv_us=T0 + 122_500_000))
    assert [each["slot_us"] for each in rig.reader.late_cuts(row["noted_us"], T0)] == [T0]


def test_numbers_left_out_after_a_crash_are_not_taken_for_a_database_that_forgot(database):
    """kill -9 leaves holes in the queue's numbers, where SQL stops and where a file stops."""
    items = [make_cut(seq) for seq in range(1, 5)]
    first = Rig(database.config, database.data_dir)
    first.feed(cuts_message([items[0]]), cuts_message([items[1]]))
    first.die()
    second = Rig(database.config, database.data_dir)
    second.feed(cuts_message([items[2]]))
    assert second.queue.synced_seq > 3
    second.drain(final=True)
    second.die()
    third = Rig(database.config, database.data_dir)
    third.feed(cuts_message([items[3]]))
    third.drain(final=True)
    assert third.store.cursors() == (third.queue.synced_seq,) * 2
    assert_database_holds(third.reader, items)
    assert archived(third) == identity(items)
    third.close()


def test_a_stop_after_a_crash_ends_when_nothing_is_left(database):
    """kill -9 leaves numbers out: behind the newest record there are some that no record has."""
    first = Rig(database.config, database.data_dir)
    first.feed(cuts_message([make_cut(1)]), cuts_message([make_cut(2)]))
    first.die()
    second = Rig(database.config, database.data_dir)
    assert second.queue.synced_seq > 2
    steps = 0
    while second.writer.step(final=True):
        steps += 1
        assert steps < 10
    assert second.store.cursors() == (2, 2)
    assert_database_holds(second.reader, [make_cut(1), make_cut(2)])
    second.close()


def test_records_without_cuts_pass_the_archive_too(rig):
    rig.feed(gateway_message(), record_message([("events", {"event_id": "e"})]))
    rig.drain(final=True)
    assert rig.store.cursors() == (2, 2)
    assert rig.parquet_files() == []


def test_a_full_disk_holds_the_archive_back_and_nothing_else(rig, monkeypatch):
    items = [make_cut(seq) for seq in range(1, 4)]

    def no_space(*_args):
        rig.archive.abort()
        raise ArchiveFailed(rig.parquet_dir, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(rig.archive, "add", no_space)
        rig.feed(cuts_message(items[:1]))
    rig.feed(cuts_message(items[1:2]))
    assert_database_holds(rig.reader, items[:2])
    assert [row["kind"] for row in rig.reader.events()] == ["archive-failed"]
    assert rig.archive.last_seq == 0, "not tried again yet"
    [problem] = rig.writer.problems()
    assert (problem.what, problem.since_us) == ("parquet", T0)
    assert "No space left" in problem.reason
    rig.clock.advance(11)
    rig.feed(cuts_message(items[2:]))
    assert rig.writer.problems() == [problem], "no file stands yet"
    rig.drain(final=True)
    assert rig.writer.problems() == []
    assert sorted(row["kind"] for row in rig.reader.events()) == ["archive-failed", "archive-written"]
    assert archived(rig) == identity(items)


def test_an_archive_that_lags_catches_up_in_bounded_steps(rig, monkeypatch):
    for module in (writers, archive_writers):
        monkeypatch.setattr(module, "STEP_BYTES", 3_000)
    items = [make_cut(seq) for seq in range(1, 30)]
    rig.writer._archive_writer._blocked_until_ns = rig.clock.monotonic_ns() + 1
    rig.feed(*(cuts_message([item]) for item in items))
    assert rig.archive.last_seq == 0
    rig.clock.advance(1)
    rig.drain()
    assert rig.archive.last_seq == len(items)
    rig.drain(final=True)
    assert archived(rig) == identity(items)


def test_a_file_whose_commit_failed_is_committed_later(rig, monkeypatch):
    items = [make_cut(1), make_cut(2)]
    rig.feed(cuts_message(items[:1]))
    rig.clock.advance(61)
    with monkeypatch.context() as patch:
        patch.setattr(rig.store, "commit_file", _gone)
        with pytest.raises(DatabaseUnavailable):
            rig.writer.step()
    assert rig.reader.manifest() == []
    rig.feed(cuts_message(items[1:]))
    assert archived(rig) == identity(items[:1])
    rig.drain(final=True)
    assert archived(rig) == identity(items)


def _gone(*_args):
    raise DatabaseUnavailable("db", "gone")


def test_a_file_commit_whose_answer_was_lost_counts_once(rig, monkeypatch):
    rig.feed(cuts_message([make_cut(1)]))
    commit = rig.store.commit_file

    def answer_lost(finished, oldest):
        assert commit(finished, oldest)
        raise DatabaseUnavailable("db", "connection lost during COMMIT")

    with monkeypatch.context() as patch:
        patch.setattr(rig.store, "commit_file", answer_lost)
        with pytest.raises(DatabaseUnavailable):
            rig.writer.step(final=True)
    rig.drain(final=True)
    assert archived(rig) == identity([make_cut(1)])
    assert rig.writer.parquet_seq == 1


def test_a_restored_manifest_gets_its_files_again(rig):
    """The database forgot the file's row: the file is given up, its cuts come from the queue again."""
    items = [make_cut(seq) for seq in range(1, 4)]
    rig.feed(cuts_message(items[:1]))
    rig.drain(final=True)
    rig.feed(cuts_message(items[1:]))
    with rig.engine.begin() as connection:
        connection.execute(text("DELETE FROM manifest"))
        connection.execute(text("UPDATE consumed SET queue_seq = 0 WHERE queue LIKE '%/parquet'"))
    rig.drain(final=True)
    rig.drain(final=True)
    assert sorted(archived(rig)) == sorted(identity(items))
    assert set(rig.parquet_files()) >= {row["path"] for row in rig.reader.manifest()}


def test_the_thread_survives_a_database_that_is_away(rig, monkeypatch):
    """``run`` waits, tries again, and finishes everything when told to."""
    monkeypatch.setattr(outages, "BACKOFF_FIRST_S", 0.001)
    commit = rig.store.commit
    tries = []

    def away_at_first(window, oldest):
        tries.append(window.last_seq)
        if len(tries) < 4:
            _gone()
        commit(window, oldest)

    monkeypatch.setattr(rig.store, "commit", away_at_first)
    rig.queue.append_many([cuts_message([make_cut(1)])])
    committed = threading.Event()
    monkeypatch.setattr(
        rig.writer, "_probe", lambda point: committed.set() if point == "sql-committed" else None
    )
    thread = threading.Thread(target=rig.writer.run, name="db-writer")
    thread.start()
    assert committed.wait(60)
    rig.queue.append_many([cuts_message([make_cut(2)])])
    rig.writer.finish()
    thread.join(60)
    assert not thread.is_alive()
    assert tries[:4] == [1, 1, 1, 1]
    assert archived(rig) == identity([make_cut(1), make_cut(2)])


def test_the_window_does_not_grow_while_the_database_is_away(rig, monkeypatch):
    items = [make_cut(seq) for seq in range(1, 6)]
    with monkeypatch.context() as patch:
        patch.setattr(rig.store, "commit", _gone)
        for item in items:
            rig.queue.append_many([cuts_message([item])])
            with pytest.raises(DatabaseUnavailable) as caught:
                rig.writer.step()
            rig.writer._on_outage(caught.value)
    waits = rig.writer._background_commit.window
    assert (waits.first_seq, waits.last_seq, rig.writer._window.last_seq) == (1, 1, 0)
    rig.drain()
    assert_database_holds(rig.reader, items)


def test_a_cursor_that_moves_while_refused_records_are_sought(rig, monkeypatch):
    """The database is restored in the middle of it: read again from where it stands."""
    items = [make_cut(seq) for seq in (1, 2, 3)]
    apply, commit = rig.store.apply, rig.store.commit

    def refuses(window, oldest):
        monkeypatch.setattr(rig.store, "commit", commit)
        raise DatabaseRefused("by the test")

    def moved(*_where):
        monkeypatch.setattr(rig.store, "apply", apply)
        raise CursorMoved(0, 1)

    monkeypatch.setattr(rig.store, "commit", refuses)
    monkeypatch.setattr(rig.store, "apply", moved)
    rig.feed(*(cuts_message([item]) for item in items))
    rig.drain(final=True)
    assert_database_holds(rig.reader, items)
    assert archived(rig) == identity(items)


def test_a_window_and_a_file_end_before_they_fill_the_queue(rig):
    """Neither its time nor its size is reached, but the queue could not take more."""
    rig.writer._rest_until_ns = rig.clock.monotonic_ns() + 1_000_000_000
    items = []
    while not rig.writer.parquet_seq:
        items.append(make_cut(len(items) + 1, streams=range(60)))
        rig.feed(cuts_message(items[-1:]))
        assert rig.queue.fullness_ratio < 0.6, "half, and what records take beside their payloads"
    assert rig.writer.sql_seq == rig.writer.parquet_seq == len(items)
    assert len(items) > 3, "it did wait"
    assert_database_holds(rig.reader, items)


def test_a_backlog_is_read_while_a_window_is_committed(rig, monkeypatch):
    items, gate = backlog(rig, monkeypatch, 30)
    commit = rig.writer._background_commit.window
    for _ in range(3):
        assert rig.writer.step()
    assert rig.writer._background_commit.window is commit
    assert rig.writer._window.first_seq == commit.last_seq + 1
    assert rig.archive.last_seq == rig.writer._window.last_seq > commit.last_seq
    assert rig.writer.sql_seq == 0
    gate.go.set()
    rig.drain(final=True)
    assert_database_holds(rig.reader, items)
    assert archived(rig) == identity(items)


def test_in_a_backlog_a_transaction_has_a_third_of_the_time_at_most(rig, monkeypatch):
    """The slower the database, the longer the windows: the same cuts need fewer rows."""
    items, gate = backlog(rig, monkeypatch, 60)
    commit, windows = gate.commit, []

    def slow(window, oldest):
        windows.append(window.last_seq)
        rig.clock.advance(20)
        commit(window, oldest)

    gate.commit = slow
    gate.go.set()
    rig.writer._background_commit._threads.join(60)
    assert rig.writer.step()
    assert [rig.writer.sql_seq] == windows
    rig.clock.advance(39.9)
    assert rig.writer.step()
    rig.writer._background_commit._threads.join(60)
    assert len(windows) == 1
    rig.clock.advance(0.2)
    assert rig.writer.step()
    rig.writer._background_commit._threads.join(60)
    assert len(windows) == 2
    gate.commit = commit
    rig.drain(final=True)
    assert_database_holds(rig.reader, items)


def test_in_a_backlog_a_file_waits_for_its_cuts_and_no_window_is_cut_short(rig, monkeypatch):
    """Bringing its cuts to SQL for the file's sake would commit half a window, and wait for that."""
    items, gate = backlog(rig, monkeypatch, 30)
    rig.clock.advance(3600)  # a file is due
    assert rig.writer.step()
    assert rig.writer._archive_writer._finished is not None
    assert (rig.writer.sql_seq, rig.writer.parquet_seq) == (0, 0), "nobody has waited"
    gate.go.set()
    rig.drain(final=True)
    assert rig.writer.sql_seq == rig.writer.parquet_seq
    assert_database_holds(rig.reader, items)
    assert archived(rig) == identity(items)


def test_a_file_never_counts_before_its_cuts_even_if_a_window_is_refused(rig, monkeypatch):
    items, gate = backlog(rig, monkeypatch, 30)
    for _ in range(2):
        assert rig.writer.step()
    rig.clock.advance(3600)
    assert rig.writer.step()
    assert rig.writer._archive_writer._finished is not None
    assert rig.writer.step()
    commit, commit_file, seen = gate.commit, rig.store.commit_file, []

    def refuses(*_how):
        gate.commit = commit
        raise DatabaseRefused("by the test")

    def noted(finished, oldest):
        seen.append((finished.last_seq, rig.store.cursors()[0]))
        return commit_file(finished, oldest)

    gate.commit = refuses
    monkeypatch.setattr(rig.store, "commit_file", noted)
    gate.go.set()
    rig.clock.advance(3600)  # the next file is due: this one must go
    rig.drain(final=True)
    assert seen
    assert all(file_seq <= sql_seq for file_seq, sql_seq in seen)
    assert_database_holds(rig.reader, items)
    assert archived(rig) == identity(items)


def test_a_disk_that_stays_full_is_one_event_and_its_end_one_also_behind_a_restart(database, monkeypatch):
    first = Rig(database.config, database.data_dir)

    def no_space(*_args):
        first.archive.abort()
        raise ArchiveFailed(first.parquet_dir, "No space left on device")

    monkeypatch.setattr(first.archive, "add", no_space)
    for seq in (1, 2, 3):
        first.feed(cuts_message([make_cut(seq)]))
        first.clock.advance(11)
    assert [row["kind"] for row in first.reader.events()] == ["archive-failed"]
    first.die()
    second = Rig(database.config, database.data_dir, clock=first.clock)
    for seq in (4, 5):
        second.feed(cuts_message([make_cut(seq)]))
        second.drain(final=True)
    assert sorted(row["kind"] for row in second.reader.events()) == ["archive-failed", "archive-written"]
    second.close()


def test_a_database_that_gives_no_answer_is_away_until_it_does(rig, monkeypatch):
    monkeypatch.setattr(writers, "HANGS_S", 0.01)
    gate = Gate(rig.store)
    monkeypatch.setattr(rig.store, "commit", gate)
    rig.queue.append_many([cuts_message([make_cut(1)])])
    working = threading.Thread(target=lambda: (rig.drain(), rig.writer._on_recovery()))
    working.start()
    deadline = Deadline(60)
    while not rig.writer.problems() and not deadline.passed:
        time.sleep(0.01)
    (problem,) = rig.writer.problems()
    assert problem.reason.startswith("the database cannot be used: a transaction has had no answer")
    rig.clock.advance(60)
    gate.go.set()
    working.join(60)
    assert rig.writer.problems() == []
    assert_database_holds(rig.reader, [make_cut(1)])
    assert [row["kind"] for row in rig.reader.events()] == ["database-was-away"]


def test_a_full_disk_stays_a_problem_when_a_file_that_waited_is_committed(rig, monkeypatch):
    _, gate = backlog(rig, monkeypatch, 60)
    rig.clock.advance(3600)
    rig.writer.step()
    assert rig.writer._archive_writer._finished is not None
    gate.go.set()

    def no_space(*_how):
        rig.archive.abort()
        raise ArchiveFailed(rig.parquet_dir, "No space left on device")

    monkeypatch.setattr(rig.archive, "add", no_space)
    while not rig.writer.parquet_seq:
        rig.writer.step()
        rig.clock.advance(0.01)
    assert rig.writer.problems()


def test_a_file_that_waits_holds_back_no_more_than_the_queue_has_room_for(rig, monkeypatch):
    monkeypatch.setattr(writers, "STEP_BYTES", 20_000)
    items = []

    def message():
        items.append(make_cut(len(items) + 1, streams=range(60)))
        return cuts_message(items[-1:])

    while rig.writer._archive_writer.read_bytes < 0.35 * rig.queue.size_bytes:
        rig.feed(message())
    assert rig.writer.parquet_seq == 0
    rig.writer._backlog_until_ns = rig.clock.monotonic_ns() + 15 * 10**9
    while rig.queue.fullness_ratio < 0.93:
        rig.queue.append_many([message()])
    while not rig.writer.parquet_seq:
        rig.writer.step()
    assert rig.writer._read_seq < 0.8 * len(items)
    rig.drain(final=True)
    assert archived(rig) == identity(items)


@pytest.mark.parametrize(
    "error", [DatabaseUnavailable("db", "gone"), DatabaseRefused("by the test"), CursorMoved(0, 1)]
)
def test_a_transaction_that_fails_beside_the_reading_loses_and_doubles_nothing(rig, monkeypatch, error):
    items, gate = backlog(rig, monkeypatch, 30)
    assert rig.writer.step()
    commit = gate.commit

    def fails(*_how):
        gate.commit = commit
        raise error

    failures, wait = [], rig.writer._background_commit.wait

    def noted():
        try:
            return wait()
        except (DatabaseUnavailable, DatabaseRefused, CursorMoved) as exc:
            failures.append(exc)
            raise

    monkeypatch.setattr(rig.writer._background_commit, "wait", noted)
    gate.commit = fails
    gate.go.set()
    try:
        rig.drain(final=True)
    except DatabaseUnavailable as exc:
        rig.writer._on_outage(exc)
        rig.drain(final=True)
    assert (rig.writer._background_commit.window, failures) == (None, [error])
    assert_database_holds(rig.reader, items)
    assert archived(rig) == identity(items)


@pytest.mark.parametrize("error", [DatabaseRefused("by the test"), CursorMoved(0, 1)])
def test_a_window_that_fails_when_nothing_is_left_to_read_is_read_again(rig, monkeypatch, error):
    """The commit is slow: that it failed is seen by the step that finds the queue empty."""
    monkeypatch.setattr(support, "BACKLOG_STEP_BYTES", 1)  # one record a step
    items, gate = backlog(rig, monkeypatch, 5)
    for _ in items[1:]:
        assert rig.writer.step()
    commit = gate.commit

    def fails(*_how):
        gate.commit = commit
        raise error

    gate.commit = fails
    gate.go.set()
    assert rig.writer.step(final=True), "there is more to do"
    rig.drain(final=True)
    assert_database_holds(rig.reader, items)
    assert archived(rig) == identity(items)


def test_finishing_leaves_a_long_backlog_to_the_next_start(database, monkeypatch):
    """A stop is bounded: what was read is committed, the rest is durable in the queue."""
    monkeypatch.setattr(writers, "STEP_BYTES", 1)
    items = [make_cut(seq) for seq in range(1, 9)]
    first = Rig(database.config, database.data_dir)
    for item in items:
        first.queue.append_many([cuts_message([item])])
    steps = first.writer.step

    def slow_step(**how):
        first.clock.advance(2)
        return steps(**how)

    monkeypatch.setattr(first.writer, "step", slow_step)
    first.writer.finish()
    first.writer.run()
    sql_seq, parquet_seq = first.store.cursors()
    assert 0 < sql_seq == parquet_seq < len(items)
    assert_database_holds(first.reader, items[:sql_seq])
    first.close()
    second = Rig(database.config, database.data_dir)
    second.drain(final=True)
    assert_database_holds(second.reader, items)
    assert archived(second) == identity(items)
    second.close()


def test_finishing_does_not_wait_for_a_database_that_is_away(rig, monkeypatch):
    monkeypatch.setattr(rig.store, "commit", _gone)
    rig.queue.append_many([cuts_message([make_cut(1)])])
    rig.writer.finish()
    rig.writer.run()
    assert rig.writer.sql_seq == 0
