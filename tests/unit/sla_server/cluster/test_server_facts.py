"""What a server says of itself to the other nodes, as tags of its engine."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest

from sla_server import config as configuration
from sla_server.cluster import essentials
from sla_server.cluster.server_facts import ServerFacts

RELEASE = version("storage-sla-server")


def _config(**tables: Any) -> configuration.ResolvedConfig:
    values = {
        "database": {"url": "postgresql+psycopg:///sla", "parquet_dir": "/srv/parquet"},
        "cluster": {"node": "n1", "takeover": {"enabled": True}},
        **tables,
    }
    return configuration.resolve(configuration.ServerConfig.model_validate(values))


def test_facts_come_back_from_tags_in_small_letters_beside_others() -> None:
    config = _config(
        cluster={"node": "n1", "takeover": {"enabled": True, "page": "https://SLA-1.example.org"}}
    )
    facts = ServerFacts.of(config, is_alone=False)
    assert facts == ServerFacts(RELEASE, takes_over=True, page="https://sla-1.example.org")
    assert config.cluster is not None
    tags = [tag.lower() for tag in (*essentials.tags(config.cluster), *facts.tags())]
    assert ServerFacts.of_tags(tags) == facts
    assert essentials.of_tags(tags) == essentials.of(config.cluster)


def test_a_node_of_a_former_release_says_nothing_and_one_that_lies_leads_nowhere() -> None:
    assert ServerFacts.of_tags(["site.s", "essential.replicas:3"]) == ServerFacts()
    assert (
        ServerFacts.of_tags(["server.page:javascript:alert(1)", "server.takes-over:maybe"]) == ServerFacts()
    )


def test_a_node_alone_takes_nothing_over() -> None:
    assert ServerFacts.of(_config(), is_alone=True) == ServerFacts(RELEASE)
    assert ServerFacts.of(_config(cluster={"node": "n1"}), is_alone=False) == ServerFacts(RELEASE)


@pytest.mark.parametrize(
    ("api", "takeover", "page"),
    [
        ({}, {}, "http://127.0.0.1:8411"),
        ({"listen": "[::1]:8411"}, {}, "http://[::1]:8411"),
        ({}, {"page": "https://sla-1"}, "https://sla-1"),
        ({"external_url": "https://proxy", "reading": "login"}, {}, "https://proxy"),
        ({"external_url": "https://proxy", "reading": "login"}, {"page": "https://sla-1"}, "https://sla-1"),
    ],
)
def test_the_page_is_what_the_file_says(api: dict[str, Any], takeover: dict[str, Any], page: str) -> None:
    config = _config(api=api, cluster={"node": "n1", "takeover": {"enabled": True, **takeover}})
    assert ServerFacts.of(config, is_alone=False).page == page


@pytest.mark.parametrize(
    ("listen", "page"),
    [
        ("127.0.0.1:8411", ""),
        ("[::1]:8411", ""),
        ("0.0.0.0:8411", ""),
        ("10.0.0.1:8411", "https://10.0.0.1:8411"),
    ],
)
def test_a_page_that_other_machines_cannot_reach_is_not_said_to_be_there(listen: str, page: str) -> None:
    """The link to 127.0.0.1 of another server leads to the machine of whoever clicks it."""
    routes = {"routes": "10.0.0.1:6222", "tls": {"enabled": True}}
    cluster = {"node": "n1", **routes, "takeover": {"enabled": True}}
    tls = {"certificate": "a.crt", "key": "a.key"}
    config = _config(api={"listen": listen, "reading": "login", "tls": tls}, cluster=cluster)
    assert ServerFacts.of(config, is_alone=False).page == page
