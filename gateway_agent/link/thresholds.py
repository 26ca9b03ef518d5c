"""The threshold set in force, kept in ``state_dir/thresholds.json``.

Planes that come up before the server is reached again count against it. A file that cannot be written or read
costs little: the server sends the set on registration anyway.
"""

from __future__ import annotations

from pathlib import Path

import structlog

from gateway_agent.link import state_files
from gateway_agent.link.errors import StateFileBroken
from pmdaemon.errors import MalformedFrame
from pmdaemon.wire.messages.agent import Thresholds

log = structlog.get_logger("thresholds")


class ThresholdStore:
    """Holds the newest set. Thread: the link's loop only. ``path`` None keeps it in memory only."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.current: Thresholds | None = self._load()

    def _load(self) -> Thresholds | None:
        if self._path is None:
            return None
        try:
            value = state_files.read_json(self._path, "It is begun anew")
            return Thresholds.parse(value) if isinstance(value, dict) else None
        except (StateFileBroken, MalformedFrame) as exc:
            log.error("thresholds-forgotten", problem=str(exc))
            return None

    def replace(self, received: Thresholds) -> None:
        """Keep another set.

        Raises:
            OSError: it is in force but could not be written.
        """
        self.current = received
        if self._path is not None:
            state_files.write_json(self._path, received.header(), synced=True)
