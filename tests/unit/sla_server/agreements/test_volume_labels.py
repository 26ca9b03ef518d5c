"""Labels of volumes: which there are of agents and documents, and which volumes a selector means."""

from __future__ import annotations

import pytest

from sla_server.agreements.errors import AgreementsRefused
from sla_server.agreements.load import load_documents
from sla_server.agreements.selectors import parse_labels
from sla_server.agreements.volume_labels import (
    LabelBook,
    VolumeLabelsDocument,
    VolumeLabelsInForce,
    label_book,
    volumes_in_scope,
)
from tests.support.agreements import simple

HEAD = "apiVersion: storage-sla/v1\nkind: VolumeLabels\n"


def labels_text(name: str, volumes: str, labels: str) -> str:
    return f"{HEAD}metadata: {{name: {name}}}\nspec: {{volumes: [{volumes}], labels: {{{labels}}}}}\n"


def document(name: str, volumes: str, labels: str) -> VolumeLabelsInForce:
    (loaded,) = load_documents(labels_text(name, volumes, labels), 60)
    assert isinstance(loaded.document, VolumeLabelsDocument)
    return VolumeLabelsInForce(loaded.document, 1, 0)


def book(*documents: VolumeLabelsInForce) -> LabelBook:
    announced = {
        "erp-1": {"tier": "gold", "env": "prod"},
        "erp-2": {"tier": "silver"},
        "web": {"env": "test"},
    }
    return LabelBook(announced, documents, frozenset(("erp-1", "erp-2", "web", "bare")))


def chosen(selector: str, *documents: VolumeLabelsInForce, names: str = "*") -> tuple[str, ...]:
    return book(*documents).selected(parse_labels(selector), [names])


@pytest.mark.parametrize(
    ("selector", "names", "meant"),
    [
        ("tier=gold", "*", ("erp-1",)),
        ("tier in (gold, silver)", "*", ("erp-1", "erp-2")),
        ("env", "*", ("erp-1", "web")),
        ("env", "erp-*", ("erp-1",)),
        ("tier,env=prod", "*", ("erp-1",)),
        ("tier=gold,env=test", "*", ()),
        ("tier=bronze", "*", ()),
        ("tier!=gold", "*", ("bare", "erp-2", "web")),
        ("tier notin (gold, silver),env", "*", ("web",)),
        ("!env", "*", ("bare", "erp-2")),
    ],
)
def test_which_volumes_a_selector_means(selector: str, names: str, meant: tuple[str, ...]) -> None:
    assert chosen(selector, names=names) == meant


def test_what_is_said_nearest_to_a_volume_holds() -> None:
    of_all, of_erp = (
        document("z-all", "'*'", "tier: bronze"),
        document("a-erp", "erp-*", "tier: gold, team: a"),
    )
    own = document("own", "erp-2", "tier: lead")
    found = book(of_all, of_erp, own)
    assert found.of("erp-2") == {"tier": "lead", "team": "a"}, "named, before patterns, before the agent"
    assert found.of("erp-1") == {"tier": "bronze", "env": "prod", "team": "a"}, "z-all comes after a-erp"
    assert found.of("bare") == {"tier": "bronze"}
    assert found.selected(parse_labels("tier=bronze"), ["*"]) == ("bare", "erp-1", "web")


def test_a_document_takes_a_label_of_the_agent_away() -> None:
    gone = document("gone", "erp-1", "tier: null")
    assert book(gone).of("erp-1") == {"env": "prod"}
    assert chosen("tier", gone) == ("erp-2",)


def test_a_volume_that_no_gateway_has_shown_is_not_chosen() -> None:
    assert chosen("tier=gold", document("d", "to-come", "tier: gold")) == ("erp-1",)


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ("'a b': x", "'a b' is no key of a label"),
        ("tier: 'a,b'", "'a,b' is no value of the label tier"),
        ("tier: ''", "'' is no value of the label tier"),
        ("", "spec.labels"),
    ],
)
def test_labels_that_no_selector_could_name_are_refused(labels: str, said: str) -> None:
    with pytest.raises(AgreementsRefused) as refused:
        load_documents(labels_text("d", "v", labels), 60)
    assert said in str(refused.value.problems[0])


def test_a_scope_with_labels_needs_no_names_and_one_without_does() -> None:
    text = simple().replace("volumes: [vol-1]", "volume_labels: 'tier=gold, env in (prod)'")
    (loaded,) = load_documents(text, 60)
    assert loaded.agreement.spec.scope.volumes == ["*"]
    for wrong, said in (
        (simple().replace("volumes: [vol-1], ", ""), "it names no volumes"),
        (text.replace("tier=gold", "tier = "), "is no label; write key=value"),
    ):
        with pytest.raises(AgreementsRefused) as refused:
            load_documents(wrong, 60)
        assert said in str(refused.value.problems[0])


def test_rows_of_sql_make_the_same_book_and_what_cannot_be_read_labels_nothing() -> None:
    held = document("own", "erp-2", "tier: lead")
    volumes = [
        {"volume": "erp-1", "labels": {"tier": "gold"}},
        {"volume": "erp-2", "labels": ""},
        {"volume": "old", "labels": None},
        {"volume": "odd", "labels": {"a b": "x", "tier": 3}},
    ]
    row = {"kind": "VolumeLabels", "ended_us": None, "version": 1, "applied_us": 0}
    rows = [
        {**row, "spec": held.document.spec_json()},
        {**row, "spec": {"kind": "VolumeLabels", "new": "form"}},
        {**row, "spec": held.document.spec_json(), "ended_us": 5, "kind": "Calendar"},
    ]
    found = label_book(volumes, rows)
    assert [found.of(name) for name in ("erp-1", "erp-2", "old", "odd")] == [
        {"tier": "gold"}, {"tier": "lead"}, {}, {},
    ]  # fmt: skip
    assert volumes_in_scope({"volumes": ["*"], "volume_labels": "tier"}, found) == ("erp-1", "erp-2")
    assert volumes_in_scope({"volumes": ["*"], "volume_labels": "((("}, found) == (), "never everything"
    assert volumes_in_scope({"volumes": ["a*"]}, found) == ["a*"]
