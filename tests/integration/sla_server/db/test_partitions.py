"""Old rows leave on both databases; partitions come and go on PostgreSQL. Time is a fake clock's."""

from __future__ import annotations

import pytest
from sqlalchemy import func, insert, select, text

from sla_server.audit_chain import ChainCheck
from sla_server.db import partitions, schema
from sla_server.db.engine import begin
from sla_server.db.errors import DatabaseUnavailable
from sla_server.db.partitions import DAY_US, SPANS
from sla_server.services.requests import BACKEND_MODES, POLICY_MODE
from tests.support.database import Rig
from tests.support.samples import (
    T0,
    assert_database_holds,
    cuts_message,
    gateway,
    make_cut,
    record_message,
    stream,
)

DAY_S = 86_400
MODES = ("mode", BACKEND_MODES, POLICY_MODE)


def count(rig, name):
    with begin(rig.engine) as connection:
        return connection.execute(select(func.count()).select_from(schema.metadata.tables[name])).scalar()


def parts(rig, table="rollups"):
    with begin(rig.engine) as connection:
        return partitions.existing(connection, table)


def default_rows(rig, table="rollups"):
    with begin(rig.engine) as connection:
        return connection.execute(text(f"SELECT count(*) FROM {table}_default")).scalar()


def retain(rig):
    """All steps of one turn."""
    while rig.retention.step():
        pass


def test_rollups_leave_first_hours_later_and_sums_stay(rig):
    rig.feed(cuts_message([make_cut(1), make_cut(2)]))
    reads = rig.reader.totals()["reads"]
    days = rig.retention._settings
    rig.clock.advance((days.rollups_days - 1) * DAY_S)
    retain(rig)
    assert (count(rig, "rollups"), count(rig, "rollup_missed")) == (2, 4)
    rig.clock.advance(3 * DAY_S)
    retain(rig)
    assert [count(rig, name) for name in ("rollups", "rollup_missed", "coverage", "rollup_hours")] == [
        0,
        0,
        1,
        2,
    ]
    rig.clock.advance(days.coverage_days * DAY_S)
    retain(rig)
    assert [count(rig, name) for name in ("coverage", "rollup_hours")] == [0, 2]
    rig.clock.advance((days.hours_days + 8) * DAY_S)
    retain(rig)
    assert count(rig, "rollup_hours") == 0
    assert rig.reader.totals()["reads"] == reads
    assert rig.reader.watermarks()[0][2] == 2


def test_what_is_open_stays_and_what_is_over_leaves(rig):
    old = {"start_us": T0, "objective": "latency", "revision": 1, "name": "gold"}
    rig.feed(
        record_message(
            [
                ("slices", old),
                ("episodes", {"episode_id": "open", "opened_us": T0}),
                ("episodes", {"episode_id": "closed", "opened_us": T0, "closed_us": T0 + 1}),
                ("throttles", {"throttle_id": "seen", "state": "seen", "requested_us": T0}),
                ("throttles", {"throttle_id": "over", "state": "released", "requested_us": T0}),
                ("events", {"event_id": "old", "at_us": T0}),
                ("events", {"event_id": "no time"}),
                ("audit", {"audit_id": "a", "at_us": T0}),
                *(("audit", {"audit_id": name, "at_us": T0, "action": name}) for name in MODES),
            ]
        )
    )
    rig.clock.advance(400 * DAY_S)
    rig.feed(record_message([("events", {"event_id": "new", "at_us": rig.clock.unix_us()})]))
    retain(rig)
    assert count(rig, "slices") == 0
    assert [row["episode_id"] for row in rig.reader.episodes()] == ["open"]
    assert [row["throttle_id"] for row in rig.reader.throttles()] == ["seen"]
    assert {row["event_id"] for row in rig.reader.events()} == {"new", "no time"}
    assert count(rig, "audit") == 1 + len(MODES)
    rig.clock.advance(700 * DAY_S)
    retain(rig)
    left = {row["action"] for row in rig.reader.audit()}
    assert left == {*MODES, "audit-pruned"}, "services start with them; the chain says what has left"
    check = ChainCheck()
    for row in rig.reader.access.audit_chain(0, 100):
        check.add(row)
    assert (check.end(), check.rows) == ([], 1 + len(MODES))


