"""Documents about delivery in force: versions, what they need of each other, warnings, reading back."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from sla_server.agreements.errors import AgreementsRefused
from sla_server.agreements.load import load_documents
from sla_server.services import catalog as catalogs
from sla_server.services.catalog import Catalog, Change
from tests.support.agreements import simple
from tests.support.services import START_US, FakeStore

NOW = START_US  # 2027-01-01


def _text(kind: str, name: str, spec: str) -> str:
    return f"apiVersion: storage-sla/v1\nkind: {kind}\nmetadata: {{name: {name}}}\nspec: {{{spec}}}\n"


MAIL = _text("Recipient", "mail", "inbox: {}")
ROUTE = _text("Route", "all", "recipients: [mail]")
SILENCE = _text("Silence", "night", "start: 2027-01-01T00:00, duration: 1h, reason: test, recipients: [mail]")


def apply(catalog: Catalog, *texts: str, now_us: int = NOW) -> Change:
    return catalogs.apply(catalog, load_documents("---\n".join(texts), 60), "ann", now_us)


def reread(*changes: Change) -> Catalog:
    store = FakeStore()
    for change in changes:
        store.keep(json.loads(json.dumps(change.rows)))
    catalog, problems = catalogs.from_rows(store.agreements(), [], NOW, store.documents())
    assert problems == []
    return catalog


def _problems(catalog: Catalog, *texts: str) -> list[str]:
    with pytest.raises(AgreementsRefused) as caught:
        apply(catalog, *texts)
    return [f"{each.document} {each.field}: {each.problem}" for each in caught.value.problems]


def test_they_are_versioned_and_audited_as_other_documents() -> None:
    first = apply(Catalog(), MAIL, ROUTE, SILENCE)
    assert [(row["kind"], row["version"], row["changed"]) for row in first.applied] == [
        ("Recipient", 1, True), ("Route", 1, True), ("Silence", 1, True),
    ]  # fmt: skip
    assert [table for table, _ in first.rows] == ["documents", "audit", "events"] * 3
    assert [row["kind"] for table, row in first.rows if table == "events"] == [
        "recipient-applied", "route-applied", "silence-applied",
    ]  # fmt: skip
    same = apply(first.catalog, ROUTE, now_us=NOW + 1)
    assert (same.rows, same.applied[0]["changed"]) == ([], False)
    other = apply(first.catalog, ROUTE.replace("[mail]", "[mail], remind: 4h"), now_us=NOW + 2)
    assert other.applied[0]["version"] == 2
    audit = next(row for table, row in other.rows if table == "audit")
    assert [change["field"] for change in audit["after"]["changes"]] == ["spec.remind"]
    assert reread(first, other).plans == other.catalog.plans


def test_a_fallback_has_to_be_there_and_is_not_ended_before_who_names_it() -> None:
    oncall = _text("Recipient", "oncall", "inbox: {}, fallback: [mail]")
    assert _problems(Catalog(), oncall) == ["oncall spec.fallback[0]: there is no recipient 'mail'"]
    catalog = apply(Catalog(), oncall, MAIL).catalog
    with pytest.raises(AgreementsRefused, match="named by recipient oncall"):
        catalogs.end_document(catalog, "Recipient", "mail", "bob", NOW + 1)
    heart = _text("Recipient", "mail", "heartbeat: {url_file: ping}")
    assert "oncall: mail is a heartbeat and takes no events" in apply(Catalog(), oncall, heart).warnings


def test_ending_one_keeps_its_version_number() -> None:
    first = apply(Catalog(), MAIL, ROUTE)
    ended = catalogs.end_document(first.catalog, "Route", "all", "bob", NOW + 1)
    assert ended is not None
    assert ended.catalog.plans.names("Route") == []
    again = apply(ended.catalog, ROUTE, now_us=NOW + 2)
    assert again.applied[0]["version"] == 2
    assert reread(first, ended, again).plans == again.catalog.plans
    assert catalogs.end_document(ended.catalog, "Route", "all", "bob", NOW) is None


def test_a_recipient_that_is_not_there_is_not_named() -> None:
    assert _problems(Catalog(), ROUTE, SILENCE) == [
        "all spec.recipients[0]: there is no recipient 'mail'",
        "night spec.recipients[0]: there is no recipient 'mail'",
    ]
    escalate = _text("Route", "up", "recipients: [mail], escalate: {after: 5m, recipients: [bos]}")
    assert _problems(Catalog(), MAIL, escalate) == [
        "up spec.escalate.recipients[0]: there is no recipient 'bos'"
    ]


def test_one_file_has_one_writer() -> None:
    first = _text("Recipient", "one", "file: {path: out.jsonl}")
    second = _text("Recipient", "two", "file: {path: out.jsonl}")
    expected = ["two spec.file.path: the recipient 'one' writes 'out.jsonl' already"]
    change = apply(Catalog(), first)
    assert _problems(change.catalog, second) == expected
    assert len(_problems(Catalog(), first, second)) == 2
    apply(change.catalog, first, now_us=NOW + 1)
    ended = catalogs.end_document(change.catalog, "Recipient", "one", "ann", NOW + 1)
    assert ended is not None
    apply(ended.catalog, second, now_us=NOW + 2)


def test_a_recipient_in_use_is_not_ended() -> None:
    change = apply(Catalog(), MAIL, ROUTE, SILENCE)
    with pytest.raises(AgreementsRefused, match="the recipient 'mail' is named by route all, silence night"):
        catalogs.end_document(change.catalog, "Recipient", "mail", "ann", NOW)


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        (
            _text("Route", "r", "recipients: [mail], match: {kinds: [violation-openned]}"),
            "r: match.kinds: no event is of kind 'violation-openned'; did you mean violation-opened",
        ),
        (
            _text("Route", "r", "recipients: [mail], match: {elements: [gatewayy, '*recip*']}"),
            "r: match.elements: no element 'gatewayy' is known; did you mean gateway",
        ),
        (
            _text("Silence", "s", "start: 2026-01-01T00:00, duration: 1h, reason: a"),
            "s: there is nothing of it after now, so it holds nothing back",
        ),
        (
            simple("gold", extra="  parties: {provider: a, customer: b, recipients: [ops]}\n"),
            "gold: parties.recipients: there is no recipient 'ops'",
        ),
        (_text("Route", "r", "recipients: [pulse]"), "r: pulse is a heartbeat and takes no events"),
    ],
)
def test_what_may_be_a_mistake_is_a_warning(text: str, warning: str) -> None:
    pulse = _text("Recipient", "pulse", "heartbeat: {url: 'http://a.example'}")
    change = apply(Catalog(), MAIL, pulse, text)
    assert [each[: len(warning)] for each in change.warnings] == [warning]


def test_patterns_and_kinds_of_the_catalogue_give_no_warning() -> None:
    match = "recipients: [mail], match: {kinds: [violation-opened, 'gateway-*', agent-of-later]}"
    assert apply(Catalog(), MAIL, _text("Route", "r", match)).warnings == []


SILENCED = "start: 2027-01-01T00:00, duration: 1h, reason: test"


def test_agreements_that_are_not_in_force_are_noted() -> None:
    gold = simple("erp-gold")
    match = "match: {agreements: [erp-gold, erp-gld, 'erp-*', 'crm-*']}"
    route, silence = (
        _text("Route", "r", f"recipients: [mail], {match}"),
        _text("Silence", "s", f"{SILENCED}, {match}"),
    )
    expected = [
        f"{name}: match.agreements: no agreement {said}"
        for name in ("r", "s")
        for said in ("'erp-gld' is in force; did you mean erp-gold?", "'crm-*' is in force")
    ]
    assert apply(Catalog(), MAIL, gold, route, silence).warnings == expected  # in one file
    first = apply(Catalog(), MAIL, gold)
    assert apply(first.catalog, route, silence).warnings == expected  # in force before
    ended = catalogs.delete(first.catalog, "erp-gold", "ann", NOW + 1)
    assert ended is not None
    assert len(apply(ended.catalog, route, now_us=NOW + 2).warnings) == 4


def test_volumes_that_no_gateway_has_shown_are_noted_where_any_is_known() -> None:
    route = _text("Route", "r", "recipients: [mail], match: {volumes: [vol-l, 'vol-*']}")
    assert apply(Catalog(), MAIL, route).warnings == []
    known = catalogs.with_volumes(Catalog(), ["vol-1"]).catalog
    assert apply(known, MAIL, route).warnings == [
        "r: match.volumes: no volume 'vol-l' is known; did you mean vol-1?"
    ]


def test_what_the_reader_of_documents_missed_is_in_the_answer() -> None:
    (loaded,) = load_documents(MAIL, 60)
    noted = replace(loaded, notes=("smtp.password_file: is not there",))
    assert catalogs.apply(Catalog(), [noted], "ann", NOW).warnings == [
        "mail: smtp.password_file: is not there"
    ]
