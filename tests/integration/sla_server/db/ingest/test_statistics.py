"""Histograms are remembered from transaction to transaction, and exact whatever happens to one of them."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from sqlalchemy import event, text

from pmdaemon.wire.cut import Cut
from sla_server.db.archive.manifest import MOVED_KEY, raise_boundary
from sla_server.db.engine import begin
from sla_server.db.errors import DatabaseUnavailable
from sla_server.db.ingest import statistics
from tests.support.database import Rig
from tests.support.samples import MINUTE_US, T0, assert_database_holds, cuts_message, make_cut


def reads_of(rig: Rig) -> Counter[str]:
    """Counts statements that read stored histograms, by table; retention is not due meanwhile."""
    rig.writer.step()
    found = Counter[str]()

    @event.listens_for(rig.engine, "before_cursor_execute")
    def _count(*how: Any) -> None:
        words = how[2].split()
        if words[0] == "SELECT" and ".hist" in how[2]:
            found[words[words.index("FROM") + 1]] += 1

    return found


def at(seq: int, slot: int, streams: Any = (1, 2)) -> Cut:
    """A cut of the slot of that number."""
    return make_cut(seq, start_us=T0 + slot * MINUTE_US + seq % 50 * 1_000_000, streams=streams)


def test_a_slot_and_an_hour_are_read_once(rig: Rig) -> None:
    reads, items = reads_of(rig), [at(seq, 0) for seq in range(1, 9)]
    for item in items:
        rig.feed(cuts_message([item]))
    assert reads == {"rollups": 1, "rollup_hours": 1}
    items.append(at(9, 0, streams=(2, 3)))
    rig.feed(cuts_message(items[-1:]))
    assert reads == {"rollups": 2, "rollup_hours": 2}, "stream 3 was not known"
    items.append(at(10, 1))
    rig.feed(cuts_message(items[-1:]))
    assert reads == {"rollups": 3, "rollup_hours": 2}
    items += [at(11, 0, streams=(1, 2, 3)), at(12, 1)]
    for item in items[-2:]:
        rig.feed(cuts_message([item]))
    assert reads == {"rollups": 3, "rollup_hours": 2}, "the slot before is open, too"
    assert_database_holds(rig.reader, items)


def test_a_restart_reads_them_once(database: Any) -> None:
    items = [at(seq, 0) for seq in (1, 2, 3)]
    first = Rig(database.config, database.data_dir)
    first.feed(cuts_message(items[:1]))
    first.die()
    second = Rig(database.config, database.data_dir)
    reads = reads_of(second)
    second.feed(cuts_message(items[1:2]))
    second.feed(cuts_message(items[2:]))
    assert reads == {"rollups": 1, "rollup_hours": 1}
    assert_database_holds(second.reader, items)
    second.close()


@pytest.mark.parametrize(("name", "value"), [("REMEMBERED_BYTES", 300), ("REMEMBERED_TIMES", 0)])
def test_what_is_remembered_is_bounded(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, name: str, value: int
) -> None:
    monkeypatch.setattr(statistics, name, value)
    items = [at(seq, slot) for seq, slot in enumerate((0, 1, 2, 3, 0, 1, 2, 3, 60, 3), 1)]
    for item in items:
        rig.feed(cuts_message([item]))
        assert not rig.store._histograms._blobs
    assert_database_holds(rig.reader, items)


def test_the_newest_slots_that_were_used_last_are_remembered(rig: Rig) -> None:
    rig.writer.step()  # retention
    items = [at(seq, slot) for seq, slot in enumerate((0, 1, 2, 3), 1)]
    rig.feed(cuts_message(items))
    slots = [time_us for name, time_us in rig.store._histograms._blobs if name == "rollups"]
    assert slots == [T0 + 3 * MINUTE_US, T0 + 2 * MINUTE_US]
    items.append(at(5, 0))
    rig.feed(cuts_message(items[-1:]))
    slots = [time_us for name, time_us in rig.store._histograms._blobs if name == "rollups"]
    assert slots == [T0, T0 + 3 * MINUTE_US]
    assert_database_holds(rig.reader, items)


def test_a_database_that_was_restored_is_read_again(rig: Rig) -> None:
    """To before the newest transaction, of which the queue has nothing any more."""
    items = [at(seq, 0) for seq in (1, 2, 3)]
    names = (
        "rollups",
        "rollup_hours",
        "rollup_missed",
        "coverage",
        "streams",
        "ingest_watermark",
        "consumed",
    )
    rig.feed(cuts_message(items[:1]))
    with rig.engine.begin() as connection:
        stored = {name: connection.execute(text(f"SELECT * FROM {name}")).mappings().all() for name in names}
    rig.feed(cuts_message(items[1:2]))
    with rig.engine.begin() as connection:
        for name, rows in stored.items():
            connection.execute(text(f"DELETE FROM {name}"))
            for row in rows:
                columns = ", ".join(row.keys())
                values = ", ".join(f":{key}" for key in row)
                connection.execute(text(f"INSERT INTO {name} ({columns}) VALUES ({values})"), dict(row))
    rig.queue.delete_through(2)
    rig.queue._queue.delete_through(2)
    rig.feed(cuts_message(items[2:]))
    assert_database_holds(rig.reader, [items[0], items[2]])


def test_what_was_deleted_or_moved_is_not_remembered(rig: Rig) -> None:
    """By retention, and to a file: rows of a slot that was moved before may be moved again."""
    items = [at(seq, 0) for seq in range(1, 6)]
    reads = reads_of(rig)
    for number, item in enumerate(items):
        if number in (1, 2):
            with begin(rig.engine) as connection:
                for name in ("rollups", "rollup_missed"):
                    connection.execute(text(f"DELETE FROM {name}"))
                if number == 1:
                    rig.clock.advance(601)
                else:
                    raise_boundary(connection, MOVED_KEY, T0 + MINUTE_US)
            if number == 1:
                rig.writer.step()
        rig.feed(cuts_message([item]))
    assert reads["rollups"] == len(items)
    with rig.engine.connect() as connection:
        arrived = connection.execute(text("SELECT sum(reads + writes) FROM rollups")).scalar_one()
        blobs = connection.execute(text("SELECT hist FROM rollups")).scalars().all()
    found = sum(int(entry["count"]) for blob in blobs for entry in _entries(bytes(blob)))
    assert found == arrived == sum(int((i.column("reads") + i.column("writes")).sum()) for i in items[2:])


def _entries(blob: bytes) -> Any:
    import numpy as np

    from sla_server.db.histogram_codec import ENTRY

    return np.frombuffer(blob, dtype=ENTRY)


@pytest.mark.parametrize("seed", range(3))
def test_random_histories_of_failures_are_exact(rig: Rig, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Before the commit and after it, of slots in any order, with more of them than are remembered."""
    rng, commit, move = random.Random(seed), rig.store.commit, rig.store._raise
    items: list[Cut] = []
    failed = Counter[str]()

    def fails(*how: Any) -> None:
        monkeypatch.setattr(rig.store, "_raise", move)
        monkeypatch.setattr(rig.store, "commit", commit)
        if fault == "commit":  # it had its effect, and the answer was lost
            commit(*how)
        raise DatabaseUnavailable("db", "gone")

    for seq in range(1, 41):
        numbers = rng.sample(range(1, 7), rng.randint(1, 5))
        items.append(at(seq, rng.choice((0, 0, 1, 2, 3, 61)), streams=numbers))
        rig.queue.append_many([cuts_message(items[-1:])])
        fault = rng.choice(("", "_raise", "commit"))
        if fault:
            monkeypatch.setattr(rig.store, fault, fails)
        try:
            rig.drain()
        except DatabaseUnavailable:
            failed[fault] += 1
    rig.drain(final=True)
    assert min(failed["_raise"], failed["commit"]) > 3
    assert_database_holds(rig.reader, items)
