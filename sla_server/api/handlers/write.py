"""Handlers that change something: each becomes one request to ``services`` (docs/formats/messages.md).

The answer is 200 with what ``services`` said, a problem document when it refused, or 202 with the operation's
address when it did not answer in time. The app has checked token or session before; ``g.who`` names the
author.
"""

from __future__ import annotations

from typing import Final

from flask import Request, Response, g
from pydantic import BaseModel

from pmdaemon.runtime.excerpt import printable
from sla_server.api import responses
from sla_server.api.context import AppContext
from sla_server.api.errors import BadInput, NotFound
from sla_server.api.handlers.gateways import CONFIGURATION, listed_gateways
from sla_server.api.handlers.notifications import find_event
from sla_server.api.handlers.policies import stored_policy
from sla_server.api.operations import Operation
from sla_server.api.route import PREFIX
from sla_server.requests import (
    GATEWAY_NAME_MAX,
    AcknowledgeBody,
    Acknowledgement,
    AgreementDelete,
    AgreementsApply,
    DocumentEnd,
    EventAgain,
    EventAgainBody,
    GatewayListing,
    GatewayName,
    ModeSet,
    PolicyPin,
    PolicyRollback,
    RecipientTest,
    ThrottleRelease,
    ThrottleSet,
    VolumesDecision,
)
from sla_server.rows import Row

WAITS: Final = "waits-for-approval"
BASED_ON_MAX: Final = 160
"""Characters: a kind, a name, and a version."""
VERSION_DIGITS: Final = 9


def apply_slas(context: AppContext, request: Request) -> Response:
    """Apply YAML documents."""
    documents = responses.yaml_body(request)
    body = AgreementsApply(documents=documents, dry_run=responses.flag(request, "dry_run"))
    if (given := request.args.get("based_on")) is not None:
        body = body.model_copy(update={"based_on": _based_on(given)})
    if context.access.approvals.is_for_two("mode"):
        body = body.model_copy(update={"may_enforce": False})
    return _ask(context, "apply", body)


def _based_on(text: str) -> dict[str, int]:
    """``NAME:VERSION`` of an agreement, ``KIND/NAME:VERSION`` of another document."""
    name, _, version = text.rpartition(":")
    is_version = version.isascii() and version.isdecimal() and len(version) <= VERSION_DIGITS
    if not name or len(text) > BASED_ON_MAX or not is_version:
        problem = f"is {printable(text, 40)!r}, and must be NAME:VERSION or KIND/NAME:VERSION"
        raise BadInput("based_on", problem, "Give the version that was read with the text")
    return {name: int(version)}


def delete_sla(context: AppContext, _request: Request, name: str) -> Response:
    """End an agreement."""
    return _ask(context, "delete", AgreementDelete(name=name))


def end_maintenance(context: AppContext, _request: Request, name: str) -> Response:
    """End maintenance."""
    return _ask(context, "end_document", DocumentEnd(kind="Maintenance", name=name))


def end_calendar(context: AppContext, _request: Request, name: str) -> Response:
    """End a calendar."""
    return _ask(context, "end_document", DocumentEnd(kind="Calendar", name=name))


def end_volume_labels(context: AppContext, _request: Request, name: str) -> Response:
    """End a document that labels volumes: what their agents say holds again."""
    return _ask(context, "end_document", DocumentEnd(kind="VolumeLabels", name=name))


def end_recipient(context: AppContext, _request: Request, name: str) -> Response:
    """End a recipient."""
    return _ask(context, "end_document", DocumentEnd(kind="Recipient", name=name))


def end_route(context: AppContext, _request: Request, name: str) -> Response:
    """End a route."""
    return _ask(context, "end_document", DocumentEnd(kind="Route", name=name))


def end_silence(context: AppContext, _request: Request, name: str) -> Response:
    """End a silence."""
    return _ask(context, "end_document", DocumentEnd(kind="Silence", name=name))


def try_recipient(context: AppContext, _request: Request, name: str) -> Response:
    """Have a test event sent to a recipient."""
    return _ask(context, "notify_test", RecipientTest(name=name))


def send_again(context: AppContext, request: Request, name: str) -> Response:
    """Have an event sent to a recipient again."""
    asked = responses.parse_body(EventAgainBody, responses.json_body(request)).event_id
    row = find_event(context, asked)
    fields = {key: row[key] for key in EventAgain.model_fields if key in row}
    return _ask(context, "event_again", EventAgain(name=name, **fields))


def acknowledge(context: AppContext, request: Request, event_id: str) -> Response:
    """Say that a person takes care of an event."""
    note = responses.parse_body(AcknowledgeBody, responses.json_body(request)).note
    row = find_event(context, event_id)
    named = {key: str(row[key]) for key in ("event_id", "kind", "subject")}
    return _ask(context, "acknowledge", Acknowledgement(note=note, **named))


