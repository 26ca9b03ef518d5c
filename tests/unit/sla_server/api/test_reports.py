"""The pages of reports: list, one report, one of now; what they allow, and files."""

from __future__ import annotations

import base64
import hashlib
import re

from flask.testing import FlaskClient

from tests.support import api


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
