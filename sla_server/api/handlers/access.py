"""Handlers of accounts, sessions and sign-in."""

from __future__ import annotations

import secrets
from typing import Final

from flask import Request, Response, g
from flask import session as cookie

from sla_server.api import responses
from sla_server.api.access_routes import CHAIN_MAX
from sla_server.api.accounts import ACTIVE, DELETED, DISABLED, digest_of, new_token
from sla_server.api.context import AppContext
from sla_server.api.errors import BadInput, Forbidden, LoginRefused, NotFound, conflict
from sla_server.api.handlers.read import page_of
from sla_server.api.handlers.write import answered
from sla_server.api.roles import Principal, Role
from sla_server.api.route import LIMIT_MAX
from sla_server.requests import AuditNote, NewPassword, NewToken, NewUser, UserChange
from sla_server.rows import Row

SECRETS: Final = ("password", "digest")
TOKENS_MAX: Final = 1000
DAY_US: Final = 86_400_000_000
PROVIDED: Final = (
    "Change it there, or [[api.oidc.map]] in the configuration; 'sla user disable' keeps them out"
)
LABELS_FOR_VIEWERS: Final = "an account with labels sees its agreements alone, so its role is viewer"


def _shown(row: Row) -> Row:
    return {key: value for key, value in row.items() if key not in SECRETS}


def _about(row: Row) -> Row:
    """An account in the audit log."""
    return {key: row[key] for key in ("role", "labels", "state")}


def _paged(request: Request, rows: list[Row], named: str) -> Response:
    """The rows that the query wants, all without a limit, and how many there are."""
    part = request.args.get("match", "").lower()
    found = [row for row in rows if part in row[named].lower()]
    offset, limit = page_of(request, LIMIT_MAX)
    end = offset + limit if request.args.get("limit") else len(found)
    following = str(end) if end < len(found) else None
    return responses.as_list(found[offset:end], following, count=len(found), before=offset)


def session_state(context: AppContext, _request: Request) -> Response:
    """Who asks."""
    principal: Principal | None = g.principal
    if principal is None:
        return responses.as_json({"signed_in": False, "login_needed": context.config.reading == "login"})
    members = {"who": principal.who, "role": principal.role.name, "labels": principal.labels}
    return responses.as_json({"signed_in": True, **members, "account": principal.account})


def new_login(context: AppContext, request: Request) -> Response:
    """Make a one-time address."""
    principal: Principal = g.principal
    if principal.token_id:
        raise Forbidden("an API token makes no sessions", "Use an account, or 'sla login' on the server")
    # Behind a tunnel the browser needs the address the caller used; the Unix socket has no such address.
    is_tcp = str(request.environ.get("SERVER_PORT", "")).isdecimal()
    base = request.host_url if is_tcp and not context.config.external_url else context.address
    address = f"{base}login?code={context.logins.issue(principal)}"
    context.access.record(principal.who, "login-code", principal.who)
    return responses.as_json({"address": address}, headers={"Cache-Control": "no-store"})


def sign_out(context: AppContext, _request: Request) -> Response:
    """Sign this browser out."""
    principal: Principal = g.principal
    for row in context.access.directory.open_sessions(lambda row: row["session_id"] == principal.session):
        context.access.end_session(principal.who, row)
    cookie.clear()
    return responses.as_json({"signed_in": False})


def _is_own(principal: Principal, row: Row) -> bool:
    if principal.account:
        return bool(row["account"] == principal.account)
    return bool(row["session_id"] == principal.session)


def sessions(context: AppContext, request: Request) -> Response:
    """Open sessions, oldest first."""
    principal: Principal = g.principal
    wanted = request.args.get("account")
    rows = context.access.directory.open_sessions(
        lambda row: (
            (principal.role == Role.admin or _is_own(principal, row)) and wanted in (None, row["account"])
        )
    )
    shown = [{**row, "is_this": row["session_id"] == principal.session} for row in rows]
    return _paged(request, shown, "account")


def end_session(context: AppContext, _request: Request, session_id: str) -> Response:
    """End one session."""
    principal: Principal = g.principal
    found = context.access.directory.open_sessions(
        lambda row: (
            (principal.role == Role.admin or _is_own(principal, row))
            and row["session_id"].startswith(session_id)
        )
    )
    if len(found) != 1:
        problem = f"no open session begins with {session_id[:64]!r}" if not found else "several begin so"
        raise NotFound(problem, "'sla user sessions' lists them")
    operation = context.access.end_session(principal.who, found[0])
    return answered(operation, {"ended": [found[0]["session_id"]]})


