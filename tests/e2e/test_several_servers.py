"""Two servers over one PostgreSQL and one archive: one acts, and when it dies the other one takes over."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

from sla_server.db.config import DatabaseConfig
from sla_server.db.engine import make_engine
from sla_server.lease_file import LeaseFile
from tests.e2e.conftest import Driver
from tests.support.ports import free_port
from tests.support.postgres import PostgresServer
from tests.support.stage import LIMIT_S, Agent, Stage

NODES = ("n1", "n2", "n3")


def _cluster_toml(node: str, ports: dict[str, tuple[int, int]]) -> str:
    lines = ["[cluster]", f'node = "{node}"', f"store_bytes = {1 << 28}"]
    lines += [
        f'{key} = "127.0.0.1:{port}"' for key, port in zip(("listen", "routes"), ports[node], strict=True)
    ]
    lines += ["[cluster.takeover]", "enabled = true"]
    for name, (listen, routes) in ports.items():
        if name != node:
            lines += ["[[cluster.peers]]", f'name = "{name}"']
            lines += [f'listen = "127.0.0.1:{listen}"', f'routes = "127.0.0.1:{routes}"']
    return "\n".join(lines) + "\n"


class Servers:
    """Servers ``n1`` and ``n2``, and a node ``n3`` without a server; one gateway that knows both servers."""

    def __init__(self, folder: Path, database_url: str, ends: contextlib.ExitStack) -> None:
        ports = {name: (free_port(), free_port()) for name in NODES}
        database = f'parquet_dir = "{folder}/parquet"\n'
        self.stages = {
            name: ends.enter_context(
                Stage(
                    folder / name,
                    interval_s=0.5,
                    database_url=database_url,
                    database_toml=database,
                    extra_toml=_cluster_toml(name, ports),
                )
            )
            for name in NODES
        }
        self._database_url = database_url
        first = self.stages["n1"]
        first.sla("cluster", "init")
        for name in NODES[1:]:
            invitation = folder / f"{name}.invitation"
            first.sla("cluster", "invite", name, str(invitation))
            self.stages[name].sla("cluster", "join", str(invitation))
        first.other_ports = [self.stages["n2"].pm_port]
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        stage = self.stages[name]
        if name == "n3":
            stage.spawn("node", "sla_server", "node", "--config", str(stage.config_path))
            return
        self._processes[name] = stage.spawn_server()

    def acts(self, name: str) -> bool:
        """Whether the server of this name has the lease, and answers."""
        stage = self.stages[name]
        held = LeaseFile(stage.sockets / "run").read().held_fence
        return held is not None and stage.is_answering()

    @contextlib.contextmanager
    def held_up(self) -> Iterator[None]:
        """No server can commit statistics meanwhile: what comes in stays in its queue."""
        engine = make_engine(DatabaseConfig(url=self._database_url), Path())
        with engine.connect() as connection:
            connection.execute(text("LOCK TABLE rollups IN EXCLUSIVE MODE"))
            yield
            connection.rollback()
        engine.dispose()

    def kill(self, name: str) -> None:
        """All of a server at once, as a machine that loses its power."""
        process = self._processes.pop(name)
        pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                if os.getsid(pid) == process.pid:
                    os.kill(pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    with contextlib.ExitStack() as ends:
        postgres = ends.enter_context(PostgresServer())
        yield Servers(tmp_path, postgres.create("sla"), ends)


def _stored_ios(stage: Stage) -> int:
    return sum(row["reads"] + row["writes"] for row in stage.get("volumes")["items"])


def _node_states(stage: Stage) -> dict[str, str]:
    return {row["name"]: row["state"] for row in stage.get("nodes")["items"]}


def test_a_gateway_goes_on_at_the_other_server_and_every_io_counts_once(
    servers: Servers, driver: Driver
) -> None:
    first = servers.stages["n1"]
    for name in NODES:
        servers.start(name)
    first.wait(lambda: servers.acts("n1") or servers.acts("n2"), "a server that acts")
    acting, other = ("n1", "n2") if servers.acts("n1") else ("n2", "n1")
    image = first.folder / "disk.img"
    image.write_bytes(bytes(8 << 20))
    agent = Agent("gateway-1", {"erp-db": str(image)})
    first.start_agent(agent)
    load = driver.start(agent.socket(first), "erp-db", rate_iops=100)

    for dying, next_one in ((acting, other), (other, acting)):
        stage = servers.stages[dying]
        stage.wait(lambda stage=stage: _stored_ios(stage) > 100, "counts of the gateway in SQL")
        with servers.held_up():
            before = len(load.done)
            stage.wait(lambda n=before: len(load.done) > n + 300, "cuts that are in the queue alone")
            servers.kill(dying)
        taking = servers.stages[next_one]
        taking.wait(lambda name=next_one: servers.acts(name), f"{next_one} to take over")
        taking.wait(lambda stage=taking, n=before: _stored_ios(stage) > n, "newer counts in SQL")
        servers.start(dying)  # it stands by, with what its queue has held
        states = {dying: "runs", next_one: "acts", "n3": "runs"}
        taking.wait(lambda stage=taking, wanted=states: _node_states(stage) == wanted, f"{states}")
    command = [
        sys.executable,
        "-m",
        "sla_server",
        "status",
        "--config",
        str(servers.stages[other].config_path),
    ]

    def stands_by() -> bool:  # once it runs: the node of the cluster is there before its server
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        return f"stands by: the server of node {acting} acts" in done.stdout

    servers.stages[other].wait(stands_by, "the server that stands by to say so")
    driver.stop(load)
    assert not load.errors
    stage = servers.stages[acting]
    stage.wait(lambda: _stored_ios(stage) >= len(load.done), "all I/Os in SQL")
    assert _stored_ios(stage) == len(load.done)
