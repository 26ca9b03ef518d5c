"""Every refusal of the API, each answered as RFC 9457 ``application/problem+json``.

SlaError (pmdaemon.errors)
└── ApiError                 status, title, detail, fix (what to do next)
    ├── BadInput        400  a parameter or body is wrong; names it
    ├── LoginNeeded     401  a change without token or session
    ├── LoginRefused    403  name and password do not fit
    ├── Forbidden       403  the role does not allow it, or it is about what the account may not see
    ├── TooManyLogins   429  too many tries to sign in
    ├── OriginRefused   403  another web site tries to change something
    ├── NotFound        404  no such thing
    ├── TooLarge        413  body above the limit
    ├── HostRefused     421  a Host header of another host
    ├── ServiceRefused  4xx  ``services`` said no; its code and words
    ├── Unavailable     503  a part does not answer; retryable
    │   └── StandsBy    503  of several servers another one acts; names it
    └── TooManyStreams  503  no thread left for another live stream; poll instead
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from pmdaemon.errors import SlaError
from sla_server.agreements.selectors import nearest


class ApiError(SlaError):
    """Root: becomes one problem document."""

    status = 500
    slug = "error"
    title = "Something went wrong"
    retry_after_s: int | None = None
    allow: tuple[str, ...] = ()
    """Methods of the path, where another one was asked for."""

    def __init__(self, detail: str, fix: str = "") -> None:
        self.detail = detail
        self.fix = fix
        super().__init__(f"{detail}. {fix}" if fix else detail)

    def problem(self) -> dict[str, Any]:
        """The document's members."""
        body = {
            "type": f"urn:storage-sla:problem:{self.slug}",
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
        }
        return {**body, "fix": self.fix} if self.fix else body


class BadInput(ApiError):
    """A parameter or a body is wrong."""

    status = 400
    slug = "bad-input"
    title = "The request is not understood"

    def __init__(self, name: str, problem: str, fix: str = "") -> None:
        self.name = name
        super().__init__(f"{name}: {problem}", fix)


class LoginNeeded(ApiError):
    """A change without token or session."""

    status = 401
    slug = "login-needed"
    title = "Signing in is needed"

    def __init__(self, problem: str = "") -> None:
        super().__init__(
            problem or "this needs a session or a token",
            "Sign in on the page, open the one-time address printed by 'sla login', or send "
            "'Authorization: Bearer TOKEN' with an API token or the token from DATA_DIR/api.token",
        )


class LoginRefused(ApiError):
    """Name and password do not fit, or the account is disabled, no word which; or the provider says no."""

    status = 403
    slug = "login-refused"
    title = "Signing in was refused"

    def __init__(
        self,
        problem: str = "name and password do not fit, or the account is disabled",
        fix: str = "Try again; an administrator can set a new password: sla user passwd NAME",
    ) -> None:
        super().__init__(problem, fix)


class NothingGuessed(LoginRefused):
    """A way back from the provider that no sign-in here waits for, so that nothing could be guessed by it.

    Any web site can send a browser there: counted as a try, it would lock out all who share its address.
    """


class Forbidden(ApiError):
    """Who asks is known, and may not."""

    status = 403
    slug = "forbidden"
    title = "This account may not do that"


class TooManyLogins(ApiError):
    """Too many tries with wrong passwords."""

    status = 429
    slug = "too-many-logins"
    title = "Too many tries to sign in"

    def __init__(self, wait_s: float) -> None:
        self.retry_after_s = math.ceil(wait_s)
        super().__init__(
            "too many tries to sign in to this account, or from this address",
            f"Try again in {self.retry_after_s} s, or use 'sla login' on the server",
        )


class OriginRefused(ApiError):
    """The Origin header names another site, or a session's change has none."""

    status = 403
    slug = "origin-refused"
    title = "Changes are taken from this server's own page only"

    def __init__(self, origin: str | None) -> None:
        super().__init__(
            f"the request comes from {origin!r}"
            if origin
            else "the request does not say where it comes from",
            "Use the page of this server, or the bearer token",
        )


class NotFound(ApiError):
    """No such thing."""

    status = 404
    slug = "not-found"
    title = "Not found"


class TooLarge(ApiError):
    """The body is above the limit."""

    status = 413
    slug = "too-large"
    title = "The body is too large"


class HostRefused(ApiError):
    """The Host header does not name this server."""

    status = 421
    slug = "host-refused"
    title = "This host name is not served"

    def __init__(self, host: str) -> None:
        super().__init__(
            f"the request asks for host {host!r}",
            "Use http://127.0.0.1, or add the name to api.allowed_hosts in the server's configuration",
        )


class ServiceRefused(ApiError):
    """``services`` refused the change; carries its code, words and list of errors."""

    slug = "refused"
    title = "The change was refused"

    def __init__(self, code: int, body: dict[str, Any]) -> None:
        self.status = code if 400 <= code <= 599 else 500
        given = body.get("errors")
        self.errors = [item for item in given if isinstance(item, dict)] if isinstance(given, list) else []
        words, fix = body.get("detail"), body.get("fix")
        if len(self.errors) == 1 and not self.errors[0].get("line"):
            words, fix = self.errors[0].get("problem"), self.errors[0].get("fix")
        elif self.errors:
            words = f"{len(self.errors)} problem{'s' if len(self.errors) > 1 else ''} in the documents"
        super().__init__(str(words or "the services part refused it"), str(fix or ""))

    def problem(self) -> dict[str, Any]:
        """With ``errors``: one entry a problem (line, field, problem)."""
        body = super().problem()
        return {**body, "errors": self.errors} if self.errors else body


def conflict(problem: str, fix: str) -> ServiceRefused:
    """What was asked for does not fit what is stored now."""
    return ServiceRefused(409, {"detail": problem, "fix": fix})


class Unavailable(ApiError):
    """A part of the server does not answer just now."""

    status = 503
    slug = "unavailable"
    title = "A part of the server does not answer"
    retryable = True
    retry_after_s: int | None = 2


class StandsBy(Unavailable):
    """Of several servers this one does not act: it changes nothing."""

    slug = "stands-by"
    title = "This server stands by"

    def __init__(self, reason: str, acting: str, page: str = "", *, first: str = "") -> None:
        """``first``: what to do before the change is made again; no program should do that by itself then."""
        where = f"the server of {acting}{f', {page}' if page else ''}"
        fix = (
            f"Make the change at {where}; 'sla get nodes' lists the nodes"
            if acting
            else "Try again in some seconds; 'sla cluster status' says which nodes run"
        )
        super().__init__(reason, f"{first}. If not: {fix[0].lower()}{fix[1:]}" if first else fix)
        if first:
            self.retry_after_s = None


class TooManyStreams(ApiError):
    """All threads for live streams are taken."""

    status = 503
    slug = "too-many-live-streams"
    title = "All live streams are taken"
    retryable = True
    retry_after_s = 5

    def __init__(self, streams_max: int) -> None:
        super().__init__(
            f"{streams_max} live streams are open, which is the limit",
            "Poll /api/v1/live?since=AT_US once a second, or raise api.live_streams_max",
        )


def near_first(name: str, known: Iterable[str], otherwise: str) -> str:
    """What to do about a name that is not there: those like it, then where all of them are listed."""
    near = nearest(name, known)
    return f"Near it: {near}. {otherwise}" if near else otherwise
