"""Requests that only the acting server can answer, forwarded to it by a server that stands by.

Forwarded is a change that comes with a bearer token, and what is read of ``LIVE`` with a token, or without
one where this server lets everybody read. The acting server decides who asks and what they may, as of any
other request: it gets the token, and nothing that this server would have found out about it. Its status and
body come back as they are. A change that does not get there is refused (``StandsBy``) to who may make it;
what is read is then answered here, from SQL, and says that live values are missing.

Not forwarded is a browser. Its cookie is for the name and port of this server, a change of it has to come
from this server's own page (Origin), and what it shows should be one server's: the page leads to that of the
acting server instead. Nor is a request that has come from another server already (``MARK``): two servers that
each take the other for the acting one refuse it.

The token goes to the address that the lease names, over https with a certificate of an authority of the
system or this server's own, or over plain http to a process of this user, or of root, on this machine.

State: ``_client``, for one address and authority, under ``_lock``. ``AT_ONCE`` requests wait at once, and
``AT_ONCE_LOCAL`` of the Unix socket, none much longer than ``limit_s``. Thread: any.
"""

from __future__ import annotations

from sla_server import lean_httpx  # noqa: F401 - before httpx: see there

# isort: split
import contextlib
import hmac
import ipaddress
import os
import ssl
import threading
from pathlib import Path
from typing import Final
from urllib.parse import quote, urlsplit

import httpx
from flask import Request, Response

from pmdaemon.runtime import sockets
from pmdaemon.runtime.clock import Deadline
from sla_server.api.acting import ActingServer
from sla_server.api.errors import StandsBy, Unavailable
from sla_server.api.route import ApiRoute
from sla_server.api.security import PEER_UID, Guard, bearer_of
from sla_server.lease_file import LeaseState

MARK: Final = "Sla-Forwarded-By"
"""Header with the name of the node whose server forwards."""
HERE: Final = frozenset(("admission", "preview", "new_login", "sign_out"))
"""Operations that the table of routes calls changes, and that need nothing but this server."""
ASKED_BACK: Final = "operation"
"""Known to the server that makes the change alone, and in no database."""
LIVE: Final = frozenset(
    (
        *("live", "trend", "mode", "operation", "why", "gateways", "gateway_list", "throttles"),
        *("volumes", "volume", "backends", "backend", "slas", "sla", "promises", "periods"),
    )
)
"""Operations that read what services or pmdaemon of the acting server know, and SQL does not.

Health, readiness, metrics, processes and deliveries are this server's own. A live stream is not among them:
it would take a thread of both servers for as long as it is open."""
SENT: Final = ("Sla-User", "Content-Type", "Accept")
"""Beside the bearer token; other credentials are for a proxy before this server."""
RETURNED: Final = ("Content-Type", "Location", "Retry-After", "Cache-Control", "WWW-Authenticate", "Allow")
PATH: Final = "/:@!$&'()*+,;=~"
QUERY: Final = PATH + "?%"
"""Characters that stay as they are; those of the query are quoted already."""
JSON: Final = ("application/json", "application/problem+json")
AT_ONCE: Final = 8
"""Of the 16 threads that are left for others than live streams."""
AT_ONCE_LOCAL: Final = 2
"""Of the 4 behind the Unix socket."""
PLACES: Final = {False: AT_ONCE, True: AT_ONCE_LOCAL}
CONNECT_S: Final = 2.0
BEYOND_WAIT_S: Final = 5.0
"""How much longer than the wait for ``services`` an answer may take."""
ANSWER_BYTES: Final = 32 << 20
"""Of memory, ``AT_ONCE`` times; a longer list is read in pages, or at the acting server."""


class NotForwarded(Exception):
    """The acting server has not been asked, or its answer cannot be passed back.

    Attributes:
        is_unsure: it may have done what was asked.
    """

    def __init__(self, problem: str, *, is_unsure: bool = False) -> None:
        self.is_unsure = is_unsure
        super().__init__(problem)


