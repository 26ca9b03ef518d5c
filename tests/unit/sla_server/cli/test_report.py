"""``sla report``: forms, files, and what is refused."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from sla_server.api.handlers import reports as handlers
from sla_server.reports.customer import report_for_customer
from sla_server.reports.document import IssuedReport, plain
from sla_server.reports.issue import issue
from tests.support import api
from tests.support.cli import Terminal


def test_a_report_as_text(sla: Terminal) -> None:
    lines = sla("report", "erp-gold", "--period", "2026-12").output.splitlines()
    assert lines[0].startswith("erp-gold, 2026-12: 2026-12-01 00:00 to 2027-01-01 00:00 (Europe/Berlin)")
    assert "for acme by storage-team; gold, calendar month (Europe/Berlin)" in lines
    assert "  NOT KEPT: 91.666 % of 99 % promised" in lines
    assert "  batch: 4 min 59 s in 1 throttle" in lines


def test_the_last_period_is_the_default_and_options_may_come_first(sla: Terminal) -> None:
    expected = sla("report", "erp-gold", "--period", "2026-12").output
    assert sla("report", "erp-gold").output == expected
    assert sla("report", "--period", "last", "erp-gold").output == expected
    assert sla("report", "of", "erp-gold").output == expected


def test_of_all_agreements(sla: Terminal, tmp_path: Path) -> None:
    assert sla("report", "--period", "2026-12").output == sla("report", "erp-gold").output
    found = json.loads(sla("report", "-o", "json").output)
    assert [each["agreement"]["name"] for each in found] == ["erp-gold"]
    refused = sla("report", "-o", "html")
    assert refused.exit_code == 2
    assert "Give --to DIRECTORY" in refused.output
    done = sla("report", "-o", "html", "--to", str(tmp_path / "reports"))
    assert done.exit_code == 0, done.output
    assert [path.name for path in (tmp_path / "reports").iterdir()] == ["erp-gold-2026-12.html"]


def test_csv_has_a_line_for_the_period_and_one_for_each_day(sla: Terminal) -> None:
    rows = list(csv.DictReader(sla("report", "erp-gold", "-o", "csv").output.splitlines()))
    assert [row["scope"] for row in rows] == ["period", *["day"] * 31]
    days = [row for row in rows[1:] if row["good"] != "0"]
    assert [(row["from"], row["good"], row["bad"]) for row in days] == [("2026-12-21T00:00", "55", "5")]
    assert (rows[0]["good"], rows[0]["bad"], rows[0]["credit"]) == ("55", "5", "0.5")


def test_html_goes_to_a_file(sla: Terminal, tmp_path: Path) -> None:
    done = sla("report", "erp-gold", "-o", "html", "--to", str(tmp_path / "r.html"))
    assert (done.exit_code, done.output) == (0, "")
    assert "<title>SLA report erp-gold 2026-12</title>" in (tmp_path / "r.html").read_text()


def test_what_is_no_period_is_refused(sla: Terminal) -> None:
    done = sla("report", "erp-gold", "--period", "2026-13")
    assert done.exit_code == 1
    assert "'2026-13' does not exist" in done.output
    unknown = sla("report", "nobody")
    assert (unknown.exit_code, "was ever applied" in unknown.output) == (1, True)
    assert "Compute the report of AGREEMENT" in sla("report", "of", "--help").output


def test_issued_reports_are_listed_and_shown(sla: Terminal, tmp_path: Path) -> None:
    lines = sla("report", "list").output.splitlines()
    assert "erp-gold-2026-12" in lines[2]
    assert "NOT KEPT: latency" in lines[2]
    assert sla("report", "list", "nobody").output.startswith("no report was issued yet")
    shown = sla("report", "show", "erp-gold-2026-12").output
    assert "report erp-gold-2026-12, number 1, issued 2027-01-15 09:00" in shown
    assert sla("report", "show", "1").output == shown
    missing = sla("report", "show", "erp-gold-2020-01")
    assert (missing.exit_code, "no report 'erp-gold-2020-01' was issued" in missing.output) == (1, True)


def test_issued_reports_are_listed_by_period(sla: Terminal) -> None:
    assert "erp-gold-2026-12" in sla("report", "list", "--period", "2026").output
    assert "no issued report is like that" in sla("report", "list", "--period", "2025").stderr


def test_a_report_in_a_file_is_checked_with_the_servers(sla: Terminal, tmp_path: Path) -> None:
    path = tmp_path / "held.json"
    assert sla("report", "show", "1", "-o", "json", "--to", str(path)).exit_code == 0
    good = sla("report", "verify", str(path))
    assert (good.exit_code, good.output.splitlines()[0]) == (0, "erp-gold-2026-12: good"), good.output
    held = json.loads(path.read_text())
    held["report"]["content"]["objectives"][0]["is_kept"] = True
    path.write_text(json.dumps(held))
    changed = sla("report", "verify", str(path))
    assert changed.exit_code == 1
    assert "the file's digest is not that of its report" in changed.output
    assert sla("report", "verify").output == "1 reports: each names the digest of the one before it\n"


def test_a_customer_s_copy_in_a_file_is_checked_with_the_whole_report(sla: Terminal, tmp_path: Path) -> None:
    """By the provider; what customers get is in tests/unit/sla_server/api/test_scope.py."""
    path = tmp_path / "copy.json"
    (row,) = sla.source.stored_reports.issued_rows
    copy = plain(report_for_customer(IssuedReport.model_validate_json(row["body"])))
    held = {"digest": row["digest"], "is_copy": True, "report": copy}
    path.write_text(json.dumps(held))
    good = sla("report", "verify", str(path))
    assert (good.exit_code, good.output.splitlines()[0]) == (0, "erp-gold-2026-12: good"), good.output
    assert "checked: this copy, and the digest of the whole report that it names" in good.output
    copy["content"]["objectives"][0]["is_kept"] = True
    path.write_text(json.dumps(held))
    changed = sla("report", "verify", str(path))
    assert (changed.exit_code, "it was changed" in changed.output) == (1, True)
    path.write_text(json.dumps({**held, "digest": "0" * 64}))
    assert "has another digest" in sla("report", "verify", str(path)).output


def test_verify_says_which_figure_differs(sla: Terminal) -> None:
    sla.source.stored_reports.slices[0]["state"] = "bad"
    done = sla("report", "verify", "erp-gold-2026-12")
    assert done.exit_code == 1
    assert "differs: objectives[latency].slices.bad: the report says 5, what is stored gives 6" in done.output


def test_the_whole_chain_is_checked_a_page_after_the_other(
    sla: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = sla.source.stored_reports
    for day in range(18, 22):
        assert issue(stored, "erp-gold", f"2026-12-{day}", "ann", api.NOW_US) is not None  # type: ignore[arg-type]
    monkeypatch.setattr(handlers, "CHAIN_PAGE", 2)
    done = sla("report", "verify")
    assert done.output == "5 reports: each names the digest of the one before it\n"
    stored.issued_rows[4]["digest"] = "f" * 64
    done = sla("report", "verify")
    assert (done.exit_code, done.output.splitlines()[-1]) == (1, "5 reports: the chain is broken")
