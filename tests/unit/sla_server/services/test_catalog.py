"""Agreements in force as a value: versions, limits, and reading them back from their own rows."""

from __future__ import annotations

import json

import pytest

from sla_server.agreements.errors import AgreementsRefused
from sla_server.agreements.load import Loaded, load_documents
from sla_server.services import catalog as catalogs
from sla_server.services.catalog import Catalog
from tests.support.agreements import FULL, calendar_text, maintenance_text, simple
from tests.support.services import START_US, FakeStore

NOW = START_US


def docs(*texts: str) -> list[Loaded]:
    return load_documents("---\n".join(texts), 60)


def reread(*changes: catalogs.Change) -> Catalog:
    """What a restart would see once these changes are in SQL."""
    store = FakeStore()
    for change in changes:
        store.keep(json.loads(json.dumps(change.rows)))
    catalog, problems = catalogs.from_rows(store.agreements(), [], NOW)
    assert problems == []
    return catalog


def test_applying_makes_versions() -> None:
    change = catalogs.apply(Catalog(), docs(simple("a"), simple("b", value_ms=3)), "ann", NOW)
    assert change.applied == [
        {"name": "a", "version": 1, "changed": True},
        {"name": "b", "version": 1, "changed": True},
    ]
    assert [table for table, _ in change.rows] == ["agreements", "audit", "events"] * 2
    assert reread(change) == change.catalog


def test_an_equal_document_changes_nothing() -> None:
    first = catalogs.apply(Catalog(), docs(simple()), "ann", NOW)
    again = catalogs.apply(first.catalog, docs("# a comment\n" + simple()), "bob", NOW + 5)
    assert (again.rows, again.catalog) == ([], first.catalog)
    assert again.applied == [{"name": "gold", "version": 1, "changed": False}]


def test_an_edit_ends_the_old_version_where_the_new_one_begins() -> None:
    first = catalogs.apply(Catalog(), docs(simple()), "ann", NOW)
    second = catalogs.apply(first.catalog, docs(simple(value_ms=3)), "ann", NOW + 5)
    (item,), (old,) = second.catalog.items, second.catalog.ended
    assert (item.version, item.applied_us, old.version, old.ended_us) == (2, NOW + 5, 1, NOW + 5)
    assert reread(first, second) == second.catalog


def test_versions_go_on_after_a_deletion() -> None:
    first = catalogs.apply(Catalog(), docs(simple()), "ann", NOW)
    gone = catalogs.delete(first.catalog, "gold", "ann", NOW + 5)
    assert gone is not None
    assert gone.catalog.items == ()
    assert catalogs.delete(gone.catalog, "gold", "ann", NOW + 6) is None
    back = catalogs.apply(reread(first, gone), docs(simple()), "ann", NOW + 7)
    assert back.applied == [{"name": "gold", "version": 2, "changed": True}]


def test_what_cannot_be_kept_together_is_refused_as_a_whole() -> None:
    eight = docs(*(simple(f"s{i}", value_ms=1 + i) for i in range(8)))
    full = catalogs.apply(Catalog(), eight, "ann", NOW).catalog
    with pytest.raises(AgreementsRefused) as caught:
        catalogs.apply(full, docs(simple("x", volumes="other"), simple("y", value_ms=77)), "ann", NOW)
    assert "y" in caught.value.problems[0].document
    replaced = catalogs.apply(full, docs(simple("s0", value_ms=77)), "ann", NOW)
    assert len(replaced.catalog.items) == 8


def test_volumes_that_appear_are_learnt_and_not_recorded() -> None:
    wide = catalogs.apply(Catalog(), docs(simple(volumes='"db-*"')), "ann", NOW)
    grown = catalogs.with_volumes(wide.catalog, {"db-1"})
    assert (grown.rows, grown.catalog.volumes) == ([], {"db-1"})
    assert grown.catalog.items is wide.catalog.items


def test_a_gateway_that_could_not_be_told_all_refuses_the_agreement() -> None:
    names = frozenset(f"volume-{'x' * 100}-{i}" for i in range(400))
    known = catalogs.with_volumes(Catalog(), names).catalog
    wide = docs(simple(volumes='"volume-*"'))
    assert catalogs.apply(known, wide, "ann", NOW, {"g-1": ["other"]}).applied[0]["changed"]
    with pytest.raises(AgreementsRefused) as caught:
        catalogs.apply(known, wide, "ann", NOW, {"g-1": names})
    assert "gateway g-1" in caught.value.problems[0].problem


def test_an_agreement_of_another_release_is_reported_and_the_others_hold() -> None:
    change = catalogs.apply(Catalog(), docs(simple("a"), simple("b")), "ann", NOW)
    store = FakeStore()
    store.keep(json.loads(json.dumps(change.rows)))
    store.tables["agreements"][0]["spec"]["spec"]["new_key"] = 1
    catalog, problems = catalogs.from_rows(store.agreements(), [], NOW)
    assert [item.name for item in catalog.items] == ["b"]
    ((table, row),) = problems
    assert (table, row["severity"], row["subject"]) == ("events", "critical", "a")


