"""One node: the engine's file and directory, and the engine as a child.

    DIRECTORY/            mode 0700
      credentials.json    secrets of the cluster (``membership``)
      tls/                authority and certificate of this node, if TLS is enabled
      parameters.json     acquirable parameters (``documents``), mode 0600
      accounts.json       accounts with their roles and sealed secrets, mode 0600
      destinations.json   destinations that accounts may have to do with, as last seen
      engine.conf         written at each start and each change of those, mode 0600
      jetstream/          what the engine stores; only it reads and writes there, but for ``alone``: empty,
                          the engine has run without others

SIGTERM stops the engine in order: it hands over what it leads and syncs. SIGKILL loses nothing that was
acknowledged with ``sync = "always"``.

Thread: the one that makes it, which must live as long as the engine should (``launch``); ``write_conf`` from
the agent's, too. Lock ``_lock`` guards ``engine.conf`` and ``_shared``.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pmdaemon.runtime.children import Child, ChildKind
from pmdaemon.runtime.clock import Clock
from pmdaemon.runtime.files import make_directory, write_whole
from pmdaemon.runtime.stop import ParentPipe
from sla_server.cluster import access, parameters, server_conf
from sla_server.cluster.config import ClusterConfig
from sla_server.cluster.engine import Engine
from sla_server.cluster.errors import StoredAlone
from sla_server.cluster.server_conf import Secrets, TlsFiles
from sla_server.cluster.server_facts import ServerFacts

ENGINES: Final = ChildKind("engine", max_wait_s=10.0, healthy_s=30.0, stop_s=30.0)
"""To stop, the engine hands over what it leads and syncs; that waits for the disk."""
CONF: Final = "engine.conf"
STORE: Final = "jetstream"
ALONE: Final = "alone"
_STREAMS: Final = Path("jetstream/SLA/streams")
_AMONG_OTHERS: Final = Path("jetstream/SYS/_js_/_meta_")
"""Where an engine that is one of several keeps what all of them know."""


@dataclass(frozen=True, slots=True)
class SharedSettings:
    """What all nodes have alike, as the engine is given it.

    Attributes:
        values: acquirable parameters, all of them.
        users: entries of the engine's file for accounts.
    """

    values: Mapping[str, parameters.Value]
    users: tuple[Mapping[str, Any], ...] = ()


class Node:
    """See the module.

    Args:
        directory: of the node.
        tls: its files, if TLS is enabled.
        shared: what the nodes share, as it holds here; default: nothing was ever set.
        facts: what the server around it says of itself.

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
        shared: SharedSettings | None = None,
        facts: ServerFacts | None = None,
    ) -> None:
        self.config = config
        self.directory = directory
        self.engine = engine
        self._secrets = secrets
        self._tls = tls
        self._lock = threading.Lock()
        self._shared = shared or SharedSettings(parameters.values({}))
        self._tags = facts.tags() if facts else []
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
        self.write_conf()
        return self.child.start()

    def write_conf(self, shared: SharedSettings | None = None) -> None:
        """Write the engine's file, which it reads when it starts and when it is asked to.

        ``shared`` is new; None: what holds.

        Raises:
            OSError: it cannot be written; the former file and settings stay.
        """
        with self._lock:
            wanted = shared or self._shared
            made = server_conf.text(
                self.config,
                self.engine,
                self._secrets,
                self.directory / STORE,
                self._tls,
                wanted.values,
                wanted.users,
                self._tags,
            )
            write_whole(self.directory / CONF, made)
            self._shared = wanted

    def url(self) -> str:
        """Where the product's clients connect, with its secret: for programs, never for a log."""
        return f"nats://{access.PRODUCT_USER}:{self._secrets.product}@{self.config.listen}"


def check_store(config: ClusterConfig, directory: Path) -> None:
    """See that a node which becomes one of several has stored nothing alone; note if it runs alone.

    To the engine that is another kind of store: what the others do not know of is an orphan, which it removes
    soon after the start, messages and all.

    Args:
        config: of the node.
        directory: likewise.

    Raises:
        StoredAlone: it has.
        OSError: the store cannot be read or written.
    """
    store = directory / STORE
    mark = store / ALONE
    if not config.peers:
        make_directory(directory, 0o700)
        make_directory(store, 0o700)
        write_whole(mark, "", synced=True)
        return
    folder = store / _STREAMS
    streams = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    if streams and (mark.exists() or not (store / _AMONG_OTHERS).exists()):
        raise StoredAlone(config.node, store, streams)
    mark.unlink(missing_ok=True)