def set_throttle(context: AppContext, request: Request) -> Response:
    """Set a manual throttle."""
    members = {"duration_s": None, **responses.json_body(request)}
    return _ask(context, "throttle_set", responses.parse_body(ThrottleSet, members))


def release_volume(context: AppContext, request: Request) -> Response:
    """Release a volume's throttles, those of one client of it, or that of a group or of a whole client."""
    given = {key: value for key in ("volume", "client", "group") if (value := request.args.get(key))}
    if not given:
        raise BadInput("volume", "is required, or group, or client")
    members = {"throttle_id": None, **given}
    return _ask(context, "throttle_release", responses.parse_body(ThrottleRelease, members))


def release_throttle(context: AppContext, _request: Request, throttle_id: str) -> Response:
    """Release one throttle."""
    return _ask(context, "throttle_release", ThrottleRelease(volume=None, throttle_id=throttle_id))


def set_mode(context: AppContext, request: Request) -> Response:
    """Switch between observe and enforce."""
    return _ask(context, "mode", responses.parse_body(ModeSet, responses.json_body(request)))


def announce_policies(context: AppContext, _request: Request) -> Response:
    """Ask ``services`` to load a new policy version now."""
    return _ask(context, "policies_changed")


def pin_policy(context: AppContext, request: Request) -> Response:
    """Keep a policy version in force."""
    body = responses.parse_body(PolicyPin, responses.json_body(request))
    if body.version is None:
        raise BadInput("version", "is missing", "GET /api/v1/policies lists the versions")
    stored_policy(context, str(body.version))
    return _ask(context, "policy_pin", body)


def unpin_policy(context: AppContext, _request: Request) -> Response:
    """Let the newest policy version be in force again."""
    return _ask(context, "policy_pin", PolicyPin(version=None))


def roll_back_policy(context: AppContext, request: Request) -> Response:
    """Put the policy before the one in force in force."""
    return _ask(
        context, "policy_rollback", responses.parse_body(PolicyRollback, responses.json_body(request))
    )


def list_gateway(context: AppContext, request: Request, address: str) -> Response:
    """Put a gateway on the list of those to dial."""
    name = responses.parse_body(GatewayName, responses.json_body(request)).name
    return _list_gateway(context, address, name, is_listed=True)


def unlist_gateway(context: AppContext, _request: Request, address: str) -> Response:
    """Take a gateway off the list."""
    found = [row for row in listed_gateways(context) if row["address"] == address]
    if not found:
        raise NotFound(f"no gateway is listed at {address!r}", "'sla gateways list' shows those that are")
    if found[0]["source"] == CONFIGURATION:
        raise BadInput(
            "address", f"{address} is listed in the server's file", "Remove its [[pmdaemon.gateway]] there"
        )
    # A name of an older release may have other characters.
    name = printable(found[0]["name"], GATEWAY_NAME_MAX)
    return _list_gateway(context, address, name, is_listed=False)


def _list_gateway(context: AppContext, address: str, name: str, *, is_listed: bool) -> Response:
    members = {"address": address, "name": name, "is_listed": is_listed}
    return _ask(context, "gateway_list", responses.parse_body(GatewayListing, members))


def approve_volumes(context: AppContext, request: Request) -> Response:
    """Let volumes belong to gateways that show them."""
    return _decide(context, request, "volumes_approve")


def revoke_volumes(context: AppContext, request: Request) -> Response:
    """Let volumes belong to gateways no more."""
    return _decide(context, request, "volumes_revoke")


def _decide(context: AppContext, request: Request, op: str) -> Response:
    return _ask(context, op, responses.parse_body(VolumesDecision, responses.json_body(request)))


def _ask(context: AppContext, op: str, body: BaseModel | None = None) -> Response:
    members = {} if body is None else body.model_dump(exclude_unset=True)
    approvals = context.access.approvals
    if not approvals.is_needed(op, body):
        return answered(context.operations.ask(op, g.who, members))
    operation = approvals.request(g.principal, op, members)
    row = operation.result().get("approval") if operation.done.is_set() else None
    if row is None:  # not answered yet, or there was nothing to approve
        return answered(operation)
    detail = f"{row['text']} waits as {row['approval_id']} until a second person approves it"
    answer = {
        "state": WAITS,
        "approval": row["approval_id"],
        "expires_us": row["expires_us"],
        "detail": detail,
    }
    return responses.as_json(answer, 202, {"Location": f"{PREFIX}/approvals"})


def answered(operation: Operation, body: Row | None = None) -> Response:
    """What became of an operation; ``body`` instead of what ``services`` said, if it was done."""
    if operation.done.is_set():
        result = operation.result()
        return responses.as_json(responses.without_person(result if body is None else body))
    address = f"{PREFIX}/operations/{operation.req}"
    answer = {
        **operation.describe(),
        "detail": "The services part has not answered yet; the request is kept and will be carried out.",
        "operation": address,
    }
    return responses.as_json(answer, 202, {"Location": address, "Retry-After": "1"})
