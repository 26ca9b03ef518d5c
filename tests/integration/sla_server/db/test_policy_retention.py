"""Old policies leave, but for those that are needed; time is a fake clock's."""

from __future__ import annotations

import pytest
from sqlalchemy import insert, update

from sla_server.db import policy_retention, schema
from sla_server.db.engine import begin
from sla_server.db.policies import PolicyStore, open_policies
from sla_server.db.policy_retention import KEPT
from tests.support.database import Rig

DAY_S = 86_400
HOURS = 4


@pytest.fixture
def store(database, rig):
    opened = open_policies(database.config, database.data_dir)
    opened._clock = rig.clock
    yield opened
    opened.close()


def publish(store: PolicyStore, *backends: str, state: str = "published") -> int:
    caps = [{"volume": "v", "hour_of_week": hour, "cost_per_s": 1.0} for hour in range(HOURS)]
    fits = [{"backend": name, "cost_bytes": 0.5, "cost_write": 1.0} for name in backends]
    return store.publish(caps, job={}, report={"cost_model": fits}, published_by="timer", state=state)


def set_state(rig: Rig, version: int, state: str) -> None:
    with begin(rig.engine) as connection:
        table = schema.policies
        connection.execute(update(table).where(table.c.version == version).values(state=state))


def retain(rig: Rig) -> int:
    steps = 1
    while rig.retention.step():
        steps += 1
    return steps


def versions(rig: Rig) -> list[int]:
    """Of policies and of caps; those of both are the same."""
    found = sorted(row["version"] for row in rig.reader.policies(limit=1000))
    assert found == [v for v in range(1, max(found) + 1) if len(rig.reader.policy_caps(v)) == HOURS]
    return found


def test_old_policies_leave_but_for_the_last_ten_and_those_in_use(store, rig):
    for number in range(20):
        publish(store, state="rejected" if number >= 12 else "published")
    set_state(rig, 1, "pinned")
    rig.clock.advance(89 * DAY_S)
    retain(rig)
    assert versions(rig) == list(range(1, 21)), "younger than policies_days"
    rig.clock.advance(2 * DAY_S)
    retain(rig)
    # The last ten are 11 to 20. Of those that may be in force after rollbacks 3 to 12 are the last.
    assert versions(rig) == [1, *range(3, 21)]
    set_state(rig, 1, "superseded")
    for _ in range(KEPT):
        publish(store)
    retain(rig)
    assert versions(rig) == list(range(21, 31))


def test_the_newest_fit_of_a_backend_stays_however_old_it_is(store, rig):
    publish(store, "a")
    publish(store, "a", "b")  # the newest fit of b
    publish(store, "c")
    publish(store, "a")
    publish(store)
    set_state(rig, 4, "pinned")
    for _ in range(KEPT):
        publish(store, "a", "c")
    rig.clock.advance(91 * DAY_S)
    retain(rig)
    # c of version 3 is the newest up to the one in force, which is 4.
    assert versions(rig) == [2, 3, 4, *range(6, 16)]
    set_state(rig, 4, "superseded")
    retain(rig)
    assert versions(rig) == [2, *range(6, 16)]


def test_caps_leave_in_steps_after_their_version_and_a_restart_goes_on(store, rig, monkeypatch):
    monkeypatch.setattr(policy_retention, "STEP_ROWS", 3)
    for _ in range(KEPT + 2):
        publish(store)
    rig.clock.advance(91 * DAY_S)
    assert rig.retention.step()
    assert [row["version"] for row in rig.reader.policies(limit=100)] == list(range(KEPT + 2, 2, -1))
    assert [len(rig.reader.policy_caps(version)) for version in (1, 2, 3)] == [1, 4, 4]
    rig.retention = type(rig.retention)(rig.engine, rig.retention._settings, rig.clock)
    assert retain(rig) == 3
    assert versions(rig) == list(range(3, KEPT + 3))


def test_a_policy_without_a_time_and_one_with_a_damaged_report_harm_nothing(store, rig):
    with begin(rig.engine) as connection:
        for version, created_us in ((1, 0), (2, 1)):
            row = {"version": version, "created_us": created_us, "state": "rolled-back", "report": "{"}
            connection.execute(insert(schema.policies), {**row, "job": "{}"})
    for _ in range(KEPT):
        publish(store)
    retain(rig)
    with begin(rig.engine) as connection:
        found = connection.execute(schema.policies.select().with_only_columns(schema.policies.c.version))
        assert sorted(found.scalars()) == [1, *range(3, KEPT + 3)]
