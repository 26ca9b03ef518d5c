"""Maintenance and calendars as documents: scope, what they excuse and since when, service hours."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from sla_server.agreements import periods
from sla_server.agreements.calendars import CalendarDocument, CalendarInForce
from sla_server.agreements.document import Agreement
from sla_server.agreements.errors import AgreementsRefused
from sla_server.agreements.load import load_documents
from sla_server.agreements.maintenance import AnnouncedWork, MaintenanceDocument
from tests.support.agreements import agreement, calendar_text, in_force, maintenance_text, simple

HOUR_US = 3_600_000_000
DAY_US = 24 * HOUR_US


def us(text: str) -> int:
    return round(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() * 1e6)


def work(text: str, applied: str = "2026-01-01", ended: str = "") -> AnnouncedWork:
    (loaded,) = load_documents(text, 60)
    assert isinstance(loaded.document, MaintenanceDocument)
    return AnnouncedWork(loaded.document, 1, us(applied), us(ended) if ended else None)


def calendar(text: str, applied: str = "2026-01-01", ended: str = "") -> CalendarInForce:
    (loaded,) = load_documents(text, 60)
    assert isinstance(loaded.document, CalendarDocument)
    return CalendarInForce(loaded.document, 1, us(applied), us(ended) if ended else None)


def field_of(text: str) -> list[str]:
    with pytest.raises(AgreementsRefused) as caught:
        load_documents(text, 60)
    return [problem.field for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("scope", "covered"),
    [
        ("agreements: [gold]", True),
        ("agreements: [gol?]", True),
        ("agreements: [silver]", False),
        ("labels: {customer: acme}", True),
        ("labels: {customer: acme, tier: x}", False),
        ("agreements: [silver], labels: {customer: acme}", False),
        ("volumes: [db-7]", True),
        ('volumes: ["*-7"]', True),
        ("volumes: [vol-7]", False),
    ],
)
def test_a_scope_is_agreements_by_name_and_label_or_volumes(scope: str, covered: bool) -> None:
    text = simple(volumes='"db-*"').replace("{name: gold}", "{name: gold, labels: {customer: acme}}")
    item = in_force(text)
    assert work(maintenance_text(scope=scope)).covers(item.agreement, item.volumes) is covered


@pytest.mark.parametrize("scope", ["", "agreements: [a], volumes: [b]", "labels: {a: b}, volumes: [b]"])
def test_a_scope_of_both_or_neither_is_refused(scope: str) -> None:
    assert field_of(maintenance_text(scope=scope)) == ["spec.scope"]


def test_work_excuses_nothing_before_it_was_applied_nor_after_it_ended() -> None:
    text = maintenance_text(when='start: "2026-02-03T10:00", duration: 4h')
    whole = work(text)
    assert list(whole.spans(0, us("2027-01-01"))) == [(us("2026-02-03T10:00"), us("2026-02-03T14:00"))]
    late = work(text, applied="2026-02-03T11:00", ended="2026-02-03T12:00")
    assert list(late.spans(0, us("2027-01-01"))) == [(us("2026-02-03T11:00"), us("2026-02-03T12:00"))]
    assert (late.is_past(us("2026-02-03T12:00")), late.is_past(us("2026-02-03T11:59"))) == (True, False)
    assert list(work(text, applied="2026-02-03T15:00").spans(0, us("2027-01-01"))) == []


HOURLY = agreement(simple(slice_text="1h"))


def excuse(begin: str, *beside: AnnouncedWork, agreed: Agreement = HOURLY) -> str | None:
    """Of the slice of an hour that begins then."""
    return periods.is_excluded(agreed, beside, us(begin), end_us=us(begin) + HOUR_US)


def test_a_slice_that_had_begun_when_work_was_announced_is_judged() -> None:
    """Else a minute of it, applied at the end of a bad hour, excuses the hour."""
    now = 'start: "2026-02-03T10:59", duration: 2m'
    begun = work(maintenance_text(when=now), applied="2026-02-03T10:59")
    assert excuse("2026-02-03T10:00", begun) is None
    assert excuse("2026-02-03T11:00", begun) == "maintenance move: new disks"
    announced = work(maintenance_text(when=now), applied="2026-02-03T10:00")
    assert excuse("2026-02-03T10:00", announced) == "maintenance move: new disks"
    assert periods.is_excluded(HOURLY, [begun], us("2026-02-03T10:59")) is not None, "live it holds at once"


def test_so_is_one_that_had_begun_when_its_notice_was_over() -> None:
    agreed = agreement(simple(slice_text="1h", extra="  maintenance: {notice: 90m}\n"))
    late = work(maintenance_text(), applied="2026-02-03T09:00")
    found = [excuse(f"2026-02-03T{hour}:00", late, agreed=agreed) for hour in (10, 11, 12, 13, 14)]
    assert [reason is not None for reason in found] == [False, True, True, True, False]


def test_an_edit_that_leaves_the_times_excuses_the_slice_that_runs() -> None:
    """Announced before it began, with another reason since; other times are another announcement."""
    when = 'start: "2026-02-03T10:40", duration: 1h'
    first = work(maintenance_text(when=when), ended="2026-02-03T10:20")
    again = replace(work(maintenance_text(when=when, reason="new fans"), "2026-02-03T10:20"), version=2)
    assert excuse("2026-02-03T10:00", first, again) == "maintenance move: new fans"
    sooner = work(maintenance_text(when=when.replace("10:40", "10:30")), "2026-02-03T10:20")
    assert excuse("2026-02-03T10:00", first, replace(sooner, version=2)) is None


def test_repeated_work_in_its_zone_ends_with_its_document() -> None:
    text = maintenance_text(
        when='start: "2026-03-01T03:00", duration: 1h, rrule: "FREQ=WEEKLY;BYDAY=SU", tz: Europe/Berlin'
    )
    found = work(text, ended="2026-04-06")
    starts = [start for start, _ in found.spans(us("2026-03-21"), us("2027-01-01"))]
    assert starts == [us("2026-03-22T02:00"), us("2026-03-29T01:00"), us("2026-04-05T01:00")]
    assert found.next_span(us("2026-03-22T02:30"), DAY_US) == (us("2026-03-22T02:00"), us("2026-03-22T03:00"))
    assert found.next_span(us("2026-03-23"), DAY_US) is None


def test_one_question_answers_for_work_within_and_beside_the_agreement() -> None:
    own = '  maintenance: {max_per_period: 3h, windows: [{start: "2026-02-01T00:00", duration: 2h, ' \
        "reason: disks, author: ann}]}\n"  # fmt: skip
    agreed = agreement(simple(extra=own))
    beside = [work(maintenance_text(name="move", when='start: "2026-02-03T10:00", duration: 4h'))]

    def at(text: str, **more: Any) -> str | None:
        return periods.is_excluded(agreed, beside, us(text), **more)

    assert at("2026-02-01T01:00") == "maintenance: disks"
    assert at("2026-02-03T09:59") is None
    assert at("2026-02-03T09:59", end_us=us("2026-02-03T10:01")) == "maintenance move: new disks"
    assert at("2026-02-03T10:59") == "maintenance move: new disks"
    assert at("2026-02-03T11:00") is None, "three hours of the month are used up: two own, one beside"
    assert periods.planned_us(agreed, beside, us("2026-02-01"), us("2026-03-01")) == 6 * HOUR_US


BANK = simple(extra="  service_hours: {calendar: bank}\n")


@pytest.mark.parametrize(
    ("at", "inside"),
    [
        ("2026-02-02T06:59:59", False),
        ("2026-02-02T07:00", True),  # Monday 08:00 in Berlin
        ("2026-02-02T11:30", False),  # lunch
        ("2026-02-02T12:00", True),
        ("2026-02-07T10:00", False),  # Saturday
        ("2026-02-03T10:00", False),  # a holiday
    ],
)
def test_a_named_calendar_has_hours_and_holidays_of_its_own(at: str, inside: bool) -> None:
    versions = [calendar(calendar_text(holidays="2026-02-03"))]
    agreed = agreement(BANK)
    reason = periods.is_excluded(agreed, (), us(at), calendar=versions)
    assert reason == (None if inside else "outside service hours")


def test_service_time_of_a_week_with_a_holiday() -> None:
    hours = agreement(BANK).spec.service_hours
    versions = [calendar(calendar_text(holidays="2026-02-03"))]
    week = us("2026-02-01T23:00"), us("2026-02-08T23:00")
    assert periods.service_us(hours, *week, "UTC", versions) == 4 * 9 * HOUR_US
    assert periods.service_us(hours, *week, "UTC") == 7 * DAY_US, "without its calendar it always holds"


def test_each_slice_asks_the_version_of_its_time() -> None:
    old = calendar(calendar_text(), ended="2026-02-10")
    new = calendar(calendar_text(holidays="2026-02-03, 2026-02-11"), applied="2026-02-10")
    agreed = agreement(BANK)

    def at(text: str) -> str | None:
        return periods.is_excluded(agreed, (), us(text), calendar=[old, new])

    assert at("2026-02-03T10:00") is None
    assert at("2026-02-11T10:00") == "outside service hours"
    assert at("2025-12-29T10:00") is None, "before the first version the first holds"


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("name: bank", "name: business", "metadata.name"),
        ('to: "12:00"', 'to: "07:00"', "spec.hours[0]"),
        ('from: "13:00"', 'from: "11:00"', "spec"),
        ("holidays: [2026-12-25]", "holidays: [25.12.]", "spec.holidays[0]"),
        ("holidays:", "hollidays:", "spec.hollidays"),
        ("Europe/Berlin", "Europe/Berlim", "spec.tz"),
    ],
)
def test_a_mistake_in_a_calendar_is_found(old: str, new: str, field: str) -> None:
    text = calendar_text()
    assert old in text
    assert field in field_of(text.replace(old, new))


def test_documents_survive_json() -> None:
    for text in (calendar_text(), maintenance_text()):
        (loaded,) = load_documents(text, 60)
        assert type(loaded.document).from_json(loaded.document.spec_json()) == loaded.document
        with pytest.raises(TypeError, match="no agreement"):
            _ = loaded.agreement
