"""Who is notified of what a recipient did not take."""

from __future__ import annotations

from typing import Any

import pytest

from sla_server.events.event import Event
from sla_server.events.routing import DocumentRouter
from tests.support.deliveries import router
from tests.support.notices import event

ONE_ROUTE = ("{recipients: [oncall], match: {severities: [critical]}}",)


def dead_letter(subject: str = "oncall", kind: str = "delivery-failed", **details: Any) -> Event:
    return event(kind=kind, element="recipient", subject=subject, details=details)


def _names(found: DocumentRouter, about: Event) -> list[str]:
    return [each.recipient for each in found.route(about)]


def test_without_a_route_that_says_so_all_others_are_notified_and_never_the_recipient_itself() -> None:
    found = router(*ONE_ROUTE)
    assert _names(found, event()) == ["oncall"]
    assert _names(found, dead_letter()) == ["log", "mail", "page"]
    assert {each.reason for each in found.route(dead_letter())} == {
        "oncall did not take it and has no fallback"
    }
    assert _names(router(*ONE_ROUTE, names="oncall"), dead_letter()) == []


def test_a_fallback_is_notified_in_their_place() -> None:
    found = router(*ONE_ROUTE, oncall="mail")
    assert [(each.recipient, each.reason) for each in found.route(dead_letter())] == [
        ("mail", "fallback of oncall")
    ]
    also = router(*ONE_ROUTE, "{recipients: [page]}", oncall="mail")
    assert _names(also, dead_letter()) == ["mail", "page"]


@pytest.mark.parametrize(
    ("recipients", "notified"),
    [
        ("oncall, mail", ["mail"]),
        ("oncall, page, log", ["log", "mail", "page"]),
        ("pulse", ["log", "mail", "page", "pulse"]),
    ],
)
def test_routes_are_enough_if_they_reach_a_person(recipients: str, notified: list[str]) -> None:
    assert _names(router(f"{{recipients: [{recipients}]}}"), dead_letter()) == notified


def test_what_only_agreements_name_is_no_fallback_unless_a_document_says_so() -> None:
    names = "oncall mail customer"
    assert _names(router(*ONE_ROUTE, names=names), dead_letter()) == ["mail"]
    assert _names(router(*ONE_ROUTE, names=names, mail="customer"), dead_letter("mail")) == [
        "customer",
        "oncall",
    ]
    routed = router(*ONE_ROUTE, "{recipients: [customer], match: {kinds: [report-issued]}}", names=names)
    assert _names(routed, dead_letter()) == ["customer", "mail"]


def test_a_dead_letter_about_a_dead_letter_goes_to_none_that_did_not_take_it() -> None:
    found = router("{recipients: [oncall, mail]}", oncall="mail", mail="oncall, log")
    second = dead_letter("mail", level=2, not_taken_by="mail oncall")
    assert _names(found, second) == ["log"]
    assert _names(found, dead_letter("log", level=3, not_taken_by="log mail oncall")) == []


def test_other_trouble_of_a_recipient_goes_by_routes_alone_and_not_to_itself() -> None:
    found = router("{recipients: [oncall, mail], match: {elements: [recipient]}}")
    for kind in ("recipient-failing", "recipient-recovered"):
        assert _names(found, dead_letter(kind=kind)) == ["mail"]
        assert _names(router(*ONE_ROUTE), dead_letter(kind=kind)) == []


@pytest.mark.parametrize(
    "details", [{"level": True}, {"level": -1}, {"level": "x"}, {"not_taken_by": ["mail"]}]
)
def test_details_of_another_release_are_survived(details: dict[str, Any]) -> None:
    assert _names(router(*ONE_ROUTE), dead_letter(**details)) == ["log", "mail", "page"]
