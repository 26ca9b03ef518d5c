"""What verify makes of a report that does not add up, and of one that nothing is stored of any more."""

from __future__ import annotations

from typing import Any

import pytest

from sla_server.reports.compute import compute_report
from sla_server.reports.document import ReportContent
from sla_server.reports.errors import NothingToReport
from sla_server.reports.inputs import read_inputs
from sla_server.reports.issue import issue
from sla_server.reports.verify import Verification, check_document, check_sums, verify_report
from tests.support.agreements import FULL
from tests.support.reports import at_us, example_month, version_row


def content() -> ReportContent:
    rows, now = example_month()
    return compute_report(read_inputs(rows, "erp-gold", "2026-10", now))  # type: ignore[arg-type]


def sums_of(made: ReportContent) -> list[str]:
    found = Verification("r")
    check_sums(found, made)
    return [each.where for each in found.findings]


def changed(made: ReportContent, **fields: Any) -> ReportContent:
    """With other figures of its one objective."""
    (one,) = made.objectives
    return made.model_copy(update={"objectives": [one.model_copy(update=fields)]})


def test_a_report_adds_up() -> None:
    assert sums_of(content()) == []


def test_what_does_not_add_up_is_named() -> None:
    made = content()
    (one,) = made.objectives
    assert sums_of(changed(made, due_s=one.due_s + 60)) == ["objectives[latency].due_s"]
    slices = one.slices.model_copy(update={"bad": 0})
    assert sums_of(changed(made, slices=slices)) == ["objectives[latency].slices.bad"]
    time = one.time.model_copy(update={"planned_s": 0})
    assert sums_of(changed(made, time=time)) == ["objectives[latency].time.all_s"]
    (period,) = made.credits.periods
    lines = [line.model_copy(update={"credit": 0.0}) for line in period.objectives]
    owed = made.credits.model_copy(update={"periods": [period.model_copy(update={"objectives": lines})]})
    assert sums_of(made.model_copy(update={"credits": owed})) == ["credits.latency", "credits"]


def test_throttles_that_are_no_longer_stored_are_no_fault() -> None:
    rows, now = example_month()
    row = issue(rows, "erp-gold", "2026-10", "ann", now)  # type: ignore[arg-type]
    assert row is not None
    rows.stored_throttles.clear()
    found = verify_report(rows, row, None)  # type: ignore[arg-type]
    assert found.is_good
    assert {each.meaning for each in found.findings} == {"gone"}
    assert any(each.where.startswith("throttling") for each in found.findings)
    rows.slices.clear()
    without = verify_report(rows, row, None)  # type: ignore[arg-type]
    assert ("gone", "objectives") in [(each.meaning, each.where) for each in without.findings]


def test_the_audit_log_is_compared() -> None:
    rows, now = example_month()
    row = issue(rows, "erp-gold", "2026-10", "ann", now)  # type: ignore[arg-type]
    assert row is not None
    for after, wheres in (
        (None, []),
        ({"digest": row["digest"]}, []),
        ({"digest": "f" * 64}, ["audit"]),
    ):
        found = Verification("r")
        check_document(found, row, {"after": after})
        assert [each.where for each in found.findings] == wheres


def test_credits_of_periods_under_other_penalties_are_no_fault() -> None:
    rows, _ = example_month()
    november = at_us("2026-11-02", "Europe/Berlin")
    rows.versions[-1]["ended_us"] = november
    text = FULL.replace("credit: 0.10", "credit: 0.20")
    rows.versions.append(version_row(text, 3, november))
    quarter = compute_report(read_inputs(rows, "erp-gold", "2026-Q4", at_us("2027-01-10")))  # type: ignore[arg-type]
    assert [period.version for period in quarter.credits.periods] == [2, 3, 3]
    assert sums_of(quarter) == []
    (october, *others) = quarter.credits.periods
    wrong = [october.model_copy(update={"uncapped": 0.0, "credit": 0.0}), *others]
    owed = quarter.credits.model_copy(update={"periods": wrong})
    assert sums_of(quarter.model_copy(update={"credits": owed})) == ["credits"]


def test_what_lists_show_is_compared_with_the_report() -> None:
    rows, now = example_month()
    row = issue(rows, "erp-gold", "2026-10", "ann", now)  # type: ignore[arg-type]
    assert row is not None
    kept = [{**each, "is_kept": False} for each in row["summary"]["objectives"]]
    for name, value in (
        ("summary", {**row["summary"], "objectives": kept}),
        ("period", "2026-09"),
        ("is_preliminary", True),
        ("name", "other"),
    ):
        found = Verification("r")
        check_document(found, {**row, name: value}, None)
        assert [(each.meaning, each.where) for each in found.findings] == [("broken", name)]
    assert row["summary"]["objectives"][0]["promised"] < row["summary"]["objectives"][0]["compliance"]
    older = {**row["summary"]}
    del older["customer"]
    found = Verification("r")
    check_document(found, {**row, "summary": older}, None)
    assert found.findings == [], "of a release that did not write it"


def test_slices_that_are_no_longer_stored_make_no_revision() -> None:
    rows, now = example_month()
    assert issue(rows, "erp-gold", "2026-10", "ann", now) is not None  # type: ignore[arg-type]
    del rows.slices[:200]
    with pytest.raises(NothingToReport, match="erp-gold-2026-10 rests on are no longer stored"):
        issue(rows, "erp-gold", "2026-10", "ann", now)  # type: ignore[arg-type]
    assert len(rows.issued_rows) == 1


def test_the_final_report_revises_a_preliminary_one_of_another_release_and_none_that_was_final() -> None:
    rows, now = example_month()
    assert issue(rows, "erp-gold", "2026-10", "ann", now) is not None  # type: ignore[arg-type]
    (stored,) = rows.issued_rows
    stored["body"] = '{"form": 99}'
    with pytest.raises(NothingToReport, match="another release"):
        issue(rows, "erp-gold", "2026-10", "ann", now)  # type: ignore[arg-type]
    stored["is_preliminary"] = True
    row = issue(rows, "erp-gold", "2026-10", "ann", now, only_first=True)  # type: ignore[arg-type]
    assert row is not None
    assert (row["report_id"], row["revises"], row["is_preliminary"]) == (
        "erp-gold-2026-10-r1", "erp-gold-2026-10", False,
    )  # fmt: skip
    assert issue(rows, "erp-gold", "2026-10", "ann", now) is None  # type: ignore[arg-type]
