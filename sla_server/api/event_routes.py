"""Routes of events and of those who get them: inbox, recipients, routes of notifications, silences."""

from __future__ import annotations

from typing import Final

from sla_server.api.record_routes import BEFORE
from sla_server.api.route import ANY, LIMIT, ApiRoute, Query

EVENT_ROUTES: Final = (
    ApiRoute(
        "GET",
        "/events",
        "events",
        "Events, newest first.",
        (LIMIT, BEFORE),
        items="events",
        scope="events",
    ),
    ApiRoute(
        "GET",
        "/inbox",
        "inbox",
        "Events with who acknowledged them and who has not confirmed them (null: not known), newest first.",
        (
            Query("severity", "string", "info, warning or critical; several with commas between."),
            Query("kind", "string", "Only this kind; * matches anything."),
            Query("element", "string", "Only about these kinds of thing; several with commas between."),
            Query("subject", "string", "Only those whose subject or text contains this."),
            Query("open", "boolean", "1: only those that go on and that no person has acknowledged."),
            LIMIT,
            BEFORE,
        ),
        items="events",
    ),
    ApiRoute(
        "GET",
        "/events/{event_id}",
        "event",
        "One event, by its id or a beginning that no other id has: acknowledgements, delivery, routing.",
    ),
    ApiRoute(
        "POST",
        "/events/{event_id}/acknowledge",
        "acknowledge",
        "Say that a person takes care of an event: no more reminders of it.",
        body="Acknowledge",
        changes=True,
    ),
    ApiRoute(
        "GET",
        "/undelivered",
        "undelivered",
        "What not all recipients have confirmed, oldest first; dead letters of the last 30 days among it, "
        "until a person acknowledges them.",
        items=ANY,
    ),
    ApiRoute(
        "GET", "/recipients", "recipients", "Recipients in force, and how delivery to them goes.", items=ANY
    ),
    ApiRoute("DELETE", "/recipients/{name}", "end_recipient", "End a recipient.", changes=True),
    ApiRoute(
        "POST",
        "/recipients/{name}/test",
        "try_recipient",
        "Send a test event to a recipient, whatever the routes say.",
        changes=True,
    ),
    ApiRoute(
        "POST",
        "/recipients/{name}/events",
        "send_again",
        "Send an event to a recipient again, whatever the routes say.",
        body="EventAgain",
        changes=True,
    ),
    ApiRoute(
        "GET",
        "/routes",
        "notification_routes",
        "Routes in force: which events go to whom.",
        items="documents",
    ),
    ApiRoute("DELETE", "/routes/{name}", "end_route", "End a route.", changes=True),
    ApiRoute(
        "GET",
        "/silences",
        "silences",
        "Silences: what runs and what is planned; applied as documents.",
        (Query("past", "boolean", "1: also what has passed."),),
        items=ANY,
    ),
    ApiRoute("DELETE", "/silences/{name}", "end_silence", "End a silence now, all of it.", changes=True),
    ApiRoute(
        "POST",
        "/preview",
        "preview",
        "Who would get an event now, and why; delivers nothing. `kind` is enough; the rest is filled in.",
        body="Event",
        role="viewer",
        changes=True,  # it costs what routing costs
    ),
)
