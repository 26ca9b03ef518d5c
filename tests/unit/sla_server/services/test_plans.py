"""Maintenance and calendars in force: versions, what they attach to, warnings, reading back from own rows."""

from __future__ import annotations

import json

import pytest

from sla_server.agreements.errors import AgreementsRefused
from sla_server.agreements.load import Loaded, load_documents
from sla_server.services import catalog as catalogs
from sla_server.services.catalog import Catalog, Change
from tests.support.agreements import calendar_text, maintenance_text, simple
from tests.support.services import START_US, FakeStore

NOW = START_US  # 2027-01-01
HOUR_US = 3_600_000_000
TODAY = 'start: "2027-01-01T10:00", duration: 2h'
BANK = "  service_hours: {calendar: bank}\n"


def docs(*texts: str) -> list[Loaded]:
    return load_documents("---\n".join(texts), 60)


def apply(catalog: Catalog, *texts: str, now_us: int = NOW) -> Change:
    return catalogs.apply(catalog, docs(*texts), "ann", now_us)


def reread(*changes: Change, now_us: int = NOW) -> Catalog:
    store = FakeStore()
    for change in changes:
        store.keep(json.loads(json.dumps(change.rows)))
    catalog, problems = catalogs.from_rows(store.agreements(), [], now_us, store.documents())
    assert problems == []
    return catalog


def test_maintenance_reaches_the_agreements_in_its_scope() -> None:
    change = apply(Catalog(), simple("gold"), simple("silver"), maintenance_text(when=TODAY))
    assert change.applied[2] == {
        "kind": "Maintenance", "name": "move", "version": 1, "changed": True, "agreements": 1,
    }  # fmt: skip
    assert [table for table, _ in change.rows][:3] == ["documents", "audit", "events"]
    gold, silver = change.catalog.items
    assert (gold.excluded(NOW + 10 * HOUR_US), silver.excluded(NOW + 10 * HOUR_US)) == (
        "maintenance move: new disks",
        None,
    )
    assert change.warnings == []
    assert reread(change) == change.catalog


def test_an_agreement_applied_later_is_in_scope_too() -> None:
    first = apply(Catalog(), maintenance_text(when=TODAY))
    assert "no agreement in force is in its scope" in first.warnings[0]
    second = apply(first.catalog, simple("gold"), now_us=NOW + 5)
    assert second.catalog.items[0].work == first.catalog.plans.works
    assert reread(first, second) == second.catalog


def test_an_equal_document_changes_nothing_and_an_edit_makes_a_version() -> None:
    first = apply(Catalog(), simple("gold"), maintenance_text(when=TODAY))
    again = apply(first.catalog, "# a comment\n" + maintenance_text(when=TODAY))
    assert (again.rows, again.catalog) == ([], first.catalog)
    longer = apply(first.catalog, maintenance_text(when=TODAY.replace("2h", "3h")), now_us=NOW + 5)
    assert longer.applied[0]["version"] == 2
    (audit,) = [row for table, row in longer.rows if table == "audit"]
    assert audit["after"]["changes"] == [{"field": "spec.duration", "before": "2h", "after": "3h"}]
    assert longer.catalog.items[0].excluded(NOW + 12 * HOUR_US)
    assert reread(first, longer) == longer.catalog


def test_the_end_of_maintenance_leaves_what_it_has_excused() -> None:
    first = apply(Catalog(), simple("gold"), maintenance_text(when=TODAY))
    ended = catalogs.end_document(first.catalog, "Maintenance", "move", "bob", NOW + 11 * HOUR_US)
    assert ended is not None
    (gold,) = ended.catalog.items
    assert gold.excluded(NOW + 11 * HOUR_US - 1)
    assert gold.excluded(NOW + 11 * HOUR_US) is None
    assert [(table, row.get("action")) for table, row in ended.rows][1] == ("audit", "maintenance-ended")
    assert catalogs.end_document(ended.catalog, "Maintenance", "move", "bob", NOW) is None
    assert reread(first, ended) == ended.catalog
    again = apply(reread(first, ended), maintenance_text(when=TODAY), now_us=NOW + 12 * HOUR_US)
    assert again.applied[0]["version"] == 2


def test_what_was_agreed_about_maintenance_is_warned_of() -> None:
    rule = "  maintenance: {notice: 7d, max_per_period: 1h}\n"
    change = apply(Catalog(), simple("gold", extra=rule), maintenance_text(when=TODAY))
    assert change.warnings == [
        "move: less notice than was agreed with gold; what lies within it is not excused",
    ]
    long = maintenance_text("long", when='start: "2027-01-20T10:00", duration: 2h')
    assert apply(Catalog(), simple("gold", extra=rule), long).warnings == [
        "long: more maintenance in the period than gold excuses; what is beyond counts",
    ]
    in_time = maintenance_text("later", when='start: "2027-02-01T10:00", duration: 1h')
    assert apply(change.catalog, in_time).warnings == []
    past = apply(change.catalog, maintenance_text("past", when='start: "2026-12-01T10:00", duration: 1h'))
    assert past.warnings == ["past: there is nothing of it after now, so it excuses nothing"]


