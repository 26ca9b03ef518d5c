"""Who hurt whom by a policy's attribution: the rows of the API, and the graph of the same."""

from __future__ import annotations

import pytest
from flask.testing import FlaskClient

from dashboard.graph import draw
from dashboard.harms import lines_of
from tests.support import api


def test_the_graph_says_what_the_api_says(web: FlaskClient) -> None:
    rows = web.get("/api/v1/policies/3/harms").json["items"]  # type: ignore[index]
    assert [(row["volume"], row["likely_cause"]) for row in rows] == [("batch", True), ("crm", False)]
    assert web.get("/api/v1/policies/3/harms?limit=1").json["items"] == rows[:1]  # type: ignore[index]
    answer = web.get("/policies/3/harms.svg")
    assert answer.mimetype == "image/svg+xml"
    assert answer.text == draw(lines_of(rows), "Who hurt whom")
    assert (
        "batch: 70 % of the harm; without it 9 of 12 bad intervals would be good (likely cause)"
        in answer.text
    )
    assert "(correlation: only 12 intervals, 30 needed)" in answer.text


@pytest.mark.parametrize(("version", "status"), [("9", 404), ("x", 400)])
def test_a_version_that_is_not_there_has_no_graph(web: FlaskClient, version: str, status: int) -> None:
    assert web.get(f"/policies/{version}/harms.svg").status_code == status
    assert web.get(f"/api/v1/policies/{version}/harms").status_code == status


def test_a_policy_of_an_older_release_has_no_harms(web: FlaskClient, source: api.FakeSource) -> None:
    (row,) = source.policies()
    source.policy = lambda _version: {**row, "report": None}  # type: ignore[method-assign,assignment]
    assert web.get("/api/v1/policies/3/harms").json["items"] == []  # type: ignore[index]
    assert web.get("/policies/3/harms.svg").status_code == 200
