"""``sla report``: forms, files, and what is refused."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from tests.support.cli import Terminal


def test_a_report_as_text(sla: Terminal) -> None:
    lines = sla("report", "erp-gold", "--period", "2026-12").output.splitlines()
    assert lines[0].startswith("erp-gold, 2026-12: 2026-12-01 00:00 to 2027-01-01 00:00 (Europe/Berlin)")
    assert "for acme by storage-team; gold, calendar month (Europe/Berlin)" in lines
    assert "  NOT KEPT: 91.666 % of 99 % promised" in lines
    assert "  batch: 4 min 59 s in 1 throttles" in lines


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
