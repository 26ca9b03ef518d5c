"""[cluster]: what is refused, and in which words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import pytest
from pydantic import ValidationError

from pmdaemon.errors import ConfigError
from sla_server import config as configuration
from sla_server.cluster.config import ClusterConfig, TakeoverConfig, page_address
from sla_server.topology import PARTS, parts_of

POSTGRESQL: Final = "postgresql+psycopg:///sla"


def _peer(name: str = "n2", **changes: Any) -> dict[str, Any]:
    return {"name": name, "listen": "127.0.0.1:4223", "routes": "127.0.0.1:6223", **changes}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "cluster.node: is required"),
        ({"node": "a b"}, "cluster.node: does not have the form"),
        ({"node": "n1", "listen": "127.0.0.1:0"}, "has port 0; other nodes must know the port"),
        (
            {"node": "n1", "listen": "10.0.0.1:4222"},
            "listen: 10.0.0.1:4222 can be reached from other machines",
        ),
        ({"node": "n1", "peers": [_peer(routes="10.0.0.2:6222")]}, "peers.n2.routes: 10.0.0.2:6222 can be"),
        ({"node": "n1", "routes": "127.0.0.1:4222"}, "listen and routes have the same port"),
        ({"node": "n1", "peers": [_peer("n1")]}, "peers: n1 is this node itself"),
        ({"node": "n1", "peers": [_peer(), _peer()]}, "peers: n2 is listed twice"),
        ({"node": "n1", "replicas": 6}, "cluster.replicas: should be at most 5"),
        ({"node": "n1", "sync": "never"}, "cluster.sync"),
        ({"node": "n1", "nodes": 3}, "cluster.nodes: no such key"),
    ],
)
def test_what_cannot_be_is_refused_by_name(tmp_path: Path, values: dict[str, Any], words: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text("")
    with pytest.raises(ConfigError) as refused:
        configuration.files.load(configuration.ServerConfig, path, overrides={"cluster": values})
    assert words in str(refused.value)


def test_addresses_of_other_machines_need_tls() -> None:
    config = ClusterConfig.model_validate(
        {"node": "n1", "listen": "10.0.0.1:4222", "routes": "10.0.0.1:6222", "tls": {"enabled": True}}
    )
    assert config.listen == "10.0.0.1:4222"


def test_the_directory_is_below_that_of_the_server() -> None:
    assert ClusterConfig(node="n1").directory(Path("/data")) == Path("/data/cluster")
    assert ClusterConfig(node="n1", data_dir=Path("c")).directory(Path("/data")) == Path("/data/c")
    assert ClusterConfig(node="n1", data_dir=Path("/c")).directory(Path("/data")) == Path("/c")


def test_a_node_is_a_part_only_with_the_table(tmp_path: Path) -> None:
    without = configuration.resolve(configuration.ServerConfig(data_dir=tmp_path))
    with_one = configuration.resolve(
        configuration.ServerConfig(data_dir=tmp_path, cluster=ClusterConfig(node="n1"))
    )
    assert parts_of(without) == PARTS
    assert parts_of(with_one) == ("cluster", *PARTS)


@pytest.mark.parametrize(
    ("database", "words"),
    [
        ({}, "database.url is not set"),
        ({"url": "sqlite:////x/sla.db"}, "database.url is 'sqlite:////x/sla.db'"),
        ({"url": POSTGRESQL}, "database.parquet_dir is not set"),
        ({"url": POSTGRESQL, "parquet_dir": "parquet"}, "database.parquet_dir is 'parquet'"),
        ({"url": POSTGRESQL, "parquet_dir": "/srv/parquet"}, ""),
        ({"url": POSTGRESQL, "files": {"url": "s3://bucket/prefix"}}, ""),
    ],
)
def test_servers_that_take_over_have_one_database_and_one_archive(
    database: dict[str, Any], words: str
) -> None:
    values = {"database": database, "cluster": {"node": "n1", "takeover": {"enabled": True}}}
    if not words:
        configuration.ServerConfig.model_validate(values)
        return
    with pytest.raises(ValidationError, match=re.escape(words)):
        configuration.ServerConfig.model_validate(values)
    values["cluster"] = {"node": "n1"}
    configuration.ServerConfig.model_validate(values)


@pytest.mark.parametrize(
    ("page", "address"),
    [
        ("https://SLA-1.example.org:8411/", "https://sla-1.example.org:8411"),
        ("http://[::1]:8411", "http://[::1]:8411"),
        ("sla-1:8411", ""),
        ("javascript:alert(1)", ""),
        ("https://user@sla-1", ""),
        ("https://sla-1:x", ""),
        ("https://sla-1/page", ""),
        ("https://", ""),
        ("https://[fd00::1]:8411", "https://[fd00::1]:8411"),
        ("https://sla-1 or so", ""),
        ('https://sla-1"x', ""),
        ("https://sla-1\\x", ""),
        ("https://sla-1\x1bc", ""),  # of another node's tags, and printed by `sla`
    ],
)
def test_the_page_of_a_server_is_an_address_alone(page: str, address: str) -> None:
    assert page_address(page) == address
    if address:
        assert TakeoverConfig(page=page).page == address
    else:
        with pytest.raises(ValidationError, match="is no address of a page"):
            TakeoverConfig(page=page)
