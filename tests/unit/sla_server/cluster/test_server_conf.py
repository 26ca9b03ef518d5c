"""The engine's file, as text."""

from __future__ import annotations

import json
from pathlib import Path

from sla_server.cluster import parameters, server_conf
from sla_server.cluster.config import ClusterConfig
from sla_server.cluster.engine import Engine
from sla_server.cluster.server_conf import Secrets, TlsFiles

SECRETS = Secrets(system="s1", product="p1", route="r1")
PEER = {"name": "n2", "listen": "127.0.0.1:4223", "routes": "127.0.0.1:6223"}


def _text(config: ClusterConfig, *, can_sync: bool = True, tls: TlsFiles | None = None) -> str:
    engine = Engine(Path("/e"), (2, 15, 1), "2.15.1", can_sync_always=can_sync)
    return server_conf.text(config, engine, SECRETS, Path("/data/jetstream"), tls, parameters.values({}))


def test_the_whole_file_of_a_node() -> None:
    config = ClusterConfig.model_validate({"node": "n1", "peers": [PEER]})
    tags = (
        '["site.site", "node.n1", "essential.format:1", "essential.max_payload_bytes:1048576", '
        '"essential.name:sla", "essential.replicas:3", "essential.sync:always", "essential.tls:off"]'
    )
    assert _text(config) == (
        "# Written at each start of the node; change [cluster] of the server's file.\n"
        'server_name: "n1"\n'
        f"server_tags: {tags}\n"
        'listen: "127.0.0.1:4222"\n'
        "max_payload: 1048576\n"
        "max_connections: 65536\n"
        'ping_interval: "10s"\n'
        'write_deadline: "10s"\n'
        "jetstream {\n"
        '  store_dir: "/data/jetstream"\n'
        "  max_file_store: 4294967296\n"
        "  max_memory_store: 67108864\n"
        '  sync_interval: "always"\n'
        "}\n"
        "cluster {\n"
        '  name: "sla"\n'
        '  listen: "127.0.0.1:6222"\n'
        "  authorization {\n"
        '    user: "route"\n'
        '    password: "r1"\n'
        "    timeout: 5\n"
        "  }\n"
        '  routes: ["nats-route://route:r1@127.0.0.1:6223"]\n'
        "}\n"
        "accounts {\n"
        "  SYS {\n"
        '    users: [{"user": "sys", "password": "s1"}]\n'
        "  }\n"
        "  SLA {\n"
        '    jetstream: "enabled"\n'
        '    users: [{"user": "sla", "password": "p1"}]\n'
        "  }\n"
        "}\n"
        'system_account: "SYS"\n'
    )


def test_an_engine_without_sync_is_not_given_what_it_refuses() -> None:
    config = ClusterConfig(node="n1", sync="if-possible")
    assert "sync_interval" not in _text(config, can_sync=False)
    assert "sync_interval" in _text(config)


def test_a_node_without_peers_is_no_cluster_for_the_engine() -> None:
    assert "cluster {" not in _text(ClusterConfig(node="n1"))


def test_tls_is_demanded_of_clients_and_routes() -> None:
    config = ClusterConfig.model_validate({"node": "n1", "peers": [PEER], "tls": {"enabled": True}})
    text = _text(config, tls=TlsFiles(Path("/t/a.pem"), Path("/t/n.pem"), Path("/t/n.pem")))
    assert text.count("verify: true") == 2
    assert text.count('ca_file: "/t/a.pem"') == 2


def test_addresses_of_ipv6_and_paths_with_quotes_are_written_as_the_engine_reads_them() -> None:
    config = ClusterConfig(node="n1", listen="[::1]:4222")
    assert 'listen: "[::1]:4222"' in _text(config)
    engine = Engine(Path("/e"), (2, 15, 1), "2.15.1", can_sync_always=True)
    text = server_conf.text(config, engine, SECRETS, Path('/d"é'), None, parameters.values({}))
    assert f"store_dir: {json.dumps('/d' + chr(34) + 'é', ensure_ascii=False)}" in text