def test_decisions_leave_and_say_how_far_back_they_reach(rig):
    def reach():
        return int(rig.reader.meta(partitions.DECISIONS_KEY))

    rig.drain()
    began_us = rig.clock.unix_us()
    assert reach() == began_us, "an older release stored none"
    rows = [{"decision_id": "old", "at_us": began_us, "kind": "start", "figures": {"c_after": 5.0}}]
    rig.feed(record_message([("decisions", row) for row in rows]))
    rig.clock.advance(29 * DAY_S)
    retain(rig)
    assert (count(rig, "decisions"), reach()) == (1, began_us)
    rig.clock.advance(2 * DAY_S)
    retain(rig)
    assert (count(rig, "decisions"), reach()) == (0, rig.clock.unix_us() - 30 * DAY_US)
    with begin(rig.engine) as connection:  # a clock that was ahead, and under which all were deleted
        connection.execute(
            text("UPDATE meta SET value = :ahead WHERE key = :key"),
            {"ahead": str(rig.clock.unix_us() + 900 * DAY_US), "key": partitions.DECISIONS_KEY},
        )
    retain(rig)
    assert reach() == rig.clock.unix_us()


def test_ranges_leave_in_small_steps(rig, monkeypatch):
    monkeypatch.setattr(partitions, "STEP_ROWS", 4)
    rig.feed(record_message([("events", {"event_id": str(n), "at_us": T0 + n}) for n in range(10)]))
    rig.clock.advance(100 * DAY_S)
    left = []
    while rig.retention.step():
        left.append(count(rig, "events"))
    assert left == [6, 2]
    assert count(rig, "events") == 0


def epochs(rig, number):
    """Epochs of a gateway in SQL, as numbers."""
    return sorted(epoch for name, epoch, _ in rig.reader.watermarks() if name == gateway(number))


def test_old_epochs_leave_but_the_newest_of_each_gateway_stay(rig, monkeypatch):
    monkeypatch.setattr(partitions, "KEPT_EPOCHS", 3)
    monkeypatch.setattr(partitions, "STEP_GATEWAYS", 1)
    ages = {  # days since each epoch, in the order of the numbers 1, 2, ...
        1: [50, 45, 40, 35, 1],
        2: [50, 45, 40],
        3: [60, 50, 29, 20, 10, 5],
        4: [90, 0.5],
    }
    now_us = rig.clock.unix_us()
    rows = [
        {
            "gateway_id": gateway(number),
            "epoch": str(epoch),
            "seq": 7,
            "updated_us": now_us - round(days * DAY_US),
        }
        for number, its in ages.items()
        for epoch, days in enumerate(its, 1)
    ]
    never = {"gateway_id": gateway(3), "epoch": "99", "seq": 1, "updated_us": 0}
    with begin(rig.engine) as connection:
        connection.execute(insert(schema.ingest_watermark), [*rows, never])
    retain(rig)
    assert epochs(rig, 1) == [3, 4, 5], "40 and 35 days old, but among its newest three"
    assert epochs(rig, 2) == [1, 2, 3]
    assert epochs(rig, 3) == [3, 4, 5, 6, 99], "young, or without a time"
    assert epochs(rig, 4) == [1, 2]
    rig.clock.advance(40 * DAY_S)
    retain(rig)
    assert epochs(rig, 3) == [4, 5, 6, 99]


def test_the_writer_takes_its_turns(rig):
    rig.drain()
    rig.feed(record_message([("events", {"event_id": "old", "at_us": T0})]))
    rig.clock.advance(100 * DAY_S)
    rig.drain()
    assert count(rig, "events") == 0


def test_events_of_a_far_future_leave_and_nan_is_read_as_nothing(rig):
    """As an agent of an older release could have stored them: the newest for ever."""
    now_us = rig.clock.unix_us()
    ages = {
        "poison": (1 << 62) - now_us,
        "far": 91 * DAY_US,
        "near": 89 * DAY_US,
        "now": 0,
        "old": -91 * DAY_US,
    }
    rows = [
        ("events", {"event_id": name, "at_us": now_us + age_us, "kind": "k"}) for name, age_us in ages.items()
    ]
    rig.drain()
    rig.feed(record_message(rows))
    with begin(rig.engine) as connection:
        connection.execute(
            text("UPDATE events SET details = '{\"n\": NaN, \"m\": 1}' WHERE event_id = 'poison'")
        )
        connection.execute(text("UPDATE events SET details = 'no json' WHERE event_id = 'now'"))
    assert [row["event_id"] for row in rig.reader.events(until_us=now_us)] == ["now", "old"]
    found = {row["event_id"]: row["details"] for row in rig.reader.events()}
    assert (found["poison"], found["now"]) == ({"n": None, "m": 1}, "no json")
    retain(rig)
    assert {row["event_id"] for row in rig.reader.events()} == {"near", "now"}


