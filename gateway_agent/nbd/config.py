"""Configuration of one data plane: a JSON file that the agent's parent writes, one ``PlaneConfig`` a file.

It holds what a plane must know before the link speaks to it: where to listen, what to export, which static
caps hold when no server is there. Everything that changes while it runs (caps, thresholds, leases) comes
over the control socket instead. The file is read once, at start.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import parse_qs, unquote, urlsplit

from pydantic import Field, ValidationError, field_validator, model_validator

from pmdaemon.errors import ConfigError
from pmdaemon.runtime.config import StrictModel, describe
from pmdaemon.wire.names import is_name
from pmdaemon.wire.rates import LEAST_RATE, MOST_RATE

NBD_PORT = 10809  # IANA

Rate = Annotated[float, Field(ge=LEAST_RATE, le=MOST_RATE, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen or connect: ``path`` for a Unix socket, else ``host`` and ``port``."""

    path: str = ""
    host: str = ""
    port: int = 0

    def __str__(self) -> str:
        """The form used in configuration and logs."""
        if self.path:
            return f"unix:{self.path}"
        return f"tcp:[{self.host}]:{self.port}" if ":" in self.host else f"tcp:{self.host}:{self.port}"


def parse_listen(text: str) -> Address:
    """``unix:PATH`` or ``tcp:HOST:PORT`` (port 0: any free one; IPv6 in brackets).

    Raises:
        ValueError: another form.
    """
    scheme, _, rest = text.partition(":")
    if scheme == "unix" and rest:
        return Address(path=rest)
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{text!r} is neither unix:PATH nor tcp:HOST:PORT")
    return Address(host=host.strip("[]"), port=int(port))


def parse_upstream(uri: str) -> tuple[Address, str]:
    """Address and export name of ``nbd+unix:///NAME?socket=PATH`` or ``nbd://HOST[:PORT]/NAME``.

    Raises:
        ValueError: another form, no socket, or a host name (looking it up would stall all I/O of the plane).
    """
    parts = urlsplit(uri)
    name = unquote(parts.path.removeprefix("/"))
    if parts.scheme == "nbd+unix":
        path = parse_qs(parts.query).get("socket", [""])[0]
        if not path or parts.netloc:
            raise ValueError(f"{uri!r} must look like nbd+unix:///NAME?socket=PATH")
        return Address(path=path), name
    if parts.scheme == "nbd" and parts.hostname:
        host = "127.0.0.1" if parts.hostname == "localhost" else parts.hostname
        try:
            ipaddress.ip_address(host)
        except ValueError as exc:
            raise ValueError(
                f"{uri!r}: give the host as an IP address; a look-up would stall all I/O"
            ) from exc
        return Address(host=host, port=parts.port or NBD_PORT), name
    raise ValueError(f"{uri!r} is neither nbd+unix:///NAME?socket=PATH nor nbd://HOST:PORT/NAME")


class ExportConfig(StrictModel):
    """One volume: exactly one of ``upstream`` and ``file`` is set."""

    volume: str
    """Site-global name; also the NBD export name."""
    backend: str
    """What this volume shares with others; judging and throttling go by it."""
    upstream: str | None = None
    """NBD server behind this volume, ``nbd+unix:///NAME?socket=PATH`` or ``nbd://HOST:PORT/NAME``."""
    file: str | None = None
    """Regular file or block device served by this plane itself."""
    read_only: bool = False
    """Refuse every change, also when the upstream would allow it."""
    cost_read: Rate = 1.0
    """Cost of a read before its bytes are added (bytes / 65,536)."""
    cost_write: Rate = 1.0
    """Cost of a write before its bytes are added."""
    workers: Annotated[int, Field(ge=0, le=64)] = 0
    """File mode: threads for files that can block; 0 serves from the loop (tmpfs, fast devices)."""

    @field_validator("volume", "backend")
    @classmethod
    def _names(cls, value: str) -> str:
        if not is_name(value):
            raise ValueError(
                "must be 1-128 of letters, digits and . _ : @ -, beginning with a letter or digit"
            )
        return value

    @field_validator("upstream")
    @classmethod
    def _upstream(cls, value: str | None) -> str | None:
        if value is not None:
            parse_upstream(value)
        return value

    @model_validator(mode="after")
    def _one_source(self) -> ExportConfig:
        if (self.upstream is None) == (self.file is None):
            raise ValueError(f"volume {self.volume}: set exactly one of upstream and file")
        if self.workers and self.file is None:
            raise ValueError(f"volume {self.volume}: workers belong to file mode; an upstream never blocks")
        return self


