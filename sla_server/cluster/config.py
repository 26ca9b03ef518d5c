"""Configuration of a node: the table ``[cluster]`` of the server's file.

Without the table there is no cluster. Parameters that must be the same on all nodes are listed in
``essentials``; every other one is the node's own.
"""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from pmdaemon.runtime.config import StrictModel, parse_address

MIB = 1 << 20


def _address(value: str) -> str:
    host, port = parse_address(value)
    if port == 0:
        raise ValueError(f'{value!r} has port 0; other nodes must know the port, for example "{host}:4222"')
    return value


_HOST_AND_PORT: Final = re.compile(r"([\w.-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]+)?")


def page_address(value: str) -> str:
    """Scheme, host and port of a page, in small letters; "" if ``value`` is no such address."""
    try:
        parts = urlsplit(value)
        is_one = parts.scheme in ("http", "https") and parts.port != 0
    except ValueError:  # of the port, or of an address of IPv6
        return ""
    is_plain = is_one and _HOST_AND_PORT.fullmatch(parts.netloc) is not None
    is_whole = is_plain and not (parts.path.strip("/") or parts.query or parts.fragment)
    return f"{parts.scheme}://{parts.netloc}".lower() if is_whole else ""


def _page(value: str) -> str:
    if value and not page_address(value):
        raise ValueError(
            f"{value!r} is no address of a page: write https, host and port, as in "
            "https://sla-1.example.org:8411"
        )
    return page_address(value)


Address = Annotated[str, AfterValidator(_address)]
NodeName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9-]{0,62}$")]
"""Of a cluster, a node or a site: also a part of subjects and tags of the engine, so no points or blanks."""


class PeerConfig(StrictModel):
    """Another node of the cluster."""

    name: NodeName
    """The other node's `node`."""
    listen: Address
    """Its `listen`: before this node joins, it asks there whether the essential parameters are the same."""
    routes: Address
    """Its `routes`."""


class ClusterTlsConfig(StrictModel):
    """Mutual TLS of clients and routes, with certificates of the product's own authority."""

    enabled: bool = False
    """Required for addresses that are not loopback, and the same on all nodes."""
    lifetime_s: float = Field(default=365 * 86_400.0, ge=3600, le=3650 * 86_400)
    """Of the certificates that `sla cluster init` and `sla cluster invite` make."""


class TakeoverConfig(StrictModel):
    """Several servers over one PostgreSQL database and one archive: one acts, the others stand by."""

    enabled: bool = False
    """Poll, judge, control and write only while this server has the lease of the cluster. The same on all
    servers of the database; `[database] url`, `parquet_dir` and the certificate authority are theirs
    together."""
    lease_s: float = Field(default=6.0, ge=2, le=60)
    """The acting server renews its lease three times in so long. When it dies another one takes over after
    a quarter more than this."""
    give_up_after_s: float = Field(default=30.0, ge=0, le=3600)
    """The acting server gives its lease up when it has not reached the database for so long, or when a part
    of it has ended again and again for so long, if a server that stands by says that it has reached the
    database all that time; it takes the lease again only once it has reached the database for so long. 0:
    never."""
    page: Annotated[str, AfterValidator(_page)] = ""
    """Address of this server's page, to which the pages of the others lead, for example
    `https://sla-1.example.org:8411`. Default: `external_url` of `[api]`, else its `listen`; none where that
    is 0.0.0.0, or loopback and `routes` is not."""


class ClusterConfig(StrictModel):
    """One node of a cluster, as the server runs it."""

    name: NodeName = "sla"
    """Of the cluster; the same on all nodes."""
    node: NodeName
    """Of this node, unlike all others."""
    site: NodeName = "site"
    """Where it is. Copies of a stream can be kept at different sites."""
    listen: Address = "127.0.0.1:4222"
    """Where clients connect. Any address but loopback needs `[cluster.tls]`."""
    routes: Address = "127.0.0.1:6222"
    """Where the other nodes connect. Any address but loopback needs `[cluster.tls]`."""
    peers: list[PeerConfig] = Field(default_factory=list, max_length=64)
    """The other nodes; two that run are enough to find all."""
    data_dir: Path | None = None
    """What the node stores, and its credentials. Default: DATA_DIR/cluster. A relative path begins at
    DATA_DIR."""
    engine: Path | None = None
    """The program nats-server. Default: on PATH, then where Python packages put it."""
    sync: Literal["always", "if-possible"] = "always"
    """`always`: what is acknowledged is on disk, and an engine that cannot do it (before 2.10) is refused.
    `if-possible`: such an engine is used, with a warning at each start; what it acknowledges survives
    processes that are killed, and a power cut only where another node kept its power."""
    replicas: int = Field(default=3, ge=1, le=5)
    """Copies of a stream, unless its maker says otherwise; not more than there are nodes. The same on all."""
    max_payload_bytes: int = Field(default=MIB, ge=64 << 10, le=8 * MIB)
    """Largest message of the engine; larger ones travel in fragments. The same on all nodes."""
    store_bytes: int = Field(default=4 << 30, ge=64 * MIB, le=1 << 50)
    """Room on disk for streams, at most."""
    memory_bytes: int = Field(default=64 * MIB, ge=MIB, le=1 << 40)
    """Memory for streams that are kept in memory, at most."""
    tls: ClusterTlsConfig = Field(default_factory=ClusterTlsConfig)
    takeover: TakeoverConfig = Field(default_factory=TakeoverConfig)

    @model_validator(mode="after")
    def _is_sound(self) -> ClusterConfig:
        if parse_address(self.listen)[1] == parse_address(self.routes)[1]:
            raise ValueError(f"listen and routes have the same port ({self.routes}); give each its own")
        names = [peer.name for peer in self.peers]
        for name in names:
            if name == self.node:
                raise ValueError(f"peers: {name} is this node itself; list only the others")
            if names.count(name) > 1:
                raise ValueError(f"peers: {name} is listed twice; each node has a name of its own")
        for key, address in self._addresses().items():
            if not self.tls.enabled and not ipaddress.ip_address(parse_address(address)[0]).is_loopback:
                raise ValueError(
                    f"{key}: {address} can be reached from other machines, and without TLS anyone on the way "
                    "reads and changes messages. Run `sla ca init` and set enabled = true in [cluster.tls], "
                    "or use 127.0.0.1"
                )
        return self

    def _addresses(self) -> dict[str, str]:
        found = {"listen": self.listen, "routes": self.routes}
        for peer in self.peers:
            found |= {f"peers.{peer.name}.listen": peer.listen, f"peers.{peer.name}.routes": peer.routes}
        return found

    def directory(self, data_dir: Path) -> Path:
        """Where the node keeps everything.

        Args:
            data_dir: the server's.
        """
        return data_dir / (self.data_dir.expanduser() if self.data_dir else "cluster")
