"""Configuration of the PMDaemon: the table ``[pmdaemon]`` of the server's file, and the two directories.

``PmConfig`` is the table; ``sla_server.config`` uses the same model. ``PmFile`` is what ``pmdaemon`` itself
reads: from the shared file it takes only the keys it knows, other parts' tables are their business; unknown
keys *inside* ``[pmdaemon]`` are errors.
"""

from __future__ import annotations

import ipaddress
import os
import pwd
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from pmdaemon.errors import ConfigError
from pmdaemon.runtime import config as files
from pmdaemon.runtime.config import ListenAddress, StrictModel, parse_address

MOST_PAIRS: Final = 256


def _forwarded(value: str) -> str:
    if value:
        host, port = parse_address(value)
        if port == 0 or ipaddress.ip_address(host).is_unspecified:
            raise ValueError(
                f"{value!r} is no address that other servers can dial: write that of this machine, and a "
                "port, as in 192.0.2.1:7412"
            )
    return value


class TlsConfig(StrictModel):
    """Encryption and mutual authentication between server and gateways."""

    enabled: bool = False
    """TLS 1.3 with certificates on both sides, from the authority that `sla ca init` makes. Required for
    an address that is not loopback; an agent without a certificate can do nothing but enrol."""
    state_dir: Path | None = None
    """Keys, certificates and tokens of the authority, mode 0700; default: `ca` in data_dir."""
    certificate_days: float = Field(default=90.0, ge=1e-4, le=3650.0)
    """Life of a gateway's and of the server's certificate; renewed by themselves after two thirds of it."""

    @property
    def lifetime_s(self) -> float:
        """Seconds a certificate lives."""
        return self.certificate_days * 86_400.0


EVERY_USER: Final = "*"


class ListedGateway(StrictModel):
    """``[[pmdaemon.gateway]]``: a gateway that the PMDaemon dials, because its host may not dial out."""

    name: str
    """For the log; the gateway says its own name when it registers."""
    address: str
    """"IP:PORT", the agent's `listen`. Another machine's address needs TLS."""

    @field_validator("name")
    @classmethod
    def _is_printable(cls, value: str) -> str:
        if not value.isprintable():
            raise ValueError("a name holds no control characters; remove them")
        return value

    @field_validator("address")
    @classmethod
    def _is_address(cls, value: str) -> str:
        if parse_address(value)[1] == 0:
            raise ValueError("port 0 cannot be dialled")
        return value


