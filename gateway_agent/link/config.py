"""Configuration of the link process: a JSON file that the agent's parent writes from the operator's TOML."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError, field_validator

from pmdaemon.errors import ConfigError
from pmdaemon.runtime.config import StrictModel, describe
from pmdaemon.wire.names import is_name

MIB = 1 << 20


class HostConfig(StrictModel):
    """Statistics of the host's own block devices, beside the I/O path."""

    enabled: bool = False
    """Whether /proc/diskstats is read."""
    devices: tuple[str, ...] = (
        "sd?",
        "sd[a-z][a-z]",
        "vd?",
        "xvd?",
        "nvme*n?",
        "nvme*n??",
        "mmcblk?",
        "dm-*",
        "md*",
    )
    """Patterns of kernel device names; the default takes whole devices, not their partitions."""
    backends: dict[str, str] = Field(default_factory=dict)
    """Backend of a device; a device that is not named is a backend of its own, NAME:DEVICE."""

    @field_validator("backends")
    @classmethod
    def _are_names(cls, value: dict[str, str]) -> dict[str, str]:
        for device, backend in value.items():
            if not is_name(backend):
                raise ValueError(f"backend {backend!r} of {device} must be letters, digits and . _ : @ -")
        return value


class ReconnectConfig(StrictModel):
    """How the link tries again to reach the PMDaemon."""

    first_s: Annotated[float, Field(gt=0, le=60)] = 1.0
    """Wait after the first failure; doubles with each further one."""
    max_s: Annotated[float, Field(gt=0, le=600)] = 5.0
    """Longest wait."""
    jitter_ratio: Annotated[float, Field(ge=0, le=1)] = 0.9
    """Share of each wait that is random, so that a fleet does not return in one instant."""


class PlaneSocket(StrictModel):
    """One data plane: its name and the control socket it listens on."""

    name: str
    control_socket: str


class LinkConfig(StrictModel):
    """All the link process must know."""

    gateway_id: str
    name: str
    state_dir: Path
    runtime_dir: Path
    server: str
    tls: bool = False
    listen: str = ""
    spool_bytes: int
    planes: list[PlaneSocket]
    host: HostConfig = HostConfig()
    reconnect: ReconnectConfig = ReconnectConfig()


def parse_server(text: str) -> tuple[str, int]:
    """Host and port of ``10.0.0.5:7411``, ``[fd00::5]:7411`` or ``sla.example.org:7411``.

    Raises:
        ValueError: another form.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{text!r} is not HOST:PORT")
    host = host.strip("[]")
    return ("127.0.0.1" if host == "localhost" else host), int(port)


def is_own_host(host: str) -> bool:
    """Whether this is a loopback address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def resolve_server(text: str) -> tuple[str, int]:
    """The same with the name looked up: once, when the link starts, because looking up may block.

    Raises:
        ConfigError: nobody knows the name now; the link is started again with backoff.
    """
    host, port = parse_server(text)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as exc:
        raise ConfigError(
            "server", f"{host!r} cannot be looked up: {exc.strerror}", "Correct it, or DNS"
        ) from exc
    return str(found[0][4][0]), port


def load_link(path: Path) -> LinkConfig:
    """Read the JSON file written by the parent.

    Raises:
        ConfigError: unreadable or invalid.
    """
    try:
        return LinkConfig.model_validate_json(path.read_bytes())
    except OSError as exc:
        raise ConfigError(
            str(path), f"cannot be read: {exc.strerror}", "Start gateway-agent, which writes it"
        ) from exc
    except ValidationError as exc:
        raise ConfigError(str(path), describe(exc)) from exc