class RequestForwarder:
    """See the module.

    Args:
        acting: which server acts.
        guard: of this server.
        token: of this server's own file.
        wait_s: how long the acting server waits for its services, as far as this one's configuration says.
        transport: instead of the network.
    """

    def __init__(
        self,
        acting: ActingServer,
        guard: Guard,
        token: str,
        wait_s: float,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._acting = acting
        self._guard = guard
        self._token = token.encode()
        self._transport = transport
        self._limit_s = wait_s + BEYOND_WAIT_S
        self._places = {is_local: threading.BoundedSemaphore(most) for is_local, most in PLACES.items()}
        self._lock = threading.Lock()
        self._client: httpx.Client | None = None
        self._client_of: tuple[str, float | None] | None = None

    def forward(self, request: Request, route: ApiRoute) -> Response | None:
        """The acting server's answer; None: this server has to answer.

        Raises:
            StandsBy: a change that the acting server did not answer.
            LoginNeeded, Forbidden, OriginRefused, Unavailable: of ``Guard``, for what this server decides.
            Unavailable: what became of a change is asked, and the acting server does not say.
        """
        is_for_others = route.operation in LIVE if not route.changes else route.operation not in HERE
        if not is_for_others or request.method != route.method or MARK in request.headers:
            return None
        if (lease := self._acting.elsewhere()) is None or not self._may_be_forwarded(request, route):
            return None
        try:
            return self._ask(request, lease)
        except NotForwarded as exc:
            reason = self._acting.why_not_here()
            if route.operation == ASKED_BACK and reason:
                self._guard.admit(request, route)
                raise Unavailable(
                    f"{reason}, and what became of the change is not known here: {exc}"
                ) from exc
            if not route.changes or not (reason or exc.is_unsure):  # without a reason this server acts by now
                return None
            with contextlib.suppress(*((Unavailable,) if exc.is_unsure else ())):
                self._guard.admit(request, route)  # nobody else learns of names and addresses
            raise _refusal(reason or f"the server of node {lease.acting} acted", lease, exc) from exc

    def _may_be_forwarded(self, request: Request, route: ApiRoute) -> bool:
        if bearer_of(request) is not None:
            if route.changes:
                self._guard.check_origin(request, required=False)  # the acting server does not see it
            return True
        # Without a token a change is a browser's, or of nobody; whoever else reads must be let in here, too.
        is_page = route.changes or "Sec-Fetch-Site" in request.headers
        return not is_page and self._guard.admit(request, route) is None

    def _ask(self, request: Request, lease: LeaseState) -> Response:
        """Ask the acting server, and pass its answer back.

        Raises:
            NotForwarded: see there.
        """
        is_local = PEER_UID in request.environ
        places = self._places[is_local]
        if not places.acquire(blocking=False):
            raise NotForwarded(f"{PLACES[is_local]} requests wait for its answer already")
        try:
            response = self._exchange(request, lease)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.UnsupportedProtocol, httpx.InvalidURL) as exc:
            problem = str(exc) or type(exc).__name__
            raise NotForwarded(f"it cannot be reached at {lease.page} ({problem})") from exc
        except httpx.HTTPError as exc:
            raise NotForwarded(
                f"it has not answered ({str(exc) or type(exc).__name__})", is_unsure=True
            ) from exc
        finally:
            places.release()
        given = bearer_of(request)
        is_own = given is not None and hmac.compare_digest(given.encode(errors="replace"), self._token)
        if response.status_code == 401 and is_own:
            raise NotForwarded("it does not know the token of this server's file (DATA_DIR/api.token)")
        if response.status_code == 421:
            raise NotForwarded(f"the name of {lease.page} is missing in its api.allowed_hosts")
        if response.status_code >= 500 and request.method == "GET":
            raise NotForwarded(f"it answers {response.status_code}")
        return response

    def _exchange(self, request: Request, lease: LeaseState) -> Response:
        _check_address(lease.page)
        asked = quote(request.query_string, safe=QUERY)
        address = f"{lease.page}{_quoted(request.path)}{'?' if asked else ''}{asked}"
        given = {name: request.headers[name] for name in SENT if name in request.headers}
        if bearer_of(request) is not None:
            given["Authorization"] = request.headers["Authorization"]
        given |= {MARK: lease.node, "Accept-Encoding": "identity"}
        headers = {name.encode(): value.encode("latin-1") for name, value in given.items()}
        deadline, body, size_bytes = Deadline(self._limit_s), [], 0
        with self._connection(lease.page).stream(
            request.method, address, headers=headers, content=request.get_data()
        ) as answer:
            # What one part of it would become has no bound.
            if answer.headers.get("Content-Encoding", "identity") != "identity":
                raise NotForwarded("its answer is compressed, which was not asked for", is_unsure=True)
            for chunk in answer.iter_bytes():
                body.append(chunk)
                size_bytes += len(chunk)
                if size_bytes > ANSWER_BYTES:
                    raise NotForwarded(f"its answer has more than {ANSWER_BYTES >> 20} MiB", is_unsure=True)
                if deadline.passed:
                    raise NotForwarded(f"its answer takes more than {self._limit_s:g} s", is_unsure=True)
        kind = answer.headers.get("Content-Type", "").partition(";")[0]
        if answer.status_code != 204 and kind not in JSON:
            problem = f"{lease.page} answers {answer.status_code} without JSON, as no SLA server does"
            raise NotForwarded(problem, is_unsure=True)
        returned = {name: answer.headers[name] for name in RETURNED if name in answer.headers}
        return Response(b"".join(body), answer.status_code, headers=returned)

    def _connection(self, page: str) -> httpx.Client:
        """The client of this address; made again when that or the authority has changed.

        Raises:
            NotForwarded: the authority's certificate cannot be read.
        """
        authority = self._acting.authority
        made_s = authority.stat().st_mtime if authority is not None and authority.is_file() else None
        with self._lock:
            if self._client is None or self._client_of != (page, made_s):
                # The former one may be in use; it keeps no connection, so nothing has to be closed.
                self._client = self._make_client(page, None if made_s is None else authority)
                self._client_of = page, made_s
            return self._client

    def _make_client(self, page: str, authority: Path | None) -> httpx.Client:
        trusted: ssl.SSLContext | bool = False  # of plain http there is nothing to verify
        if page.startswith("https:"):
            trusted = ssl.create_default_context()
            try:
                if authority is not None:
                    trusted.load_verify_locations(authority)
            except (OSError, ssl.SSLError) as exc:
                raise NotForwarded(f"{authority} cannot be read ({exc})") from exc
        # A kept connection that the other side has just closed would leave open whether a change was made.
        limits = httpx.Limits(max_connections=AT_ONCE + AT_ONCE_LOCAL, max_keepalive_connections=0)
        timeout = httpx.Timeout(self._limit_s, connect=CONNECT_S)
        return httpx.Client(
            verify=trusted, trust_env=False, limits=limits, timeout=timeout, transport=self._transport
        )


