"""The pages of reports: list, one report, one of now; what they allow, and files."""

from __future__ import annotations

import base64
import hashlib
import re
from typing import Any

import pytest
from flask.testing import FlaskClient

import dashboard.reports
from sla_server.reports.issue import issue
from tests.support import api

CHAIN = "/api/v1/report-chain"


def test_the_list(web: FlaskClient, source: api.FakeSource) -> None:
    page = web.get("/reports").text
    assert '<a href="/reports/erp-gold-2026-12">erp-gold-2026-12</a>' in page
    assert "NOT KEPT (91.666 % of 99 %)" in page
    source.stored_reports.issued_rows.clear()
    assert "No report was issued yet" in web.get("/reports").text
    assert '<a href="/reports">' in web.get("/").text


def test_a_report_s_page_allows_its_own_style_and_nothing_more(web: FlaskClient) -> None:
    for path in ("/reports/erp-gold-2026-12", "/reports/1", "/reports/now?name=erp-gold&period=2026-12"):
        answer = web.get(path)
        assert answer.status_code == 200
        (style,) = re.findall("<style>(.*?)</style>", answer.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
        policy = answer.headers["Content-Security-Policy"]
        assert f"style-src 'sha256-{digest}'" in policy
        assert "unsafe" not in policy
        assert "<script" not in answer.text
        assert " style=" not in answer.text


def test_files(web: FlaskClient) -> None:
    answer = web.get("/reports/erp-gold-2026-12.json")
    digest = web.get("/api/v1/reports/1").json["digest"]  # type: ignore[index]
    assert hashlib.sha256(answer.data).hexdigest() == digest
    table = web.get("/reports/erp-gold-2026-12.csv")
    assert table.headers["Content-Disposition"] == 'attachment; filename="erp-gold-2026-12.csv"'
    assert table.text.startswith("agreement,period,objective,scope,")


def test_what_is_not_there_is_404_and_what_is_no_period_400(web: FlaskClient) -> None:
    for path, status in (
        ("/reports/nothing", 404),
        ("/reports/now?name=nobody", 404),
        ("/reports/now?name=erp-gold&period=soon", 400),
        ("/reports/now", 404),
        ("/reports?before=x", 200),
    ):
        assert web.get(path).status_code == status, path


@pytest.fixture
def five(source: api.FakeSource) -> Any:
    """Five issued reports; the rows that were read with their bodies, by request."""
    stored = source.stored_reports
    for day in range(18, 22):
        assert issue(stored, "erp-gold", f"2026-12-{day}", "ann", api.NOW_US) is not None  # type: ignore[arg-type]
    return stored


def test_the_list_is_filtered_before_it_is_cut(web: FlaskClient, five: Any) -> None:
    def ids(query: str) -> list[str]:
        return [row["report_id"] for row in web.get(f"/api/v1/reports{query}").json["items"]]

    assert len(ids("")) == 5
    assert ids("?period=2026-12-19") == ["erp-gold-2026-12-19"]
    assert ids("?period=2026-12&limit=2&match=ERP") == ["erp-gold-2026-12-21", "erp-gold-2026-12-20"]
    assert ids("?period=2025") == ids("?match=other") == []
    page = web.get("/reports?period=2026-12-19&match=Gold").text
    assert re.findall(r">(erp-gold-[^<]*)</a>", page) == ["erp-gold-2026-12-19"]
    assert 'name="match" type="search" maxlength="128" value="Gold"' in page
    nothing = web.get("/reports?match=other").text
    assert "No report is like that." in nothing
    assert "No report was issued yet" not in nothing


def test_older_reports_are_of_the_same_filter(
    web: FlaskClient, five: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dashboard.reports, "PAGE_ROWS", 2)
    page = web.get("/reports?match=erp&period=2026-12-").text
    (older,) = re.findall(r'<a href="([^"]*)">Older reports', page)
    assert older == "/reports?match=erp&amp;period=2026-12-&amp;before=4"
    page = web.get(older.replace("&amp;", "&")).text
    assert re.findall(r">(erp-gold-[^<]*)</a>", page) == ["erp-gold-2026-12-19", "erp-gold-2026-12-18"]


def test_a_request_checks_a_page_of_the_chain(
    web: FlaskClient, five: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits, read = [], five.issued_after

    def counted(number: int, limit: int) -> Any:
        limits.append(limit)
        return read(number, limit)

    monkeypatch.setattr(five, "issued_after", counted)
    pages: list[Any] = [web.get(f"{CHAIN}?limit=2").json]
    while pages[-1]["next"]:
        pages.append(web.get(f"{CHAIN}?limit=2&after={pages[-1]['next']}").json)
    assert [(page["count"], page["next"], page["is_good"]) for page in pages] == [
        (2, "2", True), (2, "4", True), (1, None, True),
    ]  # fmt: skip
    assert max(limits) <= 2
    for query in ("limit=201", "limit=0", "after=x", "after=-1"):
        assert web.get(f"{CHAIN}?{query}").status_code == 400, query


def test_a_page_of_the_chain_begins_with_the_digest_of_the_one_before(web: FlaskClient, five: Any) -> None:
    def wheres(query: str) -> list[tuple[str, list[str]]]:
        items = web.get(f"{CHAIN}?{query}").json["items"]  # type: ignore[index]
        return [(item["report_id"], [each["where"] for each in item["findings"]]) for item in items]

    five.issued_rows[1]["digest"] = "0" * 64
    second, third = (five.issued_rows[place]["report_id"] for place in (1, 2))
    assert wheres("limit=2") == [(second, ["digest"])]
    assert wheres("limit=2&after=2") == [(third, ["previous"])]
    del five.issued_rows[1]
    assert wheres("limit=2") == [(third, ["number"])]
    assert wheres("limit=2&after=2") == [(third, ["previous"])]


def test_throttles_come_in_pages(
    web: FlaskClient, source: api.FakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [api.throttle(throttle_id=f"t-{at}", cursor=f"{at}:t-{at}") for at in range(5, 0, -1)]

    def throttles(
        _in_force: bool, limit: int, before: str | None = None, _since_us: int | None = None
    ) -> Any:
        return [row for row in rows if before is None or row["cursor"] < before][:limit]

    monkeypatch.setattr(source, "throttles", throttles)
    first: Any = web.get("/api/v1/throttles?in_force=1&limit=3").json
    assert ([row["throttle_id"] for row in first["items"]], first["next"]) == (["t-5", "t-4", "t-3"], "3:t-3")
    second: Any = web.get("/api/v1/throttles?in_force=1&limit=3&before=3:t-3").json
    assert ([row["throttle_id"] for row in second["items"]], second["next"]) == (["t-2", "t-1"], None)


def test_a_report_of_another_release_is_there_as_it_was_issued(
    web: FlaskClient, source: api.FakeSource
) -> None:
    (row,) = source.stored_reports.issued_rows
    row["body"] = '{"form": 99}'
    for path in ("/reports/1", "/reports/erp-gold-2026-12.csv"):
        answer = web.get(path)
        assert (answer.status_code, "/reports/erp-gold-2026-12.json" in answer.text) == (406, True)
    assert web.get("/reports/1.json").text == row["body"]
    assert web.get("/api/v1/reports/1").json["report"] == {"form": 99}  # type: ignore[index]
    assert web.get("/reports").status_code == 200
