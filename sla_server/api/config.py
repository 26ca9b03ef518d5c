"""What can be set for the application server (table ``[api]``)."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Final

from pydantic import Field, field_validator

from pmdaemon.runtime.config import StrictModel, parse_address

WORKER_THREADS: Final = 16  # for everything but live streams, which bring a thread each


def loopback_address(text: str) -> tuple[str, int]:
    """Address and port of ``HOST:PORT`` (IPv6 in brackets).

    Raises:
        ValueError: not of that form, or not an address of the loopback interface.
    """
    host, port = parse_address(text)
    if not ipaddress.ip_address(host).is_loopback:
        raise ValueError(
            f"{host} is not a loopback address, and this release has neither TLS nor accounts for the page. "
            "Use 127.0.0.1 and reach it from elsewhere through 'ssh -L 8411:127.0.0.1:8411 HOST'"
        )
    return host, port


class ApiConfig(StrictModel):
    """The application server."""

    listen: str = "127.0.0.1:8411"
    """Address of page and API. Loopback only in this release; port 0 takes any free port. The port in use is
    written to RUNTIME_DIR/api.port."""
    live_streams_max: int = Field(default=64, ge=1, le=1024)
    """Open live streams (browser pages) at most; each holds a thread of about 0.1 MB. Further pages poll."""
    allowed_hosts: list[str] = Field(default_factory=list)
    """Names allowed in a request's Host header beside 127.0.0.1, ::1 and localhost (for a tunnel or proxy of
    yours). Any other is refused: it protects against DNS rebinding."""
    token_file: Path | None = None
    """Bearer token of the command line, mode 0600, made at first start. Default: DATA_DIR/api.token. Deleting
    it and restarting ends every session."""
    session_hours: float = Field(default=12.0, gt=0, le=24 * 30)
    """How long a browser stays signed in."""
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
    def _loopback_only(cls, value: str) -> str:
        loopback_address(value)
        return value

    def token_path(self, data_dir: Path) -> Path:
        """The file of the bearer token."""
        return self.token_file or data_dir / "api.token"