def test_many_agreements_are_counted_not_listed() -> None:
    rule = "  maintenance: {notice: 7d}\n"
    agreed = [simple(f"s{i}", extra=rule) for i in range(8)]
    change = apply(Catalog(), *agreed, maintenance_text(scope='agreements: ["*"]', when=TODAY))
    assert len(change.warnings) == 1
    assert change.warnings[0].startswith(
        "move: less notice than was agreed with s0, s1, s2, s3, s4 and 3 more; "
    )


def test_an_unknown_calendar_is_refused_with_the_known_names() -> None:
    known = apply(Catalog(), calendar_text("bank"), calendar_text("shop")).catalog
    with pytest.raises(AgreementsRefused) as caught:
        apply(known, simple("gold"), simple("silver", extra="  service_hours: {calendar: bnak}\n"))
    (problem,) = caught.value.problems
    assert (problem.field, problem.document) == ("spec.service_hours.calendar", "silver")
    assert problem.fix.startswith("Use one of always, business, bank, shop")
    assert problem.line > 10


def test_a_calendar_and_its_agreement_may_come_in_one_file_in_any_order() -> None:
    change = apply(Catalog(), simple("gold", extra=BANK), calendar_text("bank"))
    (gold,) = change.catalog.items
    assert gold.excluded(NOW - 20 * 24 * HOUR_US + 3 * HOUR_US) == "outside service hours"  # 04:00 in Berlin
    assert gold.excluded(NOW + 9 * HOUR_US) is None
    edited = apply(change.catalog, calendar_text("bank", holidays="2027-01-01"), now_us=NOW + 10 * HOUR_US)
    (gold,) = edited.catalog.items
    assert gold.version == 1
    assert gold.excluded(NOW + 9 * HOUR_US) is None, "what was is judged by the calendar of its time"
    assert gold.excluded(NOW + 12 * HOUR_US + HOUR_US // 2) == "outside service hours"
    assert reread(change, edited) == edited.catalog


def test_a_calendar_in_use_is_not_ended() -> None:
    change = apply(Catalog(), simple("gold", extra=BANK), calendar_text("bank"), calendar_text("shop"))
    with pytest.raises(AgreementsRefused, match="used by gold"):
        catalogs.end_document(change.catalog, "Calendar", "bank", "ann", NOW)
    ended = catalogs.end_document(change.catalog, "Calendar", "shop", "ann", NOW)
    assert ended is not None
    assert ended.catalog.plans.calendar_names() == ["bank"]


def test_a_document_of_another_release_is_reported_and_the_others_hold() -> None:
    change = apply(Catalog(), maintenance_text("a", when=TODAY), maintenance_text("b", when=TODAY))
    rows = [json.loads(json.dumps(row)) for table, row in change.rows if table == "documents"]
    rows[0]["spec"]["spec"]["new_key"] = 1
    catalog, problems = catalogs.from_rows([], [], NOW, rows)
    assert [work.name for work in catalog.plans.works] == ["b"]
    ((table, event),) = problems
    assert (table, event["kind"], event["severity"]) == ("events", "document-unreadable", "critical")
    assert apply(catalog, maintenance_text("a", when=TODAY)).applied[0]["version"] == 2


def test_old_maintenance_is_forgotten_after_the_longest_window() -> None:
    change = apply(Catalog(), maintenance_text(when=TODAY))
    assert reread(change, now_us=NOW + 400 * 24 * HOUR_US).plans.works
    forgotten = reread(change, now_us=NOW + 460 * 24 * HOUR_US)
    assert (forgotten.plans.works, forgotten.plans.highest) == ((), {("Maintenance", "move"): 1})


def test_the_difference_of_an_edit_is_in_the_audit_log() -> None:
    first = apply(Catalog(), simple())
    second = apply(first.catalog, simple(value_ms=3), now_us=NOW + 5)
    (audit,) = [row for table, row in second.rows if table == "audit"]
    field = "spec.objectives[latency].demand_curve[0].value_ms"
    assert audit["after"] == {
        "version": 2, "changes": [{"field": field, "before": 12.0, "after": 3.0}],
    }  # fmt: skip


LIMIT = "  maintenance: {max_per_period: 3h%s}\n"
OWN = ', windows: [{start: "2027-01-01T10:00", duration: 2h, reason: disks, author: ann}]'
LATER = maintenance_text("later", when='start: "2027-01-20T00:00", duration: 4h')


def used(catalog: Catalog) -> tuple[bool, bool]:
    """Whether the first and the second hour of the later work are excused."""
    (gold,) = catalog.items
    start_us = NOW + 19 * 24 * HOUR_US
    return gold.excluded(start_us) is not None, gold.excluded(start_us + HOUR_US) is not None


@pytest.mark.parametrize("way", ["edited", "deleted", "another scope"])
def test_work_of_a_former_version_counts_against_what_the_period_excuses(way: str) -> None:
    """Two of three hours are used up on the first of the month; the version of then is no longer in force."""
    beside = way == "another scope"
    labels = simple("gold", extra=LIMIT % "").replace("{name: gold}", "{name: gold, labels: {a: b}}")
    old = labels if beside else simple("gold", extra=LIMIT % OWN)
    first = apply(Catalog(), old, maintenance_text(scope="labels: {a: b}", when=TODAY) if beside else LATER)
    changes, at_us = [first], NOW + 15 * HOUR_US
    if way == "deleted":
        gone = catalogs.delete(first.catalog, "gold", "ann", at_us)
        assert gone is not None
        changes.append(gone)
    changes.append(apply(changes[-1].catalog, simple("gold", extra=LIMIT % ""), LATER, now_us=at_us))
    catalog = changes[-1].catalog
    assert used(catalog) == (True, False)
    # Also after a restart, weeks after the last slice of the former version was judged.
    assert used(reread(*changes, now_us=NOW + 19 * 24 * HOUR_US)) == (True, False)
    assert reread(*changes, now_us=NOW + 460 * 24 * HOUR_US).former == {}
    third = apply(catalog, simple("gold", value_ms=3, extra=LIMIT % ""), now_us=at_us + 1)
    assert used(third.catalog) == (True, False), "and of the version before that"


def test_what_lay_before_a_version_uses_up_nothing_of_it() -> None:
    """It excused nothing: work is announced before it is done."""
    first = apply(Catalog(), simple("gold", extra=LIMIT % OWN), LATER, now_us=NOW + 11 * HOUR_US)
    assert used(first.catalog) == (True, True), "one of its two hours was before"
    late = apply(Catalog(), simple("gold", extra=LIMIT % OWN), LATER, now_us=NOW + 15 * HOUR_US)
    (gold,) = late.catalog.items
    assert gold.planned_us(NOW, NOW + 31 * 24 * HOUR_US) == 4 * HOUR_US


def test_a_version_without_announced_work_is_not_kept() -> None:
    first = apply(Catalog(), simple("gold", extra=LIMIT % ""))
    second = apply(first.catalog, simple("gold", value_ms=3, extra=LIMIT % ""), now_us=NOW + 5)
    assert second.catalog.former == {}
    assert second.catalog.items[0].former == ()


WITH_NOTICE = simple("gold", extra="  maintenance: {notice: 4h}\n")


def test_work_is_excused_from_its_notice_on() -> None:
    long = maintenance_text(when='start: "2027-01-01T01:00", duration: 10h')
    (gold,) = apply(Catalog(), WITH_NOTICE, long).catalog.items
    assert [gold.excluded(NOW + hour * HOUR_US) is None for hour in (1, 3, 4, 10, 11)] == [
        True, True, False, False, True,
    ]  # fmt: skip
    assert gold.planned_us(NOW, NOW + 24 * HOUR_US) == 7 * HOUR_US
    in_time = maintenance_text(when='start: "2027-01-01T04:00", duration: 1h')
    change = apply(Catalog(), WITH_NOTICE, in_time)
    assert change.catalog.items[0].excluded(NOW + 4 * HOUR_US) is not None
    assert change.warnings == []


def test_an_edit_begins_no_other_notice_unless_the_times_are_others() -> None:
    first = apply(Catalog(), WITH_NOTICE, maintenance_text(when=TODAY)).catalog
    edited = apply(first, maintenance_text(when=TODAY, reason="other disks"), now_us=NOW + 8 * HOUR_US)
    assert edited.catalog.items[0].excluded(NOW + 10 * HOUR_US) == "maintenance move: other disks"
    assert edited.warnings == []
    later = maintenance_text(when='start: "2027-01-01T11:00", duration: 2h')
    moved = apply(first, later, now_us=NOW + 8 * HOUR_US)
    assert moved.catalog.items[0].excluded(NOW + 11 * HOUR_US) is None
    assert moved.catalog.items[0].excluded(NOW + 12 * HOUR_US) is not None, "four hours after it was moved"
    ended = catalogs.end_document(first, "Maintenance", "move", "bob", NOW + HOUR_US)
    assert ended is not None
    again = apply(ended.catalog, maintenance_text(when=TODAY), now_us=NOW + 8 * HOUR_US)
    assert again.catalog.items[0].excluded(NOW + 11 * HOUR_US) is None, "it was withdrawn meanwhile"


def test_work_of_the_agreement_itself_needs_no_notice() -> None:
    own = "  maintenance:\n    notice: 7d\n    windows: [{" + TODAY + ", reason: move, author: ann}]\n"
    change = apply(Catalog(), simple("gold", extra=own))
    assert change.catalog.items[0].excluded(NOW + 10 * HOUR_US) is not None
    assert "it is excused nevertheless" in change.warnings[0]
