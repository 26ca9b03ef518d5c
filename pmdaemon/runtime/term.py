"""The term in which a process may act, where several servers take over from each other.

The supervisor gives the number of the term (the *fence*) to what it starts in it, in the environment. Until
when it lasts is in ``RUNTIME_DIR/lease.json``, which the process that renews the lease writes
(``sla_server.lease_file``). A machine may stand still between any two statements, and go on after another
server has begun: what must not leave it then asks ``is_on`` directly before. The supervisor ends such a
process, too, but only once it has noticed.

Times are of the clock since boot, which goes on while processes stand still and while the machine sleeps.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from pmdaemon.runtime.clock import boot_ns

FENCE: Final = "SLA_FENCE"
"""Environment: the number of the term. Without it a server is alone, and acts always."""
LEASE_FILE: Final = "lease.json"
"""In the runtime directory."""


class Term:
    """Whether it still lasts. Thread: any; what is kept is only what the file has said.

    Args:
        runtime_dir: of the server.
        fence: of the term; None: there are no other servers.
        now_ns: the clock.
    """

    def __init__(self, runtime_dir: Path, fence: int | None, now_ns: Callable[[], int] = boot_ns) -> None:
        self._path = runtime_dir / LEASE_FILE
        self._fence = fence
        self._now_ns = now_ns
        self._until_ns = 0

    @classmethod
    def of_environment(cls, runtime_dir: Path) -> Term:
        """The one in which the supervisor has started this process."""
        number = os.environ.get(FENCE, "")
        return cls(runtime_dir, int(number) if number.isdecimal() else None)

    def is_on(self) -> bool:
        """Whether it lasts now. The file is read again when what it said last has passed."""
        if self._fence is None or self._now_ns() < self._until_ns:
            return True
        try:
            found = json.loads(self._path.read_bytes())
            self._until_ns = int(found["until_ns"]) if int(found["fence"]) == self._fence else 0
        except (OSError, ValueError, KeyError, TypeError):  # the supervisor ends this process soon
            self._until_ns = 0
        return self._now_ns() < self._until_ns


ALWAYS: Final = Term(Path(), None)
