"""Configuration of the gateway agent: one TOML file, which the agent, its link and its planes read.

    agent.toml ──load_agent──► AgentConfig ──plane_config──► PlaneConfig, the part of one data plane

The parent checks all of it before it starts a child: names, sockets, addresses, that each export has its
plane. It then gives its children a copy of the file (``reload.RUNNING``), so that a child that is started
again runs with what the others run with, whatever has become of the file since.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from gateway_agent.cap_config import ExportCap, GroupEntry, check_volume_groups
from gateway_agent.host_config import (
    UNIX_PATH_BYTES,
    CgroupEntry,
    HostConfig,
    Labels,
    Name,
    QemuEntry,
    Rate,
    check_qemu,
)
from gateway_agent.nbd.access import UNIX, ClientRule
from gateway_agent.nbd.listeners import ListenerSecurity
from gateway_agent.nbd.sockets import (
    Address,
    check_host,
    collide,
    is_own_host,
    parse_listen,
    parse_network,
    parse_upstream,
    uses_tls,
)
from gateway_agent.nbd.upstream_tls import upstream_context
from pmdaemon.errors import ConfigError
from pmdaemon.runtime import config as configuration
from pmdaemon.runtime.config import StrictModel, describe, parse_address, split_address
from pmdaemon.space.config import SpaceConfig
from pmdaemon.wire.labels import size_bytes as label_bytes
from pmdaemon.wire.names import is_name
from pmdaemon.wire.rates import COST_BYTES

MIB = 1 << 20
MAX_SERVERS = 16
SERVER_USER = "sla"  # of the server's package
MAX_EXPORTS = 512  # the server takes no more of one gateway
MAX_EXPORT_BYTES = 60_000  # all of them are named in one frame header, which holds 65,535 bytes
EXPORT_OVERHEAD_BYTES = 70  # keys, size and flag of one export in msgpack
MAX_NAME_OF_HOST = 90  # leaves 32 of the 128 characters of a volume's name to the device, as the kernel does


class PlaneEntry(ListenerSecurity):
    """``[[plane]]``: one data-plane process."""

    name: str
    """``nbd-0``, ``nbd-1``, ...; names its process, its files and its control socket."""
    listen: Annotated[list[str], Field(min_length=1)]
    """Where NBD clients connect: ``tcp:127.0.0.1:10809`` or ``unix:PATH``; one or several."""

    @field_validator("listen", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("listen")
    @classmethod
    def _are_addresses(cls, value: list[str]) -> list[str]:
        for text in value:
            parse_listen(text)
        return value

    @model_validator(mode="after")
    def _is_safe(self) -> PlaneEntry:
        if self.socket_group and not any(parse_listen(text).path for text in self.listen):
            raise ValueError(
                "socket_group is about Unix sockets, and listen has none; add unix:PATH, or remove it"
            )
        for text in self.listen:
            address = parse_listen(text)
            if self.tls == "off" and not self.plain_networks and may_be_far(address):
                raise ValueError(
                    f"{address} would serve other hosts without TLS: anyone who reaches the port could read "
                    'and write. Set tls = "require" with tls_certificate and client_ca; or, if the network '
                    'is trusted, plain_networks = ["10.0.0.0/8"] with the networks of its clients; or listen '
                    "on 127.0.0.1 or a Unix socket"
                )
        return self


def may_be_far(address: Address) -> bool:
    """Whether an address may be reached from, or be on, another host."""
    return not address.path and address.host != "localhost" and not is_own_host(address.host)


class ExportConfig(StrictModel):
    """``[[export]]``: one volume."""

    volume: Name
    """Site-global name; also the NBD export name. Through two gateways it is the same volume."""
    backend: Name
    """What this volume shares with others: judging and throttling go by it."""
    labels: Labels
    """By which agreements choose it: ``{tier = "gold"}``. Documents of the server override them."""
    plane: str = ""
    """Which ``[[plane]]`` serves it; may be left out when there is only one."""
    upstream: str | None = None
    """NBD server behind it: ``nbd+unix:///NAME?socket=PATH``, ``nbd://HOST:PORT/NAME``, or by TLS
    ``nbds://HOST:PORT/NAME``."""
    upstream_ca: str = ""
    """PEM file with the authority of the certificate of an ``nbds://`` upstream."""
    upstream_name: str = ""
    """The name or address that this certificate must have; empty: the address in ``upstream``."""
    upstream_certificate: str = ""
    """PEM file with our own certificate, if the upstream asks for one."""
    upstream_key: str = ""
    """PEM file with its key, not encrypted; empty if ``upstream_certificate`` has it, too."""
    file: str | None = None
    """Or a regular file or block device that the plane serves itself."""
    read_only: bool = False
    """Refuse every change."""
    cost_read: Rate = 1.0
    """Cost of a read before its bytes are added (bytes / `cost_bytes`)."""
    cost_write: Rate = 1.0
    """Cost of a write, trim, zeroing or flush before its bytes are added."""
    cost_bytes: Annotated[float, Field(ge=512, le=1e9)] = float(COST_BYTES)
    """Bytes that cost as much as 1: how the backend's time grows with the size of its I/Os. The same in all
    exports of a backend; `sla policy run` estimates it from what is stored."""
    cost: Literal["constants", "fitted"] = "constants"
    """`fitted`: what `sla policy run` found for the backend holds in place of `cost_read`, `cost_write` and
    `cost_bytes`, as soon as the server sends it and limits no cost of the volume. The same in all exports of
    a backend."""
    cost_trim: Annotated[float, Field(ge=0, le=1)] = 1 / 16
    """Share of the length of a trim that is charged like data: what it costs the storage against a write."""
    cost_zeroes: Annotated[float, Field(ge=0, le=1)] = 1.0
    """The same of write-zeroes. 1: a storage that cannot make zeroes otherwise writes them."""
    workers: Annotated[int, Field(ge=0, le=64)] = 0
    """File mode: threads for files that can block."""
    reconnect_s: Annotated[float, Field(ge=0, le=300)] = 0
    """Upstream mode: for so long clients are kept when the upstream has gone and a restart of it cannot have
    lost anything; then, or else, they get EIO."""
    upstream_connections: Annotated[int, Field(ge=1, le=16)] = 1
    """Upstream mode: so many connections to the upstream for each of a client, where the upstream has the
    flag CAN_MULTI_CONN; else one."""
    cap: ExportCap | None = None
    """Static limits, in force with or without a server: ``{ops_per_s, bytes_per_s, cost_per_s, burst_s}``."""
    allow_names: tuple[str, ...] = ()
    """Names in the certificates of the clients that may see it, `*` for any letters; empty: any client. Needs
    `tls` and `client_certificates` in its plane."""
    allow_networks: tuple[str, ...] = ()
    """Networks or addresses of the clients that may see it, `unix` for Unix sockets; empty: any client."""
    plain_networks: tuple[str, ...] = ()
    """Networks in which `upstream` may be on another host: NBD to it is not encrypted."""

    @field_validator("upstream")
    @classmethod
    def _is_upstream(cls, value: str | None) -> str | None:
        if value is not None:
            parse_upstream(value)
        return value

    @field_validator("allow_networks", "plain_networks")
    @classmethod
    def _are_networks(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        for text in value:
            if text != UNIX or info.field_name != "allow_networks":
                parse_network(text)
        return value

    @field_validator("allow_names")
    @classmethod
    def _are_not_empty(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if "" in value:
            raise ValueError("an empty name fits no certificate; remove it")
        return value

    @model_validator(mode="after")
    def _has_one_storage(self) -> ExportConfig:
        if (self.upstream is None) == (self.file is None):
            raise ValueError(f"volume {self.volume}: set exactly one of upstream and file")
        if self.workers and self.file is None:
            raise ValueError(f"volume {self.volume}: workers belong to file mode; an upstream never blocks")
        if self.reconnect_s and self.upstream is None:
            raise ValueError(
                f"volume {self.volume}: reconnect_s belongs to upstream mode; a file does not go away"
            )
        if self.upstream_connections > 1 and self.upstream is None:
            raise ValueError(f"volume {self.volume}: upstream_connections belongs to upstream mode")
        is_tls = self.upstream is not None and uses_tls(self.upstream)
        if self.upstream is not None and not is_tls:
            self._check_upstream(parse_upstream(self.upstream)[0])
        if is_tls and not self.upstream_ca:
            raise ValueError(
                f"volume {self.volume}: nbds:// needs upstream_ca, a PEM file with its authority"
            )
        keys = ("upstream_ca", "upstream_name", "upstream_certificate", "upstream_key")
        idle = [key for key in keys if getattr(self, key) and not is_tls]
        if idle:
            raise ValueError(f'volume {self.volume}: {idle[0]} belongs to TLS; write upstream = "nbds://..."')
        return self

    def _check_upstream(self, address: Address) -> None:
        networks = [parse_network(text) for text in self.plain_networks]
        if may_be_far(address) and not any(ip_address(address.host) in network for network in networks):
            raise ValueError(
                f"volume {self.volume}: upstream {address} is on another host, and NBD to it is not "
                "encrypted: anyone on the way could read and change what is stored. Use nbds:// with "
                f'upstream_ca; or, if that network is trusted, set plain_networks = ["{address.host}"], or '
                "the network, in this [[export]]"
            )

    @model_serializer(mode="wrap")
    def _without_unset(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = handler(self)
        if isinstance(values.get("cap"), dict):
            values["cap"] = {key: rate for key, rate in values["cap"].items() if rate is not None}
        return {key: value for key, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class PlaneConfig:
    """What one ``nbd-N`` process must know before the link speaks to it.

    Everything that changes while it runs (caps, thresholds, leases) comes over the control socket.
    """

    plane: str
    listen: list[str]
    control_socket: str
    exports: list[ExportConfig]
    client_rule: ClientRule = "address"
    security: ListenerSecurity = field(default_factory=ListenerSecurity)
    drain_s: float = 30.0
    groups: tuple[GroupEntry, ...] = ()


class ReconnectConfig(StrictModel):
    """How the link tries again to reach the PMDaemon."""

    first_s: Annotated[float, Field(gt=0, le=60)] = 1.0
    """Wait after the first failure; doubles with each further one."""
    max_s: Annotated[float, Field(gt=0, le=600)] = 5.0
    """Longest wait."""
    jitter_ratio: Annotated[float, Field(ge=0, le=1)] = 0.9
    """Share of each wait that is random, so that a fleet does not return in one instant."""


class AgentConfig(StrictModel):
    """The operator's file."""

    name: Name
    """What people call this gateway; its identity is ``state_dir/gateway_id``, made at the first start."""
    state_dir: Path = Path("/var/lib/gateway-agent")
    """Identity, spool, thresholds: must survive restarts. Mode 0700. A relative path begins where the agent
    is started."""
    runtime_dir: Path = Path("/run/gateway-agent")
    """Control sockets and the children's files: may be empty after a boot. Mode 0700."""
    server: str | Annotated[list[str], Field(min_length=1, max_length=MAX_SERVERS)] = "127.0.0.1:7411"
    """Where the PMDaemon listens, HOST:PORT. Another host than this one needs `tls`. Several, as
    `["sla-1:7411", "sla-2:7411"]`, where servers take over from each other: the next one is dialled when one
    does not answer."""
    tls: bool = False
    """Speak TLS with the certificate that `gateway-agent enrol` obtained; the server must do so, too."""
    server_users: list[str] = Field(default=[SERVER_USER])
    """Without `tls`: users of this host whose process may be the server, beside the agent's own and root; "*"
    is every user. The kernel says whose a connection is. Names that this host lacks count for nothing."""
    listen: str = ""
    """Instead of dialling: where the PMDaemon dials this agent, IP:PORT (it must be listed there)."""
    spool_bytes: Annotated[int, Field(ge=4 * MIB)] = 64 * MIB
    """Room for cuts that the server has not acknowledged, reserved at the start; beyond it the oldest are
    dropped. A change holds from the next start; a smaller one once the cuts fit."""
    client_rule: ClientRule = "address"
    """How a client is named: by its address, by VOLUME@CLIENT in the export it asks for (`export-suffix`), or
    by its certificate (`tls-name`; without one by its address)."""
    drain_s: Annotated[float, Field(ge=0, le=86_400)] = 30.0
    """At an upgrade: how long clients may keep their connection to the former process of a plane, before they
    are disconnected so that they connect to the next one."""
    reconnect: ReconnectConfig = Field(default_factory=ReconnectConfig)
    """How the link tries again to reach the server."""
    plane: Annotated[list[PlaneEntry], Field(default_factory=list)]
    """Data-plane processes."""
    export: Annotated[list[ExportConfig], Field(default_factory=list)]
    """Volumes."""
    group: Annotated[list[GroupEntry], Field(default_factory=list)]
    """Volumes of one plane under one cap."""
    host: HostConfig = Field(default_factory=HostConfig)
    """Statistics of the host's own block devices."""
    cgroup: Annotated[list[CgroupEntry], Field(default_factory=list)]
    """Control groups of this host's processes."""
    qemu: Annotated[list[QemuEntry], Field(default_factory=list)]
    """QEMU processes of this host: virtual machines, and storage daemons."""
    space: SpaceConfig = Field(default_factory=SpaceConfig)
    """How full this host's pools of storage are."""

    @property
    def servers(self) -> list[str]:
        """All of ``server``."""
        return listed(self.server)

    @field_validator("export", mode="before")
    @classmethod
    def _by_volume(cls, value: Any) -> Any:
        return [_export(item) for item in value] if isinstance(value, list) else value

    @field_validator("server")
    @classmethod
    def _are_servers(cls, value: str | list[str]) -> str | list[str]:
        for text in listed(value):
            parse_server(text)
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
        try:
            return value.expanduser().absolute()  # as the server does; control sockets are named in full
        except RuntimeError as exc:
            raise ValueError(f"{value}: there is no such user; write the path in full") from exc

    @model_validator(mode="after")
    def _is_consistent(self) -> AgentConfig:
        if not self.tls and self.listen and not is_own_host(parse_address(self.listen)[0]):
            raise ValueError(
                f"listen {self.listen!r} can be reached from other hosts, and without TLS anybody could pose "
                "as the server. Run gateway-agent enrol and set tls = true"
            )
        far = [text for text in self.servers if not is_own_host(parse_server(text)[0])]
        if not self.tls and not self.listen and far:
            raise ValueError(
                f"server {far[0]!r} is not on this host, and without TLS statistics and caps could be "
                "read and forged on the way. Run gateway-agent enrol and set tls = true, or use "
                "127.0.0.1:PORT of an SLA server on this host"
            )
        if self.host.enabled and len(self.name) > MAX_NAME_OF_HOST:
            raise ValueError(
                f"name has {len(self.name)} characters; with [host] enabled {MAX_NAME_OF_HOST} at most, "
                "because volumes are called host:NAME:DEVICE"
            )
        self._check_groups()
        check_qemu(self.qemu, self.name)
        names = [plane.name for plane in self.plane]
        if (
            not names
            and not self.host.enabled
            and not self.cgroup
            and not self.qemu
            and not self.space.source
        ):
            raise ValueError(
                "nothing to do: add a [[plane]] with an [[export]], set enabled = true in [host], or add a "
                "[[cgroup]], a [[qemu]] or a [[space.source]]"
            )
        if len(set(names)) != len(names):
            raise ValueError("two [[plane]] tables have the same name")
        for name in names:
            self._check_plane_name(name)
        self._check_addresses()
        self._check_sockets()
        self._check_number_of_exports()
        volumes = [export.volume for export in self.export]
        if len(set(volumes)) != len(volumes):
            raise ValueError("a volume is exported twice; clients of one volume share one plane")
        for export in self.export:
            if self._plane_of(export) not in names:
                raise ValueError(
                    f"export {export.volume}: plane {export.plane!r} is no [[plane]]; name one of {names}"
                )
        for name in names:
            if not any(self._plane_of(export) == name for export in self.export):
                raise ValueError(f"plane {name!r} serves no [[export]]; it needs at least 1")
        self._check_names_of_clients()
        check_volume_groups(self.group, {each.volume: self._plane_of(each) for each in self.export})
        return self

    def _check_addresses(self) -> None:
        seen: list[tuple[str, str, Address]] = []
        for plane in self.plane:
            for text in plane.listen:
                address = parse_listen(text)
                for name, former, taken in seen:
                    if collide(address, taken) or (name, former) == (plane.name, text):
                        raise ValueError(
                            f"plane {plane.name}: listen {text!r} is taken by {former!r} of plane {name}; "
                            "give each its own port or path"
                        )
                seen.append((plane.name, text, address))

    def _check_sockets(self) -> None:
        """Members of a group that may use a socket must be able to reach it."""
        for plane in self.plane:
            for path in [Path(parse_listen(text).path) for text in plane.listen if plane.socket_group]:
                for key, closed in (("runtime_dir", self.runtime_dir), ("state_dir", self.state_dir)):
                    if path.is_relative_to(closed):
                        raise ValueError(
                            f"plane {plane.name}: {path} is in {key}, which only the agent may enter, so "
                            f"that socket_group {plane.socket_group} cannot use it; choose another folder"
                        )

    def _check_groups(self) -> None:
        seen: set[str] = set()
        places: dict[tuple[str, str], str] = {}
        for each in self.cgroup:
            other = places.setdefault((each.group, each.device), each.name)
            if other != each.name:
                raise ValueError(f"[[cgroup]] {each.name}: {each.group} on {each.device} is {other} already")
            if each.name in seen:
                raise ValueError(f"two [[cgroup]] tables have the name {each.name}")
            seen.add(each.name)
            if not is_name(volume := each.volume(self.name)):
                raise ValueError(
                    f"[[cgroup]] {each.name}: its volume {volume} has {len(volume)} characters, 128 at most"
                )

    def _check_number_of_exports(self) -> None:
        if len(self.export) > MAX_EXPORTS:
            raise ValueError(
                f"{len(self.export)} [[export]] tables; a gateway has {MAX_EXPORTS} at most. "
                "Run a second agent for the others"
            )
        size = sum(
            EXPORT_OVERHEAD_BYTES + len(each.volume) + len(each.backend) + label_bytes(each.labels)
            for each in self.export
        )
        if size > MAX_EXPORT_BYTES:
            raise ValueError(
                f"the names and labels of the exports take {size} bytes of the {MAX_EXPORT_BYTES} that one "
                "message to the server has for them; use shorter names, fewer labels, or a second agent"
            )

    def _check_plane_name(self, name: str) -> None:
        if not is_name(name):
            raise ValueError(f"plane name {name!r} must consist of letters, digits and . _ : @ -")
        path = self.control_socket(name)
        if len(path.encode()) > UNIX_PATH_BYTES:
            raise ValueError(
                f"control socket {path} is longer than {UNIX_PATH_BYTES} bytes; shorten runtime_dir"
            )

    def _check_names_of_clients(self) -> None:
        naming = {plane.name for plane in self.plane if plane.names_clients}
        how = 'set tls = "require" and client_certificates = "required" in [[plane]]'
        if self.client_rule == "tls-name" and not naming:
            raise ValueError(f'client_rule "tls-name" needs certificates of clients: {how}')
        for export in self.export:
            if export.allow_names and self._plane_of(export) not in naming:
                raise ValueError(
                    f"export {export.volume}: allow_names needs certificates of clients: {how} "
                    f"{self._plane_of(export)}"
                )

    def _plane_of(self, export: ExportConfig) -> str:
        return export.plane or (self.plane[0].name if len(self.plane) == 1 else "")

    def labels(self) -> dict[str, dict[str, str]]:
        """Volume to its labels, of those that have some."""
        found = {each.volume: each.labels for each in self.export}
        found |= {each.volume(self.name): each.labels for each in self.cgroup}
        found |= {each.volume(self.name): each.labels for entry in self.qemu for each in entry.volume}
        return {volume: labels for volume, labels in found.items() if labels}

    def control_socket(self, plane: str) -> str:
        """Where a plane listens for the link."""
        return str(self.runtime_dir / f"{plane}.sock")

    def plane_config(self, name: str) -> PlaneConfig:
        """The part of one data plane.

        Raises:
            ConfigError: there is no such plane.
        """
        for plane in self.plane:
            if plane.name == name:
                exports = [export for export in self.export if self._plane_of(export) == name]
                return PlaneConfig(
                    name,
                    plane.listen,
                    self.control_socket(name),
                    exports,
                    self.client_rule,
                    self._security(plane),
                    self.drain_s,
                    self.groups_of(name),
                )
        known = ", ".join(plane.name for plane in self.plane)
        raise ConfigError("--plane", f"{name} is no [[plane]] of this file", f"It has: {known}")

    def groups_of(self, plane: str) -> tuple[GroupEntry, ...]:
        """The groups whose volumes one plane serves."""
        served = {each.volume for each in self.export if self._plane_of(each) == plane}
        return tuple(group for group in self.group if served.issuperset(group.volumes))

    def _security(self, plane: PlaneEntry) -> ListenerSecurity:
        settings = {name: getattr(plane, name) for name in ListenerSecurity.model_fields}
        if plane.names_clients and not plane.client_ca:
            settings["client_ca"] = str(self.state_dir / "tls" / "ca.crt")
        return ListenerSecurity(**settings)

    def check_certificates(self) -> None:
        """See that the certificates of every plane and upstream can be used. Reads the files.

        Raises:
            ConfigError: the first that cannot.
        """
        for plane in self.plane:
            self._security(plane).check(plane.name)
        for export in self.export:
            if uses_tls(export.upstream or ""):
                upstream_context(export)


def _export(item: Any) -> Any:
    """One ``[[export]]``, whose mistakes are reported with the name of its volume, not with its number."""
    try:
        return ExportConfig.model_validate(item)
    except ValidationError as exc:
        problem = describe(exc, ExportConfig)
        if problem.startswith("(whole file): "):  # names the volume itself
            raise ValueError(problem.removeprefix("(whole file): ")) from exc
        volume = item.get("volume") if isinstance(item, dict) else item
        raise ValueError(f"export {volume}: {problem}") from exc


def load_agent(path: Path) -> AgentConfig:
    """Read the agent's file, with what the environment overrides.

    Raises:
        ConfigError: names the key, the value and what is expected.
    """
    return configuration.load(AgentConfig, path, prefix=configuration.AGENT_ENV_PREFIX)


def listed(value: str | list[str]) -> list[str]:
    """One or several, as a list."""
    return [value] if isinstance(value, str) else value


def _is_ip(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def parse_server(text: str) -> tuple[str, int]:
    """Host and port of ``10.0.0.5:7411``, ``[fd00::5]:7411`` or ``sla.example.org:7411``.

    Raises:
        ValueError: another form.
    """
    host, port = split_address(text) or ("", 0)
    if not port or (":" in host and not _is_ip(host)):
        raise ValueError(
            f"{text!r} is not HOST:PORT, without a scheme and with a port from 1 to 65535; "
            "write for example 10.0.0.5:7411"
        )
    check_host(host)
    return ("127.0.0.1" if host == "localhost" else host), port
