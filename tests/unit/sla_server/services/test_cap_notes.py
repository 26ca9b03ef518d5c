"""Caps of agreements below what is promised: said when they are applied, of their own and of others."""

from __future__ import annotations

import pytest

from sla_server.agreements.load import Loaded, load_documents
from sla_server.services import cap_notes
from sla_server.services import catalog as catalogs
from sla_server.services.catalog import Catalog
from tests.support.agreements import simple
from tests.support.services import START_US as NOW


def docs(*texts: str) -> list[Loaded]:
    return load_documents("---\n".join(texts), 60)


@pytest.mark.parametrize(
    ("volumes", "clients", "max_iops", "says"),
    [
        ("vol-1", '"*"', 499, "up to 500 IOPS"),
        ("vol-1", '"*"', 500, ""),
        ("vol-1, vol-2", '"*"', 249, "for 2 volumes together"),
        ("vol-1, vol-2", '"*"', 250, ""),
        ('"vol-*"', '"*"', 166, "for 3 volumes together"),
        ('"vol-*"', '"*"', 167, ""),
        ("vol-1", "db, web", 249, "up to 500 IOPS"),
        ("vol-1", "db, web", 250, ""),
        ("vol-1", '"db-*"', 60, ""),
    ],
)
def test_a_cap_below_the_agreements_own_promise_is_a_note(
    volumes: str, clients: str, max_iops: int, says: str
) -> None:
    """It would make I/Os wait that the promise covers, and nothing said so; by hand that asks for --force."""
    known = catalogs.with_volumes(Catalog(), {"vol-1", "vol-2", "vol-3", "other"}).catalog
    text = simple(volumes=volumes, clients=clients, extra=f"  cap: {{max_iops: {max_iops}}}\n")
    found = [note for note in catalogs.apply(known, docs(text), "ann", NOW).warnings if "own cap" in note]
    assert [says in note for note in found] == [True] * bool(says)


def test_a_cap_is_compared_with_what_each_indicator_promises() -> None:
    promised = "  - {name: rate, indicator: {metric: iops}, promised_iops: 600, budgeting: {target: 0.9}}\n"
    other = "  - {name: up, indicator: {metric: availability}, outage: 30s, budgeting: {target: 0.9}}\n"
    cap = "  cap: {max_iops: 550}\n"
    (note,) = catalogs.apply(Catalog(), docs(simple() + promised + other + cap), "ann", NOW).warnings
    assert note.startswith("gold: its own cap, 550 IOPS, is below what is promised: gold/rate (600 IOPS)")
    endless = simple(extra=cap).replace("up_to_iops: 500, ", "")
    (note,) = catalogs.apply(Catalog(), docs(endless), "ann", NOW).warnings
    assert "at any demand" in note


def capped(name: str, max_iops: int, volumes: str = '"*"', clients: str = '"*"') -> str:
    """An agreement with a cap and no promise."""
    text = simple(name, volumes=volumes, clients=clients, extra=f"  cap: {{max_iops: {max_iops}}}\n")
    return text[: text.index("  objectives")] + text[text.index("  cap:") :]


KNOWN = catalogs.with_volumes(Catalog(), {"vol-1", "vol-2", "other"}).catalog


def notes(*steps: str) -> list[str]:
    """Of the last of some documents that are applied one after another."""
    catalog, found = KNOWN, list[str]()
    for text in steps:
        change = catalogs.apply(catalog, docs(text), "ann", NOW)
        catalog, found = change.catalog, change.warnings
    return [note for note in found if "its cap" in note]


@pytest.mark.parametrize("is_cap_first", [True, False])
def test_a_cap_of_another_agreement_that_breaks_a_promise_is_a_note_whichever_comes_last(
    is_cap_first: bool,
) -> None:
    """A fair-use cap on all volumes held the promised one back, and nothing said so."""
    steps = [capped("fair-use", 499), simple()]
    (note,) = notes(*(steps if is_cap_first else steps[::-1]))
    assert note.startswith(
        "fair-use: its cap, 499 IOPS, holds on vol-1, too, which is below what is promised"
    )
    assert "gold/latency (p95 within 12.0 ms up to 500 IOPS)" in note
    assert notes(*[capped("fair-use", 500), simple()]) == []


def test_in_one_file_it_is_said_once() -> None:
    change = catalogs.apply(
        KNOWN, docs(capped("fair-use", 60), simple(), simple("b", volumes="vol-2")), "a", NOW
    )
    found = [note for note in change.warnings if "cap" in note]
    assert len(found) == 2
    again = catalogs.apply(change.catalog, docs(simple("other", volumes="other")), "a", NOW).warnings
    assert len(again) == 1, "those that are as they were are not said again"


@pytest.mark.parametrize(
    ("cap", "promised", "count"),
    [
        (capped("fair", 400, volumes="other"), simple(), 0),
        (capped("fair", 400, volumes="vol-1"), simple(volumes='"vol-*"'), 0),  # its half of 500 is below
        (capped("fair", 249, volumes="vol-1"), simple(volumes='"vol-*"'), 1),
        (capped("fair", 400, clients="web"), simple(), 0),  # of one client alone
        (capped("fair", 400), simple(extra="  guarantee: {floor_iops: 500}\n"), 0),  # the floor holds
        (capped("fair", 400), simple(extra="  guarantee: {floor_iops: 450}\n"), 1),
    ],
)
def test_only_a_cap_that_holds_what_is_promised_back_is_one(cap: str, promised: str, count: int) -> None:
    assert len(notes(cap, promised)) == len(notes(promised, cap)) == count


def test_of_very_many_the_first_are_named() -> None:
    agreements = [simple(f"a{number}", volumes="vol-1") for number in range(9)]
    found = notes("---\n".join(agreements), capped("fair", 60))
    assert len(found) == 6
    assert found[-1] == "fair: its cap is below what 4 other agreements promise, too"


def test_on_a_very_large_site_patterns_are_tried_on_some_names_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """To apply documents must not hold up control: a note may be missing there."""
    monkeypatch.setattr(cap_notes, "MOST_MATCHES", 4)
    wide = [simple(f"a{number}", volumes=f'"{pattern}"') for number, pattern in enumerate(("vol-*", "v*"))]
    assert len(notes("---\n".join(wide), capped("fair", 60, volumes="vol-1"))) == 1
    assert len(notes(simple(), capped("fair", 60, volumes="vol-1"))) == 1, "names cost next to nothing"
