"""Finds the server and the token, and makes one call.

Server: ``--server`` or ``SLA_SERVER`` (``HOST:PORT`` is http; of several, separated by commas, the one that
acts, else the first that answers); else the Unix socket in the data directory of the configuration named by
``--config`` or ``SLA_CONFIG``, where a server listens on it; else the ``[api] listen`` of that configuration,
else http://127.0.0.1:8411. Token, needed for changes only: ``SLA_TOKEN``, ``--token-file``, else
``api.token`` in that data directory.

The token goes to the server alone, for reading only if the server wants one. An https server must show a
certificate from ``--ca-file`` (``SLA_CA_FILE``), or from an authority of the system. It is never sent in
clear over a network: plain http is for loopback addresses. There, and on the Unix socket, the kernel says
which user listens: it must be the caller, root or the owner of the token's file, because any user may take
the port while the server is down. The connection goes to exactly the address whose listener was checked: the
name localhost has two, and a different process can listen at each.
"""

from __future__ import annotations

from sla_server import lean_httpx  # noqa: F401 - before httpx: see there

# isort: split
import getpass
import ipaddress
import os
import socket
import ssl
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from pmdaemon.runtime import sockets
from pmdaemon.runtime.client_user import user_name
from pmdaemon.runtime.toml_file import read_toml
from sla_server.cli.errors import (
    ApprovalNeeded,
    BadUsage,
    NotAnAnswer,
    NoToken,
    Pending,
    RequestRefused,
    ServerDown,
    UntrustedServer,
)

DEFAULT_SERVER: Final = "http://127.0.0.1:8411"
SOCKET_NAME: Final = "api.sock"  # as in sla_server.api.server, which a command line has no need to import
LOCALHOST: Final = ("127.0.0.1", "::1")
TIMEOUT_S: Final = 15.0  # the server itself answers within 5 s
PENDING_LIMIT_S: Final = 20.0  # a services part that is being restarted is back within this
PENDING_INTERVAL_S: Final = 0.5
TOO_LARGE: Final = (
    "that is more than the server takes at once ([api] max_body_bytes). Apply the documents in several files"
)


