"""The policy job's door: one publishing transaction."""

from __future__ import annotations

import contextlib
import threading

import pytest
from sqlalchemy import event, text

from sla_server.db import policies
from sla_server.db.errors import DatabaseRefused
from sla_server.db.policies import open_policies
from sla_server.db.queries import policies as policy_queries
from sla_server.errors import JobRunning
from sla_server.jobs import noted
from tests.support.samples import cuts_message, make_cut, record_message

CAP = {"volume": "vol-1", "hour_of_week": 3, "cost_per_s": 120.5, "demand_p50": 10.0, "demand_p95": 90.0}
META = {"job": {"rows": 3}, "report": {"fit": "none"}, "published_by": "timer"}


@pytest.fixture
def store(database, rig):
    opened = open_policies(database.config, database.data_dir)
    yield opened
    opened.close()


def test_versions_count_up_and_come_with_their_caps(store, rig):
    assert store.publish([CAP], **META) == 1
    assert store.publish([{**CAP, "cost_per_s": None}], **META) == 2
    newest, oldest = rig.reader.policies()
    assert (newest["version"], newest["state"], newest["report"]) == (2, "published", {"fit": "none"})
    assert oldest["job"] == {"rows": 3}
    assert rig.reader.policy_caps(1) == [{"version": 1, **CAP, "burst_s": None}]
    assert rig.reader.policy_caps(2, 3)[0]["cost_per_s"] is None
    assert rig.reader.policy_caps(2, 4) == []
    assert store.publish([{**CAP, "burst_s": 2.5}], **META) == 3
    assert rig.reader.policy_caps(3)[0]["burst_s"] == 2.5


def test_publishing_is_all_or_nothing(store, rig):
    with pytest.raises(DatabaseRefused):
        store.publish([CAP, CAP], **META)
    assert rig.reader.policies() == []
    assert store.publish([CAP], **META) == 1


@pytest.mark.parametrize(
    "wrong", [{"hour_of_week": 168}, {"hour_of_week": -1}, {"cost_per_s": 0.0}, {"cost_per_s": -1}]
)
def test_wrong_caps_are_refused(store, rig, wrong):
    with pytest.raises(ValueError, match=r"hour_of_week|cost_per_s"):
        store.publish([{**CAP, **wrong}], **META)
    assert rig.reader.policies() == []


def test_caps_of_a_large_fleet_come_as_a_stream(store, rig, monkeypatch):
    """They are never all in memory as objects; a wrong one among the last leaves nothing."""
    monkeypatch.setattr(policies, "ROWS_AT_A_TIME", 10)
    taken = []

    def caps(last):
        for number in range(last + 1):
            taken.append(number)
            yield {**CAP, "volume": f"vol-{number:03}", "cost_per_s": 1.0 if number < 35 else 0.0}

    assert store.publish(caps(34), **META) == 1
    assert len(rig.reader.policy_caps(1)) == len(taken) == 35
    with pytest.raises(ValueError, match="cost_per_s"):
        store.publish(caps(35), **META)
    assert [row["version"] for row in rig.reader.policies()] == [1]


def test_hours_with_a_cap_come_in_pages(store, rig, monkeypatch):
    """Those without one, of a large fleet some millions, do not come at all."""
    monkeypatch.setattr(policy_queries, "CAPS_A_PAGE", 2)
    caps = [
        {**CAP, "volume": volume, "hour_of_week": hour, "cost_per_s": 5.0 if hour % 2 else None}
        for volume in ("a", "a:b", "c")
        for hour in (1, 2, 3, 101)
    ]
    version = store.publish(caps, **META)
    store.publish(caps[:2], **META)
    wanted = [row for row in rig.reader.policy_caps(version) if row["cost_per_s"] is not None]
    assert list(rig.reader.capped_hours(version)) == wanted
    assert len(wanted) == 9
    assert list(rig.reader.capped_hours(99)) == []


