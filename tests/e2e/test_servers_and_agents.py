"""Gateways of several servers: any server takes them, and one that has lost its term says nothing to them."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from pmdaemon.wire.kinds import Kind
from sla_server.lease_file import LeaseFile
from tests.e2e.conftest import Driver
from tests.support.postgres import PostgresServer
from tests.support.recording_proxy import RecordingProxy
from tests.support.servers import NODES, SERVERS, Servers
from tests.support.stage import Agent, Stage

ORDERS = {Kind.POLL, Kind.CAPS, Kind.THRESHOLDS, Kind.COSTS}


@pytest.fixture
def ends() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as made:
        yield made


def _servers(folder: Path, ends: contextlib.ExitStack, lease_s: float) -> tuple[Servers, str, str]:
    """All of them, the one that acts, and the one that stands by."""
    postgres = ends.enter_context(PostgresServer())
    servers = Servers(folder, postgres.create("sla"), ends, lease_s=lease_s)
    for name in NODES:
        servers.start(name)
    stage = servers.stages["n1"]
    stage.wait(servers.acting, "a server that acts")
    acting = servers.acting()
    assert acting is not None
    other = next(name for name in SERVERS if name != acting)
    second = servers.stages[other]
    second.wait(lambda: LeaseFile(second.sockets / "run").read().links, "the other one to know of it")
    return servers, acting, other


def _stored_ios(stage: Stage) -> int:
    return sum(row["reads"] + row["writes"] for row in stage.get("volumes")["items"])


def _agent(stage: Stage) -> Agent:
    image = stage.folder / "disk.img"
    image.write_bytes(bytes(8 << 20))
    return Agent("gateway-1", {"erp-db": str(image)})


def test_a_gateway_that_knows_only_the_server_that_stands_by_is_served_and_stays_when_that_one_takes_over(
    tmp_path: Path, ends: contextlib.ExitStack, driver: Driver
) -> None:
    servers, acting, other = _servers(tmp_path, ends, lease_s=6)
    first, second = servers.stages[acting], servers.stages[other]
    first.agents_port, first.other_ports = second.pm_port, []
    agent = _agent(first)
    first.start_agent(agent)
    load = driver.start(agent.socket(first), "erp-db", rate_iops=100)
    first.wait(lambda: _stored_ios(first) > 200, "its counts at the server that acts")
    assert servers.acts(acting)
    servers.power_off(acting)
    second.wait(lambda: servers.acts(other), "the other one to take over")
    before = len(load.done)
    second.wait(lambda: _stored_ios(second) > before, "newer counts there")
    servers.start(acting)
    second.wait(
        lambda: (
            {row["name"]: row["state"] for row in second.get("nodes")["items"]}
            == {acting: "stands-by", other: "acts", "n3": "runs"}
        ),
        "all of them in order",
    )
    driver.stop(load)
    assert not load.errors
    second.wait(lambda: _stored_ios(second) >= len(load.done), "all I/Os in SQL")
    assert _stored_ios(second) == len(load.done)


def test_a_server_that_stood_still_for_longer_than_its_lease_orders_nothing_any_more(
    tmp_path: Path, ends: contextlib.ExitStack, driver: Driver
) -> None:
    """All of its processes go on at once, with a poll due and caps to renew, and another server acts."""
    servers, acting, other = _servers(tmp_path, ends, lease_s=2)
    first, second = servers.stages[acting], servers.stages[other]
    proxy = RecordingProxy(first.pm_port)
    ends.callback(proxy.close)
    first.agents_port, first.other_ports = proxy.port, [second.pm_port]
    agent = _agent(first)
    first.start_agent(agent)
    load = driver.start(agent.socket(first), "erp-db", rate_iops=100)
    first.wait(lambda: _stored_ios(first) > 100, "its counts at the server that acts")
    assert Kind.POLL in proxy.kinds
    frozen = servers.freeze(acting)
    second.wait(lambda: servers.acts(other), "the other one to take over")
    assert proxy.open_links
    sent = len(proxy.kinds)
    servers.thaw(frozen)
    second.wait(lambda: not proxy.open_links, "the first one to end its connections")
    assert ORDERS.isdisjoint(proxy.kinds[sent:])
    assert LeaseFile(first.sockets / "run").read().held_fence is None
    second.wait(lambda: _stored_ios(second) > 300, "the gateway at the second one")
    driver.stop(load)
    second.wait(lambda: _stored_ios(second) >= len(load.done), "all I/Os in SQL")
    assert _stored_ios(second) == len(load.done)
    assert not load.errors


def test_the_nodes_of_a_second_cluster_are_refused_by_the_database(
    tmp_path: Path, ends: contextlib.ExitStack
) -> None:
    """`cluster init` on the second node, too, in place of an invitation."""
    servers, acting, other = _servers(tmp_path, ends, lease_s=2)
    servers.stop(other)
    second = servers.stages[other]
    shutil.rmtree(second.folder / "data" / "cluster")
    text = second.config_path.read_text()
    second.config_path.write_text(text[: text.index("[[cluster.peers]]")])
    second.sla("cluster", "init")
    servers.start(other)
    second.wait(lambda: servers.has_ended(other), "the server to give up")
    assert (
        "is of another cluster than the servers of this database"
        in (second.folder / "server.log").read_text()
    )
    assert servers.acts(acting)
