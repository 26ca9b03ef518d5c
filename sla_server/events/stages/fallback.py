"""Fallback: who is notified of dead letters when routes alone reach no person. Pure.

A notice that a recipient did not take becomes the event ``delivery-failed``. It goes where routes say, to the
``fallback`` of that recipient and, without one, if only files, syslog and the inbox would get it, to every
other recipient but those that only agreements name (customers', as a rule).

It never goes to a recipient that did not take what it is about: ``not_taken_by`` among its details names
them. Where it is a dead letter itself, the next one is of the next ``level``; one that is more than
``MOST_LEVELS`` away from its first notice is stored and shown, and sent to no recipient. So recipients that
all refuse do not send each other events for ever. Events about a recipient's own trouble are not sent to it
at all: they would wait behind what fails.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from sla_server.events.documents import RecipientDocument, RouteDocument
from sla_server.events.event import Event
from sla_server.events.recipients.base import Routed

DELIVERY_FAILED: Final = "delivery-failed"
OWN: Final = (DELIVERY_FAILED, "recipient-failing", "recipient-recovered")
"""Kinds of which the subject is a recipient in trouble."""
MOST_LEVELS: Final = 2
HEARTBEAT: Final = "heartbeat"
RECORDS: Final = ("file", "inbox", "syslog", HEARTBEAT)
"""Kinds of recipients that call no person: they keep a record, or take no events."""


def level_of(event: Event) -> int:
    """How many dead letters away from its first notice an event is: 0 for what is no recipient's trouble."""
    if event.kind not in OWN:
        return 0
    level = event.details.get("level")
    return level if type(level) is int and level > 0 else 1


def not_taken_by(event: Event) -> Collection[str]:
    """Recipients that an event about a recipient's trouble is not sent to."""
    if event.kind not in OWN:
        return ()
    named = event.details.get("not_taken_by")
    return {event.subject, *(named.split() if isinstance(named, str) else ())}


def with_fallback(
    event: Event,
    routed: Sequence[Routed],
    recipients: Mapping[str, RecipientDocument],
    routes: Iterable[RouteDocument],
    of_agreements: Mapping[str, Sequence[str]],
) -> Sequence[Routed]:
    """Who gets an event, of which ``routed`` is what routes say; other events stay as they are.

    Args:
        event: as it was raised.
        routed: by routes.
        recipients: in force.
        routes: in force.
        of_agreements: name of an agreement to the recipients that it names.
    """
    if event.kind not in OWN:
        return routed
    if level_of(event) > MOST_LEVELS:
        return ()
    without = not_taken_by(event)
    found = {each.recipient: each for each in routed if each.recipient not in without}
    failed = recipients.get(event.subject)
    if event.kind != DELIVERY_FAILED or failed is None:
        return list(found.values())
    others = {
        name: document.spec.kind
        for name, document in recipients.items()
        if name not in without and document.spec.kind != HEARTBEAT
    }
    named = [name for name in failed.spec.fallback if name in others]
    for name in named:
        found.setdefault(name, Routed(name, f"fallback of {event.subject}"))
    if named or any(others.get(name, HEARTBEAT) not in RECORDS for name in found):
        return [found[name] for name in sorted(found)]
    customers = _only_of_agreements(routes, recipients, of_agreements)
    for name in others:
        if name not in customers:
            found.setdefault(name, Routed(name, f"{event.subject} did not take it and has no fallback"))
    return [found[name] for name in sorted(found)]


def _only_of_agreements(
    routes: Iterable[RouteDocument],
    recipients: Mapping[str, RecipientDocument],
    of_agreements: Mapping[str, Sequence[str]],
) -> Collection[str]:
    """Recipients that agreements name, and no route or fallback."""
    others = {name for document in recipients.values() for name in document.spec.fallback}
    for route in routes:
        others.update(route.spec.recipients)
        if route.spec.escalate is not None:
            others.update(route.spec.escalate.recipients)
    return {name for names in of_agreements.values() for name in names} - others