def test_only_one_policy_is_in_force(store, rig):
    for _ in range(3):
        store.publish([CAP], **META)
    for version in (1, 3):
        rig.feed(record_message([("policies", {"version": version, "state": "in-force"})]))
    states = {row["version"]: row["state"] for row in rig.reader.policies()}
    assert states == {1: "superseded", 2: "published", 3: "in-force"}
    assert rig.reader.policies()[0]["job"] == {"rows": 3}


def test_what_is_in_force_follows_pins_and_rollbacks(store, rig):
    for state in ("published", "published", "published", "rejected"):
        store.publish([CAP], state=state, **META)
    assert rig.reader.policy_in_force() is None
    assert rig.reader.usable_policy() == {"version": 3, "state": "published"}
    for version, state in ((3, "in-force"), (3, "rolled-back"), (2, "in-force"), (1, "pinned")):
        rig.feed(record_message([("policies", {"version": version, "state": state})]))
    states = {row["version"]: row["state"] for row in rig.reader.policies()}
    assert states == {1: "pinned", 2: "superseded", 3: "rolled-back", 4: "rejected"}
    assert rig.reader.policy_in_force() == {"version": 1, "state": "pinned"}
    assert rig.reader.usable_policy() == {"version": 2, "state": "superseded"}
    assert rig.reader.usable_policy({2}) == {"version": 1, "state": "pinned"}
    assert rig.reader.policy(4)["report"] == {"fit": "none"}
    assert rig.reader.policy(5) is None


@pytest.mark.parametrize("let_go", [(4, "in-force"), (2, "pinned")], ids=["unpinned", "another is pinned"])
def test_a_rejected_policy_is_in_force_only_while_it_is_pinned(store, rig, let_go):
    for state in ("published", "published", "published", "rejected"):
        store.publish([CAP], state=state, **META)

    def record(*changes):
        for version, state in changes:
            rig.feed(record_message([("policies", {"version": version, "state": state})]))

    record((3, "in-force"), (4, "pinned"))
    assert rig.reader.policy_in_force() == {"version": 4, "state": "rejected-pinned"}
    assert rig.reader.usable_policy() == {"version": 3, "state": "superseded"}
    record(let_go)
    assert rig.reader.policy(4)["state"] == "rejected"
    record((3, "in-force"), (3, "rolled-back"))
    assert rig.reader.usable_policy() == {
        "version": 2,
        "state": "published" if let_go[0] == 4 else "superseded",
    }
    assert rig.reader.policy_in_force() is None


def test_of_several_pins_stored_together_the_last_one_holds(store, rig):
    for _ in range(2):
        store.publish([CAP], **META)
    rig.feed(record_message([("policies", {"version": v, "state": "pinned"}) for v in (1, 2, 1)]))
    assert rig.reader.policy_in_force() == {"version": 1, "state": "pinned"}


def test_what_differs_between_two_policies(store, rig):
    def cap(volume, hour, cost):
        return {**CAP, "volume": volume, "hour_of_week": hour, "cost_per_s": cost}

    one = [cap("a", 1, 10.0), cap("a", 2, 20.0), cap("a", 3, None), cap("b", 1, 5.0), cap("c", 1, 7.0)]
    two = [cap("a", 1, 8.0), cap("a", 2, 30.0), cap("a", 3, 9.0), cap("b", 1, 5.0), cap("c", 1, None)]
    store.publish(one, **META)
    store.publish(two, **META)
    first = {"volume": "a", "hours": 3, "added": 1, "removed": 0, "lowered": 1, "raised": 1}
    first |= {"lowest_before": 10.0, "lowest_after": 8.0}
    last = {"volume": "c", "hours": 1, "added": 0, "removed": 1, "lowered": 0, "raised": 0}
    last |= {"lowest_before": 7.0, "lowest_after": None}
    assert rig.reader.policy_changes(1, 2, 10) == [first, last]
    assert rig.reader.policy_changes(1, 2, 1) == [first]
    assert rig.reader.policy_changes(1, 2, 1, "a") == [last]
    assert rig.reader.policy_changes(2, 2, 10) == []
    assert [row["hour_of_week"] for row in rig.reader.policy_caps(2, volume="a")] == [1, 2, 3]


