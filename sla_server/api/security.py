"""Who a request comes from, and whether they may: tokens, one-time codes, sessions, Host and Origin.

A request says who it comes from with

* ``Authorization: Bearer TOKEN``: the local administrator's (file of mode 0600, for the command line of those
  who may read it), or an API token, or
* a session: the secret of one in a signed cookie (HttpOnly, SameSite=Strict, Secure over https), got with
  name and password, or by opening a one-time address and confirming there (a POST: a program that only reads
  an address, such as a link preview, does not spend it). A change with a session must also carry an Origin
  header that names this server, so that no other web site can use the cookie.

``Guard.admit`` is the one place that decides, by the route's own words (``route.ApiRoute``). Every request
must ask for a host name of this server (a page of another site that points its own name at 127.0.0.1 is
refused). State: ``Logins._codes``, digests of the codes not used yet, under its lock. Sessions and API tokens
are in ``accounts``; the key that signs cookies is derived from the local administrator's token, so that
sessions end when its file is replaced.
"""

from __future__ import annotations

import hashlib
import hmac
import pwd
import re
import secrets
import threading
from dataclasses import replace
from pathlib import Path
from typing import Final

from flask import Request, session

from pmdaemon.errors import ConfigError
from pmdaemon.runtime.clock import Clock
from pmdaemon.runtime.files import make_directory, write_whole
from sla_server.api.accounts import TOKEN_PREFIX, Directory
from sla_server.api.errors import Forbidden, HostRefused, LoginNeeded, OriginRefused, Unavailable
from sla_server.api.roles import Principal, Role
from sla_server.api.route import ApiRoute

