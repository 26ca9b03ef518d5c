"""A cluster of real nodes on loopback, for tests and demonstrations.

Each node is the product's own ``Node`` on ports of its own; kill one, start it again, ask for the addresses.
The engine is the one that setup.sh installs.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import nats
import nats.errors
import nats.js.errors

from pmdaemon.runtime.children import stop_together
from pmdaemon.runtime.clock import Deadline, SystemClock
from pmdaemon.runtime.config import parse_address
from pmdaemon.runtime.stop import ParentPipe
from sla_server.cluster import engine as engines
from sla_server.cluster.config import ClusterConfig, PeerConfig
from sla_server.cluster.node import Node
from sla_server.cluster.server_conf import Secrets
from tests.support.node_links import NodeLinks, hidden_host
from tests.support.ports import free_port

READY_S: Final = 120.0
"""Elections take seconds; a machine that does other things takes longer."""


class LocalCluster:
    """So many nodes of one cluster, running; ``close`` or ``with`` ends them.

    Args:
        size: how many nodes.
        engine: the program; default: the one that the product finds.
        store_bytes: what a node may store.
        has_links: nodes reach each other through ``links``, which can be cut.

    Attributes:
        directory: of all nodes, removed at the end.
        nodes: ``n1``, ``n2`` ...
    """

    def __init__(
        self,
        size: int = 3,
        *,
        engine: Path | None = None,
        sync: str = "always",
        store_bytes: int = 1 << 30,
        has_links: bool = False,
    ) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="sla-cluster-"))
        self.secrets = Secrets(*(secrets.token_hex(16) for _ in range(3)))
        self.engine = engines.choose(engine, sync)
        self._pipe = ParentPipe()
        self._clock = SystemClock()
        places = {
            f"n{number}": PeerConfig(
                name=f"n{number}", listen=f"127.0.0.1:{free_port()}", routes=f"127.0.0.1:{free_port()}"
            )
            for number in range(1, size + 1)
        }
        ports = {name: parse_address(place.routes)[1] for name, place in places.items()}
        self.links = NodeLinks(ports if has_links else {})
        self.nodes: list[Node] = []
        for number, (name, place) in enumerate(places.items(), 1):
            own_routes = f"{hidden_host(number)}:{ports[name]}" if has_links else place.routes
            config = ClusterConfig.model_validate(
                {
                    "name": "test",
                    "node": name,
                    "site": f"site-{name}",
                    "listen": place.listen,
                    "routes": own_routes,
                    "peers": [peer for peer in places.values() if peer.name != name],
                    "store_bytes": store_bytes,
                    "sync": sync,
                }
            )
            directory = self.directory / name
            self.nodes.append(Node(config, directory, self.engine, self.secrets, self._pipe, self._clock))
        for node in self.nodes:
            node.start()

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        """Of the first node, with user and password: what ``nats.connect`` takes."""
        return self.nodes[0].url()

    @property
    def urls(self) -> list[str]:
        """Of all nodes."""
        return [node.url() for node in self.nodes]

    def kill(self, index: int) -> None:
        """SIGKILL one node and wait until it is gone."""
        child = self.nodes[index].child
        child.signal(signal.SIGKILL)
        child.wait(None)

    def stop(self, indexes: Sequence[int] = ()) -> None:
        """Stop these nodes, or all, in order."""
        stop_together([self.nodes[index].child for index in indexes or range(len(self.nodes))], self._clock)

    def pause(self, index: int) -> None:
        """SIGSTOP: the node answers no more, its connections stay."""
        self.nodes[index].child.signal(signal.SIGSTOP)

    def resume(self, index: int) -> None:
        """SIGCONT."""
        self.nodes[index].child.signal(signal.SIGCONT)

    def start(self, index: int) -> None:
        """Start a node again that was killed or stopped, with what it had stored."""
        self.nodes[index].start()

    def restore(self) -> None:
        """Start every node that does not run, and wait until the cluster is ready."""
        for node in self.nodes:
            if not node.child.is_running:
                node.start()
        self.wait_ready()

    def wait_ready(self) -> None:
        """Wait until streams can be made: a majority is there and has elected a leader.

        Raises:
            TimeoutError: it has none after ``READY_S``.
        """
        asyncio.run(self._wait_ready())

    async def _wait_ready(self) -> None:
        deadline = Deadline(READY_S)
        problem = ""
        while not deadline.passed:
            try:
                client = await nats.connect(
                    [node.url() for node in self.nodes if node.child.is_running],
                    allow_reconnect=False,
                    connect_timeout=5,
                )
            except (OSError, TimeoutError, nats.errors.Error) as exc:
                problem = str(exc)
                await asyncio.sleep(0.05)
                continue
            try:
                await client.jetstream(timeout=5).account_info()
                return
            except (TimeoutError, nats.errors.Error) as exc:  # those of JetStream are of them
                problem = str(exc)
                await asyncio.sleep(0.05)
            finally:
                await client.close()
        raise TimeoutError(f"the cluster is not ready after {READY_S:g} s: {problem}")

    def close(self) -> None:
        """End all nodes at once, with SIGKILL, and remove what they stored."""
        for index, node in enumerate(self.nodes):
            if node.child.is_running:
                self.kill(index)
        self._pipe.close()
        self.links.close()
        shutil.rmtree(self.directory, ignore_errors=True)


def configurations(directory: Path, size: int = 3, *, tls: bool = False) -> list[Path]:
    """Files of so many servers whose nodes are one cluster on loopback; each has a directory of its own.

    The first has the certificate authority.
    """
    places = {f"n{number}": (free_port(), free_port()) for number in range(1, size + 1)}
    paths = []
    for name, (listen, routes) in places.items():
        home = directory / name
        home.mkdir(parents=True)
        lines = [
            f'data_dir = "{home}/data"',
            f'runtime_dir = "{home}/run"',
            "[cluster]",
            'name = "demo"',
            f'node = "{name}"',
            f'site = "site-{name}"',
            f'listen = "127.0.0.1:{listen}"',
            f'routes = "127.0.0.1:{routes}"',
            f"store_bytes = {1 << 30}",
            f"tls = {{enabled = {str(tls).lower()}}}",
        ]
        for peer, (peer_listen, peer_routes) in places.items():
            if peer != name:
                lines += [
                    "[[cluster.peers]]",
                    f'name = "{peer}"',
                    f'listen = "127.0.0.1:{peer_listen}"',
                    f'routes = "127.0.0.1:{peer_routes}"',
                ]
        path = home / "config.toml"
        path.write_text("\n".join(lines) + "\n")
        paths.append(path)
    return paths