def test_runs_of_jobs_are_noted_and_a_killed_one_is_found(store, rig):
    killed = store.begin_job("policy", "ann")
    other = store.begin_job("space", "ann")
    done = store.begin_job("policy", "timer")
    store.report_job(done, text="Spark computes", rows=7)
    store.end_job(done, "done", 0, version=3)
    rows = {row["job_id"]: row for row in rig.reader.jobs()}
    assert {key: row["state"] for key, row in rows.items()} == {
        killed: "killed",
        other: "running",
        done: "done",
    }
    row = rows[done]
    assert (row["who"], row["rows"], row["exit_status"], row["version"]) == ("timer", 7, 0, 3)
    assert row["started_us"] <= row["ended_us"]
    (newest,) = rig.reader.jobs(1)
    assert {row["job_id"] for row in rig.reader.jobs(9, newest["cursor"])} == rows.keys() - {newest["job_id"]}


def test_runs_over_one_database_have_one_lock_wherever_their_files_are(database, rig, tmp_path):
    """As those of ``sla-policy.timer`` and of ``sla-job@policy.timer``; on SQLite files lie where it does."""
    with (
        contextlib.closing(open_policies(database.config, database.data_dir)) as first,
        contextlib.closing(open_policies(database.config, database.data_dir)) as second,
    ):
        if first._engine.dialect.name != "postgresql":  # which of both this one is
            pytest.skip("the lock of its directory is that of the database")
        with noted(first, "policy", "timer"):
            with (
                pytest.raises(JobRunning, match="another policy job is running"),
                noted(second, "policy", "ann"),
            ):
                pytest.fail("both run")
            with noted(second, "space", "ann"), first.alone("policy"):
                pass  # another job; and the same store once more
        assert [row["state"] for row in rig.reader.jobs()] == ["done", "done"], "none was taken for killed"
        with noted(second, "policy", "ann"):
            pass


def test_the_session_of_a_lock_may_be_silent_but_not_dead(database):
    """By default PostgreSQL asks after two hours whether the machine of a session lives still."""
    with contextlib.closing(open_policies(database.config, database.data_dir)) as store:
        if store._engine.dialect.name != "postgresql":
            pytest.skip("the lock of a file ends with its process")

        @event.listens_for(store._engine, "connect")
        def limited(connection, _record):
            connection.execute("SET idle_session_timeout = 300000")  # as an administrator may have it
            connection.commit()

        asked = []
        event.listen(store._engine, "before_cursor_execute", lambda *given: asked.append(given[2:4]))
        connection = store._locked("policy")
        assert connection.scalar(text("SHOW idle_session_timeout")) == "0"
        # These are of TCP: of a socket in the file system PostgreSQL shows 0, whatever they are.
        (said,) = (str(each) for each in asked if "tcp_keepalives_idle" in str(each))
        assert "('tcp_keepalives_idle', '10'), ('tcp_keepalives_interval', '5')" in said
        assert "('tcp_keepalives_count', '4')" in said
        connection.close()


def test_jobs_that_publish_at_once_get_different_versions(database, rig):
    versions = []

    def publish():
        with contextlib.closing(open_policies(database.config, database.data_dir)) as store:
            versions.append(store.publish([CAP], **META))

    threads = [threading.Thread(target=publish, name=f"job-{number}") for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(versions) == [1, 2, 3, 4]


def test_ingest_goes_on_beside_a_long_read(rig):
    """A read transaction stays open while the writer commits: neither waits, and it keeps its view."""
    count = text("SELECT count(*) FROM streams")
    with rig.reader._engine.connect() as connection:
        if connection.dialect.name == "postgresql":
            connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        assert connection.execute(count).scalar() == 0
        rig.feed(cuts_message([make_cut(1)]))
        assert connection.execute(count).scalar() == 0
    assert rig.reader.totals()["cuts"] == 2
