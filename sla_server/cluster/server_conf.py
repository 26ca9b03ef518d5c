"""The engine's configuration file, made of ours: pure text.

Two accounts: ``SYS`` sees the engine itself (who is there, what it does, stepdown, peer removal), ``SLA`` has
the streams. Routes have a secret of their own. No one gets in without one: there is no default user.

The file names secrets, so it is written with mode 0600 into the node's directory, mode 0700.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pmdaemon.runtime.config import parse_address
from sla_server.cluster import essentials, parameters
from sla_server.cluster.access import PRODUCT_USER
from sla_server.cluster.config import ClusterConfig
from sla_server.cluster.engine import Engine

SYSTEM_USER: Final = "sys"
ROUTE_USER: Final = "route"


@dataclass(frozen=True, slots=True)
class Secrets:
    """Passwords of a cluster, the same on all nodes."""

    system: str
    product: str
    route: str


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of a node."""

    authority: Path
    certificate: Path
    key: Path


def text(
    config: ClusterConfig,
    engine: Engine,
    secrets: Secrets,
    store: Path,
    tls: TlsFiles | None,
    values: Mapping[str, parameters.Value],
    users: Sequence[Mapping[str, Any]] = (),
    tags: Sequence[str] = (),
) -> str:
    """The whole file.

    Args:
        config: of the node.
        engine: that reads it.
        secrets: of the cluster.
        store: the directory of the streams.
        tls: None unless ``[cluster.tls]`` is enabled.
        values: of acquirable parameters, all of them.
        users: named accounts with their permissions, beside the product's own user.
        tags: that the engine carries beside the essential parameters.
    """
    routes = [
        f"nats-route://{ROUTE_USER}:{secrets.route}@{_host_and_port(peer.routes)}" for peer in config.peers
    ]
    cluster: dict[str, Any] = {
        "name": config.name,
        "listen": _host_and_port(config.routes),
        "authorization": {"user": ROUTE_USER, "password": secrets.route, "timeout": 5},
        "routes": routes,
    }
    streams: dict[str, Any] = {
        "store_dir": str(store),
        "max_file_store": config.store_bytes,
        "max_memory_store": config.memory_bytes,
    }
    if engine.can_sync_always:
        streams["sync_interval"] = "always"
    document: dict[str, Any] = {
        "server_name": config.node,
        "server_tags": [*essentials.tags(config), *tags],
        "listen": _host_and_port(config.listen),
        "max_payload": config.max_payload_bytes,
        "max_connections": values["max_connections"],
        "ping_interval": f"{values['ping_interval_s']}s",
        "write_deadline": f"{values['write_deadline_s']}s",
        "jetstream": streams,
        # Without routes the engine refuses to store anything as one of a cluster.
        **({"cluster": cluster} if config.peers else {}),
        "accounts": {
            "SYS": {"users": [{"user": SYSTEM_USER, "password": secrets.system}]},
            "SLA": {
                "jetstream": "enabled",
                "users": [{"user": PRODUCT_USER, "password": secrets.product}, *users],
            },
        },
        "system_account": "SYS",
    }
    if tls is not None:
        files = {
            "ca_file": str(tls.authority),
            "cert_file": str(tls.certificate),
            "key_file": str(tls.key),
            "verify": True,
            "timeout": 5,
        }
        document["tls"] = files
        cluster["tls"] = files
    return "# Written at each start of the node; change [cluster] of the server's file.\n" + _lines(document)


def _host_and_port(address: str) -> str:
    host, port = parse_address(address)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _lines(document: Mapping[str, Any], indent: str = "") -> str:
    lines = ""
    for key, value in document.items():
        if isinstance(value, dict):
            lines += f"{indent}{key} {{\n{_lines(value, indent + '  ')}{indent}}}\n"
        else:
            # JSON of texts, numbers, lists and tables of them is also the engine's notation.
            lines += f"{indent}{key}: {json.dumps(value, ensure_ascii=False)}\n"
    return lines