CODE_LIFE_S: Final = 900.0
CODES_EACH: Final = 8
"""Codes of one account that wait to be spent; its oldest gives way to one more, nobody else's does."""
CODES_MAX: Final = 1024
REPLACED: Final = "Delete it; a new one is made at the next start"
LOOPBACK_NAMES: Final = ("127.0.0.1", "localhost", "::1")
PAGE_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
HEADERS: Final = {
    "Content-Security-Policy": PAGE_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
LOCAL: Final = Principal("local", Role.admin)
"""Who has the token of the server's own file."""
PAGE: Final = ApiRoute("GET", "/", "index", "The page.")
PEER_UID: Final = "HTTP_SLA_PEER_UID"
"""Of the environment: the user at the other end of the Unix socket. ``server`` sets it, no client can."""
_WHO_RE: Final = re.compile(r"[^A-Za-z0-9@._+-]")


def load_or_make_token(path: Path) -> str:
    """The bearer token; made on first use.

    Raises:
        ConfigError: unreadable, not to be written, readable by others, or too short to be a token.
    """
    try:
        status = path.stat()
        token = path.read_text().strip()
    except FileNotFoundError:
        token = secrets.token_urlsafe(32)
        try:
            make_directory(path.parent, 0o700)
            write_whole(path, token + "\n", synced=True)
        except OSError as exc:
            problem = f"cannot be written: {exc.strerror}"
            raise ConfigError(str(path), problem, "Check its directory and the disk") from exc
        return token
    except OSError as exc:
        raise ConfigError(str(path), f"cannot be read: {exc.strerror}", "Correct its owner or mode") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(str(path), "is not text, so it holds no token", REPLACED) from exc
    if status.st_mode & 0o077:
        raise ConfigError(str(path), "can be read by others", f"Run: chmod 600 {path}")
    if len(token) < 32:
        raise ConfigError(str(path), "holds no token", REPLACED)
    return token


def session_key(token: str) -> bytes:
    """Key that signs session cookies."""
    return hashlib.blake2b(token.encode(), person=b"sla-api-session").digest()


class Logins:
    """One-time codes: made, used once, deleted. Lock ``_lock`` guards ``_codes``. Thread: any."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._codes: dict[bytes, tuple[int, Principal]] = {}  # digest -> monotonic end, for whom

    def issue(self, principal: Principal = LOCAL) -> str:
        """A new code, valid once, for ``CODE_LIFE_S``: who spends it is signed in as ``principal``.

        Raises:
            Unavailable: ``CODES_MAX`` wait to be spent.
        """
        code = secrets.token_urlsafe(24)
        end_ns = self._clock.monotonic_ns() + round(CODE_LIFE_S * 1e9)
        with self._lock:
            self._drop_old()
            same = [key for key, (_end, who) in self._codes.items() if _issuer(who) == _issuer(principal)]
            if len(same) >= CODES_EACH:
                del self._codes[same[0]]
            if len(self._codes) >= CODES_MAX:
                problem = f"{CODES_MAX} one-time addresses wait to be opened"
                raise Unavailable(problem, "Sign in with name and password, or try again in 15 minutes")
            self._codes[_digest(code)] = end_ns, principal
        return code

    def spend(self, code: str) -> Principal | None:
        """Use a code; None if it is unknown, too old or used already."""
        with self._lock:
            self._drop_old()
            return self._codes.pop(_digest(code), (0, None))[1]

    def _drop_old(self) -> None:
        now_ns = self._clock.monotonic_ns()
        for digest in [key for key, (end_ns, _who) in self._codes.items() if end_ns <= now_ns]:
            del self._codes[digest]


def _issuer(principal: Principal) -> str:
    """Whose codes count together; the local administrator is one, whatever name it gives."""
    return principal.account or ("" if principal.who.startswith(LOCAL.who) else principal.who)


def _digest(code: str) -> bytes:
    return hashlib.sha256(code.encode(errors="replace")).digest()


class Guard:
    """Decides about one request. Immutable. Thread: any.

    Args:
        token: the local administrator's.
        allowed_hosts: beside those of this machine.
        directory: accounts, API tokens and sessions.
        needs_login: reading needs a login, too.
    """

    def __init__(
        self, token: str, allowed_hosts: list[str], directory: Directory, *, needs_login: bool = False
    ) -> None:
        self._token = token.encode()
        self._hosts = frozenset((*LOOPBACK_NAMES, *(name.lower() for name in allowed_hosts)))
        self._directory = directory
        self._needs_login = needs_login

    def check_host(self, request: Request) -> None:
        """Check any request.

        Raises:
            HostRefused: the Host header does not name this server.
        """
        host = request.headers.get("Host", "")
        if _host_name(host) not in self._hosts:
            raise HostRefused(host)

    def check_origin(self, request: Request, *, required: bool) -> None:
        """Check a change.

        Raises:
            OriginRefused: from another site; or ``required`` and absent.
        """
        origin = request.headers.get("Origin")
        if origin is None and not required:
            return
        if origin not in (f"http://{request.host}", f"https://{request.host}"):
            raise OriginRefused(origin)

    def admit(self, request: Request, route: ApiRoute) -> Principal | None:
        """Who asks, if they may; None: somebody who is not signed in, and need not be.

        Raises:
            LoginNeeded: it needs a login, or the token is not known.
            Forbidden: the role does not allow it.
            OriginRefused: see ``check_origin``.
            Unavailable: the database is away, and who it is cannot be found out.
        """
        is_free = route.needs == Role.viewer and not (self._needs_login or route.personal)
        is_open = not route.changes and (route.public or is_free)
        try:
            principal = self._identify(request, route)
        except Unavailable:
            if not is_open:
                raise
            principal = None
        if principal is None:
            if not is_open:
                raise LoginNeeded
            return None
        if principal.role < route.needs:
            problem = f"{principal.who} is {principal.role.name}; this needs the role {route.needs.name}"
            raise Forbidden(problem, "Ask an administrator: sla user change NAME --role ROLE")
        return principal

    def may_read(self, request: Request) -> bool:
        """Whether the page may be shown: it reads with the same cookie."""
        try:
            return self.admit(request, PAGE) is not None or not self._needs_login
        except (LoginNeeded, Unavailable):
            return False

    def _identify(self, request: Request, route: ApiRoute) -> Principal | None:
        if (given := bearer_of(request)) is not None:
            if route.changes:
                self.check_origin(request, required=False)
            if hmac.compare_digest(given.encode(errors="replace"), self._token):
                return replace(LOCAL, who=local_name(request))
            principal = self._directory.by_token(given) if given.startswith(TOKEN_PREFIX) else None
            if principal is None:
                raise LoginNeeded("the token is not known here, or was revoked, or has expired")
            return principal
        secret = session.get("id")
        principal = self._directory.by_session(secret) if isinstance(secret, str) else None
        if principal is not None and route.changes:
            self.check_origin(request, required=True)
        return principal


def bearer_of(request: Request) -> str | None:
    """The bearer token that comes with a request; None: there is none."""
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    return given.strip() if scheme.lower() == "bearer" else None


def local_name(request: Request) -> str:
    """The local administrator in the audit log: named by the kernel on the Unix socket."""
    uid = request.environ.get(PEER_UID, "")
    if uid.isdecimal():
        try:
            return f"local ({pwd.getpwuid(int(uid)).pw_name})"
        except KeyError:
            return f"local (uid {uid})"
    user = _WHO_RE.sub("", request.headers.get("Sla-User", ""))[:64]
    return f"local (says {user})" if user else "local"


def remember_session(secret: str) -> None:
    """Sign the requesting browser in."""
    session.clear()
    session.permanent = True
    session["id"] = secret


def forget_session() -> None:
    """Have the requesting browser forget its session."""
    session.clear()


def _host_name(host: str) -> str:
    """Host header without port and brackets, in lower case."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()
