"""Space of this host's pools: from the thread that reads it to the server.

A server that does not know SPACE is sent none (WELCOME says whether it does). While there is no session the
newest reading of each pool waits here; an older one is of no use to anybody.

Any reading is the end of a source's failure: also of one that the link before has reported.
"""

from __future__ import annotations

from collections.abc import Collection

from gateway_agent.config import AgentConfig
from gateway_agent.link.conditions import Conditions
from pmdaemon.space.watcher import SourceBack, SourceFailed, SpaceOutcome
from pmdaemon.wire.messages.agent import Welcome
from pmdaemon.wire.messages.space import SPACE, Space
from pmdaemon.wire.session import AgentSession, SessionState


class SpaceReports:
    """State: whether this session's server takes SPACE; readings not sent yet. Thread: the link's loop."""

    def __init__(self, session: AgentSession, conditions: Conditions) -> None:
        self._session = session
        self._conditions = conditions
        self._is_wanted = False
        self._waiting: dict[str, Space] = {}

    def welcomed(self, welcome: Welcome) -> None:
        """A session begins."""
        self._is_wanted = SPACE in welcome.features

    def keep_only(self, sources: Collection[str]) -> None:
        """These are read by this link, and no others."""
        text = "is no source of space any more"
        self._conditions.keep_only("space-source", sources, "space-source-back", text)

    def take(self, outcome: SpaceOutcome) -> None:
        """What the thread has read, or could not read."""
        match outcome:
            case Space():
                self._waiting[outcome.pool] = outcome
                self._is_back(outcome.pool)
            case SourceFailed():
                text = f"the space of {outcome.source} cannot be read: {outcome.problem}"
                self._conditions.begin("space-source", "space-source-failed", "warning", outcome.source, text)
            case SourceBack():
                self._is_back(outcome.source)

    def _is_back(self, source: str) -> None:
        text = f"the space of {source} can be read again"
        self._conditions.end("space-source", "space-source-back", source, text)

    def flush(self) -> None:
        """Send what waits, if the server takes it now."""
        if self._waiting and self._is_wanted and self._session.state is SessionState.POLLING:
            waiting, self._waiting = self._waiting, {}
            for space in waiting.values():
                self._session.send(space)


def exported_paths(config: AgentConfig) -> dict[str, str]:
    """Path of a file or device to the volume that an export serves from it."""
    return {export.file: export.volume for export in config.export if export.file}
