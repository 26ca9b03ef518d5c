"""One node: the engine's file and directory, and the engine as a child.

    DIRECTORY/            mode 0700
      credentials.json    secrets of the cluster (``membership``)
      tls/                authority and certificate of this node, if TLS is enabled
      engine.conf         written at each start, mode 0600
      jetstream/          what the engine stores; only it reads and writes there

SIGTERM stops the engine in order: it hands over what it leads and syncs. SIGKILL loses nothing that was
acknowledged with ``sync = "always"``.

Thread: the one that makes it, which must live as long as the engine should (``launch``).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

from pmdaemon.runtime.children import Child, ChildKind
from pmdaemon.runtime.clock import Clock
from pmdaemon.runtime.files import make_directory, write_whole
from pmdaemon.runtime.stop import ParentPipe
from sla_server.cluster import server_conf
from sla_server.cluster.config import ClusterConfig
from sla_server.cluster.engine import Engine
from sla_server.cluster.server_conf import Secrets, TlsFiles

ENGINES: Final = ChildKind("engine", max_wait_s=10.0, healthy_s=30.0, stop_s=30.0)
"""To stop, the engine hands over what it leads and syncs; that waits for the disk."""
CONF: Final = "engine.conf"
STORE: Final = "jetstream"


class Node:
    """See the module.

    Args:
        directory: of the node.
        tls: its files, if TLS is enabled.

    Attributes:
        engine: that it runs with.
        child: the process.
    """

    def __init__(
        self,
        config: ClusterConfig,
        directory: Path,
        engine: Engine,
        secrets: Secrets,
        pipe: ParentPipe,
        clock: Clock,
        *,
        tls: TlsFiles | None = None,
    ) -> None:
        self.config = config
        self.directory = directory
        self.engine = engine
        self._secrets = secrets
        self._tls = tls
        program = [str(engine.path), "-c", str(directory / CONF)]
        launcher = [sys.executable, "-m", "sla_server.cluster.launch", str(os.getpid())]
        self.child = Child(ENGINES, config.node, [*launcher, *program], pipe, clock)

    def start(self) -> bool:
        """Write the file and start the engine; False if the host cannot just now, see ``Child.start``.

        Raises:
            OSError: the directory or the file cannot be written.
        """
        make_directory(self.directory, 0o700)
        make_directory(self.directory / STORE, 0o700)
        made = server_conf.text(self.config, self.engine, self._secrets, self.directory / STORE, self._tls)
        write_whole(self.directory / CONF, made)
        return self.child.start()

    def url(self) -> str:
        """Where the product's clients connect, with its secret: for programs, never for a log."""
        return f"nats://{server_conf.PRODUCT_USER}:{self._secrets.product}@{self.config.listen}"
