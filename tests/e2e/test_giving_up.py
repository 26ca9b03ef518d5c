"""The acting server that cannot act gives the lease up: the other one acts, and nothing flaps back."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sla_server.lease_file import LeaseFile
from tests.e2e.conftest import Driver
from tests.support.cutting_proxy import CuttingProxy
from tests.support.load import Load
from tests.support.postgres import PostgresServer
from tests.support.servers import NODES, SERVERS, Servers, tree_of
from tests.support.stage import LIMIT_S, Agent, Stage

GIVE_UP_S = 5
AWAY = "has not reached the database for"
FAILS = "cannot keep a part running, for"


class Case:
    """Two servers, each with a way of its own to the database, a gateway that knows both, and its load.

    Attributes:
        acting: the one that acts at first; ``other`` stands by.
        proxy: the way of the acting one to the database.
    """

    def __init__(self, folder: Path, ends: contextlib.ExitStack) -> None:
        postgres = ends.enter_context(PostgresServer())
        proxies = {name: CuttingProxy(postgres.directory / ".s.PGSQL.5432") for name in SERVERS}
        for proxy in proxies.values():
            ends.callback(proxy.close)
        self.servers = Servers(folder, postgres.create("sla"), ends, lease_s=2)
        for name, proxy in proxies.items():
            url = f"postgresql+psycopg://postgres@127.0.0.1:{proxy.port}/sla"
            environment = self.servers.stages[name].environment
            environment["SLA__DATABASE__URL"] = url
            environment["SLA__CLUSTER__TAKEOVER__GIVE_UP_AFTER_S"] = str(GIVE_UP_S)
        for name in NODES:
            self.servers.start(name)
        self.servers.stages["n1"].wait(self.servers.acting, "a server that acts")
        self.acting, self.other = ("n1", "n2") if self.servers.acting() == "n1" else ("n2", "n1")
        self.first, self.second = (self.servers.stages[name] for name in (self.acting, self.other))
        self.proxy = proxies[self.acting]
        states = {self.acting: "acts", self.other: "stands-by", "n3": "runs"}
        self.first.wait(
            lambda: {row["name"]: row["state"] for row in self.first.get("nodes")["items"]} == states,
            f"{states}",
        )

    def start_load(self, driver: Driver, folder: Path) -> Load:
        """I/O through an agent, as soon as its counts are in SQL."""
        image = folder / "disk.img"
        image.write_bytes(bytes(8 << 20))
        agent, home = Agent("gateway-1", {"erp-db": str(image)}), self.servers.stages["n1"]
        home.start_agent(agent)  # which knows both servers
        load = driver.start(agent.socket(home), "erp-db", rate_iops=100)
        self.first.wait(lambda: stored_ios(self.first) > 100, "counts of the gateway in SQL")
        assert (fence(self.first) is None, fence(self.second)) == (False, None)
        return load

    def check_other_acts(self, load: Load, why: str) -> None:
        """It stores, and all places say why it acts."""
        assert fence(self.first) is None
        before = len(load.done)
        self.second.wait(lambda: stored_ios(self.second) > before, "newer counts in SQL")
        lines = (self.first.folder / "server.log").read_text().splitlines()
        (line,) = [line for line in lines if "lease-given-up" in line]
        for said in (why, f"limit {GIVE_UP_S} s", "cluster.takeover.give_up_after_s", self.other):
            assert said in line
        (row,) = [row for row in self.second.get("nodes")["items"] if row["name"] == self.acting]
        assert row["why"].startswith(why)
        listed = " ".join(self.second.sla("get", "nodes").stdout.split())
        assert f"The server of {self.acting} gave the lease up, as it {why}" in listed
        said = f"it gave the lease up, as it {why}"
        self.first.wait(lambda: said in status(self.first), "its status to say why")

    def check_nothing_moves_and_all_counts(self, driver: Driver, load: Load) -> None:
        """For twice the limit; then the counts."""
        term, before = fence(self.second), len(load.done)
        self.second.wait(lambda: len(load.done) > before + 200 * GIVE_UP_S, "twice the limit to pass")
        assert term is not None
        assert (fence(self.first), fence(self.second)) == (None, term)
        driver.stop(load)
        assert not load.errors
        self.second.wait(lambda: stored_ios(self.second) >= len(load.done), "all I/Os in SQL")
        assert stored_ios(self.second) == len(load.done)
        assert not [row["text"] for row in self.second.get("events")["items"] if row["kind"] == "cuts-lost"]
        for stage in (self.first, self.second):
            assert (stage.folder / "server.log").read_text().count("event=server-acts") == 1


@pytest.fixture
def case(tmp_path: Path) -> Iterator[Case]:
    with contextlib.ExitStack() as ends:
        yield Case(tmp_path, ends)


def stored_ios(stage: Stage) -> int:
    return sum(row["reads"] + row["writes"] for row in stage.get("volumes")["items"])


def fence(stage: Stage) -> int | None:
    return LeaseFile(stage.sockets / "run").read().held_fence


def status(stage: Stage) -> str:
    command = [sys.executable, "-m", "sla_server", "status", "--config", str(stage.config_path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False).stdout


@pytest.mark.parametrize("how", ["refused", "silent"])
def test_the_acting_server_without_its_database_hands_over_and_every_io_counts_once(
    case: Case, tmp_path: Path, driver: Driver, how: str
) -> None:
    load = case.start_load(driver, tmp_path)
    turn = case.proxy.refuse if how == "refused" else case.proxy.stall
    turn(True)
    case.second.wait(lambda: case.servers.acts(case.other), "the other one to act")
    case.check_other_acts(load, AWAY)
    turn(False)
    log = case.first.folder / "server.log"
    case.first.wait(lambda: "database-reached-again" in log.read_text(), "the first one to reach it again")
    case.check_nothing_moves_and_all_counts(driver, load)


def test_the_acting_server_whose_part_ends_at_each_start_hands_over_and_every_io_counts_once(
    case: Case, tmp_path: Path, driver: Driver
) -> None:
    load = case.start_load(driver, tmp_path)
    log = case.first.folder / "server.log"

    def services() -> int:
        """The process id of the newest start, as the log has it."""
        lines = [line for line in log.read_text().splitlines() if "part=services pid=" in line]
        return int(lines[-1].split(" pid=")[1].split()[0])

    def has_moved() -> bool:
        if fence(case.first) is not None and (pid := services()) in tree_of(case.servers.pid(case.acting)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return case.servers.acts(case.other)

    case.second.wait(has_moved, "the other one to act")
    case.check_other_acts(load, FAILS)
    case.check_nothing_moves_and_all_counts(driver, load)
