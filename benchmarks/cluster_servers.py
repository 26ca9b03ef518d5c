"""Two servers over one PostgreSQL with gateways under load: row ``takeover`` of ``make bench-cluster``.

The acting server and its node lose their power (all processes at once, and gateways hear nothing of it), and
the other one takes over. What is measured, from that moment on:

    lease_s    until the other one has the lease: what is left of it, the engine's election, its margin
    ours_s     from there until cuts of every gateway are in SQL under the new fence: what this product adds,
               what is left of the ten seconds included after which an agent gives a silent server up
    all_s      both

``Site`` is also the stage of ``cluster_chaos``.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx
from sqlalchemy import func, select

from benchmarks.chaos_clients import Clients
from pmdaemon.runtime.clock import STEP_FILE
from sla_server.db import schema
from sla_server.db.config import DatabaseConfig
from sla_server.db.engine import make_engine
from sla_server.lease_file import LeaseFile
from tests.support.cutting_proxy import CuttingProxy
from tests.support.postgres import PostgresServer
from tests.support.servers import NODES, SERVERS, Servers
from tests.support.stage import Agent, Stage

GATEWAYS: Final = ("a", "b")
SPOOL_BYTES: Final = 4 << 20
LOOK_S: Final = 0.02
LIMIT_S: Final = 240.0
DEBUG: Final = {"SLA_LOG_LEVEL": "debug"}


class Site:
    """Servers ``n1`` and ``n2``, node ``n3``, PostgreSQL, and two gateways whose links to servers can be cut.

    Args:
        folder: for all of it.
        ends: closes everything.
        has_links, data_bytes: see ``Servers``.
    """

    def __init__(
        self, folder: Path, ends: contextlib.ExitStack, *, has_links: bool = False, data_bytes: int = 0
    ) -> None:
        self.folder = folder
        self.postgres = ends.enter_context(PostgresServer())
        url = self.postgres.create("sla")
        self.database = DatabaseConfig(url=url, rollup_s=10, parquet_dir=folder / "parquet")
        self.servers = Servers(folder, url, ends, has_links=has_links, data_bytes=data_bytes)
        self.stage: Stage = self.servers.stages["n1"]
        self.proxies = {name: CuttingProxy(self.servers.stages[name].pm_port) for name in SERVERS}
        for proxy in self.proxies.values():
            ends.callback(proxy.close)
        self.stage.agents_port = self.proxies["n1"].port
        self.stage.other_ports = [self.proxies["n2"].port]
        self._engine = make_engine(self.database, folder)
        ends.callback(self._engine.dispose)
        extra = f"spool_bytes = {SPOOL_BYTES}\n[reconnect]\nmax_s = 0.5"
        self.agents = [
            Agent(
                name,
                {f"vol-{name}": str(self.stage.folder / f"{name}.img")},
                extra_toml=extra,
                environment={**DEBUG, STEP_FILE: str(self.step_file(name))},
            )
            for name in GATEWAYS
        ]
        self.clients = Clients(self.stage, self.agents)

    def step_file(self, name: str) -> Path:
        """Of a node or a gateway: by how many microseconds its wall clock is stepped."""
        return self.folder / f"{name}.step"

    def start(self) -> None:
        """Everything, up to the first cuts in SQL."""
        for name in NODES:
            self.servers.stages[name].environment[STEP_FILE] = str(self.step_file(name))
            self.servers.start(name)
        self.wait(self.servers.acting, "a server that acts")
        for agent in self.agents:
            (self.stage.folder / f"{agent.name}.img").write_bytes(bytes(8 << 20))
            self.stage.start_agent(agent)
        self.clients.start()
        self.wait(lambda: self.stored_under() > 0, "cuts of all gateways in SQL")

    def wait(self, ready: Callable[[], Any], what: str, limit_s: float = LIMIT_S) -> Any:
        """See ``Stage.wait``."""
        return self.stage.wait(ready, what, limit_s=limit_s)

    def stored_under(self) -> int:
        """The fence under which each gateway's newest cuts are stored, the lowest of them; 0: none of one."""
        table = schema.ingest_watermark
        newest = select(func.max(table.c.fence)).group_by(table.c.gateway_id)
        with contextlib.suppress(Exception), self._engine.connect() as connection:
            found = [int(row[0]) for row in connection.execute(newest)]
            return min(found) if len(found) == len(GATEWAYS) else 0
        return 0  # the database is away, or has no schema yet

    def is_stored_under(self, fence: int) -> bool:
        """Whether each gateway's newest cuts are stored under it, or a higher one."""
        return self.stored_under() >= fence

    def losses(self) -> list[str]:
        """Events that say that cuts were lost."""
        table = schema.events
        with self._engine.connect() as connection:
            found = connection.execute(select(table.c.text).where(table.c.kind == "cuts-lost"))
            return [str(row[0]) for row in found]

    def held_fence(self, name: str) -> int:
        """The fence that a server has now; 0: it has none."""
        return LeaseFile(self.servers.stages[name].sockets / "run").read().held_fence or 0

    def is_alive(self, name: str) -> bool:
        """Whether the page of this server answers, whether it acts or not."""
        try:
            return self.servers.stages[name].client.get("/api/v1/alive", timeout=2.0).status_code == 200
        except httpx.HTTPError:
            return False

    def is_settled(self) -> bool:
        """One server acts and stores all gateways' cuts, the other one stands by, all nodes run."""
        acting = self.servers.acting()
        if acting is None or not all(self.is_alive(name) for name in SERVERS):
            return False
        states = [row["state"] for row in self.servers.stages[acting].get("nodes")["items"]]
        return sorted(states) == ["acts", "runs", "stands-by"] and self.stored_under() == self.held_fence(
            acting
        )


def takeover(folder: Path, times: int) -> tuple[dict[str, float], dict[str, Any]]:
    """So many deaths of the acting server; see the module."""
    lease_s, ours_s = [], []
    with contextlib.ExitStack() as ends:
        site = Site(folder, ends)
        site.start()
        ends.callback(site.clients.finish)
        for _ in range(times):
            site.wait(site.is_settled, "two servers and three nodes in order")
            dying = site.servers.acting()
            assert dying is not None  # it is settled
            next_one = next(name for name in SERVERS if name != dying)
            killed_s = time.monotonic()
            site.proxies[dying].stall(True)  # a machine without power sends no end of its connections
            site.servers.power_off(dying)
            held_s = _first(partial(site.held_fence, next_one))
            fence = site.held_fence(next_one)
            stored_s = _first(partial(site.is_stored_under, fence))
            lease_s.append(held_s - killed_s)
            ours_s.append(stored_s - held_s)
            site.servers.start(dying)
            site.proxies[dying].stall(False)
    all_s = [one + other for one, other in zip(lease_s, ours_s, strict=True)]
    values = {
        "takeover_p50_s": statistics.median(all_s),
        "takeover_worst_s": max(all_s),
        "takeover_ours_s": max(ours_s),
    }
    return values, {"takeover": {"lease_s": lease_s, "ours_s": ours_s}}


def _first(ready: Callable[[], object]) -> float:
    """When it was so first.

    Raises:
        TimeoutError: it is not within ``LIMIT_S``.
    """
    began_s = time.monotonic()
    while not ready():
        if time.monotonic() > began_s + LIMIT_S:
            raise TimeoutError(f"no takeover within {LIMIT_S:g} s")
        time.sleep(LOOK_S)
    return time.monotonic()
