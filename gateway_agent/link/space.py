"""Space of this host's pools: from the thread that reads it to the server.

A server that does not know SPACE is sent none (WELCOME says whether it does). While there is no session the
newest reading of each pool waits here; an older one is of no use to anybody.
"""

from __future__ import annotations

from gateway_agent.config import AgentConfig
from gateway_agent.link.alerts import Alerts
from pmdaemon.space.watcher import SourceBack, SourceFailed, SpaceOutcome
from pmdaemon.wire.messages.agent import Welcome
from pmdaemon.wire.messages.space import SPACE, Space
from pmdaemon.wire.session import AgentSession, SessionState


class SpaceReports:
    """State: whether this session's server takes SPACE; readings not sent yet. Thread: the link's loop."""

    def __init__(self, session: AgentSession, alerts: Alerts) -> None:
        self._session = session
        self._alerts = alerts
        self._is_wanted = False
        self._waiting: dict[str, Space] = {}

    def welcomed(self, welcome: Welcome) -> None:
        """A session begins."""
        self._is_wanted = SPACE in welcome.features

    def take(self, outcome: SpaceOutcome) -> None:
        """What the thread has read, or could not read."""
        match outcome:
            case Space():
                self._waiting[outcome.pool] = outcome
            case SourceFailed():
                text = f"the space of {outcome.source} cannot be read: {outcome.problem}"
                self._alerts.begin("space-source", "space-source-failed", "warning", outcome.source, text)
            case SourceBack():
                text = f"the space of {outcome.source} can be read again"
                self._alerts.end("space-source", "space-source-back", outcome.source, text)

    def flush(self) -> None:
        """Send what waits, if the server takes it now."""
        if self._waiting and self._is_wanted and self._session.state is SessionState.POLLING:
            waiting, self._waiting = self._waiting, {}
            for space in waiting.values():
                self._session.send(space)


def exported_paths(config: AgentConfig) -> dict[str, str]:
    """Path of a file or device to the volume that an export serves from it."""
    return {export.file: export.volume for export in config.export if export.file}