def test_rows_of_any_time_are_stored_and_leave(rig):
    """Long before what partitions are made for: the default partition holds them, if there is one."""
    old = make_cut(1, start_us=T0 - 40 * DAY_US)
    new = make_cut(2, start_us=T0 + 2 * DAY_US)
    rig.drain()  # the first turn of retention is over
    rig.feed(cuts_message([old]), cuts_message([new]))
    assert_database_holds(rig.reader, [old, new])
    retain(rig)
    rows = rig.reader.slice_inputs([stream(1), stream(2)], [gateway(1)], 0, 1 << 62)
    assert {row["slot_us"] for row in rows.rows} == {T0 + 2 * DAY_US}
    assert {row["slot_us"] for row in rows.missed} == {T0 + 2 * DAY_US}


@pytest.fixture
def pg_rig(request, postgres, migrated_template, tmp_path):
    from sla_server.db.config import DatabaseConfig

    name = f"parts_{abs(hash(request.node.name)) % 10**9}"
    opened = Rig(DatabaseConfig(url=postgres.create(name, migrated_template)), tmp_path)
    yield opened
    opened.close()


@pytest.mark.db
def test_partitions_are_made_ahead_and_dropped(pg_rig):
    day = T0 // DAY_US * DAY_US
    assert [part.from_us for part in parts(pg_rig)] == [day + n * DAY_US for n in range(-2, 4)]
    assert parts(pg_rig)[2].name == "rollups_20270115"
    pg_rig.feed(cuts_message([make_cut(1)]))
    assert default_rows(pg_rig) == 0
    pg_rig.clock.advance(DAY_S)
    retain(pg_rig)
    assert parts(pg_rig)[-1].from_us == day + 4 * DAY_US
    pg_rig.clock.advance(15 * DAY_S)
    retain(pg_rig)
    limit_us = pg_rig.clock.unix_us() - 14 * DAY_US
    for table in SPANS:
        kept = parts(pg_rig, table)
        assert kept, table
        if table in ("rollups", "rollup_missed"):
            assert min(part.to_us for part in kept) > limit_us
        assert kept[-1].to_us > pg_rig.clock.unix_us() + 3 * DAY_US
    assert count(pg_rig, "rollups") == 0


@pytest.mark.db
def test_a_day_that_the_default_partition_holds_already_is_left_to_it(pg_rig):
    """The manager was down, or its clock was wrong: what came meanwhile must not stop what comes next."""
    future = make_cut(1, start_us=T0 + 6 * DAY_US)
    pg_rig.feed(cuts_message([future]))
    assert default_rows(pg_rig) == 2
    pg_rig.clock.advance(4 * DAY_S)
    retain(pg_rig)
    day = T0 // DAY_US * DAY_US
    starts = [part.from_us for part in parts(pg_rig)]
    assert day + 5 * DAY_US in starts
    assert day + 6 * DAY_US not in starts
    assert day + 7 * DAY_US in starts
    more = make_cut(2, start_us=T0 + 6 * DAY_US + 120_000_000)
    pg_rig.feed(cuts_message([more]))
    assert_database_holds(pg_rig.reader, [future, more])


@pytest.mark.db
def test_a_reader_delays_the_drop_and_nothing_else(pg_rig, monkeypatch):
    monkeypatch.setattr(partitions, "LOCK_WAIT_MS", 50)
    pg_rig.feed(cuts_message([make_cut(1)]))
    with pg_rig.reader._engine.connect() as reading:
        reading.execute(text("SELECT count(*) FROM rollups")).all()
        pg_rig.clock.advance(20 * DAY_S)
        with pytest.raises(DatabaseUnavailable, match="lock timeout"):
            pg_rig.retention.step()
        pg_rig.feed(cuts_message([make_cut(2, start_us=T0 + 20 * DAY_US)]))
        assert pg_rig.store.cursors()[0] == 2
        assert count(pg_rig, "rollups") == 4
    retain(pg_rig)
    assert count(pg_rig, "rollups") == 2