@dataclass
class Client:
    """One server as a user names it. One thread."""

    server: str
    token_file: Path | None = None
    config: Path | None = None
    transport: httpx.BaseTransport | None = None
    ca_file: Path | None = None
    """The authority, or the very certificate, that an https server must have; None: those of the system."""
    local: Path | None = None
    """The server's Unix socket, if calls go there."""
    timeout_s: float = TIMEOUT_S
    others: tuple[str, ...] = ()
    """More servers that may be meant: of several over one database one acts."""
    awaits_pending: bool = True
    """Whether a change that was taken is waited for; otherwise it is asked about once."""
    _http: httpx.Client | None = None
    _wants_login: bool = False
    _address: tuple[str, int] | None = None
    _folder: int | None = None

    @classmethod
    def find(
        cls,
        server: str | None,
        token_file: Path | None,
        config: Path | None,
        ca_file: Path | None = None,
    ) -> Client:
        """Find the server as the module's docstring says.

        Raises:
            ConfigError: the configuration file is named but cannot be read.
        """
        tree = read_toml(config)
        if server:
            addresses = [each.strip().rstrip("/") for each in server.split(",") if each.strip()]
            full, *others = [each if "://" in each else f"http://{each}" for each in addresses] or [server]
            return cls(full, token_file, config, ca_file=ca_file, others=tuple(others))
        api = _api_table(tree)
        listen, tls = str(api.get("listen", "")), api.get("tls")
        server = DEFAULT_SERVER
        if isinstance(tls, dict) and tls.get("certificate"):
            hosts, (_, _, port) = api.get("allowed_hosts"), listen.rpartition(":")
            named = str(hosts[0]) if isinstance(hosts, list) and hosts else ""
            server = f"https://{named}:{port or 8411}" if named else f"https://{listen or '127.0.0.1:8411'}"
            own = data_dir_of(tree) / "ca" / "ca.crt"
            ca_file = ca_file or (own if own.is_file() else None)
        elif listen and not listen.endswith(":0"):
            server = f"http://{listen}"
        local = data_dir_of(tree) / SOCKET_NAME
        is_there = local_uid(local) is not None
        return cls(server, token_file, config, local=local if is_there else None, ca_file=ca_file)

    def choose(self) -> None:
        """Of several servers talk to the one that acts; if none says so, to the first that answers.

        Raises:
            ServerDown: none answers; names all.
        """
        servers, reasons, standing_by = (self.server, *self.others), [], ""
        self.others = ()
        for server in servers:
            self.close()
            self.server, self._address = server, None
            try:
                response = self._send("GET", "/api/v1/ready")
            except (ServerDown, UntrustedServer) as exc:
                reasons.append(str(exc).splitlines()[0])
                continue
            if response.status_code == 200:
                return
            standing_by = standing_by or server
        self.close()
        self.server, self._address = standing_by or servers[0], None
        if not standing_by:
            raise ServerDown(", ".join(servers), "; ".join(reasons))

    def get(self, path: str, **query: Any) -> Any:
        """JSON of ``GET /api/v1/path``; None for 204. With the token if reading needs a login."""
        if not self._wants_login:
            response = self._send("GET", f"/api/v1{path}", params=query)
            if response.status_code != 401:
                return _answer(self.server, response)
            self._wants_login = True
        return self.ask(path, **query)

    def ask(self, path: str, **query: Any) -> Any:
        """The same of what needs a login wherever it is read; with the token."""
        return self._call("GET", path, params=query, headers=self._identity())

    def text(self, path: str) -> str:
        """Text of ``GET /api/v1/path``, as metrics are."""
        response = self._send("GET", f"/api/v1{path}")
        if response.status_code == 401:
            response = self._send("GET", f"/api/v1{path}", headers=self._identity())
        if not response.is_success:
            _answer(self.server, response)  # raises
        return response.text

    def change(self, method: str, path: str, **how: Any) -> Any:
        """A change, with the token; waits for a pending operation to end.

        Raises:
            NoToken: none was found, the server does not know it, or another user's process would get it.
            Refused: the server said no.
            Pending: it has still not answered.
            ApprovalNeeded: it waits for a second person.
        """
        headers = {**(how.pop("headers", None) or {}), **self._identity()}
        return self._call(method, path, headers=headers, **how)

    def _identity(self) -> dict[str, str]:
        """What says who asks; sent to the right process alone."""
        if self.others:
            self.choose()  # whose process gets the token
        token = self.token()
        self._check_peer()
        return {"Authorization": f"Bearer {token}", "Sla-User": _user()}

    def token(self) -> str:
        """The bearer token.

        Raises:
            NoToken: says where it was looked for.
        """
        if not _is_private(self.server):
            raise NoToken(
                f"the token is not sent in clear to {self.server}. Use https, or a tunnel "
                "(ssh -L 8411:127.0.0.1:8411 HOST) and --server http://127.0.0.1:8411"
            )
        path: Path | None = None
        given = os.environ.get("SLA_TOKEN", "").strip()
        if not given:
            path = self.token_path()
            try:
                given = path.read_text(errors="replace").strip()
            except OSError as exc:
                raise NoToken(
                    f"changes need the server's token; {path} cannot be read ({exc.strerror}). Give "
                    "--token-file, or --config (SLA_CONFIG) with the server's configuration, or SLA_TOKEN"
                ) from exc
        if not (given.isascii() and given.isprintable() and given):
            raise NoToken(f"{path or 'SLA_TOKEN'} holds no token; the server's is in DATA_DIR/api.token")
        return given

    def token_path(self) -> Path:
        """Where the token should be."""
        if self.token_file:
            return self.token_file
        tree = read_toml(self.config)
        if named := _api_table(tree).get("token_file"):
            return Path(str(named))
        return data_dir_of(tree) / "api.token"

    def _check_peer(self) -> None:
        """Check that the process that would get the token may have it.

        Raises:
            NoToken: it belongs to another user.
            ServerDown: no process listens there.
        """
        if self.transport is not None:  # of a test: there is no process behind it
            return
        if self.local is not None:
            found = local_uid(self.local)
            uids = set() if found is None else {found}
        elif (address := self._loopback()) is not None:
            uids = sockets.listener_uids(*address)
        else:
            return  # https to another machine: its certificate is checked
        if not uids:
            raise ServerDown(str(self.local or self.server), "no process listens there")
        trusted = {os.geteuid(), 0}
        if not os.environ.get("SLA_TOKEN", "").strip():
            trusted.add(self.token_path().stat().st_uid)
        if strange := uids - trusted:
            name = user_name(min(strange))
            raise NoToken(
                f"{self.local or self.server} is served by user {name}, which is neither you nor the owner "
                "of the token: the token was not sent.\n  If that user runs your SLA server, run this as "
                f"that user (sudo -u {name} sla ...); if not, find out who took the address"
            )

    def _call(self, method: str, path: str, **how: Any) -> Any:
        response = self._send(method, f"/api/v1{path}", **how)
        if response.status_code == 202:
            said = response.json()
            if "approval" in said:
                raise ApprovalNeeded(str(said["detail"]), str(said["approval"]))
            return self._await(str(response.headers["Location"]), how.get("headers") or {})
        return _answer(self.server, response)

    def _await(self, operation: str, headers: dict[str, str]) -> Any:
        """Poll an operation until it has ended."""
        end_s = time.monotonic() + (PENDING_LIMIT_S if self.awaits_pending else 0.0)
        while True:
            state = _answer(self.server, self._send("GET", operation, headers=headers))
            if state["state"] == "done":
                row = (state["body"] or {}).get("approval") or {}
                if row.get("state") == "pending":
                    raise ApprovalNeeded(
                        f"{row['text']} waits until a second person approves it", row["approval_id"]
                    )
                return state["body"]
            if state["state"] == "failed":
                raise RequestRefused(int(state["code"]), state["body"])
            if time.monotonic() >= end_s:
                raise Pending(operation)
            time.sleep(PENDING_INTERVAL_S)

    def _send(self, method: str, path: str, **how: Any) -> httpx.Response:
        if self.others:
            self.choose()
        if self._http is None:
            self._http = self._connection()
        try:
            return self._http.request(method, path, **how)
        except httpx.InvalidURL as exc:
            raise ServerDown(self.server, f"not an address: {exc}") from exc
        except httpx.UnsupportedProtocol as exc:
            raise BadUsage(
                f"{self.server} is not the address of an SLA server; write http://HOST:PORT or https://HOST:PORT"
            ) from exc
        except httpx.HTTPError as exc:
            if "CERTIFICATE_VERIFY_FAILED" in str(exc):
                raise UntrustedServer(self.server, str(exc)) from exc
            raise ServerDown(str(self.local or self.server), str(exc) or type(exc).__name__) from exc

    def _connection(self) -> httpx.Client:
        server, transport = self.server, self.transport
        if self.local is not None:
            # Through the directory's descriptor, kept open: a socket's address has 107 bytes.
            self._folder = os.open(self.local.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            server, transport = (
                "http://localhost",
                httpx.HTTPTransport(uds=f"/proc/self/fd/{self._folder}/{self.local.name}"),
            )
        headers = {}
        if transport is None and (address := self._loopback()) is not None:
            url = httpx.URL(server)
            headers["Host"] = url.netloc.decode()
            server = str(url.copy_with(host=address[0]))
        return httpx.Client(
            base_url=server,
            headers=headers,
            timeout=self.timeout_s,
            transport=transport,
            trust_env=False,
            verify=self._trust(),
        )

    def _trust(self) -> ssl.SSLContext | bool:
        """Which certificates are accepted; host names are always compared.

        Raises:
            BadUsage: the file that was named cannot be used.
        """
        if self.ca_file is None or not self.server.startswith("https:"):
            return True
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
        except (OSError, ssl.SSLError) as exc:
            raise BadUsage(f"--ca-file {self.ca_file}: no certificate in PEM can be read ({exc})") from exc
        context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN  # the server's own may be named
        return context

    def _loopback(self) -> tuple[str, int] | None:
        """Address and port of a plain http server of this machine, found once; None for any other server."""
        if self._address is None:
            self._address = _loopback(self.server)
        return self._address

    def close(self) -> None:
        """Close the connection."""
        if self._http is not None:
            self._http.close()
            self._http = None
        if self._folder is not None:
            os.close(self._folder)
            self._folder = None


def _answer(server: str, response: httpx.Response) -> Any:
    if response.status_code == 204:
        return None
    kind = response.headers.get("Content-Type", "").partition(";")[0]
    is_json = kind in ("application/json", "application/problem+json")
    try:
        body = response.json() if is_json else {}
    except ValueError as exc:
        raise NotAnAnswer(server, response.status_code) from exc
    if response.status_code == 413 and "fix" not in body:  # refused by the HTTP layer, in other words
        raise RequestRefused(413, {"detail": TOO_LARGE})
    if not is_json:
        raise NotAnAnswer(server, response.status_code)
    if response.status_code == 401:
        raise NoToken(
            "the server does not know this token; it was replaced or revoked, has expired, or belongs to "
            "another server"
        )
    if response.status_code >= 400:
        raise RequestRefused(response.status_code, body)
    return body


def _is_private(server: str) -> bool:
    """Whether what is sent there stays on this machine, or is encrypted."""
    try:
        url = httpx.URL(server)
        return url.scheme == "https" or url.host == "localhost" or ipaddress.ip_address(url.host).is_loopback
    except (ValueError, httpx.InvalidURL):
        return False


def _loopback(server: str) -> tuple[str, int] | None:
    """Address and port of a plain http server of this machine; None for any other.

    ``localhost`` is the first of its addresses at which a process listens.
    """
    try:
        url = httpx.URL(server)
        port = url.port or 80
        if url.scheme != "http":
            return None
        if url.host == "localhost":
            listening = (host for host in LOCALHOST if sockets.listener_uids(host, port))
            return next(listening, LOCALHOST[0]), port
        return (url.host, port) if ipaddress.ip_address(url.host).is_loopback else None
    except (ValueError, httpx.InvalidURL):
        return None  # a name of another machine, or no address: httpx says so


def local_uid(path: Path) -> int | None:
    """The user whose process listens on this Unix socket; None: no process does, or it may not be entered."""
    try:
        folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(TIMEOUT_S)
            connection.connect(f"/proc/self/fd/{folder}/{path.name}")
            return sockets.unix_peer_uid(connection)
    except OSError:
        return None
    finally:
        os.close(folder)


def data_dir_of(tree: dict[str, Any]) -> Path:
    """The data directory of a configuration; the environment first, as for the server."""
    named = os.environ.get("SLA__DATA_DIR") or tree.get("data_dir") or "sla-data"
    return Path(str(named)).expanduser()


def _api_table(tree: dict[str, Any]) -> dict[str, Any]:
    """``[api]`` of a configuration; the server reports what is wrong with it."""
    table = tree.get("api")
    return table if isinstance(table, dict) else {}


def _user() -> str:
    try:
        return getpass.getuser().encode("ascii", "replace").decode()  # a header holds nothing else
    except (OSError, KeyError):
        return str(os.getuid())