class StaticCap(StrictModel):
    """Caps of one volume that always hold, with or without a server; null is no cap."""

    ops_per_s: Rate | None = None
    bytes_per_s: Rate | None = None
    cost_per_s: Rate | None = None


class PlaneConfig(StrictModel):
    """One ``nbd-N`` process."""

    plane: str
    """Name of this plane, e.g. ``nbd-0``."""
    listen: Annotated[list[str], Field(min_length=1)]
    """``unix:PATH`` or ``tcp:127.0.0.1:PORT`` (port 0: any; DP_HELLO's ``listening`` says which)."""
    control_socket: str
    """Unix socket for the link, mode 0600."""
    exports: Annotated[list[ExportConfig], Field(min_length=1)]
    """Volumes of this plane."""
    client_rule: Literal["address", "export-suffix"] = "address"
    """How a client is named: by its address (``uid-N`` on Unix sockets), or by VOLUME@CLIENT."""
    static_caps: dict[str, StaticCap] = Field(default_factory=dict)
    """By volume; the smaller of static and server's cap holds, and these alone when the lease has expired."""
    burst_s: Annotated[float, Field(gt=0, le=1)] = 0.02
    """Depth of each rate's bucket in seconds of that rate."""
    max_hold_s: Annotated[float, Field(gt=0, le=60)] = 5.0
    """I/Os that caps hold for longer are reported (event ``throttle-bound-hit``); the rate always holds."""
    socket_mode: Annotated[int, Field(ge=0, le=0o777)] = 0o660
    """Permissions of Unix sockets for clients."""
    allow_remote_plaintext: bool = False
    """Let clients in from other hosts without TLS. Only for a network that you trust wholly."""

    @model_validator(mode="after")
    def _consistent(self) -> PlaneConfig:
        volumes = [export.volume for export in self.exports]
        if len(set(volumes)) != len(volumes):
            raise ValueError("a volume is exported twice")
        unknown = sorted(set(self.static_caps) - set(volumes))
        if unknown:
            raise ValueError(f"static_caps names volumes that are not exported: {', '.join(unknown)}")
        for text in self.listen:
            self._check_listen(parse_listen(text))
        return self

    def _check_listen(self, address: Address) -> None:
        if address.path or self.allow_remote_plaintext:
            return
        try:
            is_local = ipaddress.ip_address(address.host).is_loopback
        except ValueError:
            is_local = address.host == "localhost"
        if not is_local:
            raise ValueError(
                f"{address} would serve other hosts, and NBD is served without TLS here: anyone who reaches "
                "the port could read and write. Listen on 127.0.0.1 or a Unix socket, and run the agent on "
                "the host of its clients"
            )


def load_plane(path: Path, plane: str) -> PlaneConfig:
    """Read and validate the JSON file of one plane.

    Raises:
        ConfigError: unreadable, invalid, or written for another plane.
    """
    try:
        config = PlaneConfig.model_validate_json(path.read_bytes())
    except OSError as exc:
        raise ConfigError(
            str(path), f"cannot be read: {exc.strerror}", "Give --config an existing file"
        ) from exc
    except ValidationError as exc:
        raise ConfigError(str(path), describe(exc)) from exc
    if config.plane != plane:
        raise ConfigError(
            str(path), f"is for plane {config.plane}, not {plane}", "Give the file of that plane"
        )
    return config