@pytest.mark.parametrize("way", ["apply", "delete"])
def test_an_agreement_of_another_release_ends_when_it_is_applied_again_or_deleted(way: str) -> None:
    first = catalogs.apply(Catalog(), docs(simple("a"), simple("b")), "ann", NOW)
    store = FakeStore()
    store.keep(json.loads(json.dumps(first.rows)))
    store.tables["agreements"][0]["spec"]["spec"]["new_key"] = 1
    catalog, _ = catalogs.from_rows(store.agreements(), [], NOW)
    assert catalogs.delete(catalog, "c", "ann", NOW) is None
    if way == "apply":
        change = catalogs.apply(catalog, docs(simple("a")), "ann", NOW + 5)
        assert [(item.name, item.version) for item in change.catalog.items] == [("a", 2), ("b", 1)]
    else:
        deleted = catalogs.delete(catalog, "a", "ann", NOW + 5)
        assert deleted is not None
        change = deleted
        assert [table for table, _ in change.rows] == ["agreements", "audit", "events"]
        assert catalogs.delete(change.catalog, "a", "ann", NOW + 6) is None
    store.keep(json.loads(json.dumps(change.rows)))
    rows = {row["version"]: row["ended_us"] for row in store.agreements() if row["name"] == "a"}
    assert rows == ({1: NOW + 5, 2: None} if way == "apply" else {1: NOW + 5})
    again, problems = catalogs.from_rows(store.agreements(), [], NOW + 7)
    assert again.items == change.catalog.items
    assert not again.unreadable
    ((_, event),) = problems
    assert (event["severity"], "has ended" in event["text"]) == ("warning", True)


def test_warnings_name_short_notice() -> None:
    other = "  - {name: up, indicator: {metric: availability}, outage: 30s, budgeting: {target: 0.9}}\n"
    change = catalogs.apply(Catalog(), docs(simple() + other), "ann", NOW)
    assert change.warnings == [], "every indicator is judged"
    work = (
        "  maintenance: {notice: 7d, windows: ["
        '{start: "2027-01-05T00:00", duration: 1h, reason: r, author: a}, '
        '{start: "2027-02-05T00:00", duration: 1h, reason: r, author: a}]}\n'
    )
    (warning,) = catalogs.apply(Catalog(), docs(simple(extra=work)), "ann", NOW).warnings
    assert "2027-01-05" in warning


def test_slices_of_which_none_begins_in_the_hours_of_a_calendar_are_refused() -> None:
    calendar = calendar_text()
    hours = "  service_hours: {calendar: bank}\n"
    with pytest.raises(AgreementsRefused) as caught:
        catalogs.apply(Catalog(), docs(calendar, simple(slice_text="1d", extra=hours)), "ann", NOW)
    (problem,) = caught.value.problems
    assert (problem.field, problem.document) == ("spec.objectives.latency.budgeting.slice", "gold")
    assert "never in the hours of the calendar 'bank'" in problem.problem
    change = catalogs.apply(Catalog(), docs(calendar, simple(slice_text="1h", extra=hours)), "ann", NOW)
    assert len(change.catalog.items) == 1
    short = calendar.replace('from: "08:00", to: "12:00"', 'from: "08:10", to: "08:50"')
    short = short.replace('from: "13:00", to: "18:00"', 'from: "13:10", to: "13:50"')
    with pytest.raises(AgreementsRefused) as caught:  # nor may the calendar be edited so
        catalogs.apply(change.catalog, docs(short), "ann", NOW)
    (problem,) = caught.value.problems
    assert (problem.document, "gold/latency" in problem.problem) == ("bank", True)
    both = catalogs.apply(change.catalog, docs(short, simple(extra=hours)), "ann", NOW)
    assert [row["changed"] for row in both.applied] == [True, True]


def test_agreements_read_from_sql_share_what_is_equal_and_are_what_was_applied() -> None:
    change = catalogs.apply(
        Catalog(), docs(FULL, simple("a"), simple("b"), simple("c", value_ms=3)), "ann", NOW
    )
    again = reread(change)
    assert again == change.catalog
    one, two, other = (item.agreement.spec for item in again.items[:3])
    assert one.window is two.window
    assert one.objectives[0] is two.objectives[0]
    assert one.objectives != other.objectives
    assert [item.agreement.spec_json() for item in again.items] == [
        item.agreement.spec_json() for item in change.catalog.items
    ]


