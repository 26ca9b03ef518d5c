"""The audit log, jobs and policies as lists: thousands of rows, filtered, sorted, read page by page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Connection, create_engine, insert

from sla_server.db import schema
from sla_server.db.queries import records
from sla_server.db.queries.records import AUDIT, JOBS, POLICIES, RecordList, Wanted, cursor_of, listed

MANY = 3000
PEOPLE = ("ann", "Bert", "token:backup")
ACTIONS = ("apply", "login", "login-refused", "mode")
Rows = list[dict[str, Any]]


def audit_rows() -> Rows:
    text = {"before": "", "after": "", "digest": ""}
    return [
        {
            "audit_id": f"a{number:05}",
            "at_us": 1000 + number // 3,  # several at one time
            "who": PEOPLE[number % 3],
            "action": ACTIONS[number % 4],
            "subject": f"sla-{number % 7}",
            **text,
        }
        for number in range(MANY)
    ]


def job_rows() -> Rows:
    return [
        {
            "job_id": f"j{number:03}",
            "kind": ("policy", "rollup")[number % 2],
            "state": ("done", "failed", "running")[number % 3],
            "who": "ann",
            "text": f"run 100% of {number}",
            "started_us": number,
            "ended_us": None if number % 3 == 2 else number + number * 7 % 50,
            "rows": None if number % 5 == 0 else number % 11,
        }
        for number in range(200)
    ]


def policy_rows() -> Rows:
    states = ("superseded", "in-force", "rejected")
    text = {"job": "{}", "report": "{}"}
    return [
        {"version": n, "created_us": 10 * n, "state": states[n % 3], "published_by": "ann", **text}
        for n in range(1, 121)
    ]


@pytest.fixture(scope="module")
def database() -> Iterator[Connection]:
    engine = create_engine("sqlite://")
    tables = (schema.audit, schema.jobs, schema.policies)
    schema.metadata.create_all(engine, tables)
    with engine.connect() as connection:
        for table, rows in zip(tables, (audit_rows(), job_rows(), policy_rows()), strict=True):
            connection.execute(insert(table), rows)
        yield connection
    engine.dispose()


def read(database: Connection, wanted_list: RecordList, wanted: Wanted) -> Rows:
    return [dict(row._mapping) for row in database.execute(listed(wanted_list, wanted))]


def all_pages(database: Connection, wanted_list: RecordList, limit: int, **wanted: Any) -> Rows:
    """Page by page, as a person goes on."""
    found: Rows = []
    before = None
    while page := read(database, wanted_list, Wanted(limit, before, **wanted)):
        found += page
        before = cursor_of(wanted_list, page[-1])
        assert len(found) <= MANY
    return found


def ids(rows: Rows, key: str) -> list[Any]:
    return [row[key] for row in rows]


def test_pages_of_every_order_have_each_row_once_in_that_order(database: Connection) -> None:
    newest = sorted(audit_rows(), key=lambda row: (row["at_us"], row["audit_id"]), reverse=True)
    assert ids(all_pages(database, AUDIT, 97), "audit_id") == ids(newest, "audit_id")
    assert ids(all_pages(database, AUDIT, 97, sort="oldest"), "audit_id") == ids(newest[::-1], "audit_id")
    for sort in ("who", "action", "subject"):
        expected = sorted(newest, key=lambda row: row[sort])  # stable: the newest first of each
        assert ids(all_pages(database, AUDIT, 331, sort=sort), "audit_id") == ids(expected, "audit_id")


def test_jobs_by_length_and_rows_have_those_without_last(database: Connection) -> None:
    newest = sorted(job_rows(), key=lambda row: -row["started_us"])

    def took(row: dict[str, Any]) -> int:
        return -1 if row["ended_us"] is None else row["ended_us"] - row["started_us"]

    expected = sorted(newest, key=lambda row: -took(row))
    assert ids(all_pages(database, JOBS, 13, sort="longest"), "job_id") == ids(expected, "job_id")
    expected = sorted(newest, key=lambda row: -(-1 if row["rows"] is None else row["rows"]))
    assert ids(all_pages(database, JOBS, 13, sort="rows"), "job_id") == ids(expected, "job_id")
    by_state = all_pages(database, POLICIES, 17, sort="state")
    assert ids(by_state, "state") == sorted(ids(by_state, "state"))
    assert len(set(ids(by_state, "version"))) == 120


def test_rows_that_arrive_meanwhile_shift_no_page(database: Connection) -> None:
    first = read(database, AUDIT, Wanted(10))
    with database.begin_nested() as change:
        newer = {**audit_rows()[-1], "audit_id": "b", "at_us": 10**9}
        database.execute(insert(schema.audit), [newer])
        second = read(database, AUDIT, Wanted(10, cursor_of(AUDIT, first[-1])))
        assert read(database, AUDIT, Wanted(1))[0]["audit_id"] == "b"
        change.rollback()
    assert second == read(database, AUDIT, Wanted(20))[10:]


@pytest.mark.parametrize(
    ("wanted", "keeps"),
    [
        ({"match": "bert"}, lambda row: row["who"] == "Bert"),
        ({"match": "SLA-3"}, lambda row: row["subject"] == "sla-3"),
        ({"match": "a_n"}, lambda _row: False),
        ({"values": {"action": ["mode", "apply"]}}, lambda row: row["action"] in ("mode", "apply")),
        ({"values": {"action": ["login*"]}}, lambda row: row["action"].startswith("login")),
        (
            {"values": {"action": ["login*"], "who": ["ann"]}},
            lambda row: row["who"] == "ann" and "login" in row["action"],
        ),
        ({"values": {"action": [], "who": ["token:*", "ann"]}}, lambda row: row["who"] != "Bert"),
        ({"from_us": 1200, "to_us": 1300}, lambda row: 1200 <= row["at_us"] < 1300),
    ],
)
def test_filters(database: Connection, wanted: dict[str, Any], keeps: Any) -> None:
    expected = [row["audit_id"] for row in audit_rows() if keeps(row)]
    assert sorted(ids(all_pages(database, AUDIT, 500, **wanted), "audit_id")) == expected


def test_text_is_no_pattern_and_a_version_is_found_by_its_digits(database: Connection) -> None:
    assert len(read(database, JOBS, Wanted(1000, match="100% of"))) == 200
    assert read(database, JOBS, Wanted(1000, match="run%of")) == []
    assert ids(read(database, POLICIES, Wanted(match="12")), "version") == [120, 112, 12]
    assert ids(read(database, POLICIES, Wanted(values={"state": ["in-force"]}, limit=2)), "version") == [
        118,
        115,
    ]


@pytest.mark.parametrize(
    "before", ["x", "1", "1:", "a:1", "1:one", "1:²", "²:1", f"1:{10**25}", f"{10**25}:1"]
)
def test_what_is_no_cursor_is_refused(before: str) -> None:
    with pytest.raises(ValueError, match="is no cursor"):
        listed(POLICIES, Wanted(before=before))


def test_an_order_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ValueError, match="'cost' is no order; there are newest, oldest, state"):
        listed(POLICIES, Wanted(sort="cost"))
    assert all(records.NEWEST in each.order_names for each in (AUDIT, JOBS, POLICIES))
