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
from tests.support.node_links import NodeLinks, hidden_host
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


def _mount(path: Path, size_bytes: int, ends: contextlib.ExitStack) -> bool:
    """A tmpfs there until the end, if this user may."""
    path.mkdir(parents=True, mode=0o700)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes},mode=0700", "tmpfs", str(path)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        return False
    ends.callback(subprocess.run, ["umount", "-l", str(path)], check=False)
    return True


class Servers:
    """Servers ``n1`` and ``n2``, and a node ``n3`` without a server; agents of ``n1`` know both servers.

    Args:
        folder: for all of them.
        database_url: of PostgreSQL.
        ends: closes everything.
        lease_s: of the lease; None: the default.
        toml: more lines of each server's file.
        has_links: nodes reach each other through ``links``, which can be cut and slowed down.
        data_bytes: size of each node's data directory, a tmpfs of its own (needs root); 0: none of its own.

    Attributes:
        has_disks: whether each node has one.
        stages: of each node, by name.
        links: between the nodes.
    """

    def __init__(
        self,
        folder: Path,
        database_url: str,
        ends: contextlib.ExitStack,
        *,
        lease_s: float | None = None,
        toml: str = "",
        has_links: bool = False,
        data_bytes: int = 0,
    ) -> None:
        self._has_links = has_links
        self._lease_s = lease_s
        self._ports = {name: (free_port(), free_port()) for name in NODES}
        self.links = NodeLinks({name: ports[1] for name, ports in self._ports.items()} if has_links else {})
        ends.callback(self.links.close)
        self._database_url = database_url
        # Before the stages: they end first, and use them until then.
        self.has_disks = bool(data_bytes) and all(
            _mount(folder / name / "data", data_bytes, ends) for name in NODES
        )
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
        for name in SERVERS:
            self.stages[name].environment["SLA__PMDAEMON__FORWARDED"] = f"127.0.0.1:{free_port()}"
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
        own = hidden_host(NODES.index(node) + 1) if self._has_links else "127.0.0.1"
        lines += [f'listen = "127.0.0.1:{listen}"', f'routes = "{own}:{routes}"']
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
            command = ("sla_server", "node", "--config", str(stage.config_path))
            self._processes[name] = stage.spawn("node", *command, environment=stage.environment)

    def runs(self, name: str) -> bool:
        """Whether it was started, and not powered off since."""
        return name in self._processes

    def has_ended(self, name: str) -> bool:
        """Whether it has ended by itself."""
        return self._processes[name].poll() is not None

    def pid(self, name: str) -> int:
        """Of the supervisor, or of the node's process."""
        return self._processes[name].pid

    def stop(self, name: str) -> None:
        """In order."""
        self.stages[name].stop(name, self._processes.pop(name))

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

    def fill_disk(self, name: str) -> Path:
        """Use up what the data directory of a node has left; remove the file that is returned to free it."""
        ballast = self.stages[name].folder / "data" / "ballast"
        free = os.statvfs(ballast.parent)
        with contextlib.suppress(OSError), ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize)
        return ballast

    def power_off(self, name: str) -> None:
        """All of a server at once, as a machine that loses its power; none of it notices another's end."""
        process = self._processes.pop(name)
        send([process.pid], signal.SIGSTOP)  # it starts nothing that would not be found
        pids = tree_of(process.pid)
        send(pids, signal.SIGSTOP)
        send(pids, signal.SIGKILL)
        process.wait()

    def engines(self, name: str) -> list[int]:
        """Processes of the engine of a node."""
        found = []
        for pid in tree_of(self.pid(name)):
            with contextlib.suppress(OSError):
                if b"nats-server" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return found

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