def test_a_volume_that_nobody_has_seen_is_a_note() -> None:
    known = catalogs.with_volumes(Catalog(), {"vol-1", "vol-2"}).catalog
    documents = docs(simple("a", volumes="vol-1, vol-*, new-1"), simple("b", volumes="vo-1, vo-*"))
    change = catalogs.apply(known, documents, "ann", NOW, {"g": {"new-1"}})
    assert [item.name for item in change.catalog.items] == ["a", "b"]
    assert [text.partition(" yet")[0] for text in change.warnings] == [
        "b: scope.volumes: no gateway has shown a volume 'vo-1'",
        "b: scope.volumes: no gateway has shown a volume 'vo-*'",
    ]
    assert catalogs.apply(Catalog(), documents, "ann", NOW).warnings == []  # nothing is known at all


BY_LABEL = simple("by-label").replace("volumes: [vol-1]", "volume_labels: tier=gold")


def labelled(name: str, volumes: str, labels: str) -> str:
    return (
        f"apiVersion: storage-sla/v1\nkind: VolumeLabels\nmetadata: {{name: {name}}}\n"
        f"spec: {{volumes: [{volumes}], labels: {{{labels}}}}}\n"
    )


def chosen(catalog: Catalog) -> tuple[str, ...]:
    item = catalog.get("by-label")
    assert item is not None
    assert item.promises[0].volumes == item.volumes
    return item.volumes


def test_labels_choose_volumes_as_these_come_and_as_their_labels_change() -> None:
    catalog = catalogs.apply(Catalog(), docs(BY_LABEL), "ann", NOW).catalog
    assert chosen(catalog) == ()
    catalog = catalogs.with_volumes(
        catalog, ["a", "b"], {"a": {"tier": "gold"}, "c": {"tier": "gold"}}
    ).catalog
    assert chosen(catalog) == ("a", "c")
    catalog = catalogs.with_volumes(catalog, [], {"a": {}}).catalog
    assert chosen(catalog) == ("c",)
    change = catalogs.apply(catalog, docs(labelled("own", "b, c", "tier: gold")), "ann", NOW + 1)
    assert chosen(change.catalog) == ("b", "c")
    assert change.catalog.get("by-label").version == 1  # type: ignore[union-attr]
    assert [table for table, _ in change.rows] == ["documents", "audit", "events"]
    ended = catalogs.end_document(change.catalog, "VolumeLabels", "own", "ann", NOW + 2)
    assert ended is not None
    assert chosen(ended.catalog) == ("c",)


def test_agreements_stay_the_same_object_while_labels_choose_the_same_volumes() -> None:
    catalog = catalogs.apply(Catalog(), docs(BY_LABEL, simple("other")), "ann", NOW).catalog
    catalog = catalogs.with_volumes(catalog, ["a"], {"a": {"tier": "gold"}}).catalog
    later = catalogs.with_volumes(catalog, ["b"], {"b": {"tier": "silver"}}).catalog
    assert later.items is catalog.items


def test_a_document_and_an_agreement_of_one_text_know_each_other() -> None:
    catalog = catalogs.with_volumes(Catalog(), ["a"]).catalog
    change = catalogs.apply(catalog, docs(BY_LABEL, labelled("own", "a", "tier: gold")), "ann", NOW)
    assert (chosen(change.catalog), change.warnings) == (("a",), [])


def test_labels_that_no_volume_has_are_a_warning() -> None:
    catalog = catalogs.with_volumes(Catalog(), ["a"]).catalog
    (warning,) = catalogs.apply(catalog, docs(BY_LABEL), "ann", NOW).warnings
    assert "no volume known has labels that fit 'tier=gold' yet" in warning


def test_labels_and_what_they_choose_are_known_again_after_a_restart() -> None:
    first = catalogs.apply(Catalog(), docs(BY_LABEL, labelled("own", "b", "tier: gold")), "ann", NOW)
    store = FakeStore()
    store.keep(json.loads(json.dumps(first.rows)))
    announced = {"a": {"tier": "gold"}}
    catalog, _ = catalogs.from_rows(store.agreements(), ["a", "b"], NOW, store.documents(), announced)
    assert chosen(catalog) == ("a", "b")


def test_work_on_a_volume_excuses_those_whose_labels_choose_it() -> None:
    catalog = catalogs.with_volumes(Catalog(), ["a", "b"], {"a": {"tier": "gold"}}).catalog
    catalog = catalogs.apply(catalog, docs(BY_LABEL), "ann", NOW).catalog
    on_b = maintenance_text(scope="volumes: [b]")
    work = catalogs.apply(catalog, docs(on_b), "ann", NOW + 1).catalog
    assert work.get("by-label").work == ()  # type: ignore[union-attr]
    work = catalogs.with_volumes(work, [], {"b": {"tier": "gold"}}).catalog
    assert len(work.get("by-label").work) == 1  # type: ignore[union-attr]
