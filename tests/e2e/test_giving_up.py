"""The acting server that loses its way to the database gives the lease up, and nothing flaps back."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

from sla_server.lease_file import LeaseFile
from tests.e2e.conftest import Driver
from tests.support.cutting_proxy import CuttingProxy
from tests.support.postgres import PostgresServer
from tests.support.servers import NODES, SERVERS, Servers
from tests.support.stage import LIMIT_S, Agent, Stage

GIVE_UP_S = 3
WHY = "has not reached the database for"


def _stored_ios(stage: Stage) -> int:
    return sum(row["reads"] + row["writes"] for row in stage.get("volumes")["items"])


def _fence(stage: Stage) -> int | None:
    return LeaseFile(stage.sockets / "run").read().held_fence


def _status(stage: Stage) -> str:
    command = [sys.executable, "-m", "sla_server", "status", "--config", str(stage.config_path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False).stdout


@pytest.mark.parametrize("how", ["refused", "silent"])
def test_the_acting_server_without_its_database_hands_over_and_every_io_counts_once(
    tmp_path: Path, driver: Driver, how: str
) -> None:
    with contextlib.ExitStack() as ends:
        postgres = ends.enter_context(PostgresServer())
        folder = postgres.directory
        proxies = {name: CuttingProxy(folder / ".s.PGSQL.5432") for name in SERVERS}
        for proxy in proxies.values():
            ends.callback(proxy.close)
        servers = Servers(tmp_path, postgres.create("sla"), ends, lease_s=2)
        for name, proxy in proxies.items():
            url = f"postgresql+psycopg://postgres@127.0.0.1:{proxy.port}/sla"
            servers.stages[name].environment["SLA__DATABASE__URL"] = url
            servers.stages[name].environment["SLA__CLUSTER__TAKEOVER__GIVE_UP_AFTER_S"] = str(GIVE_UP_S)
        for name in NODES:
            servers.start(name)
        servers.stages["n1"].wait(servers.acting, "a server that acts")
        acting, other = ("n1", "n2") if servers.acting() == "n1" else ("n2", "n1")
        first, second, proxy = servers.stages[acting], servers.stages[other], proxies[acting]
        states = {acting: "acts", other: "stands-by", "n3": "runs"}

        def shown() -> dict[str, str]:
            return {row["name"]: row["state"] for row in first.get("nodes")["items"]}

        first.wait(lambda: shown() == states, f"{states}")
        image = tmp_path / "disk.img"
        image.write_bytes(bytes(8 << 20))
        agent, home = Agent("gateway-1", {"erp-db": str(image)}), servers.stages["n1"]
        home.start_agent(agent)  # which knows both servers
        load = driver.start(agent.socket(home), "erp-db", rate_iops=100)
        first.wait(lambda: _stored_ios(first) > 100, "counts of the gateway in SQL")
        assert _fence(second) is None

        proxy.refuse(True) if how == "refused" else proxy.stall(True)
        second.wait(lambda: servers.acts(other), "the other one to act")
        fence = _fence(second)
        assert fence is not None
        assert _fence(first) is None
        before = len(load.done)
        second.wait(lambda: _stored_ios(second) > before, "newer counts in SQL")
        log = first.folder / "server.log"
        (line,) = [line for line in log.read_text().splitlines() if "lease-given-up" in line]
        for said in (WHY, f"limit {GIVE_UP_S} s", "cluster.takeover.give_up_after_s", other):
            assert said in line
        (row,) = [row for row in second.get("nodes")["items"] if row["name"] == acting]
        assert row["why"].startswith(WHY)
        first.wait(lambda: f"it gave the lease up, as it {WHY}" in _status(first), "its status to say why")
        assert f"it {WHY}" in second.sla("get", "nodes").stdout.replace("\n", " ").replace("   ", " ")

        proxy.refuse(False) if how == "refused" else proxy.stall(False)
        first.wait(lambda: "database-reached-again" in log.read_text(), "the first one to reach it again")
        before = len(load.done)
        second.wait(lambda: len(load.done) > before + 300 * GIVE_UP_S, "thrice the limit to pass")
        assert (_fence(first), _fence(second)) == (None, fence)
        driver.stop(load)
        assert not load.errors
        second.wait(lambda: _stored_ios(second) >= len(load.done), "all I/Os in SQL")
        assert _stored_ios(second) == len(load.done)
        assert not [row["text"] for row in second.get("events")["items"] if row["kind"] == "cuts-lost"]
        for stage in (first, second):
            assert (stage.folder / "server.log").read_text().count("server-acts") == 1
