"""The lease of the acting server, as the process ``cluster`` has published it for the other processes.

    RUNTIME_DIR/lease.json   {"node": "n1", "holder": "n1", "fence": 1795861200, "until_ns": 5123456789,
                              "lease_s": 6.0, "heard_ns": 5121456789, "page": "https://sla-1:8411",
                              "cluster": "9f86d081884c7d65", "links": "192.0.2.1:7412",
                              "gave_up": "n2", "why": "has not reached the database for 31 s ..."}

Times are of the clock since boot, which all processes of a machine have alike. When ``until_ns`` has passed,
the lease is not held, whatever has become of the process that wrote it. ``holder`` is whom the cluster named
at ``heard_ns``; some seconds later that is no news of who acts. Writing and reading need no library of the
cluster. What a crash can leave: a file that lapses; one of a boot before this one is removed as the
server starts, before the process ``cluster`` does.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from pmdaemon.runtime.clock import boot_ns
from pmdaemon.runtime.files import write_whole
from pmdaemon.runtime.term import FENCE, LEASE_FILE

__all__ = ["FENCE", "LeaseFile", "LeaseState"]

LEAST_FRESH_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class LeaseState:
    """What this server knows of the lease.

    Attributes:
        node: of this server.
        holder: the node whose server acts, or did last; "": not known.
        fence: of its term.
        until_ns: until when this server has it; 0: it has not.
        lease_s: of the holder; 0: not known.
        heard_ns: when the cluster named the holder last; 0: never.
        page: where the holder's page is; "": not known.
        cluster: identity of the cluster whose lease it is.
        links: where the holder takes agents that others forward; "": it takes none.
        gave_up: the node whose server gave the lease up to the holder by itself; "": none.
        why: it did, in words after "it".
    """

    node: str = ""
    holder: str = ""
    fence: int = 0
    until_ns: int = 0
    lease_s: float = 0.0
    heard_ns: int = 0
    page: str = ""
    cluster: str = ""
    links: str = ""
    gave_up: str = ""
    why: str = ""

    @property
    def held_fence(self) -> int | None:
        """The fence with which this server acts; None: it stands by."""
        return self.fence if self.until_ns > boot_ns() else None

    @property
    def heard_s(self) -> float | None:
        """How long ago the cluster named the holder; None: never."""
        return (boot_ns() - self.heard_ns) / 1e9 if self.heard_ns else None

    @property
    def acting(self) -> str:
        """The node whose server acts; "": not known.

        This server's own lease may have lapsed. Another's is known while the cluster answers: once its record
        is as old as ``lease_s`` and a quarter, this server takes the lease itself.
        """
        if self.held_fence is not None:
            return self.node
        return self.holder if self.is_fresh and self.holder != self.node else ""

    @property
    def is_fresh(self) -> bool:
        """Whether the cluster has named the holder so lately that it is the holder."""
        return self.heard_s is not None and self.heard_s < max(LEAST_FRESH_S, 2 * self.lease_s)

    def write(self, runtime_dir: Path) -> None:
        """Publish it.

        Raises:
            OSError: it cannot be written; what is there lapses.
        """
        write_whole(runtime_dir / LEASE_FILE, json.dumps(asdict(self)))


class LeaseFile:
    """Reads it, as often as asked.

    Args:
        runtime_dir: of the server.
    """

    def __init__(self, runtime_dir: Path) -> None:
        self._path = runtime_dir / LEASE_FILE
        self._written = (0, 0)
        self._state = LeaseState()

    def read(self) -> LeaseState:
        """The newest state; that nothing is held if there is none that can be read."""
        try:
            found = self._path.stat()
            written = found.st_mtime_ns, found.st_ino  # the clock of files goes in steps of some milliseconds
            if written != self._written:
                self._state, self._written = _parsed(self._path.read_bytes()), written
        except (OSError, ValueError, KeyError, TypeError):
            self._state, self._written = LeaseState(), (0, 0)
        return self._state

    def remove(self) -> None:
        """Before the process that writes it starts."""
        self._path.unlink(missing_ok=True)


def _parsed(data: bytes) -> LeaseState:
    found = json.loads(data)
    return LeaseState(
        str(found["node"]),
        str(found["holder"]),
        int(found["fence"]),
        int(found["until_ns"]),
        float(found.get("lease_s", 0.0)),  # a former release has no more than the above
        int(found.get("heard_ns", 0)),
        str(found.get("page", "")),
        str(found.get("cluster", "")),
        *(str(found.get(name, "")) for name in ("links", "gave_up", "why")),
    )