class PmConfig(StrictModel):
    """The performance-monitor daemon: polling of the gateways."""

    listen: ListenAddress = "127.0.0.1:7411"
    """Where agents dial in, "address:port"; port 0 takes a free one (see pmdaemon.port in the runtime
    directory). Loopback only, unless `[pmdaemon.tls] enabled = true`; 0.0.0.0 is everywhere."""
    forwarded: Annotated[str, AfterValidator(_forwarded)] = ""
    """A second "address:port" on which agents are taken while this server acts. With `[cluster.takeover]`,
    servers that stand by listen on their own `listen`, and forward connections to this address of the acting
    server, so that agents may dial any server. Unset: there is none; where the acting server has none, the
    others refuse agents."""
    interval_s: float = Field(default=1.0, ge=0.1, le=60.0)
    """Seconds between two polls of a gateway."""
    pairs: Annotated[int, Field(ge=1, le=MOST_PAIRS)] | Literal["unified"] | None = None
    """Number of thread pairs (processes); unset: by the formula of docs/design/1-shards.md.
    "unified": one process, in which one thread sends and reads and another only wakes it (P15)."""
    max_pairs: int | None = Field(default=None, ge=1, le=MOST_PAIRS)
    """Upper limit of pairs; unset: `pairs`, or the processors this machine lets the server use. Each pair
    after the first takes some 50 MiB of shared memory from the time it is started."""
    pinning: Literal["auto", "on", "off"] = "auto"
    """Bind each pair to a processor of its own, of those the daemon may use. "auto": with room for two pairs
    or more and from 4 processors."""
    thread_quantum_ms: float = Field(default=10.0, ge=0.1, le=1000.0)
    """T_thr of the formula: within this time a pair gets through all its gateways once."""
    catch_up_bytes_per_s: int = Field(default=64 << 20, ge=256 << 10, le=1 << 40)
    """Backlog that a pair asks its gateways for after an outage, over all of them, at most. Below that the
    rate follows what the machine can take: late answers and refusals halve it. The newest cut of each gateway
    comes in any case."""
    durable_lag_s: float = Field(default=10.0, ge=10.0, le=3600.0)
    """Cuts that are not durable for so long, without any progress, are asked for again. At least 120 with
    `[cluster.takeover]`: there they are durable in the database alone, which may be slow or away."""
    open_files: int = Field(default=16384, ge=256, le=1 << 20)
    """Descriptors wanted (RLIMIT_NOFILE is raised to it): one a gateway and some 50 more."""

    agent_users: list[str] = Field(default_factory=list)
    """Users of this machine whose agents may connect without TLS, beside the server's own and root; "*" is
    every user. The kernel says whose a connection is."""
    agent_labels: bool = True
    """Whether agents may label their volumes. Agreements choose volumes by labels: with false only people
    do, by documents (`kind: VolumeLabels`), and what agents say is left out."""
    tls: TlsConfig = Field(default_factory=TlsConfig)
    gateway: list[ListedGateway] = Field(default_factory=list)
    """Gateways to dial. Those of the database's table gateway_list are dialled, too."""

    @field_validator("agent_users")
    @classmethod
    def _are_users(cls, value: list[str]) -> list[str]:
        for name in value:
            if name != EVERY_USER:
                try:
                    pwd.getpwnam(name)
                except KeyError as exc:
                    raise ValueError(f"{name!r} is no user of this machine; correct or remove it") from exc
        return value

    def agent_uids(self) -> frozenset[int] | None:
        """Users whose connections are served; None: those of all, as with TLS the certificate decides."""
        if self.tls.enabled or EVERY_USER in self.agent_users:
            return None
        return frozenset((0, os.geteuid(), *(pwd.getpwnam(name).pw_uid for name in self.agent_users)))

    @model_validator(mode="after")
    def _plain_on_loopback_only(self) -> PmConfig:
        plain = {} if self.tls.enabled else {"listen": self.listen, "forwarded": self.forwarded}
        for key, (host, port) in ((key, parse_address(value)) for key, value in plain.items() if value):
            if ipaddress.ip_address(host).is_loopback:
                continue
            raise ValueError(
                f"pmdaemon.{key}: {host} can be reached from other machines, and without TLS the server "
                "cannot tell a gateway from a stranger. Run `sla ca init` and set enabled = true in "
                f'[pmdaemon.tls], or use "127.0.0.1:{port}" and run agents on this machine'
            )
        for listed in self.gateway:
            if not self.may_dial(listed.address):
                raise ValueError(
                    f"gateway {listed.name}: {listed.address} is another machine's, and without TLS anyone "
                    "on the way could pose as that gateway. Set enabled = true in [pmdaemon.tls]"
                )
        return self

    @model_validator(mode="after")
    def _fixed_pairs_are_allowed(self) -> PmConfig:
        if self.max_pairs is not None and (self.fixed_pairs or 0) > self.max_pairs:
            raise ValueError(
                f"pairs = {self.pairs} is more than max_pairs = {self.max_pairs}. Remove max_pairs, which "
                "limits what the formula asks for, or lower pairs"
            )
        return self

    def may_dial(self, address: str) -> bool:
        """Whether this address may be dialled: with TLS any, without it this machine's own."""
        return self.tls.enabled or ipaddress.ip_address(parse_address(address)[0]).is_loopback

    @property
    def fixed_pairs(self) -> int | None:
        """The number of pair processes, if it is not left to the formula."""
        return 1 if self.pairs == "unified" else self.pairs

    @property
    def most_pairs(self) -> int:
        """How many pairs there can be."""
        return self.fixed_pairs or self.max_pairs or min(len(os.sched_getaffinity(0)), MOST_PAIRS)

    @property
    def interval_ns(self) -> int:
        """The poll interval in nanoseconds."""
        return round(self.interval_s * 1e9)


class PmFile(BaseModel):
    """What the daemon reads of the server's file."""

    model_config = ConfigDict(extra="ignore")

    runtime_dir: Path
    """Directory of the mailbox segments and of pmdaemon.port; ``sla-server`` gives it in SLA__RUNTIME_DIR."""
    data_dir: Path = Path("sla-data")
    """The server's durable data; the daemon itself keeps nothing there."""
    pmdaemon: PmConfig = Field(default_factory=PmConfig)

    @property
    def segment_path(self) -> Path:
        """The main mailbox segment."""
        return self.runtime_dir / "main.mbx"

    @property
    def ca_dir(self) -> Path:
        """The directory of the certificate authority."""
        return self.pmdaemon.tls.state_dir or self.data_dir / "ca"

    @property
    def list_path(self) -> Path:
        """Gateways to dial, from the database; written by dbmanager."""
        return self.runtime_dir / "gateways.json"

    @property
    def dialled_path(self) -> Path:
        """How it goes with the gateways to dial; written by the daemon, read by the application server."""
        return self.runtime_dir / "metrics" / "dialled.json"

    @property
    def metrics_path(self) -> Path:
        """The daemon's figures about itself, written each second."""
        return self.runtime_dir / "metrics" / "pmdaemon.prom"

    @property
    def port_path(self) -> Path:
        """The file that says on which port the daemon listens."""
        return self.runtime_dir / "pmdaemon.port"


def load(path: Path | None) -> PmFile:
    """Read the file (or nothing) and the environment.

    Raises:
        ConfigError: names the file, the key, the value and what is expected.
    """
    if path is None and "SLA__RUNTIME_DIR" not in os.environ:
        raise ConfigError(
            "runtime_dir",
            "is not set",
            "Give --config FILE with runtime_dir in it, or SLA__RUNTIME_DIR; sla-server start sets it",
        )
    return files.load(PmFile, path)
