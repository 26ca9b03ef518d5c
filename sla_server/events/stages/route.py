"""Route: who gets an event, and in what manner. Pure.

Every route that matches counts; a recipient that several of them name gets the event once, with the shortest
interval of reminders and the shortest time to escalation. Beside the routes, the recipients that an agreement
names (``parties.recipients``) get what concerns its violations, and its reports.

The end of a condition goes where its beginning went: ``violation-closed`` is an event of severity info, but
matches as ``violation-opened`` does, too, so that a route for critical events brings both.

A test (``sla notify test``), and an event that a person has sent again, go to the recipient that they name,
whatever the routes say. Where no recipient has that name, that was a relay, or another server, which is this
one: an event that is sent again goes on to whom the event itself would go.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Final

from sla_server.agreements.selectors import matches
from sla_server.events.catalogue import KINDS
from sla_server.events.documents import EventMatch, RouteDocument
from sla_server.events.event import Event
from sla_server.events.recipients.base import Routed

TEST_KIND: Final = "notify-test"
AGAIN_KIND: Final = "event-sent-again"
ASKED_FOR: Final = {TEST_KIND: "it is a test of this recipient", AGAIN_KIND: "a person has it sent again"}
"""Kinds that a person has sent to the recipient that is their subject, with the reason."""
AGREEMENT_KINDS: Final = ("violation-*", "burn-rate*", "report-issued")
"""What the recipients of an agreement get."""


@cache
def beginnings(kind: str) -> tuple[str, ...]:
    """Kinds that begin the condition which this kind ends; none for other kinds."""
    known = KINDS.get(kind)
    ends = known.ends if known is not None else ""
    return tuple(name for name, each in KINDS.items() if ends and each.begins == ends)


def mismatch(match: EventMatch, event: Event) -> str:
    """The first key that does not fit, with what the event has there; "" if all fit."""
    begun = beginnings(event.kind)
    severities = {event.severity, *(KINDS[name].severity for name in begun)}
    if match.severities and severities.isdisjoint(match.severities):
        return f"severity is {event.severity}"
    if match.kinds and not any(matches(kind, match.kinds) for kind in (event.kind, *begun)):
        return f"kind is {event.kind}"
    for name, value, patterns in (
        ("element", event.element, match.elements),
        ("subject", event.subject, match.subjects),
        ("agreement", event.agreement, match.agreements),
        ("gateway", event.gateway, match.gateways),
        ("volume", event.volume, match.volumes),
    ):
        if patterns and not (value and matches(value, patterns)):
            return f"{name} is {value}" if value else f"it is about no {name}"
    return ""


def route(
    event: Event,
    routes: Iterable[RouteDocument],
    known: Iterable[str],
    of_agreements: Mapping[str, Sequence[str]],
) -> list[Routed]:
    """Who gets the event, by name of the recipient.

    Args:
        event: as it was raised.
        routes: in force.
        known: names of the recipients in force; others are left out.
        of_agreements: name of an agreement to the recipients that it names.
    """
    known = frozenset(known)
    if event.kind in ASKED_FOR and event.subject in known:
        return [Routed(event.subject, ASKED_FOR[event.kind])]
    if event.kind == TEST_KIND:
        return []
    if event.kind == AGAIN_KIND:
        event = _repeated(event)
    found: dict[str, Routed] = {}
    for each in _each(event, routes, of_agreements):
        if each.recipient in known:
            before = found.get(each.recipient)
            found[each.recipient] = each if before is None else _together(before, each)
    for each in found.values():
        missing = tuple(name for name in each.escalate_to if name in known and name != each.recipient)
        found[each.recipient] = replace(
            each, escalate_to=missing, escalate_s=each.escalate_s if missing else 0.0
        )
    return [found[name] for name in sorted(found)]


def _repeated(event: Event) -> Event:
    """What an event that was sent again is about; for its routes only."""
    kind, element, subject = (str(event.details.get(name, "")) for name in ("kind", "element", "subject"))
    return replace(event, kind=kind, element=element, subject=subject)


def _each(
    event: Event, routes: Iterable[RouteDocument], of_agreements: Mapping[str, Sequence[str]]
) -> Iterator[Routed]:
    for document in sorted(routes, key=lambda each: each.name):
        spec = document.spec
        if mismatch(spec.match, event):
            continue
        values = {name: str(getattr(event, name)) for name in spec.group_by}
        said = ",".join(f"{name}={value}" for name, value in values.items())
        escalate = spec.escalate
        for name in dict.fromkeys(spec.recipients):
            yield Routed(
                name,
                f"route {document.name}: {spec.match.text()}",
                f"{document.name}:{said}" if spec.group_by else "",
                float(spec.group_wait or 0),
                float(spec.remind or 0),
                float(escalate.after) if escalate is not None else 0.0,
                tuple(escalate.recipients) if escalate is not None else (),
                spec.inhibit,
            )
    if event.element == "sla" and matches(event.kind, AGREEMENT_KINDS):
        for name in dict.fromkeys(of_agreements.get(event.agreement, ())):
            yield Routed(name, f"agreement {event.agreement} names it")


def _together(one: Routed, other: Routed) -> Routed:
    """Two decisions for one recipient: grouped as the first, the more urgent and more complete otherwise."""
    return replace(
        one,
        reason=f"{one.reason}; {other.reason}",
        remind_s=_least(one.remind_s, other.remind_s),
        escalate_s=_least(one.escalate_s, other.escalate_s),
        escalate_to=tuple(dict.fromkeys((*one.escalate_to, *other.escalate_to))),
        inhibit=one.inhibit and other.inhibit,
    )


def _least(one: float, other: float) -> float:
    """The shorter of two times of which 0 means never."""
    return min(one, other) if one and other else one or other
