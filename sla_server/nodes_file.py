"""The nodes of the cluster, as the process ``cluster`` has seen them last, for the API of this server.

    RUNTIME_DIR/nodes.json   {"at_us": ..., "nodes": [{"name": "n1", "site": "berlin", "version": "2.15.1",
                              "release": "0.1.0", "takes_over": true, "page": "https://sla-1:8411"}]}

Written every ten seconds while this node's engine answers; whoever reads an old one knows nothing of the
nodes. Writing and reading need no library of the cluster. What a crash can leave: a file that is too old.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Final

from pmdaemon.runtime.files import write_whole

NAME: Final = "nodes.json"
FRESH_US: Final = 45_000_000
"""Four rounds, of which one may take five seconds."""


@dataclass(frozen=True, slots=True)
class RunningNode:
    """A node that has answered.

    Attributes:
        version: of its engine.
        release: of its server; "": not known, as of all that follows.
        takes_over: whether its server is one of several over one database.
        page: where that server's page is.
    """

    name: str
    site: str
    version: str
    release: str = ""
    takes_over: bool = False
    page: str = ""


def write_nodes(runtime_dir: Path, nodes: Sequence[RunningNode], now_us: int) -> None:
    """Publish them.

    Raises:
        OSError: the file cannot be written.
    """
    write_whole(runtime_dir / NAME, json.dumps({"at_us": now_us, "nodes": [asdict(node) for node in nodes]}))


def read_nodes(runtime_dir: Path, now_us: int) -> dict[str, RunningNode]:
    """Nodes that run, by name; empty while nothing is known of them."""
    try:
        found = json.loads((runtime_dir / NAME).read_bytes())
        if not 0 <= now_us - found["at_us"] < FRESH_US:
            return {}
        names = [each.name for each in fields(RunningNode)]
        nodes = [
            RunningNode(**{name: node[name] for name in names if name in node}) for node in found["nodes"]
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return {node.name: node for node in nodes}
