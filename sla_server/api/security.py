"""Who may change something: bearer token, one-time login codes, sessions, Host and Origin.

Reading is open, because this release binds to loopback only. A change needs

* ``Authorization: Bearer TOKEN`` (the command line; file of mode 0600), or
* a session: a signed cookie (HttpOnly, SameSite=Strict) got by opening a one-time address and confirming
  there (a POST: a program that only reads an address, such as a link preview, does not spend it); a change
  with a session must also carry an Origin header that names this server, so that no other web site can use
  the cookie.

Every request must ask for a host name of this server (a page of another site that points its own name at
127.0.0.1 is refused). State: ``Logins._codes``, digests of the codes not used yet, under its lock. Sessions
are stateless: the signing key is derived from the token, so they survive a restart and end when the token
file is replaced.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import threading
from pathlib import Path
from typing import Final

from flask import Request, session

from pmdaemon.errors import ConfigError
from pmdaemon.runtime.clock import Clock
from pmdaemon.runtime.files import make_directory, write_whole
from sla_server.api.errors import HostRefused, LoginNeeded, OriginRefused

CODE_LIFE_S: Final = 900.0
CODES_MAX: Final = 32
REPLACED: Final = "Delete it; a new one is made at the next start"
LOOPBACK_NAMES: Final = ("127.0.0.1", "localhost", "::1")
# The hash is that of the empty string: plotly adds an empty <style> element and fills it through the DOM.
EMPTY_STYLE: Final = "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='"
PAGE_POLICY: Final = (
    f"default-src 'none'; script-src 'self'; style-src 'self' {EMPTY_STYLE}; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
HEADERS: Final = {
    "Content-Security-Policy": PAGE_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
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
        self._codes: dict[bytes, int] = {}  # digest -> monotonic end

    def issue(self) -> str:
        """A new code, valid once, for ``CODE_LIFE_S``."""
        code = secrets.token_urlsafe(24)
        end_ns = self._clock.monotonic_ns() + round(CODE_LIFE_S * 1e9)
        with self._lock:
            self._drop_old()
            while len(self._codes) >= CODES_MAX:
                del self._codes[next(iter(self._codes))]
            self._codes[_digest(code)] = end_ns
        return code

    def spend(self, code: str) -> bool:
        """Use a code; False if it is unknown, too old or used already."""
        with self._lock:
            self._drop_old()
            return self._codes.pop(_digest(code), 0) != 0

    def _drop_old(self) -> None:
        now_ns = self._clock.monotonic_ns()
        for digest in [key for key, end_ns in self._codes.items() if end_ns <= now_ns]:
            del self._codes[digest]


def _digest(code: str) -> bytes:
    return hashlib.sha256(code.encode()).digest()


class Guard:
    """Decides about one request. Immutable. Thread: any."""

    def __init__(self, token: str, allowed_hosts: list[str]) -> None:
        self._token = token.encode()
        self._hosts = frozenset((*LOOPBACK_NAMES, *(name.lower() for name in allowed_hosts)))

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

    def require_change(self, request: Request) -> str:
        """The author of a change, for the audit log.

        Raises:
            LoginNeeded: neither token nor session.
            OriginRefused: see ``check_origin``.
        """
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            self.check_origin(request, required=False)
            if not hmac.compare_digest(given.strip().encode(), self._token):
                raise LoginNeeded
            user = _WHO_RE.sub("", request.headers.get("Sla-User", ""))[:64]
            return f"token ({user})" if user else "token"
        name = session_name()
        if name is None:
            raise LoginNeeded
        self.check_origin(request, required=True)
        return f"session {name}"


def start_session() -> None:
    """Sign the requesting browser in."""
    session.clear()
    session.permanent = True
    session["name"] = secrets.token_hex(4)


def end_session() -> None:
    """Sign the requesting browser out."""
    session.clear()


def session_name() -> str | None:
    """Name of the request's session, None without a valid one."""
    name = session.get("name")
    return name if isinstance(name, str) else None


def _host_name(host: str) -> str:
    """Host header without port and brackets, in lower case."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()