def end_sessions(context: AppContext, request: Request) -> Response:
    """Sign an account out everywhere."""
    principal: Principal = g.principal
    name = request.args.get("account") or principal.account
    if not name:
        raise BadInput("account", "is required", "Say whose sessions are to end")
    if name != principal.account and principal.role != Role.admin:
        raise Forbidden("only an administrator ends the sessions of others", "Leave account out for your own")
    account = _account(context, name)
    ended = len(context.access.directory.open_sessions(lambda row: row["account"] == name))
    row = context.access.directory.without_sessions(account)
    operation = context.access.change(
        principal.who, "sessions-end", name, "accounts", row, after={"sessions": ended}
    )
    return answered(operation, {"ended": ended})


def _account(context: AppContext, name: str) -> Row:
    row = context.access.directory.account(name)
    if row is None:
        raise NotFound(f"no account {name[:64]!r}", "'sla user list' shows them")
    return row


def audit_chain(context: AppContext, request: Request) -> Response:
    """A page of the audit log, oldest first."""
    limit = responses.number(request, "limit", CHAIN_MAX, least=1, most=CHAIN_MAX)
    after = request.args.get("after", "0")
    if not (after.isascii() and after.isdecimal()) or len(after) > 18:
        raise BadInput("after", f"{after[:40]!r} is no place in the log", "Use the `next` of the page before")
    rows = context.source.access.audit_chain(int(after), limit)
    return responses.as_list(rows, str(rows[-1]["seq"]) if len(rows) == limit else None)


def record_audit(context: AppContext, request: Request) -> Response:
    """An entry of a command that works on the server's own files."""
    body = responses.parse_body(AuditNote, responses.json_body(request))
    operation = context.access.change(g.who, body.action, body.subject, after=dict(body.after))
    return answered(operation)


def users(context: AppContext, request: Request) -> Response:
    """Accounts by name."""
    rows = context.access.directory.rows("accounts")
    return _paged(request, [_shown(row) for row in rows if row["state"] != DELETED], "name")


def add_user(context: AppContext, request: Request) -> Response:
    """Make an account."""
    body = responses.parse_body(NewUser, responses.json_body(request))
    labels = _labels(context, body.labels, body.role)
    directory = context.access.directory
    if directory.account(body.name) is not None:
        raise conflict(f"there is an account {body.name!r} already", "Change it: sla user change NAME")
    _check_password(body.password, body.name)
    former = {row["name"]: row for row in directory.rows("accounts")}.get(body.name)
    at_us = directory.changed_us(former)
    row = {
        "name": body.name,
        "role": body.role,
        "password": context.access.passwords.hash(body.password),
        "labels": labels,
        "identity": "",
        "state": ACTIVE,
        "created_us": at_us,
        "changed_us": at_us,
        "sessions_from_us": at_us,
    }
    operation = context.access.change(g.who, "user-add", body.name, "accounts", row, after=_about(row))
    return answered(operation, _shown(row))


def _labels(context: AppContext, labels: str | None, role: str) -> str:
    if labels and role != Role.viewer.name:
        raise BadInput("role", LABELS_FOR_VIEWERS, "Give role viewer, or no labels")
    return labels or ""


def _check_password(password: str, name: str) -> None:
    if name in password.lower() or len(set(password)) < 5:
        problem = "holds the account's name, or only a few different characters"
        raise BadInput("password", problem, "Choose another one; several words are good")


def change_user(context: AppContext, request: Request, name: str) -> Response:
    """Change an account."""
    body = responses.parse_body(UserChange, responses.json_body(request))
    account = _account(context, name)
    if account.get("identity") and (body.role or body.labels is not None):
        raise conflict(f"role and labels of {name!r} come from the provider, at each sign-in", PROVIDED)
    role = body.role or account["role"]
    labels = account["labels"] if body.labels is None else body.labels
    state = account["state"] if body.enabled is None else (ACTIVE if body.enabled else DISABLED)
    row = {**context.access.directory.without_sessions(account), "role": role, "state": state}
    row["labels"] = _labels(context, labels, role)
    operation = context.access.change(
        g.who, "user-change", name, "accounts", row, before=_about(account), after=_about(row)
    )
    return answered(operation, _shown(row))


