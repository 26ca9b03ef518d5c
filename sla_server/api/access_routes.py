"""Routes of accounts, sessions and sign-in."""

from __future__ import annotations

from typing import Final

from sla_server.api.route import ApiRoute, Query

CHAIN_MAX: Final = 1000
ACCESS_ROUTES: Final = (
    ApiRoute(
        "GET",
        "/session",
        "session_state",
        "Who asks: whether signed in, as whom, with which role.",
        public=True,
        scope="free",
    ),
    ApiRoute(
        "DELETE",
        "/session",
        "sign_out",
        "Sign this browser out.",
        changes=True,
        role="viewer",
        scope="free",
    ),
    ApiRoute(
        "POST",
        "/logins",
        "new_login",
        "Make a one-time address that signs a browser in, as who asks.",
        changes=True,
        role="viewer",
        scope="free",
    ),
    ApiRoute(
        "GET",
        "/sessions",
        "sessions",
        "Sessions of browsers that have not ended: one's own, for an administrator all.",
        (Query("account", "string", "Only those of this account."),),
        items="sessions",
        personal=True,
        scope="free",
    ),
    ApiRoute(
        "DELETE",
        "/sessions",
        "end_sessions",
        "Sign an account out everywhere: one's own, for an administrator any.",
        (Query("account", "string", "Which account; default: one's own."),),
        changes=True,
        role="viewer",
        scope="free",
    ),
    ApiRoute(
        "DELETE",
        "/sessions/{session_id}",
        "end_session",
        "End one session, by its id or the beginning of it.",
        changes=True,
        role="viewer",
        scope="free",
    ),
    ApiRoute(
        "GET",
        "/audit/chain",
        "audit_chain",
        "The audit log in the order of its chain, texts as they are stored, with digests.",
        (
            Query("after", "string", "The `next` of the page before."),
            Query("limit", "integer", "Rows a page; default 1000.", least=1, most=CHAIN_MAX),
        ),
        items="audit",
        role="admin",
    ),
    ApiRoute(
        "POST",
        "/audit/notes",
        "record_audit",
        "Record in the audit log what 'sla ca' did.",
        body="AuditNote",
        changes=True,
        role="admin",
    ),
    ApiRoute("GET", "/users", "users", "Accounts, without their passwords.", items="accounts", role="admin"),
    ApiRoute("POST", "/users", "add_user", "Make an account.", body="NewUser", changes=True, role="admin"),
    ApiRoute(
        "PUT",
        "/users/{name}",
        "change_user",
        "Change an account: its role, its labels, whether it is enabled. Its sessions end.",
        body="UserChange",
        changes=True,
        role="admin",
    ),
    ApiRoute(
        "DELETE",
        "/users/{name}",
        "delete_user",
        "End an account and its sessions.",
        changes=True,
        role="admin",
    ),
    ApiRoute(
        "PUT",
        "/users/{name}/password",
        "set_password",
        "Set an account's password; its other sessions end. One's own needs the current one.",
        body="NewPassword",
        changes=True,
        role="viewer",
        scope="free",
    ),
    ApiRoute(
        "GET", "/tokens", "tokens", "API tokens in use, without secrets.", items="api_tokens", role="admin"
    ),
    ApiRoute(
        "POST",
        "/tokens",
        "create_token",
        "Make an API token; the answer has its secret, this once.",
        body="NewToken",
        changes=True,
        role="admin",
    ),
    ApiRoute(
        "DELETE",
        "/tokens/{which}",
        "revoke_token",
        "End an API token, by its id or its name.",
        changes=True,
        role="admin",
    ),
)
