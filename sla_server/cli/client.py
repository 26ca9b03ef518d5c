"""Where the server is, who we are, and one call.

Server: ``--server``, ``SLA_SERVER``, the ``[api] listen`` of the configuration named by ``--config`` or
``SLA_CONFIG``, else http://127.0.0.1:8411. Token, needed for changes only: ``SLA_TOKEN``, ``--token-file``,
else ``api.token`` in the data directory of that configuration. The token is never sent in clear over a
network: plain http is for loopback addresses.
"""

from __future__ import annotations

import getpass
import ipaddress
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from pmdaemon.runtime.config import read_toml
from sla_server.cli.errors import NotAnAnswer, NoToken, Pending, Refused, ServerDown

DEFAULT_SERVER: Final = "http://127.0.0.1:8411"
TIMEOUT_S: Final = 15.0  # the server itself answers within 5 s
PENDING_LIMIT_S: Final = 20.0  # a services part that is being restarted is back within this
PENDING_LOOK_S: Final = 0.5
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
    _http: httpx.Client | None = None

    @classmethod
    def find(cls, server: str | None, token_file: Path | None, config: Path | None) -> Client:
        """See the module's docstring for where it looks.

        Raises:
            ConfigError: the configuration file is named but cannot be read.
        """
        if not server:
            listen = str(_api_table(read_toml(config)).get("listen", "")) if config else ""
            server = f"http://{listen}" if listen and not listen.endswith(":0") else DEFAULT_SERVER
        return cls(server.rstrip("/"), token_file, config)

    def get(self, path: str, **query: Any) -> Any:
        """JSON of ``GET /api/v1/path``; None for 204."""
        return self._call("GET", path, params=query)

    def change(self, method: str, path: str, **how: Any) -> Any:
        """A change, with the token; waits for a pending operation to end.

        Raises:
            NoToken: none was found, or the server does not know it.
            Refused: the server said no.
            Pending: it has still not answered.
        """
        own = {"Authorization": f"Bearer {self.token()}", "Sla-User": _user()}
        headers = {**(how.pop("headers", None) or {}), **own}
        return self._call(method, path, headers=headers, **how)

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
            raise NoToken(f"{path or 'SLA_TOKEN'} holds no token; the server's stands in DATA_DIR/api.token")
        return given

    def token_path(self) -> Path:
        """Where the token should stand."""
        if self.token_file:
            return self.token_file
        tree = read_toml(self.config)
        if named := _api_table(tree).get("token_file"):
            return Path(str(named))
        data_dir = os.environ.get("SLA__DATA_DIR") or tree.get("data_dir") or "sla-data"
        return Path(str(data_dir)).expanduser() / "api.token"

    def _call(self, method: str, path: str, **how: Any) -> Any:
        response = self._send(method, f"/api/v1{path}", **how)
        if response.status_code == 202:
            return self._await(str(response.headers["Location"]))
        return _answer(self.server, response)

    def _await(self, operation: str) -> Any:
        """Look at an operation until it ended."""
        end_s = time.monotonic() + PENDING_LIMIT_S
        while time.monotonic() < end_s:
            told = _answer(self.server, self._send("GET", operation))
            if told["state"] == "done":
                return told["body"]
            if told["state"] == "failed":
                raise Refused(int(told["code"]), told["body"])
            time.sleep(PENDING_LOOK_S)
        raise Pending(operation)

    def _send(self, method: str, path: str, **how: Any) -> httpx.Response:
        if self._http is None:
            self._http = httpx.Client(
                base_url=self.server, timeout=TIMEOUT_S, transport=self.transport, trust_env=False
            )
        try:
            return self._http.request(method, path, **how)
        except httpx.InvalidURL as exc:
            raise ServerDown(self.server, f"not an address: {exc}") from exc
        except httpx.HTTPError as exc:
            raise ServerDown(self.server, str(exc) or type(exc).__name__) from exc

    def close(self) -> None:
        """Close the connection."""
        if self._http is not None:
            self._http.close()


def _answer(server: str, response: httpx.Response) -> Any:
    if response.status_code == 204:
        return None
    kind = response.headers.get("Content-Type", "").partition(";")[0]
    is_json = kind in ("application/json", "application/problem+json")
    try:
        body = response.json() if is_json else {}
    except ValueError as exc:
        raise NotAnAnswer(server, response.status_code) from exc
    if response.status_code == 413 and "fix" not in body:  # said by the HTTP layer, in its own words
        raise Refused(413, {"detail": TOO_LARGE})
    if not is_json:
        raise NotAnAnswer(server, response.status_code)
    if response.status_code == 401:
        raise NoToken("the server does not know this token; it was replaced, or belongs to another server")
    if response.status_code >= 400:
        raise Refused(response.status_code, body)
    return body


def _is_private(server: str) -> bool:
    """Whether what is sent there stays on this machine, or is encrypted."""
    try:
        url = httpx.URL(server)
        return url.scheme == "https" or url.host == "localhost" or ipaddress.ip_address(url.host).is_loopback
    except (ValueError, httpx.InvalidURL):
        return False


def _api_table(tree: dict[str, Any]) -> dict[str, Any]:
    """``[api]`` of a configuration; what is wrong with it the server says."""
    table = tree.get("api")
    return table if isinstance(table, dict) else {}


def _user() -> str:
    try:
        return getpass.getuser().encode("ascii", "replace").decode()  # a header holds nothing else
    except (OSError, KeyError):
        return str(os.getuid())