def _check_address(page: str) -> None:
    """Check that a token may be sent there.

    Raises:
        NotForwarded: it may not; or the address is not known.
    """
    if not page:
        raise NotForwarded("its address is not known here: set page in its [cluster.takeover]")
    parts = urlsplit(page)
    if parts.scheme == "https":
        return
    try:
        address = ipaddress.ip_address(parts.hostname or "")
    except ValueError:
        address = None
    if address is None or not address.is_loopback:
        raise NotForwarded(f"{page} is not https: a token is not sent there in clear")
    # Any user of this machine may listen there while that server does not.
    if sockets.listener_uids(str(address), parts.port or 80) - {os.geteuid(), 0}:
        raise NotForwarded(f"at {page} a process of another user listens")


def _quoted(path: str) -> str:
    """Of parts "." and ".." also the points: httpx would resolve them, to the path of another operation."""
    parts = quote(path, safe=PATH).split("/")
    return "/".join(part.replace(".", "%2E") if part in (".", "..") else part for part in parts)


def _refusal(reason: str, lease: LeaseState, problem: NotForwarded) -> StandsBy:
    said = f"{reason}, and the change was not forwarded: {problem}"
    if problem.is_unsure:
        said = f"{reason}; the change was forwarded, and may have been made: {problem}"
        return StandsBy(said, lease.acting, lease.page, first="See whether it was made ('sla audit')")
    return StandsBy(said, lease.acting, lease.page)
