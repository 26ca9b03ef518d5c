"""Two servers over one PostgreSQL and one archive, and a third node, as processes on this machine.

Used by the end-to-end test and by the benchmarks of takeovers. A server is a tree of processes; ``power_off``
and ``freeze`` meet all of it, as the loss or the pause of its machine would. To kill the supervisor alone is
something else: its parts notice that, and stop in order, with everything stored.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from sqlalchemy import text

from sla_server.db.config import DatabaseConfig
from sla_server.db.engine import make_engine
from sla_server.lease_file import LeaseFile
from tests.support.ports import free_port
from tests.support.stage import Stage

NODES: Final = ("n1", "n2", "n3")
SERVERS: Final = NODES[:2]


def tree_of(pid: int) -> list[int]:
    """A process and all that descend from it, that one first."""
    children: dict[int, list[int]] = defaultdict(list)
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = path.read_text().rpartition(")")[2].split()[1]
            children[int(parent)].append(int(path.parent.name))
    found = [pid]
    for each in found:
        found += children[each]
    return found


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """A signal to all of them that are still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


class Servers:
    """Servers ``n1`` and ``n2``, and a node ``n3`` without a server; agents of ``n1`` know both servers.

    Args:
        folder: for all of them.
        database_url: of PostgreSQL.
        ends: closes everything.
        lease_s: of the lease; None: the default.
        toml: more lines of each server's file.
    """

    def __init__(
        self,
        folder: Path,
        database_url: str,
        ends: contextlib.ExitStack,
        *,
        lease_s: float | None = None,
        toml: str = "",
    ) -> None:
        self._lease_s = lease_s
        self._ports = {name: (free_port(), free_port()) for name in NODES}
        self._database_url = database_url
        self.stages = {
            name: ends.enter_context(
                Stage(
                    folder / name,
                    interval_s=0.5,
                    database_url=database_url,
                    database_toml=f'parquet_dir = "{folder}/parquet"\n',
                    extra_toml=self._cluster_toml(name) + toml,
                )
            )
            for name in NODES
        }
        first = self.stages["n1"]
        first.sla("cluster", "init")
        for name in NODES[1:]:
            invitation = folder / f"{name}.invitation"
            first.sla("cluster", "invite", name, str(invitation))
            self.stages[name].sla("cluster", "join", str(invitation))
        first.other_ports = [self.stages["n2"].pm_port]
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def _cluster_toml(self, node: str) -> str:
        lines = ["[cluster]", f'node = "{node}"', f"store_bytes = {1 << 28}"]
        listen, routes = self._ports[node]
        lines += [f'listen = "127.0.0.1:{listen}"', f'routes = "127.0.0.1:{routes}"']
        lines += ["[cluster.takeover]", "enabled = true"]
        lines += [f"lease_s = {self._lease_s}"] if self._lease_s else []
        for name, (listen, routes) in self._ports.items():
            if name != node:
                lines += ["[[cluster.peers]]", f'name = "{name}"']
                lines += [f'listen = "127.0.0.1:{listen}"', f'routes = "127.0.0.1:{routes}"']
        return "\n".join(lines) + "\n"

    def start(self, name: str) -> None:
        """The server of this name, or the node without one."""
        stage = self.stages[name]
        if name in SERVERS:
            self._processes[name] = stage.spawn_server()
        else:
            self._processes[name] = stage.spawn(
                "node", "sla_server", "node", "--config", str(stage.config_path)
            )

    def runs(self, name: str) -> bool:
        """Whether it was started, and not powered off since."""
        return name in self._processes

    def acts(self, name: str) -> bool:
        """Whether the server of this name has the lease, and answers."""
        stage = self.stages[name]
        held = LeaseFile(stage.sockets / "run").read().held_fence
        return held is not None and stage.is_answering()

    def acting(self) -> str | None:
        """The one that acts; None: none does."""
        return next((name for name in SERVERS if self.acts(name)), None)

    @contextlib.contextmanager
    def held_up(self) -> Iterator[None]:
        """No server can commit statistics meanwhile: what comes in stays in its queue."""
        engine = make_engine(DatabaseConfig(url=self._database_url), Path())
        with engine.connect() as connection:
            connection.execute(text("LOCK TABLE rollups IN EXCLUSIVE MODE"))
            yield
            connection.rollback()
        engine.dispose()

    def power_off(self, name: str) -> None:
        """All of a server at once, as a machine that loses its power; none of it notices another's end."""
        process = self._processes.pop(name)
        send([process.pid], signal.SIGSTOP)  # it starts nothing that would not be found
        pids = tree_of(process.pid)
        send(pids, signal.SIGSTOP)
        send(pids, signal.SIGKILL)
        process.wait()

    def freeze(self, name: str) -> list[int]:
        """All of a server stands still until these are given to ``thaw``."""
        process = self._processes[name]
        send([process.pid], signal.SIGSTOP)
        pids = tree_of(process.pid)
        send(pids, signal.SIGSTOP)
        return pids

    @staticmethod
    def thaw(pids: Iterable[int]) -> None:
        """They go on as if nothing had been."""
        send(pids, signal.SIGCONT)