def delete_user(context: AppContext, _request: Request, name: str) -> Response:
    """End an account."""
    account = _account(context, name)
    row = {**context.access.directory.without_sessions(account), "state": DELETED, "password": ""}
    operation = context.access.change(g.who, "user-delete", name, "accounts", row, before=_about(account))
    return answered(operation, {"name": name})


def tokens(context: AppContext, request: Request) -> Response:
    """API tokens that can be used, oldest first."""
    ends_us = context.access.directory.token_ends_us
    rows = [{**_shown(row), "ends_us": ends_us(row)} for row in _usable_tokens(context)]
    return _paged(request, rows, "name")


def _usable_tokens(context: AppContext) -> list[Row]:
    now_us = context.clock.unix_us()
    rows = context.access.directory.rows("api_tokens")
    ends_us = context.access.directory.token_ends_us
    usable = [row for row in rows if row["revoked_us"] is None and ends_us(row) > now_us]
    return sorted(usable, key=lambda row: (row["created_us"], row["token_id"]))


def create_token(context: AppContext, request: Request) -> Response:
    """Make an API token."""
    body = responses.parse_body(NewToken, responses.json_body(request))
    labels = _labels(context, body.labels, body.role)
    usable = _usable_tokens(context)
    if any(row["name"] == body.name for row in usable):
        raise conflict(
            f"there is a token {body.name!r} already", f"End it first: sla token revoke {body.name}"
        )
    if len(usable) >= TOKENS_MAX:
        raise conflict(f"there are {TOKENS_MAX} tokens already", "Revoke some: sla token list")
    secret, now_us = new_token(), context.clock.unix_us()
    row = {
        "token_id": secrets.token_hex(6),
        "name": body.name,
        "digest": digest_of(secret),
        "role": body.role,
        "labels": labels,
        "created_by": _maker(context),
        "created_us": now_us,
        "changed_us": now_us,
        "expires_us": now_us + round(body.days * DAY_US),
        "revoked_us": None,
    }
    after = {key: row[key] for key in ("token_id", "role", "labels", "expires_us")}
    # Not 202 if ``services`` are slow: the secret is in this answer alone.
    context.access.change(g.who, "token-create", body.name, "api_tokens", row, after=after)
    answer = {**_shown(row), "ends_us": context.access.directory.token_ends_us(row), "token": secret}
    return responses.as_json(answer, headers={"Cache-Control": "no-store"})


def _maker(context: AppContext) -> str:
    """Whose token it will be; of one that is made with a token who has made that: it ends with them."""
    principal: Principal = g.principal
    rows = context.access.directory.rows("api_tokens") if principal.token_id else []
    return next((str(row["created_by"]) for row in rows if row["token_id"] == principal.token_id), g.who)


def revoke_token(context: AppContext, _request: Request, which: str) -> Response:
    """End an API token."""
    found = [row for row in _usable_tokens(context) if which in (row["token_id"], row["name"])]
    if not found:
        raise NotFound(f"no API token {which[:64]!r}", "'sla token list' shows them")
    at_us = context.access.directory.changed_us(found[0])
    row = {**found[0], "revoked_us": at_us, "changed_us": at_us}
    before = {key: row[key] for key in ("token_id", "role", "labels", "expires_us")}
    operation = context.access.change(g.who, "token-revoke", row["name"], "api_tokens", row, before=before)
    return answered(operation, _shown(row))


def set_password(context: AppContext, request: Request, name: str) -> Response:
    """Set a password; the account's sessions end, but for the one that asks."""
    body = responses.parse_body(NewPassword, responses.json_body(request))
    principal: Principal = g.principal
    if principal.account != name and principal.role != Role.admin:
        raise Forbidden("only an administrator sets the passwords of others", "Name your own account")
    account = _account(context, name)
    if account.get("identity"):
        raise conflict(f"{name!r} signs in through the provider, without a password here", PROVIDED)
    if principal.account == name:
        try:
            context.access.by_password(name, body.current, request.remote_addr or "")
        except LoginRefused as exc:
            raise LoginRefused("current: that is not the password until now") from exc
    _check_password(body.password, name)
    row = context.access.directory.without_sessions(account)
    row["password"] = context.access.passwords.hash(body.password)
    operation = context.access.change(principal.who, "user-password", name, "accounts", row)
    if principal.account == name and principal.session:
        secret = context.access.begin_session(
            principal, request.remote_addr or "", request.headers.get("User-Agent", ""), "password change"
        )
        cookie["id"] = secret
    return answered(operation, {"name": name})
