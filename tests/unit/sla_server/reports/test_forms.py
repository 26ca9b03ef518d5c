"""The forms of a report: golden HTML and CSV, and what hostile names become.

After a change that is meant: SLA_GOLDEN=1 pytest this file, and look at the page in a browser.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sla_server.reports import words
from sla_server.reports.compute import compute_report
from sla_server.reports.document import IssuedReport, ReportContent, canonical, digest_of
from sla_server.reports.html import as_html, bars
from sla_server.reports.inputs import read_inputs
from sla_server.reports.issue import changed_fields
from sla_server.reports.text import as_csv, as_text
from sla_server.reports.verify import NO_REPORT
from tests.support.agreements import FULL
from tests.support.paths import ROOT
from tests.support.reports import example_month

GOLDEN = ROOT / "tests" / "fixtures" / "reports"


def content() -> ReportContent:
    rows, now = example_month()
    return compute_report(read_inputs(rows, "erp-gold", "2026-10", now))  # type: ignore[arg-type]


def issued() -> tuple[IssuedReport, str]:
    made = content()
    report = IssuedReport(
        number=7, report_id="erp-gold-2026-10-r1", revision=1, revises="erp-gold-2026-10",
        revised=changed_fields(made.model_copy(update={"notes": ["an older note"]}), made),
        issued_us=made.as_of_us, issued_by="schedule", previous="ab" * 32, content=made,
    )  # fmt: skip
    return report, digest_of(canonical(report))


@pytest.mark.parametrize("name", ["report.html", "report.csv", "report.txt"])
def test_golden(name: str) -> None:
    report, digest = issued()
    made = {
        "report.html": lambda: as_html(report.content, report, digest),
        "report.csv": lambda: as_csv(report.content),
        "report.txt": lambda: as_text(report.content, report, digest),
    }[name]()
    path: Path = GOLDEN / name
    if os.environ.get("SLA_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(made.encode())
    assert made.encode() == path.read_bytes()


def test_the_page_refers_to_nothing_and_has_no_script() -> None:
    page = as_html(content())
    for forbidden in ("<script", "http://", "https://", "url(", "@import", " style="):
        assert forbidden not in page, forbidden


def test_on_the_page_it_leads_back_and_in_a_file_nowhere() -> None:
    page = as_html(content(), is_on_page=True)
    for path in ("/", "/reports?name=erp-gold", "/agreements/erp-gold"):
        assert f'href="{path}"' in page
    assert "<nav" not in as_html(content())
    assert "nav { display: none; }" in page.partition("@media print")[2], "it is not printed"


def test_names_are_text_in_html_and_no_formulas_in_a_spreadsheet() -> None:
    made = content()
    evil = made.model_copy(
        update={"agreement": made.agreement.model_copy(update={"name": "=1+<script>alert(1)</script>"})}
    )
    assert "<script" not in as_html(evil)
    assert "\r\n'=1+" in as_csv(evil)


def test_a_report_is_written_out_in_one_way() -> None:
    report, digest = issued()
    again = IssuedReport.model_validate_json(canonical(report))
    assert canonical(again) == canonical(report)
    assert digest_of(canonical(again)) == digest
    assert FULL.count("penalties") == 1


def test_one_bad_minute_is_seen_in_the_figure() -> None:
    (latency,) = content().objectives
    drawn = {bar.title.partition(":")[0]: bar for bar in bars(latency)}
    assert len(drawn) == 31
    for day in latency.days:
        bar = drawn[day.day]
        assert bar.is_empty == (day.compliance is None)
        assert (bar.bad >= 2.0) == bool(day.bad_s)
        if not bar.is_empty:
            assert round(bar.good + bar.bad, 1) == 72


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59, "59 s"), (61, "1 min 1 s"), (3600, "1 h"), (90_061, "1 d 1 h"), (-90, "-1 min 30 s"),
     (86_405, "1 d"), (None, "–")],
)  # fmt: skip
def test_durations(seconds: float | None, text: str) -> None:
    assert words.duration(seconds) == text


def test_shares_are_rounded_down() -> None:
    assert [words.percent(each) for each in (0.99999999, 1.0, 0.995, 0.0, None)] == [
        "99.999 %", "100 %", "99.5 %", "0 %", "–",
    ]  # fmt: skip


def test_a_budget_that_was_overspent_says_by_how_much() -> None:
    """Not "0 s left (-733.4 %)": the reader wants to know how much too much it was."""
    made = content()
    (one, *others) = made.objectives
    budget = one.budget.model_copy(
        update={"allowed_s": 36.0, "spent_s": 300, "left_s": 0.0, "left_ratio": -7.334}
    )
    over = made.model_copy(update={"objectives": [one.model_copy(update={"budget": budget}), *others]})
    assert '<b class="bad">4 min 24 s</b><span>more than a budget of 36 s</span>' in as_html(over)
    assert "  budget 36 s, spent 5 min, 4 min 24 s more than allowed\n" in as_text(over)


def test_the_first_report_names_none_before_it() -> None:
    report, digest = issued()
    first = report.model_copy(update={"number": 1, "previous": NO_REPORT})
    page = as_html(first.content, first, digest)
    assert "the first report that was issued" in page
    assert NO_REPORT not in page
