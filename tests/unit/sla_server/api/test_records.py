"""The lists of the audit log, jobs and policies over a database of many rows: parameters in, pages out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from flask.testing import FlaskClient
from sqlalchemy import Executable, create_engine, insert

from sla_server.db import schema
from sla_server.db.queries.pages import PageQueries
from tests.support import api

MANY = 2500


@pytest.fixture
def stored(source: api.FakeSource, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The source reads these three tables of a database."""
    engine = create_engine("sqlite://")
    schema.metadata.create_all(engine, (schema.audit, schema.jobs, schema.policies))
    entries = [
        {
            "audit_id": f"a{n}",
            "at_us": 10 * n,
            "who": f"p{n % 3}",
            "action": ("mode", "apply")[n % 2],
            "subject": f"s{n}",
        }
        for n in range(MANY)
    ]
    jobs = [
        {"job_id": f"j{n}", "kind": "policy", "state": ("done", "failed")[n % 2], "started_us": n}
        for n in range(40)
    ]
    versions = [
        {"version": n, "created_us": n, "state": ("superseded", "rejected")[n % 2]} for n in range(1, 41)
    ]
    with engine.connect() as connection:
        for table, rows in ((schema.audit, entries), (schema.jobs, jobs), (schema.policies, versions)):
            connection.execute(insert(table), rows)

        def read(statement: Executable) -> list[dict[str, Any]]:
            return [dict(row._mapping) for row in connection.execute(statement)]

        pages_of = PageQueries(read)
        monkeypatch.setattr(source, "records", pages_of.records)
        monkeypatch.setattr(source, "policy_reports", pages_of.policy_reports)
        yield
    engine.dispose()


def pages(web: FlaskClient, path: str) -> list[dict[str, Any]]:
    """All pages, as a client follows them."""
    found: list[dict[str, Any]] = []
    before = ""
    while True:
        answer = web.get(f"/api/v1/{path}{before}")
        assert answer.status_code == 200, answer.text
        found += answer.json["items"]
        assert len(found) <= MANY
        if answer.json["next"] is None:
            return found
        before = f"&before={answer.json['next']}"


@pytest.mark.usefixtures("stored")
def test_many_entries_come_page_by_page_in_the_order_asked_for(web: FlaskClient) -> None:
    newest = [f"a{n}" for n in range(MANY - 1, -1, -1)]
    assert [row["audit_id"] for row in pages(web, "audit?limit=999")] == newest
    assert [row["audit_id"] for row in pages(web, "audit?limit=999&sort=oldest")] == newest[::-1]
    by_who = pages(web, "audit?limit=700&sort=who")
    assert [row["who"] for row in by_who] == sorted(row["who"] for row in by_who)
    assert len({row["audit_id"] for row in by_who}) == MANY


@pytest.mark.usefixtures("stored")
@pytest.mark.parametrize(
    ("path", "count"),
    [
        ("audit?limit=1000&action=mode&match=S12", 56),
        ("audit?limit=1000&who=p1,p2&from_us=100&to_us=400", 20),
        ("audit?limit=1000&action=m*,x", MANY // 2),
        ("jobs?limit=15&state=failed&sort=longest", 20),
        ("jobs?limit=15&match=poli&kind=rollup", 0),
        ("policies?limit=7&state=rejected&sort=state", 20),
        ("policies?match=40", 1),
    ],
)
def test_filters_are_applied_before_the_page_is_made(web: FlaskClient, path: str, count: int) -> None:
    assert len(pages(web, path)) == count


@pytest.mark.parametrize(
    ("path", "field", "says"),
    [
        ("audit?sort=size", "sort", "Use newest, oldest, who, action, subject"),
        ("jobs?sort=x", "sort", "longest"),
        ("policies?before=1:one", "before", "no cursor"),
        ("audit?action=" + "a," * 51, "action", "51 values"),
        ("audit?colour=red", "colour", "no such parameter"),
    ],
)
@pytest.mark.usefixtures("stored")
def test_what_cannot_be_asked_is_refused_with_what_can(
    web: FlaskClient, path: str, field: str, says: str
) -> None:
    answer = web.get(f"/api/v1/{path}")
    assert answer.status_code == 400
    assert field in answer.text
    assert says in answer.text
