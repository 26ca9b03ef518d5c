"""Reports of policies, large as they are, are read once a version, however often pages ask."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from sqlalchemy import Connection, Executable, create_engine, insert, update

from sla_server.db import schema
from sla_server.db.queries.pages import PageQueries
from sla_server.db.queries.policy_reports import PAGES_MAX, REPORTS_MAX
from sla_server.db.queries.records import POLICIES, Wanted

MADE_US = 1_000


@dataclass
class Stored:
    """Policies in a database, and how many reports were read from it."""

    connection: Connection
    reports_read: list[int] = field(default_factory=list)

    def read(self, statement: Executable) -> list[dict[str, Any]]:
        rows = [dict(row._mapping) for row in self.connection.execute(statement)]
        self.reports_read += [1 for row in rows if "report" in row]
        return rows

    def publish(self, version: int, cost_per_s: float | None, **more: Any) -> None:
        capacity = [
            {"backend": "disk-0", "sla": "erp", "objective": "latency", "cost_per_s": cost_per_s},
            {"backend": "disk-0", "sla": "crm", "objective": "latency", "cost_per_s": 900.0},
            {"backend": "disk-1", "sla": "crm", "objective": "latency", "cost_per_s": None},
        ]
        curves = [{"backend": "disk-1", "sla": "crm", "points": [[1.0, 2.0, 3.0]]}]
        report = {"capacity": capacity, "curves": curves, **more}
        row = {"version": version, "created_us": MADE_US + version, "state": "published"}
        self.connection.execute(insert(schema.policies), {**row, "report": json.dumps(report)})


@pytest.fixture
def stored() -> Iterator[Stored]:
    engine = create_engine("sqlite://")
    schema.metadata.create_all(engine, (schema.policies,))
    with engine.connect() as connection:
        yield Stored(connection)
    engine.dispose()


def test_the_newest_report_is_read_when_there_is_a_new_version_and_not_before(stored: Stored) -> None:
    reports = PageQueries(stored.read).policy_reports
    assert reports.newest() is None
    stored.publish(1, 700.0)
    for _poll in range(20):
        newest = reports.newest()
        assert newest is not None
        assert (newest.version, newest.least) == (1, {"disk-0": 700.0})
    assert len(stored.reports_read) == 1
    assert [row["sla"] for row in newest.capacity("disk-0")] == ["erp", "crm"]
    assert (newest.curves("disk-0"), len(newest.curves("disk-1")), newest.capacity("gone")) == ([], 1, [])
    assert len(newest.capacity()) == 3
    stored.publish(2, None)
    assert [reports.newest().least for _poll in range(5)] == [{"disk-0": 900.0}] * 5  # type: ignore[union-attr]
    assert len(stored.reports_read) == 2
    changed = {"created_us": 5, "report": json.dumps({})}
    stored.connection.execute(update(schema.policies).where(schema.policies.c.version == 2).values(changed))
    restored = reports.newest()
    assert restored is not None
    assert (restored.version, restored.least) == (2, {}), "a number that stands for another policy"


def test_a_list_reads_the_report_of_each_version_once(stored: Stored) -> None:
    reports = PageQueries(stored.read).policy_reports
    stored.publish(1, 700.0, back_test={"verdict": "helps", "backends": [{"backend": "disk-0"}]})
    stored.publish(2, 700.0)
    made = [(2, MADE_US + 2), (1, MADE_US + 1)]
    for _poll in range(5):
        assert reports.back_tests(made) == {1: {"back_test": {"verdict": "helps"}}, 2: {}}
    assert len(stored.reports_read) == 2
    assert reports.head(2) == {"version": 2, "state": "published", "created_us": MADE_US + 2}
    assert reports.head(3) is None
    assert len(stored.reports_read) == 2


def harm(objective: str, share: float) -> dict[str, Any]:
    names = {"backend": "disk-0", "sla": "erp", "objective": objective, "step": 0}
    return {**names, "volume": f"v{share}", "share": share}


def test_what_is_asked_of_one_version_reads_its_report_once(stored: Stored) -> None:
    """Who hurt whom, and capacity and back-test beside the caps of a volume: pages ask every few seconds."""
    reports = PageQueries(stored.read).policy_reports
    harms = [harm("latency", 0.2), harm("iops", 0.1), harm("latency", 0.7)]
    for version in range(1, REPORTS_MAX + 2):
        stored.publish(
            version, 700.0, harms=harms, back_test={"reason": f"it helps {version}", "backends": []}
        )
    head = reports.head(1)
    assert head is not None
    for _poll in range(20):
        kept = reports.report_of(head)
        assert [(row["objective"], row["share"]) for row in kept.harms()] == [
            ("iops", 0.1), ("latency", 0.7), ("latency", 0.2),
        ]  # fmt: skip
        assert len(kept.capacity("disk-0")) == 2
        assert reports.back_tests([(1, head["created_us"])]) == {1: {"back_test": {"reason": "it helps 1"}}}
    assert len(stored.reports_read) == 1
    for version in range(2, REPORTS_MAX + 2):
        for _poll in range(3):
            reports.report_of({"version": version, "created_us": MADE_US + version})
    assert len(stored.reports_read) == REPORTS_MAX + 1
    assert len(reports._reports) == REPORTS_MAX


def test_a_report_of_another_release_may_lack_what_its_harms_are_sorted_by(stored: Stored) -> None:
    stored.publish(1, 700.0, harms=[{"volume": "a"}, harm("iops", 0.5)])
    newest = PageQueries(stored.read).policy_reports.newest()
    assert newest is not None
    assert (newest.least, [row["volume"] for row in newest.harms()]) == ({"disk-0": 700.0}, ["a", "v0.5"])


def test_a_list_of_versions_reads_no_report(stored: Stored) -> None:
    stored.publish(1, 700.0)
    (row,) = PageQueries(stored.read).records(POLICIES, Wanted())
    assert (row["version"], row["report"], stored.reports_read) == (1, None, [])


def test_what_differs_between_two_versions_is_read_once(stored: Stored) -> None:
    schema.metadata.create_all(stored.connection, (schema.policy_caps,))
    for version, cost in ((1, 10.0), (2, 20.0)):
        stored.publish(version, None)
        cap = {"version": version, "volume": "a", "hour_of_week": 1, "cost_per_s": cost}
        stored.connection.execute(insert(schema.policy_caps), cap)
    statements: list[Executable] = []

    def read(statement: Executable) -> list[dict[str, Any]]:
        statements.append(statement)
        return stored.read(statement)

    reports = PageQueries(read).policy_reports
    for _visit in range(20):
        assert [row["raised"] for row in reports.changes(1, 2, 10)] == [1]
    assert len(statements) == 21, "when they were made is asked each time"
    assert [row["lowered"] for row in reports.changes(2, 1, 10)] == [1]
    assert reports.changes(1, 2, 10, "a") == []
    for limit in range(20, 40):
        assert len(reports.changes(1, 2, limit)) == 1
    assert len(reports._changes) == PAGES_MAX


def test_after_a_restore_a_number_is_that_of_another_policy(stored: Stored) -> None:
    schema.metadata.create_all(stored.connection, (schema.policy_caps,))
    for version, cost in ((1, 10.0), (2, 20.0)):
        stored.publish(version, None)
        cap = {"version": version, "volume": "a", "hour_of_week": 1, "cost_per_s": cost}
        stored.connection.execute(insert(schema.policy_caps), cap)
    reports = PageQueries(stored.read).policy_reports
    assert [row["raised"] for row in reports.changes(1, 2, 10)] == [1]
    stored.connection.execute(update(schema.policy_caps).values(cost_per_s=10.0))
    stored.connection.execute(update(schema.policies).values(created_us=5))
    assert reports.changes(1, 2, 10) == []
