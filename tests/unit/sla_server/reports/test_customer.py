"""The customer's copy of a report: no form of it names a neighbour or staff, and each figure is in it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from sla_server.reports.compute import compute_report
from sla_server.reports.customer import (
    content_for_customer,
    labels_of,
    report_for_customer,
    verification_for_customer,
)
from sla_server.reports.document import IssuedReport, ReportContent, canonical, plain
from sla_server.reports.html import as_html
from sla_server.reports.inputs import read_inputs
from sla_server.reports.issue import changed_fields, summary_of
from sla_server.reports.text import as_csv, as_text
from tests.support.reports import example_month, throttle_row

OTHERS = ("batch", "scan", "hr-gold", "acme-and-globex", "glo-1", "ann", "bea", "carl")
"""Neighbours, their groups and people of the provider, in the example."""


def example() -> ReportContent:
    rows, now = example_month()
    first = rows.stored_throttles[0]
    times = {"group_name": "acme-and-globex", "victim": "erp-gold/latency", "members": ["glo-1", "batch"]}
    rows.stored_throttles.append(
        throttle_row("", first["requested_us"], first["released_us"], **times, throttle_id="t-group")
    )
    return compute_report(read_inputs(rows, "erp-gold", "2026-10", now))  # type: ignore[arg-type]


def example_issued() -> IssuedReport:
    content = example()
    cheaper = [
        each.model_copy(update={"volume": "scan-2", "throttled_s": 1}) for each in content.throttling.others
    ]
    throttling = content.throttling.model_copy(update={"others": cheaper})
    older = content.model_copy(update={"throttling": throttling, "notes": ["an older note"]})
    return IssuedReport(
        number=7, report_id="erp-gold-2026-10-r1", revision=1, revises="erp-gold-2026-10",
        revised=changed_fields(older, content), issued_us=content.as_of_us, issued_by="ann",
        previous="ab" * 32, content=content,
    )  # fmt: skip


@pytest.mark.parametrize("form", ["json", "html", "text", "csv"])
def test_no_form_names_others(form: str) -> None:
    whole = example_issued()
    copy = report_for_customer(whole)
    made = {
        "json": lambda: canonical(copy).decode(),
        "html": lambda: as_html(copy.content, copy, "d" * 64, is_copy=True),
        "text": lambda: as_text(copy.content, copy, "d" * 64, is_copy=True),
        "csv": lambda: as_csv(copy.content),
    }[form]()
    assert [name for name in OTHERS if re.search(rf"\b{name}\b", made)] == []
    if form in ("html", "text"):
        assert "the whole report" in made
        assert "d" * 64 in made
        assert "neighbour 1" in made


def test_a_neighbour_has_one_number_in_all_of_a_report_and_keeps_its_figures() -> None:
    whole = example()
    copy = content_for_customer(whole)
    number = {
        each.volume: other.volume
        for each, other in zip(whole.throttling.others, copy.throttling.others, strict=True)
    }
    assert sorted(number) == ["batch", "group acme-and-globex", "scan"]
    assert sorted(number.values()) == ["neighbour 1", "neighbour 2", "neighbour 3"]
    for each, other in zip(whole.episodes, copy.episodes, strict=True):
        assert other.volumes == [number[name] for name in each.volumes]
    (neighbours,) = (each for each in copy.episodes if each.cause == "neighbours")
    assert neighbours.cause_text == (
        f"others used the same storage; slowed down for it: {', '.join(neighbours.volumes)}"
    )
    for each, other in zip(whole.throttling.others, copy.throttling.others, strict=True):
        assert (other.throttled_s, other.ios, other.delayed_s) == (each.throttled_s, each.ios, each.delayed_s)
    assert [each.volume for each in copy.throttling.own] == ["vol-17"]
    hidden = ("throttling", "episodes", "maintenance", "versions")
    was, now = plain(whole), plain(copy)
    assert {key for key in was if was[key] != now[key]} == {*hidden}


def test_of_a_revision_what_changed_about_others_is_left_out() -> None:
    whole = example_issued()
    assert any("scan-2" in str(each.before) for each in whole.revised)
    copy = report_for_customer(whole)
    assert [each.field for each in copy.revised] == ["notes"]
    assert copy.issued_by == "storage-team"


def test_a_check_says_where_something_differs_and_no_name() -> None:
    found = {"is_good": False, "findings": [
        {"meaning": "gone", "where": "throttling.others[0].volume", "text": "the report says batch"},
        {"meaning": "differs", "where": "objectives[latency].due_s", "text": "5 and 6"},
    ]}  # fmt: skip
    shown = verification_for_customer(found)
    assert [each["where"] for each in shown["findings"]] == [each["where"] for each in found["findings"]]  # type: ignore[index]
    assert "batch" not in shown["findings"][0]["text"]
    assert shown["findings"][1]["text"] == "5 and 6"
    assert shown["is_good"] is False


@pytest.mark.parametrize(
    ("row", "body", "wanted"),
    [
        ({"summary": {"labels": {"customer": "acme"}}}, None, {"customer": "acme"}),
        ({"summary": {"labels": {}}}, None, {}),
        ({"summary": {}}, {"content": {"agreement": {"labels": {"a": "b"}}}}, {"a": "b"}),
        ({"summary": {}}, {"content": {"agreement": {}}}, None),
        ({"summary": None}, {"form": 99}, None),
        ({"summary": {}}, ["no", "object"], None),
        ({"summary": {"labels": "acme"}}, None, None),
    ],
)
def test_whose_a_report_is(row: Any, body: Any, wanted: Any) -> None:
    assert labels_of(row, body) == wanted


def test_a_new_report_says_so_in_its_row() -> None:
    assert labels_of({"summary": summary_of(example())}) == {"customer": "acme"}
