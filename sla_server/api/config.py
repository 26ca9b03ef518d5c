"""What can be set for the application server (table ``[api]``)."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path
from typing import Final, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from pmdaemon.runtime.config import ListenAddress, StrictModel, parse_address
from sla_server.agreements.selectors import parse_labels

OIDC_CALLBACK: Final = "/login/oidc/callback"
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


class OidcMapping(StrictModel):
    """Whom the provider's claims let in, and as what: a table `[[api.oidc.map]]` each."""

    claim: str = Field(default="groups", min_length=1, max_length=200)
    """Of the ID token or of the provider's userinfo: a text or a list of texts. `realm_access.roles` is one
    within another."""
    value: str = Field(min_length=1, max_length=200)
    """What the claim is, or has among others."""
    role: Literal["viewer", "operator", "admin"]
    """Of the account."""
    labels: str = Field(default="", max_length=1000)
    """Selector: it sees agreements with these labels alone; for viewers."""

    @model_validator(mode="after")
    def _is_possible(self) -> OidcMapping:
        if self.labels:
            parse_labels(self.labels)
            if self.role != "viewer":
                raise ValueError(f"labels: an account with labels is a viewer, not {self.role}")
        return self


class OidcConfig(StrictModel):
    """Sign-in through a provider of OpenID Connect: table `[api.oidc]`."""

    issuer: str = ""
    """The provider, as https://id.example.org/realms/storage; exactly as it names itself. Empty: none."""
    client_id: str = Field(default="", max_length=500)
    """The name that this server is registered under at the provider."""
    client_secret_file: Path | None = None
    """File with the client's secret, mode 0600; read at each sign-in. None: a public client, PKCE alone."""
    client_auth: Literal["client_secret_basic", "client_secret_post"] = "client_secret_basic"
    """How the secret is sent to the provider."""
    redirect_url: str = ""
    """Where the provider sends browsers back, https://HOST[:PORT]/login/oidc/callback, as registered there.
    Default: that path at `external_url`, or at the address of the page."""
    title: str = Field(default="OpenID Connect", min_length=1, max_length=60)
    """What the page calls the provider: "Sign in with ..."."""
    scopes: list[str] = Field(default=["openid", "profile", "email"])
    """What is asked for; `openid` is needed."""
    name_claim: str = Field(default="preferred_username", min_length=1, max_length=200)
    """The claim that the account's name comes from."""
    token_days: float = Field(default=30.0, gt=0, le=3650)
    """An API token ends so long after the person who made it has signed in last through the provider, which
    is asked at no other time. At most `database.retention.events_days` counts: sessions are kept so long."""
    ca_file: Path | None = None
    """PEM: the authority of the provider's certificate. Default: those of the system."""
    map: list[OidcMapping] = Field(default_factory=list)
    """Who may come in; the first table that fits decides, and who fits none is refused."""

    @field_validator("issuer")
    @classmethod
    def _is_provider(cls, value: str) -> str:
        parts = urlsplit(value)
        if value and (parts.scheme != "https" or not parts.hostname or parts.query or parts.fragment):
            raise ValueError(
                f"{value!r} is no address of a provider; write https://HOST or https://HOST/PATH"
            )
        return value

    @field_validator("redirect_url")
    @classmethod
    def _is_callback(cls, value: str) -> str:
        parts = urlsplit(value)
        if value and (parts.scheme != "https" or not parts.hostname or parts.path != OIDC_CALLBACK):
            raise ValueError(f"{value!r} leads nowhere; write https://HOST[:PORT]{OIDC_CALLBACK}")
        return value

    @model_validator(mode="after")
    def _is_whole(self) -> OidcConfig:
        if not self.issuer:
            return self
        if not self.client_id:
            raise ValueError("client_id: the provider needs to know who asks; set it in [api.oidc]")
        if "openid" not in self.scopes:
            raise ValueError('scopes: without "openid" the provider does not say who it is; add it')
        if not self.map:
            raise ValueError("map: no account could come in; add [[api.oidc.map]] tables with value and role")
        return self


class ApiConfig(StrictModel):
    """The application server."""

    listen: ListenAddress = "127.0.0.1:8411"
    """Address of page and API. Any but loopback needs `[api.tls]` and `reading = "login"`; 0.0.0.0 is
    everywhere. Port 0 takes any free port; the port in use is written to RUNTIME_DIR/api.port."""
    reading: Literal["open", "login"] = "open"
    """Who may read: everybody who reaches the address, or those who have signed in (or an API token)."""
    tls: ApiTls = Field(default_factory=ApiTls)
    oidc: OidcConfig = Field(default_factory=OidcConfig)
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
    approval: list[Literal["mode", "policies"]] = Field(default_factory=list)
    """Changes that wait until a second person approves them: "mode" (to enforce, and a backend's back to that
    of the server; observe never waits; an agreement with `control: enforce` is refused), "policies" (pin,
    unpin, roll back)."""
    approval_hours: float = Field(default=24.0, gt=0, le=24 * 30)
    """A change that nobody approved within this time waits no more."""
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
        is_anywhere = ipaddress.ip_address(host).is_unspecified
        if self.oidc.issuer and is_anywhere and not (self.external_url or self.oidc.redirect_url):
            raise ValueError(
                f"oidc: browsers cannot be sent back to {host}; set redirect_url in [api.oidc] to "
                f"https://HOST:{port}{OIDC_CALLBACK}"
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

    @property
    def page_url(self) -> str:
        """Address of the page for people: that of the proxy, or where it listens."""
        host, port = parse_address(self.listen)
        name = socket.getfqdn() if ipaddress.ip_address(host).is_unspecified else host
        shown = f"[{name}]" if ":" in name else name
        return self.external_url or f"{'https' if self.tls.certificate else 'http'}://{shown}:{port}"

    def hosts(self) -> list[str]:
        """Names allowed in a Host header, beside those of loopback."""
        host = parse_address(self.listen)[0]
        own = [] if ipaddress.ip_address(host).is_unspecified else [host]
        named = [urlsplit(url).hostname for url in (self.external_url, self.oidc.redirect_url)]
        return [*own, *self.allowed_hosts, *(name for name in named if name)]

    def token_path(self, data_dir: Path) -> Path:
        """The file of the bearer token."""
        return self.token_file or data_dir / "api.token"
