"""What can be set for the application server (table ``[api]``)."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Final, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from pmdaemon.runtime.config import StrictModel, parse_address

WORKER_THREADS: Final = 16  # for everything but live streams, which bring a thread each


class ApiTls(StrictModel):
    """TLS of page and API: table ``[api.tls]``."""

    certificate: Path | None = None
    """PEM: the certificate and its chain. From your own authority, or made by `sla ca page`. Read again when
    it has changed."""
    key: Path | None = None
    """PEM: its key, mode 0600, not encrypted. Default: in the same file."""

    @model_validator(mode="after")
    def _is_whole(self) -> ApiTls:
        if self.key is not None and self.certificate is None:
            raise ValueError("a key without a certificate: set certificate in [api.tls], too")
        return self


class ApiConfig(StrictModel):
    """The application server."""

    listen: str = "127.0.0.1:8411"
    """Address of page and API. Any but loopback needs `[api.tls]` and `reading = "login"`; 0.0.0.0 is
    everywhere. Port 0 takes any free port; the port in use is written to RUNTIME_DIR/api.port."""
    reading: Literal["open", "login"] = "open"
    """Who may read: everybody who reaches the address, or those who have signed in (or an API token)."""
    tls: ApiTls = Field(default_factory=ApiTls)
    external_url: str = ""
    """Where browsers reach a proxy of yours in front of the server, as https://sla.example.org. Its host name
    is allowed, cookies are sent over https alone, and X-Forwarded-For says who asks. Needs `reading =
    "login"`."""
    live_streams_max: int = Field(default=64, ge=1, le=1024)
    """Open live streams (browser pages) at most; each holds a thread of about 0.1 MB. Further pages poll."""
    allowed_hosts: list[str] = Field(default_factory=list)
    """Names allowed in a request's Host header beside 127.0.0.1, ::1 and localhost (for a tunnel of yours,
    or the names in the certificate). Any other is refused: it protects against DNS rebinding."""
    token_file: Path | None = None
    """Bearer token of the command line, mode 0600, made at first start. Default: DATA_DIR/api.token. Deleting
    it and restarting ends every session."""
    session_hours: float = Field(default=12.0, gt=0, le=24 * 30)
    """A session of a browser ends this long after signing in, whether or not it is used."""
    max_body_bytes: int = Field(default=262_144, ge=1024, le=16 << 20)
    """Largest request body; agreements are a few KB."""
    request_wait_s: float = Field(default=5.0, gt=0, le=60)
    """How long a change waits for the services' answer before it gets 202 and an operation's address."""
    stale_after_s: float = Field(default=5.0, gt=0)
    """Live data older than this are shown as stale; snapshots come once a second, with tens of thousands of
    agreements every three."""
    metrics_rows_max: int = Field(default=2000, ge=0, le=100_000)
    """How many objectives, volumes, throttles, backends and gateways, of each kind, have series of their own
    in /api/v1/metrics: the first by name. An objective has some 12 series. The metric `sla_metrics_left_out`
    says how many have none."""

    @field_validator("listen")
    @classmethod
    def _is_address(cls, value: str) -> str:
        parse_address(value)
        return value

    @field_validator("external_url")
    @classmethod
    def _is_url(cls, value: str) -> str:
        parts = urlsplit(value)
        if value and (parts.scheme != "https" or not parts.hostname or parts.path not in ("", "/")):
            raise ValueError(f"{value!r} is no address of a page; write https://HOST or https://HOST:PORT")
        return value.rstrip("/")

    @model_validator(mode="after")
    def _is_guarded(self) -> ApiConfig:
        host, port = parse_address(self.listen)
        if self.external_url and self.reading != "login":
            raise ValueError(
                "external_url: behind a proxy everybody who reaches it could read everything. Set "
                'reading = "login" in [api]'
            )
        if ipaddress.ip_address(host).is_loopback:
            return self
        missing = [] if self.tls.certificate else ["certificate in [api.tls] ('sla ca page' makes one)"]
        missing += [] if self.reading == "login" else ['reading = "login" in [api]']
        if missing:
            raise ValueError(
                f"listen: {host} can be reached from other machines. Set {' and '.join(missing)}; or use "
                f'"127.0.0.1:{port}" behind a proxy (external_url) or an ssh tunnel'
            )
        return self

    @property
    def is_https(self) -> bool:
        """Whether browsers come over https."""
        return bool(self.tls.certificate or self.external_url)

    def hosts(self) -> list[str]:
        """Names allowed in a Host header, beside those of loopback."""
        host = parse_address(self.listen)[0]
        own = [] if ipaddress.ip_address(host).is_unspecified else [host]
        proxy = urlsplit(self.external_url).hostname
        return [*own, *self.allowed_hosts, *([proxy] if proxy else [])]

    def token_path(self, data_dir: Path) -> Path:
        """The file of the bearer token."""
        return self.token_file or data_dir / "api.token"
