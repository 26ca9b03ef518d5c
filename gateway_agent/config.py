"""Configuration of the gateway agent: one TOML file, from which the parent writes one JSON file a child.

    agent.toml ──AgentConfig──┬──► runtime_dir/link.config.json     (LinkConfig)
                              └──► runtime_dir/nbd-N.config.json    (PlaneConfig, one a [[plane]])

Everything is checked here, before a child is started: names, sockets, that each export has its plane.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from gateway_agent.link.config import (
    MIB,
    HostConfig,
    LinkConfig,
    PlaneSocket,
    ReconnectConfig,
    is_own_host,
    parse_server,
)
from gateway_agent.nbd.config import ExportConfig, PlaneConfig, StaticCap
from pmdaemon.runtime.config import StrictModel, describe, parse_address
from pmdaemon.wire.names import is_name

MAX_EXPORTS = 512  # the server takes no more of one gateway
MAX_EXPORT_BYTES = 60_000  # all of them are named in one frame header, which holds 65,535 bytes
EXPORT_OVERHEAD_BYTES = 70  # keys, size and flag of one export in msgpack
MAX_NAME_OF_HOST = 90  # leaves 32 of the 128 characters of a volume's name to the device, as the kernel does
UNIX_PATH_BYTES = 107  # sun_path of Linux, less its final NUL


class PlaneEntry(StrictModel):
    """``[[plane]]``: one data-plane process."""

    name: str
    """``nbd-0``, ``nbd-1``, ...; names its process, its files and its control socket."""
    listen: list[str]
    """Where NBD clients connect: ``tcp:127.0.0.1:10809`` or ``unix:PATH``; one or several."""

    @field_validator("listen", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value


class ExportEntry(StrictModel):
    """``[[export]]``: one volume."""

    volume: str
    """Site-global name; also the NBD export name. Through two gateways it is the same volume."""
    backend: str
    """What this volume shares with others: judging and throttling go by it."""
    plane: str = ""
    """Which ``[[plane]]`` serves it; may be left out when there is only one."""
    upstream: str | None = None
    """NBD server behind it: ``nbd+unix:///NAME?socket=PATH`` or ``nbd://HOST:PORT/NAME``."""
    file: str | None = None
    """Or a regular file or block device that the plane serves itself."""
    read_only: bool = False
    """Refuse every change."""
    cost_read: Annotated[float, Field(gt=0)] = 1.0
    """Cost of a read before its bytes are added (bytes / 65,536)."""
    cost_write: Annotated[float, Field(gt=0)] = 1.0
    """Cost of a write before its bytes are added."""
    workers: Annotated[int, Field(ge=0, le=64)] = 0
    """File mode: threads for files that can block."""
    cap: StaticCap | None = None
    """Static limits, in force with or without a server: ``{ops_per_s, bytes_per_s, cost_per_s}``."""

    @model_serializer(mode="wrap")
    def _without_unset(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = handler(self)
        if isinstance(values.get("cap"), dict):
            values["cap"] = {key: rate for key, rate in values["cap"].items() if rate is not None}
        return {key: value for key, value in values.items() if value is not None}


class AgentConfig(StrictModel):
    """The operator's file."""

    name: str
    """What people call this gateway; its identity is ``state_dir/gateway_id``, made at the first start."""
    state_dir: Path = Path("/var/lib/gateway-agent")
    """Identity, spool, thresholds: must survive restarts. Mode 0700. A relative path begins where the agent
    is started."""
    runtime_dir: Path = Path("/run/gateway-agent")
    """Control sockets and the children's files: may be empty after a boot. Mode 0700."""
    server: str = "127.0.0.1:7411"
    """Where the PMDaemon listens, HOST:PORT. Another host than this one needs `tls`."""
    tls: bool = False
    """Speak TLS with the certificate that `gateway-agent enrol` obtained; the server must do so, too."""
    listen: str = ""
    """Instead of dialling: where the PMDaemon dials this agent, IP:PORT (it must be listed there)."""
    spool_bytes: Annotated[int, Field(ge=4 * MIB)] = 64 * MIB
    """Room for cuts that the server has not acknowledged, reserved at the start; beyond it the oldest are
    dropped. A change holds from the next start; a smaller one once the cuts fit."""
    client_rule: Literal["address", "export-suffix"] = "address"
    """How a client is named: by its address, or by VOLUME@CLIENT in the export it asks for."""
    reconnect: ReconnectConfig = Field(default_factory=ReconnectConfig)
    """How the link tries again to reach the server."""
    plane: Annotated[list[PlaneEntry], Field(default_factory=list)]
    """Data-plane processes."""
    export: Annotated[list[ExportEntry], Field(default_factory=list)]
    """Volumes."""
    host: HostConfig = Field(default_factory=HostConfig)
    """Statistics of the host's own block devices."""

    @field_validator("name")
    @classmethod
    def _is_name(cls, value: str) -> str:
        if not is_name(value):
            raise ValueError(
                "must be 1-128 of letters, digits and . _ : @ -, beginning with a letter or digit"
            )
        return value

    @field_validator("server")
    @classmethod
    def _is_server(cls, value: str) -> str:
        parse_server(value)
        return value

    @field_validator("listen")
    @classmethod
    def _is_listen(cls, value: str) -> str:
        if value:
            parse_address(value)
        return value

    @field_validator("state_dir", "runtime_dir")
    @classmethod
    def _made_absolute(cls, value: Path) -> Path:
        return value.expanduser().absolute()  # as the server does; control sockets are named in full

    @model_validator(mode="after")
    def _is_consistent(self) -> AgentConfig:
        if not self.tls and self.listen and not is_own_host(parse_address(self.listen)[0]):
            raise ValueError(
                f"listen {self.listen!r} can be reached from other hosts, and without TLS anybody could pose "
                "as the server. Run gateway-agent enrol and set tls = true"
            )
        if not self.tls and not self.listen and not is_own_host(parse_server(self.server)[0]):
            raise ValueError(
                f"server {self.server!r} is not on this host, and without TLS statistics and caps could be "
                "read and forged on the way. Run gateway-agent enrol and set tls = true, or use "
                "127.0.0.1:PORT of an SLA server on this host"
            )
        if self.host.enabled and len(self.name) > MAX_NAME_OF_HOST:
            raise ValueError(
                f"name has {len(self.name)} characters; with [host] enabled {MAX_NAME_OF_HOST} at most, "
                "because volumes are called host:NAME:DEVICE"
            )
        names = [plane.name for plane in self.plane]
        if not names and not self.host.enabled:
            raise ValueError(
                "nothing to do: add a [[plane]] with an [[export]], or set enabled = true in [host]"
            )
        if len(set(names)) != len(names):
            raise ValueError("two [[plane]] tables have the same name")
        for name in names:
            self._check_plane_name(name)
        self._check_number_of_exports()
        volumes = [export.volume for export in self.export]
        if len(set(volumes)) != len(volumes):
            raise ValueError("a volume is exported twice; clients of one volume share one plane")
        for export in self.export:
            if self._plane_of(export) not in names:
                raise ValueError(
                    f"export {export.volume}: plane {export.plane!r} is no [[plane]]; name one of {names}"
                )
        try:
            self.plane_configs()
        except ValidationError as exc:
            raise ValueError(describe(exc)) from exc
        return self

    def _check_number_of_exports(self) -> None:
        if len(self.export) > MAX_EXPORTS:
            raise ValueError(
                f"{len(self.export)} [[export]] tables; a gateway has {MAX_EXPORTS} at most. "
                "Run a second agent for the others"
            )
        size = sum(EXPORT_OVERHEAD_BYTES + len(each.volume) + len(each.backend) for each in self.export)
        if size > MAX_EXPORT_BYTES:
            raise ValueError(
                f"the names of the exports take {size} bytes of the {MAX_EXPORT_BYTES} that one message "
                "to the server has for them; use shorter names, or a second agent"
            )

    def _check_plane_name(self, name: str) -> None:
        if not is_name(name):
            raise ValueError(f"plane name {name!r} must consist of letters, digits and . _ : @ -")
        path = self.control_socket(name)
        if len(path.encode()) > UNIX_PATH_BYTES:
            raise ValueError(
                f"control socket {path} is longer than {UNIX_PATH_BYTES} bytes; shorten runtime_dir"
            )

    def _plane_of(self, export: ExportEntry) -> str:
        return export.plane or (self.plane[0].name if len(self.plane) == 1 else "")

    def control_socket(self, plane: str) -> str:
        """Where a plane listens for the link."""
        return str(self.runtime_dir / f"{plane}.sock")

    def plane_configs(self) -> list[PlaneConfig]:
        """One configuration a data plane.

        Raises:
            ValidationError: an export or an address that the plane would refuse.
        """
        return [self._plane_config(plane) for plane in self.plane]

    def _plane_config(self, plane: PlaneEntry) -> PlaneConfig:
        own = [export for export in self.export if self._plane_of(export) == plane.name]
        return PlaneConfig(
            plane=plane.name,
            listen=plane.listen,
            control_socket=self.control_socket(plane.name),
            exports=[_export_config(export) for export in own],
            client_rule=self.client_rule,
            static_caps={export.volume: export.cap for export in own if export.cap is not None},
        )

    def link_config(self, gateway_id: str) -> LinkConfig:
        """The configuration of the link process."""
        return LinkConfig(
            gateway_id=gateway_id,
            name=self.name,
            state_dir=self.state_dir,
            runtime_dir=self.runtime_dir,
            server=self.server,
            tls=self.tls,
            listen=self.listen,
            spool_bytes=self.spool_bytes,
            planes=[
                PlaneSocket(name=plane.name, control_socket=self.control_socket(plane.name))
                for plane in self.plane
            ],
            host=self.host,
            reconnect=self.reconnect,
        )


def _export_config(export: ExportEntry) -> ExportConfig:
    try:
        return ExportConfig.model_validate(export.model_dump(exclude={"plane", "cap"}))
    except ValidationError as exc:
        told = describe(exc)
        whole = told.removeprefix("(whole file): ")  # names the volume itself
        raise ValueError(whole if whole != told else f"export {export.volume}: {told}") from exc
