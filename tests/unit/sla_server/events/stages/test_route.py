"""Who gets an event, and in what manner."""

from __future__ import annotations

from typing import Any

import pytest

from sla_server.agreements.load import load_documents
from sla_server.events.documents import EventMatch, RouteDocument
from sla_server.events.recipients.base import Routed
from sla_server.events.stages.route import mismatch, route
from tests.support.notices import event

KNOWN = ("oncall", "mail", "boss")


def _route(name: str, spec: str) -> RouteDocument:
    text = f"apiVersion: storage-sla/v1\nkind: Route\nmetadata: {{name: {name}}}\nspec: {spec}\n"
    document = load_documents(text, 60)[0].document
    assert isinstance(document, RouteDocument)
    return document


def _names(found: list[Routed]) -> list[str]:
    return [each.recipient for each in found]


@pytest.mark.parametrize(
    ("match", "said"),
    [
        ({}, ""),
        ({"severities": ["critical", "warning"]}, ""),
        ({"severities": ["info"]}, "severity is critical"),
        ({"kinds": ["violation-*"]}, ""),
        ({"kinds": ["throttle-*", "burn-rate"]}, "kind is violation-opened"),
        ({"agreements": ["erp-*"], "volumes": ["vol-1"]}, ""),
        ({"agreements": ["crm-*"]}, "agreement is erp-gold"),
        ({"gateways": ["*"]}, "it is about no gateway"),
        ({"elements": ["sla"], "subjects": ["erp-gold*"]}, ""),
        ({"subjects": ["erp-gold"]}, "subject is erp-gold/latency"),
    ],
)
def test_of_every_key_one_entry_has_to_fit(match: dict[str, Any], said: str) -> None:
    assert mismatch(EventMatch.model_validate(match), event()) == said


def test_the_end_of_a_condition_goes_where_its_beginning_went() -> None:
    ended = event(kind="violation-closed", severity="info")
    assert mismatch(EventMatch(severities=["critical"], kinds=["violation-opened"]), ended) == ""
    applied = event(kind="agreement-applied", severity="info")
    assert mismatch(EventMatch(severities=["critical"]), applied) == "severity is info"


def test_every_route_that_matches_counts_and_each_recipient_is_named_once() -> None:
    routes = [
        _route("b", "{recipients: [mail], group_by: [agreement, severity], group_wait: 10s, remind: 4h}"),
        _route("a", "{recipients: [oncall, mail], escalate: {after: 15m, recipients: [boss, mail]}}"),
        _route("c", "{recipients: [boss], match: {severities: [info]}}"),
    ]
    found = route(event(), routes, KNOWN, {})
    assert _names(found) == ["mail", "oncall"]
    mail, oncall = found
    assert mail.reason == "route a: every event; route b: every event"
    assert (mail.remind_s, mail.escalate_s, mail.escalate_to) == (4 * 3600.0, 900.0, ("boss",))
    assert (oncall.group_key, oncall.escalate_to) == ("", ("boss", "mail"))
    (grouped,) = route(event(), routes[:1], KNOWN, {})
    assert (grouped.group_key, grouped.group_wait_s) == ("b:agreement=erp-gold,severity=critical", 10.0)


def test_of_several_routes_all_have_to_inhibit() -> None:
    routes = [_route(name, "{recipients: [mail], inhibit: true}") for name in "ab"]
    assert [found.inhibit for found in route(event(), routes, KNOWN, {})] == [True]
    routes.append(_route("c", "{recipients: [mail]}"))
    assert [found.inhibit for found in route(event(), routes, KNOWN, {})] == [False]


def test_recipients_that_are_not_in_force_are_left_out() -> None:
    routes = [_route("a", "{recipients: [gone, mail], escalate: {after: 15m, recipients: [gone]}}")]
    (found,) = route(event(), routes, ("mail",), {})
    assert (found.recipient, found.escalate_s, found.escalate_to) == ("mail", 0.0, ())


def test_an_agreements_own_recipients_get_its_violations_only() -> None:
    named = {"erp-gold": ["mail", "unknown"], "crm": ["boss"]}
    (found,) = route(event(), [], KNOWN, named)
    assert (found.recipient, found.reason) == ("mail", "agreement erp-gold names it")
    assert _names(route(event(kind="violation-closed", severity="info"), [], KNOWN, named)) == ["mail"]
    assert route(event(kind="agreement-applied", severity="info"), [], KNOWN, named) == []


@pytest.mark.parametrize("kind", ["notify-test", "event-sent-again"])
def test_what_a_person_sends_goes_to_its_recipient_alone(kind: str) -> None:
    routes = [_route("a", "{recipients: [oncall, mail]}")]
    test = event(kind=kind, element="recipient", subject="boss", severity="info")
    assert _names(route(test, routes, KNOWN, {})) == ["boss"]


def test_a_test_of_a_recipient_that_is_not_here_goes_to_nobody() -> None:
    routes = [_route("a", "{recipients: [oncall, mail]}")]
    assert route(event(kind="notify-test", subject="gone"), routes, KNOWN, {}) == []


def test_what_was_sent_again_to_a_relay_goes_on_as_the_event_would() -> None:
    """A relay confirms it: it is its affair then, and the recipient's name is the server's for the relay."""
    routes = [_route("a", "{match: {kinds: [violation-opened], subjects: [erp/*]}, recipients: [oncall]}")]
    details = {"kind": "violation-opened", "element": "sla", "subject": "erp/latency", "event_id": "e1"}
    again = event(kind="event-sent-again", element="recipient", subject="site-b", details=details)
    assert _names(route(again, routes, KNOWN, {})) == ["oncall"]
    other = event(kind="event-sent-again", element="recipient", subject="site-b", details={"kind": 7})
    assert route(other, routes, KNOWN, {}) == []
