"""Handlers of changes that wait for a second person."""

from __future__ import annotations

from flask import Request, Response, g

from sla_server.api import responses
from sla_server.api.context import AppContext
from sla_server.api.handlers.write import answered
from sla_server.api.responses import without_person
from sla_server.requests import ApprovalAnswer
from sla_server.rows import Row


def approvals(context: AppContext, request: Request) -> Response:
    """What waits, oldest first; or all there was, newest first."""
    if not responses.flag(request, "all"):
        return responses.as_list([without_person(row) for row in context.access.approvals.pending()])
    now_us = context.clock.unix_us()
    rows = context.source.access.approvals_newest(responses.limit(request))
    return responses.as_list([without_person(_aged(row, now_us)) for row in rows])


def _aged(row: Row, now_us: int) -> Row:
    is_expired = row["state"] == "pending" and row["expires_us"] <= now_us
    return {**row, "state": "expired"} if is_expired else row


def approve_change(context: AppContext, request: Request, approval_id: str) -> Response:
    """Carry out what another person asked for."""
    return _decide(context, request, approval_id, approves=True)


def refuse_change(context: AppContext, request: Request, approval_id: str) -> Response:
    """End what waits."""
    return _decide(context, request, approval_id, approves=False)


def _decide(context: AppContext, request: Request, approval_id: str, *, approves: bool) -> Response:
    body = responses.parse_body(ApprovalAnswer, responses.json_body(request))
    operation = context.access.approvals.decide(g.principal, approval_id, body, approves=approves)
    return answered(operation)
