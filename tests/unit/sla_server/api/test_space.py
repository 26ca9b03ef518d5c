"""Pools over the API: filtered, sorted and paged on the server, as a site has thousands."""

from __future__ import annotations

from typing import Any

import pytest
from flask.testing import FlaskClient

from tests.support import api

MANY = 3_000
DAY_US = 86_400_000_000


@pytest.fixture(autouse=True)
def pools(source: api.FakeSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each fuller than the one before; every tenth nearly full, every hundredth not read any more."""
    rows = [
        api.pool(
            pool=f"p{number:04}",
            used_bytes=(number << 30) // 40,
            level="critical" if number % 10 == 0 else "ok",
            read_us=api.NOW_US - (DAY_US if number % 100 == 0 else 0),
            forecast=None if number % 2 else {"full_us": api.NOW_US + (MANY - number) * DAY_US},
        )
        for number in range(MANY)
    ]
    monkeypatch.setattr(source, "pools", lambda: [dict(row) for row in rows])


def listed(web: FlaskClient, query: str) -> dict[str, Any]:
    answer = web.get(f"/api/v1/pools?{query}")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json
    return found


def test_a_page_of_thousands_is_sorted_before_it_is_cut(web: FlaskClient) -> None:
    first = listed(web, "limit=50&sort=fullest")
    assert [row["pool"] for row in first["items"]] == [f"p{MANY - 1 - n:04}" for n in range(50)]
    assert (first["count"], first["next"], first["before"]) == (MANY, "50", 0)
    last = listed(web, f"limit=50&sort=fullest&offset={MANY - 10}")
    assert ([row["pool"] for row in last["items"]][-1], last["next"]) == ("p0000", None)
    soonest = [row["pool"] for row in listed(web, "limit=2&sort=soonest")["items"]]
    assert soonest == [f"p{MANY - 2:04}", f"p{MANY - 4:04}"], "those without a day come last"
    assert [row["pool"] for row in listed(web, "limit=2")["items"]] == ["p0000", "p0001"]
    assert len(listed(web, "sort=name")["items"]) == MANY, "without a limit all, as before"


@pytest.mark.parametrize(
    ("query", "count"),
    [
        ("level=critical", 270),
        ("level=stale", 30),
        ("level=ok", 2_700),
        ("match=DATA", 0),
        ("match=P29", 100),
    ],
)
def test_filters_are_applied_before_the_page_is_cut(web: FlaskClient, query: str, count: int) -> None:
    assert listed(web, f"{query}&limit=5")["count"] == count


@pytest.mark.parametrize(("query", "says"), [("level=full", "stale"), ("sort=size", "fullest")])
def test_what_cannot_be_asked_is_refused_with_what_can(web: FlaskClient, query: str, says: str) -> None:
    refused = web.get(f"/api/v1/pools?{query}")
    assert (refused.status_code, says in refused.json["fix"]) == (400, True)
