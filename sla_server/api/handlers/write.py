"""Handlers that change something: each becomes one request to ``services`` (docs/formats/messages.md).

The answer is 200 with what ``services`` said, a problem document when it refused, or 202 with the operation's
address when it did not answer in time. The app has checked token or session before; ``g.who`` names the
author.
"""

from __future__ import annotations

import math
from typing import Any, Final

from flask import Request, Response, g

from pmdaemon.runtime.excerpt import excerpt, printable
from sla_server.agreements.limits import CALL_BYTES, MAX_DOCUMENTS
from sla_server.api import responses
from sla_server.api.context import AppContext
from sla_server.api.errors import BadInput, NotFound, TooLarge
from sla_server.api.handlers.read import CONFIGURATION, listed_gateways
from sla_server.api.routes import PREFIX
from sla_server.api.security import end_session

RATES: Final = ("iops", "bytes_per_s", "cost_per_s")
REASON_MAX: Final = 200
NAME_MAX: Final = 200


def apply_slas(context: AppContext, request: Request) -> Response:
    """Apply YAML documents."""
    try:
        documents = request.get_data().decode()
    except UnicodeDecodeError as exc:
        raise BadInput("body", "is not UTF-8 text") from exc
    if not documents.strip():
        raise BadInput("body", "is empty", "Send agreement documents in YAML")
    if (size := len(documents.encode())) > CALL_BYTES:
        raise TooLarge(
            f"body: {size} bytes of documents, one call takes {CALL_BYTES}",
            f"Cut it between documents, {MAX_DOCUMENTS} a call at most; 'sla apply -f FILE' does so itself",
        )
    return _ask(context, "apply", {"documents": documents, "dry_run": responses.flag(request, "dry_run")})


def delete_sla(context: AppContext, _request: Request, name: str) -> Response:
    """End an agreement."""
    return _ask(context, "delete", {"name": name})


def set_throttle(context: AppContext, request: Request) -> Response:
    """Set a manual throttle."""
    body = responses.json_body(request)
    rates = {name: _positive(body, name) for name in RATES if body.get(name) is not None}
    if len(rates) != 1:
        raise BadInput("body", f"needs exactly one of {', '.join(RATES)}")
    volume, reason = body.get("volume"), body.get("reason")
    if not isinstance(volume, str) or not volume:
        raise BadInput("volume", "is required")
    if not isinstance(reason, str) or not reason.strip() or len(reason) > REASON_MAX:
        raise BadInput(
            "reason", f"is required, {REASON_MAX} characters at most", "Say why: others will read it"
        )
    duration_s = None if body.get("duration_s") is None else _positive(body, "duration_s")
    asked = {"volume": volume, **rates, "duration_s": duration_s, "reason": reason.strip()}
    return _ask(context, "throttle_set", asked)


def release_volume(context: AppContext, request: Request) -> Response:
    """Release a volume's throttles."""
    volume = request.args.get("volume", "")
    if not volume:
        raise BadInput("volume", "is required")
    return _ask(context, "throttle_release", {"volume": volume, "throttle_id": None})


def release_throttle(context: AppContext, _request: Request, throttle_id: str) -> Response:
    """Release one throttle."""
    return _ask(context, "throttle_release", {"volume": None, "throttle_id": throttle_id})


def set_mode(context: AppContext, request: Request) -> Response:
    """Switch between observe and enforce."""
    mode = responses.json_body(request).get("mode")
    if mode not in ("observe", "enforce"):
        raise BadInput("mode", f"{mode!r} is neither 'observe' nor 'enforce'")
    return _ask(context, "mode", {"mode": mode})


def announce_policies(context: AppContext, _request: Request) -> Response:
    """Tell ``services`` to look for a new policy version now."""
    return _ask(context, "policies_changed", {})


def list_gateway(context: AppContext, request: Request, address: str) -> Response:
    """Put a gateway on the list of those to dial; ``services`` checks the address."""
    name = responses.json_body(request).get("name")
    if not isinstance(name, str) or not name.strip() or len(name) > NAME_MAX:
        raise BadInput("name", f"is required, {NAME_MAX} characters at most")
    name = name.strip()
    if not name.isprintable():
        raise BadInput("name", f"{excerpt(name)} has control characters; remove them")
    return _ask(context, "gateway_list", {"address": address, "name": name, "is_listed": True})


def unlist_gateway(context: AppContext, _request: Request, address: str) -> Response:
    """Take a gateway off the list."""
    found = [row for row in listed_gateways(context) if row["address"] == address]
    if not found:
        raise NotFound(f"no gateway is listed at {address!r}", "'sla gateways list' shows those that are")
    if found[0]["source"] == CONFIGURATION:
        raise BadInput(
            "address", f"{address} is listed in the server's file", "Remove its [[pmdaemon.gateway]] there"
        )
    name = printable(found[0]["name"], NAME_MAX)  # a name of an older release may have other characters
    return _ask(context, "gateway_list", {"address": address, "name": name, "is_listed": False})


def new_login(context: AppContext, request: Request) -> Response:
    """Make a one-time address."""
    # Behind a tunnel the browser needs the address the caller used; the Unix socket has no such address.
    is_tcp = str(request.environ.get("SERVER_PORT", "")).isdecimal()
    address = f"{request.host_url if is_tcp else context.address}login?code={context.logins.issue()}"
    return responses.as_json({"address": address}, headers={"Cache-Control": "no-store"})


def sign_out(_parts: AppContext, _request: Request) -> Response:
    """Sign this browser out."""
    end_session()
    return responses.as_json({"signed_in": False})


def _ask(context: AppContext, op: str, body: dict[str, Any]) -> Response:
    operation = context.operations.ask(op, g.who, body)
    if operation.done.is_set():
        return responses.as_json(operation.result())
    address = f"{PREFIX}/operations/{operation.req}"
    answer = {
        **operation.describe(),
        "detail": "The services part has not answered yet; the request is kept and will be carried out.",
        "operation": address,
    }
    return responses.as_json(answer, 202, {"Location": address, "Retry-After": "1"})


def _positive(body: dict[str, Any], name: str) -> float:
    value = body[name]
    try:
        number = math.nan if isinstance(value, bool | str) else float(value)
    except (TypeError, OverflowError):
        number = math.nan
    if not 0 < number < math.inf:
        raise BadInput(name, f"{str(value)[:40]!r} is not a number above 0")
    return number
